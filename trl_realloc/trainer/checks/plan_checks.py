"""Refuses a plan that the settings, the models, the optimizer or the stated memory do not allow, before anything is
loaded.

Rules for every plan are in `plan.execution_plan`, the sharding that an optimizer allows in `run.optimizer_sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PretrainedConfig, TrainingArguments

from ...common.errors import PlanError, Problems
from ...common.settings import MIN_TEMPERATURE
from ...engines.training import deepspeed_compat
from ...engines.training.packed_attention import may_pack
from ...engines.training.tensor_parallel import splits_adapter, stages_adapter
from ...engines.training.zero_setup import scales_losses
from ...engines.transformers_compat import attention_name
from ...plan.assignment import Assignment
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...plan.model_spec import FAMILIES, ModelSpec
from ...plan.quantization import Quantization
from ...planner.search.space import TrainingSplits
from ...profiling.job_models import element_bytes, spec_of
from ...realloc.memory import check_memory
from .config_checks import ConfigError, by_transformers


if TYPE_CHECKING:
    from peft import PeftConfig


def check_plan(
    args: TrainingArguments,
    plan: ExecutionPlan,
    configs: Mapping[Role, Sequence[PretrainedConfig]],
    adapted: Sequence[Role],
    precision: torch.dtype | None = None,
    deepspeed: Mapping[str, object] | None = None,
    *,
    own_reference: bool = False,
    quantization: Quantization | None = None,
) -> None:
    """Refuse a plan that these settings or these models do not allow.

    Args:
        configs: the Transformers config of every model of every role.
        adapted: roles that train only adapters.
        precision: dtype of mixed precision, if any.
        deepspeed: the DeepSpeed config of the job's launch, if any.
        own_reference: whether the reference is a separate model, also if the actor trains adapters.
        quantization: format of the policy's weights under its adapters; `None` if they are not quantized.

    Raises:
        ConfigError: a ZeRO stage without DeepSpeed, fp16 with the engine `megatron`, a temperature below vLLM's
            smallest, or an optimizer on an NVMe drive.
        PlanError: see `check_layouts`.
    """
    for problem in _setting_problems(args, plan, precision, deepspeed):
        raise ConfigError(problem)
    check_layouts(plan, configs, adapted, precision, own_reference=own_reference, quantization=quantization)


def _setting_problems(
    args: TrainingArguments, plan: ExecutionPlan, precision: torch.dtype | None, deepspeed: Mapping[str, Any] | None
) -> Iterator[str]:
    trained = {name: assignment for name, assignment in plan.assignments.items() if plan.graph.call(name).trains}
    split = [name for name, assignment in trained.items() if assignment.engine == "megatron"]
    sharded = [name for name, assignment in trained.items() if assignment.strategy.zero_stage]
    if precision is torch.float16 and split:
        yield f"engine megatron ({split[0]}) does not scale losses, which fp16 needs; set bf16 instead."
    if precision is torch.float16 and sharded and not scales_losses(deepspeed):
        yield (
            f"{sharded[0]} has zero_stage {plan[sharded[0]].strategy.zero_stage}, and DeepSpeed scales losses, which "
            f"fp16 needs, only with a DeepSpeed config; set bf16 or zero_stage: 0, or launch with a DeepSpeed config "
            f"with fp16 enabled."
        )
    if plan["actor.generate"].engine == "vllm" and args.temperature < MIN_TEMPERATURE:
        yield (
            f"temperature {args.temperature:g} is below the {MIN_TEMPERATURE:g} that vLLM samples with at least; raise "
            f"it, or {by_transformers(args)}."
        )
    if args.full_determinism and plan.streams is not None and not plan.streams.deterministic:
        yield (
            "full_determinism requires identical runs, but timing decides which samples this plan's streams score in "
            "one forward; write streams: {deterministic: true}, or leave streams out."
        )
    if args.full_determinism and plan.staleness.versions:
        yield (
            "full_determinism requires identical runs, but under this plan's staleness timing decides which policy "
            "samples a token; leave staleness out, or full_determinism."
        )
    stages = {name: a.strategy.zero_stage for name, a in plan.assignments.items() if a.strategy.zero_stage}
    if stages and not deepspeed_compat.is_installed():
        name, stage = next(iter(stages.items()))
        yield (
            f"{name} has zero_stage {stage}, which DeepSpeed executes, and DeepSpeed is not installed: "
            f"pip install 'trl_realloc[deepspeed]', or set zero_stage: 0."
        )
    zero = (deepspeed or {}).get("zero_optimization") or {}
    if sharded and (zero.get("offload_optimizer") or {}).get("device") == "nvme":
        yield (
            f"the DeepSpeed config offloads the optimizer of {sharded[0]} to an NVMe drive, where its state can be "
            f"neither saved nor resumed; set offload_optimizer.device to cpu or none, or use more devices."
        )


def check_adapters_split(adapters: Mapping[str, PeftConfig], plan: ExecutionPlan) -> None:
    """Refuse a plan that splits the policy's training by tp or pp if an adapter cannot be split.

    Args:
        adapters: PEFT configs of the policy's adapters, by name.

    Raises:
        ConfigError: names the adapter.
    """
    whole = [name for name, config in adapters.items() if not splits_adapter(config)]
    if whole and (tp := plan["actor.train"].strategy.tp) > 1:
        raise ConfigError(
            f"actor.train has tp {tp}, and the adapter {whole[0]!r} cannot be split by tp, as plain LoRA can (without "
            f"use_dora, trainable_token_indices and target_parameters); use plain LoRA, or tp: 1."
        )
    shared = [name for name, config in adapters.items() if not stages_adapter(config)]
    if shared and (pp := plan["actor.train"].strategy.pp) > 1:
        raise ConfigError(
            f"actor.train has pp {pp}, and the adapter {shared[0]!r} has parameters that several stages train, as "
            f"those of trainable_token_indices; use plain LoRA, or pp: 1."
        )


def check_unsplit(call: str, assignment: Assignment) -> None:
    """Refuse an assignment that splits or shards a policy's quantized weights.

    Raises:
        PlanError: names the setting.
    """
    if assignment.engine == "vllm":  # its weights are dequantized
        return
    split = element_sharding(assignment) or parameter_distribution(assignment)
    if split or assignment.engine == "megatron":
        raise PlanError(
            f"{call} has {split or 'engine megatron'}, and the policy's quantized weights can be neither split nor "
            f"sharded; use engine zero with zero_stage: 0, as plan: flatten does if the launch has no DeepSpeed config."
        )


def check_sharding(optimizer: str, splits: TrainingSplits, plan: ExecutionPlan) -> None:
    """Refuse a plan that shards parameters that the optimizer needs whole.

    Args:
        optimizer: name for messages.
        splits: splits that it allows.

    Raises:
        ConfigError: names the optimizer, the call, and the setting that shards its parameters.
    """
    trained = {name: assignment for name, assignment in plan.assignments.items() if plan.graph.call(name).trains}
    sharded = {name: setting for name, a in trained.items() if (setting := element_sharding(a))}
    distributed = {name: setting for name, a in trained.items() if (setting := parameter_distribution(a))}
    if not sharded and not distributed:
        return
    instead = (
        "give it replicas (engine zero with zero_stage: 0, as plan: flatten does), or use an optimizer such as "
        "adamw_torch."
    )
    way_out = f"would not train as on one device; {instead}"
    staged = [name for name in sharded if trained[name].engine == "zero"]
    if staged and not splits.by_deepspeed:
        raise ConfigError(
            f"DeepSpeed does not keep the groups of {optimizer}, so {staged[0]} under {sharded[staged[0]]} {way_out}"
        )
    if not splits.parameters:
        name, setting = next(iter({**sharded, **distributed}.items()))
        raise ConfigError(
            f"{optimizer} is not among the optimizers that are known to step each parameter by itself, so {name} under "
            f"{setting} may not train as on one device; {instead}"
        )
    if not splits.elements:
        for name, setting in sharded.items():
            raise ConfigError(
                f"{optimizer} does not step each element by itself (it factors, or uses norms of whole tensors), so "
                f"{name} under {setting} {way_out}"
            )


def element_sharding(assignment: Assignment) -> str:
    """The setting of an assignment that splits parameters, or flattens several into one tensor; empty if there is
    none."""
    strategy = assignment.strategy
    if assignment.engine == "zero" and strategy.zero_stage:
        return f"zero_stage: {strategy.zero_stage}"
    return f"tp: {strategy.tp}" if strategy.tp > 1 else ""


def parameter_distribution(assignment: Assignment) -> str:
    """The setting of an assignment that distributes whole parameters over several optimizers; empty if there is
    none."""
    strategy = assignment.strategy
    if assignment.engine == "megatron" and strategy.zero_stage and strategy.dp > 1:
        return f"zero_stage: {strategy.zero_stage}"
    return f"pp: {strategy.pp}" if strategy.pp > 1 else ""


def check_layouts(
    plan: ExecutionPlan,
    configs: Mapping[Role, Sequence[PretrainedConfig]],
    adapted: Sequence[Role],
    mixed: torch.dtype | None = None,
    *,
    own_reference: bool = False,
    quantization: Quantization | None = None,
) -> None:
    """Check the tensor and pipeline parallelism of every call, and the plan's stated memory, against the models'
    configs.

    Args:
        adapted, own_reference, quantization: see `check_plan`.
        mixed: dtype of mixed precision, if any, in which a vLLM engine stores its weights.

    Raises:
        PlanError: the plan's split of a model is not possible, or parameters do not fit.
    """
    for policy in configs.get(Role.ACTOR, ()):
        check_generation(plan, policy)
    specs: dict[str, list[ModelSpec]] = {}
    problems = Problems()
    for name, assignment in plan.assignments.items():
        role = plan.graph.call(name).role
        is_policy = role in (Role.ACTOR, Role.REFERENCE)
        if assignment.engine == "megatron" or plan.cluster.memory_gb is not None:
            for config in configs[role]:
                with problems.of(name):
                    spec = _spec(config, assignment, is_policy)
                    if mixed is not None and assignment.engine == "vllm":
                        spec = replace(spec, bytes_per_element=mixed.itemsize)
                    if assignment.engine != "vllm" and (role is Role.ACTOR or (is_policy and not own_reference)):
                        spec = replace(spec, quantization=quantization)
                    if role is Role.REFERENCE and Role.ACTOR in adapted and not own_reference:
                        spec = replace(spec, is_base=True)
                    specs.setdefault(name, []).append(spec)
    problems.refuse()
    check_memory(plan, specs, adapted)


def check_generation(plan: ExecutionPlan, config: PretrainedConfig) -> None:
    """Refuse a plan whose vLLM engines cannot split the policy. For a family without a table only the heads are known.

    Args:
        config: the policy's Transformers config.

    Raises:
        PlanError: names the call, what cannot be divided evenly, and the possible degrees.
    """
    problems = Problems()
    for name, assignment in plan.assignments.items():
        if assignment.engine == "vllm" and assignment.strategy.tp > 1:
            with problems.of(name):
                if config.model_type in FAMILIES:
                    spec_of(config, is_policy=True).check_generation(assignment.strategy.tp)
                elif isinstance(heads := getattr(config.get_text_config(), "num_attention_heads", None), int):
                    spec = ModelSpec(config.model_type, (), bytes_per_element=1, heads=heads)
                    spec.check_generation(assignment.strategy.tp)
    problems.refuse()


def _spec(config: PretrainedConfig, assignment: Assignment, is_policy: bool) -> ModelSpec:
    """The parameter spec of a call's model. Raises `PlanError` if the model cannot be split as assigned."""
    if assignment.engine == "megatron":
        head: Literal["lm", "score"] = "lm" if is_policy else "score"
        spec = ModelSpec.from_config(config, head, bytes_per_element=element_bytes(config))
        spec.check_strategy(assignment.strategy.tp, assignment.strategy.pp)
        attention = attention_name(config)  # None if Transformers chooses it
        if assignment.strategy.pp > 1 and attention is not None and not may_pack(attention):
            raise PlanError(
                f"its attention is {attention}, by which samples that share a row are mixed, and a pipeline needs "
                f"packed rows; load it with attn_implementation='sdpa', or use pp: 1."
            )
        return spec
    return spec_of(config, is_policy)
