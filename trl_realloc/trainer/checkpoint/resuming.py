"""Finding the checkpoint that a run goes on from, and refusing one that is not whole or is another run's, before any
engine starts.

On hosts with a disk each every host is handed the files that it lacks. Owns nothing of what is loaded (`state`).
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
from .identity import Identity, Shapes, other_data, other_model, other_run
from .manifest import MANIFEST, Manifest, checkpoints_in, checksum, damage, read_manifest


logger = logging.get_logger(__name__)

STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
STATES = {"policy": STATE_FILE, "critic": f"{VALUE_FOLDER}/{STATE_FILE}"}
NEEDED = (STATE, SCHEDULER, *STATES.values())
SCANNED = 1 << 30  # largest file without a checksum that is read whole to find NaN before the engines start
CHUNK = 64 << 20

Wanted = str | bool | None


@dataclass(frozen=True)
class Here:
    """This run, as a checkpoint has to fit it.

    Args:
        identity: data, batch and optimizer.
        shapes: of each role's trained parameters, on the ranks that have the role's model.
        ignores_data: `ignore_data_skip`: the data begin anew, so they may be others.
    """

    identity: Identity
    shapes: Mapping[str, Shapes]
    ignores_data: bool = False


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from.

    Args:
        manifest: `None` of one that an earlier release wrote.
    """

    folder: Path
    manifest: Manifest | None = None

    @property
    def data_begins(self) -> int:
        """The update at which its run began with its data: 0, unless it was resumed with `ignore_data_skip`."""
        return int(self.manifest.about.get("data_begins", 0)) if self.manifest else 0


def read_wanted(given: Wanted) -> Wanted | Literal["auto"]:
    """`resume_from_checkpoint` as the trainer, a recipe or a command line gives it: a folder, True, "auto", or None."""
    if isinstance(given, str) and given.lower() in ("true", "false", "auto", "none", ""):
        word = given.lower()
        return "auto" if word == "auto" else word == "true" or None
    return given or None


def find_checkpoint(given: Wanted, output_dir: Path, here: Here, *, rank: int, control: Any) -> Found | None:
    """The checkpoint to go on from, checked. All ranks together.

    Args:
        given: a folder; True for the newest whole one in `output_dir`; "auto" for the same, or none where there is
            none yet.

    Returns:
        `None` to begin from the start.

    Raises:
        CheckpointError: on every rank: the folder that was named is not whole; there is none, or none that is whole;
            or it is of a run with which this one cannot go on.
    """
    wanted = read_wanted(given)
    if wanted is None:
        return None
    searches = wanted in (True, "auto")
    own = checkpoints_in(output_dir) if searches else [Path(str(wanted))]
    # the first rank's order; then what only other hosts have
    folders = list(dict.fromkeys(path for part in from_every_rank(own, control) for path in part))
    if not folders and wanted == "auto":
        return None
    if not folders:
        raise CheckpointError(f"there is no checkpoint in {output_dir} to resume from.")
    passed: list[str] = []
    for folder in folders:
        looked = _look(folder, here, rank, control)
        if not looked.damage:
            if rank == 0 and passed:
                logger.warning(f"resuming from {folder}; passed over {'; '.join(passed)}.")
            if looked.unfit:
                raise CheckpointError(f"cannot resume from {folder}: {'; '.join(looked.unfit)}.{_way_out(looked)}")
            return Found(folder, looked.manifest)
        passed.append(f"{folder} ({'; '.join(looked.damage)})")
    if searches:
        raise CheckpointError(f"no checkpoint in {output_dir} is whole: {'; '.join(passed)}.")
    raise CheckpointError(f"cannot resume from {'; '.join(passed)}.{_others(folders[0])}")


def newest_whole(output_dir: Path, *, checksums: bool = False, apart_from: Path | None = None) -> Path | None:
    """As this process sees it by the sizes of files; one without a manifest counts where its files are there."""
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


def _way_out(looked: _Looked) -> str:
    if looked.only_data:
        return (
            " Give it what it was run with; or set ignore_data_skip to keep its models and optimizers and begin with "
            "the data anew."
        )
    return " Give the trainer what the checkpoint was run with, or another output_dir and its policy as the model."


@dataclass
class _Looked:
    """What is known of one checkpoint.

    Args:
        damage: what is wrong with its files. unfit: what it has other than this run; only_data: that is all data.
    """

    manifest: Manifest | None = None
    damage: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    only_data: bool = False


def _look(folder: Path, here: Here, rank: int, control: Any) -> _Looked:
    """Collective; the same on all ranks."""
    looked = _Looked()
    places = from_every_rank(_place(folder), control)
    reads = places.index(places[rank]) == rank  # one process of each host
    own = _read(folder) if reads else _Report()
    reports = from_every_rank(own, control)
    looked.manifest = next((report.manifest for report in reports if report.manifest), None)
    looked.damage = _spread(folder, looked.manifest, reports, reads, rank, control)
    if looked.damage:
        return looked
    shapes = {role: s for part in reversed(from_every_rank(dict(here.shapes), control)) for role, s in part.items()}
    if rank == 0:
        _examine(folder, looked, here, shapes)
    judged = from_every_rank((looked.damage, looked.unfit, looked.only_data), control)[0]
    looked.damage, looked.unfit, looked.only_data = judged
    return looked


