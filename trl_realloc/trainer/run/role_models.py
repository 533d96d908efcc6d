"""Makes the models of every role (`runtime.placement.roles.Roles`) from what the user passed to the trainer.

The models themselves are loaded by `engines.models`, and moved to their devices by the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...algorithms.rewards import Rewards, read_rewards
from ...engines.dropout import without_dropout
from ...engines.model_configs import loaded_config, read_config, trained_config
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
)
from ...plan.assignment import in_place
from ...plan.dataflow import DataflowGraph, Role
from ...plan.execution_plan import ExecutionPlan
from ...runtime.placement.engine_builder import has_part
from ...runtime.placement.roles import RoleModels, Roles
from ..checks.config_checks import ConfigError
from ..trainer_inputs import TrainerInputs
from .run_inputs import RunInputs


if TYPE_CHECKING:
    from transformers import PretrainedConfig


REF_ADAPTER = "ref"


def role_configs(
    given: TrainerInputs, graph: DataflowGraph, config: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> dict[Role, list[Any]]:
    """The Transformers config of every model of every role; of a trained role in the dtype in which it is trained.

    Args:
        graph: the run's calls.
        config: the policy's as its checkpoint has it.
        dtype: of a policy that is given by name.
    """
    config = loaded_config(config, given.model, attention=given.attention)
    configs = {Role.ACTOR: [trained_config(config, given.model, dtype)]}
    if Role.REFERENCE in graph.roles:
        configs[Role.REFERENCE] = [config if given.ref_model is None else read_config(given.ref_model, "ref_model")]
    if Role.CRITIC in graph.roles:
        configs[Role.CRITIC] = [trained_config(read_config(given.value_model, "value_model"), given.value_model)]
    if Role.REWARD in graph.roles:
        configs[Role.REWARD] = [
            loaded_config(read_config(reward, given.reward_argument), reward, given.reward_dtype, given.attention)
            for reward in given.reward_models
        ]
    return configs


def reward_sources(given: TrainerInputs, seed: int, weights: Sequence[float] | None = None) -> Rewards:
    """The reward models and functions with their weights. Loads no model."""
    load = partial(load_classifier, dtype=given.reward_dtype, attention=given.attention)
    load_reward = partial(_load_seeded, seed, load, trained=False)
    return read_rewards(given.rewards, load_reward, given.reward_processing_classes, weights)


def build_roles(run: RunInputs, plan: ExecutionPlan) -> tuple[Any, Roles]:
    """The policy, and how the models of every role are loaded. Only the policy is loaded here.

    Returns:
        The policy: the loaded model, or a model whose weights its engine reads, or the structure alone on a rank that
        has no part of it; and the roles.

    Raises:
        ConfigError: `ref_adapter_name` under a plan that gives the reference parameters of its own.
        ModelError: the policy has no trainable parameter.
    """
    given, (config,), seed = run.given, run.configs[Role.ACTOR], run.args.seed
    adapter, ref_adapter = run.adapter_names
    if run.copies_adapter:
        ref_adapter = keep_adapter(given.model)
    policy, adapted, reference = _policy_and_reference(run, plan, adapter, ref_adapter)
    generated = generated_config(config, adapted_policy(policy, config, given.peft_config))
    models = {
        Role.ACTOR: RoleModels(
            "policy", [lambda: policy], config=generated, shell=partial(shell, config), adapted=adapted
        )
    }
    if Role.REFERENCE in plan.graph.roles:
        models[Role.REFERENCE] = RoleModels(
            "policy",
            [] if reference is None else [reference],
            copy_of=None if run.own_reference else Role.ACTOR,
            inside=adapters_off(ref_adapter, adapter) if reference is None else None,
        )
    if Role.CRITIC in plan.graph.roles:
        value_model = partial(_load_seeded, seed, load_classifier, given.value_model, trained=True)
        value_shell = partial(shell, run.configs[Role.CRITIC][0], is_policy=False)
        models[Role.CRITIC] = RoleModels("value", [value_model], shell=value_shell)
    if Role.REWARD in plan.graph.roles:
        models[Role.REWARD] = RoleModels(
            "score",
            [source.load for source in run.rewards.models],
            [source.name for source in run.rewards.models],
            [source.processing_class for source in run.rewards.models],
        )
    return policy, Roles(models)


def _policy_and_reference(
    run: RunInputs, plan: ExecutionPlan, adapter: str | None, ref_adapter: str | None
) -> tuple[Any, bool, Callable[[], Any] | None]:
    """The policy, whether it trains adapters alone, and the function that loads the reference: `None` where the policy
    without its adapters is the reference, or the run has none.

    Args:
        adapter, ref_adapter: the names of the adapter that is trained and of the reference's.
    """
    given, (config,), seed = run.given, run.configs[Role.ACTOR], run.args.seed
    model, peft_config = given.model, given.peft_config
    in_parts = peft_config is None or adapts_unread(peft_config)
    load = partial(load_policy, in_parts=in_parts, attention=given.attention)
    has_policy = has_part(plan, Role.ACTOR, run.rank, peft_config is not None or has_adapters(model))
    with seeded(seed):
        is_used = has_policy or not isinstance(model, str)
        policy = load(model, trained=True, dtype=config.dtype or torch.float32) if is_used else shell(config)
    adapted = peft_config is not None or has_adapters(policy)
    has_reference = Role.REFERENCE in plan.graph.roles
    reference = _reference_loader(plan, given, policy, adapted, load, seed, ref_adapter) if has_reference else None
    if has_policy:
        with seeded(seed):
            policy = without_dropout(with_adapters(policy, peft_config, adapter))
        check_trains(policy, "model")
    return policy, adapted, reference


def _reference_loader(
    plan: ExecutionPlan,
    given: TrainerInputs,
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
    if given.ref_model is not None:
        return partial(_load_seeded, seed, load_policy, given.ref_model, trained=False)
    if adapted and in_place(plan["actor.train"], plan["reference.forward"]):
        return None
    if isinstance(given.model, str):
        return partial(_load_seeded, seed, load, given.model, trained=False)
    if not adapted:
        return lambda: without_dropout(frozen_copy(policy))  # a copy of the policy as it is when the role is loaded
    if ref_adapter is not None:
        raise ConfigError("ref_adapter_name needs reference.forward in actor.train's layout, e.g. plan: flatten.")
    base = frozen_copy(policy)  # copied now, because the adapters are added to the policy in place
    return lambda: without_dropout(base)


def _load_seeded(seed: int, load: Callable[..., Any], model: Any, *, trained: bool) -> Any:
    """A model without dropout, whose new layers are drawn from the seed."""
    with seeded(seed):
        return without_dropout(load(model, trained=trained))


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
