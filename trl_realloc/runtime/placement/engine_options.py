"""`EngineOptions`: settings of engines beside the execution plan. `trainer.run.job_builder` makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...engines.generation.vllm_support import engine_slots
from ...engines.requests import SamplingMask
from ...plan.assignment import CACHED_TOKENS
from ...plan.dataflow import CallKind
from ...plan.execution_plan import ExecutionPlan
from ...planner.iteration.stream import engine_samples
from ...realloc.transfer import TIMEOUT_S, TRANSFER_BUCKET_BYTES, TransferOptions
from ..failures.watchdog_client import HEARTBEAT_TIMEOUT_S


@dataclass(frozen=True)
class EngineOptions:
    """Settings of engines that the plan does not contain, from a trainer's configuration.

    Args:
        temperature: temperature of sampling and of log-probabilities.
        sampling_mask: sampling mask (top-k, top-p, min-p) of the policies' log-probabilities; `None` for all tokens.
        router_sums: whether trained policies compute the sums of the auxiliary loss of a mixture of experts
            (`router_loss`).
        router_replay: with which experts trained policies compute: `rollout`, those of the engine that sampled;
            `recompute`, those of the policy's first forward; `none`, those that they choose.
        response_length: maximum number of tokens of a response.
        context_length: number of tokens of the longest prompt and a response together.
        forward_batch_size: prompts or samples of one forward without gradients, if the plan has no token budget.
        train_batch_size: samples of one forward with gradients, if the plan has no token budget.
        make_optimizer: makes the optimizer of a role's module.
        generation_batch_size: batch size of generation by Transformers; `None` for `forward_batch_size`.
        usual_length: number of tokens of a long sample, if the longest possible one is much longer; 0 otherwise.
        compute_dtype: dtype of mixed precision; `None` without it.
        deepspeed: the user's DeepSpeed config.
        vllm: further arguments of `VLLMEngine`.
        bucket_bytes, transfer_timeout_s: the fields of `transfer`.
        collective_timeout_s: timeout of every process group (`ddp_timeout`).
        heartbeat_timeout_s: longest time that a signal may stop an engine's process.
        log_folder: folder for the logs of engines' processes; `None` for temporary logs.
    """

    device: torch.device
    temperature: float
    response_length: int
    context_length: int
    forward_batch_size: int
    train_batch_size: int
    pad_token_id: int
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    sampling_mask: SamplingMask | None = None
    router_sums: bool = False
    router_replay: str = "none"
    generation_batch_size: int | None = None
    usual_length: int = 0
    compute_dtype: torch.dtype | None = None
    max_grad_norm: float = 0.0
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    seed: int = 0
    vllm: Mapping[str, Any] = field(default_factory=dict)
    bucket_bytes: int = TRANSFER_BUCKET_BYTES
    transfer_timeout_s: float = TIMEOUT_S
    collective_timeout_s: float = 1800.0
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    log_folder: Path | None = None

    def for_plan(self, plan: ExecutionPlan, episodes: int) -> EngineOptions:
        """These options with enough slots in every vLLM engine for its samples at once, of `episodes` samples."""
        generations = plan.graph.calls_of(CallKind.GENERATE)
        slots = max([1, *(engine_samples(plan, name, episodes) for name in generations)])
        return replace(self, vllm={**self.vllm, "max_num_seqs": engine_slots(slots, self.vllm)})

    @property
    def transfer(self) -> TransferOptions:
        """Options of the messages of reallocations."""
        return TransferOptions(self.bucket_bytes, self.transfer_timeout_s)

    def budget(self, *, trains: bool) -> int:
        """Maximum tokens of one forward, if the plan has no number: the batch size times the longest sample's tokens.
        On the CPU at most `CACHED_TOKENS`."""
        tokens = self.batch_tokens(trains=trains)
        return min(tokens, CACHED_TOKENS) if self.device.type == "cpu" else tokens

    def batch_tokens(self, *, trains: bool) -> int:
        """Maximum tokens of one forward by the user's settings: the batch size times the longest sample's tokens."""
        size = self.train_batch_size if trains else self.forward_batch_size
        return size * (self.usual_length or self.context_length)
