"""`temporary_folder`: a folder that is removed at the rank's end, even if the rank is killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

from .watchdog_client import WatchdogClient, current_watchdog


def temporary_folder(stack: contextlib.ExitStack, watchdog: WatchdogClient | None = None) -> Path:
    """A new folder, which is removed when `stack` is closed, or by the watchdog if this process is killed before.

    Args:
        watchdog: this process's watchdog client; by default `current_watchdog`.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="trl_realloc_", ignore_cleanup_errors=True)))
    watchdog = watchdog or current_watchdog()
    if watchdog is not None:
        watchdog.remove_at_end(folder)
    return folder
