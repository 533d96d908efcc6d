"""Tasks of reasoning-gym as prompts, and the reward: 1 for the right answer and nothing else, 0 for any other text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


# Of reasoning-gym's draws. It draws row n of seed s by the number s + n, so seeds near each other give the same rows.
TRAIN_SEED, START_SEED, TEST_SEED = 0, 1_000_000, 2_000_000
HELD_OUT = 200  # rows of a task that are never trained on


@dataclass(frozen=True)
class Task:
    """A data set of reasoning-gym and the settings of its difficulty."""

    dataset: str
    settings: dict[str, Any]


TASKS = {
    "sums": Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "products": Task("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
}


def task_rows(name: str, seed: int, count: int, without: Collection[str] = ()) -> list[dict[str, str]]:
    """Different questions of a task with their answers.

    Args:
        name: a key of `TASKS`.
        seed: of the draws.
        without: prompts that are left out.
    """
    import reasoning_gym

    task = TASKS[name]
    drawn = reasoning_gym.create_dataset(task.dataset, size=4 * count, seed=seed, **task.settings)
    rows: dict[str, dict[str, str]] = {}
    for row in drawn:
        prompt = f"{row['question'].strip()}\nAnswer:"
        if len(rows) < count and prompt not in without:
            rows.setdefault(prompt, {"prompt": prompt, "answer": str(row["answer"])})
    if len(rows) < count:
        raise ValueError(f"{name} has {len(rows)} different rows among {4 * count} drawn ones, not {count}.")
    return list(rows.values())


def held_out_rows(name: str) -> list[dict[str, str]]:
    """The rows by which what was learned is measured."""
    return task_rows(name, TEST_SEED, HELD_OUT)


def training_rows(name: str, count: int, seed: int = TRAIN_SEED) -> list[dict[str, str]]:
    """Rows to train on, none of which is held out."""
    return task_rows(name, seed, count, {row["prompt"] for row in held_out_rows(name)})


def right_answer(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object
) -> list[float]:
    """A reward function: 1 where a completion is the answer, 0 elsewhere."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
