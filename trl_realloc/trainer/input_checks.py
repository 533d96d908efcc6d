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
    """Raises:
    ConfigError: `args` is not a `PPOConfig` of this package.
    """
    if not isinstance(args, PPOConfig):
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise ConfigError(f"args must be a trl_realloc.PPOConfig, not a {kind}; import PPOConfig from trl_realloc.")


# --- models ---------------------------------------------------------------------------------------------------------


def check_models(model: Any, ref_model: Any, value_model: Any, reward_models: Sequence[Any]) -> None:
    """Refuse models that are none, that are one object for two roles, that no engine can run, or that have not the head
    of their role. Of models by path the config is held against the role later (`check_config_of`).

    Raises:
        ModelError: naming the argument.
    """
    if model is None:
        raise ModelError("model is missing; give the policy, or its name or path.")
    if value_model is None:
        raise ModelError("value_model is missing; give a sequence classifier with one output, or its name or path.")
    given = [("model", model), ("ref_model", ref_model), ("value_model", value_model)]
    given += [("reward_model", reward) for reward in reward_models if isinstance(reward, str | nn.Module)]
    for at, (argument, one) in enumerate(given):
        for other, same in given[:at]:
            trained = {argument, other} & {"model", "value_model"}
            if one is same and isinstance(one, nn.Module) and trained:
                raise ModelError(
                    f"`{other}` and `{argument}` are the same object, so training one would change the other too; "
                    f"pass a copy{', or None for one to be made' if argument == 'ref_model' else ''}."
                )
        if one is not None:
            _check_model(one, argument)


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
        raise ModelError(_own_code(argument, type(base).__name__))
    speaks = base.get_output_embeddings() is not None if hasattr(base, "get_output_embeddings") else None
    if argument in ("model", "ref_model") and speaks is False:
        raise ModelError(f"{argument} ({type(base).__name__}) has no language head; load an AutoModelForCausalLM.")
    if argument in ("value_model", "reward_model") and speaks:
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


def _own_code(argument: str, name: str) -> str:
    return (
        f"{argument}: {name!r} needs code of its own (trust_remote_code), which the engines cannot load; use a model "
        f"whose family Transformers itself has."
    )


