"""A process in which code that asks for float32 computes in float64: ours, Transformers' and DeepSpeed's.

Optimizer steps as large as the tests' amplify rounding, by 1e5 over an update or two: in float32 two plans then differ
by 1e-2 of what the parameters move, though nothing is wrong. In float64 most differ by 1e-12, none by more than 1e-8,
and a tight limit finds defects alone. Float32 itself is compared by `test_plans`.
"""

from __future__ import annotations

import io

import safetensors.torch  # noqa: F401  (makes its table of dtypes)
import torch


def read_float32_as_float64() -> None:
    """Let float32's names in torch mean float64 in this process. Call it before the imports of what computes, because
    a default argument that names a dtype is read there."""
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)  # torch makes its tables for pickled tensors when they are first used
    torch.load(io.BytesIO(file.getvalue()))
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.nn.Module.float = torch.nn.Module.double
