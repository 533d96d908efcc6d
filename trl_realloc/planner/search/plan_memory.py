"""`PlanMemory`: the memory of a plan's devices."""

from __future__ import annotations

from collections.abc import Collection

from ...plan.dataflow import Role
from ...plan.fused import Fused, joined
from ...plan.shared_base import base_holder, has_merging_copy, needs_reallocation
from .space import Space, State


class PlanMemory:
    """The memory of the plans of a space. `stays` are the indices of calls that run in their role's training layout,
    and `fused_transient` the bytes that the two calls of `fused` add while they train together.

    Args:
        fused: two calls that train together.

    Attributes:
        edges: (training call, receiving call) of each reallocation, as indices.
    """

    def __init__(self, space: Space, fused: Fused = ()) -> None:
        self.space, self.fused, self.names = space, fused, space.graph.order
        place = {name: index for index, name in enumerate(self.names)}
        self.edges = [(place[edge.source], place[edge.target]) for edge in space.graph.parameter_edges]
        self._fused = tuple(place[name] for name in fused)
        self._home = {target: source for source, target in self.edges}
        policy = space.graph.train_call(Role.ACTOR)
        self._policy = None if policy is None else place[policy]  # the call that trains it
        self._bases = {n for n, name in enumerate(self.names) if any(s.is_base for s in space.specs.get(name, ()))}
        trained = space.specs.get(self.names[self._policy], ()) if self._policy is not None else ()
        self._merged_copy = sum(spec.bytes for spec in trained if spec.trained_share < 1)

    def stays(self, state: State) -> set[int]:
        """The indices of the calls that run in their role's training layout."""
        return {target for source, target in self.edges if not self.is_reallocated(state, source, target)}

    def is_reallocated(self, state: State, source: int, target: int) -> bool:
        """True if the parameters of the training `source` are sent to the call `target`."""
        adapted = source == self._policy and self._merged_copy > 0
        return needs_reallocation(state[source].assignment, state[target].assignment, adapted=adapted)

    def fullest(self, state: State, stays: Collection[int], fused_transient: float = 0.0) -> tuple[float, int]:
        """Bytes of the fullest device, and its number. The bytes are the static bytes of all its calls and the largest
        transient bytes of a call."""
        most, fullest = 0.0, 0
        without = self._without_parameters(state, stays)
        for device in {candidate.assignment.mesh.first for candidate in state}:
            static = sum(self._overhead(state, stays, device).values())
            transient = fused_transient if self._fuses_on(state, device) else 0.0
            for call, candidate in enumerate(state):
                if device in candidate.assignment.mesh:
                    static += self._static(state, call, device, without)
                    transient = max(transient, self._transient(state, call, stays))
            if static + transient > most:
                most, fullest = static + transient, device
        return most, fullest

    def _fuses_on(self, state: State, device: int) -> bool:
        return bool(self._fused) and device in state[self._fused[0]].assignment.mesh

    def _transient(self, state: State, call: int, stays: Collection[int]) -> float:
        """Bytes that a call adds while it runs. A Transformers generation in place under ZeRO stage 3 gathers all
        parameters."""
        candidate, home = state[call], self._home.get(call)
        is_in_place = call in stays and candidate.assignment.engine == "transformers" and not candidate.assignment.drop
        if is_in_place and home is not None and state[home].assignment.strategy.zero_stage == 3:
            return candidate.cost.transient + sum(spec.bytes for spec in self.space.specs.get(self.names[call], ()))
        return candidate.cost.transient

    def _without_parameters(self, state: State, stays: Collection[int]) -> set[int]:
        """The calls that need no copy of their parameters, because they use the model of their role's training, or a
        policy with the adapters disabled."""
        without = {call for call in stays if state[call].assignment.engine != "vllm"}
        if self._bases:
            assigned = {name: candidate.assignment for name, candidate in zip(self.names, state, strict=True)}
            shared = {c for c in self._bases if base_holder(self.space.graph, assigned, self.names[c]) is not None}
            without = without - self._bases | shared
        return without

    def _static(self, state: State, call: int, device: int, without: Collection[int]) -> float:
        """Bytes of a call's parameters and state on a device of its mesh during the whole iteration.

        Args:
            without: the calls of `_without_parameters`.
        """
        static = 0.0 if call in without else state[call].cost.static
        if self._merged_copy and self._home.get(call) == self._policy is not None:
            home = state[self._policy].assignment
            static += self._merged_copy * has_merging_copy(home, state[call].assignment, device)
        return static

    def _overhead(self, state: State, stays: Collection[int], device: int) -> dict[str, float]:
        memory, sizes = self.space.pricing.memory, dict[str, float]()
        if memory is not None and memory.context:
            sizes["contexts"] = memory.context * self._processes(state, device)
        if memory is not None and memory.communicator:
            sizes["communicators"] = memory.communicator * self._communicators(state, stays, device)
        return sizes

    def _processes(self, state: State, device: int) -> int:
        # a vLLM engine has its own process
        return 1 + sum(c.assignment.engine == "vllm" and device in c.assignment.mesh for c in state)

    def holds(
        self, state: State, stays: Collection[int], device: int, fused_transient: float = 0.0
    ) -> dict[str, float]:
        """The parts of a device's memory, in bytes (`Estimate.holds`)."""
        on_device = [(call, c) for call, c in enumerate(state) if device in c.assignment.mesh]
        without = self._without_parameters(state, stays)
        holds = {self.names[call]: self._static(state, call, device, without) for call, _ in on_device}
        adds = {self.names[call]: self._transient(state, call, stays) for call, _ in on_device}
        if self._fuses_on(state, device):
            adds[joined(self.fused)] = fused_transient
        name = max(adds, key=lambda name: adds[name])
        holds[f"while {name} runs"] = adds[name]
        holds |= self._overhead(state, stays, device)
        return {name: size for name, size in holds.items() if size}

    def _communicators(self, state: State, stays: Collection[int], device: int) -> int:
        """The number of NCCL communicators of a device: the job's, and those of `runtime.process_groups`."""
        if self.space.cluster.size == 1:
            return 0
        groups: set[object] = {"of all ranks"}
        for candidate in state:
            mesh, strategy = candidate.assignment.mesh, candidate.assignment.strategy
            if device not in mesh or mesh.size == 1:
                continue
            groups.add(mesh)
            if candidate.assignment.engine == "megatron":
                sizes = {"dp": strategy.dp, "tp": strategy.tp, "pp": strategy.pp, "ends": strategy.pp}
                sizes["mesh"] = mesh.size  # in addition to the group of other engines on the same devices
                groups |= {(kind, mesh, strategy.tp, strategy.pp) for kind, size in sizes.items() if size > 1}
                # each pair of neighbouring stages has a communicator; a stage in the middle is in two pairs
                groups |= {("pair", mesh, strategy.tp, strategy.pp, side) for side in range(min(2, strategy.pp - 1))}
        for source, target in self.edges:
            meshes = state[source].assignment.mesh, state[target].assignment.mesh
            if target not in stays and any(device in mesh for mesh in meshes):
                groups.add(("reallocation", target))
        return len(groups)
