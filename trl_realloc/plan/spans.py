"""`Span`: the time of one call, or of the user's function, on one device. A `timeline` has the spans of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le, Lt
from pydantic import ConfigDict

from .cluster import MAX_DEVICES


Seconds = Annotated[float, Ge(-1e12), Le(1e12)]  # finite; 30,000 years, more than any clock shows
Count = Annotated[int, Ge(0), Lt(2**63)]
REWARD_FUNCTION, TOOL = "reward: ", "tool: "  # prefixes of span names of functions on the host
TOOL_WORKERS = 8  # number of threads for which `Span.threaded_s` is estimated
LOOP = "training loop"  # name of spans in which no device runs a call or a function


@dataclass(frozen=True, order=True)
class Span:
    """An interval in which one device ran one call.

    Args:
        call: name of the call, such as `actor.generate`, or of a reallocation; for work on the host the name of a
            reward function or a tool (`REWARD_FUNCTION`, `TOOL`), or `LOOP`.
        device: the rank.
        start, end: seconds, of one clock for the whole timeline.
        step: the iteration, from 0.
        tokens: number of tokens that this device processed; 0 if not counted.
        bytes: bytes sent by all devices, for a reallocation.
        samples: number of samples that this device generated or scored until `end`; 0 if not counted.
        shared_tokens: number of tokens of common prefixes that this device did not score or train on again.
        threaded_s: estimated seconds of a tool's calls in `TOOL_WORKERS` threads, if they ran one after the other; 0
            if not estimated. The first span of a tool in a step has the estimate for all of them.

    Raises:
        ValueError: the span ends before it starts.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    call: str
    device: Annotated[int, Ge(0), Lt(MAX_DEVICES)]
    start: Seconds
    end: Seconds
    step: Count
    tokens: Count = 0
    bytes: Count = 0
    samples: Count = 0
    shared_tokens: Count = 0
    threaded_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if not self.end >= self.start:
            raise ValueError(
                f"the span of {self.call} on device {self.device} ends ({self.end} s) before {self.start} s."
            )

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_host_work(self) -> bool:
        """True for a reward function, a tool and the training loop, which are not calls of the plan."""
        return is_host_work(self.call)


def is_host_work(name: str) -> bool:
    """True for the span names of reward functions, tools and the training loop."""
    return name == LOOP or name.startswith((REWARD_FUNCTION, TOOL))


def loop_spans(spans: Iterable[Span], start: float, end: float, step: int) -> tuple[Span, ...]:
    """The times of an update in which no device runs a call or a function, as spans of device 0. The first begins with
    the update and the last ends with it; both may have zero length.

    Args:
        spans: the update's spans on all devices.
        start, end: times of the update, in seconds of the spans' clock.
    """
    idle, reached, end = list[Span](), start, max(start, end)
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > reached or not idle:
            idle.append(Span(LOOP, 0, reached, max(reached, min(span.start, end)), step))
        reached = min(max(reached, span.end), end)
    return (*idle, Span(LOOP, 0, reached, end, step))
