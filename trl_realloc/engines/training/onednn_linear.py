"""Linear layers in float32 by oneDNN, on processors where torch's own matrix multiplication leaves half of them unused.

On a CPU torch multiplies float32 matrices by MKL, which has kernels for AVX-512 on Intel's processors alone. On AMD's
oneDNN, which is part of torch, is about twice as fast (docs/performance.md). The results differ by rounding. The
forwards that use it are in `packed_forward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


LEAST_PRODUCTS = 1 << 22  # in fewer multiplications a call of oneDNN's costs as much as it saves
_torch_linear = nn.functional.linear


@contextlib.contextmanager
def fastest_linear() -> Iterator[None]:
    """Inside, `torch.nn.functional.linear` computes large products by oneDNN where that is faster. A forward and its
    backward have to be in one context, because checkpointed layers run their forward again in the backward."""
    if not prefers_onednn() or nn.functional.linear is not _torch_linear:  # DeepSpeed's, for partitioned weights
        yield
        return
    nn.functional.linear = linear
    try:
        yield
    finally:
        nn.functional.linear = _torch_linear


@functools.cache
def prefers_onednn() -> bool:
    """Whether this is a processor with AVX-512 for which MKL does not use it. Not measured, so that all ranks on such
    processors, and all runs, compute alike."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        return lacks_kernels(Path("/proc/cpuinfo").read_text())
    except OSError:  # not Linux
        return False


def lacks_kernels(cpuinfo: str) -> bool:
    """Whether MKL has no kernels for the AVX-512 of the processor that /proc/cpuinfo describes."""
    values = {key.strip(): value.split() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    return values.get("vendor_id") == ["AuthenticAMD"] and "avx512f" in values.get("flags", [])


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`."""
    is_large = weight.dim() == 2 and input.dim() > 1 and input.numel() * weight.shape[0] >= LEAST_PRODUCTS
    if is_large and _fits(input) and _fits(weight) and not torch.is_autocast_enabled("cpu"):
        result: Tensor = _Linear.apply(input, weight, bias)
        return result
    return _torch_linear(input, weight, bias)


def _fits(tensor: Tensor) -> bool:
    """Whether oneDNN can read the tensor. Subclasses, such as DTensor, and those of `torch.func` compute for
    themselves."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.dtype is torch.float32 and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left` (..., k) times the transposed `right` (n, k), plus `bias` (n,): (..., n)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if needs_input else None,
            _product(rows.t(), input.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


__all__ = ["fastest_linear", "lacks_kernels", "linear", "prefers_onednn"]
