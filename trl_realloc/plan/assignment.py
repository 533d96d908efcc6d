"""What one call is assigned: device mesh, parallel strategy, engine, what rests where between its turns; and what each
engine can be assigned.

Knows one call at a time. How the assignments of several calls go together is the plan's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..common.errors import PlanError, Problems, shown, suggest, unknown_keys
from .cluster import Cluster, DeviceMesh, check_mesh
from .dataflow import Call, CallKind


@dataclass(frozen=True)
class Ability:
    """What an engine can do: the kinds of call, which degrees may exceed 1, the ZeRO stages."""

    kinds: frozenset[CallKind]
    degrees: tuple[str, ...]
    zero_stages: tuple[int, ...] = (0,)


_LEARNS = frozenset({CallKind.FORWARD, CallKind.TRAIN})
_GENERATES = frozenset({CallKind.GENERATE})

# The one place that says what an engine can do: to open an engine or a degree, change its row.
ABILITIES: Mapping[str, Ability] = {
    "zero": Ability(_LEARNS, ("dp",), (0, 1, 2, 3)),
    "megatron": Ability(_LEARNS, ("dp", "tp", "pp"), (0, 1)),
    "vllm": Ability(_GENERATES, ("dp", "tp")),
    "transformers": Ability(_GENERATES, ("dp",)),
}
ENGINES = tuple(ABILITIES)


def able(kind: CallKind) -> str:
    """The engines that can do calls of that kind, as a person would list them."""
    return " or ".join(name for name, ability in ABILITIES.items() if kind in ability.kinds)


@dataclass(frozen=True)
class ParallelStrategy:
    """How a call is spread over its mesh, of exactly `size` devices.

    Args:
        dp: data-parallel degree; the samples are dealt out to so many groups.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        zero_stage: what the data-parallel group shards: 0 nothing, 1 the optimizer's state, 2 gradients too,
            3 parameters too.
        micro_batch_tokens: most tokens of one forward, prompts included; `None` leaves it to the trainer.

    Raises:
        PlanError: a number that is none, or out of its range.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = Problems(
            f"{name} is a whole number from 1, not {shown(value)}."
            for name, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp))
            if not _whole(value) or value < 1
        )
        if not _whole(self.zero_stage) or not 0 <= self.zero_stage <= 3:
            problems.append(f"zero_stage is 0, 1, 2 or 3, not {shown(self.zero_stage)}.")
        if self.micro_batch_tokens is not None and (not _whole(self.micro_batch_tokens) or self.micro_batch_tokens < 1):
            problems.append(
                f"micro_batch_tokens is a number of tokens from 1, not {shown(self.micro_batch_tokens)}; "
                f"leave it out for the trainer's own."
            )
        problems.refuse()

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def parameter_layout(self) -> tuple[int, int, int, bool]:
        """(dp, tp, pp, sharded): which device holds which part of a parameter. Stages 0 to 2 all keep it whole."""
        return self.dp, self.tp, self.pp, self.zero_stage == 3

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """(dp, tp, pp, zero_stage): what decides which device holds which part of a parameter and of what trains it."""
        return self.dp, self.tp, self.pp, self.zero_stage

    def __str__(self) -> str:
        degrees = [f"{name}{value}" for name, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if value > 1]
        zero = [f"zero{self.zero_stage}"] if self.zero_stage else []
        tokens = [f"{self.micro_batch_tokens} tokens"] if self.micro_batch_tokens else []
        return " ".join([*(degrees or ["dp1"]), *zero, *tokens])


@dataclass(frozen=True)
class Assignment:
    """Where and how one call runs. `offload` keeps what it scores with in host memory between its turns: a frozen
    role's parameters, or a trained role's copy in a layout of its own. `drop` frees such a copy between its turns, and
    a reallocation makes it again for the next.

    Raises:
        PlanError: an engine that does not exist, or a value of the wrong kind.
    """

    mesh: DeviceMesh
    strategy: ParallelStrategy
    engine: str
    offload: bool = False
    drop: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        if not isinstance(self.mesh, DeviceMesh):
            problems.append(f"mesh is a DeviceMesh, not {shown(self.mesh)}; DeviceMesh.parse reads 0-3, 2 or a list.")
        if not isinstance(self.strategy, ParallelStrategy):
            problems.append(f"strategy is a ParallelStrategy, not {shown(self.strategy)}.")
        if self.engine not in ENGINES:
            problems.append(f"there is no engine {shown(self.engine)}; {suggest(self.engine, ENGINES)}")
        for name, value in (("offload", self.offload), ("drop", self.drop)):
            if not isinstance(value, bool):
                problems.append(f"{name} is true or false, not {shown(value)}.")
        problems.refuse()

    def to_dict(self) -> dict[str, Any]:
        """Flat: mesh, engine, dp, and the rest where it is not the default."""
        mesh = self.mesh.first if self.mesh.size == 1 else str(self.mesh)
        flat: dict[str, Any] = {"mesh": mesh, "engine": self.engine, "dp": self.strategy.dp}
        for part in fields(ParallelStrategy):
            value = getattr(self.strategy, part.name)
            if value != part.default:
                flat[part.name] = value
        return {**flat, **{name: True for name in RESTS if getattr(self, name)}}

    @staticmethod
    def from_dict(value: object) -> Assignment:
        """The inverse of `to_dict`. Raises `PlanError` with all that is wrong, unknown and missing keys included."""
        if not isinstance(value, Mapping):
            raise PlanError(f"an assignment reads like {{mesh: 0-1, engine: zero, dp: 2}}, not {shown(value)}.")
        strategy_keys = [part.name for part in fields(ParallelStrategy)]
        keys = ["mesh", "engine", *strategy_keys, *RESTS]
        problems = Problems(unknown_keys(value, keys, "there is no key"))
        problems += [f"{key} is missing." for key in ("mesh", "engine") if key not in value]
        # Where a part cannot be read, another stands in for it, so that the rest is looked at all the same.
        mesh, strategy = DeviceMesh(0, 1), ParallelStrategy()
        with problems.of():
            mesh = DeviceMesh.parse(value.get("mesh", 0))
        with problems.of():
            strategy = ParallelStrategy(**{key: value[key] for key in strategy_keys if key in value})
        with problems.of():
            rests = {name: value[name] for name in RESTS if name in value}
            assignment = Assignment(mesh, strategy, value.get("engine", ENGINES[0]), **rests)
        problems.refuse()
        return assignment


