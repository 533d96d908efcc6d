"""How each role's models are had: what a placement is given to load and to build engines of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ..plan.dataflow import DataflowGraph, Role


ModelKind = Literal["policy", "value", "score"]


@dataclass(frozen=True)
class RoleModels:
    """One role's models. The callables are called on the ranks of the role's meshes only.

    Args:
        kind: what the models give: `policy` a log-probability and an entropy per response token, `value` a value per
            state of a response, `score` a number per sample.
        load: one callable per model. Only a role of the kind `score` may have several models or none.
        names: of each model, and `processing_classes` its own tokenizer or `None`; of the kind `score`.
        config: of Transformers, for engines that build the model themselves.
        shell: the model's structure without weights, adapters left out.
        adapted: the role trains adapters alone.
        copy_of: the role whose parameters this one has before training, adapters left out.
        inside: the role has no model of its own: it is the module of the role `copy_of` inside this context.
    """

    kind: ModelKind
    load: Sequence[Callable[[], Any]]
    names: Sequence[str] = ()
    processing_classes: Sequence[Any] = ()
    config: Any = None
    shell: Callable[[], Any] | None = None
    adapted: bool = False
    copy_of: Role | None = None
    inside: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None


@dataclass(frozen=True)
class Roles:
    """The models of every role of a graph.

    Args:
        filled_later: the models have memory and nothing in it; whoever made them fills the engines.
    """

    models: Mapping[Role, RoleModels] = field(default_factory=dict)
    filled_later: bool = False

    def __getitem__(self, role: Role) -> RoleModels:
        return self.models[role]

    def copies_of(self, role: Role, graph: DataflowGraph) -> Iterator[Role]:
        """The roles of the graph that are made from a role's model and have one of their own."""
        for other in graph.roles:
            if other in self.models and self[other].copy_of is role and self[other].inside is None:
                yield other
