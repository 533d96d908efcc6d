"""Seconds of one reallocation, from its transfer schedule or, without one, as a quick estimate."""

from __future__ import annotations

from ...plan.assignment import Assignment
from ...plan.model_spec import ModelSpec
from ...realloc.schedule import TransferSchedule
from .hardware import Rates
from .pricing import Pricing


def move_seconds(schedule: TransferSchedule, rates: Rates) -> float:
    """Seconds of one reallocation on the slowest device. A device sends and receives at the same time."""
    inside, between = schedule.traffic()
    seconds = most = 0.0
    for sent_in, received_in, sent_out, received_out in zip(*inside, *between, strict=True):
        inside_s = max(sent_in, received_in) / rates.inside.bandwidth
        between_s = max(sent_out, received_out) / rates.between.bandwidth
        seconds = max(seconds, inside_s + between_s)
        most = max(most, sent_in + sent_out, received_in + received_out)
    return seconds + schedule.waves * rates.between.latency + rates.reallocation(float(most)) if seconds else 0.0


def quick_move_seconds(spec: ModelSpec, home: Assignment, other: Assignment, pricing: Pricing) -> float:
    """An estimate of `move_seconds` without a transfer schedule, for a search that ranks thousands of plans.

    It uses the larger of the bytes that a device receives and the mean number of bytes that a device sends.
    """
    rates = pricing.rates
    split = other.strategy.tp * other.strategy.pp if other.engine == "megatron" else 1
    receivers = other.mesh.size // (other.strategy.tp if other.engine == "vllm" else 1)
    held = home.strategy.tp * home.strategy.pp * (home.strategy.dp if home.strategy.zero_stage == 3 else 1)
    received = spec.bytes / split * (1 - 1 / held if home.mesh.overlaps(other.mesh) else 1)
    together = (
        home.mesh.first // pricing.cluster.devices_per_node == other.mesh.last // pricing.cluster.devices_per_node
    )
    link = rates.inside if together else rates.between
    size = max(received, received * receivers / home.mesh.size)
    return size / link.bandwidth + rates.reallocation(size)
