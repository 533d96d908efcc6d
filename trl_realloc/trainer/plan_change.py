"""Moving a run to another execution plan between two updates, when another plan is faster.

The search for a faster plan is in `profiling.replanning`, the state that is moved in `runtime.run_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from ..common.notices import notice
from ..engines.base import BackgroundEngine
from ..plan.dataflow import Role
from ..plan.timeline import Span
from ..profiling.auto_plan import JobPlan, measured_plan
from ..profiling.late_measuring import LateMeasuring
from ..profiling.replanning import Replanner, suits
from ..profiling.run_observer import RunObserver
from ..runtime.drawn_samples import DrawnSamples
from ..runtime.executor import Executor
from ..runtime.failures.alarm import Alarm
from ..runtime.placement import Placement
from ..runtime.process_groups import from_every_rank, wait_for_all
from ..runtime.run_state import RunState, fixed_models
from .accelerate_plugin import ReallocationPlugin
from .optimizer_sharding import can_be_sharded
from .optimizers import make_optimizer


logger = logging.get_logger(__name__)


def can_change_plan(setup: Any) -> bool:
    """Whether the run's state can be moved to another plan. It cannot be with adapters, a policy or a critic that is
    frozen in part, an optimizer of the user's, or one that cannot be sharded.

    Args:
        setup: of `PlanChangeMixin`.
    """
    is_default = isinstance(setup.make_optimizer, partial) and setup.make_optimizer.func is make_optimizer
    if setup.roles[Role.ACTOR].adapted or setup.is_frozen_in_part or not is_default:
        return False
    return can_be_sharded(setup.make_optimizer, torch.device("cpu"))  # another plan may shard its state


class PlanChangeMixin:
    """Moves a run to another plan. It is mixed into a trainer that has Trainer's attributes and those of
    `CheckpointMixin`, and that lets go of its modules (`_let_go`) and places the calls of a plan (`_place`).

    Its `setup` is a frozen dataclass with what is known of the run: `plan`, `job_plan`, `job`, `roles`,
    `make_optimizer` and `is_frozen_in_part`. They are as in `trainer.setup.Setup`.
    """

    state: Any
    accelerator: Any
    setup: Any
    placement: Placement
    executor: Executor
    alarm: Alarm
    observer: RunObserver
    replanner: Replanner | None
    measuring: LateMeasuring | None
    _place: Callable[[], None]
    _start: Callable[[], None]
    _let_go: Callable[[], None]
    _finish_save: Callable[[], None]
    _save_unsaved: Callable[[], None]
    _samples_under_way: Callable[[], DrawnSamples | None]
    _go_on_with: Callable[[DrawnSamples | None], None]

    _unit = "update"  # what an iteration is called in messages

    _is_between_plans = False  # the run's state is in no engine
    _start_seconds = 0.0  # what loading the models and starting the engines took

    def _observe_run(self, plugin: ReallocationPlugin) -> None:
        """Make the observer of the run, and the replanner where the planner chose the plan and the run can leave it."""
        self.observer = RunObserver(self.setup.job, self.setup.job_plan)
        threshold = plugin.replan or 0.0
        replans = self.setup.job_plan.decision is not None and threshold > 0 and can_change_plan(self.setup)
        self.replanner = Replanner(self.setup.job, self.observer, threshold) if replans else None
        measures = replans and plugin.measure == "between"
        self.measuring = LateMeasuring(self.setup.job, self.observer, self._unit) if measures else None

    def _replan(
        self, spans: Sequence[Span], lengths: Sequence[int], seconds: float, left: int, iterations: int = 1
    ) -> None:
        """Compare so many iterations with the estimate, and move to another plan where it is now faster. Collective
        over the job.

        Args:
            spans: of the iterations; on rank 0, which decides.
            lengths: of their responses, tokens; on rank 0.
            seconds: that they took.
            left: the number of iterations that are left.
        """
        engines = self.placement.generators.items()
        self.observer.note_decoding(
            {call: engine.decode_steps for call, engine in engines if isinstance(engine, BackgroundEngine)}
        )
        self.observer.note(spans, lengths, iterations)
        if self.replanner is None:
            return
        if lengths:
            self.replanner.note(lengths)
        if self.measuring is not None and not self.measuring.is_over:
            self.measuring.note(seconds / iterations)
            budget_s = self.measuring.budget(left, self._start_seconds)
            if budget_s is not None:
                self._save_and_rebuild(partial(measured_plan, self.setup.job, budget_s, self.observer.job_plan))
                return
        job_plan = self.replanner.better(left, self._start_seconds)
        if job_plan is not None:
            self._move_to(job_plan)

    def _move_to(self, job_plan: JobPlan) -> None:
        """Close the engines and build those of another plan, with the same parameters, optimizer states and random
        states. Engines that suit the other plan too are kept."""
        if not suits(self.setup.plan, job_plan.plan, self.setup.job.workload.episodes):
            self._save_and_rebuild(lambda: job_plan)
            return
        self.executor.follow(job_plan.plan)
        self.setup = replace(self.setup, plan=job_plan.plan, job_plan=job_plan)
        self._follow(job_plan)

    def _save_and_rebuild(self, next_plan: Callable[[], JobPlan]) -> None:
        """`_rebuild`, if it can be done, after a checkpoint of what has not been saved: a short run that measures may
        fail in a collective and end the job, and a new engine may not start."""
        if self._can_rebuild():
            self._save_unsaved()
            self._rebuild(next_plan)

    def _can_rebuild(self) -> bool:
        """Whether the run's models can be made again for another plan; if not, the run keeps its plan to the end.
        Collective over the job."""
        of_ranks = from_every_rank(list(fixed_models(self.placement)), self.placement.control)
        if fixed := [name for of_rank in of_ranks for name in of_rank]:
            notice(f"the run keeps its plan: the model of {fixed[0]} cannot be made again from its config alone")
            self.replanner = self.measuring = None
        return not fixed

    def _rebuild(self, next_plan: Callable[[], JobPlan]) -> None:
        """Move to the plan that `next_plan` returns. It is called on all ranks together, while no engine exists and the
        run's state is in host memory."""
        self.alarm.at(f"the move to another plan after update {self.state.global_step}")
        self._stop_early()
        self.executor.exchange.flush()
        self._finish_save()  # over a process group of the old plan
        under_way = self._samples_under_way()
        run_state = RunState(self.placement)
        # closing a process group closes it for ranks that still use it
        wait_for_all(self.placement.control, self.placement.options.device)
        self._is_between_plans = True
        self._let_go()
        self.placement.discard()
        job_plan = next_plan()
        is_other = job_plan.plan != self.setup.plan
        roles = run_state.roles(self.setup.roles, job_plan.plan)
        self.setup = replace(self.setup, plan=job_plan.plan, job_plan=job_plan, roles=roles)
        self._place()
        self._start()
        run_state.load_into(self.placement)
        self._is_between_plans = False
        self._go_on_with(under_way)
        self._follow(job_plan, is_other=is_other)

    def _stop_early(self) -> None:
        """Stop what has been begun for later iterations."""
        self.executor.cancel_early()

    def _follow(self, job_plan: JobPlan, *, is_other: bool = True) -> None:
        """Watch the plan that the run has now, and say so.

        Args:
            is_other: whether it is not the plan that the run had.
        """
        if self.replanner is not None:
            self.replanner.follow(job_plan)
        self.observer.follow(job_plan)
        if self.accelerator.is_main_process:
            expected = f", an estimated {job_plan.priced.seconds:.3g} s per iteration" if job_plan.priced else ""
            how = f" ({job_plan.plan.streams})" if job_plan.plan.streams else ""
            what = "the plan is now" if is_other else "the run goes on under"
            logger.warning(f"update {self.state.global_step}: {what} {job_plan.plan.name}{how}{expected}.")


__all__ = ["PlanChangeMixin", "can_change_plan"]
