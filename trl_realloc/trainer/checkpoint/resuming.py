"""Finds the checkpoint that a run resumes from, and refuses one that is incomplete or of another run, before any engine
starts.

If hosts have separate disks, every host receives the files that it lacks. Loading the state is in `state`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import logging

from ...algorithms.nonfinite import all_finite
from ...runtime.launch.hosts import machine_id
from ...runtime.process_groups import from_every_rank
from . import STATE_FILE, VALUE_FOLDER, CheckpointError
from .identity import Identity, Shapes, data_differences, model_difference, optimizer_differences
from .manifest import MANIFEST, Manifest, checkpoints_in, checksum, damage, read_manifest


logger = logging.get_logger(__name__)

STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
STATES = {"policy": STATE_FILE, "critic": f"{VALUE_FOLDER}/{STATE_FILE}"}
NEEDED = (STATE, SCHEDULER, *STATES.values())
SCANNED = 1 << 30  # bytes; a file without a checksum up to this size is searched for NaN before the engines start
CHUNK = 64 << 20  # bytes of one message

ResumeSetting = str | bool | None


@dataclass(frozen=True)
class CurrentRun:
    """What a checkpoint must have in common with this run.

    Args:
        identity: data, batch size and optimizer.
        shapes: shapes of each role's trained parameters, on the ranks that have the role's model.
        ignores_data: `ignore_data_skip`. The data start from the beginning, so they may differ.
    """

    identity: Identity
    shapes: Mapping[str, Shapes]
    ignores_data: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to resume from.

    Args:
        manifest: `None` for a checkpoint of an earlier release.
    """

    folder: Path
    manifest: Manifest | None = None

    @property
    def data_begins(self) -> int:
        """The update at which its run started to read its data: 0, unless it was resumed with `ignore_data_skip`."""
        return int(self.manifest.about.get("data_begins", 0)) if self.manifest else 0


def read_resume_setting(setting: ResumeSetting) -> ResumeSetting | Literal["auto"]:
    """`resume_from_checkpoint` of the trainer, a recipe or a command line, as a folder, True, "auto" or `None`."""
    if isinstance(setting, str) and setting.lower() in ("true", "false", "auto", "none", ""):
        word = setting.lower()
        return "auto" if word == "auto" else word == "true" or None
    return setting or None


def find_checkpoint(
    setting: ResumeSetting, output_dir: Path, current_run: CurrentRun, *, rank: int, control: Any
) -> Checkpoint | None:
    """Find and check the checkpoint to resume from. Collective over the job.

    Args:
        setting: a folder; True for the newest complete checkpoint in `output_dir`; "auto" for the same, or `None` if
            there is no checkpoint yet.

    Returns:
        `None` for a new run.

    Raises:
        CheckpointError: on every rank: the given folder is not complete; there is no checkpoint, or no complete one; or
            this run cannot continue the checkpoint's run.
    """
    request = read_resume_setting(setting)
    if request is None:
        return None
    searches = request in (True, "auto")
    local_folders = checkpoints_in(output_dir) if searches else [Path(str(request))]
    # rank 0's folders in its order, then those that only other hosts have
    folders = list(dict.fromkeys(path for paths in from_every_rank(local_folders, control) for path in paths))
    if not folders and request == "auto":
        return None
    if not folders:
        raise CheckpointError(f"there is no checkpoint in {output_dir} to resume from.")
    rejected: list[str] = []
    for folder in folders:
        inspection = _inspect(folder, current_run, rank, control)
        if not inspection.damage:
            if rank == 0 and rejected:
                logger.warning(f"resuming from {folder}; passed over {'; '.join(rejected)}.")
            if inspection.unfit:
                differences = "; ".join(inspection.unfit)
                raise CheckpointError(f"cannot resume from {folder}: {differences}.{_way_out(inspection)}")
            return Checkpoint(folder, inspection.manifest)
        rejected.append(f"{folder} ({'; '.join(inspection.damage)})")
    if searches:
        raise CheckpointError(f"no checkpoint in {output_dir} is whole: {'; '.join(rejected)}.")
    raise CheckpointError(f"cannot resume from {'; '.join(rejected)}.{_others(folders[0])}")


