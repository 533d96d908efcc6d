"""The parameters of a model that Accelerate trains leave it whole, under checkpoint names, however they are held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from launched_job import Job
from ranks import RankServers
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


@pytest.mark.multiprocess
def test_what_fsdp2_has_sharded_is_whole_on_every_rank(tmp_path: Path, servers: RankServers) -> None:
    job = Job(tmp_path, __file__, 2, {}, None, servers=servers)
    try:
        assert job.wait(60) == 0, job.text()[-4000:]
    finally:
        job.kill()
        job.log.close()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found == [[True, ""], [True, ""]]


def test_fsdp_1_and_quantized_models_are_not_exported() -> None:
    assert "fsdp_version: 2" in str(why_not_exported(tiny.policy(), 1))
    assert why_not_exported(tiny.policy(), 2) is None
    quantized = tiny.policy()
    quantized.is_quantized = True
    assert "quantized" in str(why_not_exported(quantized))


def _sharded(folder: Path) -> None:
    """What a rank of the test of FSDP2 does."""
    torch.distributed.init_process_group("gloo")
    model, mesh = tiny.policy(), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
    found = [is_collective(model), difference(exported(model))]
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    _sharded(Path(sys.argv[1]))
