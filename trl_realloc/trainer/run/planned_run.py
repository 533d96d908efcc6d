"""`PlannedRun`: a run under an execution plan. A trainer holds one.

It combines the placed plan (`placed_plan`), its checkpoints (`checkpoint`), and plan changes (`plan_change`), and
handles failures. How other ranks learn of a failure is in `runtime.failures`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from ...engines.base import EngineError
from ...engines.transformers_compat import agree_on_jit_checkpoint
from ...plan.timeline import Timeline
from ...runtime.failures.alarm import Alarm
from ...runtime.process_groups import any_rank
from ..accelerate_plugin import ReallocationPlugin
from ..checkpoint import CheckpointError
from ..report.run_facts import run_facts
from ..report.run_record import save_record
from .checkpoints import Checkpoints
from .placed_plan import H, PlacedPlan
from .plan_change import PlanChange
from .run_setup import RunSetup


if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class PlannedRun(Generic[H]):
    """A run under an execution plan.

    In a job of several processes a failure ends the job: other ranks may be in a collective with this one. A single
    process keeps its models and optimizer states, so that the user of a notebook can fix a reward function and train
    on. Unfinished work (a generation, samples generated ahead, gradients) is dropped. vLLM engines are ended, because
    their state is unknown, and start again with the next generation.

    Args:
        adapter: trainer-specific side of the run.
        setup: checked and planned run.
        plugin: settings of the trainer's configuration.
        alarm: used until the executor has its own.

    Attributes:
        placed: plan with its engines and executor.
        checkpoints: saves and resumes the run.
        change: changes the plan; set by `place`.
    """

    change: PlanChange

    def __init__(self, adapter: H, setup: RunSetup, plugin: ReallocationPlugin, rank: int, alarm: Alarm) -> None:
        self.adapter, self.plugin = adapter, plugin
        self.placed = PlacedPlan(adapter, setup, rank, alarm)
        self.checkpoints = Checkpoints(self.placed)

    def place(self) -> None:
        """Create the plan's process groups and executor, and observe it from now on. All ranks together."""
        self.placed.place()
        self.change = PlanChange(self.placed, self.checkpoints, self.plugin)

    def start(self) -> None:
        """Load the models and start the engines for a training, unless they have started."""
        begin = time.time()
        self.placed.start()
        self.change.start_seconds = time.time() - begin

    def save_model(self, folder: str | None, *, pushes: bool) -> None:
        """Save the trained models and the tokenizer. Collective over the job.

        Args:
            folder: target folder; by default the `output_dir` of the training arguments.
            pushes: whether to push to the Hub too, if the arguments request it.

        Raises:
            SaveError: a rank could not write. Raised on every rank.
        """
        trainer = self.adapter.trainer
        with self.failing_together():
            self.checkpoints.save_models(Path(folder or trainer.args.output_dir))
        if trainer.args.push_to_hub and pushes:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def save_record(
        self, algorithm: str, timeline: Timeline, lengths: Sequence[int], *, of_update: bool = True
    ) -> None:
        """Save the files of the run and its report in `output_dir` at the end of a training. On rank 0.

        Args:
            algorithm: its name in the report.
            lengths: tokens of the latest responses, for which the plan is estimated.
            of_update: see `run_record.save_record`.
        """
        trainer, plan, observer = self.adapter.trainer, self.placed.plan, self.change.observer
        expected = observer.end(lengths)
        save_record(
            *(plan, timeline, expected, Path(trainer.args.output_dir)),
            when_chosen=observer.when_chosen(lengths),
            of_update=of_update,
            facts=run_facts(algorithm, plan.cluster.size, trainer.args.device),
            state=trainer.state,
        )

    def follow_callbacks(self) -> None:
        """Wrap the callback handler: the message of a failure in a callback names its event, and that of a failure in
        the training loop does not name the plan's last call. `on_save` waits until the checkpoint is complete
        (`async_save`). The ranks agree on a checkpoint at SIGTERM (`enable_jit_checkpoint`)."""
        trainer = self.adapter.trainer
        call_event = trainer.callback_handler.call_event

        def followed(
            event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl:
            if event == "on_save" and self.checkpoints.unfinished is not None:
                return control  # `Checkpoints.finish` will call it
            after = f"after update {state.global_step}"
            self.placed.alarm.set_activity(f"{event} of a callback, {after}")
            control = call_event(event, args, state, control, **kwargs)
            self.placed.alarm.set_activity(f"the training loop {after}")
            return control

        trainer.callback_handler.call_event = followed
        agree_on_jit_checkpoint(
            trainer.callback_handler.callbacks,
            lambda is_requested: any_rank(is_requested, self.placed.placement.control),
            lambda: trainer._save_checkpoint(trainer.model, trial=None),
        )

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Context of work that all ranks do together. On a failure it notifies the other ranks and ends engines.

        Raises:
            EngineError: the run failed during a plan change, so this process has lost its state.
        """
        placed, trainer = self.placed, self.adapter.trainer
        if placed.is_between_plans:
            raise EngineError(
                "the run failed while it changed its plan, and its parameters are lost here; make a new trainer, whose "
                "train(resume_from_checkpoint=True) goes on from the last checkpoint."
            )
        try:
            yield
        except BaseException as error:
            if trainer.is_in_train and isinstance(error, Exception) and not isinstance(error, CheckpointError):
                error.add_note(self.checkpoints.resume_hint())
                if placed.can_go_on and placed.placement.started:
                    error.add_note("This trainer keeps its models: save_model() saves them, train() trains them on.")
            trainer.is_in_train = False
            with placed.alarm.guard(placed.recover):
                raise


__all__ = ["PlannedRun"]
