"""`AheadProblem`: a `Problem` whose plans have a staleness, on a cluster divided into devices ahead and devices that
train.

Its seconds are a lower bound in closed form, because a search looks at thousands of states. The plans that it finds are
then simulated (`ahead_choice`).
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


NODE_PARTS = 8  # parts of the nodes, of which some are ahead
FEW_NODES = 2  # clusters of so many nodes are also divided within a node


@dataclass(frozen=True)
class Split:
    """A cluster's devices in two parts.

    Args:
        ahead: the devices that generate and score ahead. The other devices train.
    """

    cluster: Cluster
    ahead: range

    def is_ahead(self, mesh: DeviceMesh) -> bool:
        return mesh.first in self.ahead and mesh.last in self.ahead

    def trains(self, mesh: DeviceMesh) -> bool:
        return mesh.last < self.ahead.start or mesh.first >= self.ahead.stop

    def candidates(self, space: Space, all_: Mapping[str, Sequence[Candidate]]) -> dict[str, list[Candidate]] | None:
        """The assignments of each call that this split and the rules for a staleness allow. `None` where a call has
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
    """The ways to divide a cluster that are tried: the last nodes ahead, in shares of an eighth; of few nodes also
    parts of one node."""
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
        split: where calls may run; `candidates` are those that it allows.
        versions: the staleness.
    """

    split: Split | None = None
    versions: int = 1
    _full: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        graph = self.space.graph
        ahead = calls_ahead(graph)
        self._ahead = [at for at, name in enumerate(self.names) if name in ahead]
        self._generate = self._ahead[0]
        home = self._home[self._generate]
        assert home is not None, "the role that generates is trained"
        self._train = home
        self._later = [at for at in range(len(self.names)) if at not in self._ahead]

    def _seconds(self, state: State, moves: Mapping[int, float]) -> float:
        """The longest of: the work of a device ahead; the calls of an iteration on the devices that train; the
        latency of a batch, from its admission to the update by it, divided by `versions + 1`."""
        generate = state[self._generate]
        update = moves.get(self._generate, 0.0)
        load = generate.cost.parts.get("load", 0.0)
        current = self._current(state)
        scoring = [at for at in (*self._ahead, *current) if at != self._generate]
        work, scores = 0.0, 0.0
        for device in {state[at].assignment.mesh.first for at in (*self._ahead, *current)}:
            scored = sum(
                state[at].seconds + moves.get(at, 0.0) for at in scoring if device in state[at].assignment.mesh
            )
            generates = device in generate.assignment.mesh
            scores = max(scores, scored)
            work = max(work, scored + generates * (self._full_seconds(generate) + update + load))
        updated, ended = self._training(state, moves, update)
        return max(work, ended, (generate.seconds + scores + updated) / (self.versions + 1))

    def _current(self, state: State) -> list[int]:
        """The calls on devices ahead that belong to the iteration that trains."""
        assert self.split is not None, "the problem has a split"
        return [at for at in self._later if self.split.is_ahead(state[at].assignment.mesh)]

    def allows(self, state: State) -> bool:
        """True if the mesh of each such call lies within the devices that run ahead or has none of them
        (`staleness_problems`)."""
        parts: list[tuple[int, int]] = []  # of the devices ahead, first and last
        for mesh in sorted(state[at].assignment.mesh for at in self._ahead):
            if parts and mesh.first <= parts[-1][1] + 1:
                parts[-1] = parts[-1][0], max(parts[-1][1], mesh.last)
            else:
                parts.append((mesh.first, mesh.last))
        meshes = [state[at].assignment.mesh for at in self._current(state)]
        return all(
            (first <= mesh.first and mesh.last <= last) or mesh.last < first or mesh.first > last
            for mesh in meshes
            for first, last in parts
        )

    def _training(self, state: State, moves: Mapping[int, float], update: float) -> tuple[float, float]:
        """Seconds until the engines have their update, and until all calls that do not run ahead have ended."""
        tasks: list[IterationTask] = []
        places: dict[int, int] = {}  # of the calls' tasks
        for at in self._later:
            mesh, home = state[at].assignment.mesh, self._home[at]
            if home is not None and (seconds := moves.get(at, 0.0)) > 0:
                tasks.append(IterationTask("", (state[home].assignment.mesh, mesh), seconds))
            after = tuple(places[producer] for producer in self._data[at] if producer in places)
            places[at] = len(tasks)
            tasks.append(IterationTask("", (mesh,), state[at].seconds, after))
            if at == self._train:
                updated = len(tasks)
                tasks.append(IterationTask("", (mesh,), update))
        ended, times = undisturbed_iteration(tasks)
        return times[updated][1], ended

    def _full_seconds(self, candidate: Candidate) -> float:
        """Seconds of a batch in an engine all of whose places are taken: later batches fill those of samples that have
        ended."""
        if id(candidate) not in self._full:
            pricing, assignment = self.space.pricing, candidate.assignment
            work, call = pricing.workload, self.space.graph.call(self.names[self._generate])
            share = math.ceil(work.episodes / assignment.strategy.dp)
            drawn = fmean(n * n for n in work.response_tokens) / (2 * work.mean_response)  # tokens of a running sample
            prompt, cached, seconds = work.engine_prompt(share), work.prompt_tokens + drawn, 0.0
            for spec in self.space.specs[call.name]:
                batch = pricing.slots(spec, assignment, share, prompt + drawn + HALF_BLOCK)
                step = sum(pricing.decode_step(spec, assignment, batch * call.passes, cached).values())
                tokens = share * prompt * call.passes
                read = sum(pricing.prefill(spec, assignment, tokens, work.prompt_tokens).values())
                seconds += step * share * work.mean_response / batch + read
            whole = pricing.shared(CallCost({"compute": seconds}), assignment.mesh.size).seconds
            self._full[id(candidate)] = whole * pricing.corrections.factor(call, assignment)
        return self._full[id(candidate)]
