"""Where a plan's calls run on this rank: process groups per mesh, the engines that run each call, and the parameters
that they need, brought up to date, made resident and freed.

Knows calls by their kind and the graph, never by name. How engines are built is in `engine_builder`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

from ..engines.base import GenerationEngine, ScoringEngine, TrainingEngine
from ..engines.child_process import die_with_launcher
from ..engines.mesh_group import MeshGroup
from ..engines.training.zero_setup import ensure_process_group
from ..plan.dataflow import CallKind, Role
from ..plan.execution_plan import ExecutionPlan
from .engine_builder import EngineBuilder
from .engine_options import EngineOptions
from .process_groups import make_groups, make_reallocation_groups, make_split_groups
from .reallocation import Moved, Reallocation
from .residency import Dropped, Residency
from .roles import Roles


class Placement:
    """This rank's engines for one plan. `close` ends everything it started.

    Making it makes the process groups, on all ranks together; `start` loads models and starts engines.

    Attributes:
        engines: by call, the engines on this rank that run it, one for each of the role's models. Calls that find the
            parameters in place share the engines of their role's training.
        trainers: by role, the engine on this rank that trains it.
        copies: the calls of which `engines` are copies of a trained role, in a layout of their own.
        generators: by call of the kind generate, the engine on this rank.
    """

    def __init__(self, plan: ExecutionPlan, rank: int, roles: Roles, options: EngineOptions) -> None:
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
        self.reallocations: dict[str, Reallocation] = {}
        self.residents: dict[str, list[Residency]] = defaultdict(list)
        self.dropped: dict[str, Dropped] = {}
        self.started = False
        self.stack = contextlib.ExitStack()

    def start(self) -> None:
        """Load this rank's models and start its engines, once: the first expensive thing of a run."""
        if self.started:
            return
        die_with_launcher()
        try:
            EngineBuilder(self).build()
        except BaseException:
            self.close()
            raise
        self.started = True

    def close(self) -> None:
        """End every engine and remove every file; may be called twice."""
        self.stack.close()

    # --- where things are -------------------------------------------------------------------------------------------

    def has(self, call: str) -> bool:
        """Whether this rank is in the call's mesh."""
        return self.rank in self.plan.mesh(call)

    def role_of(self, call: str) -> Role:
        return self.plan.graph.call(call).role

    def group(self, call: str) -> MeshGroup:
        return self.groups[self.plan.mesh(call)]

    def engine(self, call: str) -> ScoringEngine | None:
        """The engine of the call's only model, `None` on a rank without a part of it."""
        engines = self.engines.get(call)
        return engines[0] if engines else None

    def trained(self, role: Role) -> TrainingEngine | None:
        """The engine that trains a role, `None` on a rank without a part of it and for a frozen role."""
        return self.trainers.get(role)

    def home_engines(self) -> Iterator[tuple[str, int, ScoringEngine]]:
        """This rank's engines but for copies of trained roles: call, number of the role's model, engine; in plan order,
        each once."""
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
        """The engines that answer a call of the kind forward: its own, or those of the role that it is inside of."""
        models = self.roles[self.role_of(call)]
        if models.inside is None:
            yield self.engines.get(call, [])
            return
        assert models.copy_of is not None, "a role without a model is another role in some context"
        engine = self.trained(models.copy_of)
        assert engine is not None, "this rank has no part of the model that the role is inside of"
        with models.inside(engine.head.model):
            yield [engine]

    # --- what a call asks -------------------------------------------------------------------------------------------

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
            for hook in self.residents.get(call, ()):
                hook.release()
            if call in self.dropped:
                self.dropped[call].release()

    def prefetch(self, call: str) -> None:
        """Begin to move parameters that the plan keeps in host memory to the device, for a call that comes next."""
        if call not in self.reallocations:  # a copy is refreshed first, where it rests
            for hook in self.residents.get(call, ()):
                hook.prefetch()

    def takes_part(self, call: str) -> bool:
        """This rank is in the call's mesh, or holds parameters that the call is to get."""
        return self.has(call) or (
            call in self.reallocation_groups and self.rank in self.reallocation_groups[call].ranks
        )

    def waits_inside(self, call: str) -> bool:
        """The ranks of the call's mesh wait for each other inside it: for gradients, for activations, for parts of
        sharded parameters."""
        assignment = self.plan[call]
        if self.plan.graph.call(call).kind is CallKind.GENERATE:  # inside the role's own engine, which may be sharded
            return assignment.engine == "transformers" and self._is_sharded(call)
        split = assignment.engine == "megatron" or assignment.strategy.zero_stage == 3
        return assignment.mesh.size > 1 and (split or self.plan.graph.call(call).trains)

    def _is_sharded(self, call: str) -> bool:
        """Whether the call's role is trained under ZeRO-3 on several ranks."""
        home = self.plan.graph.train_call(self.role_of(call))
        return home is not None and self.plan.mesh(home).size > 1 and self.plan[home].strategy.zero_stage == 3

    # --- parameters brought up to date ------------------------------------------------------------------------------

    def refresh(self, call: str) -> Moved | None:
        """Bring the trained parameters that the call uses up to date where it uses them. Every rank that `takes_part`
        calls this. Returns what went over the wire, if anything did.

        Raises:
            TransferError, EngineError: the call's copy is not whole; nothing may be generated or scored with it.
        """
        if call in self.dropped:
            self.dropped[call].restore()
        if call in self.reallocations:
            return self.reallocations[call].refresh()
        if self.plan.graph.call(call).kind is CallKind.GENERATE:
            self._feed(call)
        return None

    def _feed(self, call: str) -> None:
        """Give a generation engine of this rank what the training's engine here can give by itself, or by gathering."""
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
        """Feeding the generation engines in place is a collective of the training's mesh (sharded parameters)."""
        home = self.plan.graph.train_call(self.role_of(call))
        return home is not None and self.plan[home].strategy.zero_stage == 3 and self.plan[call].engine == "vllm"

    def _gather_along(self, call: str, source: TrainingEngine, generator: GenerationEngine | None) -> None:
        home = self.plan.graph.train_call(self.role_of(call))
        assert home is not None, "the parameters are sharded by a training"
        stale = generator is not None and generator.version != source.version
        if not self.group(home).max(int(stale)):
            return
        stream = source.export()
        try:
            if stale and generator is not None:
                generator.load(stream, source.version)
        finally:
            for _ in stream:  # the others are gathering too: a rank whose engine failed must not leave them
                pass

    def check_fresh(self, call: str) -> None:
        """Raises `EngineError` where the call's copy of trained parameters is not the version agreed on."""
        if call in self.reallocations:
            self.reallocations[call].check()
