"""Finds the checkpoint that a run resumes from, and refuses one that is incomplete or of another run, before any engine
starts.

If hosts have separate disks, a host receives the files that it needs and lacks (`host_files`). `state_files` loads the
state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import logging

from ...runtime.process_groups import all_gather_object
from . import METADATA, CheckpointError
from .chunk_plans import saved_roles, saved_shapes
from .host_files import HostFiles, by_host, copy_files, place_of, read_files
from .identity import Identity, Shapes, algorithm_difference, data_differences, model_difference, optimizer_differences
from .manifest import MANIFEST, Manifest, checkpoints_in, damage, read_manifest
from .state_storage import Reader


logger = logging.get_logger(__name__)

STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
SAVED_SETTINGS = "scheduled_settings.pt"  # parameter-group settings changed by the scheduler
SAMPLES = "samples_under_way.pt"  # samples generated for later updates (staleness)
ENTROPY_STATE = "entropy_ctrl_state.json"  # TRL's name for the state of its entropy controller
NEEDED = (STATE, SCHEDULER, METADATA)

ResumeSetting = str | bool | None


@dataclass(frozen=True)
class CurrentRun:
    """The properties of this run that must match a checkpoint.

    Args:
        identity: data, batch size and optimizer.
        roles: names of the trained roles (`chunk_plans.ROLES`).
        shapes: shapes of each role's trained parameters, on the ranks that hold the role's model.
        ignores_data: `ignore_data_skip`: the data start from the beginning, so they may differ.
        counters: names of the integers that `trainer_state.json` must have.
    """

    identity: Identity
    roles: Sequence[str]
    shapes: Mapping[str, Shapes]
    ignores_data: bool = False
    counters: Sequence[str] = ("global_step",)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to resume from.

    Args:
        readers: the rank that reads and receives files for each rank's host.
        holders: readers with an undamaged copy of each file.
    """

    folder: Path
    manifest: Manifest
    readers: Sequence[int]
    holders: Mapping[str, Sequence[int]]

    @property
    def data_begins(self) -> int:
        """The update at which its run started to read its data: 0, unless it resumed with `ignore_data_skip`."""
        return int(self.manifest.about.get("data_begins", 0))


def read_resume_setting(setting: ResumeSetting) -> ResumeSetting | Literal["auto"]:
    """`resume_from_checkpoint` of the trainer, a recipe or a command line, as a folder, True, "auto" or `None`."""
    if isinstance(setting, str) and setting.lower() in ("true", "false", "auto", "none", ""):
        word = setting.lower()
        return "auto" if word == "auto" else word == "true" or None
    return setting or None


def find_checkpoint(
    setting: ResumeSetting, output_dir: Path, current_run: CurrentRun, *, rank: int, control: dist.ProcessGroup | None
) -> Checkpoint | None:
    """Find and check the checkpoint to resume from. Collective over the job.

    Args:
        setting: folder; True for the newest complete checkpoint in `output_dir`; "auto" for the same, or `None` if
            there is no checkpoint yet.

    Returns:
        `None` for a new run.

    Raises:
        CheckpointError: the folder is not complete; there is no checkpoint, or no complete one; or this run cannot
            continue the checkpoint's run. Raised on every rank.
    """
    request = read_resume_setting(setting)
    if request is None:
        return None
    searches = request in (True, "auto")
    local_folders = checkpoints_in(output_dir) if searches else [Path(str(request))]
    # rank 0's folders in order, then folders that only other hosts have
    folders = list(dict.fromkeys(path for paths in all_gather_object(local_folders, control) for path in paths))
    if not folders and request == "auto":
        return None
    if not folders:
        raise CheckpointError(f"there is no checkpoint in {output_dir} to resume from.")
    rejected: list[str] = []
    for folder in folders:
        inspection = _inspect(folder, current_run, rank, control)
        if inspection.manifest is not None and not inspection.damage:
            if rank == 0 and rejected:
                logger.warning(f"resuming from {folder}; passed over {'; '.join(rejected)}.")
            if inspection.unfit:
                differences = "; ".join(inspection.unfit)
                raise CheckpointError(f"cannot resume from {folder}: {differences}. {inspection.remedy}")
            return Checkpoint(folder, inspection.manifest, inspection.readers, inspection.holders)
        rejected.append(f"{folder} ({'; '.join(inspection.damage)})")
    if searches:
        raise CheckpointError(f"no checkpoint in {output_dir} is whole: {'; '.join(rejected)}.")
    raise CheckpointError(f"cannot resume from {'; '.join(rejected)}.{_others(folders[0])}")


