"""When each device of a plan is at work on what, from how long every call takes by itself.

Pure, and the executor's twin: a device runs its calls in plan order, a call waits for its data, for its parameters and
for its devices. How long a call takes is its caller's to say: measured, or estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ..plan.cluster import DeviceMesh
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Span, Timeline
from .hardware import Sharing


@dataclass(frozen=True)
class Task:
    """Something that keeps devices busy once per iteration: a call, or a reallocation.

    Args:
        meshes: whose devices are all busy with it; a reallocation has two.
        after: places of earlier tasks of the same iteration whose results it needs.
        previous: the place of the task of the iteration before that it needs.
        moves: parameters; in the first iteration they are where they are wanted.
    """

    name: str
    meshes: tuple[DeviceMesh, ...]
    seconds: float
    after: tuple[int, ...] = ()
    previous: int | None = None
    moves: bool = False

    @property
    def devices(self) -> list[int]:
        return sorted({device for mesh in self.meshes for device in mesh.devices})


def tasks_of(plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float]) -> list[Task]:
    """A plan's calls in its order, each after the reallocation that is for it, if that takes time.

    Raises:
        KeyError: a call of the plan has no seconds.
    """
    edges = {edge.target: edge.source for edge in plan.reallocations}
    where: dict[str, int] = {}
    tasks: list[Task] = []
    waiting: list[tuple[int, str]] = []  # places whose `previous` is the place of that call
    for name in plan.order:
        trained = plan.graph.train_call(plan.graph.call(name).role)
        after = [where[edge.producer] for edge in plan.graph.data_edges if edge.consumer == name]
        if moves.get(name, 0.0) > 0 and name in edges:
            meshes = (plan.mesh(edges[name]), plan.mesh(name))
            waiting.append((len(tasks), edges[name]))
            after.append(len(tasks))
            # The executor moves parameters when it comes to the call, so its data are there first.
            data = tuple(after[:-1])
            tasks.append(Task(f"{edges[name]} -> {name}", meshes, moves[name], data, moves=True))
        where[name] = len(tasks)
        if trained is not None:
            waiting.append((len(tasks), trained))
        tasks.append(Task(name, (plan.mesh(name),), seconds[name], tuple(after)))
    previous = {place: where[name] for place, name in waiting}
    return [Task(t.name, t.meshes, t.seconds, t.after, previous.get(place), t.moves) for place, t in enumerate(tasks)]


def task_times(
    tasks: Sequence[Task],
    *,
    iterations: int = 1,
    barrier: bool = False,
    warm: bool = False,
    sharing: Sharing | None = None,
) -> list[list[tuple[float, float]]]:
    """(start, end) of every task, by iteration. A task starts when what it needs and every earlier task that shares a
    device with it are done.

    Args:
        barrier: an iteration begins when all of the one before is done, as the trainer's do.
        warm: the first iteration moves parameters too.
        sharing: how devices slow each other down, where several share processors; a task's seconds are those that it
            takes with no other task beside it.
    """
    n = len(tasks)
    shares = [[any(a.overlaps(b) for a in one.meshes for b in other.meshes) for other in tasks] for one in tasks]
    needs: list[list[int]] = []  # by place in the unrolled list
    skipped: set[int] = set()
    for step in range(iterations):
        for at, task in enumerate(tasks):
            place = step * n + at
            if task.moves and step == 0 and not warm:
                skipped.add(place)
                needs.append([])
                continue
            own = [step * n + other for other in range(at) if shares[at][other] or other in task.after]
            if step:
                before = (step - 1) * n
                if barrier:
                    own += range(before, before + n)
                else:
                    own += [before + other for other in range(at, n) if shares[at][other]]
                    own += [before + task.previous] if task.previous is not None else []
            needs.append(own)
    lasting = [0.0 if at in skipped else tasks[at % n].seconds for at in range(n * iterations)]
    sizes = [sum(mesh.size for mesh in task.meshes) for task in tasks]
    ends = _undisturbed_times(needs, lasting) if sharing is None else _shared_times(needs, lasting, sizes, sharing)
    return [ends[step * n : (step + 1) * n] for step in range(iterations)]


def _undisturbed_times(needs: Sequence[Sequence[int]], lasting: Sequence[float]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for own, seconds in zip(needs, lasting, strict=True):
        start = max([found[at][1] for at in own], default=0.0)
        found.append((start, start + seconds))
    return found


def _shared_times(
    needs: Sequence[Sequence[int]], lasting: Sequence[float], sizes: Sequence[int], sharing: Sharing
) -> list[tuple[float, float]]:
    """Tasks that run at once slow each other down as their devices together do."""
    n = len(sizes)
    left, open_needs = list(lasting), [set(own) for own in needs]
    begun: dict[int, float] = {}
    found: list[tuple[float, float]] = [(0.0, 0.0)] * len(needs)
    waiting, now = list(range(len(needs))), 0.0
    slowdown = cache(sharing.slowdown)
    while waiting or begun:
        for at in [at for at in waiting if not open_needs[at]]:
            waiting.remove(at)
            begun[at] = now
        crowd = slowdown(sum(sizes[at % n] for at in begun))
        rates = {at: min(1.0, slowdown(sizes[at % n]) / crowd) for at in begun}
        step = min(left[at] / rate for at, rate in rates.items())
        now += step
        done = []
        for at in begun:
            left[at] -= step * rates[at]
            if left[at] <= 1e-12:
                done.append(at)
        for at in done:
            found[at] = (begun.pop(at), now)
        for at in waiting:
            open_needs[at].difference_update(done)
    return found


def simulate(
    plan: ExecutionPlan,
    seconds: Mapping[str, float],
    reallocations: Mapping[str, float] | None = None,
    *,
    iterations: int = 1,
    barrier: bool = False,
    sharing: Sharing | None = None,
) -> Timeline:
    """The timeline of some iterations from a standing start.

    A reallocation keeps the devices of both its ends busy, just before the call that it is for; parameters that have
    not been trained yet are where they are wanted. A training waits for the last one of its role, a role's other calls
    for the training of the iteration before.

    Args:
        seconds: of each call on its mesh.
        reallocations: seconds to move parameters, by the call that gets them; of those that `plan.reallocations` names.
        iterations: how many.
        barrier, sharing: as `task_times`'.

    Raises:
        KeyError: a call of the plan has no seconds.
    """
    tasks = tasks_of(plan, seconds, reallocations or {})
    times = task_times(tasks, iterations=iterations, barrier=barrier, sharing=sharing)
    return Timeline(
        Span(task.name, device, start, end, step)
        for step, row in enumerate(times)
        for task, (start, end) in zip(tasks, row, strict=True)
        if step or not task.moves
        for device in task.devices
    )


def iteration_seconds(
    plan: ExecutionPlan,
    seconds: Mapping[str, float],
    reallocations: Mapping[str, float],
    *,
    barrier: bool = False,
    sharing: Sharing | None = None,
) -> float:
    """Of one iteration in the long run: of the last of eight."""
    return steady_seconds(tasks_of(plan, seconds, reallocations), barrier=barrier, sharing=sharing)


def steady_seconds(
    tasks: Sequence[Task], *, barrier: bool = False, sharing: Sharing | None = None, iterations: int = 8
) -> float:
    """Seconds of an iteration in the long run."""
    if barrier:
        return max(end for _, end in task_times(tasks, warm=True, sharing=sharing)[0])
    times = task_times(tasks, iterations=iterations, sharing=sharing)
    ends = [max(end for _, end in row) for row in times[-2:]]
    return ends[1] - ends[0]
