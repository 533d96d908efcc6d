"""A copy of a model's structure that can compute without the model's weights (`probe_model`), and the check by it
whether a model computes the samples of a packed row apart (`packs`). `packed_attention` separates them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.notices import notice
from ...plan.model_spec import FAMILIES
from ..model_changes import described, forward_changes
from ..transformers_compat import draw_again, keep_values
from .packed_attention import (
    PACKED,
    LocalAttention,
    attention_of,
    backbone_of,
    base_of,
    is_flash,
    may_pack,
    packed_rows,
    probed,
)
from .packed_row import PackedRow, Segment


if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NOISE = 0.3  # standard deviation of the noise on vectors, whose initial values are mostly 0 or 1
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# errors of a model that is run in an unusual way
CANNOT_RUN = (TypeError, ValueError, KeyError, RuntimeError, AttributeError)


def packs(model: PreTrainedModel) -> bool:
    """True if the model computes each sample of a packed row as if it were alone. If so, sets its attention to
    `PACKED`, which is plain sdpa for every other caller.

    Transformers has no flag for this. A recurrent layer, a custom attention or learned absolute positions would mix or
    misplace samples, so a `probe_model` of the model is run on five tokens. Windows and chunks that its attention
    layers do not pass would be lost, so the requested masks are compared with the layers' windows. A model with a
    user's changes (`model_changes`), which may do anything with a row, gets padded samples.

    The answer is stored in `model.packs_rows`. A model whose weights are filled later copies it from the model that it
    gets the weights of. A model with flash attention keeps that attention, and gets the bounds of the samples.
    """
    answer: bool | None = getattr(model, "packs_rows", None)
    if answer is None:
        changes = forward_changes(model)
        answer, model.shares_rows = (False, False) if changes else _packs(model)
        model.packs_rows = answer
        base, attention = type(base_of(model)).__name__, getattr(model.config, "_attn_implementation", None)
        if not answer:
            reason = f"it has {described(changes)}" if changes else "the model mixes samples that share a row"
            notice(f"{base} (attention {attention}): samples are padded, because {reason}.")
        elif not model.shares_rows:
            notice(
                f"{base} (attention {attention}): a prompt is computed once for each of its samples; with attention "
                f"sdpa, once for all."
            )
    elif answer and not is_flash(attention_of(model)):
        backbone_of(model).set_attn_implementation(PACKED)
    return answer


def _packs(model: PreTrainedModel) -> tuple[bool, bool]:
    """The results of `packs` and `shares_rows`."""
    backbone = backbone_of(model)
    implementation = getattr(backbone.config, "_attn_implementation", None)
    # flash attention runs only on a GPU; another attention also shows whether the model mixes samples
    if not may_pack(implementation) or getattr(backbone.config, "is_encoder_decoder", False):
        return False, False
    answers = map(_keeps_apart, _models_to_run(backbone))
    kept_apart, shares = next((answer for answer in answers if answer is not None), (False, False))
    final = PACKED if kept_apart and not is_flash(implementation) else implementation
    if backbone.config._attn_implementation != final:
        backbone.set_attn_implementation(final)
    return kept_apart, shares and not is_flash(implementation)


def _models_to_run(backbone: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Candidates to run; the first that can be run decides for the backbone.

    A `probe_model` shows what a new model hides, whose parameters may begin at zero. Also, GPU kernels depend on the
    number of tokens, and in 16 bits their results differ by more than a weak mixing of samples. A quantized model has
    layers that cannot compute with other weights. A model whose weights are not read yet cannot be run itself.
    """
    if any(p.is_meta for p in backbone.parameters()):
        yield probe_model(backbone)
        return
    if all(p.dtype in FLOATS for p in backbone.parameters()):
        with contextlib.suppress(*CANNOT_RUN):
            yield probe_model(backbone)
    yield backbone


# the samples 1 2 3, 1 2, and 1 2 3 4 5; the last one begins with the first
PROBED = PackedRow((3, 2, 5), (0, 1, 2), (Segment(0, 3), Segment(3, 5), Segment(5, 7, ((0, 3),))))


def _keeps_apart(backbone: PreTrainedModel) -> tuple[bool, bool] | None:
    """True if a backbone computes the same for two samples in a row as for each alone, and then whether this also holds
    for a third sample that shares the first one's tokens; `None` if it cannot run. Sets its attention to `PACKED`."""
    device = next(backbone.parameters()).device
    whole = torch.tensor([[1, 2, 3, 4, 5]], device=device) % backbone.config.get_text_config().vocab_size
    was_training = backbone.training
    backbone.eval()
    local_attention = LocalAttention()
    token = probed.set(local_attention)
    try:
        backbone.set_attn_implementation(PACKED)
        with torch.no_grad():
            separate = [backbone(input_ids=whole[:, :length]).last_hidden_state[0] for length in PROBED.lengths]
            with packed_rows():
                packed = backbone(
                    input_ids=torch.cat([whole[:, :3], whole[:, :2], whole[:, 3:]], 1),
                    position_ids=PROBED.positions.to(device)[None],
                    attention_mask=torch.ones(1, PROBED.tokens, dtype=torch.long, device=device),
                    packed_row=PROBED,
                    use_cache=False,
                ).last_hidden_state[0]
        parts = packed[PROBED.columns.to(device)].split(PROBED.lengths)
        same = [
            torch.allclose(expected.float(), part.float(), rtol=1e-2, atol=1e-3)
            for expected, part in zip(separate, parts, strict=True)
        ]
        packs = all(same[:2]) and local_attention.is_known_to_layers
        return packs, packs and same[2]
    except CANNOT_RUN:
        return None
    finally:
        probed.reset(token)
        backbone.train(was_training)


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
