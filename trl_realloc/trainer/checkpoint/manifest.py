"""The manifest of a checkpoint: its files with sizes and checksums, which show whether the checkpoint is complete; and
the names of checkpoint folders.

Here one process reads one folder. The collective parts are in `saving` and `resuming`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


MANIFEST = "manifest.json"
FORMAT = 2  # in format 1, one file had a role's whole training state
NAME = re.compile(r"checkpoint-(\d+)(\.old)?")
UNFINISHED = ".tmp"  # suffix of a checkpoint that is being written, or whose writing was interrupted
REPLACED = ".old"  # suffix of a checkpoint while another takes its name
BLOCK = 1 << 20
BLOCKS = 64  # number of blocks that a file's checksum reads: the whole file up to 64 MiB


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Args:
        run: random name of the run that wrote the checkpoint. A resumed run keeps it.
        step: number of updates before the checkpoint.
        time: time of writing, seconds since 1970.
        files: size in bytes and `checksum` of every file, by path inside the folder.
        about: fields of the run's `identity.Identity`, plus `data_begins` for PPO, `corrects_mismatch` for GRPO and
            RLOO.
    """

    run: str
    step: int
    time: float
    files: Mapping[str, tuple[int, int]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
        flush(folder / MANIFEST)
        flush(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a checkpoint's folder, or `None` if there is none.

    Raises:
        ValueError: the manifest cannot be read.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None
    try:
        if content["format"] > FORMAT:
            raise ValueError(f"{MANIFEST} is of format {content['format']}, of a newer release")
        if content["format"] < FORMAT:
            raise ValueError(
                f"{MANIFEST} is of format {content['format']}, of an earlier release, whose training state this one "
                f"cannot read; begin a run with its policy as the model"
            )
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        return Manifest(
            str(content["run"]), int(content["step"]), float(content["time"]), files, dict(content["about"])
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is no manifest (it lacks {error})") from None


def is_of_run(folder: Path, run: str) -> bool:
    """True if a folder has the manifest of a checkpoint of this run, complete or not."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return False
    return manifest is not None and manifest.run == run


def file_names(folder: Path) -> list[str]:
    """The files of a folder except its manifest, by path inside the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def size_and_checksum(path: Path) -> tuple[int, int]:
    return path.stat().st_size, checksum(path)


def checksum(path: Path) -> int:
    """CRC-32 of a file up to 64 MiB. For a larger file it covers 64 MiB that are spread evenly and include both ends,
    so that a checkpoint of 100 GB is checked in a second."""
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for block in range(BLOCKS):
            if size > BLOCK * BLOCKS:
                file.seek(block * (size - BLOCK) // (BLOCKS - 1))
            crc = zlib.crc32(file.read(BLOCK), crc)
    return crc


def damage(folder: Path, manifest: Manifest, *, checksums: bool = True) -> dict[str, str]:
    """The problem of each file whose size or checksum differs from the manifest, by path inside the folder."""
    wrong = {}
    for name, (size, crc) in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file():
                wrong[name] = "is missing"
            elif (actual_size := path.stat().st_size) != size:
                wrong[name] = f"has {actual_size:,} bytes, not {size:,}"
            elif checksums and checksum(path) != crc:
                wrong[name] = f"has {size:,} bytes as it should, but others than were written"
        except OSError as error:
            wrong[name] = f"cannot be read ({error.strerror})"
    return wrong


def step_of(folder: Path) -> int | None:
    """The number of updates in a checkpoint's name; `None` for other folders and unfinished checkpoints."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The checkpoints in a folder, complete or not, from the latest to the earliest time of writing.

    They are not sorted by the number in their names, because another run may have checkpoints in the same folder.
    Folders that another rank deletes meanwhile are left out.
    """
    folders = [path for path in _folders(output_dir) if step_of(path) is not None]
    names = {path.name for path in folders}
    folders = [path for path in folders if not (path.suffix == REPLACED and path.stem in names)]
    times = {}
    for path in folders:
        with contextlib.suppress(FileNotFoundError):
            times[path] = _time_and_step(path)
    return sorted(times, key=lambda path: times[path], reverse=True)


def _folders(output_dir: Path) -> Iterator[Path]:
    if output_dir.is_dir():
        yield from (path for path in output_dir.iterdir() if path.is_dir())


def _time_and_step(folder: Path) -> tuple[float, int]:
    try:
        manifest = read_manifest(folder)
    except ValueError:
        manifest = None
    if manifest is not None:
        return manifest.time, manifest.step
    state = folder / "trainer_state.json"
    return (state if state.exists() else folder).stat().st_mtime, step_of(folder) or 0


def flush(path: Path) -> None:
    """Write a file's content, or a folder's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