# On a CPU a larger forward is no faster, for its activations leave the caches, and takes more memory: training on 5,800
# tokens took 0.90 s in forwards of 512 to 1,024 tokens, 1.15 s in two of 4,096 (3.5-million-parameter Llama, 2 cores).
CACHED_TOKENS = 1024

RESTS = ("offload", "drop")  # what may become of a call's parameters between its turns


def whole_everywhere(assignment: Assignment) -> bool:
    """Whether every device of the mesh holds all of the model's parameters."""
    return assignment.engine in ("zero", "transformers") and assignment.strategy.zero_stage < 3


def in_place(home: Assignment, other: Assignment) -> bool:
    """Whether `other`'s call finds a trained role's parameters where and as its training, `home`, leaves them, so that
    nothing is reallocated: the same layout, or a call that each device of it can serve from a whole copy of its own.

    Generation in the very mesh that ZeRO-3 shards over is in place too: there every device needs every parameter, and
    gathering them along the mesh moves the fewest bytes.
    """
    alike = home.engine == other.engine and home.mesh == other.mesh
    if alike and home.strategy.parameter_layout == other.strategy.parameter_layout:
        return True
    if whole_everywhere(home) and other.mesh.inside(home.mesh):
        return other.engine == "vllm" or whole_everywhere(other)
    sharded = home.engine == "zero" and home.strategy.zero_stage == 3
    generates = other.engine in ("vllm", "transformers")
    return sharded and generates and other.mesh == home.mesh and other.strategy.tp == 1


def assignment_problems(call: Call, assignment: Assignment, cluster: Cluster, trained: bool) -> Iterator[str]:
    """What is wrong with giving `call` that assignment. `trained`: its role is trained by some call of the graph."""
    mesh, strategy, engine = assignment.mesh, assignment.strategy, assignment.engine
    problems = Problems()
    with problems.of():
        check_mesh(mesh, cluster)
    yield from problems
    ability = ABILITIES[engine]
    if call.kind not in ability.kinds:
        yield f"engine {engine} cannot {call.kind}; use {able(call.kind)}."
        return
    unable = [name for name in ("dp", "tp", "pp") if getattr(strategy, name) > 1 and name not in ability.degrees]
    for name in unable:
        yield f"engine {engine} cannot split by {name} ({name}: {getattr(strategy, name)}); set {name}: 1."
    if strategy.zero_stage not in ability.zero_stages:
        yield f"engine {engine} has no zero_stage {strategy.zero_stage}; leave it out."
    elif strategy.zero_stage in (1, 2) and not call.trains:
        yield (
            f"zero_stage {strategy.zero_stage} shards optimizer state and gradients, which a call that does not train "
            f"has none of; use 0, or 3 to shard its parameters."
        )
    if engine == "vllm" and mesh.size > cluster.devices_per_node and cluster.devices_per_node % strategy.tp:
        # an engine is one process with its workers, on one host
        most = max(tp for tp in range(1, strategy.tp) if cluster.devices_per_node % tp == 0)
        yield (
            f"a vLLM engine lies within a node, and with tp {strategy.tp} some of mesh {mesh} would cross nodes of "
            f"{cluster.devices_per_node}; use tp: {most}, or a mesh inside one node."
        )
    if call.kind is CallKind.GENERATE and strategy.micro_batch_tokens is not None:
        yield f"engine {engine} forms its batches itself; leave micro_batch_tokens out."
    if assignment.offload and call.kind is not CallKind.FORWARD:
        yield "offload is for what roles score with; leave it out (DeepSpeed's own config offloads what trains)."
    elif assignment.offload and strategy.zero_stage == 3:
        yield "zero_stage 3 shards parameters, and DeepSpeed's own config offloads those (offload_param); leave it out."
    if assignment.drop:
        yield from _drop_problems(call, assignment, trained)
    if strategy.size != mesh.size:
        inner = 1 if unable else strategy.tp * strategy.pp
        fits = f"dp: {mesh.size // inner}" if mesh.size % inner == 0 else f"dp: {mesh.size}, tp: 1, pp: 1"
        yield (
            f"dp {strategy.dp} x tp {strategy.tp} x pp {strategy.pp} = {strategy.size} devices, but mesh {mesh} has "
            f"{mesh.size}; {fits} would fit."
        )


def _drop_problems(call: Call, assignment: Assignment, trained: bool) -> Iterator[str]:
    if call.trains or not trained:
        yield "drop is for copies of a trained role's parameters; a frozen role's may rest on the host (offload: true)."
    elif assignment.offload:
        yield "drop frees the copy between its turns, and offload keeps it in host memory; choose one."
    elif assignment.engine == "vllm":
        yield "a vLLM engine holds its share of the memory throughout; leave drop out."
    elif assignment.strategy.zero_stage == 3:
        yield "zero_stage 3 has a part of each parameter alone; leave drop out."


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
