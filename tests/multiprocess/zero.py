"""A rank of four that runs one training after another under ZeRO-3 on parts of the job, and writes what each logged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from moved import Forced
from test_plans import ZERO3, plan

from trl_realloc import PPOTrainer
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import separate


LAST = {"mesh": "2-3", "dp": 2, **ZERO3}
FIRST = {"mesh": "0-1", "dp": 2, **ZERO3}
# The actor's mesh does not begin at rank 0, and each of its two ranks generates in place.
APART = plan(
    4,
    changed={
        "actor.generate": {"mesh": "2-3", "engine": "transformers", "dp": 2},
        "reference.forward": LAST,
        "reward.forward": FIRST,
        "critic.forward": LAST,
        "actor.train": LAST,
        "critic.train": FIRST,
    },
)
PLANS = {
    "replicas": plan(4),
    "apart": APART,
    "separate": separate(Cluster(1, 4), generation_engine="transformers", zero_stage=3).to_dict(),
}


def trainer(folder: Path, named: str, **changes: Any) -> PPOTrainer:
    """Layers of 128,000 elements: above the 100,000 under which DeepSpeed keeps parameters whole everywhere. Prompts
    are generated for one by one and the evaluation has three, so that ranks make different numbers of decoding steps.
    """
    wide = {"hidden_size": 320, "intermediate_size": 400, "num_hidden_layers": 1}
    settings = {**tiny.every(1), "plan": PLANS[named], "max_steps": 3, "learning_rate": 1e-3}
    settings |= {"per_device_train_batch_size": 2, "local_rollout_forward_batch_size": 1}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_objective/scores"}
    return tiny.trainer(
        folder,
        given={
            "model": tiny.policy(**wide),
            "value_model": tiny.classifier(**wide),
            "reward_model": tiny.classifier(2),
            "eval_dataset": tiny.prompts(3),
        },
        **{**settings, **changes},
    )


def note(folder: Path, name: str, made: PPOTrainer) -> None:
    """The logs, and of the trained weights the sum and the greatest of each parameter."""
    logs = [row for row in made.state.log_history if "eval_objective/scores" in row]
    weights = {key: [float(t.double().sum()), float(t.abs().max())] for key, t in tiny.weights(made).items()}
    parts: list[Any] = [None] * made.args.world_size
    torch.distributed.all_gather_object(parts, weights)
    if made.is_world_process_zero():
        merged = {key: value for part in parts for key, value in part.items()}
        evals = [row["eval_objective/scores"] for row in logs]
        best = Path(made.state.best_model_checkpoint or "none").name
        found = {"updates": tiny.updates(made), "evals": evals, "weights": merged, "best": best}
        (folder / f"{name}.json").write_text(json.dumps(found))
    made.close()


def main() -> None:
    folder = Path(sys.argv[1])
    for name in PLANS:
        made = trainer(folder / name, name)
        made.train()
        note(folder, name, made)
    again = trainer(folder / "apart", "apart")
    again.train(resume_from_checkpoint=str(folder / "apart" / "checkpoint-1"))
    note(folder, "resumed", again)
    moved = trainer(folder / "moved", "replicas")
    moved.run.change.replanner = Forced(ExecutionPlan.from_dict(PLANS["apart"]))  # type: ignore[assignment]
    moved.train()
    note(folder, "moved", moved)


if __name__ == "__main__":
    main()
