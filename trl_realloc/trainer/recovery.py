"""`RecoveryMixin`: what ends when a call fails or is interrupted, and what a trainer can go on with afterwards.

How other ranks learn of a failure is in `runtime.failures`, saving and resuming in `checkpoint`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..engines.base import EngineError
from ..runtime.failures.alarm import Alarm
from ..runtime.placement import Placement
from .checkpoint import CheckpointError


class RecoveryMixin:
    """Ends engines after a failure, and keeps what the trainer can go on with. To be mixed into a trainer that has
    Trainer's attributes and those of `CheckpointMixin` and `PlanChangeMixin`.

    In a job of several processes a failure ends the job: other ranks may be in a collective with this one. A process
    alone keeps its models and optimizer states, so that a user of a notebook can mend a reward function and train on.
    What it had under way (a generation, samples that were drawn ahead, gradients) is dropped. vLLM engines end with it,
    because they may be in the middle of anything, and start again when something is generated next.
    """

    is_in_train: bool
    alarm: Alarm
    callback_handler: Any
    placement: Placement
    _place: Callable[[], None]
    _make_calls: Callable[[], None]
    _resume_hint: Callable[[], str]
    _unfinished: Any  # the checkpoint that is being written; `None` if there is none

    _is_between_plans = False  # of `PlanChangeMixin`

    def _follow_callbacks(self) -> None:
        """From now on the message of a failure in a callback names its event, and that of one in the training loop does
        not name the last call of the plan. `on_save` waits until the checkpoint is complete (`async_save`)."""
        call_event = self.callback_handler.call_event

        def followed(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if event == "on_save" and self._unfinished is not None:
                return control  # `_finish_save` will call it
            after = f"after update {state.global_step}"
            self.alarm.at(f"{event} of a callback, {after}")
            control = call_event(event, args, state, control, **kwargs)
            self.alarm.at(f"the training loop {after}")
            return control

        self.callback_handler.call_event = followed

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Around what all ranks do together. On a failure it tells the other ranks and ends engines.

        Raises:
            EngineError: the run has failed while it changed its plan, so that this process has lost its state.
        """
        if self._is_between_plans:
            raise EngineError(
                "the run failed while it changed its plan, and its parameters are lost here; make a new trainer, whose "
                "train(resume_from_checkpoint=True) goes on from the last checkpoint."
            )
        try:
            yield
        except BaseException as error:
            if self.is_in_train and isinstance(error, Exception) and not isinstance(error, CheckpointError):
                error.add_note(self._resume_hint())
                if self._can_go_on and self.placement.started:
                    error.add_note("This trainer keeps its models: save_model() saves them, train() trains them on.")
            self.is_in_train = False
            with self.alarm.covers(self._end_engines):
                raise

    @property
    def _can_go_on(self) -> bool:
        """Whether this process has the run's models, given or loaded, and no other waits for it."""
        return self.placement.plan.cluster.size == 1 and not self._is_between_plans

    def _end_engines(self) -> None:
        """End the engines that cannot be used after a failure; those of the latest plan, if it has changed."""
        if not self._can_go_on:
            self.placement.close()
        elif self.placement.started:
            self.placement.reset()
            self._make_calls()
        else:  # some of its engines may exist
            self.placement.discard()
            self._place()


__all__ = ["RecoveryMixin"]
