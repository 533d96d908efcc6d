"""A rank of two that reads models from a checkpoint's files into every layout, and compares them with loaded ones.

Writes `<rank>.json`: of each case the names of wrong parameters, the bytes read, the bytes of this rank's parts, and
the bytes of the largest parameter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import counted_reads
import torch
import torch.distributed as dist
from torch import nn

from trl_realloc.engines.base import EngineError
from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups
from trl_realloc.engines.models import load_classifier, load_policy, seeded
from trl_realloc.engines.training import checkpoint_files
from trl_realloc.engines.training.heads import PolicyHead, ValueHead
from trl_realloc.engines.training.megatron import MegatronEngine
from trl_realloc.engines.training.replica_sync import equalize, follow
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.engines.training.zero import ZeroEngine
from trl_realloc.engines.training_state import MASTER


CPU = torch.device("cpu")


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.0)


def copies(engine: ZeroEngine) -> dict[str, Any]:
    """The trained parameters whose float32 weight has other memory than the parameter, and the bytes of gradients that
    are kept between the steps."""
    parts, state = engine.parts(), engine.training_state().tensors
    places = {name: [cell.data_ptr() for _, cell in cells] for name, cells in parts.items()}
    weights = {name: [cell.data_ptr() for _, cell in tensors[MASTER].cells] for name, tensors in state.items()}
    return {
        "second": sorted(name for name, place in weights.items() if place != places[name]),
        "gradients": engine.engine.optimizer.grad_partitions_flat_buffer.untyped_storage().nbytes(),
    }


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = MeshGroup((0, 1), rank, dist.group.WORLD)
    alone = [MeshGroup((at,), at, dist.new_group([at])) for at in (0, 1)][rank]
    split = {"tp": SplitGroups(mesh, alone, mesh, alone, alone), "pp": SplitGroups(mesh, alone, alone, mesh, mesh)}

    def engine(layout: str, head: Any, frozen: bool, bf16: bool) -> Any:
        make: dict[str, Any] = {"make_optimizer": None if frozen else adamw}
        if layout == "replicated":
            return ReplicatedEngine(head, mesh, CPU, **make)
        if layout in split:
            return MegatronEngine(head, split[layout], CPU, **make)
        config = {"bf16": {"enabled": True}} if bf16 else None
        return ZeroEngine(head, mesh, CPU, stage=int(layout[-1]), alone=alone.group, config=config, **make)

    checkpoint_files.safe_open = counted_reads.CountedFile
    results = {}
    for name, case in cases.items():
        load = load_policy if case["head"] == "policy" else load_classifier
        path, frozen, bf16 = str(folder.parent / case["model"]), case.get("frozen", False), case.get("bf16", False)
        with seeded(3):
            whole = load(path, trained=not frozen, in_parts=False).to(torch.bfloat16 if bf16 else None)
        expected = {n: p.detach() for n, p in whole.named_parameters()}
        counted_reads.PIECES.clear()
        with seeded(3):
            model = load(path, trained=not frozen)
        equalize(model, mesh, name)
        made = engine(
            case["layout"], PolicyHead(model, 1.0) if case["head"] == "policy" else ValueHead(model), frozen, bf16
        )
        wrong, share = [], 0
        for parameter, parts in made.parts().items():
            for box, tensor in parts:
                right = expected[parameter][tuple(slice(start, stop) for start, stop in box)]
                if not torch.equal(tensor, right):
                    wrong.append(parameter)
                share += tensor.numel() * case["file_bytes"]
        read = sum(counted_reads.PIECES)
        largest = max(p.numel() for p in expected.values()) * case["file_bytes"]
        whole_bytes = sum(p.numel() for p in expected.values()) * case["file_bytes"]
        held = sorted(made.parts())
        results[name] = {
            "wrong": wrong,
            "read": read,
            "share": share,
            "largest": largest,
            "whole": whole_bytes,
            "held": held,
            "copies": copies(made) if case["layout"] == "zero 3" and not frozen else None,
        }
        made.close()
    refused = []
    other = load_policy(str(folder.parent / f"host-{rank}"), trained=True)
    for check in (lambda: equalize(other, mesh, "actor"), lambda: follow(other, 0, 1, rank, dist.group.WORLD, "actor")):
        try:
            check()
        except EngineError as error:
            refused.append(str(error))
    (folder / f"{rank}.json").write_text(json.dumps({"cases": results, "refused": refused}))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
