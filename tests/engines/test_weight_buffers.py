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

from trl_realloc.engines.generation.vllm import is_vllm_available
from trl_realloc.engines.generation.weight_buffers import WeightBuffers, asks_for_cuda_ipc


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


def open_by_handle() -> dict[str, torch.Tensor]:
    """What is packed, what is sent and how it is opened are ours; `reduce_tensor` and `rebuild_cuda_tensor` are not."""
    from torch.multiprocessing import reductions

    from trl_realloc.engines.generation import vllm_worker

    opened: list[torch.Tensor] = []

    def reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        opened.append(tensor)
        return None, (torch.Tensor, tensor.size(), tensor.stride(), 0, None, tensor.dtype, 3, len(opened) - 1)

    def rebuild(*arguments: Any) -> torch.Tensor:
        assert arguments[6] == 1, "the worker's own number of the GPU, not the trainer's 3"
        return opened[arguments[7]]

    made = WeightBuffers(cuda_ipc=True)
    with (
        patch.object(reductions, "reduce_tensor", reduce),
        patch.object(reductions, "rebuild_cuda_tensor", rebuild),
        patch.object(torch.cuda, "synchronize", lambda device: None),
    ):
        size, tensors, _ = made.fill(0, bucket())
        handle = made._on_the_gpu(0, made.fill(0, bucket()), bucket())
        told = vllm_worker.SharedMemoryBucket(path="", size=size, tensors=tensors, handle=handle)
        found = read(vllm_worker._opened(told, SimpleNamespace(index=1)), tensors)
        return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.skipif(not is_vllm_available(), reason="the worker's side is vLLM's")
def test_on_a_gpu_the_worker_opens_the_slot_by_its_handle() -> None:
    """In a process of its own, as the worker is: vLLM stays out of this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        found = worker.submit(open_by_handle).result(timeout=180)
    assert all(torch.equal(found[name], tensor) for name, tensor in bucket())


def test_cuda_ipc_is_used_where_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRL_REALLOC_CUDA_IPC", raising=False)
    assert not asks_for_cuda_ipc()
    monkeypatch.setenv("TRL_REALLOC_CUDA_IPC", "1")
    assert asks_for_cuda_ipc()
