"""Makes the models of every role (`runtime.placement.roles.Roles`) from what the user passed to the trainer.

The models themselves are loaded by `engines.models`, and moved to their devices by the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...algorithms.rewards import Rewards, read_rewards
from ...engines.model_configs import read_config, trained_config
from ...engines.models import (
    adapted_policy,
    adapters_off,
    adapts_unread,
    check_trains,
    frozen_copy,
    generated_config,
    has_adapters,
    load_classifier,
    load_policy,
    seeded,
    shell,
    with_adapters,
    without_dropout,
)
from ...plan.assignment import in_place
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...runtime.placement.engine_builder import has_part
from ...runtime.placement.roles import RoleModels, Roles
from ..checks.config_checks import ConfigError
from ..ppo_config import PPOConfig
from ..trainer_inputs import TrainerInputs


def role_configs(inputs: TrainerInputs, checkpoint_config: Any) -> dict[Role, list[Any]]:
    """The Transformers config of every model of every role; of a trained role in the dtype in which it is trained.

    Args:
        checkpoint_config: the policy's config as its checkpoint has it.
    """
    reference = checkpoint_config if inputs.ref_model is None else read_config(inputs.ref_model, "ref_model")
    return {
        Role.ACTOR: [trained_config(checkpoint_config, inputs.model)],
        Role.REFERENCE: [reference],
        Role.CRITIC: [trained_config(read_config(inputs.value_model, "value_model"), inputs.value_model)],
        Role.REWARD: [read_config(reward, "reward_model") for reward in inputs.reward_models],
    }


def reward_sources(args: PPOConfig, inputs: TrainerInputs) -> Rewards:
    """The reward models and functions with their weights. Loads no model."""
    load = partial(load_seeded, args.seed, load_classifier, trained=False)
    return read_rewards(inputs.rewards, load, inputs.reward_processing_classes, args.reward_weights)


def build_roles(
    args: PPOConfig,
    plan: ExecutionPlan,
    rank: int,
    inputs: TrainerInputs,
    rewards: Rewards,
    configs: Mapping[Role, Sequence[Any]],
) -> tuple[Any, Roles]:
    """The policy, and how the models of every role are loaded. Only the policy is loaded here.

    Args:
        configs: from `role_configs`.

    Returns:
        The policy: the loaded model, or a model whose weights its engine reads, or the structure alone on a rank that
        has no part of it; and the roles.

    Raises:
        ConfigError: `ref_adapter_name` under a plan that gives the reference parameters of its own.
        ModelError: the policy has no trainable parameter.
    """
    (config,), (value_config,) = configs[Role.ACTOR], configs[Role.CRITIC]
    names = args.model_adapter_name, args.ref_adapter_name
    policy, adapted, reference = policy_and_reference(plan, rank, inputs, config, seed=args.seed, adapters=names)
    shares_policy = reference is None
    value_model = partial(load_seeded, args.seed, load_classifier, inputs.value_model, trained=True)
    generated = generated_config(config, adapted_policy(policy, config, inputs.peft_config))
    models = {
        Role.ACTOR: RoleModels(
            "policy", [lambda: policy], config=generated, shell=partial(shell, config), adapted=adapted
        ),
        Role.REFERENCE: RoleModels(
            "policy",
            [] if reference is None else [reference],
            copy_of=Role.ACTOR if inputs.ref_model is None else None,
            inside=adapters_off(args.ref_adapter_name, args.model_adapter_name) if shares_policy else None,
        ),
        Role.CRITIC: RoleModels("value", [value_model], shell=partial(shell, value_config, is_policy=False)),
        Role.REWARD: RoleModels(
            "score",
            [source.load for source in rewards.models],
            [source.name for source in rewards.models],
            [source.processing_class for source in rewards.models],
        ),
    }
    return policy, Roles(models)


def policy_and_reference(
    plan: ExecutionPlan,
    rank: int,
    inputs: TrainerInputs,
    config: Any,
    *,
    seed: int,
    adapters: tuple[str | None, str | None] = (None, None),
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> tuple[Any, bool, Callable[[], Any] | None]:
    """The policy, whether it trains adapters alone, and the function that loads the reference: `None` where the policy
    without its adapters is the reference, or the run has none.

    Args:
        adapters: the names of the adapter that is trained and of the reference's.
        dtype, attention: of a policy that is given by name, as of `load_policy`.

    Raises:
        ConfigError: `ref_adapter_name` under a plan that gives the reference parameters of its own.
        ModelError: the policy has no trainable parameter.
    """
    model, peft_config = inputs.model, inputs.peft_config
    has_policy = has_part(plan, Role.ACTOR, rank, peft_config is not None or has_adapters(model))
    in_parts = peft_config is None or adapts_unread(peft_config)
    with seeded(seed):
        is_used = has_policy or not isinstance(model, str)
        load = partial(load_policy, in_parts=in_parts, attention=attention)
        policy = load(model, trained=True, dtype=dtype) if is_used else shell(config)
    adapted = peft_config is not None or has_adapters(policy)
    has_reference = Role.REFERENCE in plan.graph.roles
    reference = _reference_loader(plan, inputs, policy, adapted, load, seed, adapters[1]) if has_reference else None
    if has_policy:
        with seeded(seed):
            policy = without_dropout(with_adapters(policy, peft_config, adapters[0]))
        check_trains(policy, "model")
    return policy, adapted, reference


def _reference_loader(
    plan: ExecutionPlan,
    inputs: TrainerInputs,
    policy: Any,
    adapted: bool,
    load: Callable[..., Any],
    seed: int,
    ref_adapter: str | None,
) -> Callable[[], Any] | None:
    """The function that loads the reference; `None` where the policy without its adapters is the reference. To be
    called before the policy gets its adapters.

    Args:
        load: as the policy is loaded, with which the reference is compared.
    """
    if inputs.ref_model is not None:
        return partial(load_seeded, seed, load_policy, inputs.ref_model, trained=False)
    if adapted and in_place(plan["actor.train"], plan["reference.forward"]):
        return None
    if isinstance(inputs.model, str):
        return partial(load_seeded, seed, load, inputs.model, trained=False)
    if not adapted:
        return lambda: without_dropout(frozen_copy(policy))  # a copy of the policy as it is when the role is loaded
    if ref_adapter is not None:
        raise ConfigError("ref_adapter_name needs reference.forward in actor.train's layout, e.g. plan: flatten.")
    base = frozen_copy(policy)  # copied now, because the adapters are added to the policy in place
    return lambda: without_dropout(base)


def load_seeded(seed: int, load: Callable[..., Any], model: Any, *, trained: bool) -> Any:
    """A model without dropout, whose new layers are drawn from the seed."""
    with seeded(seed):
        return without_dropout(load(model, trained=trained))
