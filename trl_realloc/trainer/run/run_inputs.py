"""`RunInputs`: what the plan and the engines of a run are made from, checked. How they are made is in `run_setup`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...algorithms.rewards import Rewards
from ...engines.model_changes import described, model_changes
from ...plan.dataflow import DataflowGraph, Role
from ...profiling.job_models import JobModels
from ..accelerate_plugin import ReallocationPlugin
from ..trainer_inputs import TrainerInputs
from .job_builder import compute_dtype
from .plan_request import PlanRequest


if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..grpo_config import PolicyConfig
    from ..ppo_config import PPOConfig


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, whose models have been checked. Some roles may be missing.

    Args:
        plugin: with what the training arguments set.
        rank: this rank.
        given: by the user, with whole parameters and paths as text.
        graph: the run's calls.
        rewards: the reward models and functions of the plan.
        configs: the Transformers config of every model of every role.
        adapter_names: of the adapter that is trained and of the reference's; `None` for those of a policy with one.
        copies_adapter: the reference is a copy of the adapter that the policy came with, beside it, as TRL's GRPO has.
    """

    args: PPOConfig | PolicyConfig
    plugin: ReallocationPlugin
    request: PlanRequest
    rank: int
    given: TrainerInputs
    graph: DataflowGraph
    rewards: Rewards
    configs: Mapping[Role, Sequence[PretrainedConfig]]
    adapter_names: tuple[str | None, str | None] = (None, None)
    copies_adapter: bool = False

    @property
    def own_reference(self) -> bool:
        """True if the user gave a reference model."""
        return self.given.ref_model is not None

    def changes(self) -> dict[Role, str]:
        """What the user has put on the model objects of a role (`model_changes`), in words; without the roles whose
        models have nothing."""
        given = self.given
        models: dict[Role, Sequence[object]] = {
            Role.ACTOR: [given.model],
            Role.REFERENCE: [given.ref_model if self.own_reference else given.model],
            Role.CRITIC: [given.value_model],
            Role.REWARD: given.reward_models,
        }
        found = {role: [c for model in models[role] for c in model_changes(model)] for role in self.graph.roles}
        return {role: described(changes) for role, changes in found.items() if changes}

    def job_models(self) -> JobModels:
        """The models as the planner reads them. None is loaded."""
        return JobModels.of_run(
            self.configs,
            self.graph,
            self.given.model,
            peft_config=self.given.peft_config,
            processing_class=self.given.processing_class,
            mixed=compute_dtype(self.args),
            generation_engine=self.request.engine,
            own_reference=self.own_reference,
        )
