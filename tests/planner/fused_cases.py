"""Fused pipelines for tests: small random ones, and an exhaustive search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trl_realloc.planner.fused.pipelines import MODELS, FusedPipelines, Pipeline


STAGES = ((1, 1), (2, 2), (2, 2), (2, 1), (1, 2), (3, 3), (3, 1), (4, 2), (2, 4))
MAX_CHAINS = {1: 5, 2: 4, 3: 4, 4: 3}  # by the number of stages


def random_small(rng: np.random.Generator) -> FusedPipelines:
    """At most five micro-batches on at most four stages; equal or unequal times; with or without a memory limit."""
    stages = STAGES[rng.integers(len(STAGES))]
    copies = [max(stages) // own for own in stages]
    while True:
        micro_batches = rng.integers(1, 4, 2)
        if np.dot(micro_batches, copies) <= MAX_CHAINS[max(stages)]:
            break
    pipelines = []
    for own, count, number in zip(stages, micro_batches, copies, strict=True):
        shape = (number, int(count), own)
        kind = rng.integers(3)
        narrow = (1, 1, 1) if kind == 0 else (1, 1, own) if kind == 1 else shape
        forward = rng.integers(1, 7, narrow).astype(float)
        backward = 2 * forward if rng.random() < 0.5 else rng.integers(1, 9, narrow)
        memory = rng.integers(1, 4, narrow)
        pipelines.append(Pipeline.of(own, int(count), forward, memory, backward, number))
    free = FusedPipelines(*pipelines)
    if rng.random() < 0.5:
        return free
    return FusedPipelines(*pipelines, tuple(float(rng.integers(low, high + 1)) for low, high in memory_range(free)))


def memory_range(pipelines: FusedPipelines) -> Iterator[tuple[int, int]]:
    """For each stage the least limit that a schedule can keep, and the memory of all micro-batches, rounded up."""
    for stage in range(pipelines.stages):
        held = []
        for model in MODELS:
            copy, own = pipelines.own_stage(model, stage)
            held.append(pipelines.pipeline(model).memory[copy, :, own])
        yield int(np.ceil(max(h.max() for h in held))), int(np.ceil(sum(h.sum() for h in held)))


def exists(pipelines: FusedPipelines, deadline: float, limit: tuple[float, ...] | None) -> bool:
    """Whether any schedule ends by a deadline within a memory limit.

    Appends tasks to the stages in every order of their starts, depth first. A beginning is left if it must end too
    late, or if it is nowhere better than one with the same tasks that was left.
    """
    return _Exhaustive(pipelines, deadline, limit).reaches((0,) * len(list(_chains(pipelines))), None)


class _Exhaustive:
    def __init__(self, pipelines: FusedPipelines, deadline: float, limit: tuple[float, ...] | None) -> None:
        self.chains = list(_chains(pipelines))
        self.rest = [[sum(seconds[i:]) for i in range(len(seconds) + 1)] for _, seconds, _ in self.chains]
        self.stages, self.deadline = pipelines.stages, deadline + 1e-9
        self.limit = limit or (np.inf,) * pipelines.stages
        self.left: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def reaches(self, done: tuple[int, ...], times: tuple[float, ...] | None) -> bool:
        """Args:
        done: tasks that have begun of each chain.
        times: when each stage is free, then when each chain's next task may begin; none is before `now`.
        """
        times = times or (0.0,) * (self.stages + len(done))
        if all(count == len(chain[0]) for count, chain in zip(done, self.chains, strict=True)):
            return True
        if self._too_late(done, times):
            return False
        others = self.left.setdefault(done, [])
        if any(all(x <= y for x, y in zip(other, times, strict=True)) for other in others):
            return False
        held = _held(self.chains, done, self.stages)
        for number, (stages, seconds, memory) in enumerate(self.chains):
            position = done[number]
            if position == len(stages):
                continue
            stage = stages[position]
            if 2 * position < len(stages) and held[stage] + memory[position] > self.limit[stage] + 1e-9:
                continue
            start = max(times[stage], times[self.stages + number])
            grown = [max(time, start) for time in times]
            grown[stage] = grown[self.stages + number] = start + seconds[position]
            after = (*done[:number], position + 1, *done[number + 1 :])
            for other, (route, _, _) in enumerate(self.chains):
                if after[other] == len(route):  # its time says nothing
                    grown[self.stages + other] = 0.0
            if self.reaches(after, tuple(grown)):
                return True
        others.append(times)
        return False

    def _too_late(self, done: tuple[int, ...], times: tuple[float, ...]) -> bool:
        ends = list(times[: self.stages])
        for number, (stages, seconds, _) in enumerate(self.chains):
            position = done[number]
            if position < len(stages) and times[self.stages + number] + self.rest[number][position] > self.deadline:
                return True
            for stage, time in zip(stages[position:], seconds[position:], strict=True):
                ends[stage] += time
        return max(ends) > self.deadline


def _chains(pipelines: FusedPipelines) -> Iterator[tuple[list[int], list[float], list[float]]]:
    for model in MODELS:
        pipeline = pipelines.pipeline(model)
        for copy in range(pipeline.copies):
            route = list(pipelines.route(model, copy))
            for number in range(pipeline.micro_batches):
                there, back = pipeline.forward[copy, number], pipeline.backward[copy, number]
                memory = pipeline.memory[copy, number]
                yield route + route[::-1], [*there, *back[::-1]], [*memory, *memory[::-1]]


def _held(chains: list[tuple[list[int], list[float], list[float]]], done: tuple[int, ...], stages: int) -> list[float]:
    held = [0.0] * stages
    for (route, _, memory), count in zip(chains, done, strict=True):
        for position in range(min(count, len(route) - count)):
            held[route[position]] += memory[position]
    return held
