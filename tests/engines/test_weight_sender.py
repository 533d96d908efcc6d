"""Buckets in memory that two processes share. The CUDA handle is a stand-in: no GPU is here whose memory it opens."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.generation.weight_sender import WeightBuffers, by_cuda_ipc, send_weights


def bucket() -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        ("a", torch.rand((3, 5), generator=draw)),
        ("b", torch.rand((7,), generator=draw).to(torch.bfloat16)),
        ("c", torch.rand((5, 4), generator=draw).T),
    ]


def read(memory: torch.Tensor, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> dict[str, torch.Tensor]:
    """As the other side does, by what it is told alone."""
    found = {}
    for name, dtype, shape, offset in tensors:
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        found[name] = memory[offset : offset + size].view(kind).view(shape)
    return found


@pytest.fixture
def slots() -> Any:
    made = WeightBuffers()
    yield made
    made.clear()
    for fd in made.fds:
        os.close(fd)


def test_what_is_put_in_a_slot_is_read_by_its_path(slots: WeightBuffers) -> None:
    for slot in (0, 1, 0):
        filled = slots.fill(slot, bucket())
        memory = torch.from_file(f"/proc/self/fd/{slots.fds[slot]}", shared=True, size=filled.size, dtype=torch.uint8)
        found = read(memory, filled.tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in bucket())
        assert filled.handle is None


def test_a_tensor_that_was_sent_can_still_be_dropped(slots: WeightBuffers) -> None:
    tensor = torch.arange(12.0)
    slots.fill(0, [("a", tensor)])
    tensor.untyped_storage().resize_(0)


def test_a_slot_grows_and_is_kept_where_it_is_large_enough(slots: WeightBuffers) -> None:
    small, large = [("a", torch.zeros(4))], [("a", torch.zeros(4000))]
    slots.fill(0, small)
    slots.fill(0, large)
    size = os.fstat(slots.fds[0]).st_size
    slots.fill(0, small)
    assert os.fstat(slots.fds[0]).st_size == size >= 16000


def test_tensors_are_sent_in_the_engines_dtype_but_for_those_that_it_holds_wider(slots: WeightBuffers) -> None:
    slots.dtype, slots.wider = torch.bfloat16, frozenset({"c"})
    numbers = [*bucket(), ("d", torch.arange(3))]
    filled = slots.fill(0, numbers)
    assert [dtype for _, dtype, _, _ in filled.tensors] == ["bfloat16", "bfloat16", "float32", "int64"]
    memory = torch.from_file(f"/proc/self/fd/{slots.fds[0]}", shared=True, size=filled.size, dtype=torch.uint8)
    found = read(memory, filled.tensors)
    assert torch.equal(found["a"], numbers[0][1].bfloat16()) and torch.equal(found["c"], numbers[2][1])
    slots.dtype = torch.float32
    assert slots.fill(0, numbers).tensors[1][1] == "bfloat16", "a narrower tensor is not made wider"


@pytest.mark.parametrize(
    ("on_gpu", "tp", "environment", "by_ipc"),
    [
        (True, 1, {}, True),
        (True, 2, {}, False),  # the other workers are on other GPUs
        (False, 1, {}, False),
        (True, 1, {"TRL_REALLOC_CUDA_IPC": "0"}, False),
        (True, 1, {"TRL_REALLOC_CUDA_IPC": "1"}, True),
    ],
)
def test_weights_go_through_the_gpu_where_the_engine_has_that_one_alone(
    on_gpu: bool, tp: int, environment: dict[str, str], by_ipc: bool
) -> None:
    assert by_cuda_ipc(on_gpu, tp, environment) == by_ipc


class Handles:
    """In place of CUDA IPC. Counts a handle as torch does: from 1, and one less when what was opened by it is freed."""

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []
        self.counts: list[int] = []

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        self.memory.append(tensor)
        self.counts.append(1)
        number = len(self.memory) - 1
        return None, (torch.Tensor, tensor.size(), tensor.stride(), 0, None, tensor.dtype, 3, number)

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        assert arguments[6] == 0, "the worker's own number of the GPU, not the trainer's 3"
        opened = self.memory[arguments[7]].view(-1)
        weakref.finalize(opened, self.close, arguments[7])
        return opened

    def close(self, number: int) -> None:
        self.counts[number] -= 1

    @contextmanager
    def patched(self) -> Iterator[None]:
        from torch.multiprocessing import reductions

        with (
            patch.object(reductions, "reduce_tensor", self.reduce),
            patch.object(reductions, "rebuild_cuda_tensor", self.rebuild),
            patch.object(torch.cuda, "synchronize", lambda device: None),
            patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")),
            patch.object(torch.Tensor, "is_cuda", True),
        ):
            yield


class Model(torch.nn.Module):
    loaded: dict[str, torch.Tensor]

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded = dict(weights)
        return set(self.loaded)


def worker_of(model: Model) -> Any:
    from trl_realloc.engines.generation import weight_receiver

    worker: Any = object.__new__(weight_receiver.SharedMemoryWeightTransfer)
    worker.model, worker.model_config, worker.device = model, None, torch.device("cpu", 0)
    worker.vllm_config, worker.config = SimpleNamespace(parallel_config=None, model_config=None), None
    return worker


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, as the worker is: vLLM stays out of this one. One for all tests, because it imports vLLM
    longer than it does anything else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        yield worker


def load_by_handle() -> dict[str, torch.Tensor]:
    """What is packed and how it is read are ours; torch's handles of CUDA memory are a stand-in."""
    from trl_realloc.engines.generation import weight_receiver

    made, handles = WeightBuffers(cuda_ipc=True), Handles()
    made.dtype, made.wider = torch.bfloat16, frozenset({"c"})
    with handles.patched():
        size, tensors, handle, _ = made.fill(0, bucket())
        again = [made.fill(0, bucket()).handle for _ in range(3)]
        assert again == [handle] * 3 and len(handles.memory) == 1, "torch wraps the storage anew for each handle"
        worker = worker_of(Model())
        worker.start_weight_update()
        worker.receive_weights(weight_receiver.SharedMemoryBucket("", size, tensors, handle))
        assert worker.problem is None, worker.problem
        assert worker._loaded == {"a", "b", "c"}
        return {name: tensor.clone() for name, tensor in worker.model.loaded.items()}


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_on_a_gpu_the_worker_opens_the_slot_by_its_handle(vllm_process: ProcessPoolExecutor) -> None:
    found = vllm_process.submit(load_by_handle).result(timeout=180)
    expected = dict(bucket())
    assert torch.equal(found["a"], expected["a"].bfloat16()) and torch.equal(found["b"], expected["b"])
    assert torch.equal(found["c"], expected["c"])


