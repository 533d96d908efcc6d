"""Checks that the numbers of samples, losses and gradients are finite before an optimizer step, with messages that name
the sample. Engines find gradients that are not finite by their norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .rollout import Ragged, Rollouts


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LARGEST = 1e15  # losses and whitening sum squares in float32, whose maximum is 3.4e38: leaves room for 1e8 tokens
QUOTED = 160  # most characters of a prompt or completion in a message


class NonFiniteError(ValueError):
    """A number is NaN, infinite or too large to train on. It has not reached the weights.

    Args:
        message: message that names the number.
        sample: its sample's position in the global batch; -1 if it belongs to no single sample.
    """

    def __init__(self, message: str, sample: int = -1) -> None:
        super().__init__(message)
        self.sample = sample


# Columns that calls add to samples, in the order in which they are added, with the words for messages.
CALL_COLUMNS = {
    "scores": "the score",
    "logprobs": "a log-probability of actor.generate",
    "ref_logprobs": "a log-probability of reference.forward",
    "values": "a value of critic.forward",
    "proximal_logprobs": "a log-probability of actor.forward",
}
# Columns that are computed from them.
DERIVED_COLUMNS = {
    "penalized_scores": "the score after missing_eos_penalty",
    "kl": "the KL penalty",
    "advantages": "an advantage",
    "returns": "a return",
}
# Columns of a loss that is defined by its derivatives (`trainer_loss`).
SLOPE_COLUMNS = {
    "logprob_grads": "the loss's derivative by a log-probability",
    "entropy_grads": "the loss's derivative by an entropy",
}


def is_bad(numbers: Tensor) -> Tensor:
    """Marks NaN, infinity, and magnitudes above `LARGEST`: bool of the same shape."""
    return ~(numbers.abs() <= LARGEST)


def is_infinite(scores: Tensor) -> Tensor:
    """Marks infinity and magnitudes above `LARGEST`, but not NaN, which stands for a missing score."""
    return scores.abs() > LARGEST


def problem_of(samples: Rollouts) -> NonFiniteError | None:
    """The error for the first number of a global batch that cannot be trained on, or `None`. The same on every rank,
    because every rank has the same samples.

    Args:
        samples: the global batch after `Algorithm.prepare`.
    """
    for name, description in {**CALL_COLUMNS, **SLOPE_COLUMNS, **DERIVED_COLUMNS}.items():
        if name not in samples:
            continue
        column = samples[name]
        numbers = column.values if isinstance(column, Ragged) else column
        bad_positions = is_bad(numbers).nonzero()
        if not len(bad_positions):
            continue
        first = int(bad_positions[0])
        row = int(column.row_of[first]) if isinstance(column, Ragged) else first
        sample = int(samples.tensor("index")[row])
        by = _scorers(samples, row) if name == "scores" else ""
        message = f"{description}{by} of sample {sample} of the batch is {float(numbers[first]):g}"
        if name in DERIVED_COLUMNS:
            message += (
                ", though its score, log-probabilities and values are finite: kl_coef, gamma, lam or "
                "missing_eos_penalty is not a finite number, or makes it overflow"
            )
        return NonFiniteError(message, sample)
    return None


def _scorers(samples: Rollouts, row: int) -> str:
    """The scorers that gave a row an unusable score, for a message; empty if the run has one scorer."""
    names = [name for name in samples if name.startswith("reward/") and bool(is_infinite(samples.tensor(name)[row]))]
    return f" by {', '.join(repr(name.removeprefix('reward/')) for name in names)}" if names else ""


def problem_of_rewards(rewards: Tensor, names: Sequence[str]) -> NonFiniteError | None:
    """The error for the first reward that cannot be trained on, or `None`.

    Args:
        rewards: (samples, functions), NaN if a function gives a sample no reward.
        names: names of the functions.
    """
    places = is_infinite(rewards).nonzero().tolist()
    if not places:
        return None
    sample, function = places[0]
    return NonFiniteError(
        f"reward function {names[function]!r} returned {float(rewards[sample, function]):g} for sample {sample} of the "
        f"batch; rewards must be finite, and at most {LARGEST:g}",
        sample,
    )


def with_text(error: NonFiniteError, samples: Rollouts, processing_class: PreTrainedTokenizerBase) -> NonFiniteError:
    """The same error with the prompt and the completion of its sample in the message."""
    rows = (samples.tensor("index") == error.sample).nonzero()
    if not len(rows):
        return error
    row = int(rows[0])
    ids = [samples.ragged(name)[row].tolist() for name in ("prompts", "responses")]
    prompt, completion = processing_class.batch_decode(ids, skip_special_tokens=True)
    return NonFiniteError(f"{error} ({quoted(prompt, completion)})", error.sample)


def quoted(prompt: object, completion: object) -> str:
    """A sample's prompt and completion for a message, cut to `QUOTED` characters each."""

    def cut(text: object) -> str:
        shown = repr(text)
        return shown if len(shown) <= QUOTED else shown[: QUOTED - 1] + "…"

    return f"prompt {cut(prompt)}, completion {cut(completion)}"


def check_rates(rates: Mapping[str, float | Sequence[Mapping[str, Any]]]) -> None:
    """Check the learning rates of an update.

    Args:
        rates: one rate, or the optimizer's parameter groups with their `lr`, by call.

    Raises:
        NonFiniteError: the learning rate of a call is NaN or infinite.
    """
    for call, rate in rates.items():
        group_rates = [rate] if isinstance(rate, (int, float)) else [group["lr"] for group in rate]
        for group_rate in group_rates:
            if group_rate is not None and not abs(float(group_rate)) < float("inf"):
                raise NonFiniteError(
                    f"the learning rate of {call} is {group_rate}; look at the scheduler and its settings"
                )


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if every element is finite. Reads each tensor once, without a copy, and waits for the device once."""
    float_tensors = [tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    return not float_tensors or bool(torch.nn.utils.get_total_norm(float_tensors, torch.inf).isfinite())


def guarded(loss: Tensor) -> Tensor:
    """The loss (0-dimensional), with NaN gradients if it is not finite. Otherwise they may be finite: the square of a
    large error overflows, its derivative does not. Does not wait for the device."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def refusal(samples: Rollouts, statistics: Mapping[str, Tensor], largest: Callable[[int], int]) -> NonFiniteError:
    """The error for a step whose gradients are not finite, with the sample that caused it. Collective over the mesh;
    the same on all ranks. Gradients are summed over the mesh, so every rank sees them in the global norm.

    Args:
        samples: this rank's share of the mini-batch.
        statistics: (n,) tensors by name on the CPU, from `run_training`. Names that end in `_loss` are losses.
        largest: returns the largest of the ranks' numbers.
    """
    sample = -1
    for name, column in statistics.items():
        rows = (~column.isfinite()).nonzero()
        if name.endswith("_loss") and len(rows):
            sample = int(samples.tensor("index")[int(rows[0])])
    sample = largest(sample)
    if sample < 0:
        return NonFiniteError("the gradients are not finite, though every sample's loss is")
    return NonFiniteError(f"the loss of sample {sample} of the batch is not finite", sample)
