"""Splits the parameters of a Transformers model over a tensor-parallel group, by the model's own `tp_plan`.

How a split layer computes is in Transformers and DTensor. Added here: the vocabulary stays split up to the loss
(`vocab_parallel`), and adapters are split with the weights that they adapt. Pipeline stages are in `pipeline`.
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
from ..transformers_compat import split_modules, tensor_parallel_styles
from .packed_attention import base_of


# The style of a parameter that every rank has in full, and of whose gradient each rank has the part of its heads.
# Transformers sums the gradient in a hook after every backward, which would add the earlier micro-batches again. The
# engine sums it once, after the last micro-batch.
PARTIAL = "replicated_with_grad_allreduce"


def split_tensors(model: Any, group: MeshGroup) -> frozenset[str]:
    """Split the model's parameters over the group, in place. Returns the names of the parameters that are not split,
    but of whose gradient each rank computes only a part."""
    styles = dict(_styles(model))
    partial = {name for name, style in styles.items() if style == PARTIAL}
    applied = {name: style for name, style in styles.items() if style != PARTIAL}
    plan: dict[str, str] = {}
    named = dict(model.named_parameters())
    for name, style in applied.items():
        module = model.get_submodule(name)
        # a tied parameter is in `named` once
        plan |= {f"{name}.{leaf}": style for leaf in module._parameters if f"{name}.{leaf}" in named}
        plan[name] = style
    mesh = DeviceMesh.from_group(group.group, group.device.type)
    tied = [places for places in _places(model).values() if len(places) > 1]
    split_modules(model, mesh, plan)
    for (first, leaf), *others in tied:  # `named_parameters`, and so the plan, has the first module's name only
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]
    return frozenset(f"{name}.{leaf}" for name in partial for leaf, _ in model.get_submodule(name).named_parameters())


def splits_adapter(config: Any) -> bool:
    """Whether the parameters of an adapter can be split with the weights that they adapt, as those of plain LoRA can.

    Args:
        config: PEFT config of the adapter.
    """
    unsupported = ("use_dora", "trainable_token_indices", "target_parameters")
    is_lora = str(config.peft_type).rpartition(".")[2] == "LORA"
    return is_lora and not any(getattr(config, key, None) for key in unsupported)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """For each parameter the modules that have it, with its name in each; in the order of `named_parameters`."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, leaf))
    return places


def _styles(model: Any) -> Iterator[tuple[str, str]]:
    """The name of each split module, with Transformers' name of how it is split."""
    base = base_of(model)
    prefix = f"{base.base_model_prefix}."
    tp_plan: Mapping[str, str] = {
        **_prefixed(base.config.base_model_tp_plan or {}, prefix),
        **tensor_parallel_styles(base),
    }
    # inside the layers of adapters, if there are any
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    embedding, head = (next((_base_name(n)[0] for n, m in model.named_modules() if m is end), None) for end in ends)
    for name, module in model.named_modules():
        plain, adapter = _base_name(name)
        style = next((style for pattern, style in tp_plan.items() if fnmatch.fnmatchcase(plain, pattern)), None)
        if not isinstance(module, nn.Linear | nn.Embedding) and style != PARTIAL:
            continue
        if plain == head:  # logits are not gathered: the loss is computed on the split vocabulary
            style = "colwise"
        if plain == embedding:
            if isinstance(module, nn.Embedding):
                yield name, "embedding_rowwise"
        elif style == PARTIAL:
            yield name, style
        elif style in ("colwise", "rowwise") and (not adapter or (adapter == "lora_B") == (style == "colwise")):
            yield name, style  # W + BA: B is split if W is split by rows, A if W is split by columns


def _prefixed(plan: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {pattern if pattern.startswith(prefix) else prefix + pattern: style for pattern, style in plan.items()}


def base_name(name: str) -> str:
    """The name in the base model of a module or parameter of a model with adapters."""
    plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")
    return re.sub(r"\.modules_to_save\.[^.]+", "", plain)  # a trained copy of the module


def _base_name(name: str) -> tuple[str, str]:
    """A module's name in the base model; and `lora_A` or `lora_B` if the module is part of an adapter, else ""."""
    plain = base_name(name)
    for adapter in ("lora_A", "lora_B"):
        before, separator, _ = plain.partition(f".{adapter}.")
        if separator:
            return before, adapter
    return plain, ""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of a parameter's gradient, split as the parameter is; `None` if there is no gradient."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local(gradient)


def box_of(parameter: Tensor) -> tuple[tuple[int, int], ...]:
    """This rank's part of a parameter, as intervals of indices of the full one. DTensor splits as `torch.chunk`
    does."""
    box = tuple((0, size) for size in parameter.shape)
    if not isinstance(parameter, DTensor):
        return box
    mesh = parameter.device_mesh
    for placement in parameter.placements:
        if isinstance(placement, Shard):
            dim, size = placement.dim % len(box), parameter.shape[placement.dim]
            length = -(-size // mesh.size())
            first = min(length * mesh.get_local_rank(), size)
            box = (*box[:dim], (first, min(first + length, size)), *box[dim + 1 :])
    return box


def is_split(parameter: Tensor) -> bool:
    """Whether this rank has only a part of a parameter."""
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


def vocabulary_start(head: nn.Module) -> int | None:
    """The first token id of this rank's part of the language head; `None` if the head is not split."""
    weight = head.get_parameter("weight")
    return box_of(weight)[0][0] if is_split(weight) else None
