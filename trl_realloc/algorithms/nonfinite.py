"""Refusing numbers that are not finite before an optimizer steps, and naming the sample that they come from.

Owns the checks of samples and the texts of the refusals. The engines look at the gradients
(`engines/training/nonfinite_guard`), and `rewards` at what a reward returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .rollout import Ragged, Rollouts


LARGEST = 1e15  # losses and whitening sum squares in float32, which ends at 3.4e38: this leaves room for 1e8 tokens
QUOTED = 160  # most characters of a text in a message


class NonFiniteError(ValueError):
    """Something is NaN, infinite or too large to be trained on. Nothing of it has reached the weights.

    Args:
        message: what is not finite.
        sample: the place in the global batch of the sample to blame, -1 where it is none in particular.
    """

    def __init__(self, message: str, sample: int = -1) -> None:
        super().__init__(message)
        self.sample = sample


# What a sample carries into the trainings, in the order in which it is made, and who makes it.
MADE_BY = {
    "scores": "the score",
    "logprobs": "a log-probability of actor.generate",
    "ref_logprobs": "a log-probability of reference.forward",
    "values": "a value of critic.forward",
}
DERIVED = {
    "penalized_scores": "the score after missing_eos_penalty",
    "kl": "the KL penalty",
    "advantages": "an advantage",
    "returns": "a return",
}


def is_bad(numbers: Tensor) -> Tensor:
    """Where numbers are NaN, infinite, or larger than `LARGEST`; bool of the same shape."""
    return ~(numbers.abs() <= LARGEST)


def problem_of(samples: Rollouts) -> NonFiniteError | None:
    """The first number of a prepared global batch that nothing may be trained on, or `None`. The same on every rank,
    because every rank has the same samples.

    Args:
        samples: after `ppo.prepare`.
    """
    for name, what in {**MADE_BY, **DERIVED}.items():
        if name not in samples:
            continue
        column = samples[name]
        numbers = column.values if isinstance(column, Ragged) else column
        places = is_bad(numbers).nonzero()
        if not len(places):
            continue
        first = int(places[0])
        row = int(column.row_of[first]) if isinstance(column, Ragged) else first
        sample = int(samples.tensor("index")[row])
        message = f"{what} of sample {sample} of the batch is {float(numbers[first]):g}"
        if name in DERIVED:
            message += (
                ", though its score, log-probabilities and values are finite: kl_coef, gamma, lam or "
                "missing_eos_penalty is not a finite number, or makes it overflow"
            )
        return NonFiniteError(message, sample)
    return None


def with_text(error: NonFiniteError, samples: Rollouts, processing_class: Any) -> NonFiniteError:
    """The same error, its message with the prompt and the completion of the sample to blame."""
    rows = (samples.tensor("index") == error.sample).nonzero()
    if not len(rows):
        return error
    row = int(rows[0])
    ids = [samples.ragged(name)[row].tolist() for name in ("prompts", "responses")]
    prompt, completion = processing_class.batch_decode(ids, skip_special_tokens=True)
    return NonFiniteError(f"{error} ({quoted(prompt, completion)})", error.sample)


def quoted(prompt: Any, completion: Any) -> str:
    """A sample's texts for a message, each cut to `QUOTED` characters."""

    def cut(text: Any) -> str:
        shown = repr(text)
        return shown if len(shown) <= QUOTED else shown[: QUOTED - 1] + "…"

    return f"prompt {cut(prompt)}, completion {cut(completion)}"


def check_rates(rates: Mapping[str, float | Sequence[Mapping[str, Any]]]) -> None:
    """Raises:
    NonFiniteError: the learning rate of a call is NaN or infinite.
    """
    for call, rate in rates.items():
        every = [rate] if isinstance(rate, (int, float)) else [group["lr"] for group in rate]
        for one in every:
            if one is not None and not abs(float(one)) < float("inf"):
                raise NonFiniteError(f"the learning rate of {call} is {one}; look at the scheduler and its settings")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every element is finite; reads each tensor once, without a copy, and waits for the device once."""
    whole = [tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    return not whole or bool(torch.nn.utils.get_total_norm(whole, torch.inf).isfinite())
