"""A run's state on its way from one placement to another: kept in host memory while the engines change, then sent over
the wire by reallocations, each device's part to where it is wanted.

Frozen roles go from layout to layout. Of a trained role its first rank has the optimizer's state whole, as a checkpoint
would; every rank of its new mesh gets it bucket by bucket and takes its part.
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
from .reallocation import STALE, Reallocation, ShadowSink, Sink, WholeSink
from .roles import Roles


BESIDE = ("generation_config", "model_tags", "packs_rows")


@dataclass
class Held:
    """One rank's tensors of one role, on the host."""

    version: int
    tensors: Parts

    def parts(self) -> Parts:
        return self.tensors


@dataclass(frozen=True)
class Manifest:
    """What every rank has to know of a role, whoever holds it.

    Args:
        config: Transformers' of its model.
        dtypes, buffers: of its parameters, and its persistent buffers themselves.
        beside: of the model's attributes, those that are not in its config: `BESIDE`.
        state: of a trained role, what `state_dict` has beside the parameters' tensors.
    """

    config: Any
    is_policy: bool
    dtypes: Mapping[str, torch.dtype]
    buffers: Mapping[str, torch.Tensor]
    beside: Mapping[str, Any]
    state: Mapping[str, Any] | None = None


class Cargo:
    """Everything of a placement that a run goes on from, this rank's part of it. Making it is collective; the placement
    may be closed after."""

    def __init__(self, placement: Placement) -> None:
        self.rank, self.cluster = placement.rank, placement.plan.cluster
        self._held: dict[str, Held] = {}
        own: dict[str, Manifest] = {}
        for call, number, engine in placement.home_engines():
            key, trains = _key(call, number), placement.plan.graph.call(call).trains
            leads, is_policy = (
                placement.group(call).is_leader,
                placement.roles[placement.role_of(call)].kind == "policy",
            )
            state = self._keep_state(key, engine, leads) if isinstance(engine, TrainingEngine) and trains else None
            if state is None:
                self._held[key] = Held(engine.version, _on_host(engine.parts()))
            if leads:
                model = engine.head.model
                dtypes = {name: p.dtype for name, p in model.named_parameters()}
                beside = {name: getattr(model, name) for name in BESIDE if hasattr(model, name)}
                own[key] = Manifest(model.config, is_policy, dtypes, persistent_buffers(model), beside, state)
        self.manifests = _of_all_ranks(own, placement.control)

    def _keep_state(self, key: str, engine: TrainingEngine, leads: bool) -> dict[str, Any]:
        state = engine.state_dict()
        if leads:
            tensors = {
                f"{slot} {name}": [(whole(tensor.shape), tensor)]
                for name, slots in state["parameters"].items()
                for slot, tensor in slots.items()
            }
            self._held[key] = Held(engine.version, tensors)
        return {name: value for name, value in state.items() if name != "parameters"}

    def model(self, key: str) -> Any:
        """A role's model as it will be filled: its structure, with memory for its parameters and nothing in it."""
        manifest = self.manifests[key]
        model = blank(manifest.config, manifest.is_policy, manifest.dtypes)
        model.load_state_dict(dict(manifest.buffers), strict=False)
        for name, value in manifest.beside.items():
            setattr(model, name, value)
        return without_dropout(model)

    def roles(self, roles: Roles, plan: ExecutionPlan) -> Roles:
        """A run's roles under another plan, their models to be filled by `deliver`."""
        models = {}
        for role in plan.graph.roles:
            home = plan.graph.train_call(role) or next(c for c in plan.order if plan.graph.call(c).role is role)
            load = [partial(self.model, _key(home, at)) for at in range(len(roles[role].load))]
            models[role] = replace(roles[role], load=load)
        return Roles(models, filled_later=True)

    def deliver(self, placement: Placement) -> None:
        """Into the engines of the new placement, which has been started. All ranks together.

        Raises:
            TransferError, EngineError: the state is not whole there; the run cannot go on from it.
        """
        engines = {_key(call, number): engine for call, number, engine in placement.home_engines()}
        for key in sorted(self.manifests):
            engine, state = engines.get(key), self.manifests[key].state
            sink: Sink | None = None
            if engine is not None:
                sink = ShadowSink(engine) if state is None else StateSink()
            self._send(key, placement, sink)
            if engine is not None and state is not None:
                assert isinstance(sink, StateSink) and isinstance(engine, TrainingEngine), "a trained role's"
                engine.load_state_dict({**state, "parameters": sink.by_parameter()})

    def _send(self, key: str, placement: Placement, sink: Sink | None) -> None:
        ranks, options = tuple(range(self.cluster.size)), placement.options
        edge = Reallocation(
            f"{key}, old plan",
            "new plan",
            self.cluster,
            ranks,
            self.rank,
            control=placement.control,
            wire=placement.control,
            device=torch.device("cpu"),
            holder=self._held.pop(key, None),
            sink=sink,
            bucket_bytes=options.bucket_bytes,
            timeout_s=options.transfer_timeout_s,
            checksum=options.checksums,
        )
        edge.refresh()


class StateSink(WholeSink):
    """A trained role's state whole, on the host."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.version = STALE
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, stream: Iterator[Parts], version: int) -> None:
        for parts in stream:
            self._tensors |= {name: tensor for name, [(_, tensor)] in parts.items()}
        self.version = version

    def by_parameter(self) -> dict[str, dict[str, torch.Tensor]]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._tensors.items():
            slot, _, parameter = name.partition(" ")
            found.setdefault(parameter, {})[slot] = tensor
        return found


def _key(call: str, number: int) -> str:
    """Names one of a role's models by the call in whose layout it is at home."""
    return f"{call} {number}"


def _on_host(parts: Parts) -> Parts:
    return {name: [(box, cell.detach().to("cpu", copy=True)) for box, cell in own] for name, own in parts.items()}


def _of_all_ranks(own: dict[str, Manifest], control: Any) -> dict[str, Manifest]:
    told: list[dict[str, Manifest]] = [{} for _ in range(dist.get_world_size(control))]
    dist.all_gather_object(told, own, group=control)
    return {key: manifest for each in told for key, manifest in each.items()}
