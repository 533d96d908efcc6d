"""Prompts as they are read, padded and collated, and the lengths that are planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset

from trl_realloc.algorithms.prompt_batches import collate_prompts
from trl_realloc.algorithms.prompts import DataError, as_dataset, check_prompts, tokenize_prompts


def test_a_collator_changes_the_context_length_only_by_what_it_makes_of_the_prompts(tmp_path: Path) -> None:
    """One that cuts prompts off makes room for them: 200 tokens would not fit the model's 128."""
    tokens = tiny.tokenizer()
    data = Dataset.from_dict({"input_ids": [[5] * 200, [6] * 4] * 8})

    def cut(rows: list[dict[str, Any]]) -> Any:
        short = [{"input_ids": row["input_ids"][-7:]} for row in rows]
        return tokens.pad(short, return_tensors="pt")

    made = tiny.trainer(tmp_path, given={"train_dataset": data, "data_collator": cut}, max_steps=1)
    assert made.setup.job.options.context_length == made.placement.options.context_length == 7 + 12
    made.train()


def test_prompts_are_read_once_and_no_other_column_with_them() -> None:
    seen: list[dict[str, Any]] = []
    collate = collate_prompts(0)

    def counting(rows: list[Any]) -> Any:
        seen.extend(rows)
        return collate(rows)

    rows = [[5] * (1 + at % 7) for at in range(2500)]
    data = Dataset.from_dict({"input_ids": rows, "picture": ["large"] * 2500})
    lengths = check_prompts(data, "train_dataset", 12, None, 100, counting)
    assert lengths == [len(row) for row in rows]
    assert len(seen) == 2500 and all(set(row) == {"input_ids"} for row in seen)


def test_a_transform_may_make_the_prompts_from_other_columns(tmp_path: Path) -> None:
    made_of: list[str] = []

    def ask(rows: dict[str, list[str]]) -> dict[str, list[str]]:
        made_of.extend(rows["question"])
        return {"prompt": [f"w9 {text}" for text in rows["question"]], "solution": rows["answer"]}

    def judged(prompts: list[str], completions: list[str], solution: list[str], **_: Any) -> list[float]:
        assert all(prompt == f"w9 w2 {answer}" for prompt, answer in zip(prompts, solution, strict=True))
        return [float(len(text)) for text in completions]

    answers = [f"w{at}" for at in range(3, 19)]
    data = Dataset.from_dict({"question": [f"w2 {answer}" for answer in answers], "answer": answers})
    given = {"train_dataset": data.with_transform(ask), "reward_model": judged}
    made = tiny.trainer(tmp_path, given=given, max_steps=1)
    made_of.clear()
    made.train()
    assert tiny.updates(made)
    assert not made_of  # every row was made once, before the training


def _with_tool_call(argument: object) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": argument}}}
    messages = [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4", "tool_calls": [call]}]
    return [*messages, {"role": "tool", "name": "f", "content": "w5"}]


def test_conversations_with_tool_calls_of_mixed_types_are_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": _with_tool_call(argument)} for argument in [1, "w2", None, [2]] * 4]
    seen: list[Any] = []

    def judged(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(message["content"])) for (message,) in completions]

    given = {"train_dataset": Dataset.from_list(rows, on_mixed_types="use_json"), "reward_model": judged}
    made = tiny.trained(tmp_path, given=given, max_steps=1)
    assert made.prompts.longest == 4
    assert seen and all(prompt in [row["prompt"] for row in rows] for prompt in seen)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ("w2 w3", "row 2 has a 'prompt' that is no conversation; .* Filter it out"),
        ([], "row 2 has a 'prompt' that is no conversation"),
        ([{"content": "w2"}], "row 2 has a 'prompt' that is no conversation"),
    ],
)
def test_prompts_in_json_are_checked_row_by_row(odd: object, told: str) -> None:
    prompts = [_with_tool_call(1), _with_tool_call("w2"), odd]
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts], on_mixed_types="use_json")
    with pytest.raises(DataError, match=told):
        as_dataset(data, "train_dataset")


