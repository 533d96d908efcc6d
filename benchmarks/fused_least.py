"""The least makespan of fused pipelines within a memory limit, by OR-tools' CP-SAT solver, to tell a search that misses
schedules from cases that have none.

    pip install ortools
    python benchmarks/fused_least.py --like-published 40 --numbers 18 36 39 [--seconds 600] [--json FILE]
    python benchmarks/fused_least.py --numbers 6 --memory inf [--json FILE]
    python benchmarks/fused_least.py --small 200 [--json FILE]

The cases are those of `fused.py --like-published`, by their numbers from 1 on, within `check.MOST_MEMORY` times
1F1B's memory, or within `--memory` times it. A row has what this package's search finds within that limit (`search`),
the least makespan that the solver has found (`least`) and the makespan below which it has shown that there is none
(`at_least`): where the two are equal, the least is proved. `--small` compares the solver with an exhaustive search on
random small cases, which tests its model.

Micro-batches of one model are alike, so they are taken to pass every stage in one order: of any schedule the k-th
forwards and backwards of all stages can be called those of micro-batch k. Times are whole numbers, so that starts are
whole numbers in some schedule of the least makespan.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "planner")]

import result_file  # noqa: E402
from fused import SMALL_EFFORT, cases_like_published, pipelines_of, print_table  # noqa: E402
from fused_cases import MOST_CHAINS, exists, memory_range  # noqa: E402

from trl_realloc.planner.fused.check import MOST_MEMORY, lower_bound, serial_memory  # noqa: E402
from trl_realloc.planner.fused.pipelines import MODELS, FusedPipelines  # noqa: E402
from trl_realloc.planner.fused.schedule_search import FoundSchedule, compile_search, search  # noqa: E402


WORKERS = 8  # of the solver, each with a way of its own; on two cores too this proves in minutes what two do not
GRAIN = 1000  # a whole number of these is a unit of memory
SMALL = ((2, 2), (2, 1), (3, 3), (4, 2))


def least_makespan(pipelines: FusedPipelines, hint: FoundSchedule, seconds: float) -> tuple[int, int]:
    """The least makespan that the solver finds within the pipelines' memory limit, and one below which there is none.

    Args:
        pipelines: of equal micro-batches with whole times. Without a memory limit every schedule counts.
        hint: a schedule within the limit, from which the solver starts.
        seconds: after which it ends, proved or not.
    """
    from ortools.sat.python import cp_model

    model, end = cp_model.CpModel(), int(hint.simulated.makespan)
    on_stage: list[list[Any]] = [[] for _ in range(pipelines.stages)]
    held: list[list[tuple[Any, int]]] = [[] for _ in range(pipelines.stages)]
    starts = {}
    makespan = model.new_int_var(0, end, "makespan")
    lines = [(of, copy) for of in MODELS for copy in range(pipelines.pipeline(of).copies)]
    for name, copy in lines:
        pipeline = pipelines.pipeline(name)
        route = list(pipelines.route(name, copy))
        seconds_of = {
            "forward": [int(of) for of in pipeline.forward[copy, 0]],
            "backward": [int(of) for of in pipeline.backward[copy, 0]],
        }
        memory = [round(float(of) * GRAIN) for of in pipeline.memory[copy, 0]]
        last = len(route) - 1
        for number in range(pipeline.micro_batches):
            for at, stage in enumerate(route):
                for kind, of_kind in seconds_of.items():
                    start = model.new_int_var(0, end - of_kind[at], "")
                    starts[name, copy, kind, number, at] = start
                    on_stage[stage].append(model.new_fixed_size_interval_var(start, of_kind[at], ""))
                    if number:
                        model.add(start >= starts[name, copy, kind, number - 1, at] + of_kind[at])
                if at:
                    before = starts[name, copy, "forward", number, at - 1] + seconds_of["forward"][at - 1]
                    model.add(starts[name, copy, "forward", number, at] >= before)
            for at in range(last, -1, -1):
                forward, backward = (starts[name, copy, kind, number, at] for kind in seconds_of)
                after = (
                    forward + seconds_of["forward"][at]
                    if at == last
                    else starts[name, copy, "backward", number, at + 1] + seconds_of["backward"][at + 1]
                )
                model.add(backward >= after)
                ended = backward + seconds_of["backward"][at]
                model.add(makespan >= ended)
                size = model.new_int_var(0, end, "")
                held[route[at]].append((model.new_interval_var(forward, size, ended, ""), memory[at]))
    for intervals_of_stage in on_stage:
        model.add_no_overlap(intervals_of_stage)
    for stage, limit in enumerate(pipelines.memory_limit or ()):
        intervals, demands = zip(*held[stage], strict=True)
        model.add_cumulative(intervals, demands, int(limit * GRAIN + 0.5))
    _hint(model, pipelines, hint, starts)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), "the hint is a schedule"
    return int(solver.objective_value), int(np.ceil(solver.best_objective_bound - 1e-6))


def _hint(model: Any, pipelines: FusedPipelines, hint: FoundSchedule, starts: dict[tuple[Any, ...], Any]) -> None:
    """Give the solver the starts of a schedule."""
    for stage, (tasks, times) in enumerate(zip(hint.schedule.stages, hint.simulated.starts, strict=True)):
        counts: dict[tuple[str, int, str], int] = {}
        for task, start in sorted(zip(tasks, times, strict=True), key=lambda row: row[1]):
            kind = task.model, task.copy, task.kind
            number = counts[kind] = counts.get(kind, -1) + 1
            at = list(pipelines.route(task.model, task.copy)).index(stage)
            model.add_hint(starts[*kind, number, at], int(start))


def rows_of(numbers: list[int], count: int, memory: float, seconds: float) -> Iterator[dict[str, Any]]:
    cases = cases_like_published(count, seed=0)
    for number in numbers:
        pipelines = pipelines_of(cases[number - 1])
        limit = memory * serial_memory(pipelines)
        limited = replace(pipelines, memory_limit=(limit,) * pipelines.stages if math.isfinite(limit) else None)
        found, begun = search(limited), time.perf_counter()
        least, at_least = least_makespan(limited, found, seconds)
        yield {
            "number": number,
            **cases[number - 1],
            "bound": lower_bound(pipelines),
            "search": found.simulated.makespan,
            "least": least,
            "at_least": at_least,
            "seconds": round(time.perf_counter() - begun, 1),
        }


def compare_small(count: int, seed: int) -> dict[str, Any]:
    """How often the solver's least makespan is not that of an exhaustive search."""
    rng, others, above = np.random.default_rng(seed), list[int](), 0
    for number in range(count):
        stages = SMALL[rng.integers(len(SMALL))]
        times, memory = rng.integers(1, 5, 2), rng.integers(1, 4, 2)
        copies = [max(stages) // own for own in stages]
        counts = rng.integers(1, 4, 2)
        while np.dot(counts, copies) > MOST_CHAINS[max(stages)]:
            counts = rng.integers(1, 4, 2)
        free = FusedPipelines.uniform(stages, tuple(map(int, counts)), tuple(times), tuple(memory))
        limit = tuple(float(rng.integers(low, high + 1)) for low, high in memory_range(free))
        limited = replace(free, memory_limit=limit)
        least, at_least = least_makespan(limited, search(limited, effort=SMALL_EFFORT), 60)
        above += least > lower_bound(limited)
        if least != at_least or exists(limited, least - 1, limit) or not exists(limited, least, limit):
            others.append(number)
    return {"cases": count, "above_the_bound": above, "other_than_exhaustive": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like-published", type=int, default=40, metavar="N", help="the cases, as of fused.py")
    parser.add_argument("--numbers", type=int, nargs="+", default=[18, 36, 39], help="of the cases, from 1")
    parser.add_argument("--memory", type=float, default=MOST_MEMORY, help="times that of 1F1B, or inf")
    parser.add_argument("--seconds", type=float, default=600, help="of the solver for each case")
    parser.add_argument("--small", type=int, default=0, metavar="N", help="so many small cases, all orders tried")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    compile_search()
    if given.small:
        result: dict[str, Any] = {"least_small": compare_small(given.small, 0)}
        print(json.dumps(result["least_small"]))
    else:
        name = "least" if given.memory == MOST_MEMORY else f"least_{given.memory:g}"
        result = {name: list(rows_of(given.numbers, given.like_published, given.memory, given.seconds))}
        print_table(result[name])
    if given.json:
        result_file.merge(given.json, result)


if __name__ == "__main__":
    main()
