"""What a job has left in /dev/shm, told from what other jobs on this machine have there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from limits import patience


FOLDER = Path("/dev/shm")


def names() -> set[str]:
    return set(os.listdir(FOLDER))


def _in_use() -> set[int]:
    """The inodes of the files in /dev/shm that living processes have mapped or open. Not their names: a semaphore is
    mapped before it gets its own."""
    status = os.stat(FOLDER)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found = set()
    for process in (Path("/proc", entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):  # it has ended
            rows = (line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines())
            found |= {int(row[4]) for row in rows if row[3] == device}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    file = descriptor.stat()
                    found |= {file.st_ino} if file.st_dev == status.st_dev else set()
    return found


def left(before: set[str], within_s: float = 0.0) -> list[str]:
    """The files in /dev/shm that are not among `before` and that no living process uses: those of a job that has ended.
    It waits until there are none, for `within_s` seconds of an idle machine."""
    deadline = time.monotonic() + (patience(within_s) if within_s else 0.0)
    while True:
        inodes = {}
        for name in names() - before:
            with contextlib.suppress(OSError):  # its owner has removed it
                inodes[name] = (FOLDER / name).lstat().st_ino
        in_use = _in_use() if inodes else set()
        # what is gone by now was another process's, for this job's have ended
        found = sorted(name for name, inode in inodes.items() if inode not in in_use and (FOLDER / name).exists())
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)
