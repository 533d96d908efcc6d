"""`RunState`: the state of all models of a run, kept in host memory while the run changes its plan.

Every rank keeps parts of the parameters and of the training state in the layout of the old plan; of equal parts only
one rank keeps a copy. They are reallocated to the new plan's layout bucket by bucket. `profiling.replanning` decides
when a run changes its plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...engines.base import ScoringEngine, TrainingEngine
from ...engines.dropout import without_dropout
from ...engines.model_configs import untied
from ...engines.models import blank, persistent_buffers, shell
from ...engines.training_state import MASTER, TensorSpec, TrainingState
from ...plan.execution_plan import ExecutionPlan
from ...realloc.layout import Box, held_once
from ...realloc.transfer import Parts, find
from ..parameters.parameter_sinks import STALE, EngineSink, PartsSink, Sink
from ..parameters.reallocation import Reallocation
from ..process_groups import ReallocationGroups, all_gather_object
from .placement import Placement
from .roles import Roles


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


MOVE_BUCKET_BYTES = 64 << 20  # small, because two buckets are in memory beside the parts of both plans
EXTRA_ATTRIBUTES = ("generation_config", "model_tags", "packs_rows", "shares_rows", "warnings_issued")


@dataclass
class HostParts:
    """One rank's tensors of one model, in host memory. A `reallocation.Holder`."""

    version: int
    tensors: Parts

    def parts(self) -> Parts:
        return self.tensors


@dataclass(frozen=True)
class ModelDescription:
    """Description from which every rank can rebuild a model's structure.

    Args:
        is_policy: the model is a policy; otherwise it has a score head.
        buffers: the persistent buffers, by name.
        extra_attributes: values of the model's attributes that are not in its config (`EXTRA_ATTRIBUTES`).
    """

    config: PretrainedConfig
    is_policy: bool
    dtypes: Mapping[str, torch.dtype]
    buffers: Mapping[str, torch.Tensor]
    extra_attributes: Mapping[str, Any]


@dataclass
class TrainingDescription:
    """The training state of a role without its tensors.

    Args:
        specs: shapes and dtypes by parameter and key.
    """

    version: int
    scaler: Mapping[str, Any]
    specs: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_numbers: dict[int, dict[str, Any]] = field(default_factory=dict)

    def of_names(self, names: Iterable[str], state: TrainingState) -> TrainingDescription:
        """This description with the named tensors of a rank's state added."""
        for name in names:
            parameter, key = _parameter_and_key(name)
            self.specs.setdefault(parameter, {})[key] = _spec_on_host(state, parameter, key)
            self.scalars[parameter] = state.scalars.get(parameter, {})
        return self


class RunState:
    """This rank's part of the parameters and training state of a placement. The constructor is collective. The
    placement may be closed afterwards."""

    def __init__(self, placement: Placement) -> None:
        self.rank, self.cluster = placement.rank, placement.plan.cluster
        descriptions: dict[str, ModelDescription] = {}
        versions: dict[str, int] = {}
        states: dict[str, TrainingState] = {}
        live: dict[str, Parts] = {}
        for call, number, engine in placement.home_engines():
            key, versions[key] = _key(call, number), engine.version
            if placement.plan.graph.call(call).trains and isinstance(engine, TrainingEngine):
                states[key] = engine.training_state()
                live[key] = _state_parts(states[key])
            else:
                live[key] = engine.parts()
            if placement.group(call).is_leader:
                is_policy = placement.roles[placement.role_of(call)].kind == "policy"
                descriptions[key] = _describe(engine, is_policy)
        boxes = {key: {n: [box for box, _ in cells] for n, cells in parts.items()} for key, parts in live.items()}
        rank_boxes = all_gather_object(boxes, placement.control)
        shares = placement.options.device.type == "cpu"
        self._parts: dict[str, HostParts] = {}
        training: dict[str, TrainingDescription] = {}
        for key, parts in live.items():
            kept_boxes = held_once({rank: held[key] for rank, held in enumerate(rank_boxes) if key in held})
            state = states.get(key)
            self._parts[key] = HostParts(versions[key], _on_host(parts, kept_boxes[self.rank], state, shares=shares))
            if state is not None:
                described = TrainingDescription(state.version, state.scaler, group_numbers=state.group_numbers)
                training[key] = described.of_names(kept_boxes[self.rank], state)
        self.descriptions: dict[str, ModelDescription] = {}
        self.training: dict[str, TrainingDescription] = {}
        for rank_descriptions, rank_training in all_gather_object((descriptions, training), placement.control):
            self.descriptions |= rank_descriptions
            for key, description in rank_training.items():
                merged = self.training.setdefault(key, description)
                for parameter, specs in description.specs.items():
                    merged.specs.setdefault(parameter, {}).update(specs)
                merged.scalars |= description.scalars
                merged.group_numbers |= description.group_numbers

    def model(self, key: str) -> PreTrainedModel:
        """A model with uninitialized parameters, which `load_into` fills."""
        description = self.descriptions[key]
        model = blank(description.config, description.is_policy, description.dtypes)
        model.load_state_dict(dict(description.buffers), strict=False)
        for name, value in description.extra_attributes.items():
            setattr(model, name, value)
        return without_dropout(model)

    def roles(self, roles: Roles, plan: ExecutionPlan) -> Roles:
        """The run's roles for a placement of another plan. Their models are filled by `load_into`."""
        models = {}
        for role in plan.graph.roles:
            home = plan.graph.train_call(role) or next(c for c in plan.order if plan.graph.call(c).role is role)
            load = [partial(self.model, _key(home, number)) for number in range(len(roles[role].load))]
            models[role] = replace(roles[role], load=load)
        return Roles(models, filled_later=True)

    def load_into(self, placement: Placement) -> None:
        """Load the state into the engines of a new placement, which has been started. All ranks together.

        Raises:
            TransferError, EngineError: the state was not loaded completely; the run cannot go on.
        """
        engines = {_key(call, number): engine for call, number, engine in placement.home_engines()}
        for key in sorted(self.descriptions):
            engine, training = engines.get(key), self.training.get(key)
            if engine is None:
                self._send(key, placement, None)
            elif training is None:
                self._send(key, placement, EngineSink(engine))
            else:
                assert isinstance(engine, TrainingEngine), "the role is trained"
                with engine.loading(training.specs) as state:
                    self._send(key, placement, StateSink(state))
                    state.version, state.scaler = training.version, dict(training.scaler)
                    state.scalars = {name: training.scalars[name] for name in state.scalars}
                    state.group_numbers = {n: training.group_numbers.get(n, {}) for n in state.group_numbers}

    def _send(self, key: str, placement: Placement, sink: Sink | None) -> None:
        """Reallocate one model's tensors from host memory. All ranks together."""
        ranks, control = tuple(range(self.cluster.size)), placement.control
        reallocation = Reallocation(
            ReallocationGroups(f"{key}, old plan", "new plan", ranks, control, control),
            self.cluster,
            self.rank,
            holder=self._parts.pop(key, None),
            sink=sink,
            options=replace(placement.options.transfer, bucket_bytes=MOVE_BUCKET_BYTES),
        )
        reallocation.refresh()


