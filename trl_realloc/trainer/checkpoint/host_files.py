"""The files of a checkpoint on the hosts of a job: checking them, and copying them to hosts that lack them.

`resuming` decides which checkpoint a run resumes from.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.launch.hosts import machine_id
from ...runtime.process_groups import all_gather_object
from .manifest import MANIFEST, Manifest, checksum, damage, read_manifest


CHUNK = 64 << 20  # bytes of one message


def place_of(folder: Path) -> tuple[Any, ...]:
    """Identifies a folder on a host: equal for two ranks of one host that see the same folder, or that both see
    none."""
    machine = (socket.gethostname(), machine_id())
    try:
        status = folder.stat()
        return (*machine, status.st_dev, status.st_ino)
    except OSError:
        return (*machine, str(folder.absolute()))


@dataclass
class HostFiles:
    """The files of a checkpoint on one host.

    Args:
        sizes: bytes of each file.
        wrong: the problem of each damaged file.
    """

    manifest: Manifest | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def read_files(folder: Path, part: int, parts: int) -> HostFiles:
    """One of `parts` reports on this host's files: the problems of every `parts`-th file; the first report also has the
    manifest and the sizes."""
    report = HostFiles()
    if not folder.is_dir():
        report.wrong[""] = "there is no such folder"
        return report
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        manifest, report.wrong[MANIFEST] = None, str(error)
    if part == 0:
        report.manifest = manifest
        report.sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    if manifest is not None:
        names = sorted(manifest.files)[part::parts]
        report.wrong |= damage(folder, replace(manifest, files={name: manifest.files[name] for name in names}))
    return report


def by_host(reports: Sequence[HostFiles], readers: Sequence[int]) -> dict[int, HostFiles]:
    """Merge the reports of all ranks into one per host, keyed by its reader."""
    by_host: dict[int, HostFiles] = {}
    for reader, report in zip(readers, reports, strict=True):
        by_host.setdefault(reader, report).wrong.update(report.wrong)
    return by_host


def copy_files(
    folder: Path,
    manifest: Manifest,
    copies: Sequence[tuple[str, int, int]],
    rank: int,
    control: dist.ProcessGroup | None,
) -> list[str]:
    """Copy files from host to host. Collective over the job. Returns the problems of the copies.

    Args:
        copies: (file, sending rank, receiving rank), the same on every rank.
    """
    for name, source, target in copies:
        if rank == source:
            _send(folder / name, target, control)
        elif rank == target:
            _receive(folder / name, source, control)
    if any(target == rank for _, _, target in copies) and not (folder / MANIFEST).exists():
        manifest.write(folder)
    failures = all_gather_object(_check_copies(folder, manifest, copies, rank), control) if copies else []
    return [failure for rank_failures in failures for failure in rank_failures]


def _check_copies(folder: Path, manifest: Manifest, copies: Sequence[tuple[str, int, int]], rank: int) -> list[str]:
    received = [name for name, _, target in copies if target == rank]
    return [f"{name} was not copied whole" for name in received if checksum(folder / name) != manifest.files[name][1]]


def _send(path: Path, target: int, control: dist.ProcessGroup | None) -> None:
    size = path.stat().st_size
    dist.send(torch.tensor([size]), target, group=control)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), target, group=control)


def _receive(path: Path, source: int, control: dist.ProcessGroup | None) -> None:
    size = torch.zeros(1, dtype=torch.long)
    dist.recv(size, source, group=control)
    path.parent.mkdir(parents=True, exist_ok=True)
    remaining = int(size)
    with path.open("wb") as file:
        while remaining:
            chunk = torch.empty(min(remaining, CHUNK), dtype=torch.uint8)
            dist.recv(chunk, source, group=control)
            file.write(chunk.numpy().tobytes())
            remaining -= chunk.numel()
