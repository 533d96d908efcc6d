"""Numbers that an optimizer keeps in its parameter groups: a training goes on from them as from its other state."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from group_optimizers import Adapting
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR
from transformers import TrainerCallback

from trl_realloc import GRPOTrainer, RLOOTrainer
from trl_realloc.plan.dataflow import Role
from trl_realloc.trainer.checkpoint.manifest import MANIFEST
from trl_realloc.trainer.checkpoint.resuming import SAVED_SETTINGS


UPDATES, SAVED = 4, 2
OPTIMIZERS = {
    "adapting": Adapting,
    "adapting, 1cycle": Adapting,
    "adapting, lambda": Adapting,
    "adamw, 1cycle": partial(torch.optim.AdamW, lr=1e-3),
    "sgd, cyclic": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}
SCHEDULERS: dict[str, Any] = {
    "1cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1e-2, total_steps=8),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3),
}
SAVES: dict[str, Any] = {"max_steps": UPDATES, "save_strategy": "steps", "save_steps": SAVED}


class Seen(TrainerCallback):
    """Notes the groups of the roles' optimizers after each update."""

    def __init__(self) -> None:
        self.groups: list[list[dict[str, Any]]] = []
        self.placement: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        engines = [self.placement.trained(role) for role in (Role.ACTOR, Role.CRITIC)]
        groups = [group for engine in engines if engine is not None for group in engine.optimizer.param_groups]
        names = ("lr", "betas", "momentum", "d", "k", "numerator")
        self.groups.append([{name: copied(group[name]) for name in names if name in group} for group in groups])


def copied(value: Any) -> Any:
    return float(value) if torch.is_tensor(value) else value


def pair(kind: str, parameters: Any) -> tuple[Any, Any]:
    """An optimizer and its scheduler, if it has one."""
    optimizer: Any = OPTIMIZERS[kind](parameters)
    schedule = kind.partition(", ")[2]
    return optimizer, SCHEDULERS[schedule](optimizer) if schedule else None


def ppo(folder: Path, kind: str, **changes: Any) -> tuple[Any, Seen]:
    model, value, seen = tiny.policy(), tiny.classifier(), Seen()
    given = {"model": model, "value_model": value}
    given["optimizers"] = pair(kind, [*model.parameters(), *value.parameters()])
    made = tiny.trainer(folder, given=given, callbacks=[seen], **{"num_mini_batches": 2, **SAVES, **changes})
    seen.placement = made.placement
    return made, seen


def host_loop(folder: Path, kind: str, trainer: type, **changes: Any) -> tuple[Any, Seen]:
    model, seen = tiny.policy(), Seen()
    given = {"model": model, "callbacks": [seen], "optimizers": pair(kind, model.parameters())}
    made = tiny_groups.trainer(folder, trainer, given=given, **{**SAVES, **changes})
    seen.placement = made.placement
    return made, seen


MADE = {"PPO": ppo, "GRPO": partial(host_loop, trainer=GRPOTrainer), "RLOO": partial(host_loop, trainer=RLOOTrainer)}
STEPS = {"PPO": 4, "GRPO": 1, "RLOO": 1}  # optimizer steps of an update
RUNS = [("PPO", kind) for kind in OPTIMIZERS] + [
    *(("GRPO", kind) for kind in ("adapting, 1cycle", "adamw, 1cycle")),
    ("RLOO", "adapting"),
]


@pytest.mark.parametrize(("algorithm", "kind"), RUNS)
def test_a_resumed_run_has_the_groups_of_the_uninterrupted_one(tmp_path: Path, algorithm: str, kind: str) -> None:
    make = MADE[algorithm]
    whole, expected = make(tmp_path, kind)
    whole.train()
    counts = [groups[0].get("k") for groups in expected.groups]
    sizes = [groups[0].get("d") for groups in expected.groups]
    if kind.startswith("adapting"):
        assert counts == [STEPS[algorithm] * (update + 1) for update in range(UPDATES)]
        assert sizes == sorted(set(sizes)), "the step size grows"
    shutil.rmtree(tmp_path / f"checkpoint-{UPDATES}")
    resumed, seen = make(tmp_path, kind)
    resumed.train(resume_from_checkpoint=True)
    assert seen.groups == expected.groups[SAVED:]
    engines = [made.placement.trained(Role.ACTOR) for made in (whole, resumed)]
    for one, other in zip(*(engine.head.model.parameters() for engine in engines), strict=True):
        assert torch.equal(one, other)
    for made in (whole, resumed):
        made.close()


@pytest.mark.parametrize("algorithm", ["PPO", "GRPO"])
def test_a_second_training_goes_on_with_the_numbers_of_the_first(tmp_path: Path, algorithm: str) -> None:
    made, seen = MADE[algorithm](tmp_path, "adapting", max_steps=2, save_strategy="no")
    made.train()
    made.train()
    made.close()
    assert [groups[0]["k"] for groups in seen.groups] == [STEPS[algorithm] * (update + 1) for update in range(4)]


@pytest.mark.parametrize("algorithm", ["PPO", "GRPO"])
def test_a_second_training_from_a_checkpoint_has_its_numbers(tmp_path: Path, algorithm: str) -> None:
    made, seen = MADE[algorithm](tmp_path, "adapting, 1cycle")
    made.train()
    made.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    made.close()
    assert seen.groups[UPDATES:] == seen.groups[SAVED:UPDATES]


def test_a_checkpoint_of_a_release_that_did_not_save_the_settings_has_the_rate_of_its_scheduler(tmp_path: Path) -> None:
    whole, expected = ppo(tmp_path, "adamw, 1cycle")
    whole.train()
    folder = tmp_path / f"checkpoint-{SAVED}"
    (folder / SAVED_SETTINGS).unlink()
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][SAVED_SETTINGS]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    resumed, seen = ppo(tmp_path, "adamw, 1cycle")
    resumed.train(resume_from_checkpoint=str(folder))
    assert [groups[0]["lr"] for groups in seen.groups] == [groups[0]["lr"] for groups in expected.groups[SAVED:]]
