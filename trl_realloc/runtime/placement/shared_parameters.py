"""Lets the models of a rank share the memory of frozen parameters that are equal, such as the base of the adapters of
actor and critic.

A reference that needs no model of its own is `plan.shared_base`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...engines.torch_compat import memory_of
from ...engines.training.deepspeed_compat import is_partitioned
from ...engines.weight_digest import digest


LEAST_BYTES = 1 << 16  # smaller parameters are not worth a comparison


def share_frozen(models: Iterable[tuple[nn.Module, Collection[str]]]) -> int:
    """Give equal frozen parameters of several models one memory. Partitioned parameters and those of under
    `LEAST_BYTES` keep their own.

    Args:
        models: models on their devices, each with the names of frozen parameters that are overwritten later.

    Returns:
        The bytes that are no longer taken twice.
    """
    alike: dict[object, list[tuple[int, Tensor]]] = {}
    for number, (model, overwritten) in enumerate(models):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or name in overwritten or is_partitioned(parameter):
                continue
            memory = memory_of(parameter)
            if memory.nbytes >= LEAST_BYTES and memory.is_contiguous():
                alike.setdefault((memory.shape, memory.dtype, memory.device), []).append((number, memory))
    of_several = (group for group in alike.values() if len({number for number, _ in group}) > 1)
    return sum(_share_equal([memory for _, memory in group]) for group in of_several)


def _share_equal(memories: Sequence[Tensor]) -> int:
    """Give those of these tensors that are equal one memory. Returns the bytes that this saves."""
    known: dict[int, list[Tensor]] = {}
    saved = 0
    for memory in memories:
        equal_digest = known.setdefault(int(digest(memory.data)), [])
        same = next((tensor for tensor in equal_digest if torch.equal(tensor, memory.data)), None)
        if same is None:
            equal_digest.append(memory.data)
        elif same.data_ptr() != memory.data_ptr():
            saved += memory.nbytes
            memory.data = same
    return saved
