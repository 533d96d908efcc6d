"""One rank of a job that moves made-up models between many pairs of layouts. Arguments: folder, options as JSON.

Writes `pairs.json` on rank 0: each pair, the bytes that were sent, the schedule's count and whether all was bit-equal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc import layout as layouts
from trl_realloc.realloc.layout import Layout
from trl_realloc.realloc.schedule import make_schedule
from trl_realloc.realloc.transfer import Parts, Transfer, TransferOptions


CONFIG = {"model_type": "llama", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 52}
CONFIG |= {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIG |= {"tie_word_embeddings": True}


def candidates(spec: ModelSpec, world: int) -> dict[str, Layout]:
    """Layouts on all, on half and on one of the devices."""
    found: dict[str, Layout] = {}
    for first, size in {(0, world), (0, max(1, world // 2)), (world // 2, max(1, world // 2)), (world - 1, 1)}:
        mesh = DeviceMesh(first, size)
        found[f"replicated {mesh}"] = layouts.replicated_layout(spec, mesh)
        if size > 1:
            found[f"zero3 {mesh}"] = layouts.zero3_layout(spec, mesh)
            found[f"owners tp2 {mesh}"] = layouts.owners_layout(spec, mesh, 2)
            found[f"vllm tp{size} {mesh}"] = layouts.vllm_layout(spec, mesh, min(size, 4))
        for tp, pp in itertools.product((1, 2), (1, 2, 4)):
            if tp * pp > 1 and size % (tp * pp) == 0:
                found[f"tp{tp} pp{pp} {mesh}"] = layouts.megatron_layout(spec, mesh, tp, pp)
    return found


def whole(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def parts_of(layout: Layout, rank: int, fill: bool, shapes: dict[str, tuple[int, ...]]) -> Parts:
    """This rank's parts: of the true values, or of none."""
    made: dict[str, list[tuple[Any, Tensor]]] = {}
    for name, boxes in layout.parts(rank).items():
        values = whole(name, shapes[name]) if fill else torch.full(shapes[name], math.nan)
        made[name] = [(box, values[tuple(slice(a, b) for a, b in box)].clone()) for box in boxes]
    return made


def main(folder: Path, options: dict[str, Any]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cluster = Cluster(**options["cluster"])
    spec = ModelSpec.from_config(CONFIG, "lm", bytes_per_element=4)
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    dtypes = dict.fromkeys(shapes, torch.float32)
    found = candidates(spec, world)
    pairs = [tuple(options["only"])] if "only" in options else sorted(itertools.product(found, found))
    step = max(1, len(pairs) // options.get("pairs", 1))
    rows = []
    for source, target in pairs[::step]:
        schedule = make_schedule(cluster, found[source], found[target])
        how = TransferOptions(options.get("bucket_bytes", 1 << 14), options.get("timeout_s", 30.0))
        name, cpu = f"{source} -> {target}", torch.device("cpu")
        moving = Transfer(name, schedule, rank, dist.group.WORLD, cpu, dtypes, how)
        held, wanted = parts_of(found[source], rank, True, shapes), parts_of(found[target], rank, False, shapes)
        lost = options.get("dies", options.get("sleeps"))
        if lost is not None:
            dist.barrier()  # none is lost before all are connected
        if options.get("dies") == rank:
            os._exit(9)
        if options.get("sleeps") == rank:
            time.sleep(1000)
        started = time.monotonic()
        try:
            for _ in moving.run(held, lambda names, at=wanted: {name: at[name] for name in names if name in at}):
                pass
        except RuntimeError as error:
            (folder / f"error-{rank}.json").write_text(json.dumps([time.monotonic() - started, str(error)]))
            os._exit(1)
        right = all(
            torch.equal(tensor, whole(name, shapes[name])[tuple(slice(a, b) for a, b in box)])
            for name, cells in wanted.items()
            for box, tensor in cells
        )
        told: list[Any] = [None] * world
        dist.all_gather_object(told, (moving.sent_bytes, right))
        rows.append(
            {
                "pair": f"{source} -> {target}",
                "sent": sum(sent for sent, _ in told),
                "scheduled": sum(map(schedule.sent, range(world))),
                "right": all(right for _, right in told),
            }
        )
    if rank == 0:
        (folder / "pairs.json").write_text(json.dumps(rows))
    dist.barrier()  # none closes its connections while another still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