def loads_of_toys() -> tuple[str | None, str | None, str | None]:
    """What vLLM's reload says of a model with a parameter that is computed from another, of one that is given too
    little, and of one that writes into its parameter."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.model_executor.utils import replace_parameter

    class Toy(torch.nn.Module):
        def __init__(self, *, writes: bool = False) -> None:
            super().__init__()
            self.writes = writes
            self.first, self.second = (torch.nn.Linear(2, 2, bias=False).requires_grad_(False) for _ in range(2))
            self.attention = torch.nn.Module()
            record_metadata_for_reloading(self)
            replace_parameter(self.attention, "W_UV", self.first.weight.t())  # as latent attention does after a load

        def load_weights(self, weights: Any) -> set[str]:
            mine, loaded = dict(self.named_parameters()), set()
            for name, weight in weights:
                if self.writes and name == "second.weight":
                    mine[name].copy_(weight)
                else:
                    getattr(mine[name], "weight_loader", default_weight_loader)(mine[name], weight)
                loaded.add(name)
            return loaded

    def loaded(toy: Any, names: list[str]) -> str | None:
        from trl_realloc.engines.generation.weight_receiver import SharedMemoryBucket

        buffers, worker = WeightBuffers(), worker_of(toy)
        worker.model_config = SimpleNamespace(dtype=torch.float32)
        worker.device = torch.device("cpu")
        worker.start_weight_update()
        for at, name in enumerate(names):
            filled = buffers.fill(0, [(name, torch.full((2, 2), float(at + 1)))])
            path = f"/proc/self/fd/{buffers.fds[0]}"
            worker.receive_weights(SharedMemoryBucket(path, filled.size, filled.tensors, None))
        worker.finish_weight_update()
        if worker.problem is None:
            assert [toy.first.weight.sum(), toy.second.weight.sum()] == [4, 8]
        problem: str | None = worker.problem
        return problem

    both = ["first.weight", "second.weight"]
    return loaded(Toy(), both), loaded(Toy(), both[:1]), loaded(Toy(writes=True), both)


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_a_load_is_complete_with_all_of_a_checkpoint_not_if_vllm_lost_some(vllm_process: ProcessPoolExecutor) -> None:
    whole, short, lost = vllm_process.submit(loads_of_toys).result(timeout=180)
    assert whole is None
    assert short is not None and "no bucket held second.weight (1 in all)" in short
    assert lost is not None and "cannot load second.weight (1 in all) while it runs" in lost


def pending_of_toys() -> tuple[list[float], bool]:
    """Three parts of a layer from a slot that is filled again after each, and whether the first of them was read in
    place when its layer was whole."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from trl_realloc.engines.generation.weight_receiver import SharedMemoryBucket

    read: list[int] = []

    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
            self.weight.weight_loader = self.load  # type: ignore[attr-defined]

        def load(self, param: Any, loaded_weight: torch.Tensor, row: int) -> None:
            if not param.is_meta:
                read.append(loaded_weight.untyped_storage().data_ptr())
            param.data[row].copy_(loaded_weight)

    class Toy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = Fused()
            record_metadata_for_reloading(self)

        def load_weights(self, weights: Any) -> set[str]:
            for name, weight in weights:
                self.fused.weight.weight_loader(self.fused.weight, weight, row=int(name))  # type: ignore[attr-defined]
            return {"fused.weight"}

    toy, buffers = Toy(), WeightBuffers()
    worker = worker_of(toy)  # type: ignore[arg-type]
    worker.model_config, worker.device = SimpleNamespace(dtype=torch.float32), torch.device("cpu")
    worker.start_weight_update()
    for row in range(3):
        filled = buffers.fill(0, [(str(row), torch.full((2,), row + 1.0))])
        path = f"/proc/self/fd/{buffers.fds[0]}"
        worker.receive_weights(SharedMemoryBucket(path, filled.size, filled.tensors, None))
    worker.finish_weight_update()
    assert worker.problem is None, worker.problem
    return toy.fused.weight.view(-1).tolist(), len(set(read)) == 3


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_the_parts_of_a_layer_outlive_the_bucket_that_they_came_in(vllm_process: ProcessPoolExecutor) -> None:
    weights, each_has_its_memory = vllm_process.submit(pending_of_toys).result(timeout=180)
    assert weights == [1, 1, 2, 2, 3, 3] and each_has_its_memory


