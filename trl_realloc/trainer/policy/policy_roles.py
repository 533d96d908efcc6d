"""Makes the models of a trainer of one policy: the policy, its reference and the reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...algorithms.rewards import Rewards
from ...engines.models import adapted_policy, adapters_off, generated_config, has_adapters, shell
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...runtime.placement.roles import RoleModels, Roles
from ..grpo_config import PolicyConfig, given_attention
from ..ppo.role_models import policy_and_reference
from ..trainer_inputs import TrainerInputs


REF_ADAPTER = "ref"


def build_policy_roles(
    args: PolicyConfig,
    plan: ExecutionPlan,
    rank: int,
    model: Any,
    peft_config: Any,
    configs: Mapping[Role, Sequence[Any]],
    rewards: Rewards,
) -> tuple[Any, Roles]:
    """The policy, and how the models of every role are loaded. Only the policy is loaded here.

    Args:
        configs: the Transformers config of every role's models.
        rewards: the reward models.

    Returns:
        The policy: the loaded model, or a model whose weights its engine reads, or the structure alone on a rank that
        has no part of it; and the roles.

    Raises:
        ModelError: the policy has no trainable parameter.
    """
    (config,) = configs[Role.ACTOR]
    inputs = TrainerInputs(None, model, None, (), None, None, peft_config=peft_config)
    ref_adapter = None
    if Role.REFERENCE in configs and has_adapters(model):
        ref_adapter = keep_adapter(model)
    policy, adapted, reference = policy_and_reference(
        plan,
        rank,
        inputs,
        config,
        seed=args.seed,
        adapters=(None, ref_adapter),
        dtype=config.dtype or torch.float32,
        attention=given_attention(args),
    )
    generated = generated_config(config, adapted_policy(policy, config, peft_config))
    models = {
        Role.ACTOR: RoleModels(
            "policy", [lambda: policy], config=generated, shell=partial(shell, config), adapted=adapted
        )
    }
    if Role.REFERENCE in configs:
        models[Role.REFERENCE] = RoleModels(
            "policy",
            [] if reference is None else [reference],
            copy_of=Role.ACTOR,
            inside=adapters_off(ref_adapter, None) if reference is None else None,
        )
    if rewards.models:
        models[Role.REWARD] = RoleModels(
            "score",
            [source.load for source in rewards.models],
            [source.name for source in rewards.models],
            [None] * len(rewards.models),
        )
    return policy, Roles(models)


def keep_adapter(model: Any) -> str:
    """Add a copy of the adapter that is trained, as it is now, under TRL's name for it. It is the reference of a policy
    whose adapter has been trained before."""
    model.add_adapter(REF_ADAPTER, model.peft_config["default"])
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "default" in parts:  # the last part of `trainable_tokens_delta.default`
            copied = ".".join(REF_ADAPTER if part == "default" else part for part in parts)
            model.get_parameter(copied).data.copy_(parameter.data)
    return REF_ADAPTER
