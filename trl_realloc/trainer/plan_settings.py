"""`PlanSettings`: settings of plans, engines and failures in the configurations of all trainers, and the preparation
before `TrainingArguments` computes values from a configuration."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ..engines.training.deepspeed_compat import leave_out_shared_memory_op
from ..plan.execution_plan import ExecutionPlan
from ..runtime.launch.hosts import all_processes, has_rendezvous
from ..runtime.launch.launcher import check_launch, connect_streams, separate_attempts, wait_on_own_device
from ..runtime.launch.network_interfaces import set_gloo_interface
from .checks.config_checks import check_settings


if TYPE_CHECKING:
    from transformers import TrainingArguments


# on a command line, a field of type `bool | None` may have no value, like one of type `bool`
FLAG: dict[str, Any] = {"nargs": "?", "const": True}
# TrlParser reads dict fields from YAML only if `_VALID_DICT_FIELDS` names them
DICT_FIELDS = ("plan", "vllm_engine_kwargs")

Value = TypeVar("Value")


def setting(default: Value, help: str, **more: Any) -> Value:
    """A field of a configuration, with its text for `--help`.

    Args:
        more: further arguments of the command line's option, such as `FLAG`.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass
class PlanSettings:
    """
    Settings of plans, engines and failures.

    Parameters:
        plan (`dict | str`, *optional*):
            The execution plan: `auto` (the planner's choice), a preset (`flatten`, `interleave`, `separate`), a
            YAML file or a dict. Default: `auto`.
        vllm_repeatable_sampling (`bool`, *optional*, defaults to `False`):
            Sampling on a GPU by this package's sampler, as on a CPU: the tokens of a sample depend only on its seed and
            its probabilities, and are the same as with generation by Transformers. Slower, and with vLLM's older model
            runner. By default vLLM's sampler is used, with a seed per sample. No effect on a CPU.
        vllm_engine_kwargs (`dict[str, Any]`, *optional*):
            Extra arguments of vLLM's engine, by vLLM's names, such as `max_num_batched_tokens`, `kv_cache_dtype` or
            `enforce_eager`. Arguments that the plan or another setting decides are refused.
        vllm_start_timeout (`float`, *optional*, defaults to `600.0`):
            Timeout in seconds for the start of a vLLM engine.
        vllm_step_timeout (`float`, *optional*, defaults to `300.0`):
            Timeout in seconds for one step of a vLLM engine, one token of each sample, after which it counts as lost.
            The first steps may compile kernels.
        vllm_load_timeout (`float`, *optional*, defaults to `300.0`):
            Timeout in seconds for a vLLM engine to load one bucket of new weights, after which it counts as lost.
        memory_headroom (`float`, *optional*, defaults to `0.1`):
            Share of a GPU's memory that a plan of `plan: auto` leaves free, for allocator fragmentation and for what
            the memory estimate does not count.
        skip_nonfinite_updates (`bool`, *optional*, defaults to `False`):
            Skipping of updates whose samples, losses or gradients are not finite; `skipped_updates/*` counts them. By
            default such an update ends the run, and the state before it is saved.
        max_mismatch (`float`, *optional*, defaults to `1.1`):
            Maximum mismatch between the probabilities of vLLM engine and trainer: the mean of exp |difference of
            log-probabilities| over the tokens of an update (`sampling/token_mult_prob_error`). Above 1.05 a warning is
            logged. `None`: no limit. See docs/mismatch.md.
        mismatch_action (`str`, *optional*, defaults to `"correct"`):
            Action above `max_mismatch`. `correct`: weight the loss by the ratio trainer / engine, unless it already is.
            `end`: end the run.
        async_save (`bool`, *optional*, defaults to `False`):
            Background writing of a checkpoint's training state while training continues. Each process first copies its
            part to host memory. The checkpoint gets its final name when all processes have written their parts.
        heartbeat_timeout (`float`, *optional*):
            Seconds without a heartbeat of a rank (its host or the network is down), or with a rank stopped, after which
            the job ends on all ranks. Ranks send heartbeats during long computations too. Default: 30.
    """

    plan: dict | str | None = setting(  # type: ignore[type-arg]  # a parser reads it as `dict`
        None,
        "The execution plan: `auto` (the planner's choice), a preset (`flatten`, `interleave`, "
        "`separate`), a YAML file or a dict. Default: `auto`.",
    )
    vllm_repeatable_sampling: bool = setting(
        False, "Draw tokens on a GPU by this package's sampler, which repeats exactly, not by vLLM's."
    )
    vllm_engine_kwargs: dict | str | None = setting(  # type: ignore[type-arg]
        None, "Further arguments of vLLM's engine, by vLLM's names."
    )
    vllm_start_timeout: float = setting(600.0, "Seconds in which a vLLM engine must have started.")
    vllm_step_timeout: float = setting(300.0, "Seconds that a vLLM engine may take for a token of each sample.")
    vllm_load_timeout: float = setting(300.0, "Seconds that a vLLM engine may take for one bucket of new weights.")
    memory_headroom: float = setting(0.1, "Share of a GPU's memory that a plan of `plan: auto` leaves free.")
    skip_nonfinite_updates: bool = setting(
        False, "Leave out and count updates that are not finite, where otherwise the run ends."
    )
    max_mismatch: float | None = setting(
        1.1, "Maximum mean factor between the probabilities of vLLM engine and trainer."
    )
    mismatch_action: str = setting(
        "correct", "Above `max_mismatch`: `correct` the loss by importance weights, or `end` the run."
    )
    async_save: bool = setting(False, "Write a checkpoint's training state in the background while training goes on.")
    heartbeat_timeout: float | None = setting(
        None, "Seconds after which a stopped or silent rank ends the job on all ranks. Default: 30."
    )

    def to_dict(self) -> dict[str, Any]:
        """The settings, with the plan in JSON form, because reporters such as TensorBoard log settings as JSON."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]  # of `TrainingArguments`
        plan: Any = self.plan  # the field's type is for command lines; other values are possible
        if isinstance(plan, ExecutionPlan):
            values["plan"] = plan.to_dict()
        elif isinstance(plan, os.PathLike):
            values["plan"] = os.fspath(plan)
        return values


# Arguments of `VLLMEngine`, and their settings.
_VLLM_SETTINGS = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "repeatable_sampling": "vllm_repeatable_sampling",
    "engine_kwargs": "vllm_engine_kwargs",
    "start_timeout_s": "vllm_start_timeout",
    "step_timeout_s": "vllm_step_timeout",
    "load_timeout_s": "vllm_load_timeout",
}


def vllm_settings(args: TrainingArguments) -> dict[str, Any]:
    """The arguments of `VLLMEngine` that a configuration of this package or of TRL sets."""
    arguments = {argument: getattr(args, setting, None) for argument, setting in _VLLM_SETTINGS.items()}
    assert not isinstance(arguments["engine_kwargs"], str), "TrainingArguments reads JSON"
    return {argument: value for argument, value in arguments.items() if value is not None}


def use_one_device(args: TrainingArguments) -> None:
    """Create the job's process group, so that its size is known, and bind each process to one device. Without this,
    Trainer in a process without a launcher that sees n GPUs would use all of them (DataParallel), and make its batches
    n times as large."""
    args.device  # noqa: B018 - makes the process group
    if args.n_gpu > 1:
        args._n_gpu = 1


@contextmanager
def before_training_arguments(args: TrainingArguments) -> Iterator[None]:
    """Context of a configuration's `TrainingArguments.__post_init__`. First checks the settings and the launch, then
    sets what Transformers and Accelerate would get wrong without an accelerator.

    Raises:
        ConfigError: lists all settings that are not allowed.
        LaunchError, NetworkError: the job cannot run as it was launched, or its hosts cannot reach each other.
    """
    connect_streams()  # before anything asks for CUDA
    no_accelerator = not torch.accelerator.is_available()
    if no_accelerator and not args.use_cpu and args.bf16 is None:
        args.bf16 = False  # Transformers refuses TRL's default, True, on such a machine
    if no_accelerator:
        args.dataloader_pin_memory = False  # the default, True, only warns there
    if no_accelerator and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        args.use_cpu = True  # without these two Accelerate takes CPU processes for unrelated ones
        args.ddp_backend = args.ddp_backend or "gloo"
    check_settings(args)
    check_launch(args, allows_fsdp=hasattr(args, "use_vllm"))  # under FSDP Accelerate trains GRPO and RLOO
    set_gloo_interface()
    separate_attempts()
    wait_on_own_device()
    if not dist.is_initialized() and has_rendezvous():
        all_processes()  # a process group would wait for a host that cannot be reached
    if args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        leave_out_shared_memory_op()  # otherwise `TrainingArguments` compiles it
    # Trainer and TRL use the older name, here and in every generation
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    yield
