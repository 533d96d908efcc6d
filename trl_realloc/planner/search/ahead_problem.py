"""`AheadProblem`: a `Problem` whose plans have a staleness, on a cluster divided into devices ahead and devices that
train.

Its seconds are a lower bound in closed form, because a search evaluates thousands of states. `ahead_choice` simulates
the best plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ...plan.assignment import sleeps
from ...plan.cluster import Cluster, DeviceMesh
from ...plan.dataflow import CallKind
from ...plan.staleness import calls_ahead
from ..cost.call_cost import CallCost
from ..cost.workload import HALF_BLOCK
from ..iteration.simulate import IterationTask, undisturbed_iteration
from .problem import Problem
from .space import Candidate, Space, State


NODE_PARTS = 8  # the nodes ahead are 1 to 7 eighths of all nodes
FEW_NODES = 2  # clusters of at most this many nodes are also divided within a node


@dataclass(frozen=True)
class Split:
    """A cluster's devices in two parts.

    Args:
        ahead: devices that generate and score ahead. The other devices train.
    """

    cluster: Cluster
    ahead: range

    def is_ahead(self, mesh: DeviceMesh) -> bool:
        return mesh.first in self.ahead and mesh.last in self.ahead

    def trains(self, mesh: DeviceMesh) -> bool:
        return mesh.last < self.ahead.start or mesh.first >= self.ahead.stop

    def candidates(self, space: Space, all_: Mapping[str, Sequence[Candidate]]) -> dict[str, list[Candidate]] | None:
        """The assignments of each call that this split and the rules for a staleness allow. `None` if a call has
        none."""
        graph, ahead = space.graph, calls_ahead(space.graph)
        result: dict[str, list[Candidate]] = {}
        for name, candidates in all_.items():
            call = graph.call(name)
            result[name] = [
                candidate
                for candidate in candidates
                if (name not in ahead and self.trains(candidate.assignment.mesh))
                or (not call.trains and self.is_ahead(candidate.assignment.mesh))
            ]
            if call.kind is CallKind.GENERATE:
                result[name] = [c for c in result[name] if c.assignment.engine == "vllm" and not sleeps(c.assignment)]
        return result if all(result.values()) else None


def splits(cluster: Cluster) -> Iterator[Split]:
    """Divisions of a cluster that are tried: the last nodes run ahead, in steps of an eighth of the nodes. On few nodes
    also parts of one node."""
    nodes, per_node, size = cluster.nodes, cluster.devices_per_node, cluster.size
    counts = {round(nodes * share / NODE_PARTS) for share in range(1, NODE_PARTS)} - {0, nodes}
    numbers = {count * per_node for count in counts}
    if nodes <= FEW_NODES:
        part = 1
        while part < per_node and per_node % (2 * part) == 0:
            numbers |= {part, size - part}
            part *= 2
    for number in sorted(numbers):
        yield Split(cluster, range(size - number, size))


@dataclass
class AheadProblem(Problem):
    """A problem with a staleness.

    Args:
        split: devices of the calls ahead; `candidates` are already restricted to it.
        versions: staleness.
    """

    split: Split | None = None
    versions: int = 1
    _full: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        graph = self.space.graph
        ahead = calls_ahead(graph)
        self._ahead = [call for call, name in enumerate(self.names) if name in ahead]
        self._generate = self._ahead[0]
        home = self._home[self._generate]
        assert home is not None, "the role that generates is trained"
        self._train = home
        self._later = [call for call in range(len(self.names)) if call not in self._ahead]

    def _seconds(self, state: State, moves: Mapping[int, float]) -> float:
        """The longest of: the work of a device ahead; the calls of an iteration on the devices that train; the
        latency of a batch, from its admission to the update by it, divided by `versions + 1`."""
        generate = state[self._generate]
        update = moves.get(self._generate, 0.0)
        load = generate.cost.parts.get("load", 0.0)
        current = self._current(state)
        scoring = [call for call in (*self._ahead, *current) if call != self._generate]
        work, scores = 0.0, 0.0
        for device in {state[call].assignment.mesh.first for call in (*self._ahead, *current)}:
            scored = sum(
                state[call].seconds + moves.get(call, 0.0) for call in scoring if device in state[call].assignment.mesh
            )
            generates = device in generate.assignment.mesh
            scores = max(scores, scored)
            work = max(work, scored + generates * (self._full_seconds(generate) + update + load))
        updated, ended = self._training(state, moves, update)
        return max(work, ended, (generate.seconds + scores + updated) / (self.versions + 1))

    def _current(self, state: State) -> list[int]:
        """The calls on devices ahead that belong to the iteration that trains."""
        assert self.split is not None, "the problem has a split"
        return [call for call in self._later if self.split.is_ahead(state[call].assignment.mesh)]

    def allows(self, state: State) -> bool:
        """True if the mesh of each call of the training iteration contains only devices that run ahead, or none
        (`staleness_problems`)."""
        parts: list[tuple[int, int]] = []  # (first, last) of each block of devices ahead
        for mesh in sorted(state[call].assignment.mesh for call in self._ahead):
            if parts and mesh.first <= parts[-1][1] + 1:
                parts[-1] = parts[-1][0], max(parts[-1][1], mesh.last)
            else:
                parts.append((mesh.first, mesh.last))
        meshes = [state[call].assignment.mesh for call in self._current(state)]
        return all(
            (first <= mesh.first and mesh.last <= last) or mesh.last < first or mesh.first > last
            for mesh in meshes
            for first, last in parts
        )

    def _training(self, state: State, moves: Mapping[int, float], update: float) -> tuple[float, float]:
        """Seconds until the engines have their update, and until all calls that do not run ahead have ended."""
        tasks: list[IterationTask] = []
        task_of: dict[int, int] = {}  # call -> index of its task
        for call in self._later:
            mesh, home = state[call].assignment.mesh, self._home[call]
            if home is not None and (seconds := moves.get(call, 0.0)) > 0:
                tasks.append(IterationTask("", (state[home].assignment.mesh, mesh), seconds))
            after = tuple(task_of[producer] for producer in self._data[call] if producer in task_of)
            task_of[call] = len(tasks)
            tasks.append(IterationTask("", (mesh,), state[call].seconds, after))
            if call == self._train:
                updated = len(tasks)
                tasks.append(IterationTask("", (mesh,), update))
        ended, times = undisturbed_iteration(tasks)
        return times[updated][1], ended

    def _full_seconds(self, candidate: Candidate) -> float:
        """Seconds of a batch in a full engine: samples of later batches take the places of samples that have ended."""
        if id(candidate) not in self._full:
            pricing, assignment = self.space.pricing, candidate.assignment
            work, call = pricing.workload, self.space.graph.call(self.names[self._generate])
            share = math.ceil(work.episodes / assignment.strategy.dp)
            # mean number of generated tokens of a running sample
            generated = fmean(n * n for n in work.response_tokens) / (2 * work.mean_response)
            prompt, cached, seconds = work.engine_prompt(share), work.prompt_tokens + generated, 0.0
            for spec in self.space.specs[call.name]:
                batch = pricing.slots(spec, assignment, share, prompt + generated + HALF_BLOCK)
                step = sum(pricing.decode_step(spec, assignment, batch * call.passes, cached).values())
                tokens = share * prompt * call.passes
                read = sum(pricing.prefill(spec, assignment, tokens, work.prompt_tokens).values())
                seconds += step * share * work.mean_response / batch + read
            whole = pricing.shared(CallCost({"compute": seconds}), assignment.mesh.size).seconds
            self._full[id(candidate)] = whole * pricing.calibration.factor(call, assignment)
        return self._full[id(candidate)]
