"""`construct_in_turn`: schedules of pipelines whose micro-batches are equal, some four times as fast as `fused_kernel`.

Equal micro-batches of one copy can keep their order on every stage: if two change places, exchanging their names from
there on changes no time and no memory. So a stage has at most four tasks to choose from, the next forward and the next
backward of each model, and only two stages have other choices after a task is placed.

A chain is a micro-batch, as in `fused_kernel`; its position `o` of `2 * L` is a forward below `L`, then a backward.
Read from the end of time, a chain has the same form, and the last chain comes first. Which priorities are tried is in
`fused_search`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fused_kernel import NEVER, Integers, Limits, compiled
from .fused_pipelines import Array


STALE_BUILDS = 4  # builds in turn without a better makespan
SAME = 1e-9  # relative


class EqualChains(NamedTuple):
    """Pipeline copies of equal micro-batches. Tasks are numbered by copy, micro-batch and position.

    Args:
        lengths: the stages of each copy. Shape `(copies,)`.
        counts: the micro-batches of each copy. Shape `(copies,)`.
        offsets: the first task of each copy, and the number of all tasks. Shape `(copies + 1,)`.
        routes: the stage of a copy's position below `L`. Shape `(copies, stages)`.
        copies: the two copies that a stage runs, one of each model. Shape `(stages, 2)`.
        positions: the stage's position in the route of each. Shape `(stages, 2)`.
        seconds: of a task, by copy and position. Shape `(copies, 2 * stages)`.
        memory: of a micro-batch, by copy and position. Shape `(copies, stages)`.
    """

    lengths: Integers
    counts: Integers
    offsets: Integers
    routes: Integers
    copies: Integers
    positions: Integers
    seconds: Array
    memory: Array


@compiled
def can_all_end(
    lengths: Integers,
    routes: Integers,
    held: Array,
    forwards: Integers,
    left: Array,
    heads: Integers,
    ended: NDArray[np.bool_],
) -> bool:
    """Whether the begun micro-batches can all end, one after the other (the banker's algorithm).

    Those on their way back need nothing more. Of the others of a copy only the foremost must be looked at: what it
    gives back is what the next ones need.

    Args:
        forwards: that are placed of a copy on a stage. Shape `(copies, stages)`.
        left: the memory limits, overwritten.
        heads, ended: overwritten. Shape `(copies,)`.
    """
    for c in range(len(lengths)):
        heads[c] = forwards[c, routes[c, lengths[c] - 1]]  # the foremost that is not on its way back
        ended[c] = forwards[c, routes[c, 0]] == heads[c]
        for i in range(lengths[c]):
            count = forwards[c, routes[c, i]] - heads[c]
            if count == 0:
                break
            left[routes[c, i]] -= held[c, i] * count
    progress = True
    while progress:
        progress, all_ended = False, True
        for c in range(len(lengths)):
            if ended[c]:
                continue
            fits = True
            for i in range(lengths[c] - 1, -1, -1):
                if forwards[c, routes[c, i]] != heads[c]:
                    break
                if held[c, i] > left[routes[c, i]]:
                    fits = False
                    break
            if not fits:
                all_ended = False
                continue
            for i in range(lengths[c]):
                count = forwards[c, routes[c, i]] - heads[c]
                if count == 0:
                    break
                left[routes[c, i]] += held[c, i] * count
            ended[c] = progress = True
        if all_ended:
            return True
    return False


@compiled
def construct_equal(
    chains: EqualChains, limits: Limits, priorities: Array, patience: float, starts: Array, places: Integers
) -> tuple[float, float]:
    """Build a schedule task by task, by the rule of `fused_kernel.choose`. One long function: a call that passes the
    tuples takes as long as placing a task.

    Args:
        priorities: one finite number for each task. Of the tasks that a stage could run next, the lowest is run.
        patience: `fused_kernel.choose`.
        starts: filled with the start of each task. Shape `(tasks,)`.
        places: filled with the order in which the tasks were chosen, hence also the order on each stage.

    Returns:
        the makespan and the most memory of any stage; infinity if the limits leave no task that may run.
    """
    lengths, counts, offsets, routes = chains.lengths, chains.counts, chains.offsets, chains.routes
    copies_of, positions, seconds, held = chains.copies, chains.positions, chains.seconds, chains.memory
    memory, in_flight, scarce = limits.memory, limits.chains, limits.scarce
    copies, stages, tasks = len(lengths), len(memory), offsets[-1]
    tolerance = 1e-9 * max(seconds.max(), 1e-300)
    most = memory + 1e-9 * held.max()
    done = np.zeros((2, copies, stages), np.int64)  # forwards and backwards of a copy on a stage
    ends = np.full(tasks, NEVER)  # infinity before a task is placed
    free, used, left = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    heads, ended = np.zeros(copies, np.int64), np.zeros(copies, np.bool_)
    blocked = np.zeros((copies, stages), np.bool_)  # forwards that would let begun micro-batches wait for each other
    any_blocked = False
    # the next task of each stage: its copy or -1, its number and start, and the two numbers that compare the stages
    copy, task, start = np.empty(stages, np.int64), np.empty(stages, np.int64), np.empty(stages)
    key, second_key = np.empty(stages), np.empty(stages)
    is_old = np.ones(stages, np.bool_)  # whether the next task must be chosen anew
    ready_copy, ready_task = np.empty(4, np.int64), np.empty(4, np.int64)
    ready_start = np.empty(4)
    makespan = peak = 0.0
    for place in range(tasks):
        while True:
            s = -1
            for i in range(stages):
                if is_old[i]:
                    is_old[i] = False
                    ready = 0
                    first_end = first_start = first_priority = NEVER
                    for side in range(2):
                        g, o = copies_of[i, side], positions[i, side]
                        width = 2 * lengths[g]
                        forwards, backwards = done[0, g, i], done[1, g, i]
                        for kind in range(2):
                            if kind == 0:
                                if (
                                    forwards == counts[g]
                                    or blocked[g, i]
                                    or forwards - backwards >= in_flight[g, i]
                                    or used[i] + held[g, o] > most[i]
                                ):
                                    continue
                                number = offsets[g] + forwards * width + o
                            else:
                                if backwards == forwards:
                                    continue
                                o = width - 1 - o
                                number = offsets[g] + backwards * width + o
                            begin = max(ends[number - 1] if o else 0.0, free[i])
                            if begin == NEVER:
                                continue
                            ready_copy[ready], ready_task[ready], ready_start[ready] = g, number, begin
                            ready += 1
                            first_start = min(first_start, begin)
                            end = begin + seconds[g, o]
                            if end < first_end - tolerance or (
                                end < first_end + tolerance and priorities[number] < first_priority
                            ):
                                first_end, first_priority = end, priorities[number]
                    latest = NEVER
                    if patience != NEVER and ready:
                        latest = first_start + patience * (first_end - first_start) - tolerance
                        latest = max(latest, first_start + tolerance)
                    copy[i], lowest = -1, NEVER
                    for r in range(ready):
                        if ready_start[r] <= latest and priorities[ready_task[r]] < lowest:
                            lowest = priorities[ready_task[r]]
                            copy[i], task[i], start[i] = ready_copy[r], ready_task[r], ready_start[r]
                    key[i], second_key[i] = first_end, first_priority
                    if patience == NEVER:
                        key[i] = second_key[i] = lowest
                if copy[i] >= 0 and (
                    s < 0
                    or key[i] < key[s] - tolerance
                    or (key[i] < key[s] + tolerance and second_key[i] < second_key[s])
                ):
                    s = i
            if s < 0:
                return NEVER, NEVER
            g, number = copy[s], task[s]
            width = 2 * lengths[g]
            o = (number - offsets[g]) % width
            kind = 0 if o < lengths[g] else 1
            done[kind, g, s] += 1
            if kind or not scarce:
                break
            left[:] = most
            if can_all_end(lengths, routes, held, done[0], left, heads, ended):
                break
            done[kind, g, s] -= 1
            blocked[g, s] = is_old[s] = any_blocked = True
        used[s] += -held[g, width - 1 - o] if kind else held[g, o]
        peak = max(peak, used[s])
        starts[number], places[number] = start[s], place
        ends[number] = free[s] = start[s] + seconds[g, o]
        makespan = max(makespan, ends[number])
        if any_blocked:
            for i in range(stages):
                is_old[i] |= blocked[:, i].any()
            blocked[:] = any_blocked = False
        is_old[s] = True
        if o + 1 < width:
            is_old[routes[g, o + 1 if o + 1 < lengths[g] else width - 2 - o]] = True
    return makespan, peak


@compiled
def mirrored(chains: EqualChains, values: Array) -> Array:
    """One value for each task, read from the end of time."""
    result = np.empty_like(values)
    for g in range(len(chains.lengths)):
        begin, end = chains.offsets[g], chains.offsets[g + 1]
        result[begin:end] = values[begin:end][::-1]
    return result


@compiled
def construct_in_turn(
    chains: EqualChains, backwards: EqualChains, limits: Limits, priorities: Array, patience: float, seconds: Array
) -> tuple[float, float, Array, Array, int]:
    """Build from both ends of time in turn while the makespan falls, each with the last times as its priorities.

    Args:
        backwards: the chains read from the end of time.
        seconds: of each task.

    Returns:
        the best makespan, its memory peak, starts and places, and the number of builds.
    """
    starts, places = np.empty_like(priorities), np.empty(len(priorities), np.int64)
    latest, peak = construct_equal(chains, limits, priorities, patience, starts, places)
    order = places.astype(np.float64)
    best, best_peak, best_starts, best_order = latest, peak, starts.copy(), order
    builds, stale = 1, 0
    while stale < STALE_BUILDS and latest < NEVER:
        if builds % 2:
            given = mirrored(chains, -(starts + seconds))
            latest, peak = construct_equal(backwards, limits, given, patience, starts, places)
            starts, order = latest - mirrored(chains, starts) - seconds, -mirrored(chains, places.astype(np.float64))
        else:
            latest, peak = construct_equal(chains, limits, starts.copy(), patience, starts, places)
            order = places.astype(np.float64)
        builds += 1
        stale = 0 if latest < best * (1 - SAME) else stale + 1
        if stale == 0 or (latest <= best * (1 + SAME) and peak < best_peak):
            best, best_peak, best_starts, best_order = latest, peak, starts.copy(), order
    return best, best_peak, best_starts, best_order, builds
