"""Checks the models, tokenizers, data collator and optimizers that the user passed, and how they fit together, before
anything is tokenized or loaded.

Settings are checked in `ppo_config`, datasets in `algorithms.prompts`, plans in `plan_checks`, reward functions in
`algorithms.rewards`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import logging

from ..algorithms.rewards import Rewards
from ..common.errors import shown
from ..engines.models import ModelError
from ..plan.dataflow import Role
from .ppo_config import ConfigError, PPOConfig


logger = logging.get_logger(__name__)

CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check_config(args: object) -> None:
    """Check the type of the training arguments.

    Raises:
        ConfigError: `args` is not a `PPOConfig` of this package.
    """
    if not isinstance(args, PPOConfig):
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise ConfigError(f"args must be a trl_realloc.PPOConfig, not a {kind}; import PPOConfig from trl_realloc.")


# --- models ---------------------------------------------------------------------------------------------------------


def check_models(model: Any, ref_model: Any, value_model: Any, reward_models: Sequence[Any]) -> None:
    """Refuse arguments that are not models, one object for two roles, models that no engine can run, and models without
    the head of their role. The config of a model by path is checked later, in `check_config_of`.

    Raises:
        ModelError: names the argument.
    """
    if model is None:
        raise ModelError("model is missing; give the policy, or its name or path.")
    if value_model is None:
        raise ModelError("value_model is missing; give a sequence classifier with one output, or its name or path.")
    models = [("model", model), ("ref_model", ref_model), ("value_model", value_model)]
    models += [("reward_model", reward) for reward in reward_models if isinstance(reward, str | nn.Module)]
    for position, (argument, candidate) in enumerate(models):
        for other, other_model in models[:position]:
            trained = {argument, other} & {"model", "value_model"}
            if candidate is other_model and isinstance(candidate, nn.Module) and trained:
                raise ModelError(
                    f"`{other}` and `{argument}` are the same object, so training one would change the other too; "
                    f"pass a copy{', or None for one to be made' if argument == 'ref_model' else ''}."
                )
        if candidate is not None:
            _check_model(candidate, argument)


def _check_model(model: Any, argument: str) -> None:
    if isinstance(model, str):
        if os.path.isdir(model):
            _check_weights(Path(model), argument)
        return
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ModelError(f"{argument} must be a Transformers model, or its name or path, not {shown(model)}.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"{argument} has parameters on the meta device, which hold no values; load it with its weights, on the CPU."
        )
    if getattr(model, "is_quantized", False):
        _refuse_quantized(argument)
    base = _base(model)
    if type(base).__module__.startswith("transformers_modules"):
        raise ModelError(_custom_code(argument, type(base).__name__))
    has_lm_head = base.get_output_embeddings() is not None if hasattr(base, "get_output_embeddings") else None
    if argument in ("model", "ref_model") and has_lm_head is False:
        raise ModelError(f"{argument} ({type(base).__name__}) has no language head; load an AutoModelForCausalLM.")
    if argument in ("value_model", "reward_model") and has_lm_head:
        raise ModelError(
            f"{argument} ({type(base).__name__}) is a language model; load it with "
            f"AutoModelForSequenceClassification.from_pretrained(…, num_labels=1)."
        )
    if argument in ("value_model", "reward_model"):
        labels = getattr(model.config, "num_labels", 1)
        if labels != 1:
            raise ModelError(
                f"{argument} has {labels} outputs (num_labels), but a value or a reward is one number; load it with "
                f"AutoModelForSequenceClassification.from_pretrained(…, num_labels=1)."
            )
        if argument == "value_model" and not hasattr(base, "score"):
            raise ModelError(
                f"value_model ({type(base).__name__}) has no `score` layer to read a value at every token with; use a "
                f"decoder's AutoModelForSequenceClassification."
            )


def _base(model: Any) -> Any:
    """The model under its adapters, if it has any."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refuse_quantized(argument: str) -> None:
    raise ModelError(
        f"{argument} is quantized: no engine trains, scores with or moves packed parameters, not even under an "
        f"adapter; load it without quantization_config (memory: LoRA over a bfloat16 model, or zero_stage 3)."
    )


def _custom_code(argument: str, name: str) -> str:
    return (
        f"{argument}: {name!r} needs code of its own (trust_remote_code), which the engines cannot load; use a model "
        f"whose family Transformers itself has."
    )


