"""The Transformers configs of the roles' models: of a loaded model, or of one by name or path, without its weights.

The models themselves are made in `models`.
"""

from __future__ import annotations

import copy
import os

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .training.meta_model import has_own_head, is_untied, untie


# keys of Transformers configs that give the longest sample, other than by an `attribute_map`
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
# families that count positions from the pad token's id + 1
_FROM_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


class ModelError(ValueError):
    """A model that cannot be used for its role. The message gives the argument and the remedy."""


class CustomCodeError(ModelError):
    """The model needs code from its repository."""


def read_config(model: PreTrainedModel | str, argument: str) -> PretrainedConfig:
    """A model's Transformers config, without loading weights. Its `dtype` is that of the loaded parameters, or the
    checkpoint's. Its `tie_word_embeddings` is corrected to what the parameters show.

    Raises:
        ModelError: a name or path under which there is no model.
    """
    if not isinstance(model, str):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), model.config.dtype)
        return untied(_in_dtype(model.config, dtype)) if is_untied(model) else _in_dtype(model.config, dtype)
    _check_form(model, argument)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if has_own_head(model, config):
            untie(config)
        return config
    except Exception as error:  # a damaged config may make its class raise anything
        if "trust_remote_code" in str(error):
            raise CustomCodeError(
                f"{argument}: {model!r} has custom code in its repository (trust_remote_code), which the engines "
                f"cannot load; use a model whose family Transformers itself has."
            ) from None
        looks_local = os.sep in model and (model.startswith((".", os.sep, "~")) or model.count(os.sep) > 1)
        what = (
            "there is no such folder"
            if looks_local and not os.path.isdir(model)
            else (str(error) or type(error).__name__).splitlines()[0]
        )
        raise ModelError(f"{argument}: cannot read a model from {model!r}: {what}") from None


def most_positions(config: PretrainedConfig) -> int | None:
    """Most tokens of a sample; `None` if the config does not give it."""
    config = config.get_text_config()
    positions = next((n for key in _POSITIONS if (n := getattr(config, key, None)) is not None), None)
    if positions is None or config.model_type not in _FROM_PADDING:
        return None if positions is None else int(positions)
    return int(positions) - 1 - (config.pad_token_id or 0)


def table_positions(config: PretrainedConfig) -> int | None:
    """Most tokens of a sample in a model with a table of positions, such as learned embeddings; a longer sample fails.
    `None` for a model that computes its positions (rotary, relative) or has no limit."""
    config = config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    is_relative = getattr(config, "position_biased_input", True) is False  # DeBERTa-v3
    return None if rotary or is_relative else most_positions(config)


def _check_form(model: str, argument: str) -> None:
    """Raises `ModelError` for a file of packed weights, and for a folder with an adapter instead of a model or, if the
    role is trained, beside a model."""
    if model.endswith(".gguf"):
        raise ModelError(f"{argument}: {model!r} has packed weights (GGUF); give the original model.")
    trains = argument in ("model", "value_model")
    is_whole = os.path.isfile(os.path.join(model, "config.json")) and not trains
    if os.path.isfile(os.path.join(model, "adapter_config.json")) and not is_whole:
        remedy = (
            f"PeftModel.from_pretrained(base, {model!r}, is_trainable=True) or the merged model"
            if trains
            else f"PeftModel.from_pretrained(base, {model!r}).merge_and_unload()"
        )
        raise ModelError(
            f"{argument}: {model!r} has an adapter (adapter_config.json), not a whole model; load its base model, and "
            f"pass {remedy}."
        )


def trained_config(
    config: PretrainedConfig, model: PreTrainedModel | str, dtype: torch.dtype = torch.float32
) -> PretrainedConfig:
    """The config of a model that is trained, with the dtype of its parameters in this run.

    Args:
        dtype: dtype in which a model given by path is loaded (`load_policy`).
    """
    return loaded_config(config, model, dtype)


def loaded_config(
    config: PretrainedConfig,
    model: PreTrainedModel | str,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
) -> PretrainedConfig:
    """The config of a model as it is loaded; a copy if it differs from the checkpoint's.

    Args:
        dtype, attention: `dtype` and `attn_implementation` of `from_pretrained` for a model given by name; `None` for
            the checkpoint's.
    """
    if not isinstance(model, str):
        return config
    config = config if dtype is None else _in_dtype(config, dtype)
    if attention is not None:
        config = copy.deepcopy(config)
        config._attn_implementation = attention
    return config


def untied(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a config in which head and embedding are two parameters."""
    config = copy.deepcopy(config)
    untie(config)
    return config


def _in_dtype(config: PretrainedConfig, dtype: torch.dtype) -> PretrainedConfig:
    if config.dtype == dtype:
        return config
    config = copy.copy(config)
    config.dtype = dtype
    return config