class StateSink(PartsSink):
    """Receives a role's training state into the parts that its engine is loading. A `parameter_sinks.Sink`."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__(_state_parts(state))
        self.version = STALE

    def receive(self, stream: Iterator[Parts], version: int) -> None:
        for _ in stream:
            pass
        self.version = version


def _key(call: str, number: int) -> str:
    """The key of a model: the call in whose layout its parameters are, and the model's number in its role."""
    return f"{call} {number}"


def _parameter_and_key(name: str) -> tuple[str, str]:
    key, _, parameter = name.partition(" ")
    return parameter, key


def _state_parts(state: TrainingState) -> Parts:
    """The cells of a training state's tensors, by "key parameter"."""
    tensors = [(f"{key} {name}", t.cells) for name, by_key in state.tensors.items() for key, t in by_key.items()]
    return {name: cells for name, cells in tensors if cells}


def _spec_on_host(state: TrainingState, parameter: str, key: str) -> TensorSpec:
    """Shape and dtype of a tensor of the training state in host memory. Floating-point tensors of the parameter's shape
    get the dtype of its float32 weight, as engines load them, because tensors are moved without a cast."""
    master, spec = state.tensors[parameter][MASTER].spec, state.tensors[parameter][key].spec
    is_cast = spec.dtype.is_floating_point and spec.shape == master.shape
    return TensorSpec(spec.shape, master.dtype) if is_cast else spec


def _on_host(parts: Parts, boxes: Mapping[str, Sequence[Box]], state: TrainingState | None, *, shares: bool) -> Parts:
    """These boxes of the parts in host memory.

    Args:
        state: the training state of the parts; `None` if they are parameters.
        shares: whether whole parts need no copy: the engine computes in host memory, and is closed before it computes
            again.
    """
    copies: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, name_boxes in boxes.items():
        dtype = _spec_on_host(state, *_parameter_and_key(name)).dtype if state is not None else None
        for box in name_boxes:
            part = find(parts, name, box)
            assert part is not None, "a rank keeps boxes of its own parts"
            # a piece would keep the memory of the whole part
            is_all = any(part_box == box for part_box, _ in parts[name])
            copies.setdefault(name, []).append(
                (box, part.detach().to("cpu", dtype or part.dtype, copy=not (shares and is_all)))
            )
    return copies


def fixed_models(placement: Placement) -> Iterator[str]:
    """The calls of this rank's models that a new placement cannot rebuild from their config: models with adapters, and
    models of a user's class."""
    for call, _, engine in placement.home_engines():
        if _config_of(engine, placement.roles[placement.role_of(call)].kind == "policy") is None:
            yield call


def _config_of(engine: ScoringEngine, is_policy: bool) -> PretrainedConfig:
    """The config whose model has this engine's parameters: the model's, or the same with an untied head; else
    `None`."""
    config, names = engine.head.model.config, set(engine.parameter_specs)
    for candidate in (config, untied(config)):
        if {name for name, _ in shell(candidate, is_policy).named_parameters()} == names:
            return candidate
    return None


def _describe(engine: ScoringEngine, is_policy: bool) -> ModelDescription:
    model, config = engine.head.model, _config_of(engine, is_policy)
    assert config is not None, "the plan of a run with other models stays (`fixed_models`)"
    dtypes = {name: spec.dtype for name, spec in engine.parameter_specs.items()}
    extra = {name: getattr(model, name) for name in EXTRA_ATTRIBUTES if hasattr(model, name)}
    return ModelDescription(config, is_policy, dtypes, persistent_buffers(model), extra)
