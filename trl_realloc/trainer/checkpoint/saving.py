"""Writes a checkpoint atomically: into a temporary folder, which is renamed when every rank's part is on disk. Older
checkpoints are deleted after that.

Hosts may have separate disks. Each disk then gets a folder with the files of its ranks and the manifest of all files.
`model_files` and `state_files` write the contents. If a rank dies meanwhile, the watchdogs (`runtime/failures`) detect
it, and the temporary folder remains.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from transformers.utils import logging

from ...runtime.process_groups import all_gather_object
from . import SaveError
from .manifest import (
    MANIFEST,
    NAME,
    REPLACED,
    UNFINISHED,
    Manifest,
    checkpoints_in,
    file_names,
    flush,
    read_manifest,
    size_and_checksum,
)
from .write_errors import WriteErrors


logger = logging.get_logger(__name__)


def new_run(control: dist.ProcessGroup | None) -> str:
    """A random name for a run, the same on all ranks."""
    name: str = all_gather_object(uuid.uuid4().hex, control)[0]
    return name


def make_output_dir(output_dir: Path) -> None:
    """Create the output folder.

    Raises:
        SaveError: it cannot be created.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"output_dir {output_dir} cannot be made: {error.strerror}.") from None


def check_writable(output_dir: Path, problems: WriteErrors) -> None:
    """Check that every rank can write to the folder of the checkpoints. Collective over the job, before anything
    expensive starts.

    Raises:
        SaveError: a rank cannot write to it. Raised on every rank.
    """
    with problems.trying(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / f"{uuid.uuid4().hex}{UNFINISHED}"
        probe.touch()
        probe.unlink()
    problems.settle("checkpoints")


class BackgroundWrite(Protocol):
    """A part of a checkpoint that a thread of this rank writes."""

    @property
    def done(self) -> bool:
        """True once this rank has written its part."""

    def finish(self) -> None:
        """Wait for the thread, and collect its error. Collective over the job."""


class UnfinishedCheckpoint:
    """A checkpoint from its first file to its final name. Creation and `finish` are collective over the job.

    Args:
        final: final folder, named `checkpoint-<updates>`.
        run: name of the run. Checkpoints of other runs are never deleted.
        write: writes this rank's part into a folder, or starts to; called on every rank.
        about: the field `about` of the manifest.

    Raises:
        SaveError: a rank could not write its part. Raised on every rank. The new checkpoint is removed, and older ones
            are unchanged.
    """

    def __init__(
        self,
        final: Path,
        run: str,
        write: Callable[[Path, WriteErrors], BackgroundWrite | None],
        about: Mapping[str, object],
        *,
        rank: int,
        control: dist.ProcessGroup | None,
    ) -> None:
        self.final, self.run, self.about = final, run, about
        self.problems = WriteErrors(rank, control)
        self._staged = final.with_name(final.name + UNFINISHED)
        older = [path for path in checkpoints_in(final.parent) if path != final]
        self._kept = f" {older[0]} is as it was." if older else " There is no older checkpoint."
        with self._removed_after_an_error():
            self._keeper = find_keeper(self._staged, self.problems, final.name, self._kept)
            self._background = write(self._staged, self.problems)
            self.problems.flush()
            self._settle()

    @property
    def done(self) -> bool:
        """True once this rank has written its part, so that `finish` waits only for other ranks."""
        return self._background is None or self._background.done

    def finish(self, limit: int | None = None, best: Path | None = None) -> None:
        """Complete the checkpoint, rename it to its final name, and delete the oldest ones beyond `limit`.

        Args:
            limit: number of checkpoints of this run to keep (`save_total_limit`); `None` or 0 for all.
            best: checkpoint that is never deleted.

        Raises:
            SaveError: see the class.
        """
        control, keeps = self.problems.control, self._keeper == self.problems.rank
        with self._removed_after_an_error():
            if self._background is not None:
                self._background.finish()
                self.problems.flush()
                self._settle()
            parts = all_gather_object(_list_share(self._staged, self._keeper, self.problems), control)
            self._settle()
            moment: float = all_gather_object(time.time(), control)[0]
            step = int(self.final.name.rpartition("-")[2])
            if keeps:
                with self.problems.trying(self._staged / MANIFEST):
                    Manifest(self.run, step, moment, _merge(parts), dict(self.about)).write(self._staged)
            self._settle()
            if keeps:
                with self.problems.trying(self.final):
                    _rename(self._staged, self.final)
            self._settle()
        if keeps and limit:
            for path in surplus(self.final, self.run, limit, best):
                _remove(path)

    def _settle(self) -> None:
        self.problems.settle(self.final.name, self._kept)

    @contextlib.contextmanager
    def _removed_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except SaveError:
            if self.problems.rank == 0 or not self.final.exists():
                shutil.rmtree(self._staged, ignore_errors=True)
            raise


def _list_share(staged: Path, keeper: int, problems: WriteErrors) -> dict[str, tuple[int, int]]:
    """Size and checksum of this rank's share of its disk's files: the ranks on a disk divide its files. Collective over
    the job."""
    control, rank = problems.control, problems.rank
    keepers = all_gather_object(keeper, control)
    peers = [other for other, keeper_of_other in enumerate(keepers) if keeper_of_other == keeper]
    names: list[str] = []
    if rank == keeper:
        with problems.trying(staged):
            names = file_names(staged)
    share = all_gather_object(names, control)[keeper][peers.index(rank) :: len(peers)]
    files = {}
    for name in share:
        with problems.trying(staged / name):
            files[name] = size_and_checksum(staged / name)
    return files


def _merge(parts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    return dict(sorted((name, entry) for part in parts for name, entry in part.items()))


def find_keeper(staged: Path, problems: WriteErrors, what: str, ending: str) -> int:
    """The rank that renames and deletes folders on this rank's disk: the lowest rank that shares the disk. Creates the
    empty folder `staged` on every disk. Collective over the job.

    Ranks share a disk if they see each other's file of a random name. Host names do not show it, because hosts may
    share a disk, and containers of one host may not.

    Raises:
        SaveError: a folder could not be created.
    """
    control, rank = problems.control, problems.rank
    keepers: dict[int, int] = {}
    world = len(all_gather_object(None, control))
    token = uuid.uuid4().hex
    while len(keepers) < world:
        keeper = next(other for other in range(world) if other not in keepers)
        probe = staged / all_gather_object(token, control)[keeper]
        if keeper == rank:
            with problems.trying(probe):
                _clean(staged)
                staged.mkdir(parents=True)
                probe.touch()
        problems.settle(what, ending)
        seen = all_gather_object(rank not in keepers and probe.exists(), control)
        keepers |= {other: keeper for other, sees in enumerate(seen) if sees}
        keepers[keeper] = keeper
        if keeper == rank:
            probe.unlink(missing_ok=True)
    return keepers[rank]


def _clean(staged: Path) -> None:
    for path in [staged, *staged.parent.glob(f"checkpoint-*{UNFINISHED}")]:
        if path == staged or NAME.fullmatch(path.name.removesuffix(UNFINISHED)):
            shutil.rmtree(path, ignore_errors=True)
    for path in staged.parent.glob(f"checkpoint-*{REPLACED}"):
        if path.with_suffix("").exists():
            shutil.rmtree(path, ignore_errors=True)


def _rename(staged: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name, and remove an older one of that name."""
    old = final.with_name(final.name + REPLACED)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)  # resuming finds it under this name if the job is killed before the next line
    staged.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def surplus(final: Path, run: str, limit: int, best: Path | None) -> list[Path]:
    """The checkpoints of this run that exceed `limit`, oldest first. Never the newest or the best, other runs'
    checkpoints, or ones without a manifest."""
    run_checkpoints = [path for path in reversed(checkpoints_in(final.parent)) if _run_of(path) == run]
    spared = {final, *({best} & set(run_checkpoints))}
    return [path for path in run_checkpoints if path not in spared][
        : max(len(run_checkpoints) - max(limit, len(spared)), 0)
    ]


def _run_of(folder: Path) -> str | None:
    with contextlib.suppress(ValueError):
        manifest = read_manifest(folder)
        return manifest.run if manifest else None
    return None


def _remove(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an interrupted deletion leaves no incomplete checkpoint under a
    checkpoint's name."""
    renamed = folder.with_name(folder.name + UNFINISHED)
    try:
        folder.rename(renamed)
        shutil.rmtree(renamed)
    except OSError as error:
        logger.warning(f"the older checkpoint {folder} could not be deleted: {error.strerror}.")
