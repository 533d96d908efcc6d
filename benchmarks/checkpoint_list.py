"""Seconds in which the ranks of a large run divide the chunks of a checkpoint's training state and write the list of
them: by this package, and by torch.distributed.checkpoint's own planner (DCP).

    python benchmarks/checkpoint_list.py --json benchmarks/results/checkpoint_list.json

A policy and a critic of 70 billion parameters under ZeRO-3, with tensors that have no memory. What rank 0 does for all
is measured in one process: reading what the ranks send (pickled, as `gather_object` does), dividing, writing to the
ranks, and the list. Nothing is sent, and what is written are no tensors.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import result_file
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from trl_realloc.engines.training_state import StateTensor, TensorSpec, flat_cells
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.trainer.checkpoint.chunk_division import Chunks, Division, without_collection
from trl_realloc.trainer.checkpoint.chunk_plans import Saving
from trl_realloc.trainer.checkpoint.state_storage import Reader, Writer, file_of


CONFIG = Path(__file__).resolve().parents[1] / "recipes" / "llama-70b" / "Llama-3.1-70B-Instruct" / "config.json"
KEYS = ("master", "exp_avg", "exp_avg_sq")


def plan_of(role: str, spec: ModelSpec, rank: int, ranks: int) -> SavePlan:
    """What a rank of a role's mesh could write: its range of every flattened parameter."""
    entries: dict[str, Any] = {}
    for parameter in spec.parameters:
        shape, elements = tuple(parameter.shape), prod(parameter.shape)
        part = -(-elements // ranks)
        flat = torch.empty(max(0, min(part, elements - rank * part)), device="meta")
        cells = flat_cells(shape, rank * part, flat)
        entries |= {
            f"{role}/{parameter.name}/{key}": StateTensor(TensorSpec(shape, torch.float32), cells) for key in KEYS
        }
        entries[f"{role}/{parameter.name}/scalars"] = {"step": 1}
    return Saving(entries).create_local_plan()


class Seconds:
    """The seconds of each phase, in order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def of(self, way: str, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.rows.append({"way": way, "phase": phase, "seconds": round(time.perf_counter() - start, 1)})
        print(f"{way:12s} {phase:42s} {self.rows[-1]['seconds']:7.1f} s", flush=True)


def through_pickle(values: list[Any]) -> list[Any]:
    return [pickle.loads(pickle.dumps(value)) for value in values]


def ours(plans: list[SavePlan], seconds: Seconds, folder: Path) -> None:
    with without_collection():
        with seconds.of("trl_realloc", "what the ranks have"):
            chunks = through_pickle([Chunks.of(plan) for plan in plans])
        with seconds.of("trl_realloc", "dividing it"):
            division = Division.of(chunks)
        with seconds.of("trl_realloc", "what each rank writes"):
            kept = through_pickle(list(division.kept))
        lengths = [np.full(len(rank_values), 1, dtype=np.int64) for rank_values in kept]
        with seconds.of("trl_realloc", "where it was written"):
            results = division.results(through_pickle(lengths), [file_of(rank) for rank in range(len(plans))])
        with seconds.of("trl_realloc", "writing the list"):
            Writer(folder, 0).finish(division.metadata, results)


def dcps(plans: list[SavePlan], seconds: Seconds, folder: Path, results: Callable[[], Any]) -> None:
    planner, writer = Saving({}), FileSystemWriter(folder)
    with seconds.of("DCP", "what the ranks have"):
        per_rank = through_pickle(plans)
    with seconds.of("DCP", "dividing it"):
        divided, metadata = planner.create_global_plan(per_rank)
    with seconds.of("DCP", "what each rank writes"):
        through_pickle(writer.prepare_global_plan(divided))
    found = results()
    with seconds.of("DCP", "where it was written"):
        through_pickle(found)
    with seconds.of("DCP", "writing the list"):
        writer.finish(metadata, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--actor", type=int, default=88, help="ranks of the policy")
    parser.add_argument("--critic", type=int, default=40, help="ranks of the critic")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = json.loads(CONFIG.read_text())
    plans = []
    for role, head, ranks in (("policy", "lm", args.actor), ("critic", "score", args.critic)):
        spec = ModelSpec.from_config(config, bytes_per_element=4, head=head)
        plans += [plan_of(role, spec, rank, ranks) for rank in range(ranks)]
    print(f"{sum(len(plan.items) for plan in plans):,} chunks on {len(plans)} ranks")
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "training_state"
        folder.mkdir()
        ours(plans, seconds, folder)
        megabytes = (folder / ".metadata").stat().st_size / 1e6
        with seconds.of("trl_realloc", "reading the list, on every rank that resumes"):
            Reader(Path(made)).read_metadata()

        def results() -> Any:
            division = Division.of([Chunks.of(plan) for plan in plans])
            lengths = [np.ones(len(rank_values), dtype=np.int64) for rank_values in division.kept]
            return division.results(lengths, [file_of(rank) for rank in range(len(plans))])

        dcps(plans, seconds, folder, results)
    print(f"the list has {megabytes:.0f} MB")
    if args.json:
        chunks = sum(len(plan.items) for plan in plans)
        about = {"ranks": len(plans), "chunks": chunks, "list_mb": round(megabytes)}
        result_file.write(args.json, {**result_file.about(), **about, "rows": seconds.rows})


if __name__ == "__main__":
    main()
