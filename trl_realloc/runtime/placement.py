"""Where the roles live: process groups per mesh, and the engines of this rank, built, made resident, freed.

The only place that asks which engine a call has.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..cluster import DeviceMesh
from ..engines import GenerationEngine
from ..engines.forward import PolicyHead, RoleHead, ScoreHead, ValueHead
from ..engines.group import MeshGroup
from ..engines.process import die_with_launcher
from ..engines.replicated import ReplicatedEngine
from ..engines.transformers import TransformersEngine
from ..engines.zero import ZeroEngine, ensure_process_group
from ..plan import Assignment, ExecutionPlan
from ..rewards import RewardModelSource
from .residency import Residency


TrainedEngine = ReplicatedEngine | ZeroEngine

# On a CPU a larger forward is no faster, for its activations leave the caches, and takes more memory: training on 5,800
# tokens took 0.90 s in forwards of 512 to 1,024 tokens, 1.15 s in two of 4,096 (3.5-million-parameter Llama, 2 cores).
CACHED_TOKENS = 1024


@dataclass(frozen=True)
class Roles:
    """How each role's model is had; called on the ranks of its meshes only, once.

    Args:
        actor: with adapters already in it, if any.
        actor_config: the Transformers config of the actor, for engines that build the model themselves.
        critic: a sequence classifier with one output.
        reference: `None` where the reference is the actor without its adapters.
        rewards: the reward role's models (its functions need no placement).
        without_adapters: the context in which the actor's module is the reference; with `reference=None`.
    """

    actor: Callable[[], Any]
    actor_config: Any
    critic: Callable[[], Any]
    reference: Callable[[], Any] | None
    rewards: Sequence[RewardModelSource] = ()
    without_adapters: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None


@dataclass(frozen=True)
class EngineOptions:
    """What engines are told beyond the plan; from `PPOConfig`.

    Args:
        device: this rank's.
        compute_dtype: mixed precision, or `None`.
        temperature: of sampling, and so of every log-probability.
        response_length, context_length: tokens; the latter the longest prompt with its response.
        forward_batch_size: prompts or samples of one forward without gradients, where the plan gives no token budget.
        train_batch_size: samples of one forward with gradients, likewise.
        make_optimizer: role's module -> optimizer.
    """

    device: torch.device
    temperature: float
    response_length: int
    context_length: int
    forward_batch_size: int
    train_batch_size: int
    pad_token_id: int
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    compute_dtype: torch.dtype | None = None
    max_grad_norm: float = 0.0
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    seed: int = 0
    vllm: Mapping[str, Any] = field(default_factory=dict)


class Placement:
    """This rank's engines for one plan. `close` ends everything it started.

    Making it makes the process groups, on all ranks together; `start` loads models and starts engines.
    """

    def __init__(self, plan: ExecutionPlan, rank: int, roles: Roles, options: EngineOptions) -> None:
        self.plan, self.rank, self.roles, self.options = plan, rank, roles, options
        if plan.cluster.size == 1 and any(a.strategy.zero_stage for a in plan.assignments.values()):
            ensure_process_group()
        self._groups, self.control = _make_groups(plan, rank)
        self.started = False
        self._residents: dict[str, Residency] = {}
        self.generator: GenerationEngine | None = None
        self.reference: TrainedEngine | None = None
        self.actor: TrainedEngine | None = None
        self.critic: TrainedEngine | None = None
        self.reward_models: list[tuple[RewardModelSource, TrainedEngine]] = []
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Load this rank's models and start its engines, once: the first expensive thing of a run."""
        if self.started:
            return
        die_with_launcher()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        self.started = True

    # --- what a call asks -----------------------------------------------------------------------------------------

    def group(self, call: str) -> MeshGroup:
        return self._groups[self.plan.mesh(call)]

    def budget(self, call: str) -> int:
        """Most tokens of one forward of the call: the plan's, or room for the config's number of longest samples."""
        tokens = self.plan[call].strategy.micro_batch_tokens
        trains = self.plan.graph.call(call).trains
        samples = self.options.train_batch_size if trains else self.options.forward_batch_size
        room = samples * self.options.context_length
        return tokens or (min(room, CACHED_TOKENS) if self.options.device.type == "cpu" else room)

    @contextlib.contextmanager
    def resident(self, call: str) -> Iterator[None]:
        """The call's parameters are on the device inside, and where the plan says `offload`, in host memory after."""
        try:
            yield
        finally:
            if call in self._residents:
                self._residents[call].release()

    def refresh_generator(self) -> None:
        """The actor's current parameters into the generation engines, if they hold others. Every rank of
        actor.train's mesh and of actor.generate's calls this; a collective where parameters are partitioned."""
        actor = self.actor
        if actor is None:
            return
        generator = self.generator
        wanted = actor.version
        partitioned = self.plan["actor.train"].strategy.zero_stage == 3
        in_place = self.plan["actor.generate"].engine == "transformers"
        if in_place:
            if generator is not None:
                generator.load((), wanted)
        elif partitioned:
            stale = generator is not None and generator.version != wanted
            if self.group("actor.train").max(int(stale)):
                stream = actor.export()
                try:
                    if stale and generator is not None:
                        generator.load(stream, wanted)
                finally:
                    for _ in stream:  # the others are gathering too: a rank whose engine failed must not leave them
                        pass
        elif generator is not None and generator.version != wanted:
            generator.load(actor.export(), wanted)

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[TrainedEngine]:
        """The engine that answers reference.forward: its own, or the actor's with the adapters off."""
        if self.reference is not None:
            yield self.reference
            return
        assert self.actor is not None and self.roles.without_adapters is not None
        with self.roles.without_adapters(self.actor.head.model):
            yield self.actor

    def close(self) -> None:
        """End every engine and remove every file; may be called twice."""
        self._stack.close()

    # --- building -------------------------------------------------------------------------------------------------

    def _here(self, call: str) -> bool:
        return self.rank in self.plan.mesh(call)

    def _build(self) -> None:
        if self._here("actor.generate") and self.plan["actor.generate"].engine == "vllm":
            self._start_vllm()  # first: its process starts while the models load here
        if self._here("reference.forward") and self.roles.reference is not None:
            head = PolicyHead(self.roles.reference(), self.options.temperature)  # before the actor: it may be its copy
            self.reference = self._engine("reference.forward", head)
        if self._here("actor.train"):
            self.actor = self._engine("actor.train", PolicyHead(self.roles.actor(), self.options.temperature))
        if self._here("critic.train"):
            self.critic = self._engine("critic.train", ValueHead(self.roles.critic()))
        if self._here("reward.forward"):
            self.reward_models = [
                (source, self._engine("reward.forward", ScoreHead(source.load()))) for source in self.roles.rewards
            ]
        if self._here("actor.generate") and self.plan["actor.generate"].engine == "transformers":
            assert self.actor is not None, "the plan's check keeps generation by transformers inside the actor's mesh"
            self.generator = TransformersEngine(
                self.actor.whole_model,
                self.options.device,
                batch_size=self.options.forward_batch_size,
                pad_token_id=self.options.pad_token_id,
            )

    def _engine(self, call: str, head: RoleHead) -> TrainedEngine:
        assignment, options = self.plan[call], self.options
        trains = self.plan.graph.call(call).trains
        if trains and options.gradient_checkpointing:
            kwargs = dict(options.gradient_checkpointing_kwargs or {"use_reentrant": False})
            head.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            if hasattr(head.model, "enable_input_require_grads") and hasattr(head.model, "peft_config"):
                head.model.enable_input_require_grads()
        shared: dict[str, Any] = {
            "compute_dtype": options.compute_dtype,
            "make_optimizer": options.make_optimizer if trains else None,
            "max_grad_norm": options.max_grad_norm,
        }
        group = self.group(call)
        if assignment.strategy.zero_stage == 0:
            engine: TrainedEngine = ReplicatedEngine(head, group, options.device, **shared)
        else:
            alone = self._groups[DeviceMesh(self.rank, 1)].group
            engine = ZeroEngine(
                head,
                group,
                options.device,
                stage=assignment.strategy.zero_stage,
                alone=alone,
                config=options.deepspeed,
                **shared,
            )
        self._stack.callback(engine.close)
        if assignment.offload and not trains:
            self._residents[call] = Residency.attach(engine.head, options.device)
        return engine

    def _start_vllm(self) -> None:
        from ..engines.vllm import VLLMEngine

        assignment, options = self.plan["actor.generate"], self.options
        place, tp = assignment.mesh.index(self.rank), assignment.strategy.tp
        if place % tp:
            return  # this device works for the engine that the first of its tensor group owns
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trl_realloc_")))
        config = self.roles.actor_config
        config.save_pretrained(folder)
        settings = {"log_path": folder / "vllm.log", **options.vllm}
        engine = VLLMEngine(
            folder,
            name=f"actor.generate engine {place // tp} (rank {self.rank})",
            tensor_parallel_size=tp,
            dtype=_dtype_name(config, options),
            max_model_len=options.context_length,
            **_devices(self.plan, assignment, self.rank, options.device),
            **settings,
        )
        self._stack.callback(engine.close)
        self.generator = engine


