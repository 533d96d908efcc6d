"""A rank of a run whose responses grow in its middle: its plan is chosen from a profile made up for it, and moves."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
from transformers import TrainerCallback

from trl_realloc.planner.cost.profile import Observation, Profile, model_key
from trl_realloc.profiling import auto_plan as planning
from trl_realloc.profiling.job import Job
from trl_realloc.profiling.run_observer import RunObserver


SHORT, LONG = 4, 24
WIRE = 2.0  # seconds of an all-reduce


def costs(job: Job) -> tuple[Profile, bool]:
    """Instead of measuring: an actor whose tokens are dear, a critic whose tokens are cheap, a slow wire. With short
    responses the wire is dearer than the tokens, so actor and critic train side by side; with long ones both train on
    both devices."""
    rows = []
    for size in (1 << 14, 1 << 18, 1 << 22):
        rows.append(Observation("send", "", 1e-4 + size / 1e9, 2, bytes=size))
        rows.append(Observation("all_reduce", "", WIRE + size / 1e9, 2, bytes=size))
    specs = {name: models[0] for name, models in job.models.specs.items() if models}
    for name, token in (("actor.train", 0.1), ("critic.train", 0.05)):
        key, model = model_key(specs[name]), {"layers": specs[name].layers, "elements": float(specs[name].elements)}
        for tokens, length in ((1000.0, 10.0), (2000.0, 10.0), (2000.0, 30.0)):
            counts = {"tokens": tokens, "squared": tokens * length, "answered": tokens / 2}
            rows.append(Observation("forward", key, token / 50 * tokens, 2, **counts, **model))
            rows.append(Observation("train", key, token * tokens + WIRE, 2, steps=1.0, **counts, **model))
    actor = specs["actor.generate"]
    key, model = model_key(actor), {"layers": actor.layers, "elements": float(actor.elements)}
    for samples, steps in ((4, 4), (8, 4), (4, 24), (8, 24)):
        counts = {"tokens": samples * 5.0, "steps": steps, "grown": samples * steps, "cached": samples * steps * 10}
        rows.append(Observation("generate", key, 1e-4 * steps, 2, **counts, **model))
    return Profile("made up", {}, 2, None, False, tuple(rows)), False


class Growth(TrainerCallback):
    """From the fourth update on responses are six times as long."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rules = self.trainer.executor.runner.settings
        length = SHORT if state.global_step < 3 else LONG
        self.trainer.executor.runner.settings = replace(rules, sampling=replace(rules.sampling, max_tokens=length))


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    planning.starting_profile = lambda job: costs(job)[0]
    RunObserver.note = lambda *given: None  # the made-up times are not those of this machine
    growth = Growth()
    made = tiny.trainer(folder, callbacks=[growth], **options)
    growth.trainer = made
    plans = []

    class Plans(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            plans.append({name: str(a.mesh) for name, a in made.plan.assignments.items()})

    made.add_callback(Plans())
    made.train()
    if made.accelerator.is_main_process:
        (folder / "log.json").write_text(json.dumps({"updates": tiny.updates(made), "plans": plans}))
    made.save_model(str(folder / "final"))
    made.close()


if __name__ == "__main__":
    main()
