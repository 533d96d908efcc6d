"""Creates the models of every role (`runtime.placement.roles.Roles`) from the trainer's arguments.

`engines.models` loads the models, and the engines move them to their devices.
"""

from __future__ import annotations

import copy
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
    changes_base,
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
from ...engines.quantized import without_quantization
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
    inputs: TrainerInputs, graph: DataflowGraph, config: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> dict[Role, list[Any]]:
    """The Transformers config of every model of every role, with the training dtype for trained roles.

    Args:
        config: policy config of the checkpoint.
        dtype: dtype of a policy passed by name.
    """
    config = without_quantization(loaded_config(config, inputs.model, attention=inputs.attention))
    configs = {Role.ACTOR: [trained_config(config, inputs.model, dtype)]}
    if Role.REFERENCE in graph.roles:
        configs[Role.REFERENCE] = [config if inputs.ref_model is None else read_config(inputs.ref_model, "ref_model")]
    if Role.CRITIC in graph.roles:
        configs[Role.CRITIC] = [trained_config(read_config(inputs.value_model, "value_model"), inputs.value_model)]
    if Role.REWARD in graph.roles:
        configs[Role.REWARD] = [
            loaded_config(read_config(reward, inputs.reward_argument), reward, inputs.reward_dtype, inputs.attention)
            for reward in inputs.reward_models
        ]
    return configs


def reward_sources(inputs: TrainerInputs, seed: int, weights: Sequence[float] | None = None) -> Rewards:
    """The reward models and functions with their weights. Loads no model."""
    load = partial(load_classifier, dtype=inputs.reward_dtype, attention=inputs.attention)
    load_reward = partial(_load_seeded, seed, load, trained=False)
    return read_rewards(inputs.rewards, load_reward, inputs.reward_processing_classes, weights)


def build_roles(run: RunInputs, plan: ExecutionPlan) -> tuple[Any, Roles]:
    """The policy, and the loaders of every role's models. Only the policy is loaded here.

    Returns:
        The policy (a loaded model, a model whose weights its engine reads, or only the structure on a rank without a
        part of it), and the roles.

    Raises:
        ConfigError: `ref_adapter_name` with a plan that gives the reference separate parameters.
        ModelError: the policy has no trainable parameter.
    """
    inputs, (config,), seed = run.given, run.configs[Role.ACTOR], run.args.seed
    adapter, ref_adapter = run.adapter_names
    if run.copies_adapter:
        ref_adapter = REF_ADAPTER
        if has_adapters(inputs.model):
            keep_adapter(inputs.model)
    policy, adapted, reference = _policy_and_reference(run, plan, adapter, ref_adapter)
    generated = generated_config(config, adapted_policy(policy, config, inputs.peft_config))
    models = {
        Role.ACTOR: RoleModels(
            "policy", [lambda: policy], config=generated, shell=partial(shell, config), adapted=adapted
        )
    }
    if Role.REFERENCE in plan.graph.roles:
        models[Role.REFERENCE] = RoleModels(
            "policy",
            [] if reference is None else [reference],
            copy_of=Role.ACTOR if inputs.ref_model is None else None,
            inside=adapters_off(ref_adapter, adapter) if reference is None else None,
        )
    if Role.CRITIC in plan.graph.roles:
        value_model = partial(_load_seeded, seed, load_classifier, inputs.value_model, trained=True)
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
    """The policy, whether only adapters are trained, and the function that loads the reference: `None` if the reference
    is the policy without its adapters, or the run has none.

    Args:
        adapter, ref_adapter: names of the trained adapter and of the reference's.
    """
    inputs, (config,), seed = run.given, run.configs[Role.ACTOR], run.args.seed
    model, peft_config = inputs.model, inputs.peft_config
    in_parts = peft_config is None or adapts_unread(peft_config)
    quantization = inputs.quantization_config
    load = partial(load_policy, in_parts=in_parts, attention=inputs.attention, quantization_config=quantization)
    has_policy = has_part(plan, Role.ACTOR, run.rank, peft_config is not None or has_adapters(model))
    with seeded(seed):
        is_used = has_policy or not isinstance(model, str)
        policy = load(model, trained=True, dtype=config.dtype or torch.float32) if is_used else shell(config)
    adapted = peft_config is not None or has_adapters(policy)
    reference = None
    if Role.REFERENCE in plan.graph.roles:
        shares = adapted and not run.own_reference and plan.base_holder("reference.forward") is not None
        reference = None if shares else _reference_loader(inputs, policy, adapted, load, seed, ref_adapter)
    if has_policy:
        with seeded(seed):
            policy = without_dropout(with_adapters(policy, peft_config, adapter))
        if run.copies_adapter and peft_config is not None:
            keep_adapter(policy)
        check_trains(policy, "model")
    return policy, adapted, reference


def _reference_loader(
    inputs: TrainerInputs,
    policy: Any,
    adapted: bool,
    load: Callable[..., Any],
    seed: int,
    ref_adapter: str | None,
) -> Callable[[], Any]:
    """The function that loads a reference with its own parameters. Called before the policy gets its adapters.

    Args:
        load: loader of the policy; the reference must match it.
    """
    if inputs.ref_model is not None:
        return partial(_load_seeded, seed, load_policy, inputs.ref_model, trained=False)
    if isinstance(inputs.model, str):
        return partial(_load_seeded, seed, load, inputs.model, trained=False)
    if not adapted:
        return lambda: without_dropout(frozen_copy(policy))  # copied when the role is loaded
    if ref_adapter is not None:
        raise ConfigError(
            "ref_adapter_name needs reference.forward where the plan has the policy, e.g. plan: flatten or separate."
        )
    base = frozen_copy(policy)  # copied now, because adapters are added to the policy in place
    return lambda: without_dropout(base)


def _load_seeded(seed: int, load: Callable[..., Any], model: Any, *, trained: bool) -> Any:
    """A model without dropout, whose new layers are initialized from the seed."""
    with seeded(seed):
        return without_dropout(load(model, trained=trained))


def keep_adapter(model: Any) -> str:
    """Add a copy of the trained adapter, with its current weights, under TRL's name for it: the reference of a policy
    whose adapter was trained before, or without which the base is another model."""
    config = copy.deepcopy(model.peft_config["default"])
    if changes_base(config):
        config.init_lora_weights = True  # otherwise PEFT would take a part out of the base once more
    model.add_adapter(REF_ADAPTER, config)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "default" in parts:  # the last part of `trainable_tokens_delta.default`
            copied = ".".join(REF_ADAPTER if part == "default" else part for part in parts)
            model.get_parameter(copied).data.copy_(parameter.data)
    return REF_ADAPTER
