"""The rules for which calls can train their first epoch on samples as they arrive (`Streams.first_epoch`).

The gradients of a sample are added when it has been scored, while others are still being generated, and the optimizer
step is made when all have been added (the separation of the adaptive placement framework, arXiv 2312.11819, section 3).
For this a sample's gradient must not depend on the rest of the batch but for a common factor. Who adds gradients is in
`runtime/arriving_samples`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..common.errors import PlanError, shown, suggest
from .algorithm_graphs import has_host_loop
from .assignment import Assignment
from .dataflow import CallKind, DataflowGraph


EXAMPLE = "first_epoch: [critic.train]"


def read_first_epoch(value: object) -> tuple[str, ...]:
    """`first_epoch` of the streams in a plan's file. Raises `PlanError`."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise PlanError(f"first_epoch names calls that train, like {EXAMPLE}, not {shown(value)}.")
    return tuple(value)


def why_not_on_arrival(
    graph: DataflowGraph,
    assignments: Mapping[str, Assignment],
    name: str,
    streamed: Collection[str],
    fused: Collection[str] = (),
) -> str:
    """Why a call that trains cannot add the gradients of samples as they arrive, in words; an empty text if it can.
    Whether its loss allows it, the run's algorithm says (`algorithms.base.ArrivalAlgorithm`).

    Args:
        streamed: the calls of the plan that generate and score sample by sample.
        fused: the calls that the plan trains together.
    """
    if has_host_loop(graph):
        return "TRL's loop trains when a whole batch has been scored"
    if name in fused:
        return "fused trains whole mini-batches of two calls together"
    producers = {producer for producer in map(graph.producer, graph.call(name).inputs) if producer is not None}
    whole = [producer for producer in graph.order if producer in producers and producer not in streamed]
    if whole:
        return f"it reads what {' and '.join(whole)} makes of whole batches"
    return ""


def calls_on_arrival(
    graph: DataflowGraph,
    assignments: Mapping[str, Assignment],
    names: Collection[str],
    streamed: Collection[str],
    fused: Collection[str] = (),
) -> tuple[str, ...]:
    """Those of the calls `names` that can train their first epoch on samples as they arrive, in the graph's order.

    Args:
        streamed, fused: as of `why_not_on_arrival`.
    """
    return tuple(
        name
        for name in graph.order
        if name in names and not why_not_on_arrival(graph, assignments, name, streamed, fused)
    )


def first_epoch_problems(
    graph: DataflowGraph,
    assignments: Mapping[str, Assignment],
    first_epoch: Collection[str],
    streamed: Collection[str],
    fused: Collection[str],
) -> Iterator[str]:
    """Sentences about what is wrong with the calls of `first_epoch`.

    Args:
        streamed, fused: as of `why_not_on_arrival`.
    """
    trainings = graph.calls_of(CallKind.TRAIN)
    for name in first_epoch:
        if name not in graph.order:
            yield f"streams: first_epoch: there is no call {shown(name)}; {suggest(name, trainings)}"
        elif name not in trainings:
            yield f"streams: first_epoch: {name} does not train; name calls that train, like {EXAMPLE}."
        elif reason := why_not_on_arrival(graph, assignments, name, streamed, fused):
            yield f"streams: {name} cannot train its first epoch on samples as they arrive: {reason}."
