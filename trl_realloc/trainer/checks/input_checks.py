"""Checks the user's tokenizers, data collator and pair of optimizers, before anything is tokenized or loaded.

Other checks: models in `model_checks`, settings in `config_checks`, optimizers in `optimizer_checks`, plans in
`plan_checks`, datasets in `algorithms.prompts`, reward functions in `algorithms.rewards`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments

from ...common.errors import shown
from ...engines.model_configs import ModelError, most_positions, table_positions
from ...plan.dataflow import Role
from .config_checks import ConfigError


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids of the policy's tokenizer.

    Args:
        eos: the eos token; `None` if the tokenizer has none.
        stop: the token that ends a response; `None` if every response has `response_length` tokens.
    """

    pad: int
    eos: int | None
    stop: int | None


def special_tokens(args: TrainingArguments, processing_class: PreTrainedTokenizerBase | None) -> SpecialTokens:
    """The special tokens of a run.

    Raises:
        ValueError: there is no tokenizer, or it has no pad token.
        ConfigError: `stop_token` is `eos`, and the tokenizer has no eos token.
    """
    if processing_class is None:
        raise ValueError("processing_class is missing: the policy's tokenizer.")
    if getattr(processing_class, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer has no pad token; set one before making the trainer, e.g. "
            "tokenizer.add_special_tokens({'pad_token': '[PAD]'}), or tokenizer.pad_token = tokenizer.eos_token."
        )
    pad, eos = processing_class.pad_token_id, processing_class.eos_token_id
    if args.stop_token == "eos" and eos is None:
        raise ConfigError("stop_token is 'eos', but the tokenizer has no eos token; set stop_token_id.")
    return SpecialTokens(pad, eos, eos if args.stop_token == "eos" else args.stop_token_id)


def check_parts(
    processing_class: object, reward_processing_classes: object, data_collator: object, optimizers: object
) -> None:
    """Check the types of tokenizers, data collator and optimizers.

    Raises:
        ConfigError: a tokenizer is a name, a collator is not callable, or the optimizers are not a pair.
    """
    rewards = reward_processing_classes
    tokenizers = [("processing_class", processing_class)]
    tokenizers += [
        ("reward_processing_classes", tokenizer)
        for tokenizer in (rewards if isinstance(rewards, list | tuple) else [rewards])
    ]
    for argument, tokenizer in tokenizers:
        if isinstance(tokenizer, str | os.PathLike):
            name = shown(os.fspath(tokenizer))
            raise ConfigError(
                f"{argument} must be a tokenizer, not the name {name}; give AutoTokenizer.from_pretrained({name})."
            )
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "batch_decode")):
            raise ConfigError(f"{argument} must be a tokenizer, not {shown(tokenizer)}.")
    if data_collator is not None and not callable(data_collator):
        raise ConfigError(f"data_collator must be a function or None, not {shown(data_collator)}.")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise ConfigError(
            f"optimizers must be a pair, an optimizer or None and a scheduler or None, not {shown(optimizers)}."
        )


@dataclass(frozen=True)
class Context:
    """The maximum tokens of a sample, which every model of a run can read.

    Args:
        tokens: maximum tokens; `None` for no limit.
        role: role of the model that sets the limit.
    """

    tokens: int | None
    role: Role = Role.ACTOR


def context_of(
    configs: Mapping[Role, Sequence[PretrainedConfig]], reward_tokenizers: Sequence[PreTrainedTokenizerBase | None] = ()
) -> Context:
    """The context of a run: the smallest of the policy's and of every model with a table of positions.

    Args:
        configs: the Transformers config of every model of every role.
        reward_tokenizers: each reward model's separate tokenizer, or `None`. If a tokenizer truncates texts, its model
            sets no limit.
    """
    context = Context(most_positions(configs[Role.ACTOR][0]))
    for role, role_configs in configs.items():
        tokenizers = reward_tokenizers if role is Role.REWARD and reward_tokenizers else [None] * len(role_configs)
        for config, tokenizer in zip(role_configs, tokenizers, strict=True):
            table = table_positions(config)
            cuts = table is not None and (getattr(tokenizer, "model_max_length", None) or table + 1) <= table
            if table is not None and not cuts and (context.tokens is None or table < context.tokens):
                context = Context(table, role)
    return context


def check_context(configs: Mapping[Role, Sequence[PretrainedConfig]], longest: int) -> None:
    """Refuse models with a table of positions that is shorter than a sample.

    Args:
        configs: see `context_of`.
        longest: maximum tokens of a prompt with its response.

    Raises:
        ModelError: names the role and its positions.
    """
    context = context_of(configs)
    if context.role is not Role.ACTOR and context.tokens is not None and longest > context.tokens:
        raise ModelError(
            f"{context.role}: its model has {context.tokens} positions, and samples here have up to {longest} tokens "
            f"by the policy's tokenizer; shorten prompts or responses, or give a model with more positions."
        )


def check_positions(configs: Mapping[Role, Sequence[PretrainedConfig]], longest: int) -> None:
    """Refuse rotary embeddings whose factors depend on the longest sample of a forward, if a sample can be that long:
    the result of a sample would depend on the samples in its micro-batch.

    Args:
        configs: the Transformers config of every model of every role.
        longest: tokens of the longest prompt with the longest response.

    Raises:
        ModelError: names the role and the length above which the factors change.
    """
    for role, role_configs in configs.items():
        for config in role_configs:
            kind, limit = _position_limit(config.get_text_config())
            if limit is not None and longest > limit:
                raise ModelError(
                    f"{role}: its rotary embedding ({kind}) has other factors in a forward with a sample of more than "
                    f"{limit} tokens, and samples here have up to {longest}: the result of a sample would depend on "
                    f"its neighbours. Shorten prompts or response_length, or set another rope_type in its config."
                )


def _position_limit(config: PretrainedConfig) -> tuple[str, int | None]:
    """The type of a rotary embedding whose factors change with the longest sample of a forward, and the length up to
    which they do not; `None` for other embeddings."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]  # one per type of layer
    for rope in nested or [settings]:
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings")
            return kind, limit or getattr(config, "original_max_position_embeddings", None)
        if kind == "dynamic":
            return kind, getattr(config, "max_position_embeddings", None)
    return "", None


def check_stop_token(stop_token_id: int | None, vocabulary: int) -> None:
    """Check that the policy can generate the stop token.

    Raises:
        ConfigError: the stop token is not in the vocabulary.
    """
    if stop_token_id is not None and not 0 <= stop_token_id < vocabulary:
        raise ConfigError(f"stop_token_id {stop_token_id} is outside the model's vocabulary of {vocabulary}.")
