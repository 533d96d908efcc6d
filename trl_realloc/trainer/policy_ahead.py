"""`PolicyAheadMixin`: under a plan with a staleness, tells the generation which prompts come next (`UpcomingBatches`),
and logs how old the tokens are that it gets.

What is generated when is in `runtime.host_ahead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..runtime.host_calls import HostCalls


class UpcomingBatches(Iterator[Any]):
    """An iterator over micro-batches that can be looked at ahead of the one that is trained.

    Args:
        source: the iterator of an epoch. It is read no further than is asked for.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._read: deque[Any] = deque()  # from the one that is trained on
        self._given = 0  # of these, how many have been given to Trainer's loop

    def __next__(self) -> Any:
        if self._given == len(self._read):
            self._read.append(next(self.source))
        self._given += 1
        return self._read[self._given - 1]

    def advance(self) -> None:
        """The training has ended on the current micro-batch, and begins on the next one that was given."""
        if self._given > 1:
            self._read.popleft()
            self._given -= 1

    def after(self, places: int) -> Any:
        """The micro-batch so many places after the current one; `None` if the epoch ends before."""
        while len(self._read) <= places:
            try:
                self._read.append(next(self.source))
            except StopIteration:
                return None
        return self._read[places]


class PolicyAheadMixin:
    """Announces prompts. The attributes are those of the trainer that the class is mixed into."""

    args: Any
    state: Any
    model: Any
    calls: HostCalls
    _metrics: Any  # TRL's
    _tokenize_prompts: Callable[..., Any]

    trains_by_accelerate = False  # then nothing is generated ahead
    _epoch: Iterator[Any] | None = None
    _upcoming: UpcomingBatches | None = None
    _step_place = 0  # of the current micro-batch in its optimizer step
    _updates_before = -1  # of the micro-batch before
    _has_begun = False  # the training has asked for the first micro-batch of those that `_upcoming` has given

    @property
    def _runs_ahead(self) -> bool:
        return not self.trains_by_accelerate and self.calls.ahead is not None and self.model.training

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        if self.trains_by_accelerate or self.calls.ahead is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc, no-any-return]
        if self._epoch is not epoch_iterator:
            self._epoch, self._upcoming, self._has_begun = epoch_iterator, UpcomingBatches(epoch_iterator), False
        return super().get_batch_samples(self._upcoming, num_batches, device)  # type: ignore[misc, no-any-return]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self._runs_ahead and self._upcoming is not None:
            if self._has_begun:
                self._upcoming.advance()
            is_first = not self._has_begun or self._updates_before != self.state.global_step
            self._step_place = 0 if is_first else self._step_place + 1
            self._has_begun, self._updates_before = True, self.state.global_step
        return super()._prepare_inputs(generation_batch)  # type: ignore[misc]

    def _generate(self, prompts: Any) -> Any:
        if self._runs_ahead:
            self.calls.announce(list(self._next_prompts()))
        made = super()._generate(prompts)  # type: ignore[misc]
        if self._runs_ahead:
            for name, value in self.calls.take_ages().items():
                self._metrics["train"][name].append(value)
        return made

    def _next_prompts(self) -> Iterator[list[list[int]]]:
        """The token ids of this rank's prompts in each of the next generations, as far as the epoch and the run have
        them. TRL's loop gives a generation's batch once for each micro-batch that is trained on it."""
        ahead, every = self.calls.ahead, self.args.steps_per_generation * self.args.num_iterations
        assert ahead is not None, "the plan has a staleness"
        accumulated = self.args.gradient_accumulation_steps
        left = (self.state.max_steps - self.state.global_step) * accumulated - self._step_place
        for number in range(1, ahead.versions + 1):
            if self._upcoming is None or number * every >= left:
                return
            rows = self._upcoming.after(number * every)
            if rows is None:
                return
            yield self._tokenize_prompts([row["prompt"] for row in rows])[0]
