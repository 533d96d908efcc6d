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
from transformers import AutoConfig

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.policy.sampled_routes import SampledRoutes
from trl_realloc.trainer.run.replay_setup import replay_mode


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


# prompts and responses, the samples of an engine whose routes are their tokens but the last, and what others get
KNOWN = [([2, 3, 4], [5, 6]), ([2, 3, 4], [7]), ([8, 9], [10, 11, 12])]
ATTACHED = {
    "a completion": (([2, 3, 4], [7]), [2, 3, 4]),
    "one that goes on": (([8, 9], [10, 11, 12, 13]), [8, 9, 10, 11]),
    "one whose response is masked": (([8, 9], []), [8, 9]),
    "another response": (([2, 3, 4], [5, 9, 9]), [2, 3, 4, 5]),
    "a prompt that begins alike": (([2, 9], [4, 5]), [2]),
    "another prompt": (([20, 21], [5]), []),
}


def test_a_sample_has_the_experts_of_the_longest_beginning_that_an_engine_has_computed() -> None:
    def rollouts(samples: list[Any], **columns: Any) -> Rollouts:
        prompts, responses = (Ragged.of([sample[part] for sample in samples], torch.long) for part in (0, 1))
        return Rollouts(prompts=prompts, responses=responses, **columns)

    def routes(rows: list[list[int]]) -> Ragged:
        return Ragged.of([torch.tensor(row, dtype=torch.uint8).view(-1, 1) for row in rows], torch.uint8)

    kept = SampledRoutes()
    kept.begin_generation(trains=True)
    drawn = rollouts(KNOWN, routes=routes([[*prompt, *response][:-1] for prompt, response in KNOWN]))
    kept.add([prompt for prompt, _ in KNOWN], drawn)
    attached = kept.attach(rollouts([sample for sample, _ in ATTACHED.values()]))
    found = dict(zip(ATTACHED, (row.flatten().tolist() for row in attached.ragged("routes").rows()), strict=True))
    assert found == {case: expected for case, (_, expected) in ATTACHED.items()}


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


# of a family, and what it changes in the config: the default with vLLM in 16 bits, and whether a line tells why
DEFAULTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "qwen3_moe": ({}, "rollout", False),
    "deepseek_v3": ({}, "none", True),
    "gemma4_text": ({"num_experts": 8, "top_k_experts": 2}, "none", True),
    "llama": ({}, "none", False),
    "granitemoehybrid": ({"num_local_experts": 0}, "none", False),
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_mixture_that_is_trained_without_replay_is_told_in_one_line(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected, is_told = DEFAULTS[family]
    args = tiny_groups.settings(tmp_path, bf16=True, use_cpu=True)
    capsys.readouterr()
    assert replay_mode(args, AutoConfig.for_model(family, **changes), by_vllm=True) == expected
    line = f"the policy is trained without router replay, because the experts of {family} cannot be replaced."
    assert capsys.readouterr().err == (f"trl_realloc: {line}\n" if is_told else "")
