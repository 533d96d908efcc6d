"""Collects one rank's errors while all ranks write a checkpoint, and raises them on all ranks together.

If a rank raised at once, the others would wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from ...runtime.failures.watchdog_client import HOST
from ...runtime.process_groups import all_gather_object
from . import SaveError
from .manifest import flush


class WriteErrors:
    """The write errors of this rank.

    Args:
        rank: this process.
        control: gloo group over the job; `None` for one process.
    """

    def __init__(self, rank: int, control: dist.ProcessGroup | None) -> None:
        self.rank, self.control = rank, control
        self._messages: list[str] = []
        self._written: list[Path] = []

    @contextlib.contextmanager
    def writing(self, path: Path, needed: int = 0) -> Iterator[None]:
        """Context of writing a file or a folder's files, which `flush` later writes to disk. An error inside the block
        is collected, and ends the block.

        Args:
            needed: bytes that the block writes, for the message. The block should call `need_room` itself.
        """
        with self.trying(path, needed):
            yield
            self._written.append(path)

    @contextlib.contextmanager
    def trying(self, path: Path, needed: int = 0) -> Iterator[None]:
        """Context of any other operation on a path. An error inside the block is collected, and ends the block."""
        try:
            yield
        except Exception as error:
            self._messages.append(
                f"rank {self.rank} on host {HOST} cannot write {path}: {_reason(error, path, needed)}"
            )

    def flush(self) -> None:
        """Write to disk (fsync) what this rank wrote since the last call."""
        for path in self._written:
            with self.trying(path):
                for file in [p for p in path.iterdir() if p.is_file()] if path.is_dir() else [path]:
                    flush(file)
        self._written.clear()

    def settle(self, what: str, ending: str = "") -> None:
        """Exchange the errors of all ranks. Collective over the job.

        Args:
            what: name of what was to be saved, for the message.
            ending: end of the message, about older checkpoints.

        Raises:
            SaveError: any rank had an error. Raised on every rank.
        """
        messages = [text for rank_messages in all_gather_object(self._messages, self.control) for text in rank_messages]
        self._messages.clear()
        if messages:
            raise SaveError(f"{what} could not be saved: {'; '.join(messages)}.{ending}")


def need_room(path: Path, needed: int) -> None:
    """Raises `OSError` if the disk of the path has less than `needed` bytes free."""
    if needed > shutil.disk_usage(_existing(path)).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _reason(error: Exception, path: Path, needed: int) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    room = shutil.disk_usage(_existing(path)).free
    # on a full disk, torch and safetensors only report a broken stream
    if needed and (room < needed or "stream" in text):
        return f"{text} ({needed / 1e6:,.1f} MB are needed, {room / 1e6:,.1f} MB are free)"
    return text
