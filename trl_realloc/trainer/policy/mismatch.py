"""`EngineMismatch`: the difference between a vLLM engine's and the trainer's log-probabilities of completions, if a
plan's engines train GRPO or RLOO.

TRL logs it if GRPO's loss is corrected, otherwise this file does. The consequences are in `run.mismatch_gate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...algorithms.corrections import LARGEST_LOG_RATIO, MISMATCH, mult_prob_errors
from ..run.mismatch_gate import MismatchGate
from .single_candidates import ENGINE, SAMPLED, engine_logprobs, padded


if TYPE_CHECKING:
    from transformers import Trainer


_SUMS = 6  # number of leading `_figures` that are sums


class EngineMismatch:
    """Measures, logs and judges the mismatch of each training generation.

    It is measured before training on a generation if the policy's log-probabilities are known by then, otherwise in the
    losses of the generation's first optimizer step.

    Args:
        trainer: a `PlannedPolicyTrainer` whose run has a plan.
        engine_only: settings that only the engine follows (`sampling_checks.engine_only_settings`). With any of them
            nothing is measured, and TRL gets no engine log-probabilities.

    Attributes:
        corrects: whether RLOO's loss is to be corrected, because the mismatch exceeded its limit and the settings leave
            the choice open. Saved in checkpoints.
    """

    def __init__(self, trainer: Trainer, engine_only: Sequence[str] = ()) -> None:
        self._trainer, self._engine_only, self.corrects = trainer, engine_only, False
        self._gate = MismatchGate(trainer.args, reports=trainer.accelerator.is_main_process)
        self._known: Tensor | None = None  # policy log-probabilities of the latest generation
        self._generation = -1  # number of updates before the latest generation
        self._inputs: Mapping[str, Any] | None = None  # inputs of the micro-batch whose loss measures the mismatch
        self._by_losses: list[Tensor] = []

    def begin_generation(self) -> None:
        self._known = None

    def of_generation(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """TRL's tensors of a generation with the engine's log-probabilities added, if it is vLLM. All ranks together.

        Raises:
            MismatchError: the mismatch exceeds its limit (`MismatchGate`).
        """
        trainer, generation, mask = self._trainer, self._trainer.vllm_generation, tensors["completion_mask"]
        if trainer.plan["actor.generate"].engine != "vllm":
            is_users = not generation.logprobs or getattr(trainer, "rollout_func", None) is not None
            # as where TRL generates by Transformers; the user's own are kept
            return tensors if is_users else {name: value for name, value in tensors.items() if name != SAMPLED}
        sampling_logprobs = generation.drawn(mask.sum(1).tolist())
        if self._engine_only and SAMPLED in tensors:
            tensors = {**tensors, ENGINE: tensors[SAMPLED]}
            del tensors[SAMPLED]
        elif SAMPLED not in tensors:
            tensors = {**tensors, ENGINE: padded(sampling_logprobs, mask)}
        if self._engine_only or not trainer.model.training:
            return tensors
        self._generation = trainer.state.global_step
        if self._known is not None:
            # unknown ages are NaN, and such tokens are not judged
            ages = None if generation.ages is None else padded(generation.ages if len(sampling_logprobs) else [], mask)
            self._judge(_figures(tensors, self._known, ages), is_logged="importance_sampling_ratio" in tensors)
        return tensors

    def corrected(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """TRL's tensors of an RLOO generation, with the log-probabilities of the policies that sampled the completions
        as those of the policy before the update, if the loss is to be corrected."""
        trainer = self._trainer
        if not (trainer.vllm_importance_sampling_correction or self.corrects) or not trainer.model.training:
            return tensors
        mask = tensors["completion_mask"]
        sampled = trainer.vllm_generation.drawn(mask.sum(1).tolist())
        return {**tensors, "old_logps": sampling_logps(sampled, mask, tensors["old_logps"])}

    @contextlib.contextmanager
    def of_loss(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Context of the loss of a micro-batch."""
        is_first = self._trainer.state.global_step == self._generation
        self._inputs = inputs if is_first and self._known is None and torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self._inputs = None

    def see(self, logprobs: Tensor) -> None:
        """Take the policy's log-probabilities, (rows, tokens), of a generation or a micro-batch."""
        if not torch.is_grad_enabled():
            self._known = logprobs
        elif self._inputs is not None and engine_logprobs(self._inputs) is not None:
            self._by_losses.append(_figures(self._inputs, logprobs.detach(), None))

    def end_update(self) -> None:
        """An optimizer step is done. All ranks together. Raises `MismatchError` like `of_generation`."""
        if self._by_losses:
            figures, self._by_losses = _joined(self._by_losses), []
            with self._trainer.run.checkpoints.saving_good_state():
                self._judge(figures, is_logged=False)

    def _judge(self, figures: Tensor, *, is_logged: bool) -> None:
        """Log the mismatch of all ranks, and decide its consequence.

        Args:
            figures: this rank's `_figures`.
            is_logged: whether TRL has logged the metrics that share its names.
        """
        trainer = self._trainer
        of_all = _joined(list(trainer.accelerator.gather(figures[None])))
        difference, tokens, errors, current, ratios, rows, largest, minus_least, most = of_all.tolist()
        logged = trainer._metrics["train"]
        if tokens and not is_logged:
            logged["sampling/sampling_logp_difference/mean"].append(difference / tokens)
            logged["sampling/sampling_logp_difference/max"].append(largest)
            logged["sampling/importance_sampling_ratio/min"].append(-minus_least)
            logged["sampling/importance_sampling_ratio/mean"].append(ratios / rows)
            logged["sampling/importance_sampling_ratio/max"].append(most)
        if not current:
            return
        logged[MISMATCH].append(errors / current)
        asked = trainer.args.vllm_importance_sampling_correction
        how = "the loss is weighted by trainer over engine (vllm_importance_sampling_correction)"
        if asked is False:
            how = "vllm_importance_sampling_correction is set to False, so the loss is not corrected"
        must = self._gate.must_correct(errors / current, self._generation + 1, how)
        self.corrects |= must and asked is None


