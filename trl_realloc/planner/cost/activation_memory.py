"""Bytes of a forward and backward beyond the model's state: activations, logits, and weights cast to 16 bits.

Parameters, gradients and optimizer states are in `pricing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...plan.assignment import LOGITS_SLICE, MAX_LOGITS, ParallelStrategy
from ...plan.model_spec import ModelSpec
from .hardware import Rates
from .workload import Workload


@dataclass(frozen=True)
class LayerActivations:
    """Tensors that the forward of one layer keeps for its backward, in bytes per token.

    Args:
        whole: bytes that every device of a tensor-parallel group holds.
        split: bytes that are divided among the devices of the group.
    """

    whole: float
    split: float

    def of(self, tp: int) -> float:
        """Bytes per token on each device of a tensor-parallel group."""
        return self.whole + self.split / tp


def layer_activations(spec: ModelSpec) -> LayerActivations:
    """The tensors that PyTorch saves in a Llama layer of Transformers with an attention kernel that keeps no attention
    matrix. `tests/planner/test_activation_memory.py` compares them with PyTorch's saved tensors.

    | tensors | bytes per token |
    | --- | --- |
    | the float32 input of each of two norms, and its normalized form | 2 (4 + max(p, a)) hidden; 2 x 8 in float32 |
    | inputs of the projections | 2 a hidden; under autocast 5 a hidden, because each projection casts its own |
    | queries, keys, values and the attention's output | a (2 q + 2 kv) |
    | where they have norms, the float32 queries and keys, and their normalized form | (4 + a) (q + kv) |
    | of the MLP: gate, its activation, up, their product | 4 a intermediate |
    | of each of a token's experts: its input and output, and the same of its MLP | m (2 hidden + 4 intermediate) |
    | of the router: scores, as they are chosen and as they weigh | (a + 8) experts |

    m is `ModelSpec.expert_bytes`. p and a are the bytes of an element of the parameters and of the activations; q and
    kv the channels of all heads. A model whose MLP has no gate keeps less than this estimate. 0 for a model of which
    only the parameter shapes are known.
    """
    if not spec.layers:
        return LayerActivations(0.0, 0.0)
    a, p, hidden = spec.activation_bytes, spec.bytes_per_element, spec.hidden
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    routing = spec.experts * hidden  # elements of the router
    outside = spec.layer_elements - spec.expert_elements - routing
    mlp = max(0.0, outside - 2 * hidden * (queries + keys)) / hidden  # 3 intermediate sizes
    norms = 2 * (4 + max(p, a)) * hidden
    inputs = (5 if a < p else 2) * a * hidden
    of_experts = 2 * spec.mean_experts_per_token * hidden + 4 / 3 * spec.active_expert_elements / hidden
    normalized = (4 + a) * (queries + keys) * spec.norms_heads
    split = a * (2 * queries + 2 * keys + 4 / 3 * mlp) + 4 * spec.heads + normalized + spec.expert_bytes * of_experts
    return LayerActivations(norms + inputs + 8 + (a + 8) * spec.experts, split)


def kept_casts(spec: ModelSpec) -> float:
    """Bytes of the cast weights that a Transformers generation under autocast keeps until it ends."""
    elements = spec.elements - max(1, spec.layers) * (spec.layer_elements - spec.cast_layer_elements)
    return elements * spec.activation_bytes if spec.activation_bytes < spec.bytes_per_element else 0.0


def dequantized_weight(spec: ModelSpec) -> float:
    """Bytes of the largest quantized weight in the dtype of its product. bitsandbytes keeps one at a time: it
    dequantizes each again in the backward."""
    return max((parameter.elements for parameter in spec.quantized), default=0) * spec.activation_bytes


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
    """Bytes of the activations, logits and cast weights of a forward of `tokens` tokens, or with `backward` of a
    training step.

    The bytes of a layer are measured, or else from `layer_activations`. Tensor parallelism splits the same share in
    both cases. If activations are recomputed, only the input of a layer is kept, in the parameters' dtype if
    that is wider. Under autocast each layer's weights are cast to 16 bits, and without recomputation kept for the
    backward. A quantized weight is dequantized while it computes. Logits take two float32 copies; many are computed in
    slices if the model supports it (`ModelSpec.whole_logits`).

    Args:
        held: number of micro-batches whose activations a stage holds at the same time.
    """
    of_token = layer_activations(spec)
    layers = math.ceil((spec.layers or 1) / strategy.pp)
    measured = rates.kept(spec, tokens, tokens * workload.mean_square / workload.mean_length)
    one_layer = of_token.of(strategy.tp) * tokens
    if measured is not None:
        one_layer = measured * (of_token.of(strategy.tp) / of_token.of(1) if spec.layers else 1.0)
    cast = 0.0
    if spec.activation_bytes < spec.bytes_per_element:
        cast = spec.activation_bytes * spec.cast_layer_elements / strategy.tp
    # the residual stream has the parameters' dtype if it is wider: autocast does not change it
    layer_input = tokens * spec.hidden * max(spec.activation_bytes, spec.bytes_per_element)
    saved = layer_input * layers if workload.recompute else (one_layer + cast) * (layers - 1)
    answered = tokens * workload.mean_response / workload.mean_length
    elements = answered * spec.outputs / strategy.tp
    logits = 8 * elements
    if in_slices(spec, elements):
        # with the sum of the gradients of the head's weights
        of_slice = slice_bytes(spec.activation_bytes, backward=backward) * LOGITS_SLICE
        logits = of_slice + 6 * spec.head_elements / strategy.tp if backward else 2 * of_slice
    weight = dequantized_weight(spec)
    if not backward:
        return one_layer / 2 + cast + weight + logits / 2
    return held * saved + one_layer + cast + weight + logits


def in_slices(spec: ModelSpec, logits: float) -> bool:
    """True if a forward with `logits` logits on a device computes them in slices."""
    return logits > MAX_LOGITS and not spec.whole_logits


def slice_bytes(activation_bytes: float, *, backward: bool) -> int:
    """Peak bytes per logit of a slice, where logits are computed in slices. The forward has four float32 tensors at a
    time. The backward has three, and one in 16 bits if the products are in 16 bits; in float32 it has four if the loss
    depends on the entropies.

    Args:
        activation_bytes: bytes per element of the dtype of the products.
    """
    return 14 if backward and activation_bytes <= 2 else 16
