"""`Liveness`: the state of every rank as rank 0's watchdog knows it, and the rules for when the job has failed.

Pure: no process, socket or clock. `coordinator_watchdog` passes in the messages and sends the verdict.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ...engines.child_process import JOB_SIGNALS


START_S = 600.0  # time limit of a rank's start: ranks that read a config from a busy server start minutes apart
PAUSE_S = 5.0  # a watchdog that did not run for this long was paused, so the others' silence means nothing


class Kind(IntEnum):
    """Kinds of failures, ordered by how likely they are the first cause. Later kinds are often consequences of earlier
    ones."""

    ERROR = 0  # a rank's own exception
    KILLED = 1  # ended by a signal that no launcher sends
    STOPPED = 2  # stopped by a signal (SIGSTOP), so it neither runs nor ends
    GONE = 3  # its watchdog closed the connection without reporting the rank's end
    SILENT = 4  # nothing heard within the time limit
    ABORTED = 5  # SIGABRT: how NCCL ends a rank that has lost another one
    EXITED = 6  # ended with a nonzero exit status and no message
    TERMINATED = 7  # a signal of the job (`JOB_SIGNALS`), such as SIGTERM: how a launcher ends the rest of a job
    NETWORK = 8  # a collective or message failed; the cause is likely another rank


# Seconds that a report waits for a likelier cause: "connection reset" waits for the report of the peer's death.
_SETTLE_S = {Kind.ERROR: 0.0, Kind.KILLED: 0.0, Kind.STOPPED: 0.0, Kind.ABORTED: 3.0, Kind.NETWORK: 3.0}
_SETTLE_DEFAULT_S = 0.5


@dataclass(frozen=True)
class Verdict:
    """Why the job failed.

    Args:
        sentence: message with rank, host, call and cause.
        fatal: a process or a host is lost, so no process of the job can go on. Otherwise an exception was raised,
            which a script may catch on all ranks.
        generation: number of the process's runtime in which the job failed (`Alarm`).
    """

    sentence: str
    fatal: bool
    generation: int = 0


@dataclass
class RankState:
    """Latest news of one rank, from its watchdog's heartbeats.

    Args:
        heard: time of its latest heartbeat, in seconds of the watchdog's clock; before the first one, rank 0's start.
        activity: the rank's present activity, such as "actor.train of update 3".
        stopped_s, launcher_stopped_s: seconds that the rank or its launcher has been stopped by a signal.
        leaving: the newest generation whose failure ends the rank; -1 for none.
    """

    rank: int
    heard: float
    host: str = "an unknown host"
    pid: int = 0
    activity: str = "starting"
    stopped_s: float = 0.0
    launcher_stopped_s: float = 0.0
    ended: bool = False
    leaving: int = -1

    @property
    def has_begun(self) -> bool:
        return self.pid > 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} on host {self.host}"


@dataclass
class _Report:
    kind: Kind
    sentence: str
    reported_at: float
    generation: int = 0
    ranks: tuple[int, ...] = ()


@dataclass
class Liveness:
    """The state of all ranks and the reports of failures that have not been judged yet.

    Args:
        timeout_s: longest silence of a rank, and longest stop by a signal, before the job fails. At least `START_S` for
            a rank that has not begun.
        now: time of the latest judgement, in seconds of the watchdog's clock.
    """

    world_size: int
    timeout_s: float
    now: float
    ranks: dict[int, RankState] = field(default_factory=dict)
    verdict: Verdict | None = None
    _reports: list[_Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = {rank: RankState(rank, self.now) for rank in range(self.world_size)}

    def hear(self, rank: int, now: float, **changes: object) -> None:
        """Record a heartbeat of a rank, with new values of its `RankState`."""
        self.ranks[rank] = replace(self.ranks[rank], heard=now, **changes)  # type: ignore[arg-type]

    def error(self, now: float, sentence: str, generation: int, *, network: bool) -> None:
        """Report a rank's exception.

        Args:
            network: a collective or a message raised the exception, so another rank is the likely cause.
        """
        if self.verdict is None or (not self.verdict.fatal and generation > self.verdict.generation):
            self._report(Kind.NETWORK if network else Kind.ERROR, sentence, now, generation)

    def end(self, rank: int, now: float, status: int | None, is_exiting: bool, launcher: str = "") -> None:
        """Report that a rank's process has ended.

        Args:
            status: `waitpid`'s status; `None` if it could not be read.
            is_exiting: the interpreter had begun a normal shutdown.
            launcher: a sentence if the launcher has ended too, which ends its ranks.
        """
        state = self.ranks[rank]
        state.ended = True
        # a single process has no other ranks, and its exit status is visible to the user
        if self.world_size == 1 or status == 0 or (status is None and is_exiting):
            return
        name = f"{state.name} (pid {state.pid})"
        number = (status or 0) & 0x7F
        if launcher and (status is None or number):
            self._report(Kind.KILLED, f"{launcher} {state.name} was in {state.activity}.", now)
        elif status is None:
            self._report(Kind.KILLED, f"{name} ended for an unknown reason in {state.activity}.", now)
        elif number in JOB_SIGNALS:
            self._report(Kind.TERMINATED, f"{name} was ended by {_signal(number)} in {state.activity}.", now)
        elif number:
            hint = " (the kernel's out-of-memory killer sends it too)" if number == signal.SIGKILL else ""
            kind = Kind.ABORTED if number == signal.SIGABRT else Kind.KILLED
            self._report(kind, f"{name} was ended by {_signal(number)}{hint} in {state.activity}.", now)
        else:
            self._report(Kind.EXITED, f"{name} ended with exit status {status >> 8} in {state.activity}.", now)

    def lose(self, rank: int, now: float) -> None:
        """Report that a rank's watchdog closed its connection without reporting the rank's end."""
        if not self.ranks[rank].ended:
            self._report(Kind.GONE, "", now, ranks=(rank,))

    def judge(self, now: float) -> Verdict | None:
        """A new verdict, or `None`. Must be called every second or more often."""
        if now - self.now > PAUSE_S:
            for state in self.ranks.values():
                state.heard += now - self.now
        self.now = now
        self._look_for_stops(now)
        self._look_for_silence(now)
        if not self._reports:
            return None
        first = min(self._reports, key=lambda report: report.kind)
        if any(now - r.reported_at >= _SETTLE_S.get(first.kind, _SETTLE_DEFAULT_S) for r in self._reports):
            self._reports.clear()
            return self._decide(first)
        return None

    @property
    def is_undecided(self) -> bool:
        """True if a report waits for a likelier cause."""
        return bool(self._reports)

    def _decide(self, report: _Report) -> Verdict | None:
        fatal = report.kind not in (Kind.ERROR, Kind.NETWORK)
        earlier = self.verdict
        if earlier is not None and earlier.fatal:
            return None
        if earlier is not None and report.kind in (Kind.EXITED, Kind.TERMINATED, Kind.GONE):
            self.verdict = replace(earlier, fatal=True)  # ranks end because of the earlier failure
            return self.verdict
        self.verdict = Verdict(report.sentence, fatal, report.generation)
        return self.verdict

    def _look_for_stops(self, now: float) -> None:
        living = [state for state in self.ranks.values() if not state.ended]
        if all(state.stopped_s > 0 for state in living):
            return  # the whole job is suspended, such as by Ctrl-Z
        for state in living:
            for seconds, subject in (
                (state.stopped_s, f"{state.name} (pid {state.pid}) has"),
                (state.launcher_stopped_s, f"the launcher of {state.name} has"),
            ):
                if seconds >= self.timeout_s:
                    limit = f"heartbeat_timeout is {self.timeout_s:g} s"
                    reason = f"{subject} been stopped by a signal (SIGSTOP) for {seconds:.0f} s in {state.activity}"
                    self._report(Kind.STOPPED, f"{reason}; {limit}.", now)

    def _look_for_silence(self, now: float) -> None:
        silent = [s for s in self.ranks.values() if not s.ended and now - s.heard > self._limit_of(s)]
        if silent:
            self._report(Kind.SILENT, "", now, ranks=tuple(s.rank for s in silent))
        for report in self._reports:  # ranks of a host are lost together, so one sentence names all of them
            if report.kind in (Kind.SILENT, Kind.GONE):
                lost = sorted({rank for r in self._reports if r.kind == report.kind for rank in r.ranks})
                report.sentence = self._loss_sentence(report.kind, [self.ranks[rank] for rank in lost])

    def _limit_of(self, state: RankState) -> float:
        return self.timeout_s if state.has_begun else max(self.timeout_s, START_S)

    def _loss_sentence(self, kind: Kind, states: list[RankState]) -> str:
        where = f"it was last in {states[0].activity}" if len(states) == 1 else f"last in {states[0].activity}"
        if kind is Kind.GONE:
            return f"{name_ranks(states)} ended at once with the watchdog (killed, or the host went down); {where}."
        late = [state for state in states if not state.has_begun]
        if len(late) == len(states):
            numbers = ", ".join(str(state.rank) for state in late)
            return (
                f"rank{'s' * (len(late) > 1)} {numbers} did not begin within {self._limit_of(late[0]):g} s after "
                f"rank 0: the trainer is made there much later, or rank 0 cannot be reached from there."
            )
        return (
            f"nothing was heard from {name_ranks(states)} for {self.timeout_s:g} s (heartbeat_timeout); {where}. The "
            "host or its network is down, or the host is stopped."
        )

    def _report(self, kind: Kind, sentence: str, now: float, generation: int = 0, ranks: tuple[int, ...] = ()) -> None:
        if not any(r.kind == kind and (r.sentence == sentence or r.ranks == ranks != ()) for r in self._reports):
            self._reports.append(_Report(kind, sentence, now, generation, ranks))

    def all_leaving(self, generation: int) -> bool:
        """True if every rank has ended, or is about to end because of a failure of this generation."""
        return all(state.ended or state.leaving >= generation for state in self.ranks.values())


def name_ranks(states: Iterable[RankState]) -> str:
    """A phrase such as "rank 3 on host b" or "ranks 2, 3 on host b and rank 4 on host c"."""
    by_host: dict[str, list[int]] = {}
    for state in states:
        by_host.setdefault(state.host, []).append(state.rank)
    return " and ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on host {host}" for host, ranks in by_host.items()
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
