"""Whether a policy that is a mixture of experts is trained with router replay, from the settings of a trainer.

What the replay does is in `engines.training.router_replay`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...common.notices import notice
from ...engines.training.router_replay import has_replay
from ...plan.parameter_spec import EXPERT_COUNTS
from ...profiling.job import Job
from ..checks.config_checks import ConfigError
from .job_builder import compute_dtype


def replay_mode(args: Any, config: Any, *, by_vllm: bool, no_forward: str | None = None) -> str:
    """`rollout`, `recompute` or `none`: the setting `router_replay`, or its default.

    Args:
        args: settings of a trainer.
        config: Transformers' config of the policy.
        no_forward: the reason why no forward of the policy comes before its updates; `None` if one does, or if every
            batch has one update, whose forward chooses the experts itself.

    Raises:
        ConfigError: the policy shall be trained with replay, and cannot.
    """
    text, mode = config.get_text_config(), args.router_replay
    is_mixture = any(getattr(text, name, None) for name in EXPERT_COUNTS)
    if mode == "none" or (mode is None and not is_mixture):
        return "none"
    obstacle = None
    if not is_mixture:
        obstacle = f"{text.model_type} is not a mixture of experts"
    elif mode != "recompute" and not by_vllm:
        obstacle = "the training's own model generates, and chooses the same experts"
    elif not has_replay(config):
        obstacle = f"the experts of {text.model_type} cannot be replaced"
    elif mode == "recompute":
        obstacle = no_forward
    if mode is not None:
        if obstacle is not None:
            raise ConfigError(f"router_replay is {mode}, but {obstacle}; leave it out.")
        return str(mode)
    dtype = compute_dtype(args) or getattr(config, "dtype", None) or torch.float32
    if dtype.itemsize > 2:
        return "none"
    if obstacle is not None and by_vllm:
        notice(f"the policy is trained without router replay, because {obstacle}.")
    return "none" if obstacle is not None else "rollout"


def with_replay(job: Job, mode: str) -> Job:
    """The job with the engines' options for this mode of `replay_mode`."""
    vllm = {**job.options.vllm, "routes": True} if mode == "rollout" else job.options.vllm
    return replace(job, options=replace(job.options, router_replay=mode, vllm=vllm))
