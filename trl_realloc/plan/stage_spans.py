"""`StageSpan`: measured and expected times of one forward or backward on a stage, for two calls that train together.

`MiniBatchStages` saves the spans of one mini-batch and makes timelines of them. The times are measured in
`engines/training/fused_training`, the expected ones computed in `runtime/fused/mini_batch`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Lt
from pydantic import ConfigDict

from ..common.files import MAX_RECORD_BYTES, read_json
from ..common.schema import checked
from .cluster import MAX_DEVICES
from .timeline import Count, Seconds, Span, Timeline


@dataclass(frozen=True)
class StageSpan:
    """One forward or backward of a micro-batch on one stage.

    Args:
        call: the training call, such as `actor.train`.
        kind: `forward` or `backward`.
        micro_batch: its number within the call's pipeline, from 0.
        device: the stage's rank; the first rank of a tensor group.
        start, end: seconds, of one clock for all stages of a host, without waiting for the input.
        step: the iteration, from 0.
        expected: start and end by the schedule, in seconds from the schedule's start; `None` if the stages' times had
            not been measured before.

    Raises:
        ValueError: a time ends before it starts.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    call: str
    kind: Literal["forward", "backward"]
    micro_batch: Count
    device: Annotated[int, Ge(0), Lt(MAX_DEVICES)]
    start: Seconds
    end: Seconds
    step: Count
    expected: tuple[Seconds, Seconds] | None = None

    def __post_init__(self) -> None:
        for start, end in ((self.start, self.end), self.expected or (0.0, 0.0)):
            if not end >= start:
                raise ValueError(f"a {self.kind} of {self.call} ends ({end} s) before {start} s.")


@dataclass(frozen=True)
class MiniBatchStages:
    """The spans of one mini-batch, in any order; at least one."""

    spans: tuple[StageSpan, ...]

    def __init__(self, spans: Iterable[StageSpan]) -> None:
        object.__setattr__(self, "spans", tuple(spans))

    @cached_property
    def measured(self) -> Timeline:
        """Measured timeline with a call for each kind of task, such as `actor.train, forward`."""
        return Timeline(Span(task_name(s.call, s.kind), s.device, s.start, s.end, s.step) for s in self.spans)

    @cached_property
    def expected(self) -> Timeline | None:
        """The schedule's timeline, in the form of `measured`; `None` if any task has no expected time."""
        spans = [
            Span(task_name(s.call, s.kind), s.device, *s.expected, s.step) for s in self.spans if s.expected is not None
        ]
        return Timeline(spans) if len(spans) == len(self.spans) else None

    def save(self, path: str | Path) -> None:
        """Write JSON with a line for each span, with full precision."""
        lines = ",\n".join(json.dumps(asdict(span)) for span in self.spans)
        Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> MiniBatchStages:
        """The inverse of `save`. Raises `PlanError` with the file's name if the file is not such a record."""
        return MiniBatchStages(checked(list[StageSpan], read_json(path, "the stages", MAX_RECORD_BYTES), str(path)))


def task_name(call: str, kind: str) -> str:
    """Name of a call's forwards or backwards in a timeline."""
    return f"{call}, {kind}"
