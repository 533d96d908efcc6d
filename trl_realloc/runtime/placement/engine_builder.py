"""`EngineBuilder`: builds this rank's engines for a plan. It loads models, makes replicas and copies equal, starts
generation engines and makes the reallocations between them.

The plan chooses each call's engine. The engines' use is in `placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...engines.base import EngineError, InPlaceEngine, ScoringEngine, TrainingEngine
from ...engines.device import is_accelerator, release_cached_memory
from ...engines.generation.transformers import TransformersEngine
from ...engines.models import has_adapters, own_copy
from ...engines.training.fused_training import FusedTraining
from ...engines.training.heads import PolicyHead, RoleHead, ScoreHead, ValueHead
from ...engines.training.megatron import MegatronEngine
from ...engines.training.replica_sync import copy_tensors, equalize, follow
from ...engines.training.replicated import ReplicatedEngine
from ...engines.training.tensor_parallel import local
from ...engines.training.weight_export import checkpoint_names, persistent_buffers
from ...engines.training.zero import ZeroEngine
from ...engines.training.zero_setup import cast_parameters, parameter_dtype
from ...engines.transformers_compat import recompute_activations
from ...plan.assignment import in_place
from ...plan.cluster import DeviceMesh
from ...plan.dataflow import CallKind, Role
from ...plan.execution_plan import ExecutionPlan
from ...plan.shared_base import needs_reallocation
from ..launch.launcher import too_few_connections
from ..parameters.cpu_offload import CPUOffload, DroppedCopy, Versioned
from ..parameters.parameter_sinks import STALE, CopiedEngineSink, EngineSink, GeneratorSink, Sink
from ..parameters.reallocation import Reallocation
from ..process_groups import ReallocationGroups, all_gather_object
from .shared_parameters import share_frozen
from .vllm_start import start_vllm


if TYPE_CHECKING:
    from ...engines.generation.vllm import VLLMEngine
    from .placement import Placement


logger = logging.get_logger(__name__)


class EngineBuilder:
    """Builds the engines of a placement. Its process groups exist already."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.plan, self.graph, self.rank = placement.plan, placement.plan.graph, placement.rank
        self.roles, self.options, self.engines = placement.roles, placement.options, placement.engines

    def build(self) -> None:
        """Build all engines and reallocations. All ranks together."""
        self.start_vllm()
        for role in self.graph.trained_roles:
            self._build_trained(role)
        for role in self.graph.roles:
            is_own = self.roles[role].copy_of is None and self.roles[role].inside is None
            if role not in self.graph.trained_roles and is_own:
                self._build_frozen(role)
        self._generate_in_place()
        self._fuse()
        for call, groups in self.placement.reallocation_groups.items():
            if self.rank in groups.ranks and self._is_reallocated(call):
                self.placement.reallocations[call] = self._reallocation(call, groups)
            if self.plan[call].drop and call in self.placement.copies:
                self._drop(call)
        self._share_bases()

    # --- generation -------------------------------------------------------------------------------------------------

    def start_vllm(self) -> None:
        """Start one engine for all calls that generate with the same role under the same assignment.

        On a CPU the engines start while the models load here. On an accelerator models are loaded only after the
        engines of all ranks are ready: vLLM computes its share from the free memory at its start, and counts others'
        allocations during the start as its own.
        """
        is_accelerated = is_accelerator(self.options.device)
        if is_accelerated:
            release_cached_memory(self.options.device)
        started: dict[Any, VLLMEngine | None] = {}
        for call in self.graph.calls_of(CallKind.GENERATE):
            if not self.placement.has(call) or self.plan[call].engine != "vllm":
                continue
            role = self.placement.role_of(call)
            key = role, self.plan[call]
            if key not in started:
                config, stack = self.roles[role].config, self.placement.engine_processes
                started[key] = start_vllm(self.plan, call, self.rank, config, self.options, stack)
            engine = started[key]
            if engine is not None:
                self.placement.generators[call] = engine
        calls = self.graph.calls_of(CallKind.GENERATE)
        if is_accelerated and any(self.plan[call].engine == "vllm" for call in calls):
            engines = [engine for engine in started.values() if engine is not None]
            self._together(lambda engine: engine.wait_ready(), engines)
            self._together(lambda engine: engine.sleep(), engines)  # if the plan says so; makes room for the models

    def _together(self, action: Callable[[VLLMEngine], None], engines: Sequence[VLLMEngine]) -> None:
        """Run an action on this rank's generation engines and wait for all ranks, because a tensor group's engine has
        the devices of several ranks. All ranks together; on every rank, raises the `EngineError` of any engine."""
        failure: EngineError | None = None
        try:
            for engine in engines:
                action(engine)
        except EngineError as error:
            failure = error
        problems = all_gather_object(None if failure is None else str(failure), self.placement.control)
        if failure is not None:
            raise failure
        if any(problems):
            raise EngineError("; ".join(dict.fromkeys(filter(None, problems))))

    def _generate_in_place(self) -> None:
        for call in self.graph.calls_of(CallKind.GENERATE):
            if self.placement.has(call) and self.plan[call].engine == "transformers":
                engine = self.placement.engine(call)
                assert isinstance(engine, InPlaceEngine), "in place means in an engine that has all parameters"
                size = self.options.generation_batch_size or self.options.forward_batch_size
                self.placement.generators[call] = TransformersEngine(
                    engine.whole_model, self.options.device, batch_size=size
                )

    # --- training and scoring ---------------------------------------------------------------------------------------

    def _build_trained(self, role: Role) -> None:
        """Build a trained role's engine, its copies in other layouts, and the roles whose models copy its model. The
        engine is built last, because it may partition the module that the copies are made from."""
        home = self.graph.train_call(role)
        assert home is not None, "a trained role has a call that trains it"
        adapted = self.roles[role].adapted
        copied = [call for call in self.graph.uses_of(role) if any_copies(self.plan, call, adapted)]
        copied_here = [call for call in copied if holds_copy(self.plan, call, self.rank, adapted)]
        trains = self.placement.has(home)
        model = self.roles[role].load[0]() if trains or copied_here else None
        self._equalize(home, model)
        for follower in self.roles.copies_of(role, self.graph):
            self._build_frozen(follower, model)
        for call in copied:
            is_last = not trains and copied_here[-1:] == [call]
            copied_model = (model if is_last else own_copy(model)) if call in copied_here else None
            self._follow(call, home, model, copied_model)
            if copied_model is not None:
                self.engines[call] = [self._copy_engine(call, home, copied_model)]
                self.placement.copies.add(call)
        if trains:
            trainer = self._engine(home, self._head(role, model))
            self.engines[home], self.placement.trainers[role] = [trainer], trainer
        for call in self.graph.uses_of(role):
            if trains and self.placement.has(call) and not self._is_reallocated(call):
                self.engines[call] = self.engines[home]

    def _build_frozen(self, role: Role, trained_model: PreTrainedModel | None = None) -> None:
        """Build a frozen role's engines, one per layout. `trained_model` is the model that the role copies, on the
        ranks that have it."""
        models, built = self.roles[role], list[str]()
        for call in self.graph.uses_of(role):
            same = next((other for other in built if in_place(self.plan[other], self.plan[call])), None)
            built.append(call)
            if same is not None:
                if same in self.engines:
                    self.engines[call] = self.engines[same]
                continue
            loaded = [load() for load in models.load] if self.placement.has(call) else []
            if models.copy_of is not None:
                home = self.graph.train_call(models.copy_of)
                assert home is not None, "only a trained role's model is copied"
                is_adapted = self.roles[models.copy_of].adapted
                self._follow(call, home, trained_model, loaded[0] if loaded else None, adapted=is_adapted)
            else:
                for model in loaded:
                    self._equalize(call, model)
            if loaded:
                self.engines[call] = [self._engine(call, self._head(role, model)) for model in loaded]

    def _is_reallocated(self, call: str) -> bool:
        return is_reallocated(self.plan, call, self.roles[self.placement.role_of(call)].adapted)

    def _trains(self, call: str) -> bool:
        return self.graph.call(call).trains

    def _head(self, role: Role, model: PreTrainedModel) -> RoleHead:
        match self.roles[role].kind:
            case "policy":
                options, trains = self.options, role in self.graph.trained_roles
                return PolicyHead(
                    model,
                    options.temperature,
                    options.sampling_mask,
                    router_sums=options.router_sums and trains,
                    replays_routes=options.router_replay != "none" and trains,
                    records_routes=options.router_replay == "recompute" and trains,
                )
            case "value":
                return ValueHead(model)
            case "score":
                return ScoreHead(model)

    def _copy_engine(self, call: str, home: str, model: PreTrainedModel) -> ScoringEngine:
        """The engine of a copy. If DeepSpeed trains the role in 16 bits, the copy is cast as DeepSpeed casts its model,
        and computes without autocast, as the training does."""
        dtype = parameter_dtype(self.options.deepspeed) if self.plan[home].strategy.zero_stage else None
        if dtype is not None:
            cast_parameters(model, dtype)
        head = self._head(self.placement.role_of(call), model)
        if self.graph.call(call).kind is not CallKind.GENERATE:
            return self._engine(call, head, autocast=dtype is None)
        alone = self.placement.groups[DeviceMesh(self.rank, 1)]
        compute_dtype = self.options.compute_dtype if dtype is None else None
        return ReplicatedEngine(head, alone, self.options.device, compute_dtype=compute_dtype)

    def _engine(self, call: str, head: RoleHead, *, autocast: bool = True) -> TrainingEngine:
        assignment, options, trains = self.plan[call], self.options, self._trains(call)
        if trains and options.gradient_checkpointing:
            recompute_activations(head.model, options.gradient_checkpointing_kwargs)
            if hasattr(head.model, "enable_input_require_grads") and hasattr(head.model, "peft_config"):
                head.model.enable_input_require_grads()
        shared: dict[str, Any] = {
            "compute_dtype": options.compute_dtype if autocast else None,
            "make_optimizer": options.make_optimizer if trains else None,
            "max_grad_norm": options.max_grad_norm,
        }
        group, strategy = self.placement.group(call), assignment.strategy
        engine: TrainingEngine
        if assignment.engine == "megatron":
            groups = self.placement.split_groups[assignment.mesh, strategy.tp, strategy.pp]
            # NCCL connects a group in its first operation, which needs all of its ranks; the first operations of
            # torch's pipeline schedules are between neighbours
            groups.pp.barrier()
            groups = groups.reversed() if self.plan.is_reversed(call) else groups
            sharded = strategy.zero_stage == 1
            engine = MegatronEngine(head, groups, options.device, shard_optimizer=sharded, **shared)
        elif strategy.zero_stage == 0:
            engine = ReplicatedEngine(head, group, options.device, **shared)
        else:
            alone = self.placement.groups[DeviceMesh(self.rank, 1)].group
            engine = ZeroEngine(
                head,
                group,
                options.device,
                stage=strategy.zero_stage,
                alone=alone,
                config=options.deepspeed,
                **shared,
            )
        self.placement.stack.callback(engine.close)
        if assignment.offload and not trains:
            self.placement.residents[call].append(CPUOffload.attach(engine.head, options.device))
        return engine

    def _fuse(self) -> None:
        if self.plan.fused and self.rank in self.plan.mesh(self.plan.fused[0]):
            from ..fused.orders import FusedOrders  # it imports Numba, which takes half a second

            first, second = (self.placement.trainers[self.graph.call(name).role] for name in self.plan.fused)
            assert isinstance(first, MegatronEngine), "the plan has been checked"
            assert isinstance(second, MegatronEngine), "the plan has been checked"
            if self.options.device.type == "cuda" and (problem := too_few_connections()) is not None:
                logger.warning(problem)
            orders = FusedOrders()
            orders.compile()
            self.placement.fused = FusedTraining((first, second), orders)

    # --- replicas and copies ----------------------------------------------------------------------------------------

    def _equalize(self, call: str, model: PreTrainedModel) -> None:
        """Broadcast a role's model from the first rank of the call's mesh."""
        if not self.placement.has(call):
            return
        self.placement.group(call).host_barrier()  # one rank may have loaded the model faster than another
        if not self.roles.filled_later:
            equalize(model, self.placement.group(call), str(self.placement.role_of(call)))

    def _follow(
        self, call: str, home: str, trained: PreTrainedModel, copied: PreTrainedModel, *, adapted: bool = False
    ) -> None:
        """Copy the model of the first rank of the training's mesh into a copy of a trained role."""
        if self.roles.filled_later:
            return
        control = self.placement.control
        source, target = self.plan.mesh(home).first, self.plan.mesh(call).first
        if self.rank == source == target:
            copy_tensors(trained, copied, adapted=adapted)
        elif self.rank in (source, target):
            model, role = trained if self.rank == source else copied, str(self.placement.role_of(call))
            follow(model, source, target, self.rank, control, role, adapted=adapted)
        self._equalize(call, copied)

    # --- reallocations ----------------------------------------------------------------------------------------------

    def _reallocation(self, call: str, groups: ReallocationGroups) -> Reallocation:
        role, generator = self.placement.role_of(call), self.placement.generators.get(call)
        sink: Sink | None = None
        trained = self.placement.trained(role)
        buffers: dict[str, Tensor] = {}
        if self.plan[call].engine == "vllm":  # pipeline stages have different buffers
            local_buffers = {} if trained is None else persistent_buffers(trained.head.model)
            gathered = all_gather_object({name: buffer.cpu() for name, buffer in local_buffers.items()}, groups.control)
            buffers = {name: buffer for rank_buffers in gathered for name, buffer in rank_buffers.items()}
        if call in self.placement.copies:
            (copied,) = self.engines[call]
            sink = EngineSink(copied) if generator is None else CopiedEngineSink(copied, generator)
        elif generator is not None:
            make_shell = self.roles[role].shell
            assert make_shell is not None, "a role that generates in an engine has a shell"
            device = self.options.device if groups.tensors is None else groups.device
            buffers = {name: buffer.to(device) for name, buffer in buffers.items()}
            sink = GeneratorSink(generator, partial(checkpoint_names, make_shell()), device, buffers)
        return Reallocation(
            groups,
            self.plan.cluster,
            self.rank,
            holder=trained,
            sink=sink,
            options=self.options.transfer,
        )

    def _share_bases(self) -> None:
        """Let the models of this rank share frozen parameters, if one of them has adapters. Models whose parameters the
        plan keeps in host memory or the run fills later have their own."""
        engines: dict[int, tuple[nn.Module, Collection[str]]] = {}
        for call, of_call in self.engines.items():
            moved = self.placement.reallocations[call].names if call in self.placement.copies else ()
            if call not in self.placement.residents:
                engines |= {id(engine): (engine.head.model, moved) for engine in of_call}
        if not self.roles.filled_later and any(has_adapters(model) for model, _ in engines.values()):
            share_frozen(engines.values())

    def _drop(self, call: str) -> None:
        (copied,) = self.engines[call]
        user = self.placement.generators.get(call, copied)
        self.placement.dropped[call] = _dropped(user, copied, self.placement.reallocations[call].names)


