"""Checks the user's models, and how they fit together, before weights are read.

Every model either works under any plan, or is refused with a message. `plan_checks` checks which models a plan can
split, `input_checks` the other arguments.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments
from transformers.utils import logging

from ...algorithms.rewards import Rewards
from ...common.errors import shown
from ...engines.device import is_accelerator
from ...engines.generation.vllm_support import why_not_served
from ...engines.model_changes import described, forward_changes
from ...engines.model_configs import ModelError
from ...engines.models import adapted_policy, generated_config
from ...engines.training.adapter_weights import why_not_merged
from ...engines.training.packed_attention import base_of
from ...plan.dataflow import Role
from .config_checks import ConfigError, by_transformers
from .input_checks import check_stop_token
from .obstacles import config_obstacles, model_obstacles


if TYPE_CHECKING:
    from peft import PeftConfig


logger = logging.get_logger(__name__)

CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# PEFT's adapters that cannot be merged into the weights, apart from prompt learning
UNMERGED = ("ADAPTION_PROMPT", "CARTRIDGE", "HIRA", "LILY", "LN_TUNING", "POLY", "SHADOW", "XLORA")


def check_models(model: object, ref_model: object, value_model: object, reward_models: Sequence[object]) -> None:
    """Refuse arguments that are not models, one object for two roles, models that no engine can run, and models without
    the head of their role. `check_config_of` later checks the config of a model passed by path.

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


def check_policy(model: object) -> None:
    """Refuse a policy that no engine can run. `check_config_of` later checks the config of a policy passed by path.

    Raises:
        ModelError: says why.
    """
    if model is None:
        raise ModelError("model is missing; give the policy, or its name or path.")
    _check_model(model, "model")


def _check_model(model: object, argument: str) -> None:
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
    for obstacle in model_obstacles(model, argument):
        raise ModelError(obstacle.refusal)
    base = base_of(model)
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
        check_read_in_parts(model, argument)
        if argument == "value_model" and not hasattr(base, "score"):
            raise ModelError(
                f"value_model ({type(base).__name__}) has no `score` layer to read a value at every token with; use a "
                f"decoder's AutoModelForSequenceClassification."
            )


def check_read_in_parts(model: PreTrainedModel, argument: str) -> None:
    """Check that no user change wraps both a classifier's backbone and its `score` layer, because the engines call them
    one after the other. TRL's PPO does the same, so a user class's forward is allowed there.

    Raises:
        ModelError: there is such a change.
    """
    around = [change for change in forward_changes(model) if not change.module and "forward" in change.what]
    if not around or not hasattr(base_of(model), "score"):
        return
    why = f"{argument} has {described(around)}, which is not called: its backbone and its `score` layer are"
    if argument != "reward_funcs" and all(change.of_class for change in around):
        logger.warning(f"{why}, as in TRL.")
        return
    raise ModelError(f"{why}; put it on one of these{'' if argument == 'value_model' else ', or give a function'}.")


def check_adapter_kind(peft_config: PeftConfig, argument: str) -> None:
    """Check that a PEFT config's adapters can be merged into the weights, for generation engines and copies of the
    role.

    Raises:
        ModelError: they cannot.
    """
    kind = str(getattr(peft_config, "peft_type", "")).rpartition(".")[2]
    if getattr(peft_config, "is_prompt_learning", False):
        why = "adds tokens or keys to every prompt, which packed samples and generation engines do not have"
    elif kind in UNMERGED or getattr(peft_config, "alora_invocation_tokens", None):
        why = "cannot be merged into the weights that generation engines get"
    else:
        return
    raise ModelError(f"{argument} has an adapter of the kind {kind}, which {why}; use LoRA.")


def check_trained_adapter(peft_config: PeftConfig, argument: str) -> None:
    """Check that the training engines can train a PEFT config's adapters.

    Raises:
        ModelError: see `check_adapter_kind`; or its parameters share memory.
    """
    check_adapter_kind(peft_config, argument)
    if getattr(peft_config, "layer_replication", None):
        what = "layer_replication adds layers that share the weights of others"
    elif _ties_matrices(peft_config):
        what = "with ensure_weight_tying the matrices of LoRA on the embedding and on the head share their memory"
    else:
        return
    raise ModelError(f"{argument}: {what}, and the engines move and train each parameter by itself; leave it out.")


def _ties_matrices(peft_config: PeftConfig) -> bool:
    """True if PEFT ties the LoRA matrices of the head to the embedding's. If `modules_to_save` has the embedding or the
    head, PEFT ties whole parameters instead, which are listed only once."""
    if not getattr(peft_config, "ensure_weight_tying", False):
        return False
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    targets = getattr(peft_config, "target_modules", None) or ()
    if isinstance(targets, str):
        targets = [name for name in EMBEDDING_LAYER_NAMES if re.fullmatch(targets, name)]
    saved, adapted = (
        any(name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in names)
        for names in (getattr(peft_config, "modules_to_save", None) or (), targets)
    )
    return adapted and not saved


def check_generated(
    args: TrainingArguments, model: PreTrainedModel | str, config: PretrainedConfig, peft_config: PeftConfig | None
) -> None:
    """Check that vLLM engines can generate with the policy with merged adapters.

    Args:
        args: training arguments of any trainer.
        model, config, peft_config: see `adapted_policy`.

    Raises:
        ConfigError: they cannot; gives the reason.
    """
    adapted = adapted_policy(model, config, peft_config)
    if adapted is not None and (problem := why_adapted_not_generated(adapted, config, args.device)) is not None:
        raise ConfigError(f"vLLM cannot generate with these adapters: {problem}; {by_transformers(args)}.")