def _place(folder: Path) -> tuple[Any, ...]:
    """The same for two ranks of one host that see the same folder, or both see none there."""
    machine = (socket.gethostname(), machine_id())
    try:
        found = folder.stat()
        return (*machine, found.st_dev, found.st_ino)
    except OSError:
        return (*machine, str(folder.absolute()))


# --- files, on every host -------------------------------------------------------------------------------------------


@dataclass
class _Report:
    """What one host has of a checkpoint: its manifest, every file's size, and what is wrong with some."""

    manifest: Manifest | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    reads: bool = False


def _read(folder: Path) -> _Report:
    report = _Report(reads=True)
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
    folder: Path, manifest: Manifest | None, reports: Sequence[_Report], reads: bool, rank: int, control: Any
) -> list[str]:
    """Hand every host that lacks a file what another has, and return what no host has whole."""
    readers = [at for at, report in enumerate(reports) if report.reads]
    if all("" in reports[at].wrong for at in readers):
        return ["there is no such folder"]
    if manifest is None and any(MANIFEST in reports[at].wrong for at in readers):
        return [next(reports[at].wrong[MANIFEST] for at in readers if MANIFEST in reports[at].wrong)]
    names = manifest.files if manifest else {n for at in readers for n in reports[at].sizes} | set(NEEDED)
    wrong = []
    copies: list[tuple[str, int, int]] = []
    for name in sorted(names):
        holders = [at for at in readers if name in reports[at].sizes and name not in reports[at].wrong]
        if not holders:
            said = [reports[at].wrong[name] for at in readers if name in reports[at].wrong]
            present = [text for text in said if text != "is missing"]
            wrong.append(f"{name} {(present or said or ['is missing'])[0]}")
        elif _is_needed(name):
            copies += [(name, holders[0], at) for at in readers if at not in holders]
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
    failed = [text for own in from_every_rank(_check_copies(folder, manifest, copies, rank), control) for text in own]
    return failed


def _is_needed(name: str) -> bool:
    """Of the files those that resuming reads; the models themselves come from the optimizers' float32 weights."""
    return name in NEEDED or name.startswith("rng_state")


def _check_copies(
    folder: Path, manifest: Manifest | None, copies: Sequence[tuple[str, int, int]], rank: int
) -> list[str]:
    if manifest is None:
        return []
    own = [name for name, _, target in copies if target == rank]
    return [f"{name} was not copied whole" for name in own if checksum(folder / name) != manifest.files[name][1]]


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
    left = int(size)
    with path.open("wb") as file:
        while left:
            chunk = torch.empty(min(left, CHUNK), dtype=torch.uint8)
            dist.recv(chunk, source, group=control)
            file.write(chunk.numpy().tobytes())
            left -= chunk.numel()


# --- contents, on rank 0 --------------------------------------------------------------------------------------------


def _examine(folder: Path, looked: _Looked, here: Here, shapes: Mapping[str, Shapes]) -> None:
    """Whether the files can be read and are of this run; every number of small ones that no checksum vouches for."""

    def read(name: str, reader: Callable[[Path], Any]) -> Any:
        try:
            return reader(folder / name)
        except Exception as error:  # what a reader raises on other bytes than its own can be anything
            looked.damage.append(f"{name} cannot be read ({str(error).splitlines()[0] if str(error) else error!r})")
            return None

    state = read(STATE, _read_state)
    read(SCHEDULER, lambda path: dict(torch.load(path, weights_only=True)))
    for path in sorted(folder.glob("rng_state*.pth")):
        read(path.name, _read_rng)
    for role, name in STATES.items():
        content = read(name, lambda path: _state_of(torch.load(path, weights_only=True, map_location="cpu", mmap=True)))
        if content is None:
            continue
        cells = [cell for own in content.values() for cell in own.values()]
        if looked.manifest is None and (folder / name).stat().st_size <= SCANNED and not all_finite(cells):
            looked.damage.append(f"{name} holds NaN or infinity")
        saved = {parameter: tuple(own["master"].shape) for parameter, own in content.items()}
        if role in shapes and (problem := other_model(role, saved, shapes[role])):
            looked.unfit.append(problem)
    if looked.damage:
        return
    about = dict(looked.manifest.about) if looked.manifest else _guess(state)
    looked.unfit += other_run(about, here.identity)
    data = [] if here.ignores_data else other_data(about, here.identity)
    looked.only_data = bool(data) and not looked.unfit
    looked.unfit += data


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_bytes())
    return {**state, "global_step": int(state["global_step"]), "episode": int(state["episode"])}


def _guess(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run without a manifest: how many episodes its updates had."""
    step = state["global_step"]
    return {"batch_size": state["episode"] // step} if step else {}


def _read_rng(path: Path) -> Any:
    with safe_globals():
        return torch.load(path, weights_only=True)["cpu"]


def _state_of(content: Any) -> dict[str, dict[str, torch.Tensor]]:
    parameters: dict[str, dict[str, torch.Tensor]] = content["parameters"]
    if not isinstance(content["version"], int) or not all("master" in own for own in parameters.values()):
        raise ValueError("it is no optimizer's state of this package")
    return parameters
