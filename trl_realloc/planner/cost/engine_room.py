"""A vLLM engine on its devices: the memory that it reserves and needs (`EngineRoom`), and the loading of weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...plan.assignment import MAX_SLOTS, Assignment, ParallelStrategy
from ...plan.model_spec import ModelSpec


# tokens of vLLM's largest forward (`max_num_batched_tokens`) on GPUs of 70 GiB or more; 8,192 on others
BATCHED = 16_384
# Bytes per token and channel, at 16 bits, of a forward of vLLM without a backward: the part that tensor parallelism
# splits, and the part that it does not split. Assumed, not measured here.
OF_FORWARD_SPLIT, OF_FORWARD_WHOLE = 14, 6
# Bytes of captured CUDA graphs, which are outside vLLM's cache too. Assumed; vLLM logs its estimate.
CUDA_GRAPH_BYTES = 6e8
# Bytes/s of weights on their way to a vLLM engine on GPUs. An engine on one GPU opens the sender's memory: two copies
# on the device, each read and written, at 70 % of an A100's 2.0e12 (by data sheet, not measured). For several GPUs they
# are copied to pinned host memory, from where each worker copies its part: 55e9 in pieces of 268 MB, 34e9 in pieces of
# 1 MB (an H200, docs/hardware.md). The workers' pages are not pinned, so their copies may be slower.
ON_DEVICE, TO_HOST, FROM_HOST = 3.5e11, 5.5e10, 3.4e10


@dataclass(frozen=True)
class EngineRoom:
    """Memory that a vLLM engine reserves on a device, and the memory that it needs, in bytes.

    Args:
        share: memory that the engine reserves on the device.
        weights: the engine's part of the model.
        peak: memory of its largest forward.
        request: keys and values of the longest possible request.
    """

    share: float
    weights: float
    peak: float
    request: float

    @property
    def cache(self) -> float:
        return self.share - self.weights - self.peak

    @property
    def needed(self) -> float:
        """The smallest share under which the engine starts."""
        return self.weights + self.peak + self.request


def engine_peak(spec: ModelSpec, tp: int, samples: int, longest: float) -> float:
    """Bytes that a vLLM engine on GPUs does not use for its cache, because its largest forward (run when it starts)
    needs them: the activations of `BATCHED` tokens, or fewer if its requests are shorter, of a mixture with the rows of
    a token's experts (`_expert_rows`); for each sample two float32 copies of the logits of a token, and the counts of
    sampled tokens (4 bytes per token of the vocabulary, and a bit for the prompt); and CUDA graphs.

    Args:
        samples: number of samples of the engine; it decodes at most `MAX_SLOTS` at once.
        longest: tokens of the longest request.
    """
    samples = min(samples, MAX_SLOTS)
    tokens = min(BATCHED, samples * longest)
    split = max(OF_FORWARD_SPLIT / 2 * spec.hidden / tp, _expert_rows(spec, tp))
    activations = tokens * (split + OF_FORWARD_WHOLE / 2 * spec.hidden) * spec.activation_bytes
    of_samples = 2 * 4 * min(samples, tokens) + 4 * (1 + 1 / 32) * samples
    return activations + of_samples * spec.outputs + CUDA_GRAPH_BYTES


def _expert_rows(spec: ModelSpec, tp: int) -> float:
    """Elements per token of the two buffers in which vLLM's Triton kernels compute experts (0.27). Both have a row for
    each of a token's experts, one of the gate and up projections' outputs or of the result, one of their product or of
    the input, whichever is longer. Tensor parallelism divides the projections' outputs alone."""
    if not spec.experts or not spec.hidden:
        return 0.0
    largest = max(p.elements // p.shape[0] for p in spec.parameters if p.is_of_experts)  # gate and up of an expert
    projected = largest / spec.hidden / tp
    return spec.experts_per_token * (max(spec.hidden, projected) + max(spec.hidden, projected / 2))


def model_part(spec: ModelSpec, assignment: Assignment) -> float:
    """Elements of the largest part of a model under tensor and pipeline parallelism. Training engines divide whole
    experts, vLLM each expert's channels."""
    tp, pp = assignment.strategy.tp, assignment.strategy.pp
    return spec.rank_elements(tp, pp, whole_experts=assignment.engine != "vllm")


def layer_sums(spec: ModelSpec, assignment: Assignment) -> float:
    """Sums over a tensor-parallel group in the forward of a layer. vLLM adds a shared expert's output to that of the
    others before it sums."""
    return 2 if assignment.engine == "vllm" else spec.sums


def cache_bytes(spec: ModelSpec, strategy: ParallelStrategy) -> float:
    """Bytes of the keys and values of a token on a device of an engine."""
    return spec.kv_bytes_per_token / strategy.pp / min(strategy.tp, max(spec.kv_heads, 1))


def load_seconds(size: float, part: float, bandwidth: float, *, is_gpu: bool) -> float:
    """Seconds to load new weights into an engine. The sending rank has the whole model on its device. An engine on one
    GPU copies it on the device. Otherwise the weights pass through host memory, from which each worker of a
    tensor-parallel group reads its part (`generation.weight_sender`).

    Args:
        size: bytes of the model.
        part: bytes of a worker's part.
        bandwidth: of copies in host memory, bytes/s.
    """
    if not is_gpu:
        return size / bandwidth
    return size / ON_DEVICE if part == size else size / min(bandwidth, TO_HOST) + part / min(bandwidth, FROM_HOST)
