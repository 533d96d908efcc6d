"""`EngineMismatch`: how far a vLLM engine's log-probabilities of completions are from the trainer's, where a plan's
engines train GRPO or RLOO.

TRL logs it where GRPO's loss is corrected, and this file elsewhere. What it ends in is in `run.mismatch_gate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...algorithms.corrections import LARGEST_LOG_RATIO, MISMATCH, mult_prob_errors
from ..run.mismatch_gate import MismatchGate
from .forced_tokens import ENGINE, SAMPLED, engine_logprobs, padded


if TYPE_CHECKING:
    from transformers import Trainer


_SUMS = 6  # the first of `_figures`


class EngineMismatch:
    """Measures the mismatch of each generation of the training, logs it and judges it.

    It is measured before the training on a generation where the policy's log-probabilities are known there, and
    otherwise by the losses of its first optimizer step.

    Args:
        trainer: a `PlannedPolicyTrainer` whose run has a plan.
        engine_only: the settings by which engine and trainer differ (`sampling_checks.engine_only_settings`). With one
            of them nothing is measured, and TRL gets no log-probabilities of the engine.

    Attributes:
        corrects: RLOO's loss is to be corrected, because the mismatch was above its limit and the settings leave it
            open. A checkpoint has this.
    """

    def __init__(self, trainer: Trainer, engine_only: Sequence[str] = ()) -> None:
        self._trainer, self._engine_only, self.corrects = trainer, engine_only, False
        self._gate = MismatchGate(trainer.args, reports=trainer.accelerator.is_main_process)
        self._known: Tensor | None = None  # the policy's log-probabilities of the latest generation
        self._generation = -1  # the number of updates before it
        self._inputs: Mapping[str, Any] | None = None  # of the micro-batch whose loss measures it
        self._by_losses: list[Tensor] = []

    def begin_generation(self) -> None:
        """A generation begins."""
        self._known = None

    def of_generation(self, made: dict[str, Any]) -> dict[str, Any]:
        """What TRL has made of a generation, with the engine's log-probabilities. All ranks together.

        Raises:
            MismatchError: as of `MismatchGate`.
        """
        trainer = self._trainer
        if trainer.plan["actor.generate"].engine != "vllm":
            return made
        generation, mask = trainer.vllm_generation, made["completion_mask"]
        drawn = generation.drawn(mask.sum(1).tolist())
        if self._engine_only and SAMPLED in made:
            made = {**made, ENGINE: made[SAMPLED]}
            del made[SAMPLED]
        elif SAMPLED not in made:
            made = {**made, ENGINE: padded(drawn, mask)}
        if self._engine_only or not trainer.model.training:
            return made
        self._generation = trainer.state.global_step
        if self._known is not None:
            # unknown ages are NaN, and such tokens are not judged
            ages = None if generation.ages is None else padded(generation.ages if len(drawn) else [], mask)
            self._judge(_figures(made, self._known, ages), is_logged="importance_sampling_ratio" in made)
        return made

    @contextlib.contextmanager
    def of_loss(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Around the loss of a micro-batch."""
        is_first = self._trainer.state.global_step == self._generation
        self._inputs = inputs if is_first and self._known is None and torch.is_grad_enabled() else None
        try:
            yield
        finally:
            self._inputs = None

    def see(self, logprobs: Tensor) -> None:
        """The loop has got the policy's log-probabilities, (rows, tokens), of a generation or of a micro-batch."""
        if not torch.is_grad_enabled():
            self._known = logprobs
        elif self._inputs is not None and engine_logprobs(self._inputs) is not None:
            self._by_losses.append(_figures(self._inputs, logprobs.detach(), None))

    def end_update(self) -> None:
        """An optimizer step has been made. All ranks together. Raises as of `of_generation`."""
        if self._by_losses:
            figures, self._by_losses = _joined(self._by_losses), []
            with self._trainer.run.checkpoints.saving_good_state():
                self._judge(figures, is_logged=False)

    def _judge(self, figures: Tensor, *, is_logged: bool) -> None:
        """Log the mismatch of all ranks, and decide what it ends in.

        Args:
            figures: of this rank.
            is_logged: TRL has logged what has its names.
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


def _figures(made: Mapping[str, Any], logprobs: Tensor, ages: Tensor | None) -> Tensor:
    """(9,) float32: the sum and the number of the |differences| of tokens, of `mult_prob_errors` of tokens of age 0,
    and of the ratios of completions; then the greatest |difference|, minus ratio, and ratio. Tokens without a
    log-probability of the engine (NaN) are left out.

    Args:
        made: TRL's tensors of some completions.
        logprobs: of the trainer, (rows, tokens).
        ages: of the tokens, (rows, tokens); `None` for 0.
    """
    engine = engine_logprobs(made)
    assert engine is not None, "`of_generation` adds them"
    difference = logprobs - engine
    counts = (made["completion_mask"] * made.get("tool_mask", 1)).bool() & ~difference.isnan()
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
    """Merges the `_figures` of parts of the completions."""
    rows = torch.stack(list(figures))
    return torch.cat([rows[:, :_SUMS].sum(0), rows[:, _SUMS:].amax(0)])
