"""Cost of a call (`CallCost`) and of one stage of a training pipeline. The formulas are in `pricing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


# The causes of a call's seconds, with the text that messages show.
PARTS = {
    "compute": "arithmetic",
    "memory": "reading weights and caches (memory bandwidth)",
    "dispatch": "receiving and sending samples",
    "launch": "scheduling decode steps",
    "tensor": "tensor-parallel collectives",
    "pipeline": "messages between pipeline stages",
    "bubble": "pipeline stages that wait (bubbles)",
    "data": "data-parallel reductions and ZeRO's gathers",
    "optimizer": "optimizer steps",
    "load": "parameters into the engine or back from host memory",
    "functions": "reward functions",
}


@dataclass(frozen=True)
class CallCost:
    """Seconds and memory of one call.

    Args:
        parts: seconds of the slowest device, by the keys of `PARTS`.
        static: bytes that each device of the mesh holds during the whole iteration.
        transient: additional bytes that each device holds while the call runs.
        gradients: bytes of gradients in `transient`. Every engine frees them after an optimizer step.
    """

    parts: Mapping[str, float]
    static: float = 0.0
    transient: float = 0.0
    gradients: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def __add__(self, other: CallCost) -> CallCost:
        """The cost of both calls, one after the other."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        gradients = max(self.gradients, other.gradients)
        return CallCost(parts, self.static + other.static, max(self.transient, other.transient), gradients)

    def times(self, factor: float) -> CallCost:
        """The cost of a call that takes `factor` times as long."""
        return replace(self, parts={name: factor * seconds for name, seconds in self.parts.items()})

    def slowed(self, slowdown: float, few: Sequence[float] = ()) -> CallCost:
        """The cost on devices that share processors.

        Args:
            slowdown: factor of the seconds while all devices work.
            few: the factor while only the first stages of a pipeline work, from one stage to all but one.
        """
        if slowdown == 1.0:
            return self
        parts = dict(self.parts)
        waiting = parts.pop("bubble", 0.0)  # while a stage waits, other stages use its processors
        parts = {name: seconds * slowdown for name, seconds in parts.items()}
        if few:
            parts["bubble"] = max(0.0, waiting / len(few) * sum(2 * factor - slowdown for factor in few))
        else:
            parts["bubble"] = max(0.0, waiting - sum(parts.values()) * (1 - 1 / slowdown))
        return CallCost(parts, self.static, self.transient)


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch on one pipeline stage.

    Args:
        computes: seconds of arithmetic of the forward and of the backward.
        collectives: seconds of tensor-parallel collectives of the forward and of the backward.
        message: seconds of a message to the next stage; 0 without a pipeline.
    """

    computes: tuple[float, float]
    collectives: tuple[float, float]
    message: float

    @property
    def compute(self) -> float:
        return sum(self.computes)

    @property
    def tensor(self) -> float:
        return sum(self.collectives)

    def times(self, factor: float) -> StageSeconds:
        computes, collectives = (
            (factor * forward, factor * backward) for forward, backward in (self.computes, self.collectives)
        )
        return StageSeconds(computes, collectives, factor * self.message)


@dataclass(frozen=True)
class TrainingStage:
    """The slowest stage of a pipeline that trains.

    Args:
        micro_batches: number of micro-batches in a replica's mini-batch.
        seconds: seconds of one micro-batch.
        kept: bytes of a micro-batch's activations from its forward to its backward.
        working: additional bytes while one micro-batch is computed.
    """

    micro_batches: int
    seconds: StageSeconds
    kept: float
    working: float
