"""When each device of a plan is at work on what, from how long every call takes by itself.

Pure, and the executor's twin: a device runs its calls in plan order, a call waits for its data, for its parameters and
for its devices. How long a call takes is its caller's to say: measured, or estimated.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import ExecutionPlan
from ..timeline import Span, Timeline


def simulate(
    plan: ExecutionPlan,
    seconds: Mapping[str, float],
    reallocations: Mapping[str, float] | None = None,
    *,
    iterations: int = 1,
    barrier: bool = False,
) -> Timeline:
    """The timeline of some iterations from a standing start.

    A reallocation keeps the devices of both its ends busy, just before the call that it is for; parameters that have
    not been trained yet are where they are wanted. A training waits for the last one of its role, a role's other calls
    for the training of the iteration before.

    Args:
        seconds: of each call on its mesh.
        reallocations: seconds to move parameters, by the call that gets them; of those that `plan.reallocations` names.
        iterations: how many.
        barrier: each begins when all of the one before is done, as the trainer's do; else they overlap where they can.

    Raises:
        KeyError: a call of the plan has no seconds.
    """
    edges = {edge.target: edge.source for edge in plan.reallocations}
    moves = {call: taken for call, taken in (reallocations or {}).items() if call in edges and taken > 0}
    needs = {name: [edge.producer for edge in plan.graph.data_edges if edge.consumer == name] for name in plan.order}
    free = [0.0] * plan.cluster.size
    ended: dict[str, float] = {}  # each call's latest end
    spans: list[Span] = []
    for step in range(iterations):
        before = dict(ended)  # the ends of the iteration before
        if barrier:
            free = [max(free)] * len(free)
        for name in plan.order:
            trained = plan.graph.train_call(plan.graph.call(name).role)
            ready = max([before.get(trained, 0.0) if trained else 0.0, *(ended[other] for other in needs[name])])
            mesh = plan.mesh(name).devices
            if step and name in moves:
                both = sorted({*mesh, *plan.mesh(edges[name]).devices})
                ready = _run(f"{edges[name]} -> {name}", both, ready, moves[name], step, free, spans)
            ended[name] = _run(name, list(mesh), ready, seconds[name], step, free, spans)
    return Timeline(spans)


def _run(
    name: str, devices: list[int], ready: float, seconds: float, step: int, free: list[float], spans: list[Span]
) -> float:
    """Give the devices the work as soon as it is ready and all of them are free; its end."""
    start = max([ready, *(free[device] for device in devices)])
    for device in devices:
        free[device] = start + seconds
        spans.append(Span(name, device, start, start + seconds, step))
    return start + seconds


def iteration_seconds(
    plan: ExecutionPlan, seconds: Mapping[str, float], reallocations: Mapping[str, float], *, barrier: bool = False
) -> float:
    """Of one iteration in the long run: of the last of eight."""
    timeline = simulate(plan, seconds, reallocations, iterations=8, barrier=barrier)
    ends = [max(span.end for span in timeline.of_step(step).spans) for step in (6, 7)]
    return ends[1] - ends[0]
