"""A rank that writes what it knows of its job: `cluster_rank.py [--local_rank=N] FOLDER`, under any launcher."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import PartialState

from trl_realloc.runtime.launch.hosts import all_processes, cluster_of


def main() -> None:
    processes = all_processes()
    state = PartialState(cpu=True, backend="gloo")
    cluster = cluster_of(processes)
    known = {
        "cluster": [cluster.nodes, cluster.devices_per_node],
        "local_ranks": [process.local_rank for process in processes],
        "rank": [dist.get_rank(), state.process_index, state.local_process_index],
        "size": [dist.get_world_size(), state.num_processes],
    }
    Path(sys.argv[-1], f"{os.environ['RANK']}.json").write_text(json.dumps(known))
    # a rank that is connected may end before the other sees it, which then sees a connection that was lost
    dist.barrier()
    dist.destroy_process_group()


main()
