"""A rank that trains one run several times, each time with other streams and barriers on the same engines, and writes
what was drawn, logged, called back and trained.

Options: `config`, of all trainers; `plans`, by name a plan and its runs. A run has a name and may have `streams` and
`barrier` (in place of the plan's), `resume` (a checkpoint's folder in this job's), and numbers of updates after which a
callback acts: `saves`, `evaluates`, `stops`. `critic_s` are seconds that each optimizer step of the critic takes more.
`kills` is true if an engine is killed as soon as it goes on with samples that another one has begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.streams import Streams
from trl_realloc.planner.iteration.stream_dispatcher import Continue, Score
from trl_realloc.runtime.overlap.stream_messages import GoOn
from trl_realloc.runtime.overlap.stream_worker import StreamWorker


EVENTS = ("train_begin", "step_begin", "step_end", "log", "evaluate", "save", "epoch_end", "train_end")


class Notes(TrainerCallback):
    """Notes what happens in a run, and does what its options ask for.

    Attributes:
        samples: tokens and log-probabilities of each update, on rank 0.
        early: the updates at whose end this rank's engine generated for the next one.
    """

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self.trainer, self.options = trainer, options
        self.samples: list[dict[str, Any]] = []
        self.events: list[tuple[str, int]] = []
        self.spans: list[Any] = []
        self.early: list[int] = []
        self.moved, self.forwards = 0, 0
        self.run = trainer.executor.run
        trainer.executor.run = self._run

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        iteration, executor = self.run(*args, **kwargs), self.trainer.executor
        trains = any(span.call == "actor.train" for span in iteration.spans)
        self.moved += sum(len(order.samples) for order in executor.orders if isinstance(order, Continue))
        self.forwards += sum(isinstance(order, Score) for order in executor.orders)
        self.spans += [(s.call, s.device, s.start, s.end, s.step) for s in iteration.spans]
        if trains and "responses" in iteration.samples:
            columns = {name: iteration.samples.ragged(name).rows() for name in ("responses", "logprobs")}
            self.samples.append({name: [row.tolist() for row in rows] for name, rows in columns.items()})
        return iteration

    def on_event(self, name: str, state: Any, control: Any) -> None:
        self.events.append((name, state.global_step))
        if name != "step_end":
            return
        early, done = self.trainer.executor.runner.early, state.global_step
        if early is not None and early.generation is not None:
            self.early.append(done)
        for action, what in (("saves", "save"), ("evaluates", "evaluate"), ("stops", "training_stop")):
            if done in self.options.get(action, ()):
                setattr(control, f"should_{what}", True)

    def end(self) -> None:
        self.trainer.executor.run = self.run


def _event(name: str) -> Any:
    def on(self: Notes, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_event(name, state, control)

    return on


for event in EVENTS:
    setattr(Notes, f"on_{event}", _event(event))


def follow(made: Any, options: dict[str, Any]) -> None:
    """Give the trainer's plan a run's streams and barrier. The engines stay."""
    streams = Streams.from_dict(options.get("streams"))
    plan = replace(made.plan, streams=streams, barrier=options.get("barrier", False))
    made.run.placed.setup = replace(made.setup, plan=plan)
    for part in (made.placement, made.executor):
        part.plan = plan


def kill_at_a_move(made: Any, folder: Path) -> None:
    made.run.placed.start()
    engine = made.placement.generators["actor.generate"]
    go_on = StreamWorker._go_on

    def killed(worker: StreamWorker, task: GoOn) -> None:
        go_on(worker, task)
        (folder / "killed.json").write_text(json.dumps({"rank": worker.rank, "moved": len(task.samples)}))
        os.kill(engine._process.pid, signal.SIGKILL)

    StreamWorker._go_on = killed  # type: ignore[method-assign]


@contextlib.contextmanager
def slow_critic(made: Any, seconds: float) -> Iterator[None]:
    made.run.placed.start()
    engine = made.placement.trained(Role.CRITIC)
    if engine is None:
        yield
        return
    step = engine.train

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return step(*args)

    engine.train = slowly
    try:
        yield
    finally:
        engine.train = step


def train(made: Any, folder: Path, options: dict[str, Any]) -> None:
    follow(made, options)
    name, rank = options["name"], made.accelerator.process_index
    notes = Notes(made, options)
    made.add_callback(notes)
    if options.get("kills"):
        kill_at_a_move(made, folder)
    checkpoint = options.get("resume")
    with slow_critic(made, options.get("critic_s", 0.0)):
        made.train(resume_from_checkpoint=str(folder / checkpoint) if checkpoint else None)
    made.remove_callback(notes)
    notes.end()
    assert made.executor.runner.early is None, "what has begun is closed at the end"
    kept = ("samples", "events", "spans", "early", "moved", "forwards")
    written = {"log": tiny.updates(made), **{key: getattr(notes, key) for key in kept}}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(written))
    weights = {key: tensor.contiguous() for key, tensor in tiny.weights(made).items()}
    save_file(weights, folder / f"{name}-{rank}.safetensors")
    made.accelerator.wait_for_everyone()


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, job in options["plans"].items():
        given = {"train_dataset": tiny.prompts(160), "eval_dataset": tiny.prompts(8)}
        made = tiny.trainer(folder / name, given=given, plan=job["plan"], **options.get("config", {}))
        for run in job["runs"]:
            train(made, folder, run)
        made.close()
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
