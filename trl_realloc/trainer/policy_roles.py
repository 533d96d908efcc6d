"""Makes the models of a trainer of one policy: the policy and its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..engines.models import adapters_off, shell
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..runtime.roles import RoleModels, Roles
from .grpo_config import PolicyConfig
from .role_models import policy_and_reference
from .trainer_inputs import TrainerInputs


def build_policy_roles(
    args: PolicyConfig,
    plan: ExecutionPlan,
    rank: int,
    model: Any,
    peft_config: Any,
    configs: Mapping[Role, Sequence[Any]],
) -> tuple[Any, Roles]:
    """The policy, and how the models of every role are loaded. Only the policy is loaded here.

    Args:
        configs: the Transformers config of every role's model.

    Returns:
        The policy: the loaded model, or a model whose weights its engine reads, or the structure alone on a rank that
        has no part of it; and the roles.

    Raises:
        ModelError: the policy has no trainable parameter.
    """
    (config,) = configs[Role.ACTOR]
    inputs = TrainerInputs(None, model, None, (), None, None, peft_config=peft_config)
    policy, adapted, reference = policy_and_reference(plan, rank, inputs, config, seed=args.seed)
    models = {
        Role.ACTOR: RoleModels("policy", [lambda: policy], config=config, shell=partial(shell, config), adapted=adapted)
    }
    if Role.REFERENCE in configs:
        models[Role.REFERENCE] = RoleModels(
            "policy",
            [] if reference is None else [reference],
            copy_of=Role.ACTOR,
            inside=adapters_off(None, None) if reference is None else None,
        )
    return policy, Roles(models)
