"""`HostCalls`: the calls of an algorithm whose loop is not the executor's. A trainer of another library, such as TRL's
GRPO, runs on every rank with samples of its own, and asks for a call when it needs its outputs.

All ranks ask for the same calls in the same order, each with its own samples, of which it may have none. The calls
themselves run where the plan says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..algorithms.rollout import Ragged, Rollouts
from ..engines.base import Rate
from ..plan.dataflow import CallKind
from ..plan.timeline import Span
from .calls import EVALUATION_STEP, Step
from .executor import Executor
from .process_groups import from_every_rank


class HostCalls:
    """Runs calls for the loop of another trainer.

    Args:
        executor: of this rank; its plan's graph has one call that generates and one that trains.
        around: makes a context around each call.
    """

    def __init__(
        self, executor: Executor, around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self.executor, self.around = executor, around
        self._update, self._round, self._evaluates = 0, 0, False
        self._spans: list[Span] = []
        self._all_finished = False  # all ranks take part in a generation without a wish to generate more

    def at(self, update: int, *, evaluates: bool = False) -> None:
        """Set the update that the next calls belong to. Together with the number of generations in it before, it seeds
        the draws of tokens, so that a resumed run draws as one without an interruption.

        Args:
            evaluates: the calls are of an evaluation.
        """
        if (update, evaluates) != (self._update, self._evaluates):
            self._update, self._evaluates, self._round = update, evaluates, 0

    def generate(self, prompts: Sequence[Sequence[int]]) -> Rollouts:
        """Responses to this rank's prompts.

        Returns:
            Columns `responses` (token ids) and `logprobs`, in the order of the prompts.

        Raises:
            JobFailed: the call failed on some rank.
        """
        return self._generate(Rollouts(prompts=Ragged.of(prompts, torch.long)))

    def finish_turns(self) -> None:
        """Take part in the generations of other ranks until all ranks have called this. A rank calls it when it has no
        more prompts, where ranks may generate different numbers of times.

        Raises:
            JobFailed: a generation failed on some rank.
        """
        while not self._all_finished:
            self._generate(Rollouts(), finished=True)
        self._all_finished = False

    def _generate(self, own: Rollouts, *, finished: bool = False) -> Rollouts:
        (name,) = self.executor.plan.graph.calls_of(CallKind.GENERATE)
        self._round += 1  # on every rank, whether it has prompts or not: any may draw for the others
        return self._perform(name, own, finished=finished)

    def forward(self, name: str, samples: Rollouts) -> Rollouts:
        """The outputs of a call that scores, for this rank's samples.

        Args:
            samples: with `prompts` and `responses`, each of one token or more.

        Raises:
            JobFailed: the call failed on some rank.
        """
        return self._perform(name, samples)

    def train(self, samples: Rollouts, rate: Rate) -> Rollouts:
        """One optimizer step on the samples of all ranks.

        Args:
            samples: of this rank, with the columns that the algorithm's loss reads.

        Returns:
            The statistics of the step, of the samples of all ranks.

        Raises:
            JobFailed, NonFiniteError: as `Executor.perform`.
        """
        (name,) = [call.name for call in self.executor.plan.graph.calls if call.trains]
        return self._perform(name, samples, rate)

    def take_spans(self) -> tuple[Span, ...]:
        """When each rank ran each call since this was last asked; on rank 0, empty on the others."""
        taken, self._spans = tuple(self._spans), []
        return taken

    def _perform(self, name: str, own: Rollouts, rate: Rate | None = None, *, finished: bool = False) -> Rollouts:
        call, executor = self.executor.plan.graph.call(name), self.executor
        number = self._update + (EVALUATION_STEP if self._evaluates else 0)
        executor.alarm.at(f"{name} of update {self._update + 1} (the samples of all ranks)")
        samples, first = self._of_all_ranks(own, finished)
        if not len(samples):
            return Rollouts()
        rates = {call.role: rate} if rate is not None else {}
        executor.begin(Step(number, learning_rates=rates, draw=self._round))
        with self.around():
            outputs = executor.perform(name, samples)
        self._spans += [replace(span, step=self._update) for span in executor.take_spans()]
        return outputs if call.trains else outputs.select(range(first, first + len(own)))

    def _of_all_ranks(self, own: Rollouts, finished: bool) -> tuple[Rollouts, int]:
        """The samples of all ranks in the order of the ranks, numbered; and the number of this rank's first one."""
        content = own.to_bytes() if len(own) else b""
        parts = from_every_rank((len(own), content, finished), self.executor.placement.control)
        self._all_finished = all(rank_finished for _, _, rank_finished in parts)
        first = sum(size for size, _, _ in parts[: self.executor.rank])
        samples = Rollouts.cat([Rollouts.from_bytes(part) for size, part, _ in parts if size] or [Rollouts()])
        return samples.plus(index=torch.arange(len(samples))) if len(samples) else samples, first
