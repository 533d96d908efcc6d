"""The rules for two calls that train at the same time on one mesh (`ExecutionPlan.fused`).

The second role's pipeline stages are in reverse order, so that a stage can compute for one role while it would wait for
the other (RLHFuse, arXiv 2409.13221, section 5). The planner chooses the order of the forwards and backwards, and
`engines/training/fused_training` runs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..common.errors import PlanError, shown, suggest
from .assignment import Assignment, in_place
from .dataflow import DataflowGraph


Fused = tuple[str, str] | tuple[()]
ENGINE = "megatron"
_AND = " + "
_EXAMPLE = "fused: [actor.train, critic.train]"


def read_fused(value: object) -> Fused:
    """`fused` in a plan's file. Raises `PlanError`."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(name, str) for name in value):
        raise PlanError(f"fused names two calls, like {_EXAMPLE}, not {shown(value)}.")
    return value[0], value[1]


def fused_problems(graph: DataflowGraph, assignments: Mapping[str, Assignment], fused: Fused) -> Iterator[str]:
    """Sentences about problems with the calls that a plan fuses."""
    if not isinstance(fused, tuple) or len(fused) not in (0, 2) or not all(isinstance(name, str) for name in fused):
        yield f"fused names two calls, like {_EXAMPLE}, not {shown(fused)}."
        return
    unknown = [name for name in fused if name not in graph.order]
    for name in unknown:
        yield f"fused: there is no call {shown(name)}; {suggest(name, graph.order)}"
    if unknown or not fused or any(name not in assignments for name in fused):
        return
    if fused[0] == fused[1]:
        yield f"fused: {fused[0]} is named twice; name two calls that train, like {_EXAMPLE}."
        return
    frozen = [name for name in fused if not graph.call(name).trains]
    if frozen:
        yield f"fused: {' and '.join(frozen)} does not train; fused are two calls that train, like {_EXAMPLE}."
        return
    yield from _mesh_problems(*fused, assignments)
    yield from order_problems(graph, fused)


def _mesh_problems(first: str, second: str, assignments: Mapping[str, Assignment]) -> Iterator[str]:
    left, right = assignments[first], assignments[second]
    if left.mesh != right.mesh:
        yield f"fused: {first} is on mesh {left.mesh} and {second} on {right.mesh}; give both the same mesh."
    elsewhere = [name for name in (first, second) if assignments[name].engine != ENGINE]
    if elsewhere:
        yield (
            f"fused: {' and '.join(elsewhere)} runs on {assignments[elsewhere[0]].engine}, and only the stages of "
            f"engine {ENGINE} can run two roles at the same time."
        )
        return
    stages = left.strategy.pp, right.strategy.pp
    if min(stages) == 1:
        yield (
            f"fused: {first if stages[0] == 1 else second} has pp: 1; fusing fills the time in which the stages of a "
            f"pipeline wait for each other, so both calls need pp: 2 or more."
        )
    elif max(stages) % min(stages):
        yield f"fused: pp {stages[0]} of {first} and pp {stages[1]} of {second}: one must divide the other."
    if left.strategy.tp != right.strategy.tp:
        yield f"fused: tp {left.strategy.tp} of {first} and tp {right.strategy.tp} of {second}; give both the same tp."


def order_problems(graph: DataflowGraph, fused: tuple[str, str]) -> Iterator[str]:
    """A sentence for each call between the two that needs the earlier one: both run in the place of the later one."""
    earlier, later = sorted(fused, key=graph.order.index)
    call = graph.call(earlier)
    for name in graph.order[graph.order.index(earlier) + 1 : graph.order.index(later) + 1]:
        other = graph.call(name)
        if set(call.outputs) & set(other.inputs) or other.role is call.role:
            yield (
                f"fused: {name} needs the parameters that {earlier} has trained, so {earlier} and {later} cannot train "
                f"together."
            )


def joined(calls: Collection[str]) -> str:
    """The joint name of calls that run together."""
    return _AND.join(calls)


def parted(name: str) -> tuple[str, ...]:
    """The inverse of `joined`."""
    return tuple(name.split(_AND))


def together(fused: Fused, order: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The calls of `order` in the order of execution: the fused calls together in the place of the later one, if both
    are in `order`; the others one by one."""
    if not fused or not set(fused) <= set(order):
        return tuple((name,) for name in order)
    earlier, later = sorted(fused, key=list(order).index)
    return tuple(tuple(fused) if name == later else (name,) for name in order if name != earlier)


def is_reversed(graph: DataflowGraph, assignments: Mapping[str, Assignment], fused: Fused, call: str) -> bool:
    """True if the first pipeline stage of a call is on the last device of its pipeline: for the second fused call, and
    for the calls that use its parameters in place."""
    if not fused or graph.call(call).role is not graph.call(fused[1]).role:
        return False
    home, assignment = assignments[fused[1]], assignments[call]
    return assignment.engine == ENGINE and in_place(home, assignment)
