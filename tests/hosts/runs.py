"""A rank of several short runs, one after the other in one job: what each logged is written by rank 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny
import torch.distributed as dist


def main() -> None:
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, options in runs.items():
        made = tiny.trainer(folder / name, **options)
        made.train()
        if dist.get_rank() == 0:
            cluster = made.plan.cluster
            found = {"updates": tiny.updates(made), "cluster": [cluster.nodes, cluster.devices_per_node]}
            (folder / f"{name}.json").write_text(json.dumps(found))
        made.close()


if __name__ == "__main__":
    main()
