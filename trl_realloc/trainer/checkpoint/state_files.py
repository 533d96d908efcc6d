"""Saves and loads the training state of policy and critic with torch.distributed.checkpoint (DCP), each rank its part.

A checkpoint of one plan loads under another, and on any number of processes. Its folder is in DCP's format.
`chunk_plans` plans the chunks that a rank has and reads, `chunk_division` which of them it writes, over the job's gloo
group; `state_storage` has the files. Models in the format of `from_pretrained` are in `model_files`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan

from ...engines.base import TrainingEngine
from ...runtime.placement.placement import Placement
from ...runtime.process_groups import at_first_rank, to_each_rank
from . import METADATA, STATE_FOLDER, CheckpointError
from .chunk_division import Chunks, Division, without_collection
from .chunk_plans import ROLES, Entries, Loading, Saving, entries_of, planned_bytes, specs_of
from .state_storage import Reader, Writer, file_of
from .write_errors import WriteErrors, need_room


class StateWrite:
    """Writes the training state of every trained role. Creation and `finish` are collective over the job. Every rank
    writes one file, and the first rank the list of contents. Of equal replicas, one writes each part.

    Args:
        in_background: copy this rank's chunks to host memory, and write them in a thread during training. Otherwise
            they are written at once.
    """

    def __init__(
        self, placement: Placement, folder: Path, problems: WriteErrors, *, in_background: bool = False
    ) -> None:
        self.folder, self.problems = folder / STATE_FOLDER, problems
        entries: Entries = {}
        for role, engine in _trained(placement):
            entries |= entries_of(role, engine.training_state())
        self._planner, self._writer = Saving(entries), Writer(self.folder, problems.rank)
        self._division: Division | None = None  # on the first rank
        self._plan = self._agree()
        self._path = self.folder / self._writer.file if self._plan.items else None
        self._lengths = np.zeros(0, dtype=np.int64)  # bytes per chunk written by this rank
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
        except Exception as error:  # raised by `finish`, where the other ranks wait for this one
            self._error = error

    def _agree(self) -> SavePlan:
        """Divide the chunks among the ranks; returns the plan of this rank's chunks. Collective over the job."""
        plan = self._planner.create_local_plan()
        with without_collection():
            per_rank = at_first_rank(Chunks.of(plan), self.problems.control)
            if per_rank:
                with self.problems.trying(self.folder):
                    self._division = Division.of(per_rank)
            nothing = [np.zeros(0, dtype=np.int64)] * len(per_rank)
            positions = to_each_rank(self._division.kept if self._division else nothing, self.problems.control)
        return replace(plan, items=[plan.items[position] for position in positions.tolist()])

    def _write(self) -> None:
        try:
            results = self._writer.write_data(self._plan, self._planner).value()
            self._lengths = np.array([result.size_in_bytes for result in results], dtype=np.int64)
        except Exception as error:  # raised by `finish`
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until this rank's file is written, then write the list of all files. Errors are collected."""
        if self._thread.is_alive():
            self._thread.join()
        if self._path is not None:
            with self.problems.writing(self._path, planned_bytes(self._plan)):
                if self._error is not None:
                    raise self._error
        lengths = at_first_rank(self._lengths, self.problems.control)
        if self._division is not None and self._division.is_written(lengths):
            with self.problems.writing(self.folder / Path(METADATA).name), without_collection():
                self.folder.mkdir(parents=True, exist_ok=True)
                files = [file_of(rank) for rank in range(len(lengths))]
                self._writer.finish(self._division.metadata, self._division.results(lengths, files))
        self._division = None
        self._planner.entries.clear()


def load_training_state(placement: Placement, folder: Path, fetch: Callable[[Collection[str]], None]) -> None:
    """Load the state saved by `StateWrite` into the engines of this placement. Every rank reads its parts. Collective
    over the job.

    Args:
        fetch: called on every rank with the files that it reads; gets those that its host lacks.

    Raises:
        CheckpointError: a number is not finite, or a file cannot be read.
        EngineError: the state belongs to another model.
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
    """Context of reading a checkpoint's files: readers of damaged bytes may raise any error."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"cannot resume from {folder}: {str(error) or repr(error)}") from error


def _trained(placement: Placement) -> Iterator[tuple[str, TrainingEngine]]:
    """The trained roles for which this rank has an engine."""
    for role, name in ROLES.items():
        engine = placement.trained(role)
        if engine is not None:
            yield name, engine
