"""A job's models by their Transformers configs alone: their specs by call, and shallower ones of the same width."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engines.models import shell
from ..plan.dataflow import DataflowGraph, Role, ppo_graph
from ..plan.model_spec import FAMILIES, ModelSpec


POLICIES = (Role.ACTOR, Role.REFERENCE)


@dataclass(frozen=True)
class JobModels:
    """The Transformers config and the parameter spec of every model of a job.

    Args:
        configs: Transformers configs of each role's models.
        specs: the same as specs, by call.
        peft_config: of the adapters that the actor trains, if any.
        processing_class: for engines that ask for one.
        mixed: what is computed in under mixed precision.
    """

    configs: Mapping[Role, Sequence[Any]]
    specs: Mapping[str, Sequence[ModelSpec]]
    peft_config: Any = None
    processing_class: Any = None
    mixed: torch.dtype | None = None

    def shallow(self, most: int) -> JobModels:
        """With models of at most so many elements and two layers at least: the same layers, fewer of them."""
        configs = {
            role: [_shallow(config, spec_of(config, role in POLICIES), most) for config in own]
            for role, own in self.configs.items()
        }
        return replace(self, configs=configs, specs=specs_of(configs, mixed=self.mixed))


def specs_of(
    configs: Mapping[Role, Sequence[Any]], graph: DataflowGraph | None = None, mixed: torch.dtype | None = None
) -> dict[str, list[ModelSpec]]:
    """By call, the models that it runs; of a family that no table describes by its shapes.

    Args:
        mixed: what is computed in under mixed precision.
    """
    graph = graph or ppo_graph()
    of_role = {role: [spec_of(config, role in POLICIES) for config in configs.get(role, ())] for role in graph.roles}
    if mixed is not None:
        of_role = {role: [replace(s, activation_bytes=mixed.itemsize) for s in own] for role, own in of_role.items()}
    return {call.name: of_role[call.role] for call in graph.calls}


def element_bytes(config: Any) -> int:
    """Of a parameter, by the config's dtype; float32 where that says none."""
    dtype = getattr(config, "dtype", None) or torch.float32
    return int((getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize)


def spec_of(config: Any, is_policy: bool) -> ModelSpec:
    size = element_bytes(config)
    if config.model_type in FAMILIES:
        return ModelSpec.from_config(config, "lm" if is_policy else "score", bytes_per_element=size)
    shapes = [(name, tuple(p.shape)) for name, p in shell(config, is_policy).named_parameters()]
    return ModelSpec.of_shapes(shapes, bytes_per_element=size)


def _shallow(config: Any, spec: ModelSpec, most: int) -> Any:
    if not spec.layers or spec.elements <= most:
        return config
    beside = spec.elements - spec.layers * spec.layer_elements
    layers = min(spec.layers, max(2, int((most - beside) / spec.layer_elements)))
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config
