"""One rank's failure, told to all: so every rank ends with the reason, and none waits for a rank that is gone."""

from __future__ import annotations

import atexit
import contextlib
import time
from typing import Any


GRACE_S = 10.0  # how long a failed rank stays so that the others can read why; the launcher ends them after it


class Alarm:
    """Rings over the job's key-value store, which answers while collectives are stuck.

    Args:
        store: a `torch.distributed` store, `None` for a job of one process.
        world_size: ranks that should hear it.
    """

    def __init__(self, store: Any, world_size: int) -> None:
        self.store, self.world_size = store, world_size
        self._checked = 0.0
        self._heard = False
        self._stays = False

    def ring(self, message: str) -> None:
        """Tell the others, and give them `GRACE_S` to hear. Never raises: the failure itself is what matters."""
        if self.store is None or self._heard:
            return
        try:
            self._heard = True
            if self.store.add("trl_realloc/failures", 1) == 1:
                self.store.set("trl_realloc/failure", message)
            self._meet("trl_realloc/heard")
        except RuntimeError:
            return

    def stay(self) -> None:
        """Have this process, which fails too, not end before the others' have printed their reason, or `GRACE_S`: with
        the first that ends the launcher ends all."""
        if self.store is not None and not self._stays:
            self._stays = True
            atexit.register(self._leave)  # an uncaught exception is printed before this is called

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone by now
            self._meet("trl_realloc/leaving")

    def _meet(self, place: str) -> None:
        arrived, deadline = self.store.add(place, 1), time.monotonic() + GRACE_S
        while arrived < self.world_size and time.monotonic() < deadline:
            time.sleep(0.1)
            arrived = self.store.add(place, 0)

    def check(self, every_s: float = 0.5) -> None:
        """Raise `JobFailed` if another rank has rung; asks the store at most every `every_s` seconds."""
        now = time.monotonic()
        if self.store is None or self._heard or now - self._checked < every_s:
            return
        self._checked = now
        if self.store.check(["trl_realloc/failure"]):
            message = self.store.get("trl_realloc/failure").decode()
            self._heard = True
            self.store.add("trl_realloc/heard", 1)
            raise JobFailed(message)


class JobFailed(RuntimeError):
    """Another rank failed. The message is that rank's.

    Args:
        is_unharmed: of a failure that every rank has heard of at the same place, before any role was trained: the run's
            state is good, and all ranks can save it together.
    """

    def __init__(self, message: str, is_unharmed: bool = False) -> None:
        super().__init__(message)
        self.is_unharmed = is_unharmed
