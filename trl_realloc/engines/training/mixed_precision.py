"""The autocast of an engine that computes in 16 bits with float32 parameters."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def autocast(
    device: torch.device, dtype: torch.dtype | None, *, keeps_weights: bool = False
) -> AbstractContextManager[object]:
    """A context in which products are computed in `dtype`; one without effect for `None`.

    Args:
        keeps_weights: keep the weights that were cast until the context ends, for forwards that use them again and
            again, as generation does. A forward and its backward use a weight once: there the kept casts would take the
            memory of all weights in 16 bits, also where activations are recomputed and, under ZeRO-3, those of all
            ranks.
    """
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=keeps_weights)
