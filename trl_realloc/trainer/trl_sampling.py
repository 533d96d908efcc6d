"""Reads from a TRL trainer how completions are drawn."""

from __future__ import annotations

from typing import Any

from ..common.errors import shown
from ..engines.base import Sampling
from ..engines.generation.vllm_support import MIN_TEMPERATURE
from .config_checks import ConfigError


def read_sampling(trainer: Any) -> Sampling:
    """How a trainer's completions are drawn, as TRL's vLLM engine would draw them.

    Raises:
        ConfigError: the engines cannot draw so.
    """
    args = trainer.args
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    problems = [
        f"{name} is {shown(value)}, and the engines draw from the whole vocabulary; leave it out."
        for name, usual in neutral.items()
        if (value := getattr(args, name, None)) not in (None, usual)
    ]
    for name in ("generation_kwargs", "vllm_structured_outputs_regex"):
        if getattr(args, name, None):
            problems.append(f"{name} is {shown(getattr(args, name))}, which the engines do not follow; leave it out.")
    if args.temperature < MIN_TEMPERATURE:
        problems.append(f"temperature {args.temperature:g} is below the {MIN_TEMPERATURE:g} that vLLM samples with.")
    stops = stop_token_ids(trainer)
    if problems:
        raise ConfigError("\n".join(problems))
    return Sampling(int(args.max_completion_length), float(args.temperature), stops[0] if stops else None)


def stop_token_ids(trainer: Any) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's eos token, and those of the model's generation config."""
    known = getattr(trainer, "eos_token_ids", None)  # of newer releases of TRL
    if known is None:
        config = getattr(trainer.accelerator.unwrap_model(trainer.model), "generation_config", None)
        of_model = getattr(config, "eos_token_id", None)
        known = [of_model] if isinstance(of_model, int) else list(of_model or ())
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        known = [tokenizer.eos_token_id, *known]
    return tuple(dict.fromkeys(int(token) for token in known if token is not None))
