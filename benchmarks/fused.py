"""Makespan, memory and search time of schedules for two fused training pipelines, beside their lower bounds.

    python benchmarks/fused.py [--cases FILE.csv] [--json FILE] [--schedules DIR]

The columns of a case are `pp_a,pp_b,micro_a,micro_b,forward_a,forward_b,memory_a,memory_b`: stages, micro-batches of
one copy of the pipeline, and forward time and activation memory of a micro-batch on a stage. A backward takes two
forwards. Other columns are printed as they are. Without `--cases` the cases are RLHFuse's (arXiv 2409.13221), with the
time of both models one after the other and with what its search reached.

    python benchmarks/fused.py --like-published 40 [--json FILE]
    python benchmarks/fused.py --random 40 [--unequal] [--json FILE]
    python benchmarks/fused.py --small 2000 [--json FILE]
    python benchmarks/fused.py --in-a-run [--json FILE]
    python benchmarks/fused.py --measured [--json FILE]

try random cases: of RLHFuse's kind (`like_published`); of 2 to 16 stages and any number of micro-batches, with
`--unequal` with other times on every stage and for every micro-batch; small ones, compared with an exhaustive search;
or measure the search with the effort that a run gives it. One core. Before the first case the search is compiled, if
this was not done in an earlier run; its time is not part of a case's.

The last trains two pipelines on 2 and 4 gloo processes, fused and one after the other (`fused_measured`). Each of these
is a section of its own in the file: `rows` of the cases, `like_published`, `random`, `random_unequal`, `small`,
`in_a_run`, `measured`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "planner")]

import result_file  # noqa: E402
from fused_cases import exists, random_small  # noqa: E402
from fused_measured import measured  # noqa: E402

from trl_realloc.common.errors import PlanError  # noqa: E402
from trl_realloc.planner.fused.check import MOST_MEMORY, check, memory_limit, serial_memory, serial_time  # noqa: E402
from trl_realloc.planner.fused.pipelines import FusedPipelines, Pipeline, from_json, to_json  # noqa: E402
from trl_realloc.planner.fused.schedule_search import FoundSchedule, compile_search, search  # noqa: E402
from trl_realloc.runtime.fused.orders import LEAST_EFFORT, MOST_EFFORT  # noqa: E402


PUBLISHED = ROOT / "benchmarks" / "papers" / "rlhfuse.csv"
COUNTS = ("pp_a", "pp_b", "micro_a", "micro_b")
COLUMNS = (*COUNTS, "forward_a", "forward_b", "memory_a", "memory_b")
STAGES = (
    (2, 2),
    (2, 1),
    (4, 4),
    (4, 2),
    (2, 4),
    (6, 3),
    (8, 8),
    (8, 4),
    (8, 2),
    (4, 8),
    (12, 6),
    (12, 12),
    (16, 4),
    (16, 8),
)
LIKE_PUBLISHED = (
    (4, 4),
    (4, 2),
    (6, 6),
    (6, 3),
    (8, 8),
    (8, 4),
    (8, 2),
    (12, 12),
    (12, 6),
    (12, 4),
    (16, 16),
    (16, 8),
    (16, 4),
)
IN_A_RUN = (
    ((2, 2), (8, 8)),
    ((4, 4), (8, 8)),
    ((4, 4), (32, 32)),
    ((8, 4), (16, 8)),
    ((8, 8), (32, 32)),
    ((16, 16), (32, 32)),
    ((16, 16), (128, 128)),
)  # stages and micro-batches
SMALL_EFFORT = 500_000  # tasks placed
RESTARTS = 1  # of a search above the bound


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV as numbers, further columns as text."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path} lacks the columns {', '.join(missing)}.")
        return [_numbers(path, number, row) for number, row in enumerate(reader, 2)]


def _numbers(path: Path, line: int, row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        numbers = {column: (int if column in COUNTS else float)(row[column]) for column in COLUMNS}
    except (ValueError, TypeError) as error:
        raise SystemExit(f"{path}, line {line}: {error}.") from error
    return {**numbers, **{key: value for key, value in row.items() if key and key not in COLUMNS}}


def cases_like_published(count: int, seed: int) -> list[dict[str, Any]]:
    """Cases of RLHFuse's kind: 4 to 16 stages, one, two or four micro-batches of A for each stage, as many
    micro-batches for a stage of B, forwards of 1 to 6 and memory of 1 to 3."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        pp = LIKE_PUBLISHED[rng.integers(len(LIKE_PUBLISHED))]
        rounds = int(rng.choice((1, 2, 4)))
        forward, memory = rng.integers(1, 7, 2), rng.integers(100, 301, 2) / 100
        values = [*pp, *(rounds * stages for stages in pp), *map(float, forward), *map(float, memory)]
        cases.append(dict(zip(COLUMNS, values, strict=True)))
    return cases


