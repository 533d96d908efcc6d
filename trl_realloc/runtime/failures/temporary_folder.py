"""`temporary_folder`: a folder of a rank that does not outlive it, however the rank ends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

from .watchdog_client import WatchdogClient, current_watchdog


def temporary_folder(stack: contextlib.ExitStack, watchdog: WatchdogClient | None = None) -> Path:
    """A new folder, which is removed when `stack` is closed. If this process is killed before, its watchdog does it.

    Args:
        watchdog: of this process; `None` for the one that is running, if there is one.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="trl_realloc_", ignore_cleanup_errors=True)))
    watchdog = watchdog or current_watchdog()
    if watchdog is not None:
        watchdog.remove_at_end(folder)
    return folder
