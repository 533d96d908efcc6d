"""`AnalyticRates`: unit costs computed from a device's specification. The specifications are in `hardware`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...plan.model_spec import ModelSpec
from .activation_memory import in_slices, layer_activations
from .hardware import Device, Link, Sharing


BACKWARD_LOGITS = 1.35  # bytes that a logit's backward moves, relative to its forward


@dataclass(frozen=True)
class AnalyticRates:
    """`Rates` computed from a device's specification.

    A layer's matrix products take the longer of arithmetic and of reading its weights (a roofline), and at least the
    time that the host needs to launch the kernels. Norms, rotations, activations and the loss, kernels of their own in
    Transformers' models, take the time in which their tensors are moved (`Device.passes`, `Device.logit_bytes`).
    """

    device: Device
    sharing: Sharing | None = None
    error: float = 0.02

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def inside(self) -> Link:
        return self.device.inside

    @property
    def between(self) -> Link:
        return self.device.between

    def across(self, members: int) -> Link:
        """The link of a collective over nodes with `members` devices in each.

        A ring all-reduce, all-gather or reduce-scatter over n devices moves as many bytes from each node to the next as
        from each device to the next: 2 (n - 1) / n or (n - 1) / n of them. NCCL divides the bytes among rings that
        leave a node by different adapters, so that each adapter of the members carries its share of them. (Of 400 Gb/s
        adapters NCCL's maintainers expect 46 to 48 GB/s each, https://github.com/NVIDIA/nccl-tests/issues/290.) The
        links inside a node carry the bytes of all rings, so the bandwidth does not exceed theirs. A node with fewer
        members limits all rings. Other groups of the same nodes use the adapters of their own members.
        """
        inside, between = self.device.inside, self.device.between
        if members == 1 or not self.device.own_adapters:
            return between
        most = max(between.bandwidth, inside.bandwidth * inside.efficiency / between.efficiency)
        return replace(between, bandwidth=min(members * between.bandwidth, most))

    @property
    def host_bandwidth(self) -> float:
        return self.device.host_bandwidth

    @property
    def step(self) -> float:
        return self.device.step

    @property
    def sample(self) -> float:
        return self.device.sample

    @property
    def call(self) -> float:
        return self.device.call

    @property
    def overlap(self) -> float:
        return self.device.overlap

    @property
    def layout_error(self) -> float:
        return 0.0

    @property
    def hop(self) -> float:
        return 0.0

    def reallocation(self, size: float) -> float:
        return 0.0

    def measured(self, spec: ModelSpec, tp: int, pp: int, generates: bool) -> bool:
        return True

    def layer(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        # causal attention computes half of the pairs
        compute = self._compute(spec, tokens, 4 * spec.heads * spec.head_dim * squared / 2, spec.unevenness(tp))
        read = _read_bytes(spec, spec.bytes_per_element, tokens) / self._read
        moved = self.device.passes * layer_activations(spec).of(tp) * tokens / self._read
        return max(max(compute, read) / tp + moved, self.device.launch)

    def layer_backward(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        # the gradients of the inputs, and those of the trained parameters
        return (1 + spec.trained_share) * self.layer(spec, tokens, squared, tp)

    def head(self, spec: ModelSpec, tokens: float, tp: int, *, backward: bool = False) -> float:
        products = self._head(spec, tokens, tp, spec.bytes_per_element)
        logits = tokens * spec.outputs / tp
        forward = products + self.device.logit_bytes * logits / self._read
        if not backward:
            return forward
        again = forward if in_slices(spec, logits) else 0.0  # each slice is computed a second time
        moved = BACKWARD_LOGITS * self.device.logit_bytes * logits / self._read
        return again + (1 + spec.trained_share) * products + moved

    def _head(self, spec: ModelSpec, tokens: float, tp: int, element_bytes: int) -> float:
        compute = 2 * tokens * spec.head_elements / self._flops(spec.activation_bytes)
        return max(compute, spec.head_elements * element_bytes / self._read) / tp

    @property
    def decodes_whole(self) -> bool:
        return False

    def decode(self, spec: ModelSpec, samples: float, cached: float, tp: int) -> tuple[float, float]:
        pairs = 4 * spec.heads * spec.head_dim * samples * cached
        compute = max(self._compute(spec, samples, pairs) / tp, self.device.decode_launch)
        cache = samples * cached * spec.kv_bytes_per_token / max(spec.layers, 1) / min(tp, max(spec.kv_heads, 1))
        return compute, (_read_bytes(spec, _decoded_bytes(spec), samples) / tp + cache) / self._read

    def decode_head(self, spec: ModelSpec, samples: float, tp: int) -> float:
        # each device of a tensor-parallel group samples from all logits
        sampling = self.device.sampled_bytes * samples * spec.outputs / self._read
        return self._head(spec, samples, tp, _decoded_bytes(spec)) + sampling

    def optimizer(self, elements: float, element_bytes: int) -> float:
        # Reads the gradient, reads and writes the float32 weight and two moments, and writes the weight once more.
        return elements * (2 * element_bytes + 24) / self._read

    def _compute(self, spec: ModelSpec, tokens: float, of_pairs: float, unevenness: float = 1.0) -> float:
        """Seconds of a layer's arithmetic on one device.

        Args:
            of_pairs: FLOPs of the attention between positions.
            unevenness: factor of the experts' arithmetic.
        """
        others = 2 * tokens * (spec.layer_elements - spec.expert_elements) + of_pairs
        experts = 2 * tokens * spec.active_expert_elements * unevenness
        return others / self._flops(spec.activation_bytes) + experts / self._flops(spec.expert_bytes)

    def _flops(self, element_bytes: int) -> float:
        peak = self.device.single_flops if element_bytes > 2 else 0.0
        return (peak or self.device.flops) * self.device.efficiency

    @property
    def _read(self) -> float:
        return self.device.memory_bandwidth * self.device.memory_efficiency

    def zero(self, stage: int, *, trains: bool) -> float:
        return 1.0

    def kept(self, spec: ModelSpec, tokens: float, squared: float) -> float | None:
        return None

    def changed(self, **values: float) -> AnalyticRates:
        """A copy with other values of the fields of `device`."""
        return replace(self, device=replace(self.device, **values))  # type: ignore[arg-type]


def _decoded_bytes(spec: ModelSpec) -> int:
    """Bytes of a weight in a decode step: generation under autocast keeps the weights cast."""
    return min(spec.bytes_per_element, spec.activation_bytes)


def _read_bytes(spec: ModelSpec, element_bytes: int, tokens: float) -> float:
    """Bytes of a layer's weights that a forward reads, and of those that it dequantizes, writes and reads again.

    Args:
        element_bytes: bytes of an element that is neither quantized nor an expert's.
        tokens: number of tokens of the forward.
    """
    if spec.quantization is None:
        of_experts = spec.read_layer_elements(tokens) + spec.expert_elements - spec.layer_elements
        return (spec.layer_elements - spec.expert_elements) * element_bytes + of_experts * spec.expert_bytes
    quantized = spec.quantized_elements / max(spec.layers, 1)
    again = 2 * spec.activation_bytes * quantized + spec.quantized_bytes / max(spec.layers, 1)
    return (spec.layer_elements - quantized) * element_bytes + again
