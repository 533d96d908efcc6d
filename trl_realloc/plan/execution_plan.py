"""`ExecutionPlan`: the device mesh, parallel strategy and engine of every model function call, and the overlap of
calls, as an object and as YAML.

Object and YAML file convert to each other without loss. The constructor refuses an invalid plan with all of its
problems at once. `planner` chooses plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ..common.errors import PlanError, Problems, nearest, shown, suggest, unknown_keys
from ..common.files import parse_yaml, read_text
from .algorithm_graphs import PROXIMAL_CALL, ppo_graph
from .assignment import ENGINES, RELEASE_FLAGS, Assignment, ParallelStrategy, assignment_problems, engines_for, in_place
from .cluster import Cluster, DeviceMesh
from .dataflow import CallKind, DataflowGraph, ParameterEdge
from .fused import Fused, fused_problems, is_reversed, read_fused, together
from .shared_base import base_holder
from .staleness import Staleness, staleness_problems
from .streams import Streams, stream_problems, streamed_calls


__all__ = ["ENGINES", "Assignment", "Assignments", "ExecutionPlan", "ParallelStrategy", "PlanError"]


MAX_CALLS = 100  # maximum number of calls of an iteration; known algorithms have at most seven
LONGEST_NAME = 200  # characters


class Assignments(Mapping[str, Assignment]):
    """Call name -> assignment. Immutable, hashable, picklable; equal to a dictionary of the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Assignment]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Assignment:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class ExecutionPlan:
    """The assignment of every call of a graph.

    Args:
        name: the plan's name in messages and reports.
        streams: settings of scoring during the generation; `None` if every call waits for whole batches.
        barrier: an iteration begins after the previous one has ended on every device. Otherwise generation begins when
            its parameters have been trained.
        staleness: number of updates that generation and scoring run ahead of the training.
        fused: two calls that train at the same time on one mesh; the second's pipeline stages are in reverse order.
            Empty if each call trains alone.

    Raises:
        PlanError: the plan is invalid. The message has a sentence for each problem.
    """

    cluster: Cluster
    assignments: Mapping[str, Assignment]
    graph: DataflowGraph = field(default_factory=ppo_graph)
    name: str = ""
    streams: Streams | None = None
    barrier: bool = False
    staleness: Staleness = Staleness()
    fused: Fused = ()

    def __post_init__(self) -> None:
        problems = Problems(_problems(self.cluster, self.assignments, self.graph))
        problems += stream_problems(self.graph, self.assignments, self.streams)
        if not isinstance(self.barrier, bool):
            problems.append(f"barrier is true or false, not {shown(self.barrier)}.")
        problems += staleness_problems(self.graph, self.assignments, self.staleness, self.streams, self.barrier)
        problems += fused_problems(self.graph, self.assignments, self.fused)
        problems.refuse()
        ordered = Assignments({name: self.assignments[name] for name in self.graph.order})
        object.__setattr__(self, "assignments", ordered)

    def __getitem__(self, name: str) -> Assignment:
        return self.assignments[self.graph.call(name).name]

    @property
    def order(self) -> tuple[str, ...]:
        """Call names in the order of execution on every device."""
        return self.graph.order

    def mesh(self, name: str) -> DeviceMesh:
        return self[name].mesh

    @property
    def reallocations(self) -> tuple[ParameterEdge, ...]:
        """The parameter edges between calls with different layouts, on which each new version must be moved."""
        return tuple(edge for edge in self.graph.parameter_edges if not in_place(self[edge.source], self[edge.target]))

    def base_holder(self, scoring: str) -> str | None:
        """`shared_base.base_holder` of this plan."""
        return base_holder(self.graph, self.assignments, scoring)

    @cached_property
    def streamed(self) -> tuple[str, ...]:
        """The streamed calls in order; empty without streams."""
        return streamed_calls(self.graph, self.assignments, self.streams)

    def runs_of(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """These calls in the order of execution: the fused calls together, the others one by one.

        Args:
            names: call names in the plan's order.
        """
        return together(self.fused, names)

    def is_reversed(self, name: str) -> bool:
        """True if the first pipeline stage of a call is on the last device of its pipeline."""
        return is_reversed(self.graph, self.assignments, self.fused, name)

    def calls_on(self, device: int) -> tuple[str, ...]:
        """The calls whose mesh contains `device`, in order."""
        return tuple(name for name, assignment in self.assignments.items() if device in assignment.mesh)

    def check_world(self, world_size: int) -> None:
        """Raise `PlanError` if the job's number of processes is not the plan's number of devices."""
        if world_size != self.cluster.size:
            name = f" {self.name!r}" if self.name else ""
            raise PlanError(
                f"the plan{name} is for {self.cluster.size} devices ({self.cluster}), but this job's number of "
                f"processes is {world_size}; launch with --num_processes {self.cluster.size}, edit the plan's cluster "
                f"and meshes, or set plan to a preset (auto, flatten, interleave or separate), which fits any job."
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, from which `from_dict` makes an equal plan. PPO's graphs are left out, because the
        calls identify them."""
        cluster = {name: value for name, value in vars(self.cluster).items() if value is not None}
        calls = {name: assignment.to_dict() for name, assignment in self.assignments.items()}
        graph = {} if self.graph == _ppo_graph_of(self.assignments) else {"graph": self.graph.to_dict()}
        return {"name": self.name, "cluster": cluster, **graph, **self._overlap(), "calls": calls}

    def _overlap(self) -> dict[str, object]:
        """The fields about the overlap of calls that are not the default."""
        streams = {} if self.streams is None else {"streams": self.streams.to_dict() or True}
        staleness = {"staleness": self.staleness.versions} if self.staleness != Staleness() else {}
        fused = {"fused": list(self.fused)} if self.fused else {}
        return {**streams, **({"barrier": True} if self.barrier else {}), **staleness, **fused}

    @staticmethod
    def from_dict(value: object, graph: DataflowGraph | None = None) -> ExecutionPlan:
        """The inverse of `to_dict`.

        Args:
            graph: the graph of a plan without a `graph` key; by default PPO's.

        Raises:
            PlanError: the plan is invalid. The message has all problems, including unknown keys.
        """
        if not isinstance(value, Mapping):
            raise PlanError(f"a plan has the keys cluster and calls; this is {shown(value)}.")
        problems = Problems(unknown_keys(value, _KEYS, "a plan has no key"))
        name = value.get("name", "")
        if not isinstance(name, str):
            problems.append(f"a plan's name is text, not {shown(name)}; put it in quotes or leave it out.")
        elif len(name) > LONGEST_NAME:
            problems.append(f"a plan's name has {LONGEST_NAME} characters at most, this one {len(name):,}.")
        cluster = None
        with problems.of():
            cluster = _read_cluster(value.get("cluster"))
        with problems.of():
            if "graph" in value:
                graph = DataflowGraph.from_dict(value["graph"])
            else:
                graph = graph or _ppo_graph_of(value.get("calls"))
        streams, barrier, staleness = None, value.get("barrier", False), Staleness()
        fused: Fused = ()
        with problems.of():
            streams = Streams.from_dict(value.get("streams"))
        with problems.of():
            staleness = Staleness(value.get("staleness", 0))
        with problems.of():
            fused = read_fused(value.get("fused"))
        calls = value.get("calls")
        if not isinstance(calls, Mapping):
            problems.append(
                f"calls has a line for each call, like actor.train: {{mesh: 0-1, …}}; it is {shown(calls)}."
            )
            calls = {}
        if len(calls) > MAX_CALLS:
            problems.append(f"calls has {len(calls):,} lines, and an iteration has {MAX_CALLS} calls at most.")
            calls = {}
        assignments = {}
        for call, assignment in calls.items():
            with problems.of(call[:120] if isinstance(call, str) and call.isprintable() else shown(call)):
                assignments[call] = Assignment.from_dict(assignment)
        if problems and cluster and graph and calls:
            unread = [call for call in calls if call not in assignments]
            problems += _problems(cluster, assignments, graph, unread)
        problems.refuse()
        assert cluster is not None
        assert graph is not None
        return ExecutionPlan(cluster, assignments, graph, name, streams, barrier, staleness, fused)

    def to_yaml(self) -> str:
        """The plan as YAML: a comment on the fields, and a line for each call."""
        plain = self.to_dict()
        lines = [_HEADER, _named(self.name), f"cluster: {_flow(plain['cluster'])}\n"]
        if "graph" in plain:
            lines += [f"graph:\n  sources: {_flow(plain['graph']['sources'])}\n  calls:\n"]
            lines += [f"    {name}: {_flow(columns)}\n" for name, columns in plain["graph"]["calls"].items()]
        lines += [f"{key}: {_flow(field)}\n" for key, field in self._overlap().items()]
        lines += ["calls:\n", *(f"  {name}: {_flow(assignment)}\n" for name, assignment in plain["calls"].items())]
        return "".join(lines)

    @staticmethod
    def from_yaml(text: str) -> ExecutionPlan:
        """The plan in a YAML text. Raises `PlanError`, also for text that is not YAML."""
        return ExecutionPlan.from_dict(parse_yaml(text, "the plan"))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> ExecutionPlan:
        """The plan in a YAML file. Raises `PlanError`, with the file's name in each sentence, if the file is missing or
        invalid."""
        text = read_text(path, "the plan")
        try:
            return ExecutionPlan.from_yaml(text)
        except PlanError as error:
            raise PlanError(*(f"{path}: {problem}" for problem in error.problems)) from None


def _problems(
    cluster: Cluster, assignments: Mapping[str, Assignment], graph: DataflowGraph, unread: Sequence[str] = ()
) -> list[str]:
    """A sentence for each problem. Calls of the plan with unreadable assignments (`unread`) are not reported as
    missing."""
    unknown = [name for name in [*assignments, *unread] if name not in graph.order]
    problems = [f"there is no call {shown(name)}; {suggest(name, graph.order)}" for name in unknown]
    present = {*assignments, *unread, *(nearest(name, graph.order) for name in unknown)}
    problems += [f"{name} is missing; set its mesh and engine." for name in graph.order if name not in present]
    assigned = {name: assignments[name] for name in graph.order if name in assignments}
    for name, assignment in assigned.items():
        call = graph.call(name)
        trained = graph.train_call(call.role) is not None
        problems += [f"{name}: {problem}" for problem in assignment_problems(call, assignment, cluster, trained)]
    for source, target in graph.parameter_edges:
        if source not in assigned or target not in assigned or assigned[target].engine == "vllm":
            continue  # a vLLM engine always has separate weights
        if in_place(assigned[source], assigned[target]):
            problems += [
                f"{target}: it uses {source}'s parameters in place; leave {flag} out, or give it another layout."
                for flag in RELEASE_FLAGS
                if getattr(assigned[target], flag)
            ]
    return problems


def _ppo_graph_of(calls: object) -> DataflowGraph:
    return ppo_graph(proximal=isinstance(calls, Mapping) and PROXIMAL_CALL in calls)


def _read_cluster(value: object) -> Cluster:
    keys = [part.name for part in fields(Cluster)]
    if not isinstance(value, Mapping):
        raise PlanError(f"cluster reads like {{nodes: 1, devices_per_node: 2}}, not {shown(value)}.")
    problems = Problems(unknown_keys(value, keys, "cluster has no key"))
    problems += [f"cluster: {key} is missing." for key in ("nodes", "devices_per_node") if key not in value]
    problems.refuse()
    return Cluster(**value)


_HEADER = f"""\
# An execution plan: which devices run each call of an iteration, and how. Edit it; it is checked when it is read.
#   mesh: the devices, like 0-3 or 2: whole nodes, or an aligned power-of-two part of one node
#   engine: {engines_for(CallKind.GENERATE)} to generate, {engines_for(CallKind.TRAIN)} to score and train
#     zero is DeepSpeed ZeRO; with zero_stage 0 it is plain data parallelism, which tables show as ddp
#     megatron is Megatron-style tensor x pipeline x data groups of this package over Transformers models, without
#     Megatron-Core
#   dp, tp, pp: data, tensor and pipeline parallel degrees, by default 1; dp x tp x pp is the mesh's size
#   zero_stage: 0-3, by default 0; micro_batch_tokens: maximum tokens of one forward
#   offload: true keeps the parameters of a scoring call in host memory between its uses
#   drop: true frees a copy of trained parameters between its uses; it is sent again before the next one
#   For a vLLM engine, offload and drop also free the cache: the engine sleeps while others use its devices
# Before calls:
#   streams: true, or a table: scoring begins during the generation, on devices that do not generate
#     migration: {{threshold: 0.2, engines: 1}}: when less than 20% of the samples are unfinished, one engine takes them
#     deterministic: true makes runs bit-identical; calls: [reference.forward] streams only these calls
#   barrier: true begins an iteration only after the previous one has ended on every device
#   staleness: 1 generates for the next batch while this one trains, on devices on which nothing trains; a token is
#     trained at most so many updates after the policy that sampled it; not together with streams
#   fused: [actor.train, critic.train] trains both at the same time on one mesh, by engine megatron with pp above 1: a
#     stage computes for one role while it would wait for the other; the second role's stages are in reverse order
"""
_KEYS = ("name", "cluster", "graph", "streams", "barrier", "staleness", "fused", "calls")


def _flow(value: object) -> str:
    text = str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf")))
    return text.removesuffix("...\n").strip()


def _named(name: str) -> str:
    # unprintable characters are written as escapes, because PyYAML 6.0.3 folds a bare U+0085 into a space.
    return str(yaml.safe_dump({"name": name}, allow_unicode=name.isprintable())) if name else ""