def sampling_logps(logprobs: Sequence[Tensor], mask: Tensor, before: Tensor) -> Tensor:
    """The log-probabilities (rows,) of completions under the policies that sampled them.

    Args:
        logprobs: sampling log-probabilities of each completion's tokens; NaN if the engine gave none; empty if a
            subclass generated the completions.
        mask: (rows, tokens) mask of the tokens that the loss reads; may be padded on the right.
        before: (rows,) log-probabilities under another policy, used for completions with a missing value.
    """
    if not logprobs:
        return before
    sums = [(row * of_row[: len(row)].to(row)).sum() for row, of_row in zip(logprobs, mask, strict=True)]
    sampling_logps = torch.stack(sums).to(before)
    return torch.where(sampling_logps.isnan(), before, sampling_logps)


def _figures(tensors: Mapping[str, Any], logprobs: Tensor, ages: Tensor | None) -> Tensor:
    """(9,) float32: sum and count of token |differences|, of `mult_prob_errors` of tokens of age 0, and of completion
    ratios; then the maxima of |difference|, minus ratio, and ratio. Tokens without an engine log-probability (NaN) are
    left out.

    Args:
        logprobs: (rows, tokens) from the trainer.
        ages: (rows, tokens) token ages; `None` if all are 0.
    """
    engine = engine_logprobs(tensors)
    assert engine is not None, "`of_generation` adds them"
    difference = logprobs - engine
    counts = (tensors["completion_mask"] * tensors.get("tool_mask", 1)).bool() & ~difference.isnan()
    difference = difference.masked_fill(~counts, 0.0)
    ratios = difference.sum(1).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()[counts.any(1)]
    tokens, errors = (
        difference[counts].abs(),
        mult_prob_errors(difference[counts if ages is None else counts & (ages == 0)]),
    )
    sums = [part.sum().float() for of in (tokens, errors, ratios) for part in (of, torch.ones_like(of))]
    lowest = torch.full((1,), -torch.inf, device=difference.device)
    most = [torch.cat([lowest, of.float()]).amax() for of in (tokens, -ratios, ratios)]
    return torch.stack([*sums, *most])


def _joined(figures: Sequence[Tensor]) -> Tensor:
    """Merge the `_figures` of parts of the completions."""
    rows = torch.stack(list(figures))
    return torch.cat([rows[:, :_SUMS].sum(0), rows[:, _SUMS:].amax(0)])
