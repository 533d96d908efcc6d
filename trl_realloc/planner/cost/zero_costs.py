"""Costs of ZeRO: seconds of a data-parallel group's communication under each stage, and bytes of DeepSpeed's buffers
(0.19.8) beyond the parameters, gradients and optimizer states that it shards.

The volume of communication is from Rajbhandari et al. 2020, section 7, by the collectives that the engines call.
`pricing` multiplies the seconds by the measured factor `Rates.zero`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...plan.assignment import REDUCE_BUCKET, Assignment
from ...plan.model_spec import ModelSpec
from ...realloc.memory import gradient_bytes
from .hardware import Link


# DeepSpeed's defaults of stage3_max_live_parameters and stage3_max_reuse_distance: under stage 3 a module's parameters
# are gathered ahead of its use and kept for the next use while no more elements than these lie between. A module that
# computes has all of its own parameters, however many they are.
LIVE = 1_000_000_000


@dataclass(frozen=True)
class DataParallelGroup:
    """The replicas of one model.

    Args:
        dp: number of replicas.
        overlap: fraction of stage 3's communication that overlaps with arithmetic. Other stages do not overlap.
        layers: number of layers of the model; ZeRO-3 gathers them one by one.
    """

    link: Link
    dp: int
    overlap: float
    layers: int

    def gather_parameters(self, size: float, compute: float) -> float:
        """ZeRO-3: seconds of gathering all parameters once that do not overlap with the arithmetic.

        Args:
            size: bytes of the parameters.
            compute: seconds of the arithmetic meanwhile.
        """
        gather = self.link.gather(size, self.dp) + (self.layers - 1) * self.link.collective_latency / 2
        return gather - self.overlap * min(gather, compute)

    def backward(self, stage: int, size: float, parameters: float, compute: float) -> float:
        """Seconds of one micro-batch's communication that do not overlap with its forward and backward, with the
        arguments of `optimizer_step`. Stage 2 sums the gradients of every micro-batch, and stage 3 also gathers
        parameters."""
        if stage == 3:
            scatter, under = self.link.gather(size, self.dp), self.overlap * compute * 2 / 3
            return 2 * self.gather_parameters(parameters, compute / 3) + scatter - self.overlap * min(scatter, under)
        return self.link.all_reduce(size, self.dp) if stage == 2 else 0.0

    def optimizer_step(
        self,
        stage: int,
        size: float,
        weights: float,
        parameters: float,
        micro: int,
        compute: float,
        *,
        by_owner: bool = False,
    ) -> float:
        """Seconds of one optimizer step's communication that do not overlap with the backward.

        DeepSpeed (0.19.8) sums the gradients of stages 1 and 2 by all-reduces, under stage 2 for every micro-batch
        (`use_multi_rank_bucket_allreduce`), without overlap (`overlap_comm`). Replicas and megatron sum gradients after
        the last backward.

        Args:
            size: bytes of the gradients that a rank computes.
            weights: bytes of the trained parameters, which stages 1 and 2 gather after the step.
            parameters: bytes of all parameters, which stage 3 gathers.
            micro: number of micro-batches.
            compute: seconds of the forward and backward of one micro-batch.
            by_owner: whether gradients are summed on the rank that updates their parameter (megatron under stage 1),
                which sends as many bytes as a reduce-scatter.
        """
        backwards = micro * self.backward(stage, size, parameters, compute)
        if stage == 3:
            return backwards
        gathered = self.link.gather(weights, self.dp) if stage else 0.0
        if stage == 2:
            return backwards + gathered
        return gathered + (self.link.gather(size, self.dp) if by_owner else self.link.all_reduce(size, self.dp))


def held_bucket(spec: ModelSpec, assignment: Assignment) -> float:
    """Bytes of the flat buffer of gradients that stage 3 holds for each model that it trains."""
    return _bucket(spec, assignment) if assignment.strategy.zero_stage == 3 else 0.0


def backward_bucket(spec: ModelSpec, assignment: Assignment) -> float:
    """Bytes of the flat buffer of gradients that stages 1 and 2 hold during a backward."""
    return _bucket(spec, assignment) if assignment.strategy.zero_stage in (1, 2) else 0.0


def gathered_bytes(spec: ModelSpec, assignment: Assignment) -> float:
    """The largest number of bytes of parameters that stage 3 has gathered at a time."""
    gathered = max(min(LIVE, spec.elements), spec.largest_module)
    return gathered * spec.bytes_per_element if assignment.strategy.zero_stage == 3 else 0.0


def whole_gradient(spec: ModelSpec, assignment: Assignment) -> float:
    """Bytes of the unsharded gradient of the largest parameter, which stage 3 holds while it sums this gradient: 0 if
    the gradient fits into the flat buffer, and twice if it cannot be divided evenly among the ranks."""
    strategy, largest = assignment.strategy, spec.largest_parameter
    if strategy.zero_stage != 3 or strategy.dp == 1 or spec.trained_share < 1 or largest <= REDUCE_BUCKET:
        return 0.0
    copies = 1 if largest % strategy.dp == 0 else 2
    return copies * largest * gradient_bytes(spec.bytes_per_element, assignment)


def _bucket(spec: ModelSpec, assignment: Assignment) -> float:
    if assignment.engine != "zero":
        return 0.0
    return min(REDUCE_BUCKET, spec.trained_share * spec.elements) * gradient_bytes(spec.bytes_per_element, assignment)
