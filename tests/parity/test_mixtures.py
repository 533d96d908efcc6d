"""From the same rollouts, a mixture of experts logs and learns under a plan what it does with the installed TRL. Its
auxiliary loss does not depend on how an optimizer step is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mixtures
import pytest
import trl
from recorded_rollouts import Run, check_equal, run

import trl_realloc
from trl_realloc.engines.training.expert_routing import BALANCED_FAMILIES


# one micro-batch, over whose tokens TRL takes the loss; responses that are masked, whose prompts count
WHOLE: dict[str, Any] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8, "beta": 0.0}
WHOLE |= {"router_aux_loss_coef": 0.5, "mask_truncated_completions": True, "max_steps": 2}


def plan(tokens: int) -> dict[str, Any]:
    """One process that trains in micro-batches of so many tokens."""
    scored = {"mesh": "0", "engine": "zero", "micro_batch_tokens": tokens}
    calls = {"actor.generate": {"mesh": "0", "engine": "transformers"}, "actor.forward": scored, "actor.train": scored}
    return {"cluster": {"nodes": 1, "devices_per_node": 1}, "calls": calls}


def compared(folder: Path, family: str, **changes: Any) -> Run:
    """A run by this package that is equal to TRL's."""
    made, expected = (
        run(library, folder / library.__name__, given={"model": mixtures.mixture(family)}, **{**WHOLE, **changes})
        for library in (trl_realloc, trl)
    )
    check_equal(made, expected)
    return made


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("family", sorted(BALANCED_FAMILIES))
def test_the_auxiliary_loss_is_trls(tmp_path: Path, family: str, kind: str) -> None:
    made = compared(tmp_path, family, kind=kind)
    assert all(row["aux_loss"] > 2.0 for row in made.logs[:-1]), "two of eight experts, unevenly"


def test_without_a_coefficient_there_is_no_auxiliary_loss(tmp_path: Path) -> None:
    made = compared(tmp_path, "qwen3_moe", router_aux_loss_coef=0.0)
    assert "aux_loss" not in made.logs[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"plan": plan(24)},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"gradient_checkpointing": True},
        {"attn_implementation": "eager"},
    ],
    ids=["micro-batches", "accumulated", "checkpointed", "padded"],
)
def test_the_auxiliary_loss_does_not_depend_on_how_a_step_is_divided(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = {"attn_implementation": settings.pop("attn_implementation", "sdpa")}
    expected = run(trl_realloc, tmp_path / "whole", given={"model": mixtures.mixture("qwen3_moe")}, **WHOLE)
    given = {"model": mixtures.mixture("qwen3_moe", **model)}
    made = run(trl_realloc, tmp_path / "divided", given=given, **{**WHOLE, **settings})
    check_equal(Run([], made.weights), Run([], expected.weights))
