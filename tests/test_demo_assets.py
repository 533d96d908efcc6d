"""The demo's assets, made in a rehearsal of a few seconds: they load where the trainer loads them, and fit together."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


PREPARE = Path(__file__).parents[1] / "examples" / "demo" / "prepare.py"


def prepare(out: Path) -> str:
    """What a rehearsal with 1/20 of the training prints; ended after two minutes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PREPARE), "--out", str(out), "--seconds", "0.05"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "assets"
    assert "PSF licence" in prepare(out)
    return out


@pytest.mark.slow
def test_a_second_call_finds_the_work_done(assets: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in assets.rglob("*") if path.is_file()}
    assert "already" in prepare(assets)
    assert before == {path: path.stat().st_mtime_ns for path in assets.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_prompts_are_beginnings_of_prose_with_room_for_a_response(assets: Path) -> None:
    tokenizer, prompts = AutoTokenizer.from_pretrained(assets / "policy"), load_from_disk(str(assets / "prompts"))
    context = AutoModelForCausalLM.from_pretrained(assets / "policy").config.max_position_embeddings
    assert len(prompts["train"]) >= 1000 and len(prompts["test"]) >= 32
    for prompt in prompts["train"]["prompt"]:
        assert re.match(r"[A-Z]", prompt) and ">>>" not in prompt
    ids = tokenizer(list(prompts["train"]["prompt"]))["input_ids"]
    assert min(map(len, ids)) >= 2 and max(map(len, ids)) + 48 <= context
    assert len({len(row) for row in ids}) > 5  # ragged, as real prompts are


@pytest.mark.slow
def test_the_tokenizer_loses_nothing_and_keeps_padding_apart_from_the_end(assets: Path) -> None:
    for role in ("policy", "reward"):
        tokenizer = AutoTokenizer.from_pretrained(assets / role)
        assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.padding_side == "left"
        text = 'Return the "naïve" value of x_1, or None.'
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_the_policy_has_learned_from_the_text(assets: Path) -> None:
    tokenizer, policy = (kind.from_pretrained(assets / "policy") for kind in (AutoTokenizer, AutoModelForCausalLM))
    ids = torch.tensor([tokenizer("Return the name of the file.")["input_ids"] + [tokenizer.eos_token_id]])
    with torch.no_grad():
        loss = float(policy(input_ids=ids, labels=ids).loss)
    assert loss < math.log(len(tokenizer)) - 0.5  # nats per token; untrained it is the logarithm
    assert policy.config.eos_token_id == tokenizer.eos_token_id and policy.config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.slow
def test_the_reward_model_scores_at_the_last_real_token(assets: Path) -> None:
    tokenizer, reward = (
        kind.from_pretrained(assets / "reward") for kind in (AutoTokenizer, AutoModelForSequenceClassification)
    )
    texts = ["Return the name of the file.", "File the name return."]
    with torch.no_grad():
        apart = [reward(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
        together = reward(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")).logits[:, 0]
    assert reward.config.num_labels == 1 and apart[0] != apart[1]
    assert together.tolist() == pytest.approx(apart, abs=1e-4)
