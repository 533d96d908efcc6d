"""Reads the sampling of completions from TRL's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ...engines.generation.sampling_checks import (
    argument_names,
    transformers_problems,
    vllm_problems,
    with_generation_kwargs,
)
from ...engines.requests import Sampling
from ..checks.config_checks import ConfigError


# arguments of Transformers' `generate` that do not change the sampled tokens
_WITHOUT_EFFECT = {"pad_token_id", "bos_token_id", "use_cache", "cache_implementation", "return_dict_in_generate"}
_INSTEAD = {
    "max_new_tokens": "set max_completion_length",
    "min_new_tokens": "leave it out, or generate by vLLM",
    "stop_strings": "give vLLM's stop, a list of texts",
    "suppress_tokens": "give vLLM's logit_bias, a mapping of token ids to -100",
    "bad_words_ids": "give vLLM's bad_words, a list of texts",
}


def uncorrected_loss(args: TrainingArguments) -> str:
    """Why the loss of TRL's GRPO cannot be corrected with vLLM's log-probabilities; an empty text if it can. TRL's own
    check, in its constructor, does not see that vLLM generates."""
    mode = getattr(args, "vllm_importance_sampling_mode", None)
    if getattr(args, "loss_type", None) != "vespo" or mode in ("token_truncate", "token_mask"):
        return ""
    return f"loss_type 'vespo' needs the vllm_importance_sampling_mode 'token_truncate' or 'token_mask', not {mode!r}."


def sampling_of(args: TrainingArguments, stops: tuple[int, ...], vocabulary: int, *, by_vllm: bool = True) -> Sampling:
    """The sampling parameters of TRL's settings.

    Args:
        stops: ids of the tokens that end a completion.
        vocabulary: size of the policy's vocabulary.
        by_vllm: whether vLLM engines generate; otherwise Transformers does.

    Raises:
        ConfigError: the engines do not support a setting.
    """
    sampling = Sampling(
        int(args.max_completion_length),
        float(args.temperature),
        stops,
        top_p=float(getattr(args, "top_p", 1.0)),
        top_k=max(getattr(args, "top_k", 0) or 0, 0),  # -1 keeps all too
        min_p=getattr(args, "min_p", None) or 0.0,
        repetition_penalty=float(getattr(args, "repetition_penalty", 1.0)),
        regex=getattr(args, "vllm_structured_outputs_regex", None),
    )
    arguments = dict(getattr(args, "generation_kwargs", None) or {})
    if arguments.get("do_sample") is True:  # of Transformers' `generate`; the engines always draw
        del arguments["do_sample"]
    if (beams := arguments.pop("num_beams", 1)) != 1:
        raise ConfigError(
            f"generation_kwargs: num_beams {beams} is beam search, whose responses are not drawn from the policy; "
            f"leave it out."
        )
    for name in _WITHOUT_EFFECT & arguments.keys():
        del arguments[name]
    if "eos_token_id" in arguments:  # of Transformers' `generate`, where it replaces the model's
        ends = arguments.pop("eos_token_id")
        sampling = replace(sampling, stop_token_ids=tuple(ends) if isinstance(ends, list | tuple) else (ends,))
    if "min_new_tokens" in arguments and by_vllm:
        arguments["min_tokens"] = arguments.pop("min_new_tokens")
    if problems := list(_of_transformers(arguments)):
        raise ConfigError("\n".join(problems))
    if arguments.pop("ignore_eos", False):
        sampling = replace(sampling, stop_token_ids=())
    if "stop_token_ids" in arguments:  # TRL's engine ends at these and at the model's own
        arguments["stop_token_ids"] = (*sampling.stop_token_ids, *arguments["stop_token_ids"])
    sampling = with_generation_kwargs(sampling, arguments)
    problems = (
        vllm_problems(sampling, vocabulary, has_tokenizer=True)
        if by_vllm
        else transformers_problems(sampling, vocabulary)
    )
    if problems:
        raise ConfigError("\n".join(problems))
    return sampling


def _of_transformers(arguments: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each argument that Transformers' `generate` has and vLLM does not."""
    of_vllm, of_transformers = argument_names(), vars(GenerationConfig())
    for name in arguments:
        if name in of_transformers and name not in of_vllm and of_vllm:
            instead = _INSTEAD.get(name, "leave it out")
            yield (
                f"generation_kwargs: {name} is of Transformers' generate, which no engine of a plan calls, for each "
                f"draws its tokens itself; {instead}."
            )


def generation_config(model: PreTrainedModel) -> Any:
    """The generation config of a model, loaded or by name; `None` if it has none."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    for file in ({}, {"config_file_name": "config.json", "_from_model_config": True}):  # as Transformers looks for it
        with contextlib.suppress(OSError):
            return GenerationConfig.from_pretrained(model, **file)
    return None


def tokenizer_of(processing_class: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A processor's tokenizer, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's eos token, and those of the model's generation config.

    Args:
        model: loaded model, or a name.
    """
    of_model = getattr(generation_config(model), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *([of_model] if isinstance(of_model, int) else list(of_model or ()))]
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))
