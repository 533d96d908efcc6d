"""`Assignment`: the device mesh, parallel strategy and engine of one call, and which calls each engine can run.

Checks one call at a time. `execution_plan` checks whether the assignments of several calls fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from ..common.errors import PlanError, Problems, shown, suggest, unknown_keys
from .cluster import Cluster, DeviceMesh, check_mesh, is_whole
from .dataflow import Call, CallKind


@dataclass(frozen=True)
class EngineAbility:
    """Abilities of an engine: the kinds of call, the parallel degrees that may exceed 1, and the ZeRO stages."""

    kinds: frozenset[CallKind]
    degrees: tuple[str, ...]
    zero_stages: tuple[int, ...] = (0,)


_LEARNS = frozenset({CallKind.FORWARD, CallKind.TRAIN})
_GENERATES = frozenset({CallKind.GENERATE})

# Kinds of call, degrees and stages that a plan may give an engine. Their requirements are in docs/engines.md.
ENGINE_ABILITIES: Mapping[str, EngineAbility] = {
    "zero": EngineAbility(_LEARNS, ("dp",), (0, 1, 2, 3)),
    "megatron": EngineAbility(_LEARNS, ("dp", "tp", "pp"), (0, 1)),
    "vllm": EngineAbility(_GENERATES, ("dp", "tp")),
    "transformers": EngineAbility(_GENERATES, ("dp",)),
}
ENGINES = tuple(ENGINE_ABILITIES)


def engines_for(kind: CallKind) -> str:
    """The engines for calls of a kind, as text: `zero or megatron`."""
    return " or ".join(name for name, ability in ENGINE_ABILITIES.items() if kind in ability.kinds)


@dataclass(frozen=True)
class ParallelStrategy:
    """Distribution of a call over its mesh, which must have exactly `size` devices.

    Args:
        dp: data-parallel degree.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        zero_stage: ZeRO stage of the data-parallel group: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3
            also parameters.
        micro_batch_tokens: maximum tokens of one forward, prompts included; `None` for the trainer's default.

    Raises:
        PlanError: a value is not an integer or out of its range.
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
            if not is_whole(value) or value < 1
        )
        if not is_whole(self.zero_stage) or not 0 <= self.zero_stage <= 3:
            problems.append(f"zero_stage is 0, 1, 2 or 3, not {shown(self.zero_stage)}.")
        if self.micro_batch_tokens is not None and (
            not is_whole(self.micro_batch_tokens) or self.micro_batch_tokens < 1
        ):
            problems.append(
                f"micro_batch_tokens is a number of tokens from 1, not {shown(self.micro_batch_tokens)}; "
                f"leave it out for the trainer's default."
            )
        problems.refuse()

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp

    @property
    def parameter_layout(self) -> tuple[int, int, int, bool]:
        """(dp, tp, pp, sharded): determines the device of each part of a parameter. ZeRO stages 0 to 2 do not shard
        parameters."""
        return self.dp, self.tp, self.pp, self.zero_stage == 3

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """(dp, tp, pp, zero_stage): determines the device of each part of a parameter, its gradient and its optimizer
        state."""
        return self.dp, self.tp, self.pp, self.zero_stage

    def __str__(self) -> str:
        degrees = [f"{name}{value}" for name, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if value > 1]
        zero = [f"zero{self.zero_stage}"] if self.zero_stage else []
        tokens = [f"{self.micro_batch_tokens} tokens"] if self.micro_batch_tokens else []
        return " ".join([*(degrees or ["dp1"]), *zero, *tokens])


