"""`SimulatedEngine`: one generation engine that decodes samples until they end or are withdrawn."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..cost.workload import HALF_BLOCK
from .activities import Activities
from .stream_cost import StreamPrices


@dataclass(frozen=True)
class EngineWork:
    """Work of a simulated generation engine.

    Args:
        name: name of the generation call.
        devices: number of the engine's devices on each node.
        prompts, lengths: tokens of each sample's prompt and response, by the sample's index.
        whole_batches: whether new samples wait until the whole batch has ended, as in Transformers.
    """

    name: str
    devices: Mapping[int, int]
    prompts: Sequence[int]
    lengths: Sequence[int]
    whole_batches: bool = False


class SimulatedEngine:
    """A generation engine in virtual time.

    Args:
        finished: callback with the samples that have ended.
        withdrawn: callback with the samples that were stopped, each with its number of generated tokens.
    """

    def __init__(
        self,
        work: EngineWork,
        samples: Sequence[int],
        prices: StreamPrices,
        activities: Activities,
        *,
        finished: Callable[[list[int]], None],
        withdrawn: Callable[[dict[int, int]], None],
    ) -> None:
        self.work, self.prices, self.activities = work, prices, activities
        self._finished, self._withdrawn = finished, withdrawn
        self.decoded = 0  # tokens
        self._waiting = deque((index, 0) for index in samples)  # (sample, generated tokens)
        self._running: list[tuple[int, int]] = []  # heap of (step at which it ends, sample)
        self._begun: dict[int, None] = {}  # the running samples in the order in which they were admitted
        self._moved: set[int] = set()  # samples from another engine, whose prompts are not in this engine's cache
        self._step = 0
        self._offset = 0  # sum over the running samples of their cached tokens at step 0
        self._slots, self._room = prices.slots(work.name), prices.room(work.name)
        self._shared = prices.shared(work.name)  # tokens per sample
        self._segment: tuple[int, int, float] | None = None  # (activity, steps, seconds) of decoding in progress
        self._kept = 0  # steps of an interrupted segment, which count when the last of them has ended
        self._least: int | None = None  # largest number of tokens of a sample to withdraw; `None` without a withdrawal
        self._is_busy = True  # until it has started
        self._is_closed = False  # True: no sample is admitted until the batch has ended
        self._pauses = 0

    def start(self) -> None:
        """Begin to generate. The engine has its parameters."""
        self.activities.start(self.prices.start(self.work.name), self.work.devices, self._go_on)

    def give(self, samples: Mapping[int, int]) -> None:
        """Generate further samples.

        Args:
            samples: number of tokens that each sample already has.
        """
        self._waiting.extend(sorted(samples.items()))
        self._moved |= {index for index, has in samples.items() if has}
        self._interrupt()

    def withdraw(self, limit: int, least_tokens: int) -> None:
        """Stop the samples that have `least_tokens` or more left until `limit`."""
        self._least = limit - least_tokens
        self._interrupt()

    def pause(self) -> None:
        """Stop after the current step, because something else uses the devices. Pauses are counted."""
        self._pauses += 1
        if self._is_busy:
            self._interrupt()

    def resume(self) -> None:
        """One pause has ended."""
        self._pauses -= 1
        if not self._pauses and not self._is_busy:
            self._go_on()

    def running(self) -> dict[int, int]:
        """Generated tokens of each running sample, including the token of a step that an interruption lets end."""
        step = self._step + self._kept
        return {index: self.work.lengths[index] - (end - step) for end, index in self._running}

    def _interrupt(self) -> None:
        """End the current decoding after the current step."""
        if not self._is_busy:
            self._go_on()
        elif self._segment is not None:
            number, steps, seconds = self._segment
            done = self.activities.stop(number)
            counted = min(steps, max(0, math.ceil(done * steps - 1e-9)))
            rest = max(0.0, counted / steps - done) * seconds
            self._segment, self._kept = None, counted
            self.activities.start(rest, self.work.devices, lambda: self._decoded(counted))

    def _go_on(self) -> None:
        """Between two steps: answer a withdrawal, prefill admitted samples, decode."""
        self._is_busy = True
        self._answer()
        if self._pauses:
            self._is_busy = False
            return
        if admitted := self._admitted():
            lengths = [self.work.prompts[index] + has for index, has in admitted]
            shared = self._shared * sum(index not in self._moved for index, _ in admitted)
            seconds = self.prices.prefill(self.work.name, lengths, shared)
            self.activities.start(seconds, self.work.devices, self._go_on)
        elif self._running:
            self._decode()
        else:
            self._is_busy = False

    def _admitted(self) -> list[tuple[int, int]]:
        """Waiting samples that are admitted now, with their numbers of tokens. The cache has room for one more token of
        each sample."""
        admitted: list[tuple[int, int]] = []
        while self._waiting and len(self._running) < self._slots and not self._is_closed:
            index, has = self._waiting[0]
            if self._running and self._free(self.work.prompts[index] + has) < 0:
                break
            self._waiting.popleft()
            heapq.heappush(self._running, (self._step + self.work.lengths[index] - has, index))
            self._begun[index] = None
            self._offset += self.work.prompts[index] + has - self._step
            admitted.append((index, has))
        self._is_closed = self.work.whole_batches and bool(self._running)
        return admitted

    def _free(self, more: int = 0) -> float:
        """Tokens for which the cache has room after the next step, with a further sample of `more` tokens; below 0 if
        the step does not fit."""
        batch = len(self._running) + bool(more)
        cached = self._offset + self._step * len(self._running) + more
        return self._room - cached - batch * (1 + HALF_BLOCK - self._shared)

    def _give_up(self) -> None:
        """Preempt the sample that was admitted last. It waits until there is room for it."""
        index = next(reversed(self._begun))
        end = next(end for end, other in self._running if other == index)
        self._running.remove((end, index))
        heapq.heapify(self._running)
        self._waiting.appendleft((index, self.work.lengths[index] - (end - self._step)))
        self._remove(end, index)

    def _decode(self) -> None:
        """Decode until the next sample ends, or until the cache is full; with `whole_batches` until the last ends."""
        while len(self._running) > 1 and self._free() < 0:
            self._give_up()
        last = max(self._running) if self.work.whole_batches else self._running[0]
        steps, batch = last[0] - self._step, len(self._running)
        if batch > 1 and self._free() < batch * (steps - 1):
            steps = 1 + int(self._free() / batch)
        cached = self._offset / batch + self._step + steps / 2
        seconds = steps * self.prices.step(self.work.name, batch, cached)
        number = self.activities.start(seconds, self.work.devices, lambda: self._decoded(steps))
        self._segment = None if self.work.whole_batches else (number, steps, seconds)

    def _decoded(self, steps: int) -> None:
        self._segment, self._kept = None, 0
        self.decoded += steps * len(self._running)
        self._step += steps
        ended: list[int] = []
        while self._running and self._running[0][0] <= self._step:
            ended.append(self._remove(*heapq.heappop(self._running)))
        self._is_closed = self.work.whole_batches and bool(self._running)
        self._answer()  # a rank waits for the answer before it takes the samples that ended in this step
        if ended:
            self._finished(ended)
        self._go_on()

    def _answer(self) -> None:
        """If a withdrawal was ordered, stop the samples that may move."""
        if self._least is None:
            return
        most, self._least = self._least, None
        stopped = {index: has for index, has in self._waiting if has <= most}
        self._waiting = deque((index, has) for index, has in self._waiting if has > most)
        going_on = []
        for end, index in self._running:
            has = self.work.lengths[index] - (end - self._step)
            if has <= most:
                stopped[self._remove(end, index)] = has
            else:
                going_on.append((end, index))
        heapq.heapify(going_on)
        self._running = going_on
        self._withdrawn(dict(sorted(stopped.items())))  # sorted as ranks report them: the destinations depend on it

    def _remove(self, end: int, index: int) -> int:
        del self._begun[index]
        self._offset -= self.work.prompts[index] + self.work.lengths[index] - end
        return index
