"""The contents of a checkpoint: policy and critic in the format of `from_pretrained`, and the optimizers' states with
the float32 weights.

States are stored by parameter name and not by partition, so a checkpoint of one plan loads under another. How its
folder becomes a checkpoint is in `saving`.
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
from .write_errors import WriteErrors, need_room


def save_models(placement: Placement, folder: Path, save_policy: Any, problems: WriteErrors) -> None:
    """Save policy and critic with whole parameters. Collective over the job; the first rank of each role writes.

    Args:
        save_policy: called with the model, a state dict and a folder on the policy's first rank, in place of
            `Trainer._save`.
        problems: collects this rank's errors, because the other ranks wait for it in collectives.

    Raises:
        SaveError: on every rank, if the replicas of a role differ.
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
    """Inside, `save_pretrained` writes on this rank. Transformers writes on rank 0 alone, and the first rank of a role
    may be another."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del base.should_save_on_this_rank


def _whole_state(engine: TrainingEngine, writes: bool) -> dict[str, Tensor] | None:
    """Every parameter and persistent buffer by the module's names, in host memory; `None` on ranks that do not
    write."""
    state: dict[str, Tensor] = {}
    for bucket in engine.export(merged=False):
        if writes:
            state.update({name: tensor.cpu().clone() for name, tensor in bucket})
    if not writes:
        return None
    return {**state, **persistent_buffers(engine.head.model)}


def _engines(placement: Placement) -> list[tuple[str, TrainingEngine | None, str]]:
    """For each trained role: its training call, its engine on this rank, and its folder within the checkpoint."""
    train_calls = {role: placement.plan.graph.train_call(role) for role in FOLDERS}
    return [(call, placement.trained(role), FOLDERS[role]) for role, call in train_calls.items() if call is not None]


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def save_training_state(placement: Placement, folder: Path, problems: WriteErrors) -> None:
    """Save both optimizers' states with the float32 weights. Collective over the job; the first rank of each role
    writes."""
    for call, engine, subfolder in _engines(placement):
        if engine is None:
            continue
        state = engine.state_dict()
        if placement.group(call).is_leader:
            tensors = {
                f"{name} {key}": tensor
                for name, parameter_state in state["parameters"].items()
                for key, tensor in parameter_state.items()
            }
            path = folder / subfolder / STATE_FILE
            with problems.writing(path, _bytes(tensors)):
                if not all_finite(tensors.values()):
                    raise OSError("the weights or the optimizer's state are not finite")
                need_room(path, _bytes(tensors))
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, path)


def load_training_state(placement: Placement, folder: Path) -> None:
    """Load the state that `save_training_state` saved into the engines of this placement.

    Raises:
        CheckpointError: the state has a number that is not finite.
    """
    for _call, engine, subfolder in _engines(placement):
        if engine is not None:
            path = folder / subfolder / STATE_FILE
            state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            parameter_states = state["parameters"].values()
            if not all_finite(tensor for parameter_state in parameter_states for tensor in parameter_state.values()):
                raise CheckpointError(f"cannot resume from {folder}: {path.relative_to(folder)} holds NaN or infinity.")
            engine.load_state_dict(state)
