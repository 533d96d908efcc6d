"""`ArrivingSamples`: what one rank has added of the gradients of an iteration's first epoch, while other samples were
still being generated (`plan.first_epoch`).

Which samples a rank adds, and when, is decided by `planner.dispatcher` as for calls that score; the optimizer step is
made in `training_calls`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, ArrivalAlgorithm
from ..algorithms.rollout import Rollouts
from ..common.errors import PlanError
from ..engines.adding_engine import AddingEngine
from ..plan.dataflow import Call
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Span
from .placement import Placement


NAMED = ("index", "prompts", "responses")


@dataclass(frozen=True)
class Added:
    """What this rank's replica has added of one call's first mini-batch.

    Args:
        samples: the columns `index`, `prompts` and `responses` of its samples, which messages name.
        statistics: of them, (n,) float32 on the CPU.
        scale: what the sum of all gradients is multiplied by before the step.
    """

    samples: Rollouts
    statistics: Mapping[str, Tensor]
    scale: float


@dataclass
class ArrivingSamples:
    """One iteration on one rank.

    Args:
        n: samples of the global batch.

    Attributes:
        spans: by call, when this rank has added gradients.
    """

    placement: Placement
    algorithm: ArrivalAlgorithm
    n: int
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    _added: dict[str, list[Rollouts]] = field(default_factory=lambda: defaultdict(list))

    def add(self, call: Call, samples: Rollouts) -> None:
        """Add the gradients of some samples. All ranks of the replica together, or of the call where its replicas run
        in step (`plan.assignment.runs_in_step`).

        Args:
            samples: with the columns that the call reads; none on a replica that only runs in step with others.
        """
        engine = adding(self.placement, call)
        known = self.algorithm.on_arrival(call.name, samples, self.n)
        statistics = engine.add(known, self.algorithm.loss(call.name).of_tokens, self.placement.budget(call.name))
        of_call = self._added[call.name]  # also without samples: the engine has a part of the others' gradients
        if len(samples):
            of_call.append(samples.only(NAMED).plus(**statistics))

    def added(self, call: str, scale: float) -> Added:
        """All that was added for a call, to make its step."""
        parts = self._added.pop(call, None)
        if not parts:
            return Added(Rollouts(index=torch.zeros(0, dtype=torch.long)), {}, scale)
        whole = Rollouts.cat(parts)
        return Added(whole.only(NAMED), {name: whole.tensor(name) for name in whole if name not in NAMED}, scale)

    def drop(self, call: Call) -> None:
        """Forget what was added for a call, whose batch is not trained on."""
        if self._added.pop(call.name, None) is not None:
            adding(self.placement, call).drop()


def adding(placement: Placement, call: Call) -> AddingEngine:
    """The engine that trains a call's role, of which the plan says that it can add gradients."""
    return cast(AddingEngine, placement.trained(call.role))


def arrival_algorithm(algorithm: Algorithm, plan: ExecutionPlan) -> ArrivalAlgorithm | None:
    """The algorithm, of a plan in which calls train their first epoch on samples as they arrive; `None` for another.

    Raises:
        PlanError: the algorithm cannot train one of them so.
    """
    if not plan.on_arrival:
        return None
    known = algorithm if isinstance(algorithm, ArrivalAlgorithm) else None
    for name in plan.on_arrival:
        if reason := known.why_not_on_arrival(name) if known else "its algorithm trains on whole batches alone":
            raise PlanError(
                f"streams: {name} cannot train its first epoch on samples as they arrive: {reason}. Leave it out of "
                f"first_epoch."
            )
    return known