def newest_whole(output_dir: Path, *, checksums: bool = False, apart_from: Path | None = None) -> Path | None:
    """The newest complete checkpoint that this process sees, judged by the sizes of its files and with `checksums` by
    their checksums. A checkpoint without a manifest is complete if it has the files that resuming needs."""
    for folder in checkpoints_in(output_dir):
        if folder == apart_from:
            continue
        try:
            manifest = read_manifest(folder)
        except ValueError:
            continue
        wrong = damage(folder, manifest, checksums=checksums) if manifest else {}
        if not wrong and not _missing(folder):
            return folder
    return None


def _others(folder: Path) -> str:
    whole = newest_whole(folder.parent, checksums=True, apart_from=folder)
    return f" {whole} is whole: resume from it." if whole is not None else ""


def _way_out(inspection: _Inspection) -> str:
    if inspection.only_data:
        return (
            " Give it what it was run with; or set ignore_data_skip to keep its models and optimizers and begin with "
            "the data anew."
        )
    return " Give the trainer what the checkpoint was run with, or another output_dir and its policy as the model."


@dataclass
class _Inspection:
    """The result of checking one checkpoint.

    Args:
        damage: the problems of its files.
        unfit: its differences from this run.
        only_data: all differences are in the data.
    """

    manifest: Manifest | None = None
    damage: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    only_data: bool = False


def _inspect(folder: Path, current_run: CurrentRun, rank: int, control: Any) -> _Inspection:
    """Check one checkpoint. Collective over the job; the result is the same on all ranks."""
    inspection = _Inspection()
    places = from_every_rank(_place(folder), control)
    reads = places.index(places[rank]) == rank  # one process per host reads the files
    reports = from_every_rank(_read(folder) if reads else _HostFiles(), control)
    inspection.manifest = next((report.manifest for report in reports if report.manifest), None)
    inspection.damage = _spread(folder, inspection.manifest, reports, reads, rank, control)
    if inspection.damage:
        return inspection
    shapes = {
        role: s for part in reversed(from_every_rank(dict(current_run.shapes), control)) for role, s in part.items()
    }
    if rank == 0:
        _examine(folder, inspection, current_run, shapes)
    result = from_every_rank((inspection.damage, inspection.unfit, inspection.only_data), control)[0]
    inspection.damage, inspection.unfit, inspection.only_data = result
    return inspection


def _place(folder: Path) -> tuple[Any, ...]:
    """Identifies a folder on a host: equal for two ranks of one host that see the same folder, or that both see
    none."""
    machine = (socket.gethostname(), machine_id())
    try:
        status = folder.stat()
        return (*machine, status.st_dev, status.st_ino)
    except OSError:
        return (*machine, str(folder.absolute()))


# --- files, on every host -------------------------------------------------------------------------------------------


@dataclass
class _HostFiles:
    """The files of a checkpoint on one host.

    Args:
        sizes: bytes of each file.
        wrong: the problem of each damaged file.
        reads: this rank has read them for its host.
    """

    manifest: Manifest | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    reads: bool = False


def _read(folder: Path) -> _HostFiles:
    report = _HostFiles(reads=True)
    if not folder.is_dir():
        report.wrong[""] = "there is no such folder"
        return report
    try:
        report.manifest = read_manifest(folder)
    except ValueError as error:
        report.wrong[MANIFEST] = str(error)
    report.sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    if report.manifest is not None:
        report.wrong |= damage(folder, report.manifest)
    return report


def _missing(folder: Path) -> list[str]:
    return [name for name in NEEDED if not (folder / name).is_file()]


