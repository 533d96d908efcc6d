"""Bytes of DeepSpeed's buffers (0.19.8) beyond the parameters, gradients and optimizer states that it shards."""

from __future__ import annotations

from ...plan.assignment import REDUCE_BUCKET, Assignment
from ...plan.model_spec import ModelSpec
from ...realloc.memory import gradient_bytes


# DeepSpeed's defaults of stage3_max_live_parameters and stage3_max_reuse_distance: under stage 3 a module's parameters
# are gathered ahead of its use and kept for the next use while no more elements than these lie between.
LIVE = 1_000_000_000


def held_bucket(spec: ModelSpec, assignment: Assignment) -> float:
    """Bytes of the flat buffer of gradients that stage 3 holds for each model that it trains."""
    return _bucket(spec, assignment) if assignment.strategy.zero_stage == 3 else 0.0


def backward_bucket(spec: ModelSpec, assignment: Assignment) -> float:
    """Bytes of the flat buffer of gradients that stages 1 and 2 have while a backward runs."""
    return _bucket(spec, assignment) if assignment.strategy.zero_stage in (1, 2) else 0.0


def gathered_bytes(spec: ModelSpec, assignment: Assignment) -> float:
    """The most bytes of parameters that stage 3 has gathered at a time."""
    return min(LIVE, spec.elements) * spec.bytes_per_element if assignment.strategy.zero_stage == 3 else 0.0


def whole_gradient(spec: ModelSpec, assignment: Assignment) -> float:
    """Bytes of the gradient of the largest parameter, which stage 3 has whole while it sums that: of one that is larger
    than the buffer of gradients, and once more where the ranks cannot divide it evenly."""
    strategy, largest = assignment.strategy, spec.largest_parameter
    if strategy.zero_stage != 3 or strategy.dp == 1 or spec.trained_share < 1 or largest <= REDUCE_BUCKET:
        return 0.0
    copies = 1 if largest % strategy.dp == 0 else 2
    return copies * largest * gradient_bytes(spec.bytes_per_element, assignment)


def _bucket(spec: ModelSpec, assignment: Assignment) -> float:
    if assignment.engine != "zero":
        return 0.0
    return min(REDUCE_BUCKET, spec.trained_share * spec.elements) * gradient_bytes(spec.bytes_per_element, assignment)
