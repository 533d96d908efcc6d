"""Removal of a rank's temporary folders by its watchdog after the rank has ended, and of the launcher's empty log
folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from .process_state import has_ended


LAUNCHER_S = 40.0  # wait for the launcher; torchrun gives its ranks 30 s to end
LAUNCHER_POLL_S = 0.2


def clean_up(temporary_folders: Iterable[str], error_file: str | None, launcher_pid: int) -> None:
    """Remove the rank's temporary folders. When the launcher has ended, remove its log folder if it is empty.

    Args:
        error_file: torchrun's error file of this rank, if the rank is the first of its host.
    """
    for path in temporary_folders:
        shutil.rmtree(path, ignore_errors=True)
    folder = launcher_folder(error_file)
    if folder is None:
        return
    deadline = time.monotonic() + LAUNCHER_S
    while not has_ended(launcher_pid) and time.monotonic() < deadline:
        time.sleep(LAUNCHER_POLL_S)
    if has_ended(launcher_pid):
        remove_empty(folder)


def launcher_folder(error_file: str | None) -> Path | None:
    """torchrun's temporary folder, if it contains the rank's error file."""
    base = Path(tempfile.gettempdir())
    for folder in Path(error_file).parents if error_file else ():
        if folder.parent == base and folder.name.startswith("torchelastic_"):
            return folder
    return None


def remove_empty(folder: Path) -> None:
    """Remove empty logs, torchrun's error files, and folders that become empty. Other files stay."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if name == "error.json" or path.stat().st_size == 0:
                    path.unlink()
        with contextlib.suppress(OSError):
            os.rmdir(parent)
