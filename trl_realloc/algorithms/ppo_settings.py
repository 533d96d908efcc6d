"""The settings of PPO's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plan.algorithm_graphs import ppo_graph
from ..plan.dataflow import DataflowGraph
from .corrections import Correction, Mode


@dataclass(frozen=True)
class PPOSettings:
    """The fields of `PPOConfig` that the arithmetic needs, under the same names.

    Args:
        response_length: most tokens of a response.
        local_batch_size, per_device_train_batch_size: read only with `match_trl`.
        match_trl: reproduce the parts of TRL 1.12's arithmetic that depend on the layout of the batch: whitening per
            rank, a loss that is the mean over micro-batches of their token means, statistics over padded positions, and
            the longest response of the rank's batch instead of `response_length`.
        vllm_importance_sampling_correction: correct for rollouts that were not sampled from the policy before the
            updates. `None` is False.
    """

    response_length: int
    num_ppo_epochs: int = 4
    num_mini_batches: int = 1
    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k3"] = "k1"
    whiten_rewards: bool = False
    missing_eos_penalty: float | None = None
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    local_batch_size: int = 0
    per_device_train_batch_size: int = 0
    match_trl: bool = False
    vllm_importance_sampling_correction: bool | None = None
    vllm_importance_sampling_mode: Mode = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None

    @property
    def correction(self) -> Correction | None:
        """The correction of rollouts; `None` for none."""
        if not self.vllm_importance_sampling_correction:
            return None
        return Correction(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_max,
            self.vllm_importance_sampling_clip_min,
        )

    @property
    def graph(self) -> DataflowGraph:
        """PPO's calls, with `actor.forward` if there is a correction."""
        return ppo_graph(proximal=self.correction is not None)
