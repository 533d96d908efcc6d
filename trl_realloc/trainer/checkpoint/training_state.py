"""Saves and loads the training state of policy and critic by torch.distributed.checkpoint (DCP), each rank its part.

A checkpoint of one plan loads under another, and on any number of processes. Its folder is in DCP's format. Which
chunks a rank writes and reads is planned in `state_plans`, over the job's gloo group; the files are in `state_storage`.
The models in the format of `from_pretrained` are in `models`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ...engines.base import TrainingEngine
from ...runtime.placement import Placement
from ...runtime.process_groups import at_first_rank, to_each_rank
from . import METADATA, STATE_FOLDER, CheckpointError
from .state_plans import ROLES, Entries, Loading, Saving, entries_of, planned_bytes, specs_of
from .state_storage import Reader, Writer
from .write_errors import WriteErrors, need_room


class StateWrite:
    """The training state of every trained role while it is written. Making it and `finish` are collective over the
    job. Every rank writes one file, and the first one the list of what is in them. Of equal replicas each part is
    written by one.

    Args:
        in_background: copy what this rank writes to host memory, and write it in a thread while training goes on.
            Otherwise it is written at once.
    """

    def __init__(
        self, placement: Placement, folder: Path, problems: WriteErrors, *, in_background: bool = False
    ) -> None:
        self.folder, self.problems = folder / STATE_FOLDER, problems
        entries: Entries = {}
        for role, engine in _trained(placement):
            entries |= entries_of(role, engine.training_state())
        self._planner, self._writer = Saving(entries), Writer(self.folder)
        self._metadata: Metadata | None = None  # on the first rank
        self._plan = self._agree()
        self._path = self.folder / self._writer.file_of(self._plan) if self._plan.items else None
        self._results: list[WriteResult] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        if self._path is None:
            return
        try:
            need_room(self._path, planned_bytes(self._plan))
            self.folder.mkdir(parents=True, exist_ok=True)
            if in_background:
                self._planner.copy_to_host(self._plan)
                self._thread.start()
            else:
                self._write()
        except Exception as error:  # raised by `finish`, because the other ranks wait for this one there
            self._error = error

    def _agree(self) -> SavePlan:
        """What this rank writes."""
        plans = at_first_rank(self._planner.create_local_plan(), self.problems.control)
        if plans:
            empty = [SavePlan([])] * len(plans)
            with self.problems.trying(self.folder):
                plans, self._metadata = self._planner.create_global_plan(plans)
                plans = self._writer.prepare_global_plan(plans)
            plans = plans if self._metadata is not None else empty
        plan: SavePlan = to_each_rank(plans, self.problems.control)
        return plan

    def _write(self) -> None:
        try:
            self._results = self._writer.write_data(self._plan, self._planner).value()
        except Exception as error:  # raised by `finish`
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until this rank's file is written, and write the list of all files. Errors are collected."""
        if self._thread.is_alive():
            self._thread.join()
        if self._path is not None:
            with self.problems.writing(self._path, planned_bytes(self._plan)):
                if self._error is not None:
                    raise self._error
        rank_results = at_first_rank(self._results, self.problems.control)
        if self._metadata is not None:
            with self.problems.writing(self.folder / Path(METADATA).name):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._writer.finish(self._metadata, rank_results)
        self._planner.entries.clear()


def load_training_state(placement: Placement, folder: Path, fetch: Callable[[Collection[str]], None]) -> None:
    """Load what `StateWrite` wrote into the engines of this placement. Every rank reads its own parts.
    Collective over the job.

    Args:
        fetch: called with the files that this rank reads, on every rank; gets those that its host lacks.

    Raises:
        CheckpointError: a number is not finite, or a file cannot be read.
        EngineError: the state is of another model.
    """
    reader = Reader(folder)
    with _refusing(folder):
        metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, False)
    with contextlib.ExitStack() as engines:
        states = {
            role: engines.enter_context(engine.loading(specs_of(metadata, role)))
            for role, engine in _trained(placement)
        }
        planners = {role: Loading(role, state, metadata) for role, state in states.items()}
        plans = {role: planner.create_local_plan() for role, planner in planners.items()}
        items = [item for plan in plans.values() for item in plan.items]
        fetch({f"{STATE_FOLDER}/{reader.storage_data[item.storage_index].relative_path}" for item in items})
        for role, planner in planners.items():
            with _refusing(folder):
                reader.read_data(plans[role], planner)
                planner.finish()


@contextlib.contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Around reading files of a checkpoint: on damaged bytes a reader may raise any error."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"cannot resume from {folder}: {str(error) or repr(error)}") from error


def _trained(placement: Placement) -> Iterator[tuple[str, TrainingEngine]]:
    """The trained roles of which this rank has an engine."""
    for role, name in ROLES.items():
        engine = placement.trained(role)
        if engine is not None:
            yield name, engine
