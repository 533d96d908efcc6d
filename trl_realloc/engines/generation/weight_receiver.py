"""Loads the trainer's parameters inside a vLLM engine, bucket by bucket, and verifies that the workers hold them.

`WeightUpdates` runs in the engine's main process (`vllm_host`), the other classes in vLLM's workers, which load this
module by its name (`worker_extension_cls`). `weight_sender` fills the buckets, `weight_proof` compares the weights.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..child_process import Message
from ..torch_compat import use_amx
from .vllm_compat import (
    NoRoutes,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    copy_pending,
    finalize_reload,
    full_attention_group,
    incomplete_layers,
    initialize_layerwise_reload,
    not_loaded,
    pack_experts_again,
    register_transfer,
    replace_draw,
    unloaded_parameters,
    wait_without_yielding,
)
from .vllm_routes import SlotRoutes
from .vllm_sampler import SeededDraw, SeededRows
from .weight_proof import LoadedWeights, Sent, WorkerAnswer, difference, joined
from .weight_sender import Handle


if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm import LLM


MAX_PLAIN = 1 << 20  # bytes of one of `plain_tensors`
BACKEND = "trl_realloc"  # name of `SharedMemoryWeightTransfer` in vLLM's registry


class WeightUpdates:
    """The updates of an engine's weights, and the proof that its workers hold the latest one.

    Args:
        send: sends a message to the trainer's process.
        receive: waits for the next message from it.
        slots: file descriptors of the shared memory.

    Attributes:
        unproven: tensors of the latest update that the model does not hold, or from which it holds only computed
            values.
        together: names of the tensors that each layer of the model is loaded from.
    """

    def __init__(
        self, llm: LLM, send: Callable[..., None], receive: Callable[[], Message], slots: Sequence[int]
    ) -> None:
        self._llm, self._send, self._receive, self._slots = llm, send, receive, slots
        self._sent: dict[str, int] | None = None  # digests of the latest update; None if it is incomplete
        self.unproven: list[str] = []
        self.together: list[list[str]] = []

    def take(self, first: Message) -> str | None:
        """Load buckets as they arrive, through vLLM's weight-transfer interface. No decode step may be in progress.

        Args:
            first: the first message: `bucket` or `done`.

        Returns:
            The reason why the engine does not have all parameters as they were sent; `None` if it has.
        """
        self._sent, received = None, set[str]()
        self._llm.start_weight_update()
        word, *arguments = first
        while word == "bucket":
            slot, size, tensors, handle = arguments
            path = f"/proc/{os.getpid()}/fd/{self._slots[slot]}"
            received |= {name for name, *_ in tensors}
            bucket = {"path": path, "size": size, "tensors": tensors, "handle": handle}
            self._llm.update_weights({"update_info": bucket})
            self._send("free", slot)
            word, *arguments = self._receive()
        complete, sent, kept = arguments if word == "done" else (False, {}, [])
        if kept := sorted({*kept} - received):
            self._llm.collective_rpc("keep_weights", args=(kept,))
        self._llm.finish_weight_update()  # also after an incomplete update: vLLM needs it before the next one
        answers, problem = self._loaded()
        if problem is None and not complete:
            problem = "the sender stopped before the last bucket"
        if problem is None and (lost := sorted(sent.keys() - received - {*kept})):
            problem = f"{', '.join(lost[:8])} ({len(lost)} in all) did not arrive."
        problem = problem or difference(sent, answers)
        if problem is None:
            self._sent = sent
            self.unproven = sorted(set.intersection(*(set(answer.unproven) for answer in answers)))
            self.together = joined(names for answer in answers for names in answer.together)
        return problem

    def _loaded(self) -> tuple[list[WorkerAnswer], str | None]:
        """The answers of all workers, and the first problem among them."""
        answers: list[WorkerAnswer] = self._llm.collective_rpc("loaded_weights")
        return answers, next((answer.problem for answer in answers if answer.problem is not None), None)

    def prove_again(self) -> None:
        """Compare the workers' weights with those sent last, after their memory was freed and taken again.

        Raises:
            RuntimeError: the weights differ.
        """
        if self._sent is None:
            raise RuntimeError("the engine woke without weights, and got none")
        answers, problem = self._loaded()
        if problem := problem or difference(self._sent, answers):
            raise RuntimeError(f"the engine woke with other weights than it slept with: {problem}")


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
        handle: `weight_sender.Handle` of a bucket on the worker's GPU.
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
        self._kept: set[str] = set()
        self._expected = before & self._names()  # without those that vLLM computes from others, which are gone now

    def receive_weights(self, update_info: SharedMemoryBucket) -> None:
        if self.problem is not None:
            return
        try:
            memory = self._memory(update_info)
            bucket = [
                (Sent(name, getattr(torch, dtype), tuple(shape)), offset)
                for name, dtype, shape, offset in update_info.tensors
            ]
            assert self.weights is not None, "an update has begun"
            loaded = self.weights.load(bucket, memory)
            self._loaded |= self._expected if loaded is None else loaded  # some models do not report it
            copy_pending(self.model, memory)  # the next bucket overwrites the memory
            if update_info.handle is not None:
                torch.cuda.synchronize(self.device)  # finish copying before the bucket is filled again
        except Exception:
            self.problem = traceback.format_exc()

    def keep(self, names: Sequence[str]) -> None:
        """Leave the layers that these tensors were loaded into as they are."""
        try:
            assert self.weights is not None, "an update has begun"
            self._kept = self.weights.keep(names)
        except Exception:
            self.problem = self.problem or traceback.format_exc()

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
            expected = self._expected - self._kept
            missing = not_loaded(expected, self._loaded)
            missing |= {f"part of {name}" for name in incomplete_layers(self.model)}
            empty = sorted(unloaded_parameters(self.model, expected - missing))
            finalize_reload(self.model, self.model_config)
            # a tied head is not loaded, so its packed copy on the CPU has the old weights
            for layer in _tied_layers(self.model, self._kept):
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


register_transfer(BACKEND, SharedMemoryWeightTransfer)


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


def _tied_layers(model: nn.Module, kept: set[str]) -> list[Any]:
    """The layers that share the weight of an earlier layer, except for the weights with the names `kept`."""
    left_out = {id(parameter) for name, parameter in model.named_parameters() if name in kept}
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:
            tied += [layer] if id(weight) in seen - left_out else []
            seen.add(id(weight))
    return tied


def open_handle(handle: Handle, device: torch.device) -> Tensor:
    """The sender's memory on this process's GPU, mapped until the tensor is freed.

    A handle is opened once, however many buckets come through its memory. torch decrements an unsigned counter from 1
    each time that the handle has been opened and closed, and frees the sender's memory at 0. A second time would
    wrap around, and the memory would never be freed.

    Raises:
        ValueError: the memory is on another GPU.
        RuntimeError: CUDA cannot open it.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid, arguments = handle
    if uuid != (local_uuid := str(torch.cuda.get_device_properties(device).uuid)):
        raise ValueError(f"the weights are on the GPU {uuid}, and the engine is on the GPU {local_uuid}")
    mapped: list[Any] = list(arguments)
    mapped[6] = device.index  # in place of the GPU's number in the sender's process
    memory: Tensor = rebuild_cuda_tensor(*mapped)
    return memory


