"""Progress messages on the terminal for work that takes longer than some seconds: starting engines, measuring,
compiling.

Rank 0 prints one line after `AFTER_S`, then one every `EVERY_S`, and one at the end. A run's logs are in
`trainer/run/metrics`.
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
    """Print one line on rank 0's stderr, above a progress bar if there is one."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(f"trl_realloc: {message}", file=sys.stderr)


@contextlib.contextmanager
def working(what: str, hint: str = "", *, after_s: float = AFTER_S, every_s: float = EVERY_S) -> Iterator[None]:
    """Print that `what` is in progress while the block runs, unless the block ends within `after_s` seconds.

    Args:
        what: the work, such as "starting the engines".
        hint: extra text in the first line, such as how long the work usually takes.
        after_s: seconds until the first line.
        every_s: seconds between lines.
    """
    started_at, ended, has_printed = time.monotonic(), threading.Event(), threading.Event()

    def repeat() -> None:
        wait = after_s
        while not ended.wait(wait):
            seconds = time.monotonic() - started_at
            notice(f"{what} ({seconds:.0f} s so far){'' if has_printed.is_set() or not hint else f'; {hint}'}")
            has_printed.set()
            wait = every_s

    thread = threading.Thread(target=repeat, name=f"notices of {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if has_printed.is_set():
        notice(f"{what}: done after {time.monotonic() - started_at:.0f} s")
