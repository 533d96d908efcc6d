"""Extensions that run inside vLLM's worker: load weights from memory shared with the trainer, in host memory or on the
GPU. vLLM loads this module (`worker_extension_cls`); `vllm_host` creates and drives the engine.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .vllm_compat import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    copy_pending,
    finalize_layerwise_reload,
    incomplete_layers,
    initialize_layerwise_reload,
    not_loaded,
    register_transfer,
    replace_draw,
    unloaded_parameters,
    wait_without_yielding,
)
from .vllm_sampler import SeededDraw, SeededRows
from .weight_buffers import Handle, open_handle
from .weight_proof import LoadedWeights, Sent, WorkerAnswer


if TYPE_CHECKING:
    from transformers import PretrainedConfig


MAX_PLAIN = 1 << 20  # bytes of one of `plain_tensors`
BACKEND = "trl_realloc"  # name of the class below in vLLM's registry of weight-transfer engines


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Empty: no setup is needed before the first bucket."""


@dataclass
class SharedMemoryBucket(WeightTransferUpdateInfo):
    """The location and the contents of one bucket.

    Args:
        path: the file to map: /proc/<pid>/fd/<fd> of a memfd.
        size: used bytes.
        tensors: (checkpoint name, name of the torch dtype, shape, offset in bytes) of each tensor.
        handle: `weight_buffers.Handle` of a bucket on the worker's GPU.
    """

    path: str
    size: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    handle: Handle | None = None


class SharedMemoryWeightTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryBucket]):
    """Loads parameters from buckets in shared memory or on the GPU, with additional memory for about one layer. A
    worker of a tensor-parallel group copies only its parts.

    Never raises; errors are in `problem`. With several workers, vLLM would otherwise leave the other workers' answers
    in their queues and read them as answers to the next request.
    """

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryBucket
    problem: str | None = None
    weights: LoadedWeights | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self.problem = None
        self._loaded: set[str] = set()
        self._opened: dict[str, tuple[Handle, Tensor]] = {}  # path of a slot on the GPU -> its handle, its memory
        before = self._names()  # tied parameters once
        self.weights = self.weights or LoadedWeights(self.model)
        initialize_layerwise_reload(self.model)
        self.weights.begin()
        self._expected = before & self._names()  # without those that vLLM computes from others, which are gone now

    def receive_weights(self, update_info: SharedMemoryBucket) -> None:
        if self.problem is not None:
            return
        try:
            memory = self._memory(update_info)
            assert self.weights is not None, "an update has begun"
            loaded = self.weights.load([_sent(*tensor) for tensor in update_info.tensors], memory)
            self._loaded |= self._expected if loaded is None else loaded  # some models do not report it
            copy_pending(self.model, memory)  # the next bucket overwrites the memory
            if update_info.handle is not None:
                torch.cuda.synchronize(self.device)  # finish copying before the bucket is filled again
        except Exception:
            self.problem = traceback.format_exc()

    def _names(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}

    def _memory(self, bucket: SharedMemoryBucket) -> Tensor:
        """The memory of the bucket's slot. A slot on the GPU stays open until its handle changes or the update ends."""
        if bucket.handle is None:
            return torch.from_file(bucket.path, shared=True, size=bucket.size, dtype=torch.uint8)
        if bucket.path not in self._opened or self._opened[bucket.path][0] != bucket.handle:
            self._opened.pop(bucket.path, None)
            self._opened[bucket.path] = bucket.handle, open_handle(bucket.handle, self.device)
        return self._opened[bucket.path][1]

    def finish_weight_update(self) -> None:
        try:
            missing = not_loaded(self._expected, self._loaded)
            missing |= {f"part of {name}" for name in incomplete_layers(self.model)}
            empty = sorted(unloaded_parameters(self.model, self._expected - missing))
            finalize_layerwise_reload(self.model, self.model_config)
            # a tied head is not loaded, so its packed copy on the CPU has the old weights
            for layer in _tied_layers(self.model):
                layer.quant_method.process_weights_after_loading(layer)
            if missing and self.problem is None:
                self.problem = f"no bucket held {', '.join(sorted(missing)[:8])} ({len(missing)} in all)."
            if empty and self.problem is None:
                self.problem = (
                    f"vLLM's implementation of this model cannot load {', '.join(empty[:8])} ({len(empty)} in all) "
                    f"while it runs."
                )
        except Exception:
            self.problem = self.problem or traceback.format_exc()
        finally:
            if self.weights is not None:
                self.weights.end()
            self._opened.clear()  # the sender frees its slots
            if self.device.type == "cuda":  # the trainer may need it
                torch.cuda.empty_cache()

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        raise NotImplementedError("the trainer sends through trl_realloc.engines.generation.vllm.VLLMEngine.load")


