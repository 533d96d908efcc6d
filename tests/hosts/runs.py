"""A rank of several short runs, one after the other in one job: what came of each is written on every host."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiny
import torch.distributed as dist

from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.profiling import profile_cache
from trl_realloc.trainer.checkpoint import CheckpointError


@dataclass
class Outcome:
    """Of one run.

    Args:
        cluster: nodes, and devices of each.
        updates: what it logged.
        refused: why it did not begin.
        measurements: how often models were measured for a planned one. bandwidth: between hosts as the planner sees
            it, in bytes/s. network: what it calls the network.
    """

    cluster: tuple[int, int]
    updates: list[dict[str, float]]
    refused: str = ""
    measurements: int = 0
    bandwidth: float = 0.0
    network: str = ""


def _run(folder: Path, options: dict[str, Any]) -> Outcome:
    measured: list[None] = []
    measure = profile_cache.measure
    profile_cache.measure = lambda *given, **named: measured.append(None) or measure(*given, **named)
    resume = options.pop("resume", None)
    made = tiny.trainer(folder, **options)
    profile_cache.measure = measure
    refused = ""
    try:
        made.train(resume_from_checkpoint=resume)
    except CheckpointError as error:
        refused = str(error)
    cluster = (made.plan.cluster.nodes, made.plan.cluster.devices_per_node)
    outcome = Outcome(cluster, tiny.updates(made), refused, len(measured))
    if options["plan"] == "auto":
        profile = made.setup.job_plan.profile
        outcome.bandwidth, outcome.network = MeasuredRates(profile).between.bandwidth, profile.about["network"]
    made.close()
    return outcome


def main() -> None:
    os.environ["TRL_REALLOC_MEASURE"] = "first"
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    outcomes = {name: asdict(_run(folder / name, options)) for name, options in runs.items()}
    if os.environ["LOCAL_RANK"] == "0":
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
    dist.barrier()


if __name__ == "__main__":
    main()
