"""Buckets in memory that two processes share. The CUDA handle is a stand-in: no GPU is here whose memory it opens."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.generation.weight_buffers import WeightBuffers, by_cuda_ipc


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


def load_by_handle() -> dict[str, torch.Tensor]:
    """What is packed and what vLLM's `ipc` engine is handed are ours; torch's handles of CUDA memory are a stand-in."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    from trl_realloc.engines.generation import vllm_worker

    opened: list[torch.Tensor] = []

    def reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        opened.append(tensor)
        return None, (torch.Tensor, tensor.size(), tensor.stride(), 0, None, tensor.dtype, 3, len(opened) - 1)

    def rebuild(*arguments: Any) -> torch.Tensor:
        assert arguments[6] == 1, "the worker's own number of the GPU, not the trainer's 3"
        return opened[arguments[7]]

    class Model:
        loaded: dict[str, torch.Tensor]

        def load_weights(self, weights: Any) -> set[str]:
            self.loaded = dict(weights)
            return set(self.loaded)

    made, gpu = WeightBuffers(cuda_ipc=True), SimpleNamespace(uuid="GPU-1")
    made.dtype, made.wider = torch.bfloat16, frozenset({"c"})
    with (
        patch.object(reductions, "reduce_tensor", reduce),
        patch.object(reductions, "rebuild_cuda_tensor", rebuild),
        patch.object(torch.cuda, "synchronize", lambda device: None),
        patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
        patch.object(torch.Tensor, "is_cuda", True),
    ):
        size, tensors, handle = made.fill(0, bucket())
        again = [made.fill(0, bucket()).handle for _ in range(3)]
        assert again == [handle] * 3 and len(opened) == 1, "torch wraps the storage anew for each handle"
        assert [name for name, *_ in tensors] == ["c", "a", "b"], "without gaps, so the widest elements come first"
        worker: Any = object.__new__(vllm_worker.SharedMemoryWeightTransfer)
        worker.config = worker.model_config = None
        worker.vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
        worker.device, worker.model, worker._expected, worker._loaded = SimpleNamespace(index=1), Model(), {"e"}, set()
        worker.receive_weights(vllm_worker.SharedMemoryBucket("", size, tensors, handle))
        assert worker.problem is None, worker.problem
        assert worker._loaded == {"a", "b", "c"}
        assert ipc_engine and packed_tensor
        return {name: tensor.clone() for name, tensor in worker.model.loaded.items()}


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_on_a_gpu_vllms_own_engine_opens_the_slot_by_its_handle() -> None:
    """In a process of its own, as the worker is: vLLM stays out of this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        found = worker.submit(load_by_handle).result(timeout=180)
    expected = dict(bucket())
    assert torch.equal(found["a"], expected["a"].bfloat16()) and torch.equal(found["b"], expected["b"])
    assert torch.equal(found["c"], expected["c"])


def expected_of_mixtures() -> set[str]:
    from trl_realloc.engines.generation.vllm_compat import not_loaded

    parameters = {"0.mlp.experts.routed_experts.w2_weight", "1.mlp.experts.routed_experts.w2_weight", "norm.weight"}
    return not_loaded(parameters, {"0.mlp.experts.w2_weight", "0.mlp.experts.w13_weight"})


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_the_experts_of_a_mixture_are_loaded_under_the_names_that_vllm_tells() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        found = worker.submit(expected_of_mixtures).result(timeout=180)
    assert found == {"1.mlp.experts.routed_experts.w2_weight", "norm.weight"}
