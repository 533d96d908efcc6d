"""A role that the plan offloads is on the device while its call runs, and in host memory between; one that it drops is
nowhere."""

from __future__ import annotations

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.runtime.parameters.cpu_offload import CPUOffload, DroppedCopy


def test_a_forward_brings_the_parameters_in_once_and_release_takes_them_back() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    data = torch.randn(3, 4)
    expected = module(data)
    hook = CPUOffload.attach(module, torch.device("cpu"))
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
    hook = CPUOffload.attach(module, torch.device("cpu"))
    kept = {name: tensor.data_ptr() for name, tensor in hook.host.items()}
    module(torch.randn(1, 4))
    hook.release()
    assert {name: tensor.data_ptr() for name, tensor in hook.host.items()} == kept
    assert {p.data_ptr() for p in module.parameters()} == set(kept.values())


def test_a_role_is_prefetched_again_after_it_was_released() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    hook = CPUOffload.attach(module, torch.device("cpu"))
    for moves in (1, 2):
        hook.prefetch()
        assert hook.resident and hook.moves == moves
        hook.release()


def test_a_prefetched_call_moves_nothing_more() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    hook = CPUOffload.attach(module, torch.device("cpu"))
    hook.prefetch()
    hook.prefetch()
    assert hook.resident and hook.moves == 1
    module(torch.randn(1, 4))
    assert hook.moves == 1


def test_a_pipelines_stage_brings_the_parameters_in_too() -> None:
    """It calls for the hidden states that it passes on, not for the head's outputs."""
    head = PolicyHead(tiny.policy(), 1.0).requires_grad_(False)
    hook = CPUOffload.attach(head, torch.device("cpu"))
    prompts = Ragged.of([[5, 6, 7]], torch.long)
    samples = Rollouts(index=torch.arange(1), prompts=prompts, responses=Ragged.of([[8]], torch.long))
    assert head(samples, returns_hidden=True)[0].shape == (1, 4, 32)
    assert hook.resident and hook.moves == 1


def test_of_a_parameter_that_a_group_shares_this_ranks_part_moves() -> None:
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(4, 4, bias=False).requires_grad_(False)
        part = DTensor.from_local(module.weight.data, DeviceMesh("cpu", [0]), [Shard(0)])
        module.weight = nn.Parameter(part, requires_grad=False)
        hook = CPUOffload.attach(module, torch.device("cpu"))
        hook.host["weight"] = torch.full((4, 4), 2.0)  # as if host and device were two places
        hook.prefetch()
        hook.release()
        assert type(hook.host["weight"]) is torch.Tensor
        assert torch.equal(module.weight.to_local(), torch.full((4, 4), 2.0)), "the parameter rests in host memory"
    finally:
        if made_here:
            dist.destroy_process_group()


class Copy:
    version = 3


def test_a_dropped_copy_takes_no_memory_between_its_turns_and_is_filled_where_it_was() -> None:
    module, copy = nn.Linear(64, 64).requires_grad_(False), Copy()
    weight, bias = module.weight.data, module.bias.data
    bias_before = bias.clone()
    dropped = DroppedCopy(copy, [weight, weight[:8]], [bias], stale=-1)
    assert dropped.bytes == 0 and copy.version == -1, "what was in it is gone, and must not be used"
    assert torch.equal(bias, bias_before), "what is not filled again stays"
    dropped.restore()
    dropped.restore()
    assert dropped.bytes == weight.nbytes
    fresh = torch.randn(64, 64)
    weight.copy_(fresh)
    data = torch.randn(2, 64)
    assert torch.equal(module(data), nn.functional.linear(data, fresh, bias_before))
    dropped.release()
    dropped.release()
    assert dropped.bytes == 0


def test_memory_that_is_shared_with_what_stays_is_not_dropped() -> None:
    flat = torch.randn(10)
    dropped = DroppedCopy(Copy(), [flat[:5]], [flat[5:]], stale=-1)
    dropped.restore()
    assert dropped.bytes == 0 and flat.untyped_storage().nbytes() == 40
