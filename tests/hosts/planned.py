"""A rank of a job that is planned twice; between the two the test changes the network. Rank 0 writes what the planner
saw."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import tiny
import torch.distributed as dist

from trl_realloc.planner.measured_rates import MeasuredRates
from trl_realloc.profiling import profile_cache as cache


def main() -> None:
    folder = Path(sys.argv[1])
    measured: list[int] = []
    measure = cache.measure
    cache.measure = lambda *given: measured.append(1) or measure(*given)
    for name in ("before", "after"):
        options = {"plan": "auto", "per_device_train_batch_size": 4, "response_length": 6, "max_steps": 1}
        made = tiny.trainer(folder / name, given={"reward_model": tiny.classifier(2)}, **options)
        planned = made.setup.job_plan
        if dist.get_rank() == 0:
            told = {"measured": len(measured), "bandwidth": MeasuredRates(planned.profile).between.bandwidth}
            told |= {"plan": planned.plan.to_dict(), "about": dict(planned.profile.about)}
            (folder / "partial").write_text(json.dumps(told))
            (folder / "partial").rename(folder / f"{name}.json")
        made.close()
        while name == "before" and not (folder / "changed").exists():
            time.sleep(0.1)
        dist.barrier()


if __name__ == "__main__":
    main()