def random_cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Cases with from half as many to four times as many micro-batches as stages."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        pp = STAGES[rng.integers(len(STAGES))]
        micro = [int(max(1, round(stages * 2.0 ** rng.uniform(-1, 2)))) for stages in pp]
        forward, memory = rng.integers(1, 7, 2), rng.integers(10, 31, 2) / 10
        cases.append(dict(zip(COLUMNS, [*pp, *micro, *map(float, forward), *map(float, memory)], strict=True)))
    return cases


def pipelines_of(case: Mapping[str, Any]) -> FusedPipelines:
    pairs = [(case[f"{name}_a"], case[f"{name}_b"]) for name in ("pp", "micro", "forward", "memory")]
    return FusedPipelines.uniform(*pairs)


def uneven(pipelines: FusedPipelines, seed: int) -> FusedPipelines:
    """The same pipelines with stages up to a fifth slower or faster, and micro-batches between 0.5 and 1.5 times as
    long, in time and memory."""
    rng = np.random.default_rng(seed)
    changed = []
    for pipeline in (pipelines.a, pipelines.b):
        copies, micro_batches, stages = pipeline.forward.shape
        length = rng.uniform(0.5, 1.5, (copies, micro_batches, 1))
        time_factor = length * rng.uniform(0.8, 1.2, (copies, 1, stages))
        changed.append(
            Pipeline(pipeline.forward * time_factor, pipeline.backward * time_factor, pipeline.memory * length)
        )
    return FusedPipelines(changed[0], changed[1])


def measure(case: Mapping[str, Any], pipelines: FusedPipelines, seed: int) -> tuple[dict[str, Any], FoundSchedule]:
    begun, cpu_begun = time.perf_counter(), time.process_time()
    found = search(pipelines, seed, restarts=RESTARTS)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    return {
        **case,
        "serial": round(serial_time(pipelines), 6),
        "makespan": round(found.simulated.makespan, 6),
        "bound": round(found.bound, 6),
        "on_bound": found.on_bound,
        "memory_ratio": round(found.simulated.memory_peak / serial_memory(pipelines), 4),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
    }, found


def search_in_a_run(seed: int) -> Iterator[dict[str, Any]]:
    """CPU seconds of a search with the least and the most effort that a run gives it, and how far it is from the
    bound."""
    for stages, micro_batches in IN_A_RUN:
        for is_unequal in (False, True):
            pipelines = FusedPipelines.uniform(stages, micro_batches, (5, 4), (2, 1.5))
            pipelines = uneven(pipelines, seed) if is_unequal else pipelines
            pipelines = replace(pipelines, memory_limit=(memory_limit(pipelines),) * pipelines.stages)
            row: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches, "unequal": is_unequal}
            row["tasks"] = 2 * (pipelines.a.forward.size + pipelines.b.forward.size)
            for name, effort in (("least", LEAST_EFFORT), ("most", MOST_EFFORT)):
                begun = time.process_time()
                found = search(pipelines, seed, effort)
                row[f"{name}_seconds"] = round(time.process_time() - begun, 3)
                row[f"{name}_to_bound"] = round(found.simulated.makespan / found.bound, 4)
            yield row


def write_schedule(path: Path, pipelines: FusedPipelines, found: FoundSchedule) -> None:
    text = to_json(
        pipelines, found.schedule, makespan=found.simulated.makespan, memory_peak=found.simulated.memory_peak
    )
    check(*from_json(text))
    path.write_text(text, encoding="utf-8")


