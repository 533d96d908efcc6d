"""A copy of a model's structure that can compute without the model's weights, to test how the model computes. Used by
`packed_attention`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...plan.model_spec import FAMILIES
from ..transformers_compat import draw_again, keep_values


if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NOISE = 0.3  # standard deviation of the noise on vectors, whose initial values are mostly 0 or 1


class PassThrough(nn.Module):
    """Replaces a module of a model; returns its first argument."""

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden


def probe_model(backbone: PreTrainedModel) -> PreTrainedModel:
    """A copy of a backbone in float32 on the CPU, with other weights. All are random, because a parameter that begins
    at zero may switch a part of the model off. Each row of a matrix is another range of the same random vector, so a
    matrix takes the memory of a row and a column. Layers that differ only by their number are reduced to one. If the
    model cannot compute with such matrices, they are stored whole.

    Args:
        backbone: model on any device, the meta device included. Its parameters are not read.
    """
    probe = _with_numbers(backbone, shares_memory=True)
    try:
        with torch.no_grad():
            probe(input_ids=torch.zeros((1, 2), dtype=torch.long))
    except (RuntimeError, ValueError):
        probe = _with_numbers(backbone, shares_memory=False)
    return probe


def _with_numbers(backbone: PreTrainedModel, *, shares_memory: bool) -> PreTrainedModel:
    probe = _without_parameters(backbone).eval()
    probe.set_attn_implementation("sdpa")  # flash attention runs only on a GPU, and the caller sets another one
    layers = getattr(probe, "layers", None)
    if probe.config.model_type in FAMILIES and isinstance(layers, nn.ModuleList):
        kinds: set[str] = set()
        for index, layer in enumerate(layers):
            kind = _kind(layer)
            if kind in kinds:
                layers[index] = PassThrough()
            kinds.add(kind)
    draws = torch.Generator().manual_seed(0)
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in probe.modules():
        draw_again(module)
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[leaf] = replacements.setdefault(parameter, _drawn(parameter, draws, shares_memory))
    with torch.random.fork_rng(devices=[]):
        probe.initialize_weights()  # initializes vectors, such as the weights of norms
    _draw_vectors(probe, draws)
    if any(parameter.dim() == 3 for parameter in replacements) and hasattr(probe, "set_experts_implementation"):
        probe.set_experts_implementation("eager")  # one expert after the other; other ways need whole matrices
    return probe.float()


def _draw_vectors(probe: nn.Module, draws: torch.Generator) -> None:
    """Add random numbers to vectors among the parameters, and to persistent buffers."""
    vectors = [parameter for parameter in probe.parameters() if parameter.dim() < 2]
    saved = probe.state_dict(keep_vars=True)
    for tensor in [*vectors, *(buffer for name, buffer in probe.named_buffers() if name in saved)]:
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.data = tensor + _NOISE * torch.randn(tensor.shape, generator=draws)


def _without_parameters(backbone: PreTrainedModel) -> PreTrainedModel:
    """A copy whose parameters are on the meta device, and whose buffers are on the CPU."""
    unread = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in backbone.parameters()
    }
    copied = copy.deepcopy(backbone, dict[int, Any](unread))
    for module in copied.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[leaf] = buffer.cpu()
    return copied


def _drawn(parameter: Tensor, draws: torch.Generator, shares_memory: bool) -> nn.Parameter:
    """A random parameter with the shape of one on the meta device; uninitialized if it is a vector."""
    if parameter.dim() < 2:
        return nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
    numbers = torch.randn(sum(parameter.shape), generator=draws) * parameter.shape[-1] ** -0.5
    matrix = numbers.as_strided(parameter.shape, [1] * parameter.dim())
    result = nn.Parameter(matrix if shares_memory else matrix.contiguous(), requires_grad=False)
    keep_values(result)
    return result


def _kind(layer: nn.Module) -> str:
    """The classes and settings of a layer's modules, without the layer's number."""
    return repr(
        [
            (
                type(module).__name__,
                sorted(
                    (name, value)
                    for name, value in vars(module).items()
                    if isinstance(value, (bool, int, float, str)) and name not in ("layer_idx", "layer_number")
                ),
            )
            for module in layer.modules()
        ]
    )


__all__ = ["PassThrough", "probe_model"]