@pytest.mark.parametrize("padded", [False, True])
def test_a_pad_token_outside_the_models_vocabulary_never_reaches_it(tmp_path: Path, padded: bool) -> None:
    """As where a script adds one to a tokenizer that has a token for each row of the embeddings."""
    tokens = tiny.tokenizer(pad=None)
    tokens.add_special_tokens({"pad_token": "[PAD]"})
    assert tokens.pad_token_id == tiny.VOCABULARY
    data = tiny.prompts(16)
    if padded:
        ids = tokens(list(data["prompt"]), padding=True, return_token_type_ids=False)["input_ids"]
        data = Dataset.from_dict({"input_ids": ids})
    made = tiny.trained(tmp_path, given={"processing_class": tokens, "train_dataset": data}, max_steps=1)
    assert tiny.updates(made)


P, E = tiny.PAD, tiny.EOS
PADDED: dict[str, tuple[list[int], list[int] | None, int, list[int]]] = {
    "left": ([P, P, 5, 6], None, P, [5, 6]),
    "right": ([5, 6, P, P], None, P, [5, 6]),
    "both sides": ([P, 5, 6, P, P], None, P, [5, 6]),
    "within": ([P, 5, P, 6, P], None, P, [5, P, 6]),
    "nothing else": ([P, P], None, P, []),
    "the end of the text stays": ([P, 5, E], None, P, [5, E]),
    "a mask of the left": ([P, P, 5, 6], [0, 0, 1, 1], P, [5, 6]),
    "a mask of the right": ([5, 6, P, P], [1, 1, 0, 0], P, [5, 6]),
    "a mask that keeps pad tokens": ([P, 5, P, P], [1, 1, 1, 0], P, [P, 5, P]),
    "eos on the left": ([E, E, 5, E, 6], None, E, [5, E, 6]),
    "eos at the end of the text": ([E, 5, 6, E], None, E, [5, 6, E]),
    "eos alone": ([E], None, E, [E]),
    "eos on the right with a mask": ([5, E, E, E], [1, 1, 0, 0], E, [5, E]),
    "eos at both ends with a mask": ([E, E, 5, E], [0, 1, 1, 1], E, [E, 5, E]),
}


@pytest.mark.parametrize("case", PADDED)
@pytest.mark.parametrize("by_collator", [False, True], ids=["data set", "collator"])
def test_padding_is_no_part_of_a_prompt(case: str, by_collator: bool) -> None:
    ids, mask, pad, kept = PADDED[case]
    row = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}

    def own(rows: list[Any]) -> Any:
        return {name: torch.tensor([given[name] for given in rows]) for name in rows[0]}

    collate = collate_prompts(pad, own if by_collator else None, is_special=pad == E)
    assert collate([row]).prompts.ragged("prompts").values.tolist() == kept


@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [5, 6, E, E]}, "row 9 has 2 tokens 1 at its end, which is the pad token and the eos"),
        ({"input_ids": [E, E]}, "row 9 has 2 tokens 1 at its end"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "row 9 has an attention_mask of 1 entries for 2 input_ids"),
    ],
)
def test_padding_that_may_be_prompt_is_refused(tmp_path: Path, where: str, row: dict[str, Any], told: str) -> None:
    good = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}
    rows = [{name: good[name] for name in row}] * 9 + [row]
    given = {"processing_class": tiny.tokenizer(pad="<eos>"), where: Dataset.from_list(rows)}
    with pytest.raises(DataError, match=f"^{where}: {told}"):
        tiny.trainer(tmp_path, given=given)


def test_a_text_has_no_padding() -> None:
    """It may begin with the pad token, which is the bos token of some tokenizers, and end with it."""
    data = Dataset.from_dict({"prompt": ["<eos> w5 <eos> <eos>"]})
    rows = tokenize_prompts(data, tiny.tokenizer(pad="<eos>"), "train_dataset")
    (prompt,) = collate_prompts(E, is_special=True)([rows[0]]).prompts.ragged("prompts").rows()
    assert prompt.tolist() == [E, 5, E, E]
