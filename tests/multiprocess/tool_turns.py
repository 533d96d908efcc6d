"""A rank whose trainer's policy calls tools, once for each of the given plans. Rank 0 writes what all ranks drew."""

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
from tool_users import trainer

from trl_realloc.runtime.process_groups import all_gather_object


def look_up(word: int) -> str:
    """Look up a word.

    Args:
        word: the word.
    """
    time.sleep(random.uniform(0.0, 0.03))
    return f"w{word}"


async def wait_for(word: int) -> str:
    """Wait for a word.

    Args:
        word: the word.
    """
    await asyncio.sleep(random.uniform(0.0, 0.03))
    return f"w{word} w{word + 1}"


def main(folder: Path, plans: dict[str, Any]) -> None:
    for name, settings in plans.items():
        made = trainer(folder / name, pytest.MonkeyPatch(), [look_up, wait_for], **settings)
        drawn: list[Any] = []
        made._generate = noting(made._generate, drawn)
        made.train()
        drawn = all_gather_object(drawn, made.placement.control)
        if made.accelerator.is_main_process:
            rounds = made._adapter.turns.why_in_rounds
            losses = [row["loss"] for row in made.state.log_history if "loss" in row]
            (folder / f"{name}.json").write_text(json.dumps({"drawn": drawn, "rounds": rounds, "losses": losses}))
        made.close()
        tiny.forget_accelerate()


def noting(generate: Callable[[Any], Any], drawn: list[Any]) -> Callable[[Any], Any]:
    def noted(prompts: Any) -> Any:
        outputs = generate(prompts)
        drawn.append(outputs[1:4])
        return outputs

    return noted


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
