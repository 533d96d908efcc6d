"""`RoleModels`: the kind and the loading functions of each role's models. `engine_builder` builds engines from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NoReturn

from torch import nn

from ...plan.dataflow import DataflowGraph, Role


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


ModelKind = Literal["policy", "value", "score"]


@dataclass(frozen=True)
class RoleModels:
    """One role's models. The callables are called only on the ranks of the role's meshes.

    Args:
        kind: output of the models: a `policy` computes a log-probability and an entropy per response token, a `value`
            model a value per state of a response, a `score` model a number per sample.
        load: one callable per model. Only a role of the kind `score` may have several models or none.
        names: names of the models; only for the kind `score`.
        processing_classes: each model's tokenizer, or `None`; only for the kind `score`.
        config: the Transformers config, for engines that build the model themselves.
        shell: makes the model's structure without weights and adapters.
        adapted: the role trains only adapters.
        copy_of: the role whose initial parameters, without adapters, this role copies.
        inside: context in which a module of the role `copy_of` computes as this role, for a role without a model
            (`ExecutionPlan.base_holder` says which module).
    """

    kind: ModelKind
    load: Sequence[Callable[[], PreTrainedModel]]
    names: Sequence[str] = ()
    processing_classes: Sequence[PreTrainedTokenizerBase] = ()
    config: PretrainedConfig = None
    shell: Callable[[], PreTrainedModel] | None = None
    adapted: bool = False
    copy_of: Role | None = None
    inside: Callable[[nn.Module], contextlib.AbstractContextManager[object]] | None = None


@dataclass(frozen=True)
class Roles:
    """The models of every role of a graph.

    Args:
        filled_later: the models' parameters are uninitialized; the caller fills the engines.
    """

    models: Mapping[Role, RoleModels] = field(default_factory=dict)
    filled_later: bool = False

    def __getitem__(self, role: Role) -> RoleModels:
        return self.models[role]

    def loaded(self) -> Roles:
        """The roles after their models have been loaded, without references to the user's models, which would keep
        unused models in memory."""
        return replace(self, models={r: replace(m, load=[_loaded] * len(m.load)) for r, m in self.models.items()})

    def check(self, graph: DataflowGraph) -> None:
        """Raises:
        ValueError: a role copies or uses the model of a role that no call of the graph trains.
        """
        for role in graph.roles:
            source = self.models[role].copy_of if role in self.models else None
            if source is not None and source not in graph.trained_roles:
                raise ValueError(
                    f"the {role}'s model is a copy of the {source}'s (RoleModels.copy_of), and no call trains the "
                    f"{source}; give the {role} a function that loads its model, and no copy_of."
                )

    def copies_of(self, role: Role, graph: DataflowGraph) -> Iterator[Role]:
        """The roles of the graph whose model is a copy of this role's model."""
        for other in graph.roles:
            if other in self.models and self[other].copy_of is role and self[other].inside is None:
                yield other


def _loaded() -> NoReturn:
    raise AssertionError("a placement loads its models once")
