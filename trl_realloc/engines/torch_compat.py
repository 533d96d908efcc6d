"""Uses of torch beyond its documented interface, and the differences between its releases; they are in this file alone.

Run with torch 2.11, 2.13 and 2.15 (docs/versions.md).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor


# The classes in the metadata file of torch.distributed.checkpoint.
CHECKPOINT_METADATA_CLASSES = frozenset(
    [
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (StorageInfo.__module__, StorageInfo.__qualname__),
        ("torch.serialization", "_get_layout"),
    ]
)


def memory_of(parameter: Tensor) -> Tensor:
    """The plain tensor of a parameter. A DTensor (of a tensor-parallel group) cannot be pinned, and setting its `data`
    does not move its local part."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class LeanStage(PipelineStage):
    """A pipeline stage that has memory for what it receives of the micro-batches that are under way. torch's has it for
    all micro-batches of a step from the beginning: twice as much as all of their hidden states.

    For stages that are made with `input_args` and `output_args`: torch runs the others once to see their shapes, for
    which it needs memory. In a release that lacks the methods that are replaced here, the memory is torch's.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _allocate(self, received: Iterable[Any]) -> None:
        for info in received:
            buffer = _buffer(info)
            if buffer is not None and buffer.is_meta:
                info.buffer = torch.empty_like(buffer, device=self.device, requires_grad=buffer.requires_grad)

    def _free(self, received: Iterable[Any]) -> None:
        for info in received:
            buffer = _buffer(info)
            if buffer is not None:
                info.buffer = torch.empty_like(buffer, device="meta")

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._free(self.args_recv_info[bwd_chunk_id])
        self._free(self.grad_recv_info.get(bwd_chunk_id, ()))


def _buffer(info: Any) -> Tensor | None:
    """The memory that an input of a stage is received in; `None` for an argument of the first stage, which torch 2.11
    describes by a class of its own."""
    return getattr(info, "buffer", None)


@functools.cache
def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """True if this release's function has an argument of that name."""
    return name in inspect.signature(function).parameters


def extensions_folder() -> Path:
    """The folder in which torch compiles extensions, each in a folder of its own."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory("", False))


def wrap_store(wrap: Callable[[dist.Store], dist.Store], mark: str) -> None:
    """Make torch use `wrap(store)` for every key-value store that it connects to for a job's rendezvous. Does nothing
    the second time.

    Args:
        mark: an attribute by which a second time is known.
    """
    # imported by name, because `torch.distributed.rendezvous` is a function
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    connect = rendezvous._create_c10d_store
    if getattr(connect, mark, False):
        return

    def connect_and_wrap(*args: Any, **kwargs: Any) -> dist.Store:
        return wrap(connect(*args, **kwargs))

    setattr(connect_and_wrap, mark, True)
    rendezvous._create_c10d_store = connect_and_wrap


__all__ = [
    "CHECKPOINT_METADATA_CLASSES",
    "LeanStage",
    "StorageInfo",
    "extensions_folder",
    "memory_of",
    "takes_argument",
    "wrap_store",
]
