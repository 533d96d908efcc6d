"""The messages of a streamed phase: events from ranks to rank 0 (`Event`), and rank 0's orders to them (`Task`).

They are the events and orders of `planner.iteration.stream_dispatcher` with the samples that belong to them. A sample's
columns from one call are bytes (`Rollouts.to_bytes` of one row), which only the ranks that read them decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...engines.requests import Unfinished
from ...planner.iteration.stream_dispatcher import Release, Withdraw
from ..calls.batch import Failures
from .leader_link import Left


Rows = Mapping[int, bytes]  # sample index -> the sample's columns from one call


@dataclass(frozen=True)
class Joined:
    """A rank has begun its part of the phase."""

    rank: int


@dataclass(frozen=True)
class Finished:
    """An engine has finished samples.

    Args:
        tokens: number of response tokens of each sample.
        rows: the columns that streamed calls read.
    """

    engine: int
    tokens: Mapping[int, int]
    rows: Rows


@dataclass(frozen=True)
class Withdrawn:
    """An engine has stopped samples."""

    engine: int
    samples: tuple[Unfinished, ...]


@dataclass(frozen=True)
class Scored:
    """A replica of a team has run the forward of this number.

    Args:
        rows: the columns that streamed calls read; empty if there are none.
    """

    number: int
    rows: Rows


@dataclass(frozen=True)
class Failed:
    """A call failed on a rank."""

    failures: Failures


Event = Joined | Finished | Withdrawn | Scored | Failed | Left


@dataclass(frozen=True)
class Forward:
    """Run one forward.

    Args:
        samples: indices of the samples of this rank's replica, ascending.
        rows: columns of these samples by call; of another sample if the replica has none. Only for the first rank of a
            replica, which forwards them.
    """

    number: int
    call: str
    team: int
    samples: tuple[int, ...]
    rows: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class GoOn:
    """Continue generating samples that another engine has begun."""

    samples: tuple[Unfinished, ...]


@dataclass(frozen=True)
class End:
    """The phase has ended.

    Args:
        failures: failures of calls; empty if every sample was generated and scored.
    """

    failures: Failures = ()


Task = Forward | GoOn | Withdraw | Release | End
