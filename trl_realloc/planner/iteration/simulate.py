"""Simulates the executor: when each device runs which call, from the seconds that each call takes alone.

A device runs its calls in plan order. A call waits for its data, for its parameters and for its devices. The seconds
are the caller's, measured or estimated. An iteration after the first ones also has a closed form, for the search.
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
    GENERATION = "generation"  # those that are `early`, as the executor does
    ALL = "all"  # as ReaL's executor does

    @staticmethod
    def of(plan: ExecutionPlan) -> Overlap:
        return Overlap.of_runs(plan.graph, barrier=plan.barrier)

    @staticmethod
    def of_runs(graph: DataflowGraph, *, barrier: bool) -> Overlap:
        """Overlap in runs of a graph, with or without a barrier between iterations."""
        return Overlap.NONE if barrier or has_host_loop(graph) else Overlap.GENERATION


Times = tuple[float, float]  # start and end, seconds

# iterations after which what one leaves to the next is the same each time
STEADY = {Overlap.NONE: 1, Overlap.GENERATION: 3, Overlap.ALL: 4}


@dataclass(frozen=True)
class IterationTask:
    """A call, two that the plan fuses, or a reallocation: it occupies devices once in each iteration.

    Args:
        meshes: meshes whose devices are occupied; a reallocation has two.
        after: indices of earlier tasks of the same iteration whose results it needs.
        previous: index of the task of the previous iteration whose result it needs.
        moves: it is a reallocation.
        early: it is the first generation, in a vLLM engine, or the reallocation to it. It begins as soon as its devices
            have ended their tasks of the previous iteration.
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
        """The calls that it runs; of a reallocation the call that it brings parameters to."""
        return set(parted(self.name.rpartition(" -> ")[2]))

    @property
    def devices(self) -> list[int]:
        return sorted({device for mesh in self.meshes for device in mesh.devices})


class GraphTasks:
    """The tasks of a graph's iterations under any assignments.

    Args:
        fused: two calls that train together.

    Attributes:
        names: of the calls, in their order. Other attributes and methods number the calls by it.
        runs: the calls of each task that computes: the fused ones together, the others one by one.
        data: of each call, those whose outputs it reads.
        home: of each call, the one that trains its role; `None` if none does.
    """

    def __init__(self, graph: DataflowGraph, fused: Fused = ()) -> None:
        place = {name: at for at, name in enumerate(graph.order)}
        trained = [graph.train_call(graph.call(name).role) for name in graph.order]
        self.names = graph.order
        self.runs = [tuple(place[name] for name in names) for names in together(fused, self.names)]
        self.data = [
            tuple(place[edge.producer] for edge in graph.data_edges if edge.consumer == name) for name in self.names
        ]
        self.home = [None if name is None else place[name] for name in trained]
        self.run_names = [joined([self.names[at] for at in run]) for run in self.runs]
        self._move_names = [f"{home} -> {name}" for name, home in zip(self.names, trained, strict=True)]

    def tasks(
        self, meshes: Sequence[DeviceMesh], seconds: Sequence[float], moves: Mapping[int, float], early: str | None
    ) -> list[IterationTask]:
        """The tasks of an iteration in their order; a reallocation that takes time stands before its call, because the
        executor moves parameters when it reaches the call, after the call's data have arrived.

        Args:
            meshes: of each call.
            seconds: of each run.
            moves: seconds of each reallocation, by the call that receives the parameters.
            early: the call whose tasks are early.
        """
        places = [0] * len(self.names)  # of the calls' tasks
        place = 0
        for run in self.runs:
            place += moves.get(run[0], 0.0) > 0
            for at in run:
                places[at] = place
            place += 1
        tasks: list[IterationTask] = []
        for run, name, lasting in zip(self.runs, self.run_names, seconds, strict=True):
            at = run[0]
            after = tuple(places[producer] for member in run for producer in self.data[member])
            home, is_early = self.home[at], self.names[at] == early
            previous = None if home is None else places[home]
            if home is not None and moves.get(at, 0.0) > 0:
                both, name_of_move = (meshes[home], meshes[at]), self._move_names[at]
                tasks.append(IterationTask(name_of_move, both, moves[at], after, previous, moves=True, early=is_early))
                after = (*after, len(tasks) - 1)
            tasks.append(IterationTask(name, (meshes[at],), lasting, after, previous, early=is_early))
        return tasks


def tasks_of(plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float]) -> list[IterationTask]:
    """The tasks of a plan.

    Args:
        seconds: of each call; of two that the plan fuses under their `joined` name.
        moves: of each reallocation, by the call that receives the parameters.

    Raises:
        KeyError: a call of the plan has no seconds.
    """
    made, moved = GraphTasks(plan.graph, plan.fused), {edge.target for edge in plan.reallocations}
    return made.tasks(
        [plan.mesh(name) for name in made.names],
        [seconds[name] for name in made.run_names],
        {made.names.index(name): moves[name] for name in moved if name in moves},
        early_call(plan.graph, plan.assignments),
    )


def plan_times(
    plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float], sharing: Sharing | None = None
) -> tuple[float, list[tuple[IterationTask, Times]]]:
    """An iteration of a plan after the first ones: seconds since the end of the one before, and the times of every task
    relative to that.

    Args:
        seconds, moves: as `tasks_of`'s.
        sharing: as `simulated_iterations`'.

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
        overlap: which tasks do not wait for the end of the previous iteration.
        sharing: how devices that share processors slow each other down; a task's seconds are those that it takes while
            no other task runs. `None` if each has its own.
        devices_per_node: devices of different nodes share no processors; `None` for one node.
    """
    activities = Activities(sharing)
    queues = DeviceQueues(activities, lambda devices: devices_by_node(devices, devices_per_node))
    rows: list[list[Work]] = []
    for _ in range(iterations):
        before, row = rows[-1] if rows else [], list[Work]()
        for task in tasks:
            needs = [row[at] for at in task.after]
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
    """`steady_times` where nothing is shared, in closed form, because the search asks for it thousands of times: what a
    task waits for in the iteration before is known from a pass over the tasks."""
    shares = [
        [any(a.overlaps(b) for a in task.meshes for b in other.meshes) for other in tasks[:n]]
        for n, task in enumerate(tasks)
    ]
    waits_for = [[at for at in range(n) if shares[n][at] or at in task.after] for n, task in enumerate(tasks)]
    before = {  # of a task that may begin before the end of the iteration before: the tasks there that it waits for
        n: [at for at in range(len(tasks)) if at in (n, task.previous) or shares[max(n, at)][min(n, at)]]
        for n, task in enumerate(tasks)
        if overlap is Overlap.ALL or (overlap is Overlap.GENERATION and task.early)
    }
    floors, ends, seconds = [0.0] * len(tasks), [0.0] * len(tasks), 0.0
    for _ in range(STEADY[overlap]):
        starts = list(floors)
        for at, task in enumerate(tasks):
            starts[at] = max([floors[at], *(ends[other] for other in waits_for[at])])
            ends[at] = starts[at] + task.seconds
        seconds = max(ends)
        changed = [*floors]
        for at, others in before.items():
            changed[at] = max(ends[other] for other in others) - seconds
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
        for at, (task, (_, end)) in enumerate(zip(tasks, times, strict=True))
        if at == first.previous or any(a.overlaps(b) for a in first.meshes for b in task.meshes)
    ]
    return max(needs) < max(end for _, end in times)
