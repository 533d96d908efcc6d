"""`improve_by_swaps`: a schedule made shorter by changing the places of two neighbours on a stage, again and again.

A makespan is the length of a longest path of tasks, each of which waits for the one before it: of its micro-batch or on
its stage. Only where such a path changes between the two can a swap make it shorter: at the first two or the last two
of its tasks in a row on one stage. In each round the swap that promises the least makespan is made, also if that is
more than before, and may not be taken back for some rounds (tabu search). What a stage holds changes in one place only,
so that swaps keep a memory limit.

A round takes a hundredth of building a schedule anew (`fused_kernel`, `fused_equal`), but it stays near the schedule
that it began with: `fused_search` uses both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fused_kernel import NEVER, Chains, Integers, compiled
from .fused_pipelines import Array


KEEP = 10  # rounds, and up to as many again, in which a swap may not be taken back
KEPT = 1 << 14  # places of the table of these swaps; two may share one
TRIES = 20  # swaps anywhere, where none on the path is allowed
NOISE = 1e-6  # of the makespan, that decides between swaps that promise the same
SLACK = 1e-9  # of the makespan, that rounding may change


class Links(NamedTuple):
    """What does not change. Shapes `(tasks,)` but for `firsts`.

    Args:
        before, after: the tasks of the same micro-batch before and after a task, or -1.
        kinds: of two tasks of one kind the order does not matter: those of equal micro-batches, one direction and one
            stage. Other tasks have kinds of their own.
        takes: the memory that a task takes, or gives back if less than 0.
        firsts: where each stage's tasks begin in `Orders.tasks`, and the number of all. Shape `(stages + 1,)`.
    """

    before: Integers
    after: Integers
    kinds: Integers
    takes: Array
    firsts: Integers


class Orders(NamedTuple):
    """The order of each stage's tasks, and what follows from it. Shapes `(tasks,)`.

    Args:
        tasks: those of the first stage in order, then those of the second.
        places: of a task in `tasks`.
        sequence: all tasks, each after those that it waits for.
        ranks: of a task in `sequence`.
        starts: of a task, as early as can be.
        rests: from the start of a task to the end of the schedule, as short as can be.
        held: a stage's memory after a place of `tasks`.
        old: whether a task's start or rest must be computed anew. False between two swaps.
    """

    tasks: Integers
    places: Integers
    sequence: Integers
    ranks: Integers
    starts: Array
    rests: Array
    held: Array
    old: NDArray[np.bool_]


@compiled
def neighbours(chains: Chains, links: Links, orders: Orders, task: int) -> tuple[int, int]:
    """The tasks before and after a task on its stage, or -1."""
    place, stage = orders.places[task], chains.stages[task]
    left = orders.tasks[place - 1] if place > links.firsts[stage] else -1
    right = orders.tasks[place + 1] if place + 1 < links.firsts[stage + 1] else -1
    return left, right


@compiled
def follow(chains: Chains, links: Links, tasks: Integers) -> Orders:
    """All that follows from the order of the tasks."""
    count = len(tasks)
    places, sequence, ranks = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    held, old = np.empty(count), np.ones(count, np.bool_)
    orders = Orders(tasks.copy(), places, sequence, ranks, np.zeros(count), np.zeros(count), held, old)
    awaited, ready = np.zeros(count, np.int64), 0
    for stage in range(len(links.firsts) - 1):
        total = 0.0
        for place in range(links.firsts[stage], links.firsts[stage + 1]):
            task = tasks[place]
            total += links.takes[task]
            places[task], held[place] = place, total
            awaited[task] = (links.before[task] >= 0) + (place > links.firsts[stage])
            if awaited[task] == 0:
                sequence[ready] = task
                ready += 1
    for rank in range(count):
        task = sequence[rank]
        ranks[task] = rank
        for following in (links.after[task], neighbours(chains, links, orders, task)[1]):
            if following >= 0:
                awaited[following] -= 1
                if awaited[following] == 0:
                    sequence[ready] = following
                    ready += 1
    renew_starts(chains, links, orders, 0, count)
    old[:] = True
    renew_rests(chains, links, orders, count - 1, count)
    return orders


@compiled
def renew_starts(chains: Chains, links: Links, orders: Orders, rank: int, left: int) -> None:
    """Compute the `left` old starts, the first of which is at a rank or after it, and those that change with them."""
    seconds, starts, old, tasks = chains.seconds, orders.starts, orders.old, orders.tasks
    while left > 0:
        task = orders.sequence[rank]
        rank += 1
        if not old[task]:
            continue
        left -= 1
        old[task] = False
        before, after = links.before[task], links.after[task]
        place, stage = orders.places[task], chains.stages[task]
        start = starts[before] + seconds[before] if before >= 0 else 0.0
        if place > links.firsts[stage]:
            start = max(start, starts[tasks[place - 1]] + seconds[tasks[place - 1]])
        if start == starts[task]:
            continue
        starts[task] = start
        if after >= 0 and not old[after]:
            old[after] = True
            left += 1
        if place + 1 < links.firsts[stage + 1] and not old[tasks[place + 1]]:
            old[tasks[place + 1]] = True
            left += 1


@compiled
def renew_rests(chains: Chains, links: Links, orders: Orders, rank: int, left: int) -> None:
    """Compute the `left` old rests, the last of which is at a rank or before it, and those that change with them."""
    rests, old, tasks = orders.rests, orders.old, orders.tasks
    while left > 0:
        task = orders.sequence[rank]
        rank -= 1
        if not old[task]:
            continue
        left -= 1
        old[task] = False
        before, after = links.before[task], links.after[task]
        place, stage = orders.places[task], chains.stages[task]
        rest = rests[after] if after >= 0 else 0.0
        if place + 1 < links.firsts[stage + 1]:
            rest = max(rest, rests[tasks[place + 1]])
        rest += chains.seconds[task]
        if rest == rests[task]:
            continue
        rests[task] = rest
        if before >= 0 and not old[before]:
            old[before] = True
            left += 1
        if place > links.firsts[stage] and not old[tasks[place - 1]]:
            old[tasks[place - 1]] = True
            left += 1


@compiled
def resequence(chains: Chains, links: Links, orders: Orders, first: int, second: int) -> bool:
    """Put the first of two neighbours behind the second in `Orders.sequence`: of the tasks between the two, those that
    the second waits for stay before it, and all others come after the first. Returns False, and changes nothing, if one
    of these waits for the first: after the swap tasks would wait in a circle."""
    sequence, ranks, old = orders.sequence, orders.ranks, orders.old
    low, high = ranks[first], ranks[second]
    rank, others = low, np.empty(high - low, np.int64)
    old[second] = True  # here: what the second waits for
    for i in range(high, low, -1):
        task = sequence[i]
        if old[task]:
            before, place = links.before[task], orders.places[task]
            if before == first:
                for rank in range(low, high + 1):
                    old[sequence[rank]] = False
                return False
            if before >= 0 and ranks[before] > low:
                old[before] = True
            if place > links.firsts[chains.stages[task]] and ranks[orders.tasks[place - 1]] > low:
                old[orders.tasks[place - 1]] = True
    count = 0
    for i in range(low + 1, high):
        task = sequence[i]
        if old[task]:
            old[task] = False
            sequence[rank], ranks[task] = task, rank
            rank += 1
        else:
            others[count] = task
            count += 1
    old[second] = False
    sequence[rank], ranks[second] = second, rank
    sequence[rank + 1], ranks[first] = first, rank + 1
    for i in range(count):
        sequence[rank + 2 + i], ranks[others[i]] = others[i], rank + 2 + i
    return True


@compiled
def swap(chains: Chains, links: Links, orders: Orders, first: int) -> None:
    """Let a task and the next on its stage change places, unless another path leads from one to the other."""
    tasks, places, old, takes = orders.tasks, orders.places, orders.old, links.takes
    place = places[first]
    second = tasks[place + 1]
    if not resequence(chains, links, orders, first, second):
        return
    tasks[place], tasks[place + 1] = second, first
    places[second], places[first] = place, place + 1
    orders.held[place] += takes[second] - takes[first]
    left, right = neighbours(chains, links, orders, second)[0], neighbours(chains, links, orders, first)[1]
    old[first] = old[second] = True
    if right >= 0:
        old[right] = True
    renew_starts(chains, links, orders, orders.ranks[second], 2 + (right >= 0))
    old[first] = old[second] = True
    if left >= 0:
        old[left] = True
    renew_rests(chains, links, orders, orders.ranks[first], 2 + (left >= 0))


@compiled
def makespan_of(chains: Chains, links: Links, orders: Orders) -> float:
    makespan = 0.0
    for end in links.firsts[1:]:
        task = orders.tasks[end - 1]
        makespan = max(makespan, orders.starts[task] + chains.seconds[task])
    return makespan


@compiled
def longest_path(
    chains: Chains, links: Links, orders: Orders, makespan: float, rng: np.random.Generator, path: Integers
) -> int:
    """Fill `path` with one of the longest paths, at random. Returns how many tasks it has."""
    seconds, stages, firsts, afters = chains.seconds, chains.stages, links.firsts, links.after
    tasks, places, rests = orders.tasks, orders.places, orders.rests
    slack = SLACK * makespan
    task, count, begins = -1, 0, 0
    for stage in range(len(firsts) - 1):
        first = tasks[firsts[stage]]
        if links.before[first] < 0 and rests[first] >= makespan - slack:
            begins += 1
            if rng.random() * begins < 1:
                task = first
    while task >= 0:
        path[count] = task
        count += 1
        rest = rests[task] - seconds[task] - slack
        if rest <= 0:
            break
        after, place = afters[task], places[task]
        right = tasks[place + 1] if place + 1 < firsts[stages[task] + 1] else -1
        stays = right >= 0 and rests[right] >= rest
        if stays and after >= 0 and after != right and rests[after] >= rest:
            stays = rng.random() < 0.5
        task = right if stays else after
    return count


@compiled
def best_swap(
    chains: Chains,
    links: Links,
    orders: Orders,
    memory: Array,
    path: Integers,
    kept_until: Integers,
    done: int,
    best: float,
    rng: np.random.Generator,
) -> int:
    """The first of the two neighbours on a path whose swap promises the least makespan; -1 if none is allowed.

    That is the length of the longest path through one of the two after the swap, at least.

    Args:
        kept_until: the round before which a swap is made only if it promises less than `best`, by `kept`.
        done: the rounds.
    """
    seconds, stages, firsts = chains.seconds, chains.stages, links.firsts
    befores, afters, kinds, takes = links.before, links.after, links.kinds, links.takes
    tasks, places, starts, rests, held = orders.tasks, orders.places, orders.starts, orders.rests, orders.held
    chosen, least, last = -1, NEVER, len(path) - 2
    for i in range(last + 1):
        first, second = path[i], path[i + 1]
        stage, place = stages[first], places[first]
        if stage != stages[second] or kinds[first] == kinds[second] or afters[first] == second:
            continue
        begins = i == 0 or stages[path[i - 1]] != stage
        ends = i == last or stages[path[i + 2]] != stage
        if not (begins or ends):
            continue
        if takes[second] > 0 and held[place] - takes[first] + takes[second] > memory[stage]:
            continue
        before, after = befores[second], afters[first]
        start = starts[before] + seconds[before] if before >= 0 else 0.0
        if place > firsts[stage]:
            start = max(start, starts[tasks[place - 1]] + seconds[tasks[place - 1]])
        rest = rests[after] if after >= 0 else 0.0
        if place + 2 < firsts[stage + 1]:
            rest = max(rest, rests[tasks[place + 2]])
        before, after = befores[first], afters[second]
        later = start + seconds[second]
        if before >= 0:
            later = max(later, starts[before] + seconds[before])
        rest += seconds[first]
        longer = max(rest, rests[after] if after >= 0 else 0.0) + seconds[second]
        promised = max(start + longer, later + rest)
        if promised >= best * (1 - SLACK) and kept_until[kept(first, second)] > done:
            continue
        promised += rng.random() * NOISE * best
        if promised < least:
            chosen, least = first, promised
    return chosen


@compiled
def kept(first: int, second: int) -> int:
    """The place of a swap of two tasks in the table of those that may not be made."""
    return (first * 7919 + second * 104729) % KEPT


@compiled
def swap_anywhere(chains: Chains, links: Links, orders: Orders, memory: Array, rng: np.random.Generator) -> int:
    """The first of two neighbours that may change places wherever they are; -1 if some tries find none."""
    for _ in range(TRIES):
        first = orders.tasks[rng.integers(0, len(orders.tasks))]
        second = neighbours(chains, links, orders, first)[1]
        if second < 0 or links.after[first] == second or links.kinds[first] == links.kinds[second]:
            continue
        taken = orders.held[orders.places[first]] - links.takes[first] + links.takes[second]
        if links.takes[second] > 0 and taken > memory[chains.stages[first]]:
            continue
        return int(first)
    return -1


@compiled
def improve_by_swaps(
    chains: Chains,
    links: Links,
    memory: Array,
    tasks: Integers,
    target: float,
    rounds: int,
    patience: int,
    rng: np.random.Generator,
) -> tuple[float, Array, Integers, int]:
    """Swap neighbours until the makespan is `target`, for at most `rounds`.

    Args:
        memory: limit of each stage, with some room for rounding.
        tasks: `Orders.tasks` of a schedule within it.
        patience: rounds in turn without a less makespan, after which this ends.

    Returns:
        the least makespan, its starts and tasks, and the number of rounds.
    """
    orders = follow(chains, links, tasks)
    makespan = makespan_of(chains, links, orders)
    best, best_starts, best_tasks = makespan, orders.starts.copy(), orders.tasks.copy()
    path, kept_until = np.empty(len(tasks), np.int64), np.zeros(KEPT, np.int64)
    done, last = 0, 0
    while done < rounds and done - last < patience and best > target:
        done += 1
        count = longest_path(chains, links, orders, makespan, rng, path)
        first = best_swap(chains, links, orders, memory, path[:count], kept_until, done, best, rng)
        if first < 0:
            first = swap_anywhere(chains, links, orders, memory, rng)
        if first < 0:
            continue
        second = orders.tasks[orders.places[first] + 1]
        kept_until[kept(second, first)] = done + KEEP + rng.integers(0, KEEP + 1)
        swap(chains, links, orders, first)
        makespan = makespan_of(chains, links, orders)
        if makespan < best * (1 - SLACK):
            best, last = makespan, done
            best_starts[:] = orders.starts
            best_tasks[:] = orders.tasks
    return best, best_starts, best_tasks, done