def plain_tensors(model: nn.Module, device: torch.device) -> list[Tensor]:
    """The small tensors on a device that are attributes of modules, or of their attention objects (`impl`), but neither
    parameters nor buffers: the slopes of ALiBi, factors of embeddings. Without views of parameters and buffers, and
    without keys and values."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for owner in (module, module.__dict__.get("impl")):
            values = (value for name, value in getattr(owner, "__dict__", {}).items() if name != "kv_cache")
            tensors |= {id(value): value for value in values if isinstance(value, Tensor) and value.device == device}
    small = (tensor for tensor in tensors.values() if tensor.nbytes <= MAX_PLAIN)
    return [tensor for tensor in small if tensor.untyped_storage().data_ptr() not in storages]


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


def _sent(name: str, dtype: str, shape: tuple[int, ...], offset: int) -> tuple[Sent, int]:
    return Sent(name, getattr(torch, dtype), tuple(shape)), offset


register_transfer(BACKEND, SharedMemoryWeightTransfer)


class RolloutWorker:
    """Methods that vLLM adds to its worker class; called with `collective_rpc`."""

    device: torch.device
    model_config: PretrainedConfig
    model_runner: Any
    weight_transfer_engine: Any
    _plain: list[tuple[Tensor, Tensor]]

    def draw_by_seed(self) -> None:
        """Replace the sampler by `SeededDraw`. Called once, after the engine's start."""
        replace_draw(self.model_runner, SeededRows, SeededDraw)

    def share_cores(self) -> None:
        """Call `wait_without_yielding`. Called once, after the engine's start."""
        wait_without_yielding()

    def weight_dtypes(self) -> tuple[str, list[str]]:
        """The name of the dtype that the model computes in, and the parameters that it holds in a wider one."""
        dtype: torch.dtype = self.model_config.dtype
        wider = [
            name
            for name, parameter in self.model_runner.model.named_parameters()
            if parameter.dtype.is_floating_point and parameter.dtype.itemsize > dtype.itemsize
        ]
        return str(dtype).removeprefix("torch."), wider

    def keep_plain_tensors(self) -> None:
        """Copy `plain_tensors` to host memory. vLLM's sleep mode of level 2 drops them, and restores only buffers
        (v1/worker/gpu_worker.py of 0.27.1; read, not run)."""
        self._plain = [(tensor, tensor.cpu()) for tensor in plain_tensors(self.model_runner.model, self.device)]

    def restore_plain_tensors(self) -> None:
        """Restore the tensors that `keep_plain_tensors` has copied."""
        for tensor, copy in self._plain:
            tensor.copy_(copy)

    def why_no_ipc(self, handle: Handle) -> str | None:
        """The reason why this worker cannot open the trainer's bucket on its GPU; `None` if it can."""
        try:
            open_handle(handle, self.device).item()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def loaded_weights(self) -> WorkerAnswer:
        """The outcome of the last weight update on this worker, and the digests of its memory now."""
        transfer = self.weight_transfer_engine
        if transfer.problem is not None or transfer.weights is None:
            return WorkerAnswer(transfer.problem, {}, [])
        try:
            answer: WorkerAnswer = transfer.weights.answer()
        except Exception:
            return WorkerAnswer(traceback.format_exc(), {}, [])
        return answer
