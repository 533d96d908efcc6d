"""`PromptsAhead`: announces the prompts of later generations under a plan with a staleness (`UpcomingBatches`), and
logs the age of the generated tokens.

What is generated when is in `runtime.overlap.ahead_server`.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from transformers import Trainer


class UpcomingBatches(Iterator[Any]):
    """An iterator over the micro-batches of an epoch that can look ahead of the current one, also past the end of the
    epoch.

    Args:
        source: the iterator of the epoch. It is read only as far as needed.
        next_epoch: begins the next epoch once this one has been read to its end; returns `None` if that epoch cannot be
            read before its training begins.

    Attributes:
        following: the next epoch, once it has begun.
    """

    def __init__(self, source: Iterator[Any], next_epoch: Callable[[], UpcomingBatches | None] = lambda: None) -> None:
        self.source, self._next_epoch = source, next_epoch
        self.following: UpcomingBatches | None = None
        self._read: deque[Any] = deque()  # from the current micro-batch on
        self._given = 0  # number of these that Trainer's loop has got

    def __next__(self) -> Any:
        if self._given == len(self._read):
            self._read.append(next(self.source))
        self._given += 1
        return self._read[self._given - 1]

    def advance(self) -> None:
        """The current micro-batch is done; the next one becomes current."""
        if self._given > 1:
            self._read.popleft()
            self._given -= 1

    def after(self, places: int) -> Any:
        """The micro-batch `places` after the current one; `None` if it cannot be read yet."""
        while len(self._read) <= places:
            try:
                self._read.append(next(self.source))
            except StopIteration:
                self.following = self.following or self._next_epoch()
                return None if self.following is None else self.following.after(places - len(self._read))
        return self._read[places]

    def updates_until(self, places: int, accumulated: int, place: int) -> int:
        """The number of optimizer steps from the current one to the one that trains on the micro-batch of
        `after(places)`; 0 if both micro-batches belong to one optimizer step.

        Args:
            accumulated: number of micro-batches per optimizer step. The last step of an epoch may have fewer.
            place: index of the current micro-batch in its optimizer step.
        """
        if places < len(self._read) or self.following is None:
            return (place + places) // accumulated
        updates = -(-(place + len(self._read)) // accumulated)
        return updates + self.following.updates_until(places - len(self._read), accumulated, 0)


class PromptsAhead:
    """Reads the batches of later generations, and announces their prompts.

    Args:
        trainer: a `PlannedPolicyTrainer`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._step_place = 0  # index of the current micro-batch in its optimizer step
        self._updates_before = -1  # optimizer steps before the previous micro-batch
        self._has_begun = False  # the training has read its first micro-batch from `_upcoming`
        self._draws_seed = False  # starting an epoch's iterator drew a random number
        self._loader: Any = None
        self._epoch: Iterator[Any] | None = None  # Trainer's iterator
        self._upcoming: UpcomingBatches | None = None

    def begin_training(self, loader: Any) -> None:
        """A training begins, on the micro-batches of this data loader."""
        self._loader, self._epoch, self._upcoming = loader, None, None

    @property
    def _announces(self) -> bool:
        return self.trainer.calls.ahead is not None and bool(self.trainer.model.training)

    def batches(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        """The micro-batches of an epoch; Trainer's loop reads them in place of its own iterator."""
        if self._upcoming is None or self._epoch is not epoch_iterator:
            return self._begin_epoch(epoch_iterator)
        return self._upcoming

    def _begin_epoch(self, epoch_iterator: Iterator[Any]) -> UpcomingBatches:
        epoch = int(self.trainer.state.epoch or 0)
        if self._upcoming is None and not self.trainer.args.ignore_data_skip:
            random = torch.get_rng_state()  # which a sampler of the user's may draw its seeds from
            sampler = _sampler_of(self._loader)
            for _ in range(epoch):
                next(iter(sampler), None)  # a run that resumes goes on in the order that the sampler had reached
            torch.set_rng_state(random)
        begun = None if self._upcoming is None else self._upcoming.following
        if begun is None:
            begun = UpcomingBatches(epoch_iterator, lambda: self._open_epoch(epoch + 1))
        elif self._draws_seed:
            _draw_seed()
        self._epoch, self._upcoming, self._has_begun = epoch_iterator, begun, False
        return begun

    def _open_epoch(self, epoch: int) -> UpcomingBatches | None:
        """Begin to read an epoch before Trainer does, in Trainer's order. All ranks together.

        Trainer's own iterator of this epoch is then never read. This works because it is a generator, like those of
        Accelerate's data loaders, and does nothing before it is read.
        """
        loader = self._loader
        if not inspect.isgenerator(self._epoch):
            return None
        for part in (loader, getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)):
            if part is not None and hasattr(part, "set_epoch"):  # as Trainer does
                part.set_epoch(epoch)
        source, random = iter(loader), torch.get_rng_state()
        try:
            first = [next(source)]
        except StopIteration:
            return None
        # The data loader's random number is drawn again where Trainer would have begun the epoch, so that responses are
        # shuffled as in a run that reads nothing ahead.
        self._draws_seed = not torch.equal(random, torch.get_rng_state())
        torch.set_rng_state(random)
        return UpcomingBatches(chain(first, source), lambda: self._open_epoch(epoch + 1))

    def advance(self) -> None:
        """The training moves to the next micro-batch."""
        if self._upcoming is None:
            return
        if self._has_begun:
            self._upcoming.advance()
        updates = self.trainer.state.global_step
        is_first = not self._has_begun or self._updates_before != updates
        self._step_place = 0 if is_first else self._step_place + 1
        self._has_begun, self._updates_before = True, updates

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Context of a generation: announces the prompts of the next ones before it, and logs token ages after it."""
        calls = self.trainer.calls
        if self._announces:
            calls.announce(list(self._next_prompts()))
        yield
        if self._announces:
            for name, value in calls.take_ages().items():
                self.trainer._metrics["train"][name].append(value)

    def _next_prompts(self) -> Iterator[tuple[list[list[int]], list[bytes] | None]]:
        """Token ids of this rank's prompts, and their texts if calls read them, in each later generation that can be
        read. TRL's loop yields a generation's batch once per micro-batch that is trained on it."""
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        every = args.steps_per_generation * trainer.num_iterations
        accumulated, left = args.gradient_accumulation_steps, state.max_steps - state.global_step
        for number in range(1, trainer.calls.ahead.versions + 1):
            places = number * every
            if self._upcoming is None or (self._step_place + places) // accumulated >= left:
                return
            rows = self._upcoming.after(places)
            if rows is None or self._upcoming.updates_until(places, accumulated, self._step_place) >= left:
                return
            prompts = [row["prompt"] for row in rows]
            texts = [pickle.dumps(prompt) for prompt in prompts] if trainer.calls.reads_texts else None
            yield trainer._tokenize_prompts(prompts)[0], texts


def _sampler_of(loader: Any) -> Any:
    """The sampler of a data loader, whose batch sampler Accelerate may have wrapped; empty if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", ())


def _draw_seed() -> None:
    """Draw one random number, as PyTorch's data loader does when an iterator begins."""
    torch.empty((), dtype=torch.int64).random_()
