"""Bytes of a forward and backward beyond the model's state: activations, logits, and weights cast to 16 bits.

Parameters, gradients and optimizer states are in `cost`.
"""

from __future__ import annotations

import math

from ..plan.assignment import LOGITS_SLICE, MOST_LOGITS, ParallelStrategy
from ..plan.model_spec import ModelSpec
from .hardware import Rates
from .workload import Workload


OF_LAYER = 34  # bytes per token and channel of a layer at 16 bits, of which tensor parallelism splits the second number
SPLIT = 24


def kept_casts(spec: ModelSpec) -> float:
    """Bytes of the weights that generation by Transformers under autocast keeps cast until it ends."""
    return spec.elements * spec.activation_bytes if spec.activation_bytes < spec.bytes_per_element else 0.0


def working_bytes(
    spec: ModelSpec,
    tokens: float,
    strategy: ParallelStrategy,
    rates: Rates,
    workload: Workload,
    *,
    backward: bool,
    held: int = 1,
) -> float:
    """Bytes of the activations, logits and cast weights of a forward of so many tokens, with `backward` of a training
    step.

    The bytes of a layer are as measured. If they were not measured, they are 34 bytes per token and channel at 16 bits
    without the attention matrix. Of these tensor parallelism splits 24 (Korthikanti et al. 2022, equations 1 and 2). If
    activations are recomputed, only the input of a layer is kept, in the parameters' dtype if that is wider.
    Under autocast each layer's weights are cast to 16 bits, and without recomputation kept for the backward.
    Logits take two float32 copies; many are computed in slices where the model can (`ModelSpec.whole_logits`).

    Args:
        held: number of micro-batches whose activations a stage holds at the same time.
    """
    width = spec.hidden * spec.activation_bytes / 2
    layers = math.ceil((spec.layers or 1) / strategy.pp)
    measured = rates.kept(spec, tokens, tokens * workload.mean_square / workload.mean_length)
    one_layer = OF_LAYER * tokens * width if measured is None else measured
    one_layer *= (OF_LAYER - SPLIT + SPLIT / strategy.tp) / OF_LAYER
    cast = 0.0
    if spec.activation_bytes < spec.bytes_per_element:
        cast = spec.activation_bytes * spec.layer_elements / strategy.tp
    # layers hand on the parameters' dtype where it is wider: autocast leaves the residual stream as it is
    layer_input = tokens * spec.hidden * max(spec.activation_bytes, spec.bytes_per_element)
    kept = layer_input * layers if workload.recompute else (one_layer + cast) * (layers - 1)
    answered = tokens * workload.mean_response / workload.mean_length
    elements = answered * spec.outputs / strategy.tp
    logits = 8 * elements
    if elements > MOST_LOGITS and not spec.whole_logits:
        # with the sum of the head's gradients
        of_slice = slice_bytes(spec.activation_bytes, backward=backward) * LOGITS_SLICE
        logits = of_slice + 6 * spec.head_elements / strategy.tp if backward else 2 * of_slice
    if not backward:
        return one_layer / 2 + cast + logits / 2
    return held * kept + one_layer + cast + logits


def slice_bytes(activation_bytes: float, *, backward: bool) -> int:
    """The most bytes of memory for each logit of a slice, where logits are computed in slices. The forward has four
    float32 tensors at a time. The backward has three, with one in 16 bits if the products are in 16 bits; in float32 it
    has four if the loss depends on the entropies.

    Args:
        activation_bytes: of the dtype that the products are computed in.
    """
    return 14 if backward and activation_bytes <= 2 else 16
