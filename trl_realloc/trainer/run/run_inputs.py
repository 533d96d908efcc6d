"""`RunInputs`: checked inputs of a run, from which `run_setup` creates the plan and the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...algorithms.rewards import Rewards
from ...engines.model_changes import described, model_changes
from ...engines.models import adapted_policy
from ...engines.training.adapter_weights import trains_base
from ...plan.dataflow import DataflowGraph, Role
from ...plan.quantization import Quantization
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

    @cached_property
    def own_reference(self) -> bool:
        """True if the reference needs its own parameters even where the policy trains adapters: the user passed a
        reference model, or the training also changes parameters of the base. First read before the policy gets its
        adapters."""
        inputs, (_, ref_adapter) = self.given, self.adapter_names
        if inputs.ref_model is not None or self.copies_adapter or ref_adapter is not None:
            return inputs.ref_model is not None
        policy = adapted_policy(inputs.model, self.configs[Role.ACTOR][0], inputs.peft_config)
        return policy is not None and trains_base(policy)

    @property
    def quantization(self) -> Quantization | None:
        """The format of the policy's quantized weights; `None` if they are not quantized."""
        model = self.given.model
        config = self.request.policy_config if isinstance(model, str) else getattr(model, "config", None)
        return Quantization.of(self.given.quantization_config or getattr(config, "quantization_config", None))

    def changes(self) -> dict[Role, str]:
        """The user's changes to a role's model objects (`model_changes`), in words; without roles that have none."""
        inputs = self.given
        models: dict[Role, Sequence[object]] = {
            Role.ACTOR: [inputs.model],
            Role.REFERENCE: [inputs.model if inputs.ref_model is None else inputs.ref_model],
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
            quantization=self.quantization,
        )
