"""A rank that only watches: `python rank.py RANK WORLD_SIZE STORE_FILE WHAT`, for tests of alarm and watchdog."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from trl_realloc.runtime.failures.alarm import Alarm
from trl_realloc.runtime.failures.watchdog_client import WatchdogClient


def wait_for_connection(watchdog: int) -> None:
    """Wait until a watchdog has its connection to that of rank 0. A rank that ends before takes its cause with it.

    Args:
        watchdog: its pid.
    """
    established = "01"
    while True:
        sockets = set()
        for path in Path("/proc", str(watchdog), "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since
                sockets.add(os.readlink(path))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(row[3] == established and f"socket:[{row[9]}]" in sockets for row in rows):
            return
        time.sleep(0.02)


def meet(store: torch.distributed.FileStore, key: str, size: int) -> None:
    """Wait for all ranks."""
    arrived = store.add(key, 1)
    while arrived < size:
        time.sleep(0.02)
        arrived = store.add(key, 0)


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited, where the tests were started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, size, place, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    store = torch.distributed.FileStore(place, size)
    watchdog = WatchdogClient(rank, size, store, 5.0)
    alarm = Alarm(watchdog)
    alarm.checkpoint("runs/checkpoint-7")
    alarm.set_activity(f"actor.train of update {rank}")
    if rank:
        wait_for_connection(watchdog._process.pid)
    meet(store, "begin", size)
    print(os.getpid(), flush=True)
    if what == "caught twice":
        for message in ("first", "second"):
            try:
                if rank == 0:
                    with alarm.guard():
                        raise RuntimeError(message)
                with alarm.guard():
                    while True:
                        alarm.check()
                        time.sleep(0.05)
            except RuntimeError as error:
                print(error, flush=True)
            alarm = Alarm(watchdog)
            meet(store, message, size)  # runtimes are made together
        return
    if what == "fail":
        raise RuntimeError("a mistake of the user's")
    if what == "raise, without new threads":
        what, threading.Thread.start = "raise", refused  # type: ignore[method-assign]
    if what == "raise" and rank == 1:
        with alarm.guard():
            raise RuntimeError("no memory")
    if what == "die" and rank == 1:
        folder = tempfile.mkdtemp(dir=Path(place).parent)
        watchdog.remove_at_end(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # as in a collective that never ends


if __name__ == "__main__":
    main()
