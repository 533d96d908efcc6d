"""Rank 0 trains a tiny model, rank 1 has an engine that is filled from it, that refuses its second update, and in whose
third one a bit is another one than was sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist

from trl_realloc.engines.base import Bucket, EngineError
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.plan.cluster import Cluster
from trl_realloc.realloc.transfer import TransferOptions
from trl_realloc.runtime.parameters.parameter_sinks import GeneratorSink
from trl_realloc.runtime.parameters.reallocation import Reallocation
from trl_realloc.runtime.process_groups import ReallocationGroups


class Picky:
    """A generation engine in the place of vLLM's, that refuses a tensor of version 1 and keeps what it is given."""

    def __init__(self, is_narrow: bool) -> None:
        self.version, self.is_narrow = -1, is_narrow
        self.tensors: dict[str, torch.Tensor] = {}

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """As an engine in bfloat16 whose router and norms are in float32."""
        return {name: torch.bfloat16 for name in dtypes if "norm" not in name} if self.is_narrow else {}

    def kept(self, frozen: Any) -> frozenset[str]:
        return frozenset()

    def load(self, buckets: Iterable[Bucket], version: int, frozen: Any = None) -> None:
        self.version = -1
        for bucket in buckets:
            for name, tensor in bucket:
                if version == 1 and "layers.1" in name:
                    raise EngineError(f"{name} has a shape that the engine does not know")
                self.tensors[name] = tensor.clone()
        self.version = version


def move(is_narrow: bool) -> dict[str, Any]:
    """What a rank has seen of five updates."""
    rank, cpu = dist.get_rank(), torch.device("cpu")
    model, engine, picky = tiny.policy(), None, Picky(is_narrow)
    if rank == 0:
        head = PolicyHead(model, 1.0)
        engine = ReplicatedEngine(
            head, MeshGroup((0,), 0), cpu, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1)
        )
    edge = Reallocation(
        ReallocationGroups("actor.train", "actor.generate", (0, 1), dist.group.WORLD, dist.group.WORLD),
        Cluster(1, 2),
        rank,
        holder=engine,
        sink=GeneratorSink(picky, lambda tensors: tensors, cpu, {}) if rank == 1 else None,  # type: ignore[arg-type]
        options=TransferOptions(bucket_bytes=4096),
    )
    told: list[Any] = []
    run = edge.transfer.run

    def spoiled(*given: Any) -> Iterator[Any]:
        for parts in run(*given):
            for _, tensor in parts.get("model.norm.weight", ()):
                tensor.view(torch.int32)[3] ^= 1
            yield parts

    for version in (0, 0, 1, 2, 2):
        if engine is not None:
            engine.version = version
        edge.transfer.run = spoiled if version == 2 and len(told) == 3 else run  # type: ignore[method-assign]
        try:
            moved = edge.refresh()
            edge.check()
            told.append(None if moved is None else moved.bytes)
        except EngineError as error:
            told.append(str(error))
            try:
                edge.check()
                told[-1] += " and it could be used"
            except EngineError as refusal:
                told[-1] += f" | {refusal}"
    narrower = picky.narrower({n: p.dtype for n, p in model.named_parameters()})
    sent = {n: p.detach().to(narrower.get(n, p.dtype)) for n, p in model.named_parameters()}
    got = picky.tensors
    right = rank == 0 or all(torch.equal(got[name], p) and got[name].dtype == p.dtype for name, p in sent.items())
    total = sum(p.nbytes for p in sent.values())
    return {"told": told, "right": right, "bytes": total}


def main(folder: Path, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    for dtype in ("float32", "bfloat16"):
        (folder / f"{dtype}-{dist.get_rank()}.json").write_text(json.dumps(move(dtype == "bfloat16")))
    dist.barrier()  # none closes its connections while another still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
