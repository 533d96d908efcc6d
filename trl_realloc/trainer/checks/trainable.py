"""`why_not_trained`: why this package's training engines cannot train a run of a TRL trainer, so that Accelerate must.

`policy.accelerate_fallback` handles such runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from ...engines.dropout import dropout_rates
from ...engines.model_configs import ModelError
from ...engines.training.expert_routing import BALANCED_FAMILIES
from ...engines.training.packed_attention import base_of
from .model_checks import check_trained_adapter
from .obstacles import config_obstacles, model_obstacles, quantized_obstacles
from .unfollowed_settings import Then, unfollowed_settings


if TYPE_CHECKING:
    from peft import PeftConfig


def why_not_trained(
    args: TrainingArguments,
    model: PreTrainedModel | PretrainedConfig,
    peft_config: PeftConfig | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    quantization_config: object = None,
    trainer: type = Trainer,
) -> str | None:
    """The first reason, as a sentence; `None` if the engines can train this run as TRL would.

    Args:
        args: the training arguments, such as a `GRPOConfig`.
        model: the policy, with or without adapters; or its Transformers config, before it is loaded.
        peft_config: config of an adapter to be added to the policy.
        environment: environment variables of the launcher.
        quantization_config: setting for loading a model passed by name.
        trainer: class of the trainer, maybe a user's.
    """
    reason = next(_reasons(args, model, peft_config, environment, quantization_config), None)
    if reason is None and (method := own_optimizer(trainer)) is not None:
        reason = (
            f"{method} makes the optimizer, and each engine makes its part of one; the argument `optimizers` can be "
            f"divided"
        )
    return None if reason is None else f"Accelerate trains, because {reason}."


_OPTIMIZER_METHODS = (
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
)
_LIBRARIES = ("trl.", "transformers.", __name__.partition(".")[0] + ".")


def own_optimizer(kind: type) -> str | None:
    """The method of a user's subclass that creates the optimizer, which no engine calls; `None` if there is none."""
    return users_method(kind, _OPTIMIZER_METHODS)


def users_method(kind: type, names: Iterable[str]) -> str | None:
    """The first of these methods that a user's trainer subclass has replaced; `None` if there is none."""
    for name in names:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if not owner.__module__.startswith(_LIBRARIES):
            return f"{owner.__name__}.{name}"
    return None


def _reasons(
    args: TrainingArguments,
    model: PreTrainedModel | PretrainedConfig,
    peft_config: PeftConfig | None,
    environment: Mapping[str, str],
    quantization_config: object,
) -> Iterator[str]:
    is_loaded = isinstance(model, nn.Module)
    config = model.config if is_loaded else model
    yield from _launch_reasons(args, environment)
    yield from unfollowed_settings(args, Then.ACCELERATE)
    yield from _config_reasons(args, config)
    if is_loaded:
        yield from (obstacle.reason for obstacle in model_obstacles(model, "model"))
        yield from _class_reasons(model)
    adapters = [*dict(getattr(model, "peft_config", None) or {}).values(), *([peft_config] if peft_config else [])]
    settings = None if is_loaded else quantization_config
    yield from (o.reason for o in quantized_obstacles(model, peft_config, settings))
    for adapter in adapters:
        try:
            check_trained_adapter(adapter, "the model")
        except ModelError as error:
            yield str(error).partition("; ")[0]
    if not getattr(args, "disable_dropout", False):
        yield from _dropout_reasons(config, model if is_loaded else None, adapters)


def _launch_reasons(args: TrainingArguments, environment: Mapping[str, str]) -> Iterator[str]:
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on") or getattr(args, "fsdp", None):
        yield "the job is launched with FSDP, which shards the parameters that the plan's engines would hold"


def _config_reasons(args: TrainingArguments, config: PretrainedConfig) -> Iterator[str]:
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "auto_map", None) and not type(config).__module__.startswith("transformers."):
        yield f"{kind} has custom code (trust_remote_code), which the engines do not load"
    if any(getattr(config, f"{sense}_config", None) is not None for sense in ("vision", "audio")):
        yield f"{kind} reads images or sounds, and the engines train on text alone"
    yield from (obstacle.reason for obstacle in config_obstacles(config, "model"))
    if coefficient := router_loss_coefficient(args, config):
        loss = f"an auxiliary loss, router_aux_loss_coef {coefficient:g}"
        if kind not in BALANCED_FAMILIES:
            yield f"{kind} has {loss}, that the engines do not compute; router_aux_loss_coef 0 trains without it"
        elif (getattr(args, "gradient_checkpointing_kwargs", None) or {}).get("use_reentrant"):
            yield f"use_reentrant in gradient_checkpointing_kwargs loses the gradient of {loss}; leave it out"


def router_loss_coefficient(args: TrainingArguments, config: PretrainedConfig) -> float:
    """The coefficient of the auxiliary loss of a mixture of experts by TRL's rules; 0 for other models."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", None) is None:
        return 0.0
    coefficient = getattr(args, "router_aux_loss_coef", 0.0)
    if coefficient is None:  # TRL uses the model's
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    return float(coefficient or 0.0)


def _class_reasons(model: PreTrainedModel) -> Iterator[str]:
    base = base_of(model)
    name = type(base).__name__
    if not type(base).__module__.startswith("transformers."):
        yield f"{name} of {type(base).__module__} is not a class of Transformers, which the engines know how to divide"
    elif base.get_output_embeddings() is None:
        yield f"{name} has no language head"


def _dropout_reasons(
    config: PretrainedConfig, model: PreTrainedModel | None, adapters: list[PeftConfig]
) -> Iterator[str]:
    """Reasons for a policy with dropout: TRL's forward for the old log-probabilities draws other masks than its
    training forward, and the engines use no dropout."""
    way_out = "and the engines train without dropout; disable_dropout: true lets them"
    for adapter in adapters:
        if getattr(adapter, "lora_dropout", 0.0):
            yield f"lora_dropout is {adapter.lora_dropout:g}, {way_out}"
    if model is not None:
        rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        rates += [rate for module in model.modules() for rate in dropout_rates(vars(module)).values()]
        if any(rates):
            yield f"the model has dropout {max(rates):g}, {way_out}"
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rates = list(dropout_rates(vars(text)).values())
    if any(rates):
        yield f"the model's config has dropout {max(rates):g}, {way_out}"
