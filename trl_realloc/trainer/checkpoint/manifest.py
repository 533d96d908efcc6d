"""The list of a checkpoint's files with their sizes and checksums, by which a whole checkpoint is told from a torn one.

Owns the names of checkpoints' folders and what is read of one folder by one process. No process group.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


MANIFEST = "manifest.json"
FORMAT = 1
NAME = re.compile(r"checkpoint-(\d+)(\.old)?")
UNFINISHED = ".tmp"  # a checkpoint that is being written, or was when its job was killed
REPLACED = ".old"  # a checkpoint while the one that is to have its name is put in its place
BLOCK = 1 << 20
BLOCKS = 64  # of a file that are read for its checksum: all of one up to 64 MiB, and of a larger one so many evenly


@dataclass(frozen=True)
class Manifest:
    """Args:
    run: a random name of the run that wrote the checkpoint; it keeps it when it is resumed.
    step: updates that had been made.
    time: when it was written, seconds since 1970.
    files: by path inside the folder, its bytes and the checksum of `checksum`.
    about: of the run: what `identity.Identity` holds.
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
    """`None` where the folder has none.

    Raises:
        ValueError: it has one that cannot be read.
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
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        return Manifest(
            str(content["run"]), int(content["step"]), float(content["time"]), files, dict(content["about"])
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is no manifest (it lacks {error})") from None


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of a folder with its size in bytes and its checksum."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            found[path.relative_to(folder).as_posix()] = (path.stat().st_size, checksum(path))
    return found


def checksum(path: Path) -> int:
    """CRC-32 of a file up to 64 MiB; of a larger one, of 64 MiB spread evenly over it, its ends included, so that a
    checkpoint of 100 GB is checked in a second."""
    size, crc = path.stat().st_size, 0
    with path.open("rb") as file:
        for at in range(BLOCKS):
            if size > BLOCK * BLOCKS:
                file.seek(at * (size - BLOCK) // (BLOCKS - 1))
            crc = zlib.crc32(file.read(BLOCK), crc)
    return crc


def damage(folder: Path, manifest: Manifest, *, checksums: bool = True) -> dict[str, str]:
    """What is wrong with each file that is not as the manifest says, by its size and its checksum."""
    wrong = {}
    for name, (size, crc) in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file():
                wrong[name] = "is missing"
            elif (found := path.stat().st_size) != size:
                wrong[name] = f"has {found:,} bytes, not {size:,}"
            elif checksums and checksum(path) != crc:
                wrong[name] = f"has {size:,} bytes as it should, but others than were written"
        except OSError as error:
            wrong[name] = f"cannot be read ({error.strerror})"
    return wrong


def step_of(folder: Path) -> int | None:
    """The number of updates in a checkpoint's name; `None` for a folder that is none, or is not finished."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The checkpoints of a folder, whole or not, the one that was written last first: the number in a name says only
    how long the run was, and another run's may be in the same folder."""
    found = [path for path in _folders(output_dir) if step_of(path) is not None]
    names = {path.name for path in found}
    found = [path for path in found if not (path.suffix == REPLACED and path.stem in names)]
    return sorted(found, key=_age, reverse=True)


def _folders(output_dir: Path) -> Iterator[Path]:
    if output_dir.is_dir():
        yield from (path for path in output_dir.iterdir() if path.is_dir())


def _age(folder: Path) -> tuple[float, int]:
    try:
        manifest = read_manifest(folder)
    except ValueError:
        manifest = None
    if manifest is not None:
        return manifest.time, manifest.step
    state = folder / "trainer_state.json"
    return (state if state.exists() else folder).stat().st_mtime, step_of(folder) or 0


def flush(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names, before anything relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