def fetch(checkpoint: Checkpoint, needed: Collection[str], *, rank: int, control: dist.ProcessGroup | None) -> None:
    """Copy files of a checkpoint to hosts that need and lack them. Collective over the job.

    Args:
        needed: files that this rank needs, by path inside the folder.

    Raises:
        CheckpointError: a file was not copied whole. Raised on every rank.
    """
    rank_needs = all_gather_object(sorted(needed), control)
    readers_by_file: dict[str, set[int]] = {}
    for reader, names in zip(checkpoint.readers, rank_needs, strict=True):
        for name in names:
            readers_by_file.setdefault(name, set()).add(reader)
    copies = [
        (name, checkpoint.holders[name][0], reader)
        for name, readers in sorted(readers_by_file.items())
        for reader in sorted(readers.difference(checkpoint.holders[name]))
    ]
    if failures := copy_files(checkpoint.folder, checkpoint.manifest, copies, rank, control):
        raise CheckpointError(f"cannot resume from {checkpoint.folder}: {'; '.join(failures)}.")


def newest_whole(output_dir: Path, *, checksums: bool = False, apart_from: Path | None = None) -> Path | None:
    """The newest complete checkpoint that this process sees, judged by file sizes, and with `checksums` also by
    checksums."""
    for folder in checkpoints_in(output_dir):
        if folder == apart_from:
            continue
        try:
            manifest = read_manifest(folder)
        except ValueError:
            continue
        if manifest is None or any(name not in manifest.files for name in NEEDED):
            continue
        if not damage(folder, manifest, checksums=checksums):
            return folder
    return None


def _others(folder: Path) -> str:
    whole = newest_whole(folder.parent, checksums=True, apart_from=folder)
    return f" {whole} is whole: resume from it." if whole is not None else ""


@dataclass
class _Inspection:
    """The result of checking one checkpoint.

    Args:
        damage: problems of its files.
        unfit: differences from this run.
        remedy: advice about the differences, as a sentence.
        readers, holders: see `Checkpoint`.
    """

    manifest: Manifest | None = None
    readers: Sequence[int] = ()
    holders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    remedy: str = ""


def _inspect(folder: Path, current_run: CurrentRun, rank: int, control: dist.ProcessGroup | None) -> _Inspection:
    """Check one checkpoint. Collective over the job; the result is the same on all ranks."""
    inspection = _Inspection()
    places = all_gather_object(place_of(folder), control)
    inspection.readers = [places.index(place) for place in places]
    # the ranks of a host check its files together
    peers = [other for other, place in enumerate(places) if place == places[rank]]
    reports = by_host(all_gather_object(read_files(folder, peers.index(rank), len(peers)), control), inspection.readers)
    inspection.manifest = next((report.manifest for report in reports.values() if report.manifest), None)
    inspection.damage = _find_damage(folder, inspection, reports)
    if inspection.damage or inspection.manifest is None:
        return inspection
    names = [name for name in inspection.manifest.files if is_needed_by_all(name)]
    copies = [
        (name, inspection.holders[name][0], reader)
        for name in sorted(names)
        for reader in reports
        if reader not in inspection.holders[name]
    ]
    inspection.damage = copy_files(folder, inspection.manifest, copies, rank, control)
    if inspection.damage:
        return inspection
    shapes = {
        role: s for part in reversed(all_gather_object(dict(current_run.shapes), control)) for role, s in part.items()
    }
    if rank == 0:
        _examine(folder, inspection, current_run, shapes)
    result = all_gather_object((inspection.damage, inspection.unfit, inspection.remedy), control)[0]
    inspection.damage, inspection.unfit, inspection.remedy = result
    return inspection


# --- files, on every host -------------------------------------------------------------------------------------------


