"""A run on disk: the policy as `from_pretrained` reads it, the critic beside it, and all that training goes on from.

States are kept by parameter name, not by partition: a checkpoint made under one plan loads under another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.nonfinite import all_finite
from ...engines.base import TrainingEngine
from ...engines.models import persistent_buffers
from ...plan.dataflow import Role
from ...runtime.placement import Placement
from ...runtime.replica_check import check_replicas
from . import STATE_FILE, VALUE_FOLDER, CheckpointError
from .problems import Problems, need_room


def save_models(placement: Placement, folder: Path, save_policy: Any, problems: Problems) -> None:
    """Policy and critic whole, whatever their layout. Collective; each role's first rank writes.

    Args:
        save_policy: `Trainer._save`-like, from a folder and a state dict; called on the policy's first rank.
        problems: takes what goes wrong on this rank while it writes: the others are waiting for it in collectives.

    Raises:
        SaveError: on every rank, where the ranks that hold a role have trained different models.
    """
    for call, engine, _ in _engines(placement):
        if engine is not None:
            with problems.trying(folder):
                check_replicas(engine, placement.group(call), call.partition(".")[0])
    problems.settle("the model")
    for call, engine, subfolder in _engines(placement):
        state = None if engine is None else _whole_state(engine, placement.group(call).is_leader)
        if engine is None or state is None:
            continue
        target = folder / subfolder
        with problems.writing(target, _bytes(state)), _writing_here(engine.head.model):
            need_room(target, _bytes(state))
            if not subfolder:
                save_policy(engine.head.model, state, target)
            else:
                target.mkdir(parents=True, exist_ok=True)
                engine.head.model.save_pretrained(target, state_dict=state)


FOLDERS = {Role.ACTOR: "", Role.CRITIC: VALUE_FOLDER}


@contextlib.contextmanager
def _writing_here(model: Any) -> Iterator[None]:
    """Transformers' `save_pretrained` writes on the job's rank 0 alone; a role's first rank may be another."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del base.should_save_on_this_rank


def _whole_state(engine: TrainingEngine, writes: bool) -> dict[str, Tensor] | None:
    """Every parameter and persistent buffer under the module's own names, on the host of the rank that writes."""
    state: dict[str, Tensor] = {}
    for bucket in engine.export(merged=False):
        if writes:
            state.update({name: tensor.cpu().clone() for name, tensor in bucket})
    if not writes:
        return None
    return {**state, **persistent_buffers(engine.head.model)}


def _engines(placement: Placement) -> list[tuple[str, TrainingEngine | None, str]]:
    """The trained roles: call, engine on this rank, folder within the checkpoint."""
    homes = {role: placement.plan.graph.train_call(role) for role in FOLDERS}
    return [(home, placement.trained(role), FOLDERS[role]) for role, home in homes.items() if home is not None]


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def save_training_state(placement: Placement, folder: Path, problems: Problems) -> None:
    """Both optimizers' states with the float32 weights. Collective; each role's first rank writes."""
    for call, engine, subfolder in _engines(placement):
        if engine is None:
            continue
        state = engine.state_dict()
        if placement.group(call).is_leader:
            cells = {f"{name} {key}": cell for name, own in state["parameters"].items() for key, cell in own.items()}
            path = folder / subfolder / STATE_FILE
            with problems.writing(path, _bytes(cells)):
                if not all_finite(cells.values()):
                    raise OSError("the weights or the optimizer's state are not finite")
                need_room(path, _bytes(cells))
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, path)


def load_training_state(placement: Placement, folder: Path) -> None:
    """The inverse of `save_training_state`, under this placement's plan.

    Raises:
        CheckpointError: a number of it is not finite.
    """
    for _call, engine, subfolder in _engines(placement):
        if engine is not None:
            path = folder / subfolder / STATE_FILE
            state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            if not all_finite(cell for own in state["parameters"].values() for cell in own.values()):
                raise CheckpointError(f"cannot resume from {folder}: {path.relative_to(folder)} holds NaN or infinity.")
            engine.load_state_dict(state)
