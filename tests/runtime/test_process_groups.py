"""Process groups of a plan, as one process can see them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.process_groups import make_groups, make_reallocation_groups, make_split_groups


def test_every_group_has_the_time_limit_of_the_config() -> None:
    plan, limit = flatten(Cluster(1, 1)), timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups, control = make_groups(plan, 0, limit)
        assert not make_split_groups(plan, 0, limit) and not make_reallocation_groups(plan, 0, limit)
        made = [group for group in (*(mesh.group for mesh in groups.values()), control) if group is not None]
        limits = {group._get_backend(torch.device("cpu")).options._timeout for group in made}
        assert limits == {limit}
    finally:
        dist.destroy_process_group()