class RolloutWorker:
    """Methods that vLLM adds to its worker class; called with `collective_rpc`."""

    device: torch.device
    model_config: PretrainedConfig
    model_runner: Any
    weight_transfer_engine: Any
    rank: int
    _plain: list[tuple[Tensor, Tensor]]
    _slot_routes: SlotRoutes
    _no_routes: str | None

    def draw_by_seed(self) -> None:
        """Replace the sampler by `SeededDraw`. Called once, after the engine's start."""
        replace_draw(self.model_runner, SeededRows, SeededDraw)

    def use_amx(self) -> None:
        """Call `torch_compat.use_amx`. Called once, after the engine's start."""
        use_amx()

    def pack_experts(self) -> None:
        """Call `pack_experts_again`. Called once, after the engine's start."""
        pack_experts_again()

    def share_cores(self) -> None:
        """Call `wait_without_yielding`. Called once, after the engine's start."""
        wait_without_yielding()

    def record_routes(self) -> None:
        """Record the experts that the routers choose. Called once, before the engine's first token."""
        try:
            self._slot_routes, self._no_routes = SlotRoutes(self.model_runner), None
        except (NoRoutes, AttributeError) as error:  # a release with other attributes
            self._no_routes = f"the experts of each token are not told: {error}"

    def why_no_routes(self) -> str | None:
        """The reason why routes are not recorded; `None` if they are."""
        return self._no_routes or self._slot_routes.problem()

    def route_group(self) -> int:
        """See `full_attention_group`."""
        return full_attention_group(self.model_runner.kv_cache_config)[0]

    def routes_at(self, slots: Any) -> Any:
        """`SlotRoutes.at` in the first worker; `None` in the others, which have the same."""
        return self._slot_routes.at(slots) if self.rank == 0 else None

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

    def keep_weights(self, names: Sequence[str]) -> None:
        """Called before the end of an update that leaves these tensors out."""
        self.weight_transfer_engine.keep(names)

    def loaded_weights(self) -> WorkerAnswer:
        """The outcome of the last weight update on this worker, and the digests of its memory now."""
        transfer = self.weight_transfer_engine
        if transfer.problem is not None or transfer.weights is None:
            return WorkerAnswer(transfer.problem, {}, [], [])
        try:
            answer: WorkerAnswer = transfer.weights.answer()
        except Exception:
            return WorkerAnswer(traceback.format_exc(), {}, [], [])
        return answer