def plain_tensors_of_a_toy() -> list[list[float]]:
    from trl_realloc.engines.generation.weight_receiver import plain_tensors

    model = torch.nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(2))
    model.scale, model.view, model.kv_cache = torch.tensor([3.0]), model.weight.data[0], torch.zeros(4)  # type: ignore[assignment]
    model.impl = SimpleNamespace(alibi_slopes=torch.tensor([1.0, 2.0]), large=torch.zeros(1 << 19), device="cpu")  # type: ignore[assignment]
    return sorted(tensor.tolist() for tensor in plain_tensors(model, torch.device("cpu")))


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_what_sleep_would_lose_are_plain_attributes_that_no_load_brings(vllm_process: ProcessPoolExecutor) -> None:
    assert vllm_process.submit(plain_tensors_of_a_toy).result(timeout=180) == [[1.0, 2.0], [3.0]]


class Process:
    """In place of `EngineProcess`: the worker takes a bucket before the next one is filled."""

    limits = SimpleNamespace(load=1.0)
    is_running = True

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.free: list[int] = []

    def send(self, word: str, *arguments: Any) -> None:
        from trl_realloc.engines.generation.weight_receiver import SharedMemoryBucket

        if word == "load":
            self.free = []
            self.worker.start_weight_update()
        elif word == "bucket":
            slot, *filled = arguments
            self.worker.receive_weights(SharedMemoryBucket(str(slot), *filled))
            self.free.append(slot)
        else:
            self.worker.finish_weight_update()

    def expect(self, word: str, *rest: Any, **named: Any) -> list[Any]:
        return [self.free.pop(0)] if word == "free" else [self.worker.problem, 0.0, [], []]


def handles_after_loads() -> list[int]:
    made, handles = WeightBuffers(cuda_ipc=True), Handles()
    process: Any = Process(worker_of(Model()))
    large = [("d", torch.zeros(4000))]
    with handles.patched():
        for buckets in ([bucket()] * 5, [bucket()] * 5, [bucket(), bucket(), large, large, bucket()]):
            assert send_weights(process, made, buckets, 0, lambda message: False, {}).problem is None
    return handles.counts


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_a_slot_on_the_gpu_is_opened_once_and_closed_before_it_is_freed(vllm_process: ProcessPoolExecutor) -> None:
    """torch frees memory that has been shared only if its count is exactly 0."""
    counts = vllm_process.submit(handles_after_loads).result(timeout=180)
    assert counts == [0] * 8, "two slots in each load, and two more where they grew"


def test_nothing_that_was_shared_on_the_gpu_is_left_after_the_engine_was_tried() -> None:
    """torch warns of it at the end of a process, as of a leak."""
    made, handles = WeightBuffers(cuda_ipc=True), Handles()
    with handles.patched():
        made.probe(torch.device("cpu"))
        byte = weakref.ref(handles.memory.pop())
        assert byte() is not None, "the engine opens it"
        made.release_gpu()
    assert byte() is None


def expected_of_mixtures() -> set[str]:
    from trl_realloc.engines.generation.vllm_compat import not_loaded

    parameters = {"0.mlp.experts.routed_experts.w2_weight", "1.mlp.experts.routed_experts.w2_weight", "norm.weight"}
    return not_loaded(parameters, {"0.mlp.experts.w2_weight", "0.mlp.experts.w13_weight"})


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_the_experts_of_a_mixture_are_loaded_under_the_names_that_vllm_tells(vllm_process: ProcessPoolExecutor) -> None:
    found = vllm_process.submit(expected_of_mixtures).result(timeout=180)
    assert found == {"1.mlp.experts.routed_experts.w2_weight", "norm.weight"}
