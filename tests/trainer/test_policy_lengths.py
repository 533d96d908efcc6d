"""How long prompts are, before any is tokenized by TRL."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from datasets import Dataset, IterableDataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from trl_realloc.algorithms.prompts import DataError
from trl_realloc.trainer.policy import prompt_lengths as policy_lengths
from trl_realloc.trainer.policy.prompt_lengths import (
    ASSUMED,
    Lengths,
    _Prompts,
    context_length,
    context_limit,
    lengths_of,
    measure_lengths,
)


def text(words: int) -> str:
    return " ".join(["w2"] * words)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_small_data_set_is_measured_whole(lengths: list[int]) -> None:
    data = Dataset.from_dict({"prompt": [text(n) for n in lengths]})
    found = measure_lengths(data, tiny.tokenizer(), {})
    assert found.longest == max(lengths) and found.mean == pytest.approx(sum(lengths) / len(lengths))


def test_the_longest_prompt_of_a_large_data_set_is_found_wherever_it_stands() -> None:
    rows, tokenizer, counted = 40_001, tiny.tokenizer(), Counted(tiny.tokenizer())
    prompts = ["x" * (30 + row % 300) for row in range(rows)]  # long words, each one token
    prompts[20_001] = text(300)  # not among the 20,000 rows at equal distances, and neither the longest by characters
    prompts[7] = "x" * 1000
    found = measure_lengths(Dataset.from_dict({"prompt": prompts}), counted, {})
    assert found == Lengths(pytest.approx(1.0, abs=4), 300, 300)
    assert len(tokenizer(text=prompts[20_001])["input_ids"]) == 300
    assert counted.prompts < rows / 8  # those of more than 300 characters, and 512 for the mean


def test_prompts_that_are_not_tokenized_count_with_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_lengths, "EXACT", 0)
    monkeypatch.setattr(policy_lengths, "SPREAD", 1)
    lengths = [1 + row % 20 for row in range(400)]
    counted = Counted(tiny.tokenizer())
    found = measure_lengths(Dataset.from_dict({"prompt": [text(n) for n in lengths]}), counted, {})
    assert counted.prompts == 2  # the first for the mean, and an empty text
    assert found.counted == 20 and found.longest == 20 * 3 - 1 + 1


class Counted:
    """A tokenizer that counts the texts it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.prompts = tokenizer, 0

    def __call__(self, text: list[str]) -> Any:
        self.prompts += len(text)
        return self.tokenizer(text=text)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=20))
@example(["ﷺ", "ｶﾞ", "\u212b", "\U0001d160"])  # texts that grow, or shrink, when they are normalized
def test_no_tokenizer_makes_more_tokens_than_the_bound(texts: list[str]) -> None:
    """Of a tokenizer with a token for each byte, whichever way it normalizes."""
    bounds = _Prompts(texts, tiny.tokenizer(), {}).bounds()
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        made = Tokenizer(models.BPE({token: at for at, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
        made.normalizer = getattr(normalizers, form)()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        assert all(len(made.encode(given).ids) <= most for given, most in zip(texts, bounds, strict=True))


def test_conversations_are_measured_with_their_template() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{{ start }} {% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    )
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text(3)}, {"role": "user", "content": "w7"}]]})
    assert measure_lengths(data, tokenizer, {"start": "w4 w5"}) == Lengths(7.0, 7, 7)


@pytest.mark.parametrize(
    "data",
    [
        None,
        Dataset.from_dict({"environment": ["a"]}),
        IterableDataset.from_generator(lambda: iter([{"prompt": "w2"}])),
        [{"prompt": "w2"}],
    ],
    ids=["none", "no prompts", "a stream", "rows"],
)
def test_what_cannot_be_read_in_advance_has_no_bound(data: object) -> None:
    assert measure_lengths(data, tiny.tokenizer(), {}) == Lengths(ASSUMED, None)


def test_the_longest_prompt_of_all_data_sets_counts_and_one_that_is_not_known_leaves_it_unknown() -> None:
    train = Dataset.from_dict({"prompt": [text(3)]})
    others = {"a": Dataset.from_dict({"prompt": [text(9)]}), "b": Dataset.from_dict({"prompt": [text(5)]})}
    assert lengths_of(train, others, tiny.tokenizer(), {}, tiny.VOCABULARY) == Lengths(3.0, 9, 9)
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "w2"}]))
    assert lengths_of(train, stream, tiny.tokenizer(), {}, tiny.VOCABULARY) == Lengths(3.0, None)


def conversation(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("make", [str, conversation], ids=["texts", "conversations"])
@pytest.mark.parametrize(
    ("bad", "told"),
    [("", "rows 70, 200 have no tokens"), (" \n", "no tokens"), ("w2 <new>", "rows 70, 200 have token ids outside")],
)
@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset", "eval_dataset 'b'", "rows"])
def test_prompts_that_the_policy_cannot_respond_to_are_named(make: Any, bad: str, told: str, where: str) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<new>"])
    good = Dataset.from_dict({"prompt": [make(text(3))] * 300})
    wrong = Dataset.from_dict({"prompt": [make(bad if at in (70, 200) else text(3)) for at in range(300)]})
    evaluation: Any = {"train_dataset": None, "eval_dataset": wrong, "rows": list(wrong)}.get(where, {"b": wrong})
    train = wrong if where == "train_dataset" else good
    with pytest.raises(DataError, match=f"^{where.replace('rows', 'eval_dataset')}: .*{told}"):
        lengths_of(train, evaluation, tokenizer, {}, tiny.VOCABULARY)
    assert lengths_of(good, good, tokenizer, {}, tiny.VOCABULARY).longest == 3


def test_a_tokenizer_of_another_model_is_found_out() -> None:
    data = Dataset.from_dict({"prompt": ["w2", "w3", "w99 w4"]})
    with pytest.raises(DataError, match="row 2 has token ids outside the model's vocabulary of 99"):
        lengths_of(data, None, tiny.tokenizer(), {}, tiny.VOCABULARY - 1)


@pytest.mark.parametrize(
    ("given", "longest", "is_open", "length"),
    [
        (None, 10, False, 18),
        (None, 125, False, 128),
        (None, 10, True, 128),
        (None, None, False, 128),
        (50, 10, True, 50),
    ],
)
def test_a_context_is_the_setting_or_what_the_prompts_need_or_that_of_the_model(
    given: int | None, longest: int | None, is_open: bool, length: int
) -> None:
    config = tiny.config(max_position_embeddings=128)
    assert context_length(given, Lengths(5.0, longest), 8, config, is_open=is_open) == length


def test_a_limit_says_what_to_do() -> None:
    config = tiny.config(max_position_embeddings=128)
    assert "set vllm_max_model_length to" in context_limit(100, config).remedy
    assert "filter long prompts out" in context_limit(128, config).remedy
    assert "lower max_completion_length" in context_limit(128, config).remedy_of_shortened
