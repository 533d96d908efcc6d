"""Two ranks, of which one waits for the other longer than `ddp_timeout` allows a message to take: for samples, for a
number that the ranks of a mesh agree on, for parameters, and for the rewards of a judge. What it received is written to
the folder."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.runtime.messages import GlooMessages, all_reduce
from trl_realloc.runtime.process_groups import barrier, make_groups, make_reallocation_groups
from trl_realloc.trainer.policy.rewards import followed_by


TAG, TIMEOUT_S = 7, 1.0


def gathered_rewards(rank: int, control: Any, judge: Callable[..., Any]) -> list[float]:
    """The rewards of both ranks as TRL makes them: it calls the functions, and gathers by the devices' group."""

    def length(**given: Any) -> list[float]:
        return [2.0]

    rewards = followed_by([length, judge], "update 1", lambda said: None, lambda: barrier(control))
    answers = [reward(prompts=[rank]) for reward in rewards]
    own = torch.tensor([asyncio.run(answer)[0] if asyncio.iscoroutine(answer) else answer[0] for answer in answers])
    of_all = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(of_all, own)
    return torch.cat(of_all).tolist()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    limit = timedelta(seconds=TIMEOUT_S)
    groups, control = make_groups(flatten(Cluster(1, 2)), rank, limit)
    apart = separate(Cluster(1, 2))
    edges = make_reallocation_groups(apart, rank, limit)
    barrier(control)  # the ranks may have begun at different times
    messages, received = GlooMessages(control), dict[str, Any]()

    def late() -> None:
        if rank:
            time.sleep(1.5 * TIMEOUT_S)

    async def judge(**given: Any) -> list[float]:
        late()
        return [float(rank)]

    late()
    if rank:
        messages.send(b"samples", 0, TAG)
        messages.flush()
    else:
        received["samples"] = messages.receive(1, TAG).decode()
    late()
    received["largest"] = groups[DeviceMesh(0, 2)].max(rank)
    late()
    edge = next(iter(edges.values()))
    of_edge = GlooMessages(edge.control)
    received["version"] = all_reduce(of_edge, edge.ranks, rank, rank, max, TAG)
    of_edge.flush()
    received["rewards"] = gathered_rewards(rank, control, judge)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(received))
    barrier(control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
