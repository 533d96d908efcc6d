"""Mixtures whose experts are divided over the ranks, against whole models and against the planner's estimate of memory,
over random splits.

    python benchmarks/experts_slices.py [--plans 10] [--seed 0] [FAMILY ...]

`slices` gives these columns of `experts.py`. Each plan draws the ranks (2 or 4), tp, pp, the number of experts and
those of a token, ZeRO stage 1, checkpointing, the tokens of a micro-batch, and whether the samples have routes, which
are replayed. Small models train two steps in float32 and score (`tests/multiprocess/split.py`).

- `slices_difference`: the largest difference of log-probabilities, entropies, the norm of the gradient, parameters, and
  the optimizer's state, also after a resumption.
- `slices_aux_difference`: the largest difference of the auxiliary loss before the first step, relative. Models train
  with it; GLM-4 has none.
- `memory_difference`: the largest difference of the fullest rank's memory from the estimate, as a share of it. The
  memory is that of all tensors right before the second optimizer step, when activations are gone. The estimate is what
  the planner counts then: parameters, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import result_file


sys.path.append(str(result_file.ROOT / "tests"))

import mixtures

from trl_realloc.engines.training.expert_routing import BALANCED_FAMILIES


SCRIPT = result_file.ROOT / "tests" / "multiprocess" / "split.py"
FOLDERS = ("", "tests", "tests/trainer", "tests/engines", "tests/multiprocess")
EXACT = ("files unlike save_pretrained's", "bits lost in loading", "other recorded routes")  # counts, which are 0


def slices(families: Sequence[str], plans: int = 10, seed: int = 0) -> dict[str, dict[str, float]]:
    """The columns of each family, over so many random plans.

    Raises:
        RuntimeError: a launch failed, a saved or loaded model was not bitwise the same, or the ranks recorded other
            routes than the whole model.
    """
    cases: dict[int, dict[str, Any]] = {2: {}, 4: {}}
    for family in families:
        draw = random.Random(f"{seed} {family}")
        for plan in range(plans):
            ranks, case = _case(draw, family)
            cases[ranks][f"{family}, plan {plan}"] = case
    largest = {family: {"slices_difference": 0.0, "memory_difference": 0.0} for family in families}
    for ranks, drawn in cases.items():
        for name, gaps in _launched(ranks, drawn).items():
            for what in EXACT:
                if gaps.pop(what, 0.0):
                    raise RuntimeError(f"{name}: there are {what}: {drawn[name]}")
            row = largest[name.partition(",")[0]]
            row["memory_difference"] = max(row["memory_difference"], gaps.pop("memory"))
            if "auxiliary loss" in gaps:
                aux_difference = gaps.pop("auxiliary loss")
                row["slices_aux_difference"] = max(row.get("slices_aux_difference", 0.0), aux_difference)
            row["slices_difference"] = max(row["slices_difference"], *gaps.values())
    return largest


def _case(draw: random.Random, family: str) -> tuple[int, dict[str, Any]]:
    ranks = draw.choice([2, 4])
    tp = draw.choice([n for n in (2, 4) if n <= ranks])
    sizes = mixtures.Sizes(
        hidden=32,
        heads=4,
        kv_heads=4,
        experts=draw.choice([3, 5, 6, 8]),
        chosen=draw.choice([1, 2, 3]),
        layers=draw.choice([2, 3]),
        width=64,
        vocabulary=131,
        positions=64,
        scale=0.02,
    )
    config = {**mixtures.settings(family, sizes), "num_labels": 1}
    case = {
        "family": family,
        "tp": tp,
        "pp": draw.choice([1, ranks // tp]),
        "config": config,
        "shard_size": "1GB",
        "memory": True,
    }
    if family in BALANCED_FAMILIES:
        case["auxiliary"] = 0.5
    settings = {"shard": draw.random() < 0.5, "checkpointing": draw.random() < 0.5, "tokens": draw.choice([40, 60])}
    return ranks, {**case, **settings, "routes": draw.random() < 0.5}


def _launched(ranks: int, cases: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The differences of each case, of one launch of `split.py`."""
    if not cases:
        return {}
    paths = os.pathsep.join(str(result_file.ROOT / folder) for folder in FOLDERS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, str(SCRIPT), folder, json.dumps({"cases": cases})]
        made = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise RuntimeError(f"{ranks} ranks ended with exit status {made.returncode}: {made.stderr[-2000:]}")
        return {name: json.loads((Path(folder) / f"{name}.json").read_text())["policy"] for name in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "families", nargs="*", default=tuple(mixtures.FAMILIES), metavar="FAMILY", help="by default all"
    )
    parser.add_argument("--plans", type=int, default=10, help="random plans of each family")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for family, row in slices(arguments.families, arguments.plans, arguments.seed).items():
        print(f"{family}: {row['slices_difference']:.2g}, memory {row['memory_difference']:.1%}")


if __name__ == "__main__":
    main()
