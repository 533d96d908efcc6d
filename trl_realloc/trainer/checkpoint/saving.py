"""Writing a checkpoint so that it is whole or is none: beside its name first, named when every rank's part is on the
disk. Older ones are deleted after that.

Works on hosts with a disk each too: every disk gets a folder of the name, with what its ranks wrote and the manifest of
all of it. Owns nothing of what is in a checkpoint (`state`).
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...runtime.process_groups import from_every_rank
from . import SaveError
from .manifest import MANIFEST, NAME, REPLACED, UNFINISHED, Manifest, checkpoints_in, flush, list_files, read_manifest
from .problems import Problems


logger = logging.get_logger(__name__)


def new_run(control: Any) -> str:
    """A random name for a run, rank 0's on all ranks."""
    name: str = from_every_rank(uuid.uuid4().hex, control)[0]
    return name


def make_output_dir(output_dir: Path) -> None:
    """Raises:
    SaveError: it cannot be made.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"output_dir {output_dir} cannot be made: {error.strerror}.") from None


def check_writable(output_dir: Path, problems: Problems) -> None:
    """All ranks together, before anything expensive starts.

    Raises:
        SaveError: nothing can be written to a folder that checkpoints are to be saved in.
    """
    with problems.trying(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        mark = output_dir / f"{uuid.uuid4().hex}{UNFINISHED}"
        mark.touch()
        mark.unlink()
    problems.settle("checkpoints")


def save_checkpoint(
    final: Path,
    run: str,
    write: Callable[[Path, Problems], None],
    about: Mapping[str, Any],
    *,
    rank: int,
    control: Any,
    limit: int | None = None,
    best: Path | None = None,
) -> None:
    """Write a checkpoint and delete the oldest beyond `limit`. All ranks together.

    Args:
        final: its folder, named `checkpoint-<updates>`.
        run: the name of the run; checkpoints of others are never deleted.
        write: puts this rank's part into the folder it is given; called on every rank.
        about: `Identity.to_dict` of the run.
        limit: how many checkpoints of this run to keep (`save_total_limit`); `None` or 0 for all.
        best: one that is not deleted.

    Raises:
        SaveError: on every rank, where one could not write its part. Nothing of this checkpoint is left, and all older
            ones are as they were.
    """
    staged, problems = final.with_name(final.name + UNFINISHED), Problems(rank, control)
    older = [path for path in checkpoints_in(final.parent) if path != final]
    kept = f" {older[0]} is as it was." if older else " There is no older checkpoint."
    try:
        keeper = find_keeper(staged, problems, final.name, kept)
        keeps = keeper == rank
        write(staged, problems)
        problems.flush()
        problems.settle(final.name, kept)
        files: dict[str, tuple[int, int]] = {}
        if keeps:
            with problems.trying(staged):
                files = list_files(staged)
        parts = from_every_rank(files, control)
        moment: float = from_every_rank(time.time(), control)[0]
        manifest = Manifest(run, int(final.name.rpartition("-")[2]), moment, _joined(parts), dict(about))
        if keeps:
            with problems.trying(staged / MANIFEST):
                manifest.write(staged)
        problems.settle(final.name, kept)
        if keeps:
            with problems.trying(final):
                _name(staged, final)
        problems.settle(final.name, kept)
    except SaveError:
        if rank == 0 or not final.exists():
            shutil.rmtree(staged, ignore_errors=True)
        raise
    if keeps and limit:
        for path in surplus(final, run, limit, best):
            _remove(path)


def _joined(parts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    return {name: entry for part in parts for name, entry in part.items()}


def find_keeper(staged: Path, problems: Problems, what: str, kept: str) -> int:
    """The rank that names and deletes folders on this rank's disk: the first of those that see the same files. Makes
    the empty folder `staged` on every disk. All ranks together.

    Ranks find out by a file of a random name: hosts may share a disk or not, and containers of one host too.

    Raises:
        SaveError: a folder could not be made.
    """
    control, rank = problems.control, problems.rank
    keepers: dict[int, int] = {}
    world = len(from_every_rank(None, control))
    token = uuid.uuid4().hex
    while len(keepers) < world:
        keeper = next(other for other in range(world) if other not in keepers)
        mark = staged / from_every_rank(token, control)[keeper]
        if keeper == rank:
            with problems.trying(mark):
                _clean(staged)
                staged.mkdir(parents=True)
                mark.touch()
        problems.settle(what, kept)
        seen = from_every_rank(rank not in keepers and mark.exists(), control)
        keepers |= {other: keeper for other, sees in enumerate(seen) if sees}
        keepers[keeper] = keeper
        if keeper == rank:
            mark.unlink(missing_ok=True)
    return keepers[rank]


def _clean(staged: Path) -> None:
    """Remove what saves that were interrupted have left."""
    for path in [staged, *staged.parent.glob(f"checkpoint-*{UNFINISHED}")]:
        if path == staged or NAME.fullmatch(path.name.removesuffix(UNFINISHED)):
            shutil.rmtree(path, ignore_errors=True)
    for path in staged.parent.glob(f"checkpoint-*{REPLACED}"):
        if path.with_suffix("").exists():
            shutil.rmtree(path, ignore_errors=True)


def _name(staged: Path, final: Path) -> None:
    """Give a finished checkpoint its name, by one rename where no other has it."""
    old = final.with_name(final.name + REPLACED)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)  # found by its other name, should the job be killed before the next line
    staged.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def surplus(final: Path, run: str, limit: int, best: Path | None) -> list[Path]:
    """The checkpoints of this run that are more than `limit`, the oldest first; never the newest or the best one, and
    none that another run has written or that has no manifest to say which did."""
    own = [path for path in reversed(checkpoints_in(final.parent)) if _run_of(path) == run]
    spared = {final, best} if best is not None else {final}
    return [path for path in own if path not in spared][: max(len(own) - max(limit, len(spared)), 0)]


def _run_of(folder: Path) -> str | None:
    with contextlib.suppress(ValueError):
        manifest = read_manifest(folder)
        return manifest.run if manifest else None
    return None


def _remove(folder: Path) -> None:
    """Under another name first: a job that is killed meanwhile leaves no checkpoint without some of its files."""
    doomed = folder.with_name(folder.name + UNFINISHED)
    try:
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning(f"the older checkpoint {folder} could not be deleted: {error.strerror}.")
