"""A rank whose trainer's policy calls tools, once for each of the given plans. Rank 0 writes what all ranks drew.

Besides settings of the trainer, a case may have `resume`: a checkpoint in this job's folder; and `rollout`: true for
the user's function `two_turns` in place of tools.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from tool_users import PROMPTS, trainer

from trl_realloc.runtime.process_groups import all_gather_object


CALLED: list[int] = []


def look_up(word: int) -> str:
    """Look up a word.

    Args:
        word: the word.
    """
    CALLED.append(word)
    time.sleep(random.uniform(0.0, 0.03))
    return f"w{word}"


async def wait_for(word: int) -> str:
    """Wait for a word.

    Args:
        word: the word.
    """
    CALLED.append(word)
    await asyncio.sleep(random.uniform(0.0, 0.03))
    return f"w{word} w{word + 1}"


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Two turns for each prompt, with the word w9 between them."""
    ids = trainer._tokenize_prompts(prompts)[0]
    _, first, first_logps, _ = trainer.vllm_generation.generate(ids)
    again = [[*prompt, *turn, 9] for prompt, turn in zip(ids, first, strict=True)]
    _, second, second_logps, _ = trainer.vllm_generation.generate(again)
    logps = [[[one[0] for one in row] for row in rows] for rows in (first_logps, second_logps)]
    return {
        "prompt_ids": ids,
        "completion_ids": [[*a, 9, *b] for a, b in zip(first, second, strict=True)],
        "logprobs": [[*a, 0.0, *b] for a, b in zip(*logps, strict=True)],
        "env_mask": [[1] * len(a) + [0] + [1] * len(b) for a, b in zip(first, second, strict=True)],
        "words": [len(a) for a in first],
    }


def worded(completions: list[Any], words: list[int], **columns: Any) -> list[float]:
    """A reward by a further column of `two_turns`."""
    return [float(word % 3) for word in words]


def main(folder: Path, plans: dict[str, Any]) -> None:
    for name, settings in plans.items():
        resume, given = settings.pop("resume", None), {}
        if settings.pop("rollout", False):
            given = {"given": {"rollout_func": two_turns, "reward_funcs": worded}}
        if "eval_strategy" in settings:
            given = {"given": {"eval_dataset": PROMPTS.select(range(8))}}
        tools = None if "rollout_func" in given.get("given", {}) else [look_up, wait_for]
        made = trainer(folder / name, pytest.MonkeyPatch(), tools, **given, **settings)
        drawn: list[Any] = []
        CALLED.clear()
        made._generate = noting(made, drawn)
        made.train(resume_from_checkpoint=str(folder / resume) if resume else None)
        drawn, called = all_gather_object((drawn, len(CALLED)), made.placement.control), None
        drawn, called = [of_rank for of_rank, _ in drawn], sum(count for _, count in drawn)
        if made.accelerator.is_main_process:
            rounds, log = made._adapter.turns.why_in_rounds, made.state.log_history
            losses = [row["loss"] for row in log if "loss" in row]
            content = {"drawn": drawn, "rounds": rounds, "losses": losses, "log": log, "called": called}
            (folder / f"{name}.json").write_text(json.dumps(content))
        made.close()
        tiny.forget_accelerate()


def noting(made: Any, drawn: list[Any]) -> Callable[[Any], Any]:
    """The trainer's `_generate`, which also notes what it returns for the training."""
    generate = made._generate

    def noted(prompts: Any) -> Any:
        outputs = generate(prompts)
        if made.model.training:
            drawn.append(outputs[1:4])
        return outputs

    return noted


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
