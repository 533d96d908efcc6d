"""A role that the plan offloads is on the device while its call runs, and in host memory between."""

from __future__ import annotations

import torch
from torch import nn

from trl_realloc.runtime.residency import Residency


def test_a_forward_brings_the_parameters_in_once_and_release_takes_them_back() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    data = torch.randn(3, 4)
    expected = module(data)
    hook = Residency.attach(module, torch.device("cpu"))
    assert not hook.resident and hook.moves == 0, "attached, it waits in host memory"
    for call in (1, 2):
        for _micro_batch in range(3):
            assert torch.equal(module(data), expected)
            assert hook.resident and hook.moves == call
        hook.release()
        hook.release()
        assert not hook.resident


def test_the_hosts_copy_is_made_once_for_a_frozen_role_never_changes() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    hook = Residency.attach(module, torch.device("cpu"))
    kept = {name: tensor.data_ptr() for name, tensor in hook._host.items()}
    module(torch.randn(1, 4))
    hook.release()
    assert {name: tensor.data_ptr() for name, tensor in hook._host.items()} == kept
    assert {p.data_ptr() for p in module.parameters()} == set(kept.values())


def test_a_prefetched_call_moves_nothing_more() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    hook = Residency.attach(module, torch.device("cpu"))
    hook.prefetch()
    hook.prefetch()
    assert hook.resident and hook.moves == 1
    module(torch.randn(1, 4))
    assert hook.moves == 1
