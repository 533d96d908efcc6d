"""The execution plan: for every model function call its device mesh, parallel strategy, engine and offload.

A plan is one YAML file and one frozen object, and each makes the other without loss. It is refused where it is made,
with everything that is wrong with it at once. How plans are chosen is the planner's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .cluster import Cluster, DeviceMesh, check_mesh
from .dataflow import Call, CallKind, DataflowGraph, ppo_graph
from .errors import PlanError, suggest


__all__ = ["ENGINES", "Assignment", "ExecutionPlan", "ParallelStrategy", "PlanError"]


@dataclass(frozen=True)
class Ability:
    """What an engine can do: the kinds of call, which degrees may exceed 1, the ZeRO stages; or why it is absent."""

    kinds: frozenset[CallKind]
    degrees: tuple[str, ...]
    zero_stages: tuple[int, ...] = (0,)
    absent: str = ""


_LEARNS = frozenset({CallKind.FORWARD, CallKind.TRAIN})
_GENERATES = frozenset({CallKind.GENERATE})

# The one place that says what an engine can do: to open an engine or a degree, change its row.
ABILITIES: Mapping[str, Ability] = {
    "zero": Ability(_LEARNS, ("dp",), (0, 1, 2, 3)),
    "megatron": Ability(_LEARNS, ("dp", "tp", "pp"), (0, 1), absent="is not in this release; use zero"),
    "vllm": Ability(_GENERATES, ("dp", "tp")),
    "transformers": Ability(_GENERATES, ("dp",)),
}
ENGINES = tuple(ABILITIES)


@dataclass(frozen=True)
class ParallelStrategy:
    """How a call is spread over its mesh, of exactly `size` devices.

    Args:
        dp: data-parallel degree; the samples are dealt out to so many groups.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        zero_stage: what the data-parallel group shards: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
        micro_batch_tokens: most tokens of one forward, prompt and response together; `None` leaves it to the trainer.

    Raises:
        PlanError: a number that is none, or out of its range.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is a whole number from 1, not {value!r}."
            for name, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp))
            if not _whole(value) or value < 1
        ]
        if not _whole(self.zero_stage) or not 0 <= self.zero_stage <= 3:
            problems.append(f"zero_stage is 0, 1, 2 or 3, not {self.zero_stage!r}.")
        if self.micro_batch_tokens is not None and (
            not _whole(self.micro_batch_tokens) or self.micro_batch_tokens < 1
        ):
            problems.append(
                f"micro_batch_tokens is a number of tokens from 1, not {self.micro_batch_tokens!r}; "
                f"leave it out for the trainer's own."
            )
        if problems:
            raise PlanError(*problems)

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """(dp, tp, pp, zero_stage): what decides which device holds which part of a parameter."""
        return self.dp, self.tp, self.pp, self.zero_stage

    def __str__(self) -> str:
        degrees = [
            f"{name}{value}" for name, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if value > 1
        ]
        zero = [f"zero{self.zero_stage}"] if self.zero_stage else []
        tokens = [f"{self.micro_batch_tokens} tokens"] if self.micro_batch_tokens else []
        return " ".join([*(degrees or ["dp1"]), *zero, *tokens])


