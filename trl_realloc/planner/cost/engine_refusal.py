"""The error for a share of a device that is too small for a vLLM engine under every assignment."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

from ...common.errors import PlanError
from ...plan.assignment import Assignment, ParallelStrategy
from ...plan.cluster import DeviceMesh
from ...plan.dataflow import Call
from ...plan.model_spec import ModelSpec
from .engine_room import EngineRoom
from .pricing import Pricing


MAX_TENSOR = 64  # largest tensor-parallel degree that the message suggests


class SmallShareError(PlanError):
    """No vLLM engine fits into its share of a device, on however many such devices."""


def check_share(call: Call, specs: Sequence[ModelSpec], pricing: Pricing, assignments: Iterable[Assignment]) -> None:
    """Refuses a share of a device in which none of these engines fits.

    Args:
        assignments: all assignments that the call may have.

    Raises:
        SmallShareError: names the share, the least that an engine needs, and settings that would be enough.
    """
    needs = [(room.needed, a, room) for a in assignments if (room := _room(a, specs, pricing)) is not None]
    if not needs or any(a.engine != "vllm" for a in assignments) or any(need <= room.share for need, _, room in needs):
        return
    _, assignment, room = min(needs, key=lambda need: (need[0], -need[2].share))
    tp, tokens, share = assignment.strategy.tp, pricing.longest_request, pricing.share_of(assignment)
    remedies = [*_shares(room, pricing), *_larger_nodes(room, tp, share, specs, pricing)]
    enough = f"{' or '.join(remedies)} would be enough for the engine."
    if not remedies:
        enough = "no share of such devices is enough."
    raise SmallShareError(
        f"{call.name} fits on no mesh of {pricing.cluster}: a vLLM engine has {room.share / 1e9:.1f} GB of a device "
        f"(vllm_gpu_memory_utilization {share:g}) and needs {room.needed / 1e9:.1f} GB with tp {tp}: "
        f"{room.weights / 1e9:.1f} for its weights, {room.peak / 1e9:.1f} for its largest forward and "
        f"{room.request / 1e9:.1f} for the cache of one request of {tokens:,.0f} tokens; {enough}"
    )


def _shares(room: EngineRoom, pricing: Pricing) -> list[str]:
    """The smallest share that is large enough, if a device has so much memory."""
    memory = pricing.memory
    assert memory is not None, "an engine with room has a device of known memory"
    share = math.ceil(100 * room.needed / memory.total) / 100
    with contextlib.suppress(PlanError):
        if share * memory.total <= memory.usable:
            memory.check_engine(share)
            return [f"vllm_gpu_memory_utilization {share:g}"]
    return []


def _larger_nodes(room: EngineRoom, tp: int, share: float, specs: Sequence[ModelSpec], pricing: Pricing) -> list[str]:
    """The smallest node size whose tensor-parallel degree makes this share enough, if the models can be split so."""
    degrees = (1 << power for power in range(MAX_TENSOR.bit_length()))
    for degree in degrees:
        if degree > max(tp, pricing.cluster.devices_per_node) and all(spec.generates_under(degree) for spec in specs):
            split = Assignment(DeviceMesh(0, degree), ParallelStrategy(1, degree), "vllm", memory_share=share)
            larger = _room(split, specs, pricing)
            if larger is not None and larger.needed <= room.share:
                return [f"nodes of {degree} devices (tp {degree}, which needs {larger.needed / 1e9:.1f} GB)"]
    return []


def _room(assignment: Assignment, specs: Sequence[ModelSpec], pricing: Pricing) -> EngineRoom | None:
    """The room of the model that needs most memory. `None` if the memory of the devices is unknown."""
    share = math.ceil(pricing.workload.episodes / assignment.strategy.dp)
    rooms = [room for spec in specs if (room := pricing.engine_room(spec, assignment, share)) is not None]
    return max(rooms, key=lambda room: room.needed, default=None)
