"""Tensor parallelism of a Transformers model, by the plan that the model itself brings.

Which layers are cut, and how, is the family's `tp_plan`; what a cut layer does is Transformers' and DTensor's. Ours is
the vocabulary, which stays cut through the loss, and adapters, which are cut with the weights that they adapt.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..mesh_group import MeshGroup
from .packed_attention import base_of


# A gradient that each rank has a part of, for its own heads. Transformers' style of that name sums it in a hook after
# every backward, which counts the earlier micro-batches of an accumulation again; the engine sums it once, in the end.
PARTIAL = "replicated_with_grad_allreduce"


def split_tensors(model: Any, group: MeshGroup) -> frozenset[str]:
    """Cut the model's parameters over the group, in place. Returns the names of parameters that every rank has whole
    but of whose gradient each has only a part."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    styles = dict(_styles(model))
    partial = {name for name, style in styles.items() if style == PARTIAL}
    applied = {name: style for name, style in styles.items() if style != PARTIAL}
    plan: dict[str, str] = {}
    named = dict(model.named_parameters())
    for name, style in applied.items():
        module = model.get_submodule(name)
        plan |= {f"{name}.{own}": style for own in module._parameters if f"{name}.{own}" in named}  # a tied one once
        plan[name] = style
    mesh = DeviceMesh.from_group(group.group, group.device.type)
    tied = [places for places in _places(model).values() if len(places) > 1]
    apply_tensor_parallelism(model, mesh, plan)
    for (first, leaf), *others in tied:  # named_parameters and so the plan have the first of them
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]
    return frozenset(f"{name}.{own}" for name in partial for own, _ in model.get_submodule(name).named_parameters())


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every module that has a parameter, and the name that it has there; in the order of `named_parameters`."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, leaf))
    return places


def _styles(model: Any) -> Iterator[tuple[str, str]]:
    """Each cut module's name and Transformers' word for its cut."""
    base = base_of(model)
    prefix = f"{base.base_model_prefix}."
    own: Mapping[str, str] = {**_prefixed(base.config.base_model_tp_plan or {}, prefix), **(base._tp_plan or {})}
    ends = (base.get_input_embeddings(), base.get_output_embeddings())  # adapters' wrapping included
    embedding, head = (next((_plain(n)[0] for n, m in model.named_modules() if m is end), None) for end in ends)
    for name, module in model.named_modules():
        plain, adapter = _plain(name)
        style = next((style for pattern, style in own.items() if fnmatch.fnmatchcase(plain, pattern)), None)
        if not isinstance(module, nn.Linear | nn.Embedding) and style != PARTIAL:
            continue
        if plain == head:  # not gathered: the loss is computed on the split vocabulary
            style = "colwise"
        if plain == embedding:
            if isinstance(module, nn.Embedding):
                yield name, "embedding_rowwise"
        elif style == PARTIAL:
            yield name, style
        elif style in ("colwise", "rowwise") and (not adapter or (adapter == "lora_B") == (style == "colwise")):
            yield name, style  # W + BA: of a weight cut by rows B is cut, of one cut by columns A


def _prefixed(plan: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {pattern if pattern.startswith(prefix) else prefix + pattern: style for pattern, style in plan.items()}


def _plain(name: str) -> tuple[str, str]:
    """(a module's name without its adapters' wrapping, `lora_A` or `lora_B` for a part of an adapter)."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")
    plain = re.sub(r"\.modules_to_save\.[^.]+", "", plain)  # a copy that is trained in the place of the original
    for adapter in ("lora_A", "lora_B"):
        before, found, _ = plain.partition(f".{adapter}.")
        if found:
            return before, adapter
    return plain, ""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of a gradient, cut as its parameter is."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local(gradient)


def box_of(parameter: Tensor) -> tuple[tuple[int, int], ...]:
    """Which part of the whole parameter this rank has: DTensor cuts as `torch.chunk` does."""
    whole = tuple((0, size) for size in parameter.shape)
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    for placement in parameter.placements:
        if isinstance(placement, Shard):
            dim, size = placement.dim % len(whole), parameter.shape[placement.dim]
            each = -(-size // mesh.size())
            first = min(each * mesh.get_local_rank(), size)
            whole = (*whole[:dim], (first, min(first + each, size)), *whole[dim + 1 :])
    return whole


def is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


def vocabulary_start(head: nn.Module) -> int | None:
    """The first token id of this rank's stretch of the language head; `None` where this rank has all of it."""
    weight = head.get_parameter("weight")
    return box_of(weight)[0][0] if is_cut(weight) else None
