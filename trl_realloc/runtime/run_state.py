"""`RunState`: the state of all models of a run, kept in host memory while the run changes its plan.

A frozen role's parameters are kept in the parts of their old layout and reallocated to the new one. A trained role's
parameters and optimizer state are kept whole on the first rank of its old mesh, as in a checkpoint. Every rank of its
new mesh receives them bucket by bucket and keeps its part. When a run changes its plan is in `profiling.replanning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..engines.base import TrainingEngine
from ..engines.models import blank, persistent_buffers, without_dropout
from ..plan.execution_plan import ExecutionPlan
from ..realloc.layout import whole
from ..realloc.transfer import Parts
from .placement import Placement
from .process_groups import ReallocationGroups
from .reallocation import STALE, EngineSink, FullTensorSink, Reallocation, Sink
from .roles import Roles


EXTRA_ATTRIBUTES = ("generation_config", "model_tags", "packs_rows")


@dataclass
class HostParts:
    """One rank's tensors of one model, in host memory. A `reallocation.Holder`."""

    version: int
    tensors: Parts

    def parts(self) -> Parts:
        return self.tensors


@dataclass(frozen=True)
class ModelDescription:
    """What every rank needs to make a model's structure again.

    Args:
        config: the model's Transformers config.
        is_policy: it is a policy; otherwise a model with a score head.
        dtypes: of its parameters, by name.
        buffers: its persistent buffers, by name.
        extra_attributes: values of the model's attributes that are not in its config (`EXTRA_ATTRIBUTES`).
        training_state: of a trained role's engine, the items of `state_dict` other than the parameters' tensors.
    """

    config: Any
    is_policy: bool
    dtypes: Mapping[str, torch.dtype]
    buffers: Mapping[str, torch.Tensor]
    extra_attributes: Mapping[str, Any]
    training_state: Mapping[str, Any] | None = None


class RunState:
    """This rank's part of the parameters and training state of a placement. Making it is collective. The placement may
    be closed afterwards."""

    def __init__(self, placement: Placement) -> None:
        self.rank, self.cluster = placement.rank, placement.plan.cluster
        self._parts: dict[str, HostParts] = {}
        descriptions: dict[str, ModelDescription] = {}
        for call, number, engine in placement.home_engines():
            key, is_trained = _key(call, number), placement.plan.graph.call(call).trains
            is_leader = placement.group(call).is_leader
            is_policy = placement.roles[placement.role_of(call)].kind == "policy"
            training_state: dict[str, Any] | None = None
            if is_trained and isinstance(engine, TrainingEngine):
                training_state = self._keep_training_state(key, engine, is_leader)
            else:
                self._parts[key] = HostParts(engine.version, _on_host(engine.parts()))
            if is_leader:
                model = engine.head.model
                dtypes = {name: p.dtype for name, p in model.named_parameters()}
                extra = {name: getattr(model, name) for name in EXTRA_ATTRIBUTES if hasattr(model, name)}
                descriptions[key] = ModelDescription(
                    model.config, is_policy, dtypes, persistent_buffers(model), extra, training_state
                )
        self.descriptions = _of_all_ranks(descriptions, placement.control)

    def _keep_training_state(self, key: str, engine: TrainingEngine, is_leader: bool) -> dict[str, Any]:
        """Keep a trained engine's tensors on the first rank of its mesh. Returns the rest of its `state_dict`."""
        state = engine.state_dict()
        if is_leader:
            tensors = {
                f"{slot} {name}": [(whole(tensor.shape), tensor)]
                for name, slots in state["parameters"].items()
                for slot, tensor in slots.items()
            }
            self._parts[key] = HostParts(engine.version, tensors)
        return {name: value for name, value in state.items() if name != "parameters"}

    def model(self, key: str) -> Any:
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
            load = [partial(self.model, _key(home, at)) for at in range(len(roles[role].load))]
            models[role] = replace(roles[role], load=load)
        return Roles(models, filled_later=True)

    def load_into(self, placement: Placement) -> None:
        """Load the state into the engines of a new placement, which has been started. All ranks together.

        Raises:
            TransferError, EngineError: the state was not loaded completely; the run cannot go on from it.
        """
        engines = {_key(call, number): engine for call, number, engine in placement.home_engines()}
        for key in sorted(self.descriptions):
            engine, training_state = engines.get(key), self.descriptions[key].training_state
            sink: Sink | None = None
            if engine is not None:
                sink = EngineSink(engine) if training_state is None else TrainingStateSink()
            self._send(key, placement, sink)
            if engine is not None and training_state is not None:
                assert isinstance(sink, TrainingStateSink) and isinstance(engine, TrainingEngine), "the role is trained"
                engine.load_state_dict({**training_state, "parameters": sink.by_parameter()})

    def _send(self, key: str, placement: Placement, sink: Sink | None) -> None:
        """Reallocate one model's tensors from host memory. All ranks together."""
        ranks, control = tuple(range(self.cluster.size)), placement.control
        reallocation = Reallocation(
            ReallocationGroups(f"{key}, old plan", "new plan", ranks, control, control),
            self.cluster,
            self.rank,
            device=torch.device("cpu"),
            holder=self._parts.pop(key, None),
            sink=sink,
            options=placement.options.transfer,
        )
        reallocation.refresh()


class TrainingStateSink(FullTensorSink):
    """Receives a trained role's parameters and optimizer state whole, in host memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.version = STALE
        self._tensors: dict[str, torch.Tensor] = {}

    def receive(self, stream: Iterator[Parts], version: int) -> None:
        for parts in stream:
            self._tensors |= {name: tensor for name, [(_, tensor)] in parts.items()}
        self.version = version

    def by_parameter(self) -> dict[str, dict[str, torch.Tensor]]:
        """The received tensors by parameter name and then by slot: the parameter itself or an optimizer state."""
        by_parameter: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._tensors.items():
            slot, _, parameter = name.partition(" ")
            by_parameter.setdefault(parameter, {})[slot] = tensor
        return by_parameter


def _key(call: str, number: int) -> str:
    """The name of one of a role's models: the call in whose layout its parameters are kept, and the model's number."""
    return f"{call} {number}"


def _on_host(parts: Parts) -> Parts:
    """Copies of the parts in host memory."""
    return {
        name: [(box, tensor.detach().to("cpu", copy=True)) for box, tensor in cells] for name, cells in parts.items()
    }


def _of_all_ranks(descriptions: dict[str, ModelDescription], control: Any) -> dict[str, ModelDescription]:
    """The descriptions that all ranks have, together on every rank."""
    rank_descriptions: list[dict[str, ModelDescription]] = [{} for _ in range(dist.get_world_size(control))]
    dist.all_gather_object(rank_descriptions, descriptions, group=control)
    return {key: description for by_key in rank_descriptions for key, description in by_key.items()}
