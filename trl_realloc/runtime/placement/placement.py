"""`Placement`: this rank's process groups and engines under one plan. It updates the parameters that a call uses, moves
them to the device and frees them.

It reads a call's kind and role from the graph, never its name. `engine_builder` builds the engines.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import timedelta

import torch

from ...engines.base import GenerationEngine, ScoringEngine, SourceDigests, TrainingEngine
from ...engines.child_process import die_with_launcher
from ...engines.device import free_bytes, is_accelerator, release_cached_memory
from ...engines.mesh_group import MeshGroup
from ...engines.training.fused_training import FusedTraining
from ...engines.training.heads import RoleHead
from ...engines.training.zero_setup import ensure_process_group
from ...plan.assignment import sleeps
from ...plan.dataflow import CallKind, Role
from ...plan.execution_plan import ExecutionPlan
from ..parameters.cpu_offload import CPUOffload, DroppedCopy, move_to_host
from ..parameters.parameter_sinks import STALE, load_merged
from ..parameters.reallocation import Moved, Reallocation
from ..process_groups import destroy_groups, make_groups, make_reallocation_groups, make_split_groups
from .engine_builder import EngineBuilder
from .engine_options import EngineOptions
from .roles import Roles


# With at least this much free device memory, cached memory is not released before new weights are sent to an engine. It
# holds the buckets and messages of a transfer, and the engine's largest layer.
LOAD_BYTES = 4 << 30


class Placement:
    """This rank's engines for one plan. The constructor makes the process groups, on all ranks together. `start` loads
    models and starts engines. `close` ends all engines, `reset` the engines that are unusable after a failure.

    Attributes:
        engines: this rank's engines of each call, one for each of the role's models. Calls that use the parameters in
            place share the engines of their role's training.
        trainers: this rank's training engines by role.
        copies: the calls whose `engines` are copies of a trained role in another layout.
        generators: this rank's generation engines, by call.
        fused: trains the roles whose training the plan fuses; `None` if it fuses none, and on ranks outside their mesh.
        engine_processes: ends the generation engines with separate processes, and removes their files.
        stack: ends the other engines, and removes the files of all.
    """

    def __init__(self, plan: ExecutionPlan, rank: int, roles: Roles, options: EngineOptions) -> None:
        roles.check(plan.graph)
        self.plan, self.rank, self.roles, self.options = plan, rank, roles, options
        if plan.cluster.size == 1 and any(a.strategy.zero_stage for a in plan.assignments.values()):
            ensure_process_group(options.device)
        timeout = timedelta(seconds=options.collective_timeout_s)
        self.groups, self.control = make_groups(plan, rank, timeout)
        self.split_groups = make_split_groups(plan, rank, timeout)
        self.reallocation_groups = make_reallocation_groups(plan, rank, timeout)
        self.engines: dict[str, list[ScoringEngine]] = {}
        self.trainers: dict[Role, TrainingEngine] = {}
        self.copies: set[str] = set()
        self.generators: dict[str, GenerationEngine] = {}
        self.fused: FusedTraining | None = None
        self.reallocations: dict[str, Reallocation] = {}
        self.residents: dict[str, list[CPUOffload]] = defaultdict(list)
        self.dropped: dict[str, DroppedCopy] = {}
        self.started = False
        self._was_reset = False
        self.stack, self.engine_processes = contextlib.ExitStack(), contextlib.ExitStack()

    def start(self) -> None:
        """Load this rank's models and start its engines. A later call restarts the engines that `reset` has ended. All
        ranks together."""
        if self.started and not self._was_reset:
            return
        die_with_launcher()
        builder = EngineBuilder(self)
        try:
            if self.started:
                builder.start_vllm()  # with one device there are no reallocations, so no sink refers to the old engine
            else:
                builder.build()
        except BaseException:
            if self.started:
                self.reset()
            else:
                self.close()
            raise
        self.started, self._was_reset = True, False

    def reset(self) -> None:
        """After a failure in a job of one process: end the generation engines with separate processes, which may be in
        the middle of a message, and drop gradients. Models and optimizer states are kept. `start` restarts the
        generation engines. May be called twice.

        In a job of several ranks another rank may wait for this one in a collective, so it has to `close` instead.
        """
        assert self.plan.cluster.size == 1, "no other rank waits for this one"
        self.engine_processes.close()
        for engine in self.trainers.values():
            engine.drop()
        self.forget_copies()
        self._was_reset = True

    def close(self) -> None:
        """End every engine and remove its files. May be called twice."""
        try:
            self.engine_processes.close()
        finally:
            self.stack.close()

    def discard(self) -> None:
        """Close, and free the memory of engines, models and process groups. All ranks together, when no rank uses the
        groups any more. The placement cannot be used afterwards.

        A model that is still referred to elsewhere, such as in the user's script, is moved to host memory.
        """
        self.close()
        models = [weakref.ref(engine.head.model) for engines in self.engines.values() for engine in engines]
        for table in (self.engines, self.trainers, self.generators, self.reallocations, self.residents, self.dropped):
            table.clear()
        self.fused = None
        release_cached_memory(self.options.device)
        for model in filter(None, (reference() for reference in models)):
            move_to_host(model)
        release_cached_memory(self.options.device)
        destroy_groups((self.groups, self.split_groups, self.reallocation_groups, self.control))

    # --- engines and groups of a call -------------------------------------------------------------------------------

    def has(self, call: str) -> bool:
        """True if this rank is in the call's mesh."""
        return self.rank in self.plan.mesh(call)

    def role_of(self, call: str) -> Role:
        return self.plan.graph.call(call).role

    def group(self, call: str) -> MeshGroup:
        return self.groups[self.plan.mesh(call)]

    def engine(self, call: str) -> ScoringEngine | None:
        """The engine of the first model of the call's role; `None` on a rank without one."""
        engines = self.engines.get(call)
        return engines[0] if engines else None

    def trained(self, role: Role) -> TrainingEngine | None:
        """The engine that trains a role; `None` for a frozen role and on a rank that does not train it."""
        return self.trainers.get(role)

    def _heads(self, call: str) -> list[RoleHead]:
        models, engines = self.roles.models.get(self.role_of(call)), self.engines.get(call, [])
        if models is not None and models.inside is not None and models.copy_of is not None:
            engines = [engine for engine in (self._base_engine(call),) if engine is not None]
        return [engine.head for engine in engines]

    def shares_tokens(self, call: str) -> bool:
        """True if this rank computes common prefixes of a call's samples once. False if it runs no model for the
        call."""
        heads = self._heads(call)
        return bool(heads) and all(head.shares for head in heads)

    def take_shared_tokens(self, call: str) -> int:
        """Number of shared tokens that a call's models did not recompute, since the last call of this method."""
        total = 0
        for head in self._heads(call):
            total, head.shared_tokens = total + head.shared_tokens, 0
        return total

    def _base_engine(self, call: str) -> ScoringEngine | None:
        """The engine that has the model of a call whose role has none."""
        holder = self.plan.base_holder(call)
        assert holder is not None, "a role without a model is only in plans in which another call has it"
        return self.engine(holder)

    def home_engines(self) -> Iterator[tuple[str, int, ScoringEngine]]:
        """(call, number of the role's model, engine) for each of this rank's engines except copies of trained roles, in
        plan order."""
        seen: set[int] = set()
        for call in self.plan.order:
            trains = self.plan.graph.call(call).trains
            if not trains and self.plan.graph.train_call(self.role_of(call)) is not None:
                continue
            for number, engine in enumerate(self.engines.get(call, ())):
                if id(engine) not in seen:
                    seen.add(id(engine))
                    yield call, number, engine

    @contextlib.contextmanager
    def scoring(self, call: str) -> Iterator[list[ScoringEngine]]:
        """The engines that run a call of the kind forward. For a role without a model: an engine of another role, in
        the context `RoleModels.inside`."""
        models = self.roles[self.role_of(call)]
        if models.inside is None:
            yield self.engines.get(call, [])
            return
        engine = self._base_engine(call)
        assert engine is not None, "this rank has no part of the model that the role uses"
        with models.inside(engine.head.model):
            yield [engine]

    # --- before and after a call ------------------------------------------------------------------------------------

    def budget(self, call: str) -> int:
        """Maximum tokens of one forward of the call: the plan's number, or `EngineOptions.budget`."""
        tokens = self.plan[call].strategy.micro_batch_tokens
        return tokens or self.options.budget(trains=self.plan.graph.call(call).trains)

    def most_kept(self, call: str) -> int:
        """Maximum tokens whose activations may be kept from a forward for a call that trains: one micro-batch of the
        plan, or `EngineOptions.batch_tokens`."""
        return self.plan[call].strategy.micro_batch_tokens or self.options.batch_tokens(trains=True)

    @contextlib.contextmanager
    def resident(self, call: str) -> Iterator[None]:
        """A context for a call whose parameters are on the device. At its end they stay there, are moved to host memory
        (`offload`) or are freed (`drop`), as the plan says. A vLLM engine sleeps."""
        try:
            yield
            if call in self.generators and self._sleeps_after(call):
                self.generators[call].sleep()
        finally:
            for hook in self.residents.get(call, ()):
                hook.release()
            if call in self.dropped:
                self.dropped[call].release()

    def _sleeps_after(self, call: str) -> bool:
        """True if a generation engine sleeps after the call, because another call uses its devices next."""
        if not sleeps(self.plan[call]):
            return False
        later = self.plan.order[self.plan.order.index(call) + 1 :]
        following = next((other for other in later if self.plan.mesh(other).overlaps(self.plan.mesh(call))), None)
        return following is None or self.generators.get(following) is not self.generators[call]

    def _make_room(self, call: str) -> None:
        """Release cached memory of this rank's device before a call's engine wakes up or takes new weights. Collective
        over the mesh, because a tensor group's engine uses the devices of several ranks."""
        if is_accelerator(self.options.device):
            release_cached_memory(self.options.device)
            if self.plan[call].strategy.tp > 1:
                self.group(call).max(0)

    def _is_short(self, call: str) -> bool:
        """True if some device of a call's mesh may have too little free memory for its vLLM engine to take new weights.
        Collective over the mesh."""
        device = self.options.device
        if self.plan[call].engine != "vllm" or not is_accelerator(device):
            return False
        return bool(self.group(call).max(int(free_bytes(device) < LOAD_BYTES)))

    def prefetch(self, call: str, beside: Collection[str]) -> None:
        """Begin to move the parameters of the next call to the device, if the plan keeps them in host memory.

        Args:
            beside: the calls that run meanwhile. An engine that wakes up for one of them may take all free memory at
                once.
        """
        is_copy = call in self.reallocations  # a copy is updated first, in host memory
        if not is_copy and not any(sleeps(self.plan[other]) for other in beside):
            for hook in self.residents.get(call, ()):
                hook.prefetch()

    def takes_part(self, call: str) -> bool:
        """True if this rank is in the call's mesh, or sends parameters to it."""
        return self.has(call) or (
            call in self.reallocation_groups and self.rank in self.reallocation_groups[call].ranks
        )

    def has_collectives(self, call: str) -> bool:
        """True if the call contains collectives of its mesh: of gradients, of activations or of sharded parameters."""
        assignment = self.plan[call]
        # generation in place uses the engine of the role's training, which may be sharded
        if self.plan.graph.call(call).kind is CallKind.GENERATE:
            return assignment.engine == "transformers" and self._is_sharded(call)
        split = assignment.engine == "megatron" or assignment.strategy.zero_stage == 3
        return assignment.mesh.size > 1 and (split or self.plan.graph.call(call).trains)

    def _is_sharded(self, call: str) -> bool:
        """True if the call's role is trained under ZeRO-3 on several ranks."""
        home = self.plan.graph.train_call(self.role_of(call))
        return home is not None and self.plan.mesh(home).size > 1 and self.plan[home].strategy.zero_stage == 3

    # --- updating parameters ----------------------------------------------------------------------------------------

    def refresh(self, call: str) -> Moved | None:
        """Update the trained parameters that the call uses. Called by every rank that `takes_part`. Returns the
        reallocation, or `None` without one.

        Raises:
            TransferError, EngineError: the call's copy is incomplete and must not be used.
        """
        if self.has(call) and (sleeps(self.plan[call]) or self._is_short(call)):
            self._make_room(call)
        if call in self.dropped:
            self.dropped[call].restore()
        if call in self.reallocations:
            return self.reallocations[call].refresh()
        if self.plan.graph.call(call).kind is CallKind.GENERATE:
            self._feed(call)
        return None

    def _feed(self, call: str) -> None:
        """Load the parameters of this rank's training engine into its generation engine."""
        source, generator = self.trained(self.role_of(call)), self.generators.get(call)
        if source is None:
            return
        if self.plan[call].engine == "transformers":
            if generator is not None:
                generator.load((), source.version)
        elif self._gathers(call):
            self._gather_along(call, source, generator)
        elif generator is not None and generator.version != source.version:
            load_merged(generator, source)

    def _gathers(self, call: str) -> bool:
        """True if loading the generation engines gathers sharded parameters, a collective of the training's mesh."""
        home = self.plan.graph.train_call(self.role_of(call))
        return home is not None and self.plan[home].strategy.zero_stage == 3 and self.plan[call].engine == "vllm"

    def _gather_along(self, call: str, source: TrainingEngine, generator: GenerationEngine | None) -> None:
        """Gather the training's sharded parameters and load them, if any rank's generation engine is stale.
        Collective."""
        home = self.plan.graph.train_call(self.role_of(call))
        assert home is not None, "the parameters are sharded by a training"
        is_stale = generator is not None and generator.version != source.version
        if not self.group(home).max(int(is_stale)):
            return
        frozen = source.source_digests()
        stale_generator = generator if is_stale else None
        stream = source.export(without=self._kept_everywhere(home, frozen, stale_generator))
        try:
            if stale_generator is not None:
                stale_generator.load(stream, source.version, frozen)
        finally:
            for _ in stream:  # every rank must take part in the gathering, also one whose engine failed
                pass

    def _kept_everywhere(self, home: str, frozen: SourceDigests, generator: GenerationEngine | None) -> Collection[str]:
        """The tensors that every rank's generation engine has, where `generator` is this rank's if it is stale.
        Collective over the training's mesh."""
        if not frozen:
            return ()
        kept = frozenset(frozen) if generator is None else generator.kept(frozen)
        group = self.group(home)
        lacking = torch.tensor([name not in kept for name in frozen], dtype=torch.int64, device=group.device)
        group.sum_([lacking])
        return [name for name, count in zip(frozen, lacking.tolist(), strict=True) if not count]

    def forget_copies(self) -> None:
        """Mark every copy of trained parameters stale. For training engines that were loaded with other parameters,
        perhaps with the same version number."""
        for call in self.copies:
            for engine in self.engines.get(call, ()):
                engine.version = STALE
        for generator in self.generators.values():
            generator.version = STALE

    def check_fresh(self, call: str) -> None:
        """Raise `EngineError` if the call's copy of trained parameters does not have the version that all ranks agreed
        on."""
        if call in self.reallocations:
            self.reallocations[call].check()
