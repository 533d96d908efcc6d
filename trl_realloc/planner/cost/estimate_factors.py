"""`CalibrationFactors`: calibration factors of the estimates, (measured seconds) / (estimated seconds) of a run's
calls.

`learning` computes them from a run, and a `Profile` stores them for the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import AliasChoices, ConfigDict, Field

from ...plan.assignment import Assignment
from ...plan.dataflow import Call
from ...plan.execution_plan import ExecutionPlan


MAX_FACTOR = 1000.0  # largest factor, and the inverse of the smallest
_Factor = Annotated[float, Gt(0), Le(1e9)]
_Seconds = Annotated[float, Ge(0), Le(1e9)]


@dataclass(frozen=True)
class CalibrationFactors:
    """Factors by which uncorrected estimates are multiplied.

    Args:
        calls: factor of a call's seconds, by call.
        layouts: factor relative to `calls`, by call and layout (`layout_name`). Other layouts of the call have the
            median of these.
        moves: factor of a reallocation's seconds, by the call that receives the parameters.
        functions: seconds of reward functions on the whole batch, by call. They have no estimate. Each of dp replicas
            takes 1 / dp of them.
        dispatch: seconds that each call takes to receive and send samples; `None` if not measured.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    calls: Mapping[str, _Factor] = field(default_factory=dict)
    layouts: Mapping[str, Mapping[str, _Factor]] = field(default_factory=dict)
    moves: Mapping[str, _Factor] = field(default_factory=dict)
    functions: Mapping[str, _Seconds] = field(default_factory=dict)
    # version 0.2 wrote `handover`
    dispatch: Annotated[_Seconds | None, Field(validation_alias=AliasChoices("dispatch", "handover"))] = None

    def factor(self, call: Call, assignment: Assignment) -> float:
        """The factor of a call's seconds; for a call that has not run, the median of the calls of its kind."""
        if call.name not in self.calls:
            return _median(self.calls[name] for name in self.calls if name.split(".")[1:2] == [str(call.kind)])
        layouts = self.layouts.get(call.name, {})
        relative = layouts.get(layout_name(assignment))
        return self.calls[call.name] * (_median(layouts.values()) if relative is None else relative)

    def move(self, call: str) -> float:
        """The factor of the seconds of a reallocation to a call; the median of all if it has not run."""
        return self.moves.get(call, _median(self.moves.values()))

    def without_seconds(self) -> CalibrationFactors:
        """The factors alone: the seconds depend on the batch and the reward functions, which may differ in another
        run."""
        return replace(self, functions={}, dispatch=None)

    def without_calls(self, names: Collection[str]) -> CalibrationFactors:
        """These corrections without the factors of some calls."""
        calls = {name: factor for name, factor in self.calls.items() if name not in names}
        layouts = {name: factors for name, factors in self.layouts.items() if name not in names}
        return replace(self, calls=calls, layouts=layouts)

    def learned(
        self,
        plan: ExecutionPlan,
        factors: Mapping[str, float],
        moves: Mapping[str, float],
        functions: Mapping[str, float],
        dispatch: float | None,
    ) -> CalibrationFactors:
        """These corrections after a run under a plan.

        If the call has run in this layout before, a new factor means that the machine has changed: it changes the
        factors of the call's other layouts too. Otherwise the factor is a property of the layout.

        Args:
            factors: measured / uncorrected estimated seconds, by call.
            functions: seconds of a replica's share of the batch, by call.
        """
        calls = dict(self.calls)
        layouts = {name: dict(relative) for name, relative in self.layouts.items()}
        for name, factor in factors.items():
            layout, relative = layout_name(plan[name]), layouts.setdefault(name, {})
            if layout not in relative:
                relative[layout] = factor / calls[name] if name in calls and relative else 1.0
            calls[name] = factor / relative[layout]
        whole = {**self.functions, **batch_seconds(plan, functions)}
        return CalibrationFactors(calls, layouts, {**self.moves, **moves}, whole, dispatch)

    def described(self, least: float = 0.05) -> str:
        """The factors that differ from 1 by more than `least`, as text: `actor.train x 3.02`."""
        whole = {name: factor * _median(self.layouts.get(name, {}).values()) for name, factor in self.calls.items()}
        whole |= {f"reallocation to {name}": factor for name, factor in self.moves.items()}
        texts = [f"{name} x {factor:.3g}" for name, factor in whole.items() if abs(factor - 1) > least]
        return ", ".join([*texts, *(f"{name} {seconds:.3g} s" for name, seconds in self.functions.items())])


def batch_seconds(plan: ExecutionPlan, functions: Mapping[str, float]) -> dict[str, float]:
    """Seconds of reward functions on the whole batch, from those of a replica's share; both by call."""
    return {name: plan[name].strategy.dp * seconds for name, seconds in functions.items()}


def layout_name(assignment: Assignment) -> str:
    """Text of the properties of an assignment on which its seconds depend: `zero dp2`."""
    flags = [name for name in ("offload", "drop") if getattr(assignment, name)]
    return " ".join([assignment.engine, str(assignment.strategy), *flags])


def bounded(factor: float) -> float:
    """A factor between 1 / `MAX_FACTOR` and `MAX_FACTOR`."""
    return min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))


def _median(values: object) -> float:
    factors = list(values)  # type: ignore[call-overload]
    return float(median(factors)) if factors else 1.0