def _spread(
    folder: Path, manifest: Manifest | None, reports: Sequence[_HostFiles], reads: bool, rank: int, control: Any
) -> list[str]:
    """Copy files to the hosts that lack them. Returns the problems of the files that no host has undamaged."""
    readers = [reader for reader, report in enumerate(reports) if report.reads]
    if all("" in reports[reader].wrong for reader in readers):
        return ["there is no such folder"]
    if manifest is None and any(MANIFEST in reports[reader].wrong for reader in readers):
        return [next(reports[reader].wrong[MANIFEST] for reader in readers if MANIFEST in reports[reader].wrong)]
    names = manifest.files if manifest else {n for reader in readers for n in reports[reader].sizes} | set(NEEDED)
    wrong = []
    copies: list[tuple[str, int, int]] = []
    for name in sorted(names):
        holders = [r for r in readers if name in reports[r].sizes and name not in reports[r].wrong]
        if not holders:
            problems = [reports[reader].wrong[name] for reader in readers if name in reports[reader].wrong]
            damaged = [problem for problem in problems if problem != "is missing"]
            wrong.append(f"{name} {(damaged or problems or ['is missing'])[0]}")
        elif _is_needed(name):
            copies += [(name, holders[0], reader) for reader in readers if reader not in holders]
    wrong += [f"{name} is missing" for name in NEEDED if manifest is not None and name not in manifest.files]
    if any(text.startswith(STATES["critic"]) and text.endswith("is missing") for text in wrong):
        wrong.append("checkpoints of TRL's PPOTrainer have no critic, and those of save_only_model no optimizers")
    if wrong:
        return wrong
    for name, source, target in copies:
        if rank == source:
            _send(folder / name, target, control)
        elif rank == target:
            _receive(folder / name, source, control)
    if copies and reads and manifest is not None and MANIFEST not in reports[rank].sizes:
        manifest.write(folder)
    failures = from_every_rank(_check_copies(folder, manifest, copies, rank), control)
    return [failure for rank_failures in failures for failure in rank_failures]


def _is_needed(name: str) -> bool:
    """Whether resuming reads a file. It reads no model files, because the optimizers' files have the float32
    weights."""
    return name in NEEDED or name.startswith("rng_state")


def _check_copies(
    folder: Path, manifest: Manifest | None, copies: Sequence[tuple[str, int, int]], rank: int
) -> list[str]:
    if manifest is None:
        return []
    received = [name for name, _, target in copies if target == rank]
    return [f"{name} was not copied whole" for name in received if checksum(folder / name) != manifest.files[name][1]]


def _send(path: Path, target: int, control: Any) -> None:
    size = path.stat().st_size
    dist.send(torch.tensor([size]), target, group=control)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), target, group=control)


def _receive(path: Path, source: int, control: Any) -> None:
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


# --- contents, on rank 0 --------------------------------------------------------------------------------------------


def _examine(folder: Path, inspection: _Inspection, current_run: CurrentRun, shapes: Mapping[str, Shapes]) -> None:
    """Check that the files can be read and fit this run. Files without a checksum are searched for NaN if they are
    small."""

    def read(name: str, reader: Callable[[Path], Any]) -> Any:
        try:
            return reader(folder / name)
        except Exception as error:  # on damaged bytes a reader may raise any error
            inspection.damage.append(f"{name} cannot be read ({str(error).splitlines()[0] if str(error) else error!r})")
            return None

    state = read(STATE, _read_state)
    read(SCHEDULER, lambda path: dict(torch.load(path, weights_only=True)))
    for path in sorted(folder.glob("rng_state*.pth")):
        read(path.name, _read_rng)
    for role, name in STATES.items():
        content = read(name, lambda path: _state_of(torch.load(path, weights_only=True, map_location="cpu", mmap=True)))
        if content is None:
            continue
        tensors = [tensor for parameter_state in content.values() for tensor in parameter_state.values()]
        if inspection.manifest is None and (folder / name).stat().st_size <= SCANNED and not all_finite(tensors):
            inspection.damage.append(f"{name} holds NaN or infinity")
        saved = {name: tuple(parameter_state["master"].shape) for name, parameter_state in content.items()}
        if role in shapes and (problem := model_difference(role, saved, shapes[role])):
            inspection.unfit.append(problem)
    if inspection.damage:
        return
    about = dict(inspection.manifest.about) if inspection.manifest else _guess(state)
    inspection.unfit += optimizer_differences(about, current_run.identity)
    data = [] if current_run.ignores_data else data_differences(about, current_run.identity)
    inspection.only_data = bool(data) and not inspection.unfit
    inspection.unfit += data


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_bytes())
    return {**state, "global_step": int(state["global_step"]), "episode": int(state["episode"])}


def _guess(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the trainer's state says of a run without a manifest: the episodes of its updates."""
    step = state["global_step"]
    return {"batch_size": state["episode"] // step} if step else {}


def _read_rng(path: Path) -> Any:
    with safe_globals():
        return torch.load(path, weights_only=True)["cpu"]


def _state_of(content: Any) -> dict[str, dict[str, torch.Tensor]]:
    parameters: dict[str, dict[str, torch.Tensor]] = content["parameters"]
    if not isinstance(content["version"], int) or not all("master" in state for state in parameters.values()):
        raise ValueError("it is no optimizer's state of this package")
    return parameters
