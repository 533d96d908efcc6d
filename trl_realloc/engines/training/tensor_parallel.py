"""Splits the parameters of a Transformers model over a tensor-parallel group, by the model's own `tp_plan`, and a
mixture's whole experts.

The forwards of split layers are in `split_layers`. The vocabulary stays split up to the loss (`vocab_parallel`), and
adapters are split with the weights that they adapt.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...plan.parameter_spec import MIXTURES
from ..mesh_group import MeshGroup
from ..transformers_compat import tensor_parallel_styles
from .packed_attention import base_of
from .split_layers import leaf_of, split_experts, split_inputs, split_norm, split_outputs, split_vocabulary


if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel


# The style of a parameter that every rank has in full, but whose gradient each rank computes only for its heads.
# Transformers sums the gradient in a hook after every backward, which would add the earlier micro-batches again. The
# engine sums it once, after the last micro-batch.
PARTIAL = "replicated_with_grad_allreduce"
# Styles of mixtures of experts that Transformers' plans lack, or have in another way: they divide each expert's
# channels, and gather what `NORM` normalizes.
EXPERTS, NORM = "whole experts", "norm over the channels of all heads"
_OF_MIXTURES = {
    "*.experts": EXPERTS,
    "*.self_attn.[qkv]_proj": "colwise",
    "*.self_attn.o_proj": "rowwise",
    "*.self_attn.[qk]_norm": PARTIAL,
    "*.shared_expert*.gate_proj": "colwise",
    "*.shared_expert*.up_proj": "colwise",
    "*.shared_expert*.down_proj": "rowwise",
}


def split_tensors(model: PreTrainedModel, group: MeshGroup) -> frozenset[str]:
    """Split the model's parameters over the group, in place. Returns the names of unsplit parameters whose gradient
    each rank computes only in part."""
    styles = {name: (model.get_submodule(name), style) for name, style in _styles(model)}
    assert group.group is not None, "several ranks share the parameters"
    mesh = DeviceMesh.from_group(group.group, group.device.type)
    tied = [places for places in _places(model).values() if len(places) > 1]
    named = dict(model.named_parameters())
    for name, (module, style) in styles.items():
        for leaf, dim in _DIVIDED.get(style, {}).items():
            if f"{name}.{leaf}" in named:  # a tied parameter occurs once
                module._parameters[leaf] = _divided(module._parameters[leaf], mesh, dim)
        if style == "colwise":
            split_outputs(module, group)
        elif style == "rowwise":
            split_inputs(module, group)
        elif style == "embedding_rowwise":
            split_vocabulary(module, group, partial(_first_row, module))
        elif style == EXPERTS:
            split_experts(module, group, partial(_held_experts, module))
        elif style == NORM:
            split_norm(module, group, module.weight.shape[0])
    for (first, leaf), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]
    partly = [name for name, (_, style) in styles.items() if style == PARTIAL]
    return frozenset(f"{name}.{leaf}" for name in partly for leaf, _ in styles[name][0].named_parameters())


# Transformers' tensor-parallel style of a module -> the dimension in which each of its parameters is split
_DIVIDED = {
    "colwise": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "embedding_rowwise": {"weight": 0},
    EXPERTS: {"gate_up_proj": 0, "down_proj": 0},
    NORM: {"weight": 0},
}


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """A parameter of which each rank has an interval of a dimension; the last ranks may have a shorter one or none."""
    part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _first_row(module: nn.Module) -> int:
    return box_of(module.get_parameter("weight"))[0][0]


def _held_experts(experts: nn.Module) -> tuple[int, int]:
    return box_of(experts.get_parameter("down_proj"))[0]


def splits_adapter(config: PeftConfig) -> bool:
    """True if the parameters of an adapter of this PEFT config can be split with the weights that they adapt, as in
    plain LoRA."""
    unsupported = ("use_dora", "trainable_token_indices", "target_parameters")
    is_lora = str(config.peft_type).rpartition(".")[2] == "LORA"
    return is_lora and not any(getattr(config, key, None) for key in unsupported)


# PEFT's kinds of adapters in which layers share trained parameters, or may share them with the language head
_SHARING = ("FROD", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA")


def stages_adapter(config: PeftConfig) -> bool:
    """True if each parameter that an adapter of this PEFT config trains is in only one pipeline stage."""
    kind = str(config.peft_type).rpartition(".")[2]
    return kind not in _SHARING and not getattr(config, "trainable_token_indices", None)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, with its name in each; in the order of `named_parameters`."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, leaf))
    return places


def _styles(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(name, Transformers' tensor-parallel style) of each split module."""
    base = base_of(model)
    prefix, family = f"{base.base_model_prefix}.", base.config.model_type
    tp_plan: Mapping[str, str] = {
        **(_OF_MIXTURES if family in MIXTURES else {}),
        **({"*.self_attn.[qk]_norm": NORM} if family == "olmoe" else {}),
        **_prefixed(base.config.base_model_tp_plan or {}, prefix),
        **tensor_parallel_styles(base),
    }
    # inside the layers of adapters, if there are any
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    embedding, head = (next((_base_name(n)[0] for n, m in model.named_modules() if m is end), None) for end in ends)
    for name, module in model.named_modules():
        plain, adapter = _base_name(name)
        style = next((style for pattern, style in tp_plan.items() if fnmatch.fnmatchcase(plain, pattern)), None)
        if not isinstance(module, nn.Linear | nn.Embedding) and style not in (PARTIAL, EXPERTS, NORM):
            continue
        if plain == head:  # logits are not gathered: the loss is computed on the split vocabulary
            style = "colwise"
        if plain == embedding:
            if isinstance(module, nn.Embedding):
                yield name, "embedding_rowwise"
        elif style in (PARTIAL, EXPERTS, NORM):
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
    """A module's name in the base model; and `lora_A` or `lora_B` for a part of an adapter, else ""."""
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
    """This rank's part of a parameter's gradient, split like the parameter; `None` if there is no gradient."""
    return leaf_of(parameter).grad


def box_of(parameter: Tensor) -> tuple[tuple[int, int], ...]:
    """This rank's part of a parameter, as intervals of indices of the full one. DTensor splits like `torch.chunk`."""
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


def split_dims(parameter: Tensor) -> frozenset[int]:
    """The dimensions in which a parameter is split."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return frozenset(placement.dim % parameter.dim() for placement in placements if isinstance(placement, Shard))


def largest_part(parameter: Tensor) -> int:
    """Elements of the largest part of a parameter on any rank of the tensor-parallel group. The last rank's part may be
    smaller."""
    sizes: list[int] = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for dim in split_dims(parameter):
            sizes[dim] = -(-sizes[dim] // parameter.device_mesh.size())
    return math.prod(sizes)


def is_split(parameter: Tensor) -> bool:
    """True if this rank has only a part of a parameter."""
    return bool(split_dims(parameter))


def vocabulary_start(head: nn.Module) -> int | None:
    """The first token id of this rank's part of the language head; `None` if the head is not split."""
    return _first_row(head) if is_split(head.get_parameter("weight")) else None