def why_adapted_not_generated(adapted: PreTrainedModel, config: PretrainedConfig, device: torch.device) -> str | None:
    """Why vLLM engines on this kind of device cannot generate with a policy with adapters; `None` if they can.

    Args:
        adapted: the policy; may be on the meta device.
        config: its Transformers config.
    """
    generated = generated_config(config, adapted)
    if (problem := why_not_merged(adapted)) is not None or generated is config:  # already checked without adapters
        return problem
    return why_not_served(generated, on_cpu=not is_accelerator(device))


def why_not_this_model(model: PreTrainedModel | str) -> str | None:
    """Why vLLM computes something else than a loaded model: its class is not from Transformers, or the user has changed
    the object (`model_changes`). `None` if there is no reason, and for a name or path."""
    if isinstance(model, str) or not hasattr(model, "config"):
        return None
    base = base_of(model)
    kind = type(base)
    if not kind.__module__.startswith("transformers."):
        return (
            f"vLLM would generate by its own implementation of {base.config.model_type!r}, not by the class "
            f"{kind.__name__} of {kind.__module__}"
        )
    changes = forward_changes(model)
    if not changes:
        return None
    return f"vLLM generates by a model's config and weights alone, and the policy has {described(changes)}"


def _custom_code(argument: str, name: str) -> str:
    return (
        f"{argument}: {name!r} needs custom code (trust_remote_code), which the engines cannot load; use a model "
        f"whose family Transformers itself has."
    )


def _check_weights(folder: Path, argument: str) -> None:
    """Raise `ModelError` for a folder without weights, or with an incomplete safetensors file."""
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
            with safe_open(file, framework="pt"):  # compares the header with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{argument}: {file} is not whole ({error}); copy or download the model again.") from None
    if not files and not any(folder.glob("*.bin")) and (folder / "config.json").is_file():
        raise ModelError(f"{argument}: there are no weights (*.safetensors) in {folder}, only a config.")


def check_config_of(config: PretrainedConfig, model: PreTrainedModel | str, argument: str) -> None:
    """Check a model's config against its role.

    Args:
        model: the model, or its name or path.

    Raises:
        ModelError: the model is quantized, is an encoder-decoder, or has the head of another role.
    """
    for obstacle in config_obstacles(config, argument):
        raise ModelError(obstacle.refusal)
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
    if has_lm_head and not classifies and argument in ("reward_model", "reward_funcs"):
        raise ModelError(
            f"{argument}: {model!r} is a {kinds[0]}, so its score layer would be random; give a sequence classifier "
            f"with one output, or a reward function."
        )
    if has_lm_head and not classifies:
        logger.warning(f"value_model: {model!r} is a {kinds[0]}; the critic begins with a new, random score layer.")


def check_roles(
    configs: Mapping[Role, Sequence[PretrainedConfig]],
    model: object,
    ref_model: object,
    value_model: object,
    reward_models: Sequence[object],
    rewards: Rewards,
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
    check_vocabularies(vocabulary, [(what, _vocabulary(config)) for what, config in readers])
    check_stop_token(stop_token_id, vocabulary)


def _vocabulary(config: PretrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def check_vocabularies(policy: int, others: Sequence[tuple[str, int]]) -> None:
    """Refuse models that read the policy's token ids and have a smaller vocabulary. The policy can sample every id of
    its vocabulary, even ids without a token in the tokenizer.

    Args:
        policy: size of the policy's vocabulary.
        others: argument name and vocabulary size of the reference, the critic, and the reward models without a separate
            tokenizer.

    Raises:
        ModelError: a vocabulary is too small.
    """
    for argument, size in others:
        if size < policy:
            raise ModelError(
                f"{argument} has a vocabulary of {size}, but reads the policy's tokens, of which there are {policy}; "
                f"load it and call {argument}.resize_token_embeddings({policy}), or give one with the policy's "
                f"vocabulary"
                f"{', or its own tokenizer in reward_processing_classes' if argument == 'reward_model' else ''}."
            )


def check_adapter_kinds(model: PreTrainedModel | str, peft_config: PeftConfig | None) -> None:
    """Check the kinds of the policy's adapters, and of adapters to be added.

    Raises:
        ModelError: see `check_trained_adapter`.
    """
    if peft_config is not None:
        check_trained_adapter(peft_config, "peft_config")
        if getattr(peft_config, "init_lora_weights", None) == "loftq" and not torch.cuda.is_available():
            raise ModelError(
                "peft_config: PEFT computes init_lora_weights 'loftq' by CUDA, which is not available; use another one."
            )
    if not isinstance(model, str):
        for config in dict(getattr(model, "peft_config", None) or {}).values():
            check_trained_adapter(config, "model")


def check_adapters(args: TrainingArguments, model: PreTrainedModel | str, peft_config: PeftConfig | None) -> None:
    """Check the kinds of adapters, and the adapter names of the training arguments.

    Raises:
        ConfigError: the model does not have an adapter of that name.
        ModelError: see `check_adapter_kind`.
    """
    check_adapter_kinds(model, peft_config)
    if isinstance(model, str):
        return
    adapter_names = set(getattr(model, "peft_config", None) or ()) | ({"default"} if peft_config is not None else set())
    for setting in ("model_adapter_name", "ref_adapter_name"):
        name = getattr(args, setting)
        if name is not None and name not in adapter_names:
            adapters = f"it has {', '.join(sorted(adapter_names))}" if adapter_names else "it has none"
            raise ConfigError(f"{setting} is {name!r}, but the model has no such adapter; {adapters}.")
