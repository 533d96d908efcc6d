"""What goes wrong on one rank while all ranks write a checkpoint, kept until all can hear of it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...runtime.failures.watchdog_client import HOST
from ...runtime.process_groups import from_every_rank
from . import SaveError
from .manifest import flush


class Problems:
    """Args:
    rank: this process.
    control: a gloo group over the job, `None` for one process.
    """

    def __init__(self, rank: int, control: Any) -> None:
        self.rank, self.control = rank, control
        self._found: list[str] = []
        self._written: list[Path] = []

    @contextlib.contextmanager
    def writing(self, path: Path, needed: int = 0) -> Iterator[None]:
        """Around writing a file or a folder's files, which `flush` brings to the disk. A failure is kept, and the block
        left.

        Args:
            needed: bytes that are to be written; say so in the block too, by `need_room`.
        """
        with self.trying(path, needed):
            yield
            self._written.append(path)

    @contextlib.contextmanager
    def trying(self, path: Path, needed: int = 0) -> Iterator[None]:
        """Around anything else that is done to a path. A failure is kept, and the block left."""
        try:
            yield
        except Exception as error:
            self._found.append(f"rank {self.rank} on host {HOST} cannot write {path}: {_reason(error, path, needed)}")

    def flush(self) -> None:
        """What was written here reaches the disk."""
        for path in self._written:
            with self.trying(path):
                for file in [p for p in path.iterdir() if p.is_file()] if path.is_dir() else [path]:
                    flush(file)
        self._written.clear()

    def settle(self, what: str, kept: str = "") -> None:
        """Wait for all ranks, and learn of the problems of each. All ranks call it together.

        Args:
            what: was to be saved.
            kept: ends the message: what is there instead.

        Raises:
            SaveError: on every rank, where one had a problem.
        """
        found = [problem for own in from_every_rank(self._found, self.control) for problem in own]
        self._found.clear()
        if found:
            raise SaveError(f"{what} could not be saved: {'; '.join(found)}.{kept}")


def need_room(path: Path, needed: int) -> None:
    """Raises `OSError` where the disk of a path that is to be written has less room than `needed` bytes."""
    if needed > shutil.disk_usage(_existing(path)).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _reason(error: Exception, path: Path, needed: int) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    room = shutil.disk_usage(_existing(path)).free
    # the writers of torch and safetensors say only that a stream is broken where the disk is full
    if needed and (room < needed or "stream" in text):
        return f"{text} ({needed / 1e6:,.1f} MB are needed, {room / 1e6:,.1f} MB are free)"
    return text