def _find_damage(folder: Path, inspection: _Inspection, reports: Mapping[int, HostFiles]) -> list[str]:
    """The problems of files that no host has undamaged. Sets `inspection.holders`."""
    manifest = inspection.manifest
    if all("" in report.wrong for report in reports.values()):
        return ["there is no such folder"]
    if manifest is None:
        problems = [report.wrong[MANIFEST] for report in reports.values() if MANIFEST in report.wrong]
        return problems[:1] or [
            f"{MANIFEST} is missing: its writer was killed, or was another program, such as TRL's trainer, or "
            f"Accelerate where it trains; a new run begins with its weights by model={str(folder)!r}"
        ]
    # a host without a manifest has unchecked files: copying to it was interrupted
    checked = {reader: report for reader, report in reports.items() if report.manifest is not None}
    inspection.holders = {
        name: [reader for reader, report in checked.items() if name in report.sizes and name not in report.wrong]
        for name in manifest.files
    }
    wrong = []
    for name in sorted(name for name, holders in inspection.holders.items() if not holders):
        problems = [report.wrong[name] for report in checked.values() if name in report.wrong]
        wrong.append(f"{name} {next((text for text in problems if text != 'is missing'), 'is missing')}")
    wrong += [f"{name} is missing" for name in NEEDED if name not in manifest.files]
    if METADATA not in manifest.files:
        wrong.append(
            f"checkpoints of save_only_model have no optimizers; a new run begins with their weights by "
            f"model={str(folder)!r}"
        )
    return wrong


def is_needed_by_all(name: str) -> bool:
    """True if every host needs a file to resume. Model files are not needed, because the training state has the float32
    weights. The training-state files that a host needs are known once its engines have started (`fetch`)."""
    return name in (*NEEDED, SAVED_SETTINGS, SAMPLES, ENTROPY_STATE) or name.startswith("rng_state")


# --- contents, on rank 0 --------------------------------------------------------------------------------------------


def _examine(folder: Path, inspection: _Inspection, current_run: CurrentRun, shapes: Mapping[str, Shapes]) -> None:
    """Check that the files can be read and match this run."""

    def read(name: str, reader: Callable[[Path], object]) -> Any:
        try:
            return reader(folder / name)
        except Exception as error:  # readers of damaged bytes may raise any error
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            inspection.damage.append(f"{name} cannot be read ({reason})")
            return None

    metadata = read(METADATA, lambda path: Reader(folder).read_metadata())
    roles = [] if metadata is None else saved_roles(metadata)
    other_algorithm = algorithm_difference(roles, current_run.roles) if roles else None
    # the state of another algorithm's trainer lacks these counters
    read(STATE, lambda path: _read_state(path, () if other_algorithm else current_run.counters))
    read(SCHEDULER, lambda path: dict(torch.load(path, weights_only=True)))
    read(SAVED_SETTINGS, read_settings)
    for path in sorted(folder.glob("rng_state*.pth")):
        read(path.name, _read_rng)
    if other_algorithm:
        inspection.unfit = [other_algorithm]
        inspection.remedy = (
            f"Resume it with the trainer that wrote it; or begin a run with its policy, model={str(folder)!r}, in "
            "another output_dir."
        )
        return
    saved: Mapping[str, Shapes] = read(METADATA, lambda path: saved_shapes(metadata, current_run.roles)) or {}
    for role in saved.keys() & shapes.keys():
        if problem := model_difference(role, saved[role], shapes[role]):
            inspection.unfit.append(problem)
    if inspection.damage or inspection.manifest is None:
        return
    about = inspection.manifest.about
    inspection.unfit += optimizer_differences(about, current_run.identity)
    data = [] if current_run.ignores_data else data_differences(about, current_run.identity)
    if data and not inspection.unfit:
        inspection.remedy = (
            "Use the data and batches of its run; or set ignore_data_skip to keep its models and optimizers and begin "
            "with the first prompt."
        )
    else:
        inspection.remedy = (
            "Use the models and settings of the checkpoint's run, or another output_dir and its policy as the model."
        )
    inspection.unfit += data


def read_settings(path: Path) -> list[dict[str, Any]] | None:
    """The saved result of `LearningRates.changed`; `None` if the checkpoint lacks the file, because an earlier release
    wrote it."""
    return [dict(settings) for settings in torch.load(path, weights_only=True)] if path.exists() else None


def _read_state(path: Path, counters: Sequence[str]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_bytes())
    return {**state, **{name: int(state[name]) for name in counters}}


def _read_rng(path: Path) -> Any:
    with safe_globals():
        return torch.load(path, weights_only=True)["cpu"]
