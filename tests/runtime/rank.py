"""A rank that only watches: `python rank.py RANK WORLD_SIZE STORE_FILE WHAT`, for tests of alarm and watchdog."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from trl_realloc.runtime.failures.alarm import Alarm
from trl_realloc.runtime.failures.watchdog_client import WatchdogClient


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited, where the tests were started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, size, place, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    store = torch.distributed.FileStore(place, size)
    watchdog = WatchdogClient(rank, size, store, 5.0)
    alarm = Alarm(watchdog)
    alarm.checkpoint("runs/checkpoint-7")
    alarm.at(f"actor.train of update {rank}")
    print(os.getpid(), flush=True)
    if what == "caught twice":
        for message in ("first", "second"):
            try:
                if rank == 0:
                    with alarm.covers():
                        raise RuntimeError(message)
                with alarm.covers():
                    while True:
                        alarm.check()
                        time.sleep(0.05)
            except RuntimeError as error:
                print(error, flush=True)
            alarm = Alarm(watchdog)
            arrived = store.add(message, 1)  # runtimes are made together
            while arrived < size:
                time.sleep(0.05)
                arrived = store.add(message, 0)
        return
    if what == "raise" and rank == 1:
        time.sleep(1.0)
        with alarm.covers():
            raise RuntimeError("no memory")
    if what == "die" and rank == 1:
        time.sleep(1.0)
        folder = tempfile.mkdtemp(dir=Path(place).parent)
        watchdog.remove_at_end(folder)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # as in a collective that never ends


if __name__ == "__main__":
    main()
