"""Routes of a call's samples between ranks: pure functions of the plan.

The first rank of each data-parallel replica of a call sends its outputs to the leader (the first rank) of every mesh
that reads them. The leader divides the samples among the replicas of its call, and sends each share to the replica's
first rank, which forwards it. So a sample goes only to the ranks that read it, and only a leader's messages grow with
the number of devices. The sending is in `exchange`.

A rank with local samples (`Executor.perform_own`) sends them to the leader of the mesh, and rank 0 sends each rank the
outputs of its samples.
"""

from __future__ import annotations

from collections.abc import Collection

from ...plan.execution_plan import ExecutionPlan


RESULTS = 0  # the rank that receives the outputs of every call, for metrics, logs and the timeline


def sources(plan: ExecutionPlan, call: str) -> tuple[int, ...]:
    """The ranks that send the call's outputs: the first of each data-parallel replica."""
    return tuple(plan.mesh(call).devices)[:: _replica_size(plan, call)]


def receivers(plan: ExecutionPlan, call: str, running: Collection[str]) -> tuple[int, ...]:
    """The ranks that receive all of the call's outputs, ascending.

    Args:
        running: the calls that this iteration runs.
    """
    outputs = set(plan.graph.call(call).outputs)
    readers = [name for name in plan.order if name in running and outputs & set(columns_read(plan, name))]
    return tuple(sorted({RESULTS, *(plan.mesh(reader).leader for reader in readers)}))


def columns_read(plan: ExecutionPlan, call: str) -> tuple[str, ...]:
    """The columns that the leader of the call's mesh needs: the call's inputs; for a call that trains, the inputs of
    all training calls, which `Algorithm.prepare` may read."""
    graph = plan.graph
    if not graph.call(call).trains:
        return graph.call(call).inputs
    trainings = [other for other in map(graph.call, graph.order) if other.trains]
    return tuple(dict.fromkeys(column for other in trainings for column in other.inputs))


def replica(plan: ExecutionPlan, call: str, rank: int) -> int:
    """Index of a rank's data-parallel replica of the call."""
    return plan.mesh(call).index(rank) // _replica_size(plan, call)


def replica_ranks(plan: ExecutionPlan, call: str, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's replica of the call, ascending."""
    size = _replica_size(plan, call)
    first = size * replica(plan, call, rank)
    return tuple(plan.mesh(call).devices)[first : first + size]


def is_divided_by_each(plan: ExecutionPlan, call: str) -> bool:
    """True if every rank of the mesh divides the samples by itself: the call does not train, and all of its inputs are
    columns of the data set, which every rank reads."""
    reads_data = all(plan.graph.producer(column) is None for column in plan.graph.call(call).inputs)
    return reads_data and not plan.graph.call(call).trains


def _replica_size(plan: ExecutionPlan, call: str) -> int:
    strategy = plan[call].strategy
    return strategy.tp * strategy.pp
