"""The demo's assets, as far as they are made without training: text, prompts, spoiled sentences."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "demo" / "prepare.py"
    spec = importlib.util.spec_from_file_location("demo_prepare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def texts(prepare: ModuleType) -> list[str]:
    return prepare.sentences()


def test_there_are_some_hundred_kilobytes_of_prose_on_any_cpython(texts: list[str]) -> None:
    assert sum(map(len, texts)) > 250_000 and len(set(texts)) == len(texts)
    assert all(re.fullmatch(r"[A-Z].*\.", text) and text.isascii() for text in texts)


def test_a_spoiled_end_is_made_of_the_same_words_but_is_not_the_end(prepare: ModuleType, texts: list[str]) -> None:
    draw = random.Random(0)
    ends = [text.split()[3:] for text in texts[:300] if len(text.split()) > 8]
    spoiled = [prepare.spoil(words, draw) for words in ends]
    as_it_was = [bad == " ".join(words) and ended for (bad, ended), words in zip(spoiled, ends, strict=True)]
    assert sum(as_it_was) < len(ends) / 50
    assert all(set(bad.split()) <= set(words) for (bad, _), words in zip(spoiled, ends, strict=True))
    assert 0.2 < sum(not ended for _, ended in spoiled) / len(ends) < 0.4


def test_the_tokenizer_loses_nothing(prepare: ModuleType, texts: list[str]) -> None:
    tokenizer = prepare.make_tokenizer(texts[:500])
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in texts[-50:])


def test_prompts_are_the_beginnings_of_sentences(prepare: ModuleType, texts: list[str]) -> None:
    prompts = prepare.make_prompts(texts[:100], random.Random(0))["prompt"]
    assert len(set(prompts)) == len(prompts) > 50
    assert all(any(text.startswith(prompt) for text in texts[:100]) for prompt in prompts)
