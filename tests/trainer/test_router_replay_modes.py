"""`router_replay` of the trainers: with which experts a policy is trained, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mixtures
import pytest
import tiny
import tiny_groups
import torch
from routes import Forwards

from trl_realloc.trainer.checks.config_checks import ConfigError


BF16: dict[str, Any] = {"bf16": True, "use_cpu": True, "gradient_checkpointing": False, "optim": "sgd"}
GROUPS: dict[str, Any] = {**BF16, "steps_per_generation": 4, "learning_rate": 3.0, "max_steps": 2}
PPO: dict[str, Any] = {**BF16, "num_ppo_epochs": 3, "learning_rate": 3.0, "max_steps": 1}
PPO |= {"vllm_importance_sampling_correction": True}


def experts(folder: Path, trainer: Any, **settings: Any) -> list[list[Any]]:
    """The experts of each forward of each sample in the order of the forwards, of a batch with several updates."""
    model = mixtures.mixture("qwen3_moe", attn_implementation="eager")
    given = {"model": model, "train_dataset": tiny_groups.PROMPTS}
    forwards = Forwards()
    with forwards.followed():
        made = trainer(folder, given=given, **settings)
        made.train()
    made.close()
    used: dict[Any, list[Any]] = {}
    for _, tokens, experts_used, _ in forwards.rows:
        length = len(torch.tensor(tokens).nonzero())  # less padding
        if len(tokens) > 4:  # a prompt has three tokens, and a step of the generation one
            used.setdefault(tokens[:length], []).append(experts_used[:length])
    return list(used.values())


@pytest.mark.parametrize(
    ("trainer", "settings"), [(tiny_groups.trainer, GROUPS), (tiny.trainer, PPO)], ids=["GRPO", "PPO"]
)
def test_all_updates_on_a_batch_compute_with_the_experts_of_the_forward_before_them(
    tmp_path: Path, trainer: Any, settings: dict[str, Any]
) -> None:
    """Without vLLM. Without replay the routers choose others after an update."""
    for mode in ("none", "recompute"):
        samples = experts(tmp_path / mode, trainer, router_replay=mode, **settings)
        assert max(map(len, samples)) > 1
        same = [all(torch.equal(first, other) for other in others) for first, *others in samples]
        assert all(same) == (mode == "recompute"), (mode, same)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "GRPO: no mixture": (tiny_groups.trainer, {"model": tiny.policy()}, "llama is not a mixture of experts"),
    "PPO: no mixture": (tiny.trainer, {"model": tiny.policy()}, "llama is not a mixture of experts"),
    "PPO: no forward": (
        tiny.trainer,
        {},
        "no forward of the policy comes before the 2 optimizer steps of a batch; set",
    ),
    "GRPO: no vLLM": (tiny_groups.trainer, {"router_replay": "rollout"}, "the training's own model generates"),
    "PPO: no vLLM": (tiny.trainer, {"router_replay": "rollout"}, "the training's own model generates"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_replay_that_cannot_be_is_refused_with_its_reason_before_anything_starts(tmp_path: Path, case: str) -> None:
    trainer, changes, reason = REFUSED[case]
    settings = {**BF16, "router_replay": "recompute", **changes}
    model = settings.pop("model", None) or mixtures.mixture("qwen3_moe")
    with pytest.raises(
        ConfigError, match=f"router_replay is {settings['router_replay']}, but {reason}.*; leave it out"
    ):
        trainer(tmp_path, given={"model": model}, **settings)