@dataclass(frozen=True)
class Assignment:
    """Where and how one call runs. `offload` moves its parameters to host memory between its turns.

    Raises:
        PlanError: an engine that does not exist, or a value of the wrong kind.
    """

    mesh: DeviceMesh
    strategy: ParallelStrategy
    engine: str
    offload: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.mesh, DeviceMesh):
            problems.append(f"mesh is a DeviceMesh, not {self.mesh!r}; DeviceMesh.parse reads 0-3, 2 or a list.")
        if not isinstance(self.strategy, ParallelStrategy):
            problems.append(f"strategy is a ParallelStrategy, not {self.strategy!r}.")
        if self.engine not in ENGINES:
            problems.append(f"there is no engine {self.engine!r}; {suggest(self.engine, ENGINES)}")
        if not isinstance(self.offload, bool):
            problems.append(f"offload is true or false, not {self.offload!r}.")
        if problems:
            raise PlanError(*problems)

    def to_dict(self) -> dict[str, Any]:
        """Flat: mesh, engine, dp, and the rest where it is not the default."""
        mesh = self.mesh.first if self.mesh.size == 1 else str(self.mesh)
        flat: dict[str, Any] = {"mesh": mesh, "engine": self.engine, "dp": self.strategy.dp}
        for part in fields(ParallelStrategy):
            value = getattr(self.strategy, part.name)
            if value != part.default:
                flat[part.name] = value
        return {**flat, "offload": True} if self.offload else flat

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Assignment:
        """The inverse of `to_dict`. Raises `PlanError` with all that is wrong, unknown and missing keys included."""
        if not isinstance(value, Mapping):
            raise PlanError(f"an assignment reads like {{mesh: 0-1, engine: zero, dp: 2}}, not {value!r}.")
        strategy_keys = [part.name for part in fields(ParallelStrategy)]
        keys = ["mesh", "engine", *strategy_keys, "offload"]
        problems = [f"there is no key {key!r}; {suggest(key, keys)}" for key in value if key not in keys]
        problems += [f"{key} is missing." for key in ("mesh", "engine") if key not in value]
        mesh, strategy = DeviceMesh(0, 1), ParallelStrategy()
        try:
            mesh = DeviceMesh.parse(value.get("mesh", 0))
        except PlanError as error:
            problems += error.problems
        try:
            strategy = ParallelStrategy(**{key: value[key] for key in strategy_keys if key in value})
        except PlanError as error:
            problems += error.problems
        try:
            assignment = Assignment(mesh, strategy, value.get("engine", ENGINES[0]), value.get("offload", False))
        except PlanError as error:
            problems += error.problems
        if problems:
            raise PlanError(*problems)
        return assignment


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
    """Every call's assignment: what runs is what this says. `name` is for people.

    Raises:
        PlanError: all that is wrong with the plan, a sentence each.
    """

    cluster: Cluster
    assignments: Mapping[str, Assignment]
    graph: DataflowGraph = field(default_factory=ppo_graph)
    name: str = ""

    def __post_init__(self) -> None:
        problems = _problems(self.cluster, self.assignments, self.graph)
        if problems:
            raise PlanError(*problems)
        ordered = Assignments({name: self.assignments[name] for name in self.graph.order})
        object.__setattr__(self, "assignments", ordered)

    def __getitem__(self, name: str) -> Assignment:
        return self.assignments[self.graph.call(name).name]

    @property
    def order(self) -> tuple[str, ...]:
        """Call names in the order in which every device runs those of them that it is in."""
        return self.graph.order

    def mesh(self, name: str) -> DeviceMesh:
        return self[name].mesh

    def calls_on(self, device: int) -> tuple[str, ...]:
        """The calls that `device` takes part in, in order."""
        return tuple(name for name, assignment in self.assignments.items() if device in assignment.mesh)

    def check_world(self, world_size: int) -> None:
        """Raises `PlanError` where the job has another number of processes than the plan has devices."""
        if world_size != self.cluster.size:
            raise PlanError(
                f"the plan{f' {self.name!r}' if self.name else ''} is for {self.cluster.size} devices ({self.cluster}), "
                f"but this job has {world_size} processes; launch with --num_processes {self.cluster.size}, "
                f"edit the plan's cluster and meshes, or name a preset, which fits any job."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` makes an equal plan of them. The graph is left out where it is PPO's."""
        cluster = {"nodes": self.cluster.nodes, "devices_per_node": self.cluster.devices_per_node}
        calls = {name: assignment.to_dict() for name, assignment in self.assignments.items()}
        graph = {} if self.graph == ppo_graph() else {"graph": self.graph.to_dict()}
        return {"name": self.name, "cluster": cluster, **graph, "calls": calls}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> ExecutionPlan:
        """The inverse of `to_dict`. Raises `PlanError` with all that is wrong at once, unknown keys included."""
        if not isinstance(value, Mapping):
            raise PlanError(f"a plan has the keys cluster and calls; this is {value!r}.")
        keys = ("name", "cluster", "graph", "calls")
        problems = [f"a plan has no key {key!r}; {suggest(key, keys)}" for key in value if key not in keys]
        cluster = graph = None
        try:
            cluster = _read_cluster(value.get("cluster"))
        except PlanError as error:
            problems += error.problems
        try:
            graph = DataflowGraph.from_dict(value["graph"]) if "graph" in value else ppo_graph()
        except PlanError as error:
            problems += error.problems
        calls = value.get("calls")
        if not isinstance(calls, Mapping):
            problems.append(
                f"calls says call by call where it runs, like actor.train: {{mesh: 0-1, …}}, not {calls!r}."
            )
            calls = {}
        assignments, unread = {}, []
        for name, assignment in calls.items():
            try:
                assignments[name] = Assignment.from_dict(assignment)
            except PlanError as error:
                unread.append(name)
                problems += [f"{name}: {problem}" for problem in error.problems]
        if problems:
            if cluster and graph and calls:
                problems += _problems(cluster, assignments, graph, unread)
            raise PlanError(*problems)
        assert cluster and graph
        return ExecutionPlan(cluster, assignments, graph, str(value.get("name") or ""))

    def to_yaml(self) -> str:
        """The plan as a file: a line for each call, under a comment that says what may stand there."""
        plain = self.to_dict()
        lines = [_HEADER, _block({"name": self.name}) if self.name else "", f"cluster: {_flow(plain['cluster'])}\n"]
        if "graph" in plain:
            lines += [f"graph:\n  sources: {_flow(plain['graph']['sources'])}\n  calls:\n"]
            lines += [f"    {name}: {_flow(columns)}\n" for name, columns in plain["graph"]["calls"].items()]
        lines += ["calls:\n", *(f"  {name}: {_flow(assignment)}\n" for name, assignment in plain["calls"].items())]
        return "".join(lines)

    @staticmethod
    def from_yaml(text: str) -> ExecutionPlan:
        """The plan that a file's text describes. Raises `PlanError`, for text that is no YAML too."""
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise PlanError(f"the plan is not YAML: {' '.join(str(error).split())}.") from None
        return ExecutionPlan.from_dict(value)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> ExecutionPlan:
        """Raises `PlanError`, each of its sentences with the file's name, where the file is absent or wrong."""
        try:
            return ExecutionPlan.from_yaml(Path(path).read_text(encoding="utf-8"))
        except PlanError as error:
            raise PlanError(*(f"{path}: {problem}" for problem in error.problems)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: the plan cannot be read ({error}).") from None


def _problems(
    cluster: Cluster, assignments: Mapping[str, Assignment], graph: DataflowGraph, unread: Iterable[str] = ()
) -> list[str]:
    """A sentence for each thing that is wrong. `unread` calls are there, but could not be read: not missing."""
    problems = [
        f"there is no call {name!r}; {suggest(name, graph.order)}"
        for name in [*assignments, *unread]
        if name not in graph.order
    ]
    here = {name: assignments[name] for name in graph.order if name in assignments}
    problems += [
        f"{name} is missing; say which mesh and engine it runs on."
        for name in graph.order
        if name not in here and name not in unread
    ]
    for name, assignment in here.items():
        trained = graph.train_call(graph.call(name).role) is not None
        problems += [f"{name}: {p}" for p in _assignment_problems(graph.call(name), assignment, cluster, trained)]
    return problems + list(_until_training_layouts_reallocate(here, graph))


def _assignment_problems(call: Call, assignment: Assignment, cluster: Cluster, trained: bool) -> Iterator[str]:
    mesh, strategy, engine = assignment.mesh, assignment.strategy, assignment.engine
    try:
        check_mesh(mesh, cluster)
    except PlanError as error:
        yield from error.problems
    ability = ABILITIES[engine]
    if call.kind not in ability.kinds:
        able = [name for name, other in ABILITIES.items() if call.kind in other.kinds and not other.absent]
        yield f"engine {engine} cannot {call.kind}; use {' or '.join(able)}."
        return
    if ability.absent:
        yield f"engine {engine} {ability.absent}."
        return
    unable = [name for name in ("dp", "tp", "pp") if getattr(strategy, name) > 1 and name not in ability.degrees]
    for name in unable:
        yield f"engine {engine} cannot split by {name} ({name}: {getattr(strategy, name)}); set {name}: 1."
    if strategy.zero_stage not in ability.zero_stages:
        yield f"engine {engine} has no zero_stage {strategy.zero_stage}; leave it out."
    elif strategy.zero_stage in (1, 2) and not trained:
        yield (
            f"zero_stage {strategy.zero_stage} shards optimizer state and gradients, which a frozen role has none of; "
            f"use 0, or 3 to shard its parameters."
        )
    if strategy.size != mesh.size:
        inner = 1 if unable else strategy.tp * strategy.pp
        fits = f"dp: {mesh.size // inner}" if mesh.size % inner == 0 else f"dp: {mesh.size}, tp: 1, pp: 1"
        yield (
            f"dp {strategy.dp} x tp {strategy.tp} x pp {strategy.pp} = {strategy.size} devices, but mesh {mesh} has "
            f"{mesh.size}; {fits} would fit."
        )


def _until_training_layouts_reallocate(here: Mapping[str, Assignment], graph: DataflowGraph) -> Iterator[str]:
    """What no transfer can do yet: parameters go from their training layout to generation engines within its mesh,
    and nowhere else. Delete this function with its one caller once any layout can be filled from any other."""
    for source, target in graph.parameter_edges:
        if source not in here or target not in here:
            continue
        home, other = here[source], here[target]
        if graph.call(target).kind is CallKind.FORWARD:
            if (home.mesh, home.engine, home.strategy.layout) != (other.mesh, other.engine, other.strategy.layout):
                yield (
                    f"{target} must run where and as {source} does (mesh {home.mesh}, engine {home.engine}, "
                    f"dp {home.strategy.dp}, tp {home.strategy.tp}, pp {home.strategy.pp}, "
                    f"zero_stage {home.strategy.zero_stage}), until training layouts can be reallocated."
                )
        elif not other.mesh.inside(home.mesh):
            yield f"{target}'s mesh {other.mesh} must be inside {source}'s mesh {home.mesh}, which holds its parameters."
        elif other.engine == "transformers" and home.strategy.zero_stage == 3 and other.mesh != home.mesh:
            yield (
                f"{target} on engine transformers gathers the parameters that zero_stage 3 shards, so its mesh "
                f"{other.mesh} must be {source}'s mesh {home.mesh}; or use vllm, or zero_stage 2."
            )


def _read_cluster(value: object) -> Cluster:
    keys = [part.name for part in fields(Cluster)]
    if not isinstance(value, Mapping):
        raise PlanError(f"cluster reads like {{nodes: 1, devices_per_node: 2}}, not {value!r}.")
    problems = [f"cluster has no key {key!r}; {suggest(key, keys)}" for key in value if key not in keys]
    problems += [f"cluster: {key} is missing." for key in keys if key not in value]
    if problems:
        raise PlanError(*problems)
    return Cluster(**value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_HEADER = """\
# An execution plan: which devices run each call of an iteration, and how. Edit it; it is checked when it is read.
#   mesh: the devices, like 0-3 or 2: whole nodes, or an aligned power-of-two part of one node
#   engine: vllm or transformers to generate, zero to score and train
#   dp, tp, pp: data, tensor and pipeline parallel degrees (1 where left out); dp x tp x pp is the mesh's size
#   zero_stage: 0-3; micro_batch_tokens: most tokens of one forward; offload: to host memory between turns
"""


def _flow(value: object) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))).strip()


def _block(value: object) -> str:
    return str(yaml.safe_dump(value, default_flow_style=False, sort_keys=False, allow_unicode=True))


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key written twice, of which plain YAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in written:
            if written.count(key) > 1:
                raise PlanError(f"{key!r} is written {written.count(key)} times (line {node.start_mark.line + 1} on).")
        return super().construct_mapping(node, deep)
