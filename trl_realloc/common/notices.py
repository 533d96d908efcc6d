"""Notices on the terminal about work that takes longer than some seconds: starting engines, measuring, compiling.

One line when the work has taken `AFTER_S`, one every `EVERY_S` after it, one at its end. Rank 0 prints; the others are
silent. What a run logs is the trainer's business.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm


AFTER_S = 3.0
EVERY_S = 15.0


def notice(message: str) -> None:
    """Print one line on rank 0's stderr, above a progress bar where there is one."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(f"trl_realloc: {message}", file=sys.stderr)


@contextlib.contextmanager
def working(what: str, hint: str = "", *, after_s: float = AFTER_S, every_s: float = EVERY_S) -> Iterator[None]:
    """Say that `what` goes on while the block runs, unless it ends within `after_s` seconds.

    Args:
        what: the work, such as "starting the engines".
        hint: what the first line adds, such as how long it usually takes.
        after_s, every_s: seconds until the first line, and between lines.
    """
    begun, ended, spoke = time.monotonic(), threading.Event(), threading.Event()

    def repeat() -> None:
        wait = after_s
        while not ended.wait(wait):
            seconds = time.monotonic() - begun
            notice(f"{what} ({seconds:.0f} s so far){'' if spoke.is_set() or not hint else f'; {hint}'}")
            spoke.set()
            wait = every_s

    thread = threading.Thread(target=repeat, name=f"notices of {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if spoke.is_set():
        notice(f"{what}: done after {time.monotonic() - begun:.0f} s")
