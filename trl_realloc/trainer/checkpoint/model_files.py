"""Saves policy and critic in the format of `from_pretrained`, without a whole model on any rank.

The first rank of a role receives the parameters bucket by bucket and writes them (`weight_files`). For a model with
adapters, only these are saved. Float32 weights and optimizer states are in `state_files`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...engines.base import TrainingEngine
from ...engines.mesh_group import MeshGroup
from ...engines.models import has_adapters, persistent_buffers
from ...engines.parameter_pieces import Assembly
from ...engines.training.weight_export import checkpoint_names
from ...engines.training_state import TensorSpec
from ...engines.transformers_compat import created_whole, loaded_adapters, names_not_saved
from ...plan.dataflow import Role
from ...runtime.parameters.replica_check import check_replicas
from ...runtime.placement.placement import Placement
from . import VALUE_FOLDER
from .weight_files import WeightFiles
from .write_errors import WriteErrors, need_room


SAVE_BUCKET_BYTES = 64 << 20  # parameters of other ranks that the first rank holds at a time
FOLDERS = {Role.ACTOR: "", Role.CRITIC: VALUE_FOLDER}


def save_models(placement: Placement, folder: Path, save_others: Callable[[Path], None], problems: WriteErrors) -> None:
    """Save policy and critic. Collective over the job; the first rank of each role writes.

    Args:
        save_others: called with the folder on the policy's first rank, to write the other files of the policy's folder.
        problems: collects this rank's errors, because the other ranks wait for it in collectives.

    Raises:
        SaveError: the replicas of a role differ. Raised on every rank.
    """
    for call, engine, _ in _engines(placement):
        if engine is not None:
            with problems.trying(folder):
                check_replicas(engine, placement.group(call), call.partition(".")[0])
    problems.settle("the model")
    for call, engine, subfolder in _engines(placement):
        if engine is None:
            continue
        group = placement.group(call)
        write_model(engine, group, folder / subfolder, problems)
        if group.is_leader and not subfolder:
            with problems.writing(folder):
                save_others(folder)


def write_model(engine: TrainingEngine, group: MeshGroup, folder: Path, problems: WriteErrors, **options: Any) -> None:
    """Save one model. Collective over its mesh, whose first rank writes.

    Args:
        options: `max_shard_size`, by default the value of `save_pretrained`.
    """
    model: PreTrainedModel = _of_all_stages(engine) if group.is_leader else engine.head.model
    names = _adapter_names(engine, group, model) if has_adapters(model) else None
    stream = engine.pieces(SAVE_BUCKET_BYTES, names)
    if not group.is_leader:
        for _ in stream:
            pass
        return
    buffers = {} if names is not None else persistent_buffers(model)
    sizes = [spec.bytes for name, spec in engine.parameter_specs.items() if names is None or name in names]
    needed = sum(sizes) + sum(buffer.nbytes for buffer in buffers.values())
    with problems.writing(folder, needed), _writing_here(model):
        folder.mkdir(parents=True, exist_ok=True)
        need_room(folder, needed)
        if names is not None or loaded_adapters(model):  # adapters loaded by Transformers
            assembly, state = Assembly(engine.parameter_specs), dict[str, Tensor]()
            for piece in itertools.chain.from_iterable(stream):
                if (tensor := assembly.add(piece)) is not None:
                    state[piece.name] = tensor.cpu().clone()
            model.save_pretrained(folder, state_dict=_with_other_names(model, state))
        else:
            model.save_pretrained(folder, state_dict={})  # everything but the weights
            specs = {**engine.parameter_specs, **{n: TensorSpec(tuple(b.shape), b.dtype) for n, b in buffers.items()}}
            for name in names_not_saved(model):
                specs.pop(name, None)
            with contextlib.closing(WeightFiles(folder, specs, partial(checkpoint_names, model), **options)) as files:
                files.write({name: buffer for name, buffer in buffers.items() if name in specs})
                for piece in itertools.chain.from_iterable(stream):
                    if piece.name in specs:
                        files.write_piece(piece)
                files.finish()
    for _ in stream:  # after an error, finish the export, because the other ranks wait for this one
        pass


def _adapter_names(engine: TrainingEngine, group: MeshGroup, model: PreTrainedModel) -> set[str]:
    """The saved parameters of a model with adapters, the same on every rank. Collective over the mesh: the first rank,
    whose `model` has the modules of all stages, asks PEFT."""
    chosen: set[str] = set()
    if group.is_leader:
        from peft import get_peft_model_state_dict

        meta = {name: torch.empty(spec.shape, device="meta") for name, spec in engine.parameter_specs.items()}
        for adapter in model.peft_config:
            tensors = get_peft_model_state_dict(model, _with_other_names(model, meta), adapter)
            saved = {id(tensor) for tensor in tensors.values()}
            chosen |= {name for name, tensor in meta.items() if id(tensor) in saved}
    mask = group.share({"chosen": torch.tensor([name in chosen for name in engine.parameter_specs])}, 0)["chosen"]
    return {name for name, is_chosen in zip(engine.parameter_specs, mask.tolist(), strict=True) if is_chosen}


def _with_other_names(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name, with tied ones under each of their names, as in the model's `state_dict`."""
    first_names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if first in tensors:
            tensors[name] = tensors[first]
    return tensors


def _of_all_stages(engine: TrainingEngine) -> Any:
    """The engine's model. If this rank has one pipeline stage of a model with adapters, a copy of the whole model
    without memory, because PEFT saves the modules that it finds."""
    model: PreTrainedModel = engine.head.model
    if not has_adapters(model) or set(engine.parameter_specs) <= {name for name, _ in model.named_parameters()}:
        return model
    from peft import get_peft_model

    base = model.get_base_model()
    with torch.device("meta"), created_whole():
        copied: Any = type(base)(base.config)
    (first, config), *others = [(name, copy.deepcopy(config)) for name, config in model.peft_config.items()]
    copied = get_peft_model(copied, config, adapter_name=first)
    for name, config in others:
        copied.add_adapter(name, config)
    return copied


@contextlib.contextmanager
def _writing_here(model: PreTrainedModel) -> Iterator[None]:
    """Context in which `save_pretrained` writes on this rank, without a progress bar. Transformers writes only on rank
    0, which may not be the first rank of a role."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.should_save_on_this_rank = lambda is_main_process: is_main_process
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
        del base.should_save_on_this_rank


def _engines(placement: Placement) -> list[tuple[str, TrainingEngine | None, str]]:
    """Per trained role: its training call, its engine on this rank, and its folder within the checkpoint."""
    train_calls = {role: placement.plan.graph.train_call(role) for role in FOLDERS}
    return [(call, placement.trained(role), FOLDERS[role]) for role, call in train_calls.items() if call is not None]
