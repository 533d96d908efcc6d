"""Two ranks, of which one waits for the other's samples longer than `ddp_timeout` allows a message to take. What it
receives is written to the folder."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.messages import GlooMessages
from trl_realloc.runtime.process_groups import make_groups


TAG, TIMEOUT_S = 7, 1.0


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    _, control = make_groups(flatten(Cluster(1, 2)), rank, timedelta(seconds=TIMEOUT_S))
    messages = GlooMessages(control)
    if rank:
        time.sleep(3 * TIMEOUT_S)
        messages.send(b"samples", 0, TAG)
        messages.flush()
    else:
        (Path(sys.argv[1]) / "0.txt").write_bytes(messages.receive(1, TAG))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
