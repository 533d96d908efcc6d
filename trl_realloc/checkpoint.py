"""A run on disk: the policy as `from_pretrained` reads it, the critic beside it, and all that training goes on from.

States are kept by parameter name, not by partition: a checkpoint made under one plan loads under another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .models import persistent_buffers
from .runtime.placement import Placement, TrainedEngine


VALUE_FOLDER = "value_model"  # beside the policy's files, in TRL's word for the critic
STATE_FILE = "optimizer.pt"  # where Trainer keeps it; one in the policy's folder, one in the critic's


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from. The message names what is missing."""


def save_models(placement: Placement, folder: Path, save_policy: Any) -> None:
    """Policy and critic whole, whatever their layout. Collective; each role's first rank writes.

    Args:
        save_policy: `Trainer._save`-like, from a folder and a state dict; called on the policy's first rank.
    """
    if placement.actor is not None:
        state = _whole_state(placement.actor, placement.group("actor.train").is_leader)
        if state is not None:
            with _writing_here(placement.actor.head.model):
                save_policy(placement.actor.head.model, state, folder)
    if placement.critic is not None:
        state = _whole_state(placement.critic, placement.group("critic.train").is_leader)
        if state is not None:
            (folder / VALUE_FOLDER).mkdir(parents=True, exist_ok=True)
            with _writing_here(placement.critic.head.model):
                placement.critic.head.model.save_pretrained(folder / VALUE_FOLDER, state_dict=state)


@contextlib.contextmanager
def _writing_here(model: Any) -> Iterator[None]:
    """Transformers' `save_pretrained` writes on the job's rank 0 alone; a role's first rank may be another."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del base.should_save_on_this_rank


def _whole_state(engine: TrainedEngine, writes: bool) -> dict[str, Tensor] | None:
    """Every parameter and persistent buffer under the module's own names, on the host of the rank that writes."""
    state: dict[str, Tensor] = {}
    for bucket in engine.export(merged=False):
        if writes:
            state.update({name: tensor.cpu().clone() for name, tensor in bucket})
    if not writes:
        return None
    return {**state, **persistent_buffers(engine.head.model)}


def _engines(placement: Placement) -> list[tuple[str, TrainedEngine | None, str]]:
    return [("actor.train", placement.actor, ""), ("critic.train", placement.critic, VALUE_FOLDER)]


def save_training_state(placement: Placement, folder: Path) -> None:
    """Both optimizers' states with the float32 weights. Collective; each role's first rank writes."""
    for call, engine, subfolder in _engines(placement):
        if engine is None:
            continue
        state = engine.state_dict()
        if placement.group(call).is_leader:
            (folder / subfolder).mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / subfolder / STATE_FILE)


def load_training_state(placement: Placement, folder: Path) -> None:
    """The inverse of `save_training_state`, under this placement's plan."""
    for _call, engine, subfolder in _engines(placement):
        if engine is not None:
            engine.load_state_dict(torch.load(folder / subfolder / STATE_FILE, weights_only=True, map_location="cpu"))


def check_checkpoint(folder: Path) -> None:
    """Raises:
    CheckpointError: before anything is loaded, where the folder lacks what resuming needs.
    """
    needed = ["trainer_state.json", "scheduler.pt", STATE_FILE, f"{VALUE_FOLDER}/{STATE_FILE}"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"cannot resume from {folder}: it has no {', '.join(missing)}. Checkpoints of TRL's PPOTrainer lack the "
            f"critic, and those saved with save_only_model the optimizers; start from the model instead."
        )
