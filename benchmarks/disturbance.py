"""How much processor time other processes take while a benchmark's job runs. On a machine that others use, a run is
repeated until they took little."""

from __future__ import annotations

import os

import psutil


MOST = 0.03  # of the machine's processor time; a run in which others took more is repeated
TIMES = ("user", "nice", "system", "irq", "softirq", "steal")


class Disturbance:
    """Counts from its construction.

    Args:
        root: the process whose descendants are the job.
    """

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._machine, self._job = _machine_s(), self._job_s()

    def core_seconds(self) -> float:
        """Core-seconds of all processes that are not the job's, and of the system. Exact to some 0.05 s, because the
        system counts in units of 0.01 s."""
        return max(0.0, _machine_s() - self._machine - (self._job_s() - self._job))

    def _job_s(self) -> float:
        total = 0.0
        for process in (self._root, *self._root.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
        return total


def is_disturbed(core_seconds: float, seconds: float) -> bool:
    """Whether others took so many core-seconds of a run that it should be repeated."""
    return core_seconds > MOST * seconds * (os.cpu_count() or 1)


def _machine_s() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in TIMES)