def _check_weights(folder: Path, argument: str) -> None:
    """Raises `ModelError` for a folder without weights, or with an incomplete safetensors file."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            indexed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{argument}: {index} is not whole; copy or download the model again.") from None
        missing = sorted(str(name) for name in indexed if not (folder / str(name)).is_file())
        if missing:
            raise ModelError(f"{argument}: {folder} lacks {missing[0]}; copy or download the model again.")
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares it with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{argument}: {file} is not whole ({error}); copy or download the model again.") from None
    if not files and not any(folder.glob("*.bin")) and (folder / "config.json").is_file():
        raise ModelError(f"{argument}: there are no weights (*.safetensors) in {folder}, only a config.")


def check_config_of(config: Any, model: Any, argument: str) -> None:
    """Check a model's config against its role.

    Args:
        model: the model, or its name or path.

    Raises:
        ModelError: the model is quantized, is an encoder-decoder, or has the head of another role.
    """
    if getattr(config, "quantization_config", None):
        _refuse_quantized(argument)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{argument} is an encoder-decoder ({config.model_type}); PPO here is for decoders.")
    if not isinstance(model, str):
        return
    kinds = [str(kind) for kind in getattr(config, "architectures", None) or ()]
    classifies = any(kind.endswith(CLASSIFIER) for kind in kinds)
    has_lm_head = any(kind.endswith(LANGUAGE_MODELS) for kind in kinds)
    if argument in ("model", "ref_model"):
        if classifies and not has_lm_head:
            raise ModelError(f"{argument}: {model!r} is a {kinds[0]}, which has no language head; give a causal LM.")
        return
    if classifies and config.num_labels != 1:
        raise ModelError(
            f"{argument}: {model!r} has {config.num_labels} outputs (num_labels), but a value or a reward is one "
            f"number."
        )
    if has_lm_head and not classifies and argument == "reward_model":
        raise ModelError(
            f"reward_model: {model!r} is a {kinds[0]}, so its score layer would be random; give a sequence classifier "
            f"with one output, or a reward function."
        )
    if has_lm_head and not classifies:
        logger.warning(f"value_model: {model!r} is a {kinds[0]}; the critic begins with a new, random score layer.")


def check_roles(
    configs: Mapping[Role, Sequence[Any]],
    model: Any,
    ref_model: Any,
    value_model: Any,
    reward_models: Sequence[Any],
    rewards: Rewards,
    processing_class: Any,
    stop_token_id: int | None,
) -> None:
    """Check every model's config against its role and the policy's vocabulary, and the stop token against the
    vocabulary.

    Args:
        configs: the Transformers config of every model of every role.
        reward_models: loaded or by name, without the reward functions.

    Raises:
        ConfigError: see `check_stop_token`.
        ModelError: see `check_config_of` and `check_vocabularies`.
    """
    vocabulary = _vocabulary(configs[Role.ACTOR][0])
    readers = [("value_model", configs[Role.CRITIC][0])]
    if ref_model is not None:
        readers.append(("ref_model", configs[Role.REFERENCE][0]))
        check_config_of(configs[Role.REFERENCE][0], ref_model, "ref_model")
    check_config_of(configs[Role.ACTOR][0], model, "model")
    check_config_of(configs[Role.CRITIC][0], value_model, "value_model")
    for config, reward_model, source in zip(configs[Role.REWARD], reward_models, rewards.models, strict=True):
        check_config_of(config, reward_model, "reward_model")
        if source.processing_class is None:
            readers.append(("reward_model", config))
    check_vocabularies(vocabulary, [(what, _vocabulary(config)) for what, config in readers], processing_class)
    check_stop_token(stop_token_id, vocabulary)


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def check_vocabularies(policy: int, others: Sequence[tuple[str, int]], processing_class: Any) -> None:
    """Refuse models that read the policy's token ids and have a smaller vocabulary.

    Args:
        policy: size of the policy's vocabulary.
        others: argument name and vocabulary size of the reference, the critic, and the reward models that have no
            tokenizer of their own.

    Raises:
        ModelError: a vocabulary is too small.
    """
    try:
        needed = min(policy, len(processing_class))
    except TypeError:  # a processor without a length
        needed = policy
    for argument, size in others:
        if size < needed:
            raise ModelError(
                f"{argument} has a vocabulary of {size}, but reads the policy's tokens, of which there are {needed}; "
                f"give one with the policy's vocabulary"
                f"{', or its own tokenizer in reward_processing_classes' if argument == 'reward_model' else ''}."
            )


def check_stop_token(stop_token_id: int | None, vocabulary: int) -> None:
    """Check that the policy can generate the stop token.

    Raises:
        ConfigError: the stop token is not in the vocabulary.
    """
    if stop_token_id is not None and not 0 <= stop_token_id < vocabulary:
        raise ConfigError(f"stop_token_id {stop_token_id} is outside the model's vocabulary of {vocabulary}.")


def check_adapters(args: PPOConfig, model: Any, peft_config: Any) -> None:
    """Check the adapter names of the training arguments.

    Raises:
        ConfigError: the model does not have an adapter of that name.
    """
    if isinstance(model, str):
        return
    known = set(getattr(model, "peft_config", None) or ()) | ({"default"} if peft_config is not None else set())
    for setting in ("model_adapter_name", "ref_adapter_name"):
        name = getattr(args, setting)
        if name is not None and name not in known:
            adapters = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ConfigError(f"{setting} is {name!r}, but the model has no such adapter; {adapters}.")


# --- tokenizers, data collator, optimizers --------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids of the policy's tokenizer.

    Args:
        eos: `None` of a tokenizer without one.
        stop: the token that ends a response; `None` where every response has `response_length` tokens.
    """

    pad: int
    eos: int | None
    stop: int | None


def special_tokens(args: PPOConfig, processing_class: Any) -> SpecialTokens:
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


def check_parts(processing_class: Any, reward_processing_classes: Any, data_collator: Any, optimizers: Any) -> None:
    """Check the types of tokenizers, data collator and optimizers.

    Raises:
        ConfigError: a tokenizer by name, a collator that is not callable, or optimizers that are not a pair.
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


def check_positions(configs: Mapping[Role, Sequence[Any]], longest: int) -> None:
    """Refuse rotary embeddings whose factors depend on the longest sample of a forward, if a sample can be that long.
    The result of a sample would depend on which samples share its micro-batch.

    Args:
        configs: the Transformers config of every model of every role.
        longest: tokens of the longest prompt with the longest response.

    Raises:
        ModelError: names the role and the length from which on the factors change.
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


def _position_limit(config: Any) -> tuple[str, int | None]:
    """The type of a rotary embedding whose factors change with the longest sample of a forward, and the longest sample
    for which they do not; `None` for other embeddings."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]  # one for each type of layer
    for rope in nested or [settings]:
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings")
            return kind, limit or getattr(config, "original_max_position_embeddings", None)
        if kind == "dynamic":
            return kind, getattr(config, "max_position_embeddings", None)
    return "", None