def _check_weights(folder: Path, argument: str) -> None:
    """Raises `ModelError` for a folder without weights, or with a safetensors file that is not whole."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{argument}: {index} is not whole; copy or download the model again.") from None
        missing = sorted(str(name) for name in named if not (folder / str(name)).is_file())
        if missing:
            raise ModelError(f"{argument}: {folder} lacks {missing[0]}; copy or download the model again.")
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # reads the header, and holds the file's size against it
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{argument}: {file} is not whole ({error}); copy or download the model again.") from None
    if not files and not any(folder.glob("*.bin")) and (folder / "config.json").is_file():
        raise ModelError(f"{argument}: there are no weights (*.safetensors) in {folder}, only a config.")


def check_config_of(config: Any, given: Any, argument: str) -> None:
    """Hold a model's config against its role.

    Args:
        given: the model, or its name or path.

    Raises:
        ModelError: quantized, an encoder-decoder, or a head of another kind than the role's.
    """
    if getattr(config, "quantization_config", None):
        _refuse_quantized(argument)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{argument} is an encoder-decoder ({config.model_type}); PPO here is for decoders.")
    if not isinstance(given, str):
        return
    kinds = [str(kind) for kind in getattr(config, "architectures", None) or ()]
    classifies = any(kind.endswith(CLASSIFIER) for kind in kinds)
    speaks = any(kind.endswith(LANGUAGE_MODELS) for kind in kinds)
    if argument in ("model", "ref_model"):
        if classifies and not speaks:
            raise ModelError(f"{argument}: {given!r} is a {kinds[0]}, which has no language head; give a causal LM.")
        return
    if classifies and config.num_labels != 1:
        raise ModelError(
            f"{argument}: {given!r} has {config.num_labels} outputs (num_labels), but a value or a reward is one "
            f"number."
        )
    if speaks and not classifies and argument == "reward_model":
        raise ModelError(
            f"reward_model: {given!r} is a {kinds[0]}, so its score layer would be random; give a sequence classifier "
            f"with one output, or a reward function."
        )
    if speaks and not classifies:
        logger.warning(f"value_model: {given!r} is a {kinds[0]}; the critic begins with a new, random score layer.")


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
    """Hold every model's config against its role and against the policy's vocabulary.

    Args:
        reward_models: loaded, or by name; without the reward functions.

    Raises:
        ConfigError, ModelError
    """
    vocabulary = _vocabulary(configs[Role.ACTOR][0])
    readers = [("value_model", configs[Role.CRITIC][0])]
    if ref_model is not None:
        readers.append(("ref_model", configs[Role.REFERENCE][0]))
        check_config_of(configs[Role.REFERENCE][0], ref_model, "ref_model")
    check_config_of(configs[Role.ACTOR][0], model, "model")
    check_config_of(configs[Role.CRITIC][0], value_model, "value_model")
    for config, given, source in zip(configs[Role.REWARD], reward_models, rewards.models, strict=True):
        check_config_of(config, given, "reward_model")
        if source.processing_class is None:
            readers.append(("reward_model", config))
    check_vocabularies(vocabulary, [(what, _vocabulary(config)) for what, config in readers], processing_class)
    check_stop_token(stop_token_id, vocabulary)


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def check_vocabularies(policy: int, others: Sequence[tuple[str, int]], processing_class: Any) -> None:
    """Refuse models that read the policy's tokens and do not know all of them.

    Args:
        policy: the size of the policy's vocabulary.
        others: argument and vocabulary's size of the reference, the critic, and the reward models that read the
            policy's own tokens.

    Raises:
        ModelError
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
    """Raises:
    ConfigError: a stop token that the policy cannot draw.
    """
    if stop_token_id is not None and not 0 <= stop_token_id < vocabulary:
        raise ConfigError(f"stop_token_id {stop_token_id} is outside the model's vocabulary of {vocabulary}.")


def check_adapters(args: PPOConfig, model: Any, peft_config: Any) -> None:
    """Raises:
    ConfigError: an adapter is named that the model does not have.
    """
    if isinstance(model, str):
        return
    known = set(getattr(model, "peft_config", None) or ()) | ({"default"} if peft_config is not None else set())
    for setting in ("model_adapter_name", "ref_adapter_name"):
        name = getattr(args, setting)
        if name is not None and name not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ConfigError(f"{setting} is {name!r}, but the model has no such adapter; {there}.")


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
    """Refuse tokenizers given by name, a collator that cannot be called, and optimizers that are no pair.

    Raises:
        ConfigError
    """
    rewards = reward_processing_classes
    tokenizers = [("processing_class", processing_class)]
    tokenizers += [
        ("reward_processing_classes", one) for one in (rewards if isinstance(rewards, list | tuple) else [rewards])
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
    """Refuse rotary embeddings whose factors depend on the longest sample of a forward, and so on how samples are dealt
    to devices and micro-batches, where a sample is long enough for that.

    Args:
        configs: Transformers configs of every role's models.
        longest: tokens of the longest prompt with the longest response.

    Raises:
        ModelError
    """
    for role, ours in configs.items():
        for config in ours:
            kind, most = _position_limit(config.get_text_config())
            if most is not None and longest > most:
                raise ModelError(
                    f"{role}: its rotary embedding ({kind}) has other factors in a forward with a sample of more than "
                    f"{most} tokens, and samples here have up to {longest}: what a sample is given would depend on its "
                    f"neighbours. Shorten prompts or response_length, or set another rope_type in the model's config."
                )


def _position_limit(config: Any) -> tuple[str, int | None]:
    """The kind of a rotary embedding that changes with the longest sample of a forward, and from which length on."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in given.values() if isinstance(value, Mapping)]  # by the kind of layer
    for rope in nested or [given]:
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if kind == "longrope":
            own = rope.get("original_max_position_embeddings")
            return kind, own or getattr(config, "original_max_position_embeddings", None)
        if kind == "dynamic":
            return kind, getattr(config, "max_position_embeddings", None)
    return "", None
