"""`MismatchGate`: warns, corrects or ends a run whose generation engine and trainer compute different probabilities.

The mismatch is measured in `algorithms.corrections`, `algorithms.ppo_metrics` and `policy.mismatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.utils import logging

from ...algorithms.corrections import MISMATCH


if TYPE_CHECKING:
    from transformers import TrainingArguments


logger = logging.get_logger(__name__)
WARNS_ABOVE = 1.05  # bfloat16 rounding alone is below it (docs/mismatch.md)
_CHECK = (
    "Check in this order (docs/mismatch.md): rounding, by bf16: false and a policy in float32; vLLM, in PPO by "
    "generation_engine: transformers; vllm_engine_kwargs, by leaving it out; how tokens are drawn; old weights"
)


class MismatchError(RuntimeError):
    """Engine and trainer differ by more than `max_mismatch`, and `mismatch_action` is `end`. Raised on every rank."""


class MismatchGate:
    """Compares a run's mismatch with its limits.

    Args:
        args: settings `max_mismatch` and `mismatch_action`, which a callback may change.
        reports: whether this process prints warnings.
    """

    def __init__(self, args: TrainingArguments, *, reports: bool) -> None:
        self._args, self._reports = args, reports
        self._greatest = 1.0  # greatest mismatch with a warning

    def must_correct(self, mismatch: float | None, update: int, corrected: str) -> bool:
        """True if the loss is to be corrected for the mismatch. All ranks call this with the same values.

        Args:
            mismatch: the metric `corrections.MISMATCH`; `None` if it was not measured.
            update: number of the update, from 1.
            corrected: the kind of correction, in words for a warning.

        Raises:
            MismatchError: the mismatch exceeds `max_mismatch`, which ends the run.
        """
        most: float | None = self._args.max_mismatch
        is_above = mismatch is not None and most is not None and mismatch > most
        if mismatch is None or not (is_above or mismatch > WARNS_ABOVE):
            return False
        finding = f"{MISMATCH} is {mismatch:.4g} in update {update}, above "
        if is_above and self._args.mismatch_action == "end":
            raise MismatchError(f"{finding}max_mismatch {most:g}. {_CHECK}; or set mismatch_action: correct.")
        # warn again only after it has doubled
        if self._reports and mismatch - 1 > 2 * (self._greatest - 1):
            self._greatest = mismatch
            then = f"max_mismatch {most:g}: {corrected}" if is_above else f"{WARNS_ABOVE:g}"
            logger.warning(
                f"{finding}{then}. The engine's and the trainer's probabilities of a token differ by this factor on "
                f"average. {_CHECK}."
            )
        return is_above


__all__ = ["WARNS_ABOVE", "MismatchError", "MismatchGate"]
