"""A rank that runs ReMax under a plan, whole and call by call, and once with a reward that fails. Rank 0 writes what
came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from remax import GRAPH, call_by_call, learned, place, prompts, whole_run

from trl_realloc.algorithms.rewards import FunctionReward
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.failures.alarm import JobFailed


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plan = ExecutionPlan.from_dict({"graph": GRAPH.to_dict(), **options["plan"]})
    works: dict[str, Callable[[Executor], Rollouts]] = {"whole": whole_run, "driven": call_by_call}
    for name, work in works.items():
        executor = place(plan, rank)
        samples = work(executor)
        if rank == 0:
            torch.save(
                (dict(samples.only(("responses", "greedy_responses", "scores", "baselines"))), learned(executor)),
                folder / name,
            )
        executor.channels.flush()
        dist.barrier()
        executor.placement.close()
    (folder / f"said-{rank}.txt").write_text(failing(place(plan, rank)))
    dist.barrier()


def failing(executor: Executor) -> str:
    """What the rank is told of a reward function that fails on one sample's rank; then one that works again."""
    function = executor.runner.settings.functions[0]

    def fails(completions: list[str], **columns: object) -> list[float]:
        raise ValueError("no reward today")

    settings = executor.runner.settings
    executor.runner.settings = type(settings)(**{**vars(settings), "functions": [FunctionReward(fails, "even")]})
    try:
        executor.run(prompts(), 0, {Role.ACTOR: 0.1})
    except JobFailed as error:
        said = f"{error.is_recoverable} {error}"
    executor.runner.settings = type(settings)(**{**vars(settings), "functions": [function]})
    metrics = executor.run(prompts(), 0, {Role.ACTOR: 0.1}).metrics
    executor.channels.flush()
    return f"{said}\n{json.dumps(metrics)}"


if __name__ == "__main__":
    main()
