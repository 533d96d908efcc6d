"""A rank of four on "two nodes" that are one machine: what is measured of links, of devices that share processors, and
of models that are measured shallower than they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.profiling import profile_cache as cache
from trl_realloc.profiling.job_models import JobModels, specs_of
from trl_realloc.profiling.machine import links, sharing
from trl_realloc.trainer.accelerate_plugin import ReallocationPlugin
from trl_realloc.trainer.ppo_config import PPOConfig
from trl_realloc.trainer.run.job_builder import ppo_job


DEPTH = 6


def config() -> Any:
    return tiny.config(num_hidden_layers=DEPTH, num_labels=1)


def main(folder: Path, options: dict[str, Any]) -> None:
    args = PPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
    args.device  # noqa: B018 - makes the process group
    rank, cpu = dist.get_rank(), torch.device("cpu")
    configs = {role: [config()] for role in Role}
    models = JobModels(configs, specs_of(configs))
    whole = models.specs["actor.train"][0]
    cache.MAX_ELEMENTS = int(whole.elements - 3 * whole.layer_elements)  # three of the six layers
    cluster = Cluster(1, 4, memory_gb=8.0)  # so that ZeRO stages are candidates
    lengths = {"prompt_tokens": 4, "context_length": 16, "pad_token_id": 0}
    job = ppo_job(args, ReallocationPlugin(), cluster, rank, "transformers", models, **lengths)
    profile = cache.measure(job)
    nodes = Cluster(2, 2)
    groups = len(dist.distributed_c10d._world.pg_map)
    seen = links(nodes, cpu)
    assert len(dist.distributed_c10d._world.pg_map) == groups, "no group is kept"

    def work() -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)

    shared = sharing(lambda: work, nodes, rank, cpu)
    assert shared is not None, "CPU ranks share"
    rates = MeasuredRates(profile)
    told = {
        "links": [[row.work, row.devices, row.far, row.seconds] for row in seen],
        "slower": shared.slower,
        "depths": sorted({row.layers for row in profile.observations if row.work in ("forward", "train", "generate")}),
        "kept": [rates.kept(whole, tokens, tokens * 8.0) for tokens in (10.0, 20.0)],
        "knows": [rates.measured(whole, tp, pp, generates) for tp, pp, generates in options["asked"]],
        "layer": rates.layer(whole, 100, 1000, 1),
        "stages": sorted({(row.work, row.zero_stage) for row in profile.observations if row.zero_stage}),
        "zero": [rates.zero(stage, trains=True) for stage in (1, 2, 3)] + [rates.zero(3, trains=False)],
    }
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
