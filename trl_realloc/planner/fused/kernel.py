"""`construct`: one fused schedule from priorities, compiled by Numba. Some 2,000 tasks take about 2 ms.

A *chain* is a micro-batch: `2 * L` tasks, first over its `L` stages and then back. It takes memory on a stage with the
first task there and frees it with the second. Read from its end, a chain has the same form, with the last backward
first. Therefore the same code builds schedules from either end of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from .pipelines import Array


Integers = NDArray[np.int64]
NEVER = np.inf
F = TypeVar("F", bound=Callable[..., Any])


class Chains(NamedTuple):
    """All chains, task after task. Task `o` of chain `j` is one of `offsets[j]` to `offsets[j + 1]`.

    Args:
        offsets: index of each chain's first task, and the number of tasks. Shape `(chains + 1,)`.
        groups: pipeline copy of each chain. Shape `(chains,)`.
        stages: stage of each task. Shape `(tasks,)`.
        seconds: time of each task. Shape `(tasks,)`.
        memory: memory of the chain on the task's stage between its two tasks there. Shape `(tasks,)`.
    """

    offsets: Integers
    groups: Integers
    stages: Integers
    seconds: Array
    memory: Array


class Limits(NamedTuple):
    """Memory limits of a schedule.

    Args:
        memory: memory limit of each stage. Shape `(stages,)`.
        scarce: whether all chains together exceed `memory` on some stage.
        chains: largest number of chains of a group with memory on a stage. Shape `(groups, stages)`.
    """

    memory: Array
    scarce: bool
    chains: Integers


def compiled(function: F) -> F:
    """Compile a function at its first call. The machine code is cached on disk if a folder is writable."""
    try:
        machine_code: F = numba.njit(cache=True)(function)
    except RuntimeError:  # Numba found no folder for its cache
        machine_code = numba.njit(function)
    return machine_code


@compiled
def can_finish(chains: Chains, following: Integers, begun: Integers, left: Array, tolerance: float) -> bool:
    """True if all chains that hold memory can end one after the other (the banker's algorithm).

    Args:
        following: next task of each chain.
        begun: chains that hold memory.
        left: free memory on each stage.
    """
    left = left.copy()
    ended = np.zeros(len(begun), np.bool_)
    remaining = len(begun)
    progress = True
    while remaining > 0 and progress:
        progress = False
        for i in range(len(begun)):
            if ended[i]:
                continue
            begin, end = chains.offsets[begun[i]], chains.offsets[begun[i] + 1]
            middle = (begin + end) // 2
            task = following[begun[i]]
            fits = True
            for o in range(task, middle):
                if chains.memory[o] > left[chains.stages[o]] + tolerance:
                    fits = False
                    break
            if fits:
                for o in range(begin, task if task <= middle else begin + end - task):
                    left[chains.stages[o]] += chains.memory[o]
                ended[i] = progress = True
                remaining -= 1
    return remaining == 0


@compiled
def release_order(chains: Chains, priorities: Array) -> tuple[Integers, Integers]:
    """The order in which the chains of each group begin: the first chain of each group, and each chain's successor or
    -1."""
    count = len(chains.groups)
    firsts = np.empty(count)
    for j in range(count):
        firsts[j] = priorities[chains.offsets[j]]
    last = np.full(chains.groups.max() + 1, -1)
    heads = np.full(len(last), -1)
    successors = np.full(count, -1)
    for j in np.argsort(firsts, kind="mergesort"):
        group = chains.groups[j]
        if last[group] < 0:
            heads[group] = j
        else:
            successors[last[group]] = j
        last[group] = j
    return heads, successors


@compiled
def lowest_number(
    chains: Chains,
    open_chains: Integers,
    allowed: NDArray[np.bool_],
    following: Integers,
    arrival: Array,
    free: Array,
    priorities: Array,
) -> tuple[int, float]:
    """The task with the lowest priority number, as (chain, start); chain -1 if none is allowed."""
    chosen, start, lowest = -1, 0.0, NEVER
    for j in open_chains:
        o = following[j]
        if allowed[j] and priorities[o] < lowest:
            chosen, start, lowest = j, max(arrival[j], free[chains.stages[o]]), priorities[o]
    return chosen, start


@compiled
def choose(
    chains: Chains,
    open_chains: Integers,
    allowed: NDArray[np.bool_],
    following: Integers,
    arrival: Array,
    free: Array,
    priorities: Array,
    patience: float,
    tolerance: float,
) -> tuple[int, float]:
    """The next task by the rule of Giffler and Thompson, as (chain, start); chain -1 if none is allowed.

    The stage is that of the task which could end first. Among the stage's tasks that could begin before this end, the
    one with the lowest priority number is chosen.

    Args:
        patience: share of the time until that end for which a stage may wait: 0 (a stage never idles while a task is
            ready) to 1 (it may wait for any such task) and above. Infinity: the task with the lowest number on any
            stage. Only this allows every order, which matters if memory is scarce: a forward may wait although there
            is time and memory for it.
    """
    if patience == NEVER:
        return lowest_number(chains, open_chains, allowed, following, arrival, free, priorities)
    first_end, stage, lowest = NEVER, -1, NEVER
    for j in open_chains:
        if allowed[j]:
            o = following[j]
            end = max(arrival[j], free[chains.stages[o]]) + chains.seconds[o]
            if end < first_end - tolerance or (end < first_end + tolerance and priorities[o] < lowest):
                first_end, stage, lowest = end, chains.stages[o], priorities[o]
    first_start = NEVER
    for j in open_chains:
        if allowed[j] and chains.stages[following[j]] == stage:
            first_start = min(first_start, max(arrival[j], free[stage]))
    latest = max(first_start + patience * (first_end - first_start) - tolerance, first_start + tolerance)
    chosen, chosen_start, lowest = -1, 0.0, NEVER
    for j in open_chains:
        o = following[j]
        if allowed[j] and chains.stages[o] == stage and priorities[o] < lowest:
            start = max(arrival[j], free[stage])
            if start <= latest:
                chosen, chosen_start, lowest = j, start, priorities[o]
    return chosen, chosen_start


@compiled
def construct(
    chains: Chains, limits: Limits, priorities: Array, patience: float, starts: Array, places: Integers
) -> float:
    """Build a schedule task by task.

    Args:
        priorities: one finite number for each task. Among the tasks that a stage could run next, the lowest is chosen.
        patience: argument of `choose`.
        starts: output, start of each task. Shape `(tasks,)`.
        places: output, order in which the tasks were chosen, which is also the order on each stage. Shape `(tasks,)`.

    Returns:
        The makespan; infinity if the limits allow no task to run.
    """
    count, tasks = len(chains.groups), len(chains.stages)
    tolerance = 1e-9 * max(chains.seconds.max(), 1e-300)
    memory_tolerance = 1e-9 * chains.memory.max()
    following = chains.offsets[:-1].copy()
    arrival, free = np.zeros(count), np.zeros(len(limits.memory))
    used = np.zeros(len(limits.memory))
    holding = np.zeros(limits.chains.shape, np.int64)
    open_chains, successors = release_order(chains, priorities)
    begun = np.empty(0, np.int64)
    allowed = np.zeros(count, np.bool_)
    makespan = 0.0
    for place in range(tasks):
        for j in open_chains:
            o = following[j]
            s = chains.stages[o]
            allowed[j] = 2 * o >= chains.offsets[j] + chains.offsets[j + 1] or (
                holding[chains.groups[j], s] < limits.chains[chains.groups[j], s]
                and used[s] + chains.memory[o] <= limits.memory[s] + memory_tolerance
            )
        while True:
            j, start = choose(chains, open_chains, allowed, following, arrival, free, priorities, patience, tolerance)
            if j < 0:
                return NEVER
            o = following[j]
            s = chains.stages[o]
            takes = 2 * o < chains.offsets[j] + chains.offsets[j + 1]
            following[j] += 1
            if not takes:
                used[s] -= chains.memory[o]
                break
            used[s] += chains.memory[o]
            if not limits.scarce:
                break
            after = np.append(begun, j) if o == chains.offsets[j] else begun
            if can_finish(chains, following, after, limits.memory - used, memory_tolerance):
                begun = after
                break
            used[s] -= chains.memory[o]
            following[j] -= 1
            allowed[j] = False
        holding[chains.groups[j], s] += 1 if takes else -1
        starts[o], places[o] = start, place
        arrival[j] = free[s] = start + chains.seconds[o]
        makespan = max(makespan, arrival[j])
        if o == chains.offsets[j] and successors[j] >= 0:
            open_chains = np.append(open_chains, successors[j])
        if o == chains.offsets[j + 1] - 1:
            open_chains = open_chains[open_chains != j]
            begun = begun[begun != j]
    return makespan
