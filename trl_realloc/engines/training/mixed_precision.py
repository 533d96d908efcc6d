"""The autocast of an engine that computes in 16 bits with float32 parameters."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def autocast(
    device: torch.device, dtype: torch.dtype | None, *, keeps_weights: bool = False
) -> AbstractContextManager[object]:
    """A context that computes products in `dtype`; without effect for `None`.

    Args:
        keeps_weights: whether to keep the cast weights until the context ends, for repeated forwards, as in generation.
            A forward and its backward use a weight once: there the casts would take the memory of all weights in 16
            bits, even with activation checkpointing and, under ZeRO-3, those of all ranks.
    """
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=keeps_weights)
