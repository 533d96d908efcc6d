"""A rank whose loop asks for calls with samples of its own: once for each plan and case, on models of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from trainer_driven import GRAPH, drive, start

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import resolve_plan
from trl_realloc.plan.streams import Streams


def main() -> None:
    """The options are, by name, a plan, whether it streams, the number of samples of rank 0, and the rank that takes a
    second turn."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, (plan, streams, first, turns) in cases.items():
        made = resolve_plan(plan, Cluster(1, 2), generation_engine="transformers", graph=GRAPH)
        made = replace(made, streams=Streams() if streams else None)
        calls = start(made, rank)
        own = slice(None, first) if rank == 0 else slice(first, None)
        torch.save(drive(calls, own, turns == rank), folder / f"{name} {rank}")
        calls.executor.channels.flush()
        dist.barrier()
        calls.executor.placement.close()


if __name__ == "__main__":
    main()
