"""Extensions that run inside vLLM's worker: loading weights from memory shared with the trainer, and drawing tokens by
seed.

vLLM loads this module (`worker_extension_cls`, `logits_processors`), so it imports nothing else of this package. The
engine that is extended is created and driven in `vllm_host`.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


BACKEND = "trl_realloc"  # name of the class below in vLLM's registry of weight-transfer engines
SEED = "trl_realloc_seed"  # key in SamplingParams.extra_args

# each reload would warn once per layer that rotary embeddings, which have no parameters, were not loaded
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Empty: the first bucket needs no setup."""


@dataclass
class SharedMemoryBucket(WeightTransferUpdateInfo):
    """The location and the contents of one bucket.

    Args:
        path: the file to map: /proc/<pid>/fd/<fd> of a memfd.
        size: used bytes.
        tensors: for each tensor its checkpoint name, the name of its torch dtype, its shape and its offset in bytes.
        handle: for a bucket on the worker's GPU, the arguments of torch's `rebuild_cuda_tensor` (CUDA IPC).
    """

    path: str
    size: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    handle: tuple[Any, ...] | None = None


class SharedMemoryWeightTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryBucket]):
    """Loads parameters from buckets in shared memory, with additional memory for about one layer.

    Never raises: with several workers vLLM would leave the other workers' answers in their queues and read them as
    answers to the next request. The error is in `problem`.
    """

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryBucket
    problem: str | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self.problem = None
        self._loaded: set[str] = set()
        self._expected = {name for name, _ in self.model.named_parameters()}  # tied parameters once
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryBucket) -> None:
        if self.problem is not None:
            return
        try:
            memory = _opened(update_info, self.device)
            # copies, because vLLM keeps a layer's tensors until it has all, and the next bucket overwrites the memory
            weights = (
                (name, _view(memory, dtype, shape, offset).to(self.device, copy=True))
                for name, dtype, shape, offset in update_info.tensors
            )
            self._loaded |= self.model.load_weights(weights) or self._expected
            if update_info.handle is not None:
                torch.cuda.synchronize(self.device)  # finish copying before the bucket is filled again
        except Exception:
            self.problem = traceback.format_exc()

    def finish_weight_update(self) -> None:
        try:
            missing = self._expected - self._loaded
            for name, layer in self.model.named_modules():
                info = get_layerwise_info(
                    layer
                )  # vLLM counts a fused layer as loaded with its first part (q of q, k, v)
                if isinstance(layer, LinearBase) and info.can_load() and 0 < info.load_numel < info.load_numel_total:
                    missing.add(f"part of {name}")
            finalize_layerwise_reload(self.model, self.model_config)
            for layer in _tied_layers(
                self.model
            ):  # a tied head is not loaded, so its packed copy on the CPU has the old weights
                layer.quant_method.process_weights_after_loading(layer)
            if missing and self.problem is None:
                self.problem = f"no bucket held {', '.join(sorted(missing)[:8])} ({len(missing)} in all)."
        except Exception:
            self.problem = self.problem or traceback.format_exc()

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer sends through trl_realloc.engines.generation.vllm.VLLMEngine.load")


