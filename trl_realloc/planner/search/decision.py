"""`Decision`: the plan to run, the alternatives, and the reasons why they were not chosen, as text."""

from __future__ import annotations

from dataclasses import dataclass

from ...plan.assignment import Assignment, between_uses
from ...plan.fused import Fused, joined, parted
from ..cost.call_cost import PARTS, CallCost
from .fastest import SearchResult
from .ladder import NO_MORE, Option
from .priced_plan import PricedPlan


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen.

    Args:
        plan: the plan; `None` if it does not fit in memory.
        reason: sentence that says why it was not chosen.
    """

    name: str
    plan: PricedPlan | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """The plan to run and the alternatives.

    Args:
        search: result of the search for plans without a staleness.
        ladder: options for overlapping calls with their savings, in the order in which they were tried.
    """

    best: PricedPlan
    alternatives: tuple[Alternative, ...]
    search: SearchResult
    ladder: tuple[Option, ...] = ()

    def option(self, way: str) -> Option | None:
        """The option of this name; `None` if it was not tried."""
        return next((option for option in self.ladder if option.way == way), None)

    @property
    def summary(self) -> str:
        """The chosen plan and its estimate in a sentence, without a capital letter and a full stop."""
        how = "all of them" if self.search.exhaustive else "a search"
        return "; ".join(
            [
                f"{self.best.name}: an estimated {self.best.seconds:.3g} s per iteration, the best of "
                f"{self.search.evaluations} plans ({how}, {self.search.seconds:.1f} s)",
                *(option.sentence for option in self.ladder),
            ]
        )


def why_not(plan: PricedPlan, best: PricedPlan) -> str:
    """The reason why a plan is not chosen, in a sentence."""
    if plan.seconds < best.seconds:
        return f"{1 - plan.seconds / best.seconds:.1%} faster by estimate, {NO_MORE}"
    return why_slower(plan, best)


def why_slower(plan: PricedPlan, best: PricedPlan) -> str:
    """The main reason why a plan takes longer than the best one, in a sentence."""
    difference = plan.seconds - best.seconds
    if difference < 0.0005 * best.seconds:
        return f"as fast by estimate{_other_layouts(plan, best)}"
    if difference < 0.01 * best.seconds:
        return f"{difference / best.seconds:.1%} slower by estimate{_other_layouts(plan, best)}"
    here, there = (_by_run(priced, plan.fused or best.fused) for priced in (plan, best))
    slower = {name: here[name].seconds - there[name].seconds for name in here}
    name = max(slower, key=lambda run: slower[run])
    if slower[name] > 0.25 * difference:
        return (
            f"{name} takes {here[name].seconds:.3g} s on {_places(plan, name)}, not {there[name].seconds:.3g} s on "
            f"{_places(best, name)}"
        )
    moved = sum(plan.estimate.moves.values()) - sum(best.estimate.moves.values())
    if moved > 0.25 * difference:
        return f"its reallocations take {moved:.3g} s more"
    work, best_work = plan.device_seconds, best.device_seconds
    spent, best_spent = sum(work.values()), sum(best_work.values())
    if spent / best_spent > (plan.seconds / best.seconds) ** 0.5:  # more work, rather than more idle devices
        part = max(work, key=lambda cause: work[cause] - best_work.get(cause, 0.0))
        return f"its calls take {spent:.3g} s of devices, those of the best {best_spent:.3g} s: more of {PARTS[part]}"
    if best.staleness.versions:
        return "its calls wait for each other, and those of the best generate for later iterations meanwhile"
    size = plan.space.cluster.size
    busy, best_busy = spent / (size * plan.seconds), best_spent / (size * best.seconds)
    return f"its calls wait for each other: its devices work {busy:.0%} of the time, those of the best {best_busy:.0%}"


def _other_layouts(plan: PricedPlan, best: PricedPlan) -> str:
    """End of a sentence that compares two plans: the call with a different assignment whose seconds differ most, and
    the number of other such calls. Empty if there are none."""
    other = [name for name in plan.calls if plan.calls[name].assignment != best.calls[name].assignment]
    if not other:
        return ""
    name, *more = sorted(other, key=lambda call: -abs(plan.costs[call].seconds - best.costs[call].seconds))
    here, there = (priced.calls[name].assignment for priced in (plan, best))
    places = _places(plan, name), _places(best, name)
    if places[0] == places[1]:  # they differ in the engine or in what is done between the calls
        engines = f"engine {here.engine_name}{_between(here)}", f"engine {there.engine_name}{_between(there)}"
        places = f"{places[0]}, {engines[0]}", engines[1]
    rest = f"; {len(more)} other call{'s' if len(more) > 1 else ''} too" if more else ""
    return f": {name} on {places[0]}, not {places[1]}{rest}"


def _between(assignment: Assignment) -> str:
    share = "" if assignment.memory_share is None else f" with a share of {assignment.memory_share:g}"
    between = between_uses(assignment)
    return f"{f' with {between}' if between else ''}{share}"


def _by_run(plan: PricedPlan, fused: Fused) -> dict[str, CallCost]:
    """The costs of a plan's calls. The two calls of `fused` have one joint cost, whether the plan runs them fused, one
    after the other or side by side."""
    costs = plan.run_costs
    if not fused or plan.fused:
        return costs
    pair = [costs.pop(name) for name in fused]
    a, b = (plan.calls[name].assignment.mesh for name in fused)
    longer = max(pair, key=lambda cost: cost.seconds)
    return {**costs, joined(fused): pair[0] + pair[1] if a.overlaps(b) else longer}


def _places(plan: PricedPlan, run: str) -> str:
    """Meshes and strategies of one call, or of two fused calls, as text."""
    assignments = [plan.calls[name].assignment for name in parted(run)]
    places = " and ".join(dict.fromkeys(f"{a.mesh} ({a.strategy})" for a in assignments))
    return f"{places}, fused" if plan.fused and joined(plan.fused) == run else places


def explain(cost: CallCost) -> str:
    """The parts of a call's seconds as text, the largest first."""
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    whole = cost.seconds
    return "; ".join(
        f"{seconds / whole:.0%} {PARTS[name]} ({seconds:.3g} s)" for name, seconds in parts if seconds > 0.005 * whole
    )


def too_large(plan: PricedPlan) -> str:
    """The reason why a plan does not fit in memory, as text."""
    memory, estimate = plan.space.pricing.memory, plan.estimate
    usable = memory.usable if memory else 0.0
    largest = sorted(estimate.holds, key=lambda name: -estimate.holds[name])[:3]
    parts = ", ".join(f"{name} {estimate.holds[name] / 1e9:.1f}" for name in largest)
    return (
        f"device {estimate.fullest} would hold {estimate.memory / 1e9:.1f} GB ({parts}), and has {usable / 1e9:.0f} GB "
        f"for a plan"
    )