@dataclass(frozen=True)
class Assignment:
    """Mesh, parallel strategy, engine and memory use of one call.

    Args:
        offload: keep the call's parameters in host memory between its uses: a frozen role's parameters, a copy of a
            trained role's parameters in another layout, or the weights of a vLLM engine, whose cache is freed.
        drop: free a copy of a trained role's parameters, or all memory of a vLLM engine, between the call's uses. The
            parameters are sent again before the next use.
        memory_share: share of a GPU's memory for the call's vLLM engine; `None` for the setting
            `vllm_gpu_memory_utilization`, or `MEMORY_SHARE`.

    Raises:
        PlanError: the engine does not exist, or a value has the wrong type.
    """

    mesh: DeviceMesh
    strategy: ParallelStrategy
    engine: str
    offload: bool = False
    drop: bool = False
    memory_share: float | None = None

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
        share = self.memory_share
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            problems.append(f"memory_share is a number above 0 and up to 1, not {shown(share)}; or leave it out.")
        problems.refuse()

    @property
    def engine_name(self) -> str:
        """The engine in tables: `ddp` for `zero` with ZeRO stage 0, which is plain data parallelism."""
        return "ddp" if self.engine == "zero" and not self.strategy.zero_stage else self.engine

    def to_dict(self) -> dict[str, object]:
        """A flat dictionary: mesh, engine, dp, and other fields that are not the default."""
        mesh = self.mesh.first if self.mesh.size == 1 else str(self.mesh)
        flat: dict[str, object] = {"mesh": mesh, "engine": self.engine, "dp": self.strategy.dp}
        for part in fields(ParallelStrategy):
            value = getattr(self.strategy, part.name)
            if value != part.default:
                flat[part.name] = value
        flat |= {name: True for name in RELEASE_FLAGS if getattr(self, name)}
        return flat if self.memory_share is None else {**flat, "memory_share": self.memory_share}

    @staticmethod
    def from_dict(value: object) -> Assignment:
        """The inverse of `to_dict`. Raises `PlanError` with all problems, including unknown and missing keys."""
        if not isinstance(value, Mapping):
            raise PlanError(f"an assignment reads like {{mesh: 0-1, engine: zero, dp: 2}}, not {shown(value)}.")
        strategy_keys = [part.name for part in fields(ParallelStrategy)]
        keys = ["mesh", "engine", *strategy_keys, *RELEASE_FLAGS, "memory_share"]
        problems = Problems(unknown_keys(value, keys, "there is no key"))
        problems += [f"{key} is missing." for key in ("mesh", "engine") if key not in value]
        # a part that cannot be read is replaced by a default, so that the other parts are checked too
        mesh, strategy = DeviceMesh(0, 1), ParallelStrategy()
        with problems.of():
            mesh = DeviceMesh.parse(value.get("mesh", 0))
        with problems.of():
            strategy = ParallelStrategy(**{key: value[key] for key in strategy_keys if key in value})
        with problems.of():
            flags = {name: value[name] for name in (*RELEASE_FLAGS, "memory_share") if name in value}
            assignment = Assignment(mesh, strategy, value.get("engine", ENGINES[0]), **flags)
        problems.refuse()
        return assignment


# On a CPU a larger forward is not faster, because its activations do not fit into the caches, and needs more memory.
# Training on 5,800 tokens took 0.90 s in forwards of 512 to 1,024 tokens, 1.15 s in two of 4,096 (3.5-million-parameter
# Llama, 2 cores).
CACHED_TOKENS = 1024
# Default maximum of samples that a vLLM engine decodes at once: vLLM's largest default. vLLM refuses a number above the
# tokens of one forward, and captures no CUDA graphs for so many samples.
MAX_SLOTS = 1024
MEMORY_SHARE = 0.3  # share of a GPU's memory for a vLLM engine, if neither the plan nor the settings have one

# On an accelerator: maximum logits of a forward in memory at once, in elements (1 GiB in bfloat16), and of a slice (440
# rows of a vocabulary of 152,000, enough for efficient matrix products).
MAX_LOGITS, LOGITS_SLICE = 1 << 29, 1 << 26

# Maximum elements of the buffer in which DeepSpeed collects gradients before it reduces them (`reduce_bucket_size`).
# The default, 5e8, takes 2 GB of float32 per trained model. A tenth of it is still 100 MB in 16 bits, and reductions of
# tens of MB already reach the links' bandwidth.
REDUCE_BUCKET = 50_000_000

RELEASE_FLAGS = ("offload", "drop")  # treatments of a call's parameters between its uses


def between_uses(assignment: Assignment) -> str:
    """The flag for a call's memory between its uses, `offload` or `drop`; an empty text without one."""
    return next((name for name in RELEASE_FLAGS if getattr(assignment, name)), "")


def sleeps(assignment: Assignment) -> bool:
    """True if the call's vLLM engine releases its memory between its uses."""
    return assignment.engine == "vllm" and (assignment.offload or assignment.drop)


def whole_everywhere(assignment: Assignment) -> bool:
    """True if every device of the mesh holds all of the model's parameters."""
    return assignment.engine in ("zero", "transformers") and assignment.strategy.zero_stage < 3


def runs_in_step(call: Call, assignment: Assignment) -> bool:
    """True if all replicas of a call run each of its forwards together, because it has collectives over the mesh: ZeRO
    stage 3's all-gathers of parameters, and in a backward DeepSpeed's reductions of gradients (stages 1 to 3)."""
    stage = assignment.strategy.zero_stage
    return stage == 3 or (assignment.engine == "zero" and call.trains and stage > 0)


