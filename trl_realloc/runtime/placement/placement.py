"""`Placement`: this rank's process groups and engines under one plan. It updates the parameters that a call uses, moves
them to the device and frees them.

It reads a call's kind and role from the graph, never its name. How engines are built is in `engine_builder`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import timedelta

from ...engines.base import GenerationEngine, ScoringEngine, TrainingEngine
from ...engines.child_process import die_with_launcher
from ...engines.device import free_bytes, is_accelerator, release_cached_memory
from ...engines.mesh_group import MeshGroup
from ...engines.training.fused_training import FusedTraining
from ...engines.training.packed_forward import RoleHead
from ...engines.training.zero_setup import ensure_process_group
from ...plan.assignment import sleeps
from ...plan.dataflow import CallKind, Role
from ...plan.execution_plan import ExecutionPlan
from ..parameters.parameter_sinks import STALE
from ..parameters.reallocation import Moved, Reallocation
from ..parameters.residency import DroppedCopy, Residency, move_to_host
from ..process_groups import destroy_groups, make_groups, make_reallocation_groups, make_split_groups
from .engine_builder import EngineBuilder
from .engine_options import EngineOptions
from .roles import Roles


# free bytes of a device with which nothing is given back before new weights are sent to an engine: the buckets and the
# messages of a transfer, and in the engine the largest layer
LOAD_BYTES = 4 << 30


class Placement:
    """This rank's engines for one plan. The constructor makes the process groups, on all ranks together. `start` loads
    models and starts engines. `close` ends everything that was started, `reset` what cannot be used after a failure.

    Attributes:
        engines: by call, this rank's engines that run it, one for each of the role's models. Calls that use the
            parameters in place share the engines of their role's training.
        trainers: by role, the engine on this rank that trains it.
        copies: the calls whose `engines` are copies of a trained role in another layout.
        generators: by call of the kind generate, this rank's generation engine.
        fused: trains the roles whose training the plan fuses; `None` if it fuses none, and on ranks outside their mesh.
        engine_processes: ends the generation engines that are processes of their own, and removes their files.
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
        self.residents: dict[str, list[Residency]] = defaultdict(list)
        self.dropped: dict[str, DroppedCopy] = {}
        self.started = False
        self._was_reset = False
        self.stack, self.engine_processes = contextlib.ExitStack(), contextlib.ExitStack()

    def start(self) -> None:
        """Load this rank's models and start its engines; the second time, start the engines that `reset` has ended, if
        there are any. All ranks together."""
        if self.started and not self._was_reset:
            return
        die_with_launcher()
        builder = EngineBuilder(self)
        try:
            if self.started:
                builder.start_vllm()  # on one device nothing is reallocated to an engine, so no sink has the old one
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
        """After a failure in a job of one process: end the generation engines that are processes of their own, which
        may be in the middle of a message, and forget gradients. The models and their optimizer states stay as they are.
        `start` starts the generation engines again. May be called twice.

        On several ranks others may be in a collective with this one, which then has to `close`.
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
        """Close, and let go of engines, models and process groups, so that their memory can be used by others. All
        ranks together, when no rank uses the groups any more. The placement cannot be used afterwards.

        A model that someone else still refers to, such as a user's script that has loaded it, is moved to host memory.
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
        """The engine of the first model of the call's role; `None` on a rank that has none."""
        engines = self.engines.get(call)
        return engines[0] if engines else None

    def trained(self, role: Role) -> TrainingEngine | None:
        """The engine that trains a role; `None` for a frozen role and on a rank that does not train it."""
        return self.trainers.get(role)

    def _heads(self, call: str) -> list[RoleHead]:
        """The heads of the models that this rank runs for a call."""
        models, engines = self.roles.models.get(self.role_of(call)), self.engines.get(call, [])
        if models is not None and models.inside is not None and models.copy_of is not None:
            engines = [engine for engine in (self.trained(models.copy_of),) if engine is not None]
        return [engine.head for engine in engines]

    def shares_tokens(self, call: str) -> bool:
        """True if this rank computes the tokens that samples of a call have in common at their beginnings once. False
        where it runs no model for the call."""
        heads = self._heads(call)
        return bool(heads) and all(head.shares for head in heads)

    def take_shared_tokens(self, call: str) -> int:
        """How many tokens the models of a call have not computed again since this was last asked."""
        total = 0
        for head in self._heads(call):
            total, head.shared_tokens = total + head.shared_tokens, 0
        return total

    def home_engines(self) -> Iterator[tuple[str, int, ScoringEngine]]:
        """(call, number of the role's model, engine) of this rank's engines except copies of trained roles, in plan
        order, each engine once."""
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
        """The engines that run a call of the kind forward. For a role without a model (`RoleModels.inside`) the engine
        of another role's training, inside a context."""
        models = self.roles[self.role_of(call)]
        if models.inside is None:
            yield self.engines.get(call, [])
            return
        assert models.copy_of is not None, "a role without a model uses another role's"
        engine = self.trained(models.copy_of)
        assert engine is not None, "this rank has no part of the model that the role uses"
        with models.inside(engine.head.model):
            yield [engine]

    # --- before and after a call ------------------------------------------------------------------------------------

    def budget(self, call: str) -> int:
        """Most tokens of one forward of the call: the plan's number, or `EngineOptions.budget`."""
        tokens = self.plan[call].strategy.micro_batch_tokens
        return tokens or self.options.budget(trains=self.plan.graph.call(call).trains)

    def most_kept(self, call: str) -> int:
        """Most tokens whose activations may be kept from a forward to a call that trains: those of one of its
        micro-batches, or of the batch that the user lets one forward hold (`EngineOptions.batch_tokens`)."""
        return self.plan[call].strategy.micro_batch_tokens or self.options.batch_tokens(trains=True)

    @contextlib.contextmanager
    def resident(self, call: str) -> Iterator[None]:
        """A context for a call whose parameters are on the device. After it they stay there, are moved to host memory
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
        """True if the engine of a call that generates sleeps after it, because another call uses its devices next."""
        if not sleeps(self.plan[call]):
            return False
        later = self.plan.order[self.plan.order.index(call) + 1 :]
        following = next((other for other in later if self.plan.mesh(other).overlaps(self.plan.mesh(call))), None)
        return following is None or self.generators.get(following) is not self.generators[call]

    def _make_room(self, call: str) -> None:
        """Give cached memory of this rank's device back before a call's engine wakes up or takes new weights there.
        Collective over the mesh, because a tensor group's engine takes the devices of several ranks."""
        if is_accelerator(self.options.device):
            release_cached_memory(self.options.device)
            if self.plan[call].strategy.tp > 1:
                self.group(call).max(0)

    def _is_short(self, call: str) -> bool:
        """True if some device of a call's mesh may have too little free memory for an engine, a process of its own, to
        take new weights. Collective over the mesh."""
        device = self.options.device
        if self.plan[call].engine != "vllm" or not is_accelerator(device):
            return False
        return bool(self.group(call).max(int(free_bytes(device) < LOAD_BYTES)))

    def prefetch(self, call: str, beside: Collection[str]) -> None:
        """Begin to move the parameters of the next call to the device, if the plan keeps them in host memory.

        Args:
            beside: the calls that run meanwhile. One whose engine wakes up for it takes its memory at once, which may
                be all that seems to be free.
        """
        is_copy = call in self.reallocations  # which is updated first, in host memory
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
        # in the engine of the role's training, which may be sharded
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
        """Update the trained parameters that the call uses. Every rank that `takes_part` calls this. Returns the
        reallocation that was done, or `None`.

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
        """Load the parameters of the training's engine on this rank into the generation engine on this rank."""
        source, generator = self.trained(self.role_of(call)), self.generators.get(call)
        if source is None:
            return
        if self.plan[call].engine == "transformers":
            if generator is not None:
                generator.load((), source.version)
        elif self._gathers(call):
            self._gather_along(call, source, generator)
        elif generator is not None and generator.version != source.version:
            generator.load(source.export(), source.version)

    def _gathers(self, call: str) -> bool:
        """True if loading the generation engines gathers sharded parameters, which is a collective of the training's
        mesh."""
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
        stream = source.export()
        try:
            if is_stale and generator is not None:
                generator.load(stream, source.version)
        finally:
            for _ in stream:  # every rank must take part in the gathering, also one whose engine failed
                pass

    def forget_copies(self) -> None:
        """Have every copy of trained parameters updated before its next use. For training engines that have got other
        parameters, perhaps under a version that a copy has of the ones before."""
        for call in self.copies:
            for engine in self.engines.get(call, ()):
                engine.version = STALE
        for generator in self.generators.values():
            generator.version = STALE

    def check_fresh(self, call: str) -> None:
        """Raise `EngineError` where the call's copy of trained parameters does not have the version that all ranks have
        agreed on."""
        if call in self.reallocations:
            self.reallocations[call].check()