def _dropped(user: Versioned, copied: ScoringEngine, names: Sequence[str]) -> DroppedCopy:
    """The memory of a copy's tensors.

    Args:
        user: the engine that is marked stale when the memory is freed.
        names: names of the parameters that the reallocation fills.
    """
    parts = copied.parts()
    filled = [tensor for name in names for _, tensor in parts.get(name, ())]
    filled_addresses = {tensor.data_ptr() for tensor in filled}
    tensors = [local(tensor.data) for tensor in (*copied.head.model.parameters(), *copied.head.model.buffers())]
    return DroppedCopy(user, filled, [tensor for tensor in tensors if tensor.data_ptr() not in filled_addresses], STALE)


def is_reallocated(plan: ExecutionPlan, call: str, adapted: bool) -> bool:
    """`shared_base.needs_reallocation` for a call of a plan; False for a role that is not trained."""
    home = plan.graph.train_call(plan.graph.call(call).role)
    return home is not None and needs_reallocation(plan[home], plan[call], adapted=adapted)


def holds_copy(plan: ExecutionPlan, call: str, rank: int, adapted: bool) -> bool:
    """True if this rank needs a copy of a trained role's model for the call: for scoring, for generation, or to merge
    adapters for its generation engine.

    Args:
        adapted: the role trains only adapters.
    """
    assignment = plan[call]
    if rank not in assignment.mesh or not is_reallocated(plan, call, adapted):
        return False
    if plan.graph.call(call).kind is not CallKind.GENERATE:
        return True
    owns_engine = assignment.mesh.index(rank) % assignment.strategy.tp == 0
    return assignment.engine == "transformers" or (adapted and owns_engine)


def any_copies(plan: ExecutionPlan, call: str, adapted: bool) -> bool:
    """True if any rank needs a copy for the call."""
    return any(holds_copy(plan, call, rank, adapted) for rank in plan.mesh(call).devices)


def has_part(plan: ExecutionPlan, role: Role, rank: int, roles_adapted: bool) -> bool:
    """True if this rank loads a trained role's model, for its training or for a copy."""
    home = plan.graph.train_call(role)
    if home is not None and rank in plan.mesh(home):
        return True
    return any(holds_copy(plan, call, rank, roles_adapted) for call in plan.graph.uses_of(role))
