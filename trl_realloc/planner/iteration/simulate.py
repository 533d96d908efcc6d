"""Simulates the executor: when each device runs which call, from the seconds that each call takes alone.

A device runs its calls in plan order. A call waits for its data, for its parameters and for its devices. Without shared
processors, an iteration in the steady state has a closed form, which is fast enough for the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...plan.algorithm_graphs import has_host_loop
from ...plan.cluster import DeviceMesh
from ...plan.dataflow import DataflowGraph
from ...plan.execution_plan import ExecutionPlan
from ...plan.fused import Fused, joined, parted, together
from ...plan.streams import early_call
from ..cost.hardware import Sharing
from .activities import Activities, devices_by_node
from .device_queues import DeviceQueues, Work


class Overlap(StrEnum):
    """Tasks that may begin before the previous iteration has ended on all devices."""

    NONE = "none"
    GENERATION = "generation"  # only tasks that are `early`; so does this executor
    ALL = "all"  # all tasks; so does ReaL's executor

    @staticmethod
    def of(plan: ExecutionPlan) -> Overlap:
        return Overlap.of_runs(plan.graph, barrier=plan.barrier)

    @staticmethod
    def of_runs(graph: DataflowGraph, *, barrier: bool) -> Overlap:
        """Overlap in runs of a graph, with or without a barrier between iterations."""
        return Overlap.NONE if barrier or has_host_loop(graph) else Overlap.GENERATION


Times = tuple[float, float]  # start and end, seconds

# iterations after which all iterations are alike
STEADY = {Overlap.NONE: 1, Overlap.GENERATION: 3, Overlap.ALL: 4}


@dataclass(frozen=True)
class IterationTask:
    """A call, two calls that the plan fuses, or a reallocation. It occupies devices once in each iteration.

    Args:
        meshes: meshes whose devices are occupied; a reallocation has two.
        after: indices of earlier tasks of the same iteration whose results it needs.
        previous: index of the task of the previous iteration whose result it needs.
        moves: whether it is a reallocation.
        early: whether it is the first generation, in a vLLM engine, or the reallocation to it. It begins as soon as its
            devices have ended their tasks of the previous iteration.
    """

    name: str
    meshes: tuple[DeviceMesh, ...]
    seconds: float
    after: tuple[int, ...] = ()
    previous: int | None = None
    moves: bool = False
    early: bool = False

    @property
    def calls(self) -> set[str]:
        """The calls that it runs; for a reallocation, the call that receives the parameters."""
        return set(parted(self.name.rpartition(" -> ")[2]))

    @property
    def devices(self) -> list[int]:
        return sorted({device for mesh in self.meshes for device in mesh.devices})


class GraphTasks:
    """The tasks of a graph's iterations under any assignments.

    Args:
        fused: two calls that train together.

    Attributes:
        names: names of the calls in the graph's order. The indices of calls refer to it.
        runs: calls of each task that computes: the two fused calls together, the others one by one.
        data: calls whose outputs each call reads.
        home: call that trains each call's role; `None` if none does.
    """

    def __init__(self, graph: DataflowGraph, fused: Fused = ()) -> None:
        indices = {name: index for index, name in enumerate(graph.order)}
        trained = [graph.train_call(graph.call(name).role) for name in graph.order]
        self.names = graph.order
        self.runs = [tuple(indices[name] for name in names) for names in together(fused, self.names)]
        self.data = [
            tuple(indices[edge.producer] for edge in graph.data_edges if edge.consumer == name) for name in self.names
        ]
        self.home = [None if name is None else indices[name] for name in trained]
        self.run_names = [joined([self.names[call] for call in run]) for run in self.runs]
        self._move_names = [f"{home} -> {name}" for name, home in zip(self.names, trained, strict=True)]

    def tasks(
        self, meshes: Sequence[DeviceMesh], seconds: Sequence[float], moves: Mapping[int, float], early: str | None
    ) -> list[IterationTask]:
        """The tasks of an iteration in their order. A reallocation that takes time precedes its call: the executor
        moves parameters when it reaches the call, after the call's data have arrived.

        Args:
            meshes: mesh of each call.
            seconds: seconds of each entry of `runs`.
            moves: seconds of each reallocation, by the call that receives the parameters.
            early: name of the call whose tasks are early.
        """
        task_of = [0] * len(self.names)  # index of each call's task
        count = 0
        for run in self.runs:
            count += moves.get(run[0], 0.0) > 0
            for call in run:
                task_of[call] = count
            count += 1
        tasks: list[IterationTask] = []
        for run, name, lasting in zip(self.runs, self.run_names, seconds, strict=True):
            call = run[0]
            after = tuple(task_of[producer] for member in run for producer in self.data[member])
            home, is_early = self.home[call], self.names[call] == early
            previous = None if home is None else task_of[home]
            if home is not None and moves.get(call, 0.0) > 0:
                both, move = (meshes[home], meshes[call]), self._move_names[call]
                tasks.append(IterationTask(move, both, moves[call], after, previous, moves=True, early=is_early))
                after = (*after, len(tasks) - 1)
            tasks.append(IterationTask(name, (meshes[call],), lasting, after, previous, early=is_early))
        return tasks


def tasks_of(plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float]) -> list[IterationTask]:
    """The tasks of a plan.

    Args:
        seconds: seconds of each call; two calls that the plan fuses have one entry under their `joined` name.
        moves: seconds of each reallocation, by the call that receives the parameters.

    Raises:
        KeyError: a call of the plan has no seconds.
    """
    graph_tasks, moved = GraphTasks(plan.graph, plan.fused), {edge.target for edge in plan.reallocations}
    return graph_tasks.tasks(
        [plan.mesh(name) for name in graph_tasks.names],
        [seconds[name] for name in graph_tasks.run_names],
        {graph_tasks.names.index(name): moves[name] for name in moved if name in moves},
        early_call(plan.graph, plan.assignments),
    )


def plan_times(
    plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float], sharing: Sharing | None = None
) -> tuple[float, list[tuple[IterationTask, Times]]]:
    """An iteration of a plan in the steady state: its seconds from the end of the previous iteration, and the times of
    every task relative to this end. The arguments are those of `tasks_of` and `simulated_iterations`.

    Raises:
        KeyError: a call of the plan has no seconds.
    """
    tasks = tasks_of(plan, seconds, moves)
    whole, times = steady_times(tasks, Overlap.of(plan), sharing, plan.cluster.devices_per_node)
    return whole, list(zip(tasks, times, strict=True))


def steady_times(
    tasks: Sequence[IterationTask],
    overlap: Overlap,
    sharing: Sharing | None = None,
    devices_per_node: int | None = None,
) -> tuple[float, list[Times]]:
    """`plan_times` of tasks."""
    if sharing is None:
        return undisturbed_iteration(tasks, overlap)
    times = simulated_iterations(tasks, 1, overlap, sharing, devices_per_node)[0]
    if overlap is Overlap.NONE or (overlap is Overlap.GENERATION and not _gains(tasks, times)):
        return max(end for _, end in times), times
    *_, before, times = simulated_iterations(tasks, STEADY[overlap], overlap, sharing, devices_per_node)
    zero = max(end for _, end in before)
    return max(end for _, end in times) - zero, [(start - zero, end - zero) for start, end in times]


def simulated_iterations(
    tasks: Sequence[IterationTask],
    iterations: int,
    overlap: Overlap = Overlap.GENERATION,
    sharing: Sharing | None = None,
    devices_per_node: int | None = None,
) -> list[list[Times]]:
    """The times of every task, for each iteration. A task starts when the tasks that it needs and all earlier tasks
    that share a device with it have ended.

    Args:
        overlap: tasks that do not wait for the end of the previous iteration.
        sharing: slowdown of devices that share processors; `None` if they share none. A task's seconds are those that
            it takes while no other task runs.
        devices_per_node: devices of different nodes share no processors; `None` for one node.
    """
    activities = Activities(sharing)
    queues = DeviceQueues(activities, lambda devices: devices_by_node(devices, devices_per_node))
    rows: list[list[Work]] = []
    for _ in range(iterations):
        before, row = rows[-1] if rows else [], list[Work]()
        for task in tasks:
            needs = [row[index] for index in task.after]
            if overlap is Overlap.NONE or (overlap is Overlap.GENERATION and not task.early):
                needs += before
            elif before and task.previous is not None:
                needs.append(before[task.previous])
            row.append(Work(task.name, task.devices, task.seconds, needs=needs))
            queues.give(row[-1])
        rows.append(row)
    queues.advance()
    while activities:
        activities.next()
    return [[(work.start, work.end) for work in row] for row in rows]


def undisturbed_iteration(tasks: Sequence[IterationTask], overlap: Overlap = Overlap.NONE) -> tuple[float, list[Times]]:
    """`steady_times` without shared processors, in closed form, because the search needs it thousands of times."""
    shares = [
        [any(a.overlaps(b) for a in task.meshes for b in other.meshes) for other in tasks[:n]]
        for n, task in enumerate(tasks)
    ]
    waits_for = [[m for m in range(n) if shares[n][m] or m in task.after] for n, task in enumerate(tasks)]
    # for each task that may begin in the previous iteration: the tasks of that iteration for which it waits
    before = {
        n: [m for m in range(len(tasks)) if m in (n, task.previous) or shares[max(n, m)][min(n, m)]]
        for n, task in enumerate(tasks)
        if overlap is Overlap.ALL or (overlap is Overlap.GENERATION and task.early)
    }
    floors, ends, seconds = [0.0] * len(tasks), [0.0] * len(tasks), 0.0
    for _ in range(STEADY[overlap]):
        starts = list(floors)
        for n, task in enumerate(tasks):
            starts[n] = max([floors[n], *(ends[other] for other in waits_for[n])])
            ends[n] = starts[n] + task.seconds
        seconds = max(ends)
        changed = [*floors]
        for n, others in before.items():
            changed[n] = max(ends[other] for other in others) - seconds
        if changed == floors:
            break
        floors = changed
    return seconds, list(zip(starts, ends, strict=True))


def _gains(tasks: Sequence[IterationTask], times: Sequence[Times]) -> bool:
    """True if the first early task has its devices and parameters before the end of the iteration."""
    first = next((task for task in tasks if task.early), None)
    if first is None:
        return False
    needs = [
        end
        for index, (task, (_, end)) in enumerate(zip(tasks, times, strict=True))
        if index == first.previous or any(a.overlaps(b) for a in first.meshes for b in task.meshes)
    ]
    return max(needs) < max(end for _, end in times)
