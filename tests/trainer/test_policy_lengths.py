"""How long prompts are, before any is tokenized by TRL."""

from __future__ import annotations

import pytest
import tiny
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_realloc.trainer import policy_lengths
from trl_realloc.trainer.policy_lengths import ASSUMED, MARGIN, Lengths, measure_lengths


def text(words: int) -> str:
    return " ".join(["w2"] * words)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_small_data_set_is_measured_whole(lengths: list[int]) -> None:
    data = Dataset.from_dict({"prompt": [text(n) for n in lengths]})
    found = measure_lengths(data, tiny.tokenizer(), {})
    assert found.longest == max(lengths) and found.mean == pytest.approx(sum(lengths) / len(lengths))


def test_of_a_large_data_set_a_sample_is_measured_and_the_bound_has_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_lengths, "SAMPLE", 8)
    monkeypatch.setattr(policy_lengths, "EXACT", 0)
    tokenizer, read = tiny.tokenizer(), []
    lengths = [1 + row % 20 for row in range(400)]

    def counted(text: str) -> dict[str, list[int]]:
        read.append(text)
        return tokenizer(text)

    found = measure_lengths(Dataset.from_dict({"prompt": [text(n) for n in lengths]}), counted, {})
    assert len(read) <= 16
    assert found.longest == int(20 * MARGIN) and found.mean == pytest.approx(10.5, abs=2)


def test_the_longest_prompt_in_tokens_is_found_where_others_have_more_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_lengths, "SAMPLE", 8)
    prompts = ["x" * (100 + row) for row in range(99)]  # long words, each one token
    prompts.insert(50, text(30))  # fewer characters, and 30 tokens
    assert measure_lengths(Dataset.from_dict({"prompt": prompts}), tiny.tokenizer(), {}) == Lengths(
        pytest.approx(1.0, abs=4), 30
    )


def test_conversations_are_measured_with_their_template() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{{ start }} {% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    )
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text(3)}, {"role": "user", "content": "w7"}]]})
    assert measure_lengths(data, tokenizer, {"start": "w4 w5"}) == Lengths(7.0, 7)


@pytest.mark.parametrize(
    "data",
    [
        None,
        Dataset.from_dict({"environment": ["a"]}),
        IterableDataset.from_generator(lambda: iter([{"prompt": "w2"}])),
    ],
    ids=["none", "no prompts", "a stream"],
)
def test_what_cannot_be_read_in_advance_has_no_bound(data: object) -> None:
    assert measure_lengths(data, tiny.tokenizer(), {}) == Lengths(ASSUMED, None)
