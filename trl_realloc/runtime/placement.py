"""Where the roles live: process groups per mesh, and the engines of this rank, built, made resident, freed.

The only place that asks which engine a call has.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn

from ..algorithms.rewards import RewardModelSource
from ..engines.base import GenerationEngine
from ..engines.child_process import die_with_launcher
from ..engines.generation.transformers import TransformersEngine
from ..engines.mesh_group import MeshGroup
from ..engines.training.megatron import MegatronEngine
from ..engines.training.packed_forward import PolicyHead, RoleHead, ScoreHead, ValueHead
from ..engines.training.replica_sync import copy_tensors, equalize, follow
from ..engines.training.replicated import ReplicatedEngine
from ..engines.training.tensor_parallel import local
from ..engines.training.weight_export import checkpoint_names
from ..engines.training.zero import ZeroEngine
from ..engines.training.zero_setup import cast_parameters, ensure_process_group, parameter_dtype
from ..plan.cluster import DeviceMesh
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from .engine_options import EngineOptions
from .process_groups import Edge, make_edges, make_groups, make_split_groups
from .reallocation import STALE, FeedingSink, GeneratorSink, Moved, Reallocation, ShadowSink, Sink
from .residency import Dropped, Residency, Versioned
from .vllm_start import start_vllm


TrainedEngine = ReplicatedEngine | ZeroEngine | MegatronEngine


@dataclass(frozen=True)
class Roles:
    """How each role's model is had; called on the ranks of its meshes only, once.

    Args:
        actor: with adapters already in it, if any.
        actor_config: the Transformers config of the actor, for engines that build the model themselves.
        critic: a sequence classifier with one output.
        actor_shell: its structure without weights, adapters left out.
        reference: `None` where the reference is the actor without its adapters.
        adapted: the actor trains adapters alone.
        rewards: the reward role's models (its functions need no placement).
        without_adapters: the context in which the actor's module is the reference; with `reference=None`.
        reference_is_policy: the reference is a copy of the actor, adapters left out, so it has the actor's parameters.
        filled_later: the models have memory and nothing in it; whoever made them fills the engines.
    """

    actor: Callable[[], Any]
    actor_config: Any
    actor_shell: Callable[[], Any]
    critic: Callable[[], Any]
    reference: Callable[[], Any] | None
    rewards: Sequence[RewardModelSource] = ()
    without_adapters: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None
    adapted: bool = False
    reference_is_policy: bool = False
    filled_later: bool = False


class Placement:
    """This rank's engines for one plan. `close` ends everything it started.

    Making it makes the process groups, on all ranks together; `start` loads models and starts engines.
    """

    def __init__(self, plan: ExecutionPlan, rank: int, roles: Roles, options: EngineOptions) -> None:
        self.plan, self.rank, self.roles, self.options = plan, rank, roles, options
        if plan.cluster.size == 1 and any(a.strategy.zero_stage for a in plan.assignments.values()):
            ensure_process_group(options.device)
        timeout = timedelta(seconds=options.collective_timeout_s)
        self._groups, self.control = make_groups(plan, rank, timeout)
        self._splits = make_split_groups(plan, rank, timeout)
        self._edges = make_edges(plan, rank, timeout)
        self._shadows: dict[str, TrainedEngine] = {}
        self._reallocations: dict[str, Reallocation] = {}
        self.started = False
        self._residents: dict[str, list[Residency]] = defaultdict(list)
        self._dropped: dict[str, Dropped] = {}
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
        return tokens or self.options.budget(trains=self.plan.graph.call(call).trains)

    @contextlib.contextmanager
    def resident(self, call: str) -> Iterator[None]:
        """The call's parameters are on the device inside, and after it where the plan says: there, in host memory
        (`offload`) or nowhere (`drop`)."""
        try:
            yield
        finally:
            for hook in self._residents.get(call, ()):
                hook.release()
            if call in self._dropped:
                self._dropped[call].release()

    def prefetch(self, call: str) -> None:
        """Parameters that the plan keeps in host memory begin to move to the device for a call that comes next."""
        if call not in self._reallocations:  # a copy is refreshed first, where it rests
            for hook in self._residents.get(call, ()):
                hook.prefetch()

    def takes_part(self, call: str) -> bool:
        """This rank is in the call's mesh, or holds parameters that the call is to get."""
        return self.rank in self.plan.mesh(call) or (call in self._edges and self.rank in self._edges[call].ranks)

    def waits_inside(self, call: str) -> bool:
        """The ranks of the call's mesh wait for each other inside it: for gradients, for activations, for parts of
        sharded parameters."""
        assignment = self.plan[call]
        if call == "actor.generate":  # inside the actor's own engine its parameters may be sharded
            trained = self.plan["actor.train"]
            return assignment.engine == "transformers" and trained.mesh.size > 1 and trained.strategy.zero_stage == 3
        split = assignment.engine == "megatron" or assignment.strategy.zero_stage == 3
        return assignment.mesh.size > 1 and (split or self.plan.graph.call(call).trains)

    def refresh(self, call: str) -> Moved | None:
        """The trained parameters that the call uses brought up to date where it uses them. Every rank that
        `takes_part` calls this. Returns what went over the wire, if anything did.

        Raises:
            TransferError, EngineError: the call's copy is not whole; nothing may be generated or scored with it.
        """
        if call in self._dropped:
            self._dropped[call].restore()
        if call in self._reallocations:
            return self._reallocations[call].refresh()
        if self.generator is not None and self.actor is not None and call == "actor.generate":
            self._feed(self.generator, self.actor)
        elif self.actor is not None and call == "actor.generate" and self._gathers:
            self._gather_along(self.actor)
        return None

    @property
    def _gathers(self) -> bool:
        """Feeding the generation engines in place is a collective of the actor's mesh: its parameters are sharded."""
        return self.plan["actor.train"].strategy.zero_stage == 3 and self.plan["actor.generate"].engine == "vllm"

    def _feed(self, generator: GenerationEngine, actor: TrainedEngine) -> None:
        """A generation engine of this rank gets what the actor's engine here can give by itself, or by gathering."""
        if self.plan["actor.generate"].engine == "transformers":
            generator.load((), actor.version)
        elif self._gathers:
            self._gather_along(actor, generator)
        elif generator.version != actor.version:
            generator.load(actor.export(), actor.version)

    def _gather_along(self, actor: TrainedEngine, generator: GenerationEngine | None = None) -> None:
        stale = generator is not None and generator.version != actor.version
        if not self.group("actor.train").max(int(stale)):
            return
        stream = actor.export()
        try:
            if stale and generator is not None:
                generator.load(stream, actor.version)
        finally:
            for _ in stream:  # the others are gathering too: a rank whose engine failed must not leave them
                pass

    def check_fresh(self, call: str) -> None:
        """Raises `EngineError` where the call's copy of trained parameters is not the version agreed on."""
        if call in self._reallocations:
            self._reallocations[call].check()

    @property
    def scoring_critic(self) -> TrainedEngine:
        """The engine that answers critic.forward: the one that trains, or a copy in a layout of its own."""
        engine = self._shadows.get("critic.forward", self.critic)
        assert engine is not None, "this rank is not in critic.forward's mesh"
        return engine

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
            # first: its process starts while the models load here
            self.generator = start_vllm(self.plan, self.rank, self.roles.actor_config, self.options, self._stack)
        self._build_actor()
        self._build_critic()
        if self._here("reward.forward"):
            self.reward_models = [(source, self._reward_engine(source)) for source in self.roles.rewards]
        if self._here("actor.generate") and self.plan["actor.generate"].engine == "transformers":
            whole = self._shadows.get("actor.generate", self.actor)
            assert whole is not None, "in place means inside the actor's mesh"
            self.generator = TransformersEngine(
                whole.whole_model,
                self.options.device,
                batch_size=self.options.forward_batch_size,
            )
        for call, edge in self._edges.items():
            if self.rank in edge.ranks:
                self._reallocations[call] = self._reallocation(call, edge)
            if self.plan[call].drop and call in self._shadows:
                user = self.generator if call == "actor.generate" else self._shadows[call]
                assert user is not None, "a copy that generates does so in an engine"
                self._dropped[call] = _dropped(user, self._shadows[call], self._reallocations[call].names)

    def _build_actor(self) -> None:
        """The reference with it, which may be its copy, and the copy that generates; both before the actor's engine,
        which may partition the module that they are made from."""
        trains, copied = self._here("actor.train"), copies_actor(self.plan, self.rank, self.roles.adapted)
        actor = self.roles.actor() if trains or copied else None
        self._equalize("actor.train", actor)
        if self.roles.reference is not None:
            self._build_reference(actor)
        if "actor.generate" in self._edges and self._has_copies:
            model = copy.deepcopy(actor) if copied else None
            self._follow("actor.generate", actor, model)
            if model is not None:
                alone = self._groups[DeviceMesh(self.rank, 1)]
                dtype = None if self._cast_as_trained("actor.train", model) else self.options.compute_dtype
                head = PolicyHead(model, self.options.temperature)
                self._shadows["actor.generate"] = ReplicatedEngine(
                    head, alone, self.options.device, compute_dtype=dtype
                )
        if trains:
            self.actor = self._engine("actor.train", PolicyHead(actor, self.options.temperature))

    @property
    def _has_copies(self) -> bool:
        """Some rank has a copy of the actor to generate with."""
        return self.plan["actor.generate"].engine == "transformers" or self.roles.adapted

    def _build_reference(self, actor: Any) -> None:
        assert self.roles.reference is not None
        model = self.roles.reference() if self._here("reference.forward") else None
        if self.roles.reference_is_policy:
            self._follow("reference.forward", actor, model, adapted=self.roles.adapted)
        else:
            self._equalize("reference.forward", model)
        if model is not None:
            self.reference = self._engine("reference.forward", PolicyHead(model, self.options.temperature))

    def _build_critic(self) -> None:
        """With its copy in a layout of its own, made from the one model that a rank loads."""
        trains, scores = self._here("critic.train"), self._here("critic.forward") and "critic.forward" in self._edges
        critic = self.roles.critic() if trains or scores else None
        self._equalize("critic.train", critic)
        if "critic.forward" in self._edges:
            model = copy.deepcopy(critic) if scores and trains else critic if scores else None
            self._follow("critic.forward", critic, model)
            if model is not None:
                autocast = not self._cast_as_trained("critic.train", model)
                self._shadows["critic.forward"] = self._engine("critic.forward", ValueHead(model), autocast=autocast)
        if trains:
            self.critic = self._engine("critic.train", ValueHead(critic))

    def _reward_engine(self, source: RewardModelSource) -> TrainedEngine:
        model = source.load()
        self._equalize("reward.forward", model)
        return self._engine("reward.forward", ScoreHead(model))

    def _equalize(self, call: str, model: Any) -> None:
        """A role's model as the first rank of the call's mesh has it."""
        if self._here(call) and not self.roles.filled_later:
            equalize(model, self.group(call), str(self.plan.graph.call(call).role))

    def _follow(self, call: str, trained: Any, copied: Any, *, adapted: bool = False) -> None:
        """A copy of a trained role's model as the first rank of the training's mesh has it."""
        if self.roles.filled_later:
            return
        home = self.plan.graph.train_call(Role.ACTOR if call != "critic.forward" else Role.CRITIC)
        assert home is not None
        source, target = self.plan.mesh(home).first, self.plan.mesh(call).first
        if self.rank == source == target:
            copy_tensors(trained, copied, adapted=adapted)
        elif self.rank in (source, target):
            follow(trained if self.rank == source else copied, source, target, self.rank, self.control, adapted=adapted)
        self._equalize(call, copied)

    def _cast_as_trained(self, home: str, model: Any) -> bool:
        """Cast a copy of a role as DeepSpeed casts the model that it trains. Returns whether it does; the training then
        computes without autocast, and so does the copy."""
        dtype = parameter_dtype(self.options.deepspeed) if self.plan[home].strategy.zero_stage else None
        if dtype is not None:
            cast_parameters(model, dtype)
        return dtype is not None

    def _reallocation(self, call: str, edge: Edge) -> Reallocation:
        trained: TrainedEngine | None = self.critic if call == "critic.forward" else self.actor
        sink: Sink | None = None
        if call in self._shadows:
            shadow = self._shadows[call]
            feeds = call == "actor.generate" and self.generator is not None
            sink = FeedingSink(shadow, self.generator) if feeds and self.generator else ShadowSink(shadow)
        elif call == "actor.generate" and self.generator is not None:
            shell = self.roles.actor_shell()
            sink = GeneratorSink(self.generator, partial(checkpoint_names, shell), self.options.device)
        return Reallocation(
            edge.source,
            call,
            self.plan.cluster,
            edge.ranks,
            self.rank,
            control=edge.control,
            wire=edge.wire,
            device=self.options.device,
            holder=trained,
            sink=sink,
            bucket_bytes=self.options.bucket_bytes,
            timeout_s=self.options.transfer_timeout_s,
            checksum=self.options.checksums,
        )

    def _engine(self, call: str, head: RoleHead, *, autocast: bool = True) -> TrainedEngine:
        assignment, options = self.plan[call], self.options
        trains = self.plan.graph.call(call).trains
        if trains and options.gradient_checkpointing:
            kwargs = dict(options.gradient_checkpointing_kwargs or {"use_reentrant": False})
            head.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            if hasattr(head.model, "enable_input_require_grads") and hasattr(head.model, "peft_config"):
                head.model.enable_input_require_grads()
        shared: dict[str, Any] = {
            "compute_dtype": options.compute_dtype if autocast else None,
            "make_optimizer": options.make_optimizer if trains else None,
            "max_grad_norm": options.max_grad_norm,
        }
        group = self.group(call)
        strategy = assignment.strategy
        engine: TrainedEngine
        if assignment.engine == "megatron":
            groups = self._splits[assignment.mesh, strategy.tp, strategy.pp]
            sharded = strategy.zero_stage == 1
            engine = MegatronEngine(head, groups, options.device, shard_optimizer=sharded, **shared)
        elif strategy.zero_stage == 0:
            engine = ReplicatedEngine(head, group, options.device, **shared)
        else:
            alone = self._groups[DeviceMesh(self.rank, 1)].group
            engine = ZeroEngine(
                head,
                group,
                options.device,
                stage=strategy.zero_stage,
                alone=alone,
                config=options.deepspeed,
                **shared,
            )
        self._stack.callback(engine.close)
        if assignment.offload and not trains:
            self._residents[call].append(Residency.attach(engine.head, options.device))
        return engine


def _dropped(user: Versioned, copied: TrainedEngine, names: Sequence[str]) -> Dropped:
    """The tensors of a copy that its reallocation fills, of which `user` is told that they are of no version."""
    parts = copied.parts()
    filled = [cell for name in names for _, cell in parts.get(name, ())]
    own = {cell.data_ptr() for cell in filled}
    held = [local(tensor.data) for tensor in (*copied.head.model.parameters(), *copied.head.model.buffers())]
    return Dropped(user, filled, [tensor for tensor in held if tensor.data_ptr() not in own], STALE)


def copies_actor(plan: ExecutionPlan, rank: int, adapted: bool) -> bool:
    """Whether this rank needs a copy of the actor's model beside or without the one that trains: to generate in, or to
    merge adapters into for its generation engine."""
    assignment = plan["actor.generate"]
    if all(edge.target != "actor.generate" for edge in plan.reallocations) or rank not in assignment.mesh:
        return False
    owns = assignment.mesh.index(rank) % assignment.strategy.tp == 0
    return assignment.engine == "transformers" or (adapted and owns)
