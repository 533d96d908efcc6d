"""The parameters of a model that Accelerate trains leave it whole, under checkpoint names, however they are held."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from limits import patience
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trl_realloc.engines.training.accelerate_export import export, is_collective, why_not_exported


CPU = torch.device("cpu")


def exported(model: nn.Module, bucket_bytes: int = 1 << 12) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in export(model, CPU, bucket_bytes) for name, tensor in bucket}


def difference(found: dict[str, torch.Tensor]) -> str:
    """What differs from the tiny policy; empty if nothing does."""
    expected = dict(tiny.policy().named_parameters())
    if found.keys() != expected.keys():
        return f"names: {sorted(found.keys() ^ expected.keys())}"
    return ", ".join(name for name, tensor in expected.items() if not torch.equal(found[name], tensor))


def test_a_whole_model_is_exported_without_a_collective() -> None:
    model = tiny.policy()
    assert not is_collective(model)
    assert difference(exported(model)) == ""


def test_names_do_not_show_what_wraps_a_layer() -> None:
    model = tiny.policy()

    class Wrapper(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = layer

    model.model.layers[0] = Wrapper(model.model.layers[0])
    assert difference(exported(model)) == ""


def sharded(rank: int, store: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, mesh = tiny.policy(), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
    results.put((rank, is_collective(model), difference(exported(model))))
    torch.distributed.barrier()


@pytest.mark.multiprocess
def test_what_fsdp2_has_sharded_is_whole_on_every_rank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [context.Process(target=sharded, args=(rank, str(tmp_path / "store"), results)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        found = sorted(results.get(timeout=patience(60)) for _ in ranks)
        assert found == [(0, True, ""), (1, True, "")]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def test_fsdp_1_and_quantized_models_are_not_exported() -> None:
    assert "fsdp_version: 2" in str(why_not_exported(tiny.policy(), 1))
    assert why_not_exported(tiny.policy(), 2) is None
    quantized = tiny.policy()
    quantized.is_quantized = True
    assert "quantized" in str(why_not_exported(quantized))
