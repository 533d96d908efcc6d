"""Time for tests with many threads: `RealClock`, and `VirtualClock`, in which computing takes no time and what happens
does not depend on how busy the machine is."""

from __future__ import annotations

import heapq
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Clock(Protocol):
    """What the fakes ask of time."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def queue(self) -> Any: ...

    def barrier(self, parties: int) -> Any: ...

    def thread(self, target: Callable[..., object], args: Sequence[Any] = (), **options: Any) -> Any: ...


class RealClock:
    """The clock of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def queue(self) -> queue.SimpleQueue[Any]:
        return queue.SimpleQueue()

    def barrier(self, parties: int) -> threading.Barrier:
        return threading.Barrier(parties)

    def thread(self, target: Callable[..., object], args: Sequence[Any] = (), **options: Any) -> threading.Thread:
        return threading.Thread(target=target, args=args, **options)


REAL = RealClock()


class Stuck(RuntimeError):
    """Every thread waits, and no time is set at which one of them goes on."""


class _Wait:
    """A thread that waits."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.has_ended = False


class VirtualClock:
    """The clock of the thread that makes it and of all threads made by `thread`. One of them runs at a time, until it
    waits; then the clock jumps to the earliest time at which one goes on. Of threads that go on at the same time, the
    first for which this was known.

    They may wait for each other by `queue`, `barrier` and `join` of this clock alone.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._wakes: list[tuple[float, int, _Wait]] = []  # a heap of (time, number, who goes on)
        self._number = 0
        self._waiting: set[_Wait] = set()
        self._is_stuck = False

    def monotonic(self) -> float:
        return self._now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.wait(_Wait(), seconds)

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self)

    def barrier(self, parties: int) -> VirtualBarrier:
        return VirtualBarrier(self, parties)

    def thread(self, target: Callable[..., object], args: Sequence[Any] = (), **options: Any) -> VirtualThread:
        return VirtualThread(self, target, args, **options)

    # --- for what threads wait for ------------------------------------------------------------------------------------

    def wait(self, wait: _Wait, seconds: float = math.inf) -> None:
        """Let other threads run until `wake`, or until this time has passed. Raises `Stuck`."""
        self._waiting.add(wait)
        if seconds < math.inf:
            self._wake_at(self._now + max(0.0, seconds), wait)
        self.pass_on()
        wait.turn.acquire()
        self._waiting.discard(wait)
        if self._is_stuck:
            raise Stuck("every thread waits for ever")

    def wake(self, wait: _Wait) -> None:
        """A thread goes on now, after those of which this was known before."""
        self._wake_at(self._now, wait)

    def _wake_at(self, at: float, wait: _Wait) -> None:
        heapq.heappush(self._wakes, (at, self._number, wait))
        self._number += 1

    def pass_on(self) -> None:
        """Let the next thread run. The calling thread must not do anything after this but wait for its turn, or end."""
        while self._wakes:
            at, _, wait = heapq.heappop(self._wakes)
            if not wait.has_ended:
                self._now, wait.has_ended = max(self._now, at), True
                wait.turn.release()
                return
        self._is_stuck = True
        for wait in list(self._waiting):
            wait.turn.release()


class VirtualThread:
    """What tests use of `threading.Thread`."""

    def __init__(
        self, clock: VirtualClock, target: Callable[..., object], args: Sequence[Any] = (), **options: Any
    ) -> None:
        self._clock, self._target, self._args = clock, target, args
        self._start, self._joining = _Wait(), list[_Wait]()
        self._is_alive = True
        self._thread = threading.Thread(target=self._run, **{"daemon": True, **options})

    def start(self) -> None:
        self._thread.start()
        self._clock.wake(self._start)

    def join(self, timeout: float | None = None) -> None:
        if self._is_alive:
            wait = _Wait()
            self._joining.append(wait)
            self._clock.wait(wait, math.inf if timeout is None else timeout)

    def is_alive(self) -> bool:
        return self._is_alive

    def _run(self) -> None:
        self._start.turn.acquire()
        try:
            self._target(*self._args)
        finally:
            self._is_alive = False
            for wait in self._joining:
                self._clock.wake(wait)
            self._clock.pass_on()


class VirtualQueue:
    """What tests use of `queue.SimpleQueue`."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items, self._getting = deque[Any](), deque[_Wait]()

    def put(self, item: Any) -> None:
        self._items.append(item)
        while self._getting:
            wait = self._getting.popleft()
            if not wait.has_ended:
                self._clock.wake(wait)
                return

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The first item; with one getting thread for each queue. Raises `queue.Empty`."""
        if not self._items and block:
            wait = _Wait()
            self._getting.append(wait)
            self._clock.wait(wait, math.inf if timeout is None else timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)


class VirtualBarrier:
    """What tests use of `threading.Barrier`."""

    def __init__(self, clock: VirtualClock, parties: int) -> None:
        self._clock, self._parties = clock, parties
        self._waiting: list[_Wait] = []

    def wait(self, timeout: float | None = None) -> None:
        if len(self._waiting) + 1 < self._parties:
            wait = _Wait()
            self._waiting.append(wait)
            self._clock.wait(wait)
            return
        for wait in self._waiting:
            self._clock.wake(wait)
        self._waiting = []
