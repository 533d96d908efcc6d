"""`RunInputs`: checked inputs of a run, from which `run_setup` creates the plan and the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...algorithms.rewards import Rewards
from ...engines.model_changes import described, model_changes
from ...engines.quantized import quantization
from ...engines.training.packed_attention import base_of
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
    """The inputs of a run with checked models. Some roles may be missing.

    Args:
        plugin: settings of the training arguments.
        given: arguments of the user, with whole parameters and paths as text.
        rewards: the reward models and functions of the plan.
        configs: the Transformers config of every model of every role.
        adapter_names: names of the trained adapter and of the reference's; `None` for a policy with only one.
        copies_adapter: whether the reference is a copy of the policy's original adapter, stored beside it: of an
            adapter that was trained before, as in TRL's GRPO, or that changes the base (`changes_base`).
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
        """True if the user passed a reference model."""
        return self.given.ref_model is not None

    @property
    def quantized(self) -> bool:
        """True if the policy has quantized weights, under its adapters."""
        model = self.given.model
        if not isinstance(model, str):
            return quantization(base_of(model)) is not None
        return self.given.quantization_config is not None or quantization(self.request.policy_config) is not None

    def changes(self) -> dict[Role, str]:
        """The user's changes to a role's model objects (`model_changes`), in words; without roles that have none."""
        inputs = self.given
        models: dict[Role, Sequence[object]] = {
            Role.ACTOR: [inputs.model],
            Role.REFERENCE: [inputs.ref_model if self.own_reference else inputs.model],
            Role.CRITIC: [inputs.value_model],
            Role.REWARD: inputs.reward_models,
        }
        changes_of = {role: [c for model in models[role] for c in model_changes(model)] for role in self.graph.roles}
        return {role: described(changes) for role, changes in changes_of.items() if changes}

    def job_models(self) -> JobModels:
        """The models in the planner's form. None is loaded."""
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