def in_place(home: Assignment, other: Assignment) -> bool:
    """True if a call can use a trained role's parameters in place, without a reallocation.

    This is so if both have the same layout, or if each device of the call holds all parameters. Generation on the mesh
    of a ZeRO stage 3 training is in place too: every device there needs every parameter, and an all-gather over the
    mesh moves the fewest bytes.

    Args:
        home: the assignment of the role's training.
        other: the assignment of the call.
    """
    is_same_place = home.engine == other.engine and home.mesh == other.mesh
    if is_same_place and home.strategy.parameter_layout == other.strategy.parameter_layout:
        return True
    if whole_everywhere(home) and other.mesh.inside(home.mesh):
        return other.engine == "vllm" or whole_everywhere(other)
    is_sharded = home.engine == "zero" and home.strategy.zero_stage == 3
    generates = other.engine in ("vllm", "transformers")
    return is_sharded and generates and other.mesh == home.mesh and other.strategy.tp == 1


def assignment_problems(call: Call, assignment: Assignment, cluster: Cluster, trained: bool) -> Iterator[str]:
    """Sentences about problems with an assignment of `call`.

    Args:
        trained: a call of the graph trains the call's role.
    """
    mesh, strategy, engine = assignment.mesh, assignment.strategy, assignment.engine
    problems = Problems()
    with problems.of():
        check_mesh(mesh, cluster)
    yield from problems
    ability = ENGINE_ABILITIES[engine]
    if call.kind not in ability.kinds:
        yield f"engine {engine} cannot {call.kind}; use {engines_for(call.kind)}."
        return
    unsupported = [name for name in ("dp", "tp", "pp") if getattr(strategy, name) > 1 and name not in ability.degrees]
    for name in unsupported:
        yield f"engine {engine} cannot split by {name} ({name}: {getattr(strategy, name)}); set {name}: 1."
    if strategy.zero_stage not in ability.zero_stages:
        yield f"engine {engine} has no zero_stage {strategy.zero_stage}; leave it out."
    elif strategy.zero_stage in (1, 2) and not call.trains:
        yield (
            f"zero_stage {strategy.zero_stage} shards optimizer state and gradients, which a call that does not train "
            f"has none of; use 0, or 3 to shard its parameters."
        )
    if engine == "vllm" and mesh.size > cluster.devices_per_node and cluster.devices_per_node % strategy.tp:
        # an engine is one process with its workers on one host
        most = max(tp for tp in range(1, strategy.tp) if cluster.devices_per_node % tp == 0)
        yield (
            f"a vLLM engine lies within a node, and with tp {strategy.tp} some of mesh {mesh} would cross nodes of "
            f"{cluster.devices_per_node}; use tp: {most}, or a mesh inside one node."
        )
    if call.kind is CallKind.GENERATE and strategy.micro_batch_tokens is not None:
        yield f"engine {engine} forms its batches itself; leave micro_batch_tokens out."
    if assignment.offload and call.kind is not CallKind.FORWARD and engine != "vllm":
        yield (
            "offload applies to scoring calls and vLLM engines; leave it out (DeepSpeed's own config offloads a "
            "training's state)."
        )
    elif assignment.offload and strategy.zero_stage == 3:
        yield "zero_stage 3 shards parameters, and DeepSpeed's own config offloads those (offload_param); leave it out."
    if assignment.memory_share is not None and engine != "vllm":
        yield f"memory_share applies only to vLLM engines, not to engine {engine}; leave it out."
    if assignment.drop:
        yield from _drop_problems(call, assignment, trained)
    if strategy.size != mesh.size:
        inner = 1 if unsupported else strategy.tp * strategy.pp
        fits = f"dp: {mesh.size // inner}" if mesh.size % inner == 0 else f"dp: {mesh.size}, tp: 1, pp: 1"
        yield (
            f"dp {strategy.dp} x tp {strategy.tp} x pp {strategy.pp} = {strategy.size} devices, but mesh {mesh} has "
            f"{mesh.size}; {fits} would fit."
        )


def _drop_problems(call: Call, assignment: Assignment, trained: bool) -> Iterator[str]:
    if call.trains or not trained:
        yield "drop applies to copies of a trained role's parameters; for a frozen role use offload: true."
    elif assignment.offload:
        yield "drop frees the copy between its uses, and offload keeps it in host memory; choose one."
    elif assignment.strategy.zero_stage == 3:
        yield "zero_stage 3 shards parameters; leave drop out."