def measure_small(count: int, seed: int) -> dict[str, Any]:
    """Random small cases whose makespan, or at the best makespan memory, is not the least that there is: `slower` and
    `more_memory` with `SMALL_EFFORT`; of these, those that are so with the search's own effort too."""
    rng = np.random.default_rng(seed)
    missed: dict[str, list[int]] = {kind: [] for kind in ("slower", "more_memory")}
    missed_again: dict[str, list[int]] = {kind: [] for kind in missed}
    on_bound, begun = 0, time.perf_counter()
    for number in range(count):
        pipelines = random_small(rng)
        found = search(pipelines, effort=SMALL_EFFORT)
        on_bound += found.on_bound
        if kind := _missed(pipelines, found):
            missed[kind].append(number)
            if kind := _missed(pipelines, search(pipelines)):
                missed_again[kind].append(number)
    again = {f"{kind}_at_full_effort": numbers for kind, numbers in missed_again.items()}
    seconds = round(time.perf_counter() - begun, 1)
    return {"cases": count, "effort": SMALL_EFFORT, "on_bound": on_bound, **missed, **again, "seconds": seconds}


def _missed(pipelines: FusedPipelines, found: FoundSchedule) -> str:
    """What of a schedule is more than the least; empty if nothing is. Times and memory are whole numbers."""
    makespan, peak = found.simulated.makespan, found.simulated.memory_peak
    limit = pipelines.memory_limit or (np.inf,) * pipelines.stages
    if not found.on_bound and exists(pipelines, makespan - 1, limit):
        return "slower"
    return "more_memory" if exists(pipelines, makespan, tuple(min(most, peak - 1) for most in limit)) else ""


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys)
    for row in rows:
        table.add_row(*(f"{row.get(key, '')!s}" for key in keys))
    Console(width=max(120, 12 * len(keys))).print(table)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(rows)
    reached = sum(row["on_bound"] for row in rows)
    lean = [row["on_bound"] for row in rows if row["memory_ratio"] <= MOST_MEMORY]
    print(
        f"{len(rows)} cases: {reached} on the bound, the others at most "
        f"{100 * max((row['makespan'] / row['bound'] - 1 for row in rows), default=0):.2f} % above; "
        f"{len(lean)} with at most {MOST_MEMORY:g} times 1F1B's memory, of these {sum(lean)} on the bound; "
        f"at most {max((row['seconds'] for row in rows), default=0)} s."
    )


def rows_of(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if given.like_published:
        cases = cases_like_published(given.like_published, given.seed)
    else:
        cases = random_cases(given.random, given.seed) if given.random else read_cases(given.cases)
    compile_search()
    for number, case in enumerate(cases):
        try:
            pipelines = pipelines_of(case)
        except PlanError as error:
            raise SystemExit(f"Case {number + 1}: {error}") from error
        row, found = measure(case, uneven(pipelines, number) if given.unequal else pipelines, given.seed)
        if given.schedules:
            given.schedules.mkdir(parents=True, exist_ok=True)
            shown = uneven(pipelines, number) if given.unequal else pipelines
            write_schedule(given.schedules / f"case-{number + 1}.json", shown, found)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=PUBLISHED)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--schedules", type=Path, help="folder for each case's schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--like-published", type=int, default=0, metavar="N", help="so many of RLHFuse's kind instead")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random cases instead")
    parser.add_argument("--unequal", action="store_true", help="stages and micro-batches of unequal times")
    parser.add_argument("--small", type=int, default=0, metavar="N", help="so many small cases, all orders tried")
    parser.add_argument("--measured", action="store_true", help="train fused and one after the other on gloo processes")
    parser.add_argument("--in-a-run", action="store_true", help="seconds of the search with a run's effort")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if given.measured:
        result["measured"] = measured()
        print_table(result["measured"])
    elif given.in_a_run:
        compile_search()
        result["in_a_run"] = list(search_in_a_run(given.seed))
        print(*map(json.dumps, result["in_a_run"]), sep="\n")
    elif given.small:
        result["small"] = measure_small(given.small, given.seed)
        print(json.dumps(result["small"]))
    else:
        section = "like_published" if given.like_published else "random" if given.random else "rows"
        section += "_unequal" if given.unequal else ""
        result[section] = list(rows_of(given))
        print_rows(result[section])
    if given.json:
        result_file.merge(given.json, result)


if __name__ == "__main__":
    main()
