"""Extensions that run inside vLLM's worker: loading weights from memory shared with the trainer, in host memory or on
the GPU.

vLLM loads this module (`worker_extension_cls`). The engine that is extended is created and driven in `vllm_host`.
Drawing tokens by seed is in `vllm_sampler`.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .vllm_compat import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    incomplete_layers,
    initialize_layerwise_reload,
    not_loaded,
    packed_ipc_consumer,
    register_transfer,
    replace_draw,
    wait_without_yielding,
)
from .vllm_sampler import SeededDraw, SeededRows


BACKEND = "trl_realloc"  # name of the class below in vLLM's registry of weight-transfer engines


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
        handle: for a bucket on the worker's GPU, the GPU's UUID and the arguments of torch's `rebuild_cuda_tensor`
            (CUDA IPC). Its tensors lie one after the other without gaps.
    """

    path: str
    size: int
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    handle: tuple[str, tuple[Any, ...]] | None = None


class LoadedNames:
    """A model for vLLM's own transfer engine, which does not return the names that `load_weights` has loaded.

    Args:
        every: the names to take for loaded where the model does not return them.
    """

    def __init__(self, model: Any, every: set[str]) -> None:
        self._model, self._every = model, every
        self.names: set[str] = set()

    def load_weights(self, weights: Any) -> None:
        self.names |= self._model.load_weights(weights) or self._every


class SharedMemoryWeightTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryBucket]):
    """Loads parameters from buckets in shared memory, with additional memory for about one layer. vLLM's own `ipc`
    engine opens buckets on the GPU.

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
            model = LoadedNames(self.model, self._expected)
            if update_info.handle is not None:
                self._receive_by_ipc(model, update_info)
            else:
                memory = torch.from_file(update_info.path, shared=True, size=update_info.size, dtype=torch.uint8)
                # copies, because vLLM keeps a layer's tensors until it has all, and the next bucket overwrites the
                # memory
                weights = (
                    (name, _view(memory, dtype, shape, offset).to(self.device, copy=True))
                    for name, dtype, shape, offset in update_info.tensors
                )
                model.load_weights(weights)
            self._loaded |= model.names
        except Exception:
            self.problem = traceback.format_exc()

    def _receive_by_ipc(self, model: LoadedNames, bucket: SharedMemoryBucket) -> None:
        """Load a bucket on this GPU by vLLM's own engine, which copies it before it returns."""
        assert bucket.handle is not None, "the bucket is on the GPU"
        uuid, arguments = bucket.handle
        names, dtypes, shapes, _ = (list(column) for column in zip(*bucket.tensors, strict=True))
        receiver = IPCWeightTransferEngine(self.config, self.vllm_config, self.device, model)  # type: ignore[arg-type]
        receiver.packed = True
        sizes = [prod(shape) * _dtype(dtype).itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        receiver.receive_weights(
            IPCWeightTransferUpdateInfo(names, dtypes, shapes, ipc_handles={uuid: arguments}, tensor_sizes=sizes)
        )
        torch.cuda.synchronize(self.device)  # finish copying before the bucket is filled again

    def finish_weight_update(self) -> None:
        try:
            missing = not_loaded(self._expected, self._loaded)
            missing |= {f"part of {name}" for name in incomplete_layers(self.model)}
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
    dtype = _dtype(dtype_name)
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


register_transfer(BACKEND, SharedMemoryWeightTransfer)


class RolloutWorker:
    """Methods that vLLM adds to its worker class; called with `collective_rpc`."""

    device: torch.device
    model_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    def draw_by_seed(self) -> None:
        """Replace the sampler by `SeededDraw`. Called once, after the engine's start."""
        replace_draw(self.model_runner, SeededRows, SeededDraw)

    def share_cores(self) -> None:
        """See `wait_without_yielding`. Called once, after the engine's start."""
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

    def why_no_ipc(self, handle: tuple[str, tuple[Any, ...]]) -> str | None:
        """Why this worker cannot open a bucket of the trainer's on its GPU; `None` if it can."""
        try:
            packed_ipc_consumer({handle[0]: handle[1]}, ["probe"], [[1]], ["uint8"], [1], self.device.index)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def weight_problem(self) -> str | None:
        """The error of the last weight update on this worker; `None` if it succeeded."""
        problem: str | None = self.weight_transfer_engine.problem
        return problem