def _make_groups(plan: ExecutionPlan, rank: int) -> tuple[dict[DeviceMesh, MeshGroup], Any]:
    """A group for every mesh of the plan and for each rank alone, made on all ranks in one order as torch demands;
    and a gloo group over all for samples, which lie on the host."""
    singles = {DeviceMesh(device, 1) for device in range(plan.cluster.size)}
    meshes = sorted({assignment.mesh for assignment in plan.assignments.values()} | singles)
    if not dist.is_initialized():
        return {mesh: MeshGroup(tuple(mesh.devices), rank) for mesh in meshes}, None
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    groups = {mesh: MeshGroup(tuple(mesh.devices), rank, dist.new_group(list(mesh.devices)), device) for mesh in meshes}
    return groups, dist.new_group(backend="gloo")


def _dtype_name(config: Any, options: EngineOptions) -> str:
    """What the actor computes in while it trains: so its log-probabilities there and in the engine agree."""
    dtype = options.compute_dtype or getattr(config, "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")


def _devices(plan: ExecutionPlan, assignment: Assignment, rank: int, device: torch.device) -> dict[str, Any]:
    """The GPUs, or the cores, of the engine that this rank owns: its own and those of its tensor group."""
    per_node = plan.cluster.devices_per_node
    local = [(rank + i) % per_node for i in range(assignment.strategy.tp)]
    if device.type == "cuda":
        return {"cuda_devices": local}
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // per_node)
    return {"cpu_cores": [cores[(at * each + i) % len(cores)] for at in local for i in range(each)]}