def _opened(bucket: SharedMemoryBucket, device: torch.device) -> Tensor:
    """The bucket's memory in this process, (size,) uint8."""
    if bucket.handle is None:
        return torch.from_file(bucket.path, shared=True, size=bucket.size, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(bucket.handle)
    arguments[6] = (
        device.index
    )  # the GPU's index in this process, which may differ in the process that filled the bucket
    memory: Tensor = rebuild_cuda_tensor(*arguments)
    return memory[: bucket.size]


def _tied_layers(model: nn.Module) -> list[Any]:
    """The layers that share the weight of an earlier layer."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:
            tied += [layer] if id(weight) in seen else []
            seen.add(id(weight))
    return tied


def _view(memory: Tensor, dtype_name: str, shape: tuple[int, ...], offset: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


if BACKEND not in WeightTransferEngineFactory._registry:  # registering twice raises
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightTransfer)


class SeededRows(LogitsProcessor):
    """Keeps the random numbers of each request as vLLM moves it between the rows of its batch. Does not change logits.

    vLLM's per-request seeds are not used: on the CPU they draw a random number for each token of the vocabulary (57 of
    70 ms per step with 64 rows of 32,000; this class takes 0.8 ms), and a prompt that is prefilled in two steps raises,
    because generators on the CPU have no offset that could be reset.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[np.ndarray[Any, Any], list[int]]] = {}  # row -> (uniforms, tokens drawn so far)

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new_row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Any:
            uniforms = np.random.default_rng((params.extra_args or {})[SEED]).random(params.max_tokens)
            return uniforms, output  # vLLM appends to `output`, also when it resumes a preempted request

        process_dict_updates(self.rows, batch_update, new_row)

    def uniforms(self, count: int) -> Tensor:
        """One number in [0, 1) for each of the first `count` rows: (count, 1) float64."""
        rows = (self.rows[row] for row in range(count))
        return torch.tensor([uniform[min(len(output), len(uniform) - 1)] for uniform, output in rows])[:, None]


class SeededDraw(nn.Module):
    """Replaces vLLM's `TopKTopPSampler`: maps one uniform number per token through the inverse of the cumulative
    distribution, so a sample depends on its seed and not on the other samples."""

    def __init__(self, rows: SeededRows) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            logits: (rows, vocabulary) float32, after temperature.

        Returns:
            The tokens (rows,) int64, and all log-probabilities (rows, vocabulary).
        """
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        return draw(logprobs, self.rows.uniforms(len(logits)).to(logits.device)), logprobs


def draw(logprobs: Tensor, uniform: Tensor, block: int = 256) -> Tensor:
    """The first token at which the cumulative probability exceeds `uniform` times the total.

    Sums are in float64, because in float32 tokens with a probability below 6e-8 would never be drawn. They are computed
    over blocks, and then over the tokens of one block: 0.7 ms, where a cumulative sum over 64 rows of 32,000 takes 5.3.

    Args:
        logprobs: (rows, vocabulary) float32.
        uniform: (rows, 1) float64 in [0, 1).

    Returns:
        (rows,) int64.
    """
    rows, vocabulary = logprobs.shape
    probs = nn.functional.pad(logprobs.exp(), (0, -vocabulary % block)).view(rows, -1, block)
    ends = probs.sum(-1, dtype=torch.float64).cumsum(-1)  # (rows, blocks)
    point = uniform * ends[:, -1:]
    chosen = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[1] - 1)  # (rows, 1)
    start = torch.where(chosen > 0, ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = probs.gather(1, chosen[:, :, None].expand(rows, 1, block)).squeeze(1).cumsum(-1, dtype=torch.float64)
    token = chosen * block + torch.searchsorted(inside, point - start, right=True).clamp_(max=block - 1)
    return token.squeeze(1).clamp_(max=vocabulary - 1)


class RolloutWorker:
    """Methods that vLLM adds to its worker class; called with `collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: Any

    def draw_by_seed(self) -> None:
        """Replace the sampler by `SeededDraw`. Called once, after the engine's start."""
        rows = [p for p in self.model_runner.input_batch.logitsprocs.all if isinstance(p, SeededRows)]
        sampler = self.model_runner.sampler
        if not rows or not hasattr(sampler, "topk_topp_sampler"):
            raise RuntimeError("the sampler of this vLLM release is not supported by trl_realloc; install vLLM 0.27.1.")
        sampler.topk_topp_sampler = SeededDraw(rows[0])

    def weight_problem(self) -> str | None:
        """The error of the last weight update on this worker; `None` if it succeeded."""
        problem: str | None = self.weight_transfer_engine.problem
        return problem
