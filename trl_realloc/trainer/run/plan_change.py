"""`PlanChange`: moves a run to a faster execution plan between two updates.

The search for a faster plan is in `profiling.replanning`, the moved state in `runtime.placement.run_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers.utils import logging

from ...common.notices import notice
from ...engines.base import BackgroundEngine
from ...plan.dataflow import Role
from ...plan.spans import Span
from ...profiling.auto_plan import JobPlan, measured_plan
from ...profiling.late_measuring import LateMeasuring
from ...profiling.replanning import Replanner, suits
from ...profiling.run_observer import RunObserver
from ...runtime.placement.run_state import RunState, fixed_models
from ...runtime.process_groups import all_gather_object, wait_for_all
from ..accelerate_plugin import ReallocationPlugin
from .checkpoints import Checkpoints
from .optimizer_sharding import can_be_sharded
from .optimizers import make_optimizer
from .placed_plan import PlacedPlan
from .run_setup import RunSetup


logger = logging.get_logger(__name__)


def can_change_plan(setup: RunSetup) -> bool:
    """True if the run's state can move to another plan. It cannot with adapters, with a partly frozen policy or critic,
    with models that the user has changed, with the user's optimizer, or with one that cannot be sharded."""
    is_default = setup.make_optimizer.func is make_optimizer
    if setup.roles[Role.ACTOR].adapted or setup.is_fixed or not is_default:
        return False
    return can_be_sharded(setup.make_optimizer, torch.device("cpu"))  # another plan may shard its state


class PlanChange:
    """Compares the iterations of a run with its plan's estimate, and moves the run to a faster plan.

    Args:
        placed: current plan of the run.
        plugin: settings of the trainer's configuration.

    Attributes:
        observer: records the run's iterations.
        replanner: searches for a faster plan; `None` if the user chose the plan, or the run cannot leave it.
        measuring: measures the machine during the run; `None` if not requested.
        start_seconds: seconds for loading the models and starting the engines.
    """

    def __init__(self, placed: PlacedPlan, checkpoints: Checkpoints, plugin: ReallocationPlugin) -> None:
        self.placed, self.checkpoints, self.start_seconds = placed, checkpoints, 0.0
        setup, threshold = placed.setup, plugin.replan or 0.0
        self.observer = RunObserver(setup.job, setup.job_plan)
        replans = setup.job_plan.decision is not None and threshold > 0 and can_change_plan(setup)
        self.replanner = Replanner(setup.job, self.observer, threshold) if replans else None
        measures = replans and plugin.measure == "between"
        self.measuring = LateMeasuring(setup.job, self.observer, placed.adapter.iteration) if measures else None

    def note(
        self, spans: Sequence[Span], lengths: Sequence[int], seconds: float, left: int, iterations: int = 1
    ) -> None:
        """Compare these iterations with the estimate, and move to another plan if it is now faster. Collective over the
        job.

        Args:
            spans: spans of the iterations; on rank 0, which decides.
            lengths: tokens of their responses; on rank 0.
            seconds: duration of the iterations.
            left: number of remaining iterations.
        """
        engines = self.placed.placement.generators.items()
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
            budget_s = self.measuring.budget(left, self.start_seconds)
            if budget_s is not None:
                self._save_and_rebuild(partial(measured_plan, self.placed.setup.job, budget_s, self.observer.job_plan))
                return
        job_plan = self.replanner.better(left, self.start_seconds)
        if job_plan is not None:
            self.move_to(job_plan)

    def move_to(self, job_plan: JobPlan) -> None:
        """Close the engines and build those of another plan, with the same parameters, optimizer states and random
        states. Engines that fit both plans stay."""
        if not suits(self.placed.setup.plan, job_plan.plan, self.placed.setup.job.workload.episodes):
            self._save_and_rebuild(lambda: job_plan)
            return
        self.placed.executor.follow(job_plan.plan)
        self.placed.setup = replace(self.placed.setup, plan=job_plan.plan, job_plan=job_plan)
        self._follow(job_plan)

    def _save_and_rebuild(self, next_plan: Callable[[], JobPlan]) -> None:
        """Save a checkpoint of unsaved state, then `rebuild`, if possible. The checkpoint protects the run: measuring
        may fail in a collective and end the job, and a new engine may not start."""
        if self._can_rebuild():
            self.checkpoints.save_unsaved()
            self.rebuild(next_plan)

    def _can_rebuild(self) -> bool:
        """True if the run's models can be created again for another plan; otherwise the run keeps its plan. Collective
        over the job."""
        per_rank = all_gather_object(list(fixed_models(self.placed.placement)), self.placed.placement.control)
        if fixed := [name for rank_values in per_rank for name in rank_values]:
            notice(f"the run keeps its plan: the model of {fixed[0]} cannot be made again from its config alone")
            self.replanner = self.measuring = None
        return not fixed

    def rebuild(self, next_plan: Callable[[], JobPlan]) -> None:
        """Move to the plan that `next_plan` returns. It is called on all ranks together, while no engine exists and the
        run's state is in host memory."""
        placed = self.placed
        placed.alarm.set_activity(f"the move to another plan after update {placed.adapter.trainer.state.global_step}")
        placed.adapter.stop_early()
        placed.executor.channels.flush()
        self.checkpoints.finish()  # over a process group of the old plan
        under_way = placed.adapter.samples_under_way()
        run_state = RunState(placed.placement)
        # closing a process group closes it for ranks that still use it
        wait_for_all(placed.placement.control, placed.placement.options.device)
        placed.is_between_plans = True
        placed.let_go()
        placed.placement.discard()
        job_plan = next_plan()
        is_other = job_plan.plan != placed.setup.plan
        roles = run_state.roles(placed.setup.roles, job_plan.plan)
        placed.setup = replace(placed.setup, plan=job_plan.plan, job_plan=job_plan, roles=roles)
        placed.place()
        placed.start()
        run_state.load_into(placed.placement)
        placed.is_between_plans = False
        placed.adapter.go_on_with(under_way)
        self._follow(job_plan, is_other=is_other)

    def _follow(self, job_plan: JobPlan, *, is_other: bool = True) -> None:
        """Observe the plan that the run has now, and log it."""
        if self.replanner is not None:
            self.replanner.follow(job_plan)
        self.observer.follow(job_plan)
        if self.placed.rank == 0:
            expected = ""
            if job_plan.priced is not None:
                lengths = job_plan.priced.space.pricing.workload.lengths_text
                expected = f", an estimated {job_plan.priced.seconds:.3g} s per iteration with {lengths}"
            how = f" ({job_plan.plan.streams})" if job_plan.plan.streams else ""
            what = "the plan is now" if is_other else "the run goes on under"
            update = self.placed.adapter.trainer.state.global_step
            logger.warning(f"update {update}: {what} {job_plan.plan.name}{how}{expected}.")


__all__ = ["PlanChange", "can_change_plan"]
