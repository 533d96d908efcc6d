"""`PolicyPlanChangeMixin`: what a run of `PlannedPolicyTrainer` teaches the planner, and its change to another plan.

An iteration of the planner is a generation with all optimizer steps on it. After the last of these nothing of TRL's is
left that the engines have computed, so the plan is changed there. The change itself is in `plan_change`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..plan.dataflow import Role
from ..plan.timeline import Span
from ..profiling.auto_plan import JobPlan
from ..runtime.host_calls import HostCalls
from ..runtime.process_groups import from_every_rank
from ..runtime.run_state import EXTRA_ATTRIBUTES
from .plan_change import PlanChangeMixin


@dataclass
class _Period:
    """The generations and optimizer steps since the plan could be changed last.

    Args:
        lengths: of this rank's responses, tokens.
        spans: of all ranks; on rank 0, empty on the others.
        seconds: of the optimizer steps, with the generations in them.
    """

    generations: int = 0
    lengths: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0


class PolicyPlanChangeMixin(PlanChangeMixin):
    """Changes the plan between two generations. To be mixed in before `PolicyRecordMixin`, which has the times."""

    args: Any
    num_iterations: int  # TRL's
    control: Any
    model: Any
    calls: HostCalls
    callback_handler: Any
    _mode_kept: Callable[[], contextlib.AbstractContextManager[None]]

    trains_by_accelerate = False  # then there is no plan to change
    _unit = "generation"
    _period: _Period | None = None  # of a training by the plan's engines
    _first_generation = 0  # the number of the first one under the plan

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._period = None if self.trains_by_accelerate else _Period()
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._period = None

    def _generate(self, prompts: Any) -> Any:
        made = super()._generate(prompts)  # type: ignore[misc]
        if self._period is not None and self.model.training:
            self._period.generations += 1
            self._period.lengths.extend(map(len, made[1]))
        return made

    def _note_update(self, spans: Sequence[Span], seconds: float) -> None:
        """An optimizer step has ended.

        Args:
            spans: of its calls; on rank 0.
        """
        if self._period is None:
            return  # Accelerate trains
        self._period.spans.extend(spans)
        self._period.seconds += seconds

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What Trainer does after an optimizer step; then, after the last one on a generation, change the plan where
        another is faster."""
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        period = self._period
        if self.trains_by_accelerate or period is None or not period.seconds:
            return  # Trainer also calls this at the end of an epoch
        is_within: bool = self._is_within_generation  # type: ignore[attr-defined]  # of `PolicyCheckpointMixin`
        if is_within or not period.generations:
            return
        self._period = _Period()
        if self.control.should_training_stop:
            return
        lengths = [n for of_rank in from_every_rank(period.lengths, self.placement.control) for n in of_rank]
        steps, every = self.args.gradient_accumulation_steps, self.args.steps_per_generation * self.num_iterations
        left = (self.state.max_steps - self.state.global_step) * steps // every
        is_first = self.placement.rank == 0
        self._replan(period.spans, lengths if is_first else [], period.seconds, left, period.generations)

    def _rebuild(self, next_plan: Callable[[], JobPlan]) -> None:
        with self._mode_kept():
            super()._rebuild(next_plan)

    def _stop_early(self) -> None:
        self.calls.stop()

    def _let_go(self) -> None:
        """Put a structure without weights into `self.model`, in place of the module of the old plan."""
        make_shell = self.setup.roles[Role.ACTOR].shell
        assert make_shell is not None, "the policy has a structure"
        module, self.model = self.model, make_shell()
        for name in EXTRA_ATTRIBUTES:
            if hasattr(module, name):
                setattr(self.model, name, getattr(module, name))
        self.callback_handler.model = self.model  # which would keep the old one
        self._first_generation = self.calls.generation
        self.setup = replace(self.setup, model_before_start=self.model)


__all__ = ["PolicyPlanChangeMixin"]
