"""`Alarm`: reports an exception on one rank to all ranks, so that every rank ends with the reason.

`rank_watchdog` detects the loss of a process without an exception (killed, stopped, unreachable).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ...algorithms.nonfinite import NonFiniteError
from .watchdog_client import GRACE_S, HOST, WatchdogClient


# Phrases in messages of gloo, NCCL and the store if another process is lost or did not answer in time.
_NETWORK_PHRASES = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "recvvalue failed",
    "connection was likely closed",
    "nccl",
)


class JobFailed(RuntimeError):
    """Another rank failed. The message is that rank's.

    Args:
        is_recoverable: every rank has raised this error at the same place, before any role was trained. The run's state
            is good, and all ranks can save it together.
        is_shared: every rank has raised this error at the same place, so collectives are possible.
    """

    def __init__(self, message: str, is_recoverable: bool = False, is_shared: bool = False) -> None:
        super().__init__(message)
        self.is_recoverable, self.is_shared = is_recoverable, is_shared


def is_known_everywhere(error: BaseException) -> bool:
    """True if every rank has raised this error at the same place, so that collectives are possible."""
    return isinstance(error, NonFiniteError) or (isinstance(error, JobFailed) and error.is_shared)


_generations = itertools.count(1)


class Alarm:
    """Reports failures of one runtime (an executor and its engines) to the other ranks, and raises theirs here.

    Every rank numbers its runtimes (`generation`), so that a failure that ended one runtime does not end the next. The
    numbers agree, because all ranks make their runtimes together.

    Args:
        watchdog: the client of this process's watchdog; `None` for a job without watchdogs.
    """

    def __init__(self, watchdog: WatchdogClient | None = None) -> None:
        self.watchdog = watchdog
        self.generation = next(_generations)
        self._exit_is_delayed = False

    def set_activity(self, activity: str) -> None:
        """Set this rank's activity for failure messages, such as "actor.train of update 3"."""
        if self.watchdog is not None:
            self.watchdog.set_activity(activity)

    def checkpoint(self, folder: str | os.PathLike[str] | None) -> None:
        """Set the newest checkpoint, for failure messages."""
        if self.watchdog is not None and folder is not None:
            self.watchdog.set_checkpoint(folder)

    def check(self) -> None:
        """Raise `JobFailed` if another rank has failed."""
        sentence = None if self.watchdog is None else self.watchdog.failure(self.generation)
        if sentence is not None:
            raise JobFailed(sentence)

    def report(self, error: BaseException) -> Exception | None:
        """Report an exception of this rank to all ranks.

        Returns:
            The exception to raise instead: the failure of another rank, if it caused `error` in a collective or a
            message. Otherwise `None`. Raises nothing, because that would hide `error`.
        """
        watchdog = self.watchdog
        if watchdog is None:
            return None
        network = is_network(error)
        message = in_words(error)
        if not isinstance(error, JobFailed):
            what = "lost a connection" if network else "failed"
            message = f"rank {watchdog.rank} on host {HOST} {what} in {watchdog.activity}: {message}"
        watchdog.report_error(message, self.generation, network=network)
        reason = None
        if network:  # the watchdogs may need their whole time limit to detect the lost rank
            reason = watchdog.await_verdict(self.generation, watchdog.timeout_s + GRACE_S)
        return None if reason is None else JobFailed(reason)

    @contextlib.contextmanager
    def guard(self, close: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Report a failure in the block to every rank, and end this rank's engines.

        Args:
            close: ends the engines.

        Raises:
            JobFailed: another rank's failure caused this one.
        """
        try:
            yield
        except Exception as error:
            is_first_hand = not isinstance(error, JobFailed) or error.__cause__ is not None  # raised first on this rank
            reason = self.report(error) if is_first_hand else None
            self.acknowledge()
            close()
            self.delay_exit()
            if reason is not None:
                raise reason from error
            raise
        except BaseException:
            close()
            raise

    def acknowledge(self) -> None:
        """Tell the watchdog that this rank handles the failure by an exception, and must not be killed."""
        if self.watchdog is not None:
            self.watchdog.acknowledge(self.generation)

    def delay_exit(self) -> None:
        """Delay the exit of this failing process until the other ranks have printed the reason, at most `GRACE_S`. The
        launcher ends all ranks when the first one exits."""
        if self.watchdog is not None and not self._exit_is_delayed:
            self._exit_is_delayed = True
            atexit.register(self.watchdog.leave, self.generation, GRACE_S)  # the exception is printed before this


def in_words(error: BaseException) -> str:
    """The message of an exception, with its type unless it is an exception of this package."""
    message, kind = str(error), type(error)
    is_sentence = message and kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return message if is_sentence else f"{kind.__name__}: {message}" if message else kind.__name__


def is_network(error: BaseException) -> bool:
    """True if an exception reports a failed message or collective, so that another rank may be the cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return False
        if isinstance(cause, (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError)):
            return True
        if isinstance(cause, RuntimeError) and any(phrase in str(cause).lower() for phrase in _NETWORK_PHRASES):
            return True
        cause = cause.__cause__
    return False
