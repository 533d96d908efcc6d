"""`TurnsInFlight`: the turns of a batch that is generated ahead, on the rank of the engine that draws them. Which turn
comes next is known only to the trainer, for example from the results of tools, so the trainer's code runs there too, in
a thread of the batch.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...algorithms.async_functions import for_new_thread
from ...algorithms.rollout import Ragged, Rollouts
from ...engines.requests import Completion, GenerationRequest, Unfinished
from ...plan.dataflow import Call
from ..calls import generate_and_score as calls
from ..calls.generate_and_score import CallSettings, InTurns, Step
from ..samples.partial_rollouts import Drawn


TURN_POLL_S = 0.002  # time between two looks for turns that have ended; short, because tools wait for them
STOPPED_POLL_S = 0.1  # the same while the engine is stopped


class Dropped(BaseException):
    """Ends the thread of a batch that is not needed any more."""


class Engine(Protocol):
    """What a batch's turns need of the engine. Used under the lock of `TurnsInFlight`."""

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin these turns of a batch; does nothing while the engine is stopped."""

    def collect(self) -> bool:
        """Take the turns that have ended (`TurnsInFlight.end`). Returns whether the engine generates."""


@dataclass
class Turn:
    """A turn that has ended, or that has been asked for.

    Args:
        begun: its tokens at the engine's last stop.
        seconds: time in generation, until `since` if it has not ended.
    """

    prompt_ids: tuple[int, ...]
    begun: Unfinished | None = None
    completion: Completion | None = None
    seconds: float = 0.0
    since: float = 0.0


class TurnsInFlight:
    """The turns of a batch's samples of one rank. Implements `TurnSource` for the batch's thread.

    Args:
        samples: this rank's samples, with columns `index`, the prompts and `TEXTS`.
        total: number of samples of the global batch.
        changed: its lock protects this object and the engine.

    Attributes:
        outcomes: the outcome of each sample, once all have ended.
    """

    def __init__(
        self,
        samples: Rollouts,
        total: int,
        settings: CallSettings,
        call: Call,
        step: Step,
        engine: Engine,
        changed: threading.Condition,
    ) -> None:
        self.samples, self.outcomes = samples, list[bytes]() if not len(samples) else None
        self._settings, self._call, self._step = settings, call, step
        self._index, self._total = samples.tensor("index").tolist(), total
        self._engine, self._changed = engine, changed
        self._turns: dict[int, list[Turn]] = defaultdict(list)  # that have ended, by key
        self._asked: dict[int, Turn] = {}  # that have not ended, by key
        self._ready: dict[int, Rollouts] = {}  # ended, and not yet returned by `draw`, by position
        self._saved: dict[int, list[Turn]] = {}  # of a checkpoint, by key
        self._results: dict[int, dict[int, str]] = defaultdict(dict)  # of tools: by key, and number of the call
        self._has_begun = self._is_dropped = False

    # --- in the batch's thread --------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._is_dropped:
            raise Dropped

    def draw(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Rollouts] | None:
        with self._changed:
            self.check()
            for position, ids in prompts.items():
                self._ask(position, tuple(ids))
            is_generating = self._engine.collect()
            if not self._ready and self._asked:
                self._changed.wait(TURN_POLL_S if is_generating else STOPPED_POLL_S)
                self.check()
                self._engine.collect()
            ready, self._ready = self._ready, {}
            return ready if ready or self._asked else None

    def _ask(self, position: int, prompt_ids: tuple[int, ...]) -> None:
        key = self._key(position)
        number, saved = len(self._turns[key]), self._saved.get(key, [])
        turn = saved[number] if number < len(saved) else Turn(prompt_ids)
        if turn.prompt_ids != prompt_ids:  # the tools or the user's code have changed
            del saved[number:]
            turn = Turn(prompt_ids)
        if turn.completion is not None:
            self._end(key, turn)
            return
        turn.since = time.time()
        self._asked[key] = turn
        self._engine.begin([self._request(key)])

    def result_of(self, position: int, number: int) -> str | None:
        with self._changed:
            return self._results[self._key(position)].get(number)

    def keep_result(self, position: int, number: int, result: str) -> None:
        with self._changed:
            self._results[self._key(position)][number] = result

    def _run(self, run: InTurns, failed: Callable[[BaseException], None]) -> None:
        try:
            outcomes = run(self.samples, self)
        except BaseException as error:
            with self._changed:
                if not self._is_dropped:
                    failed(error)
            return
        with self._changed:
            self.outcomes = list(outcomes)

    # --- in the trainer's thread ------------------------------------------------------------------------------------

    def begin(self, run: InTurns, failed: Callable[[BaseException], None]) -> None:
        """Start the batch's thread, unless it runs.

        Args:
            failed: called with the thread's exception, under the lock.
        """
        if self._has_begun or self.outcomes is not None:
            return
        self._has_begun = True
        work = for_new_thread(lambda: self._run(run, failed))
        threading.Thread(target=work, daemon=True, name=f"turns of batch {self._step.number + 1}").start()

    def drop(self) -> None:
        """The batch is not needed any more. Its thread ends at its next turn."""
        self._is_dropped = True

    @property
    def asked(self) -> list[int]:
        """Keys of the turns that have not ended."""
        return list(self._asked)

    def requests(self) -> list[GenerationRequest]:
        """The requests of the turns that have not ended, for an engine that begins. `index` is the turn's key."""
        now = time.time()
        for turn in self._asked.values():
            turn.since = now
        return [self._request(key) for key in self._asked]

    def _request(self, key: int) -> GenerationRequest:
        turn, step = self._asked[key], replace(self._step, turn=len(self._turns[key]))
        prompts = {self._call.inputs[0]: Ragged.of([turn.prompt_ids], torch.long)}
        samples = Rollouts(index=torch.tensor([key]), **prompts)
        begun = {} if turn.begun is None else {key: turn.begun}
        (request,) = calls.requests_of(self._settings, self._call, samples, step, begun)
        return request

    def end(self, key: int, completion: Completion, ended_at: float) -> None:
        """Record the end of a turn."""
        turn = self._asked.pop(key)
        turn.completion = replace(completion, index=key, ended_at=ended_at)
        turn.seconds += ended_at - turn.since
        self._end(key, turn)
        self._changed.notify_all()

    def _end(self, key: int, turn: Turn) -> None:
        assert turn.completion is not None
        self._turns[key].append(turn)
        columns = calls.completed([turn.completion], self._settings.eos_token_id, self._call.outputs)
        self._ready[self._position(key)] = columns

    def stop(self, key: int, unfinished: Unfinished, stopped_at: float) -> None:
        """Record a turn that was stopped and will be resumed."""
        turn = self._asked[key]
        turn.begun = replace(unfinished, index=key)
        turn.seconds += stopped_at - turn.since

    def joined(self, index: int) -> tuple[Completion, float]:
        """All that was drawn for a sample, as one completion, and its seconds in generation."""
        turns = self._turns[index]
        done = [turn.completion for turn in turns if turn.completion is not None]
        completion = Completion(
            index,
            tuple(token for part in done for token in part.token_ids),
            tuple(value for part in done for value in part.logprobs),
            stopped=bool(done) and done[-1].stopped,
            versions=tuple(version for part in done for version in part.versions),
            ended_at=max((part.ended_at or 0.0 for part in done), default=time.time()),
        )
        return completion, sum(turn.seconds for turn in turns)

    # --- in checkpoints ---------------------------------------------------------------------------------------------

    def drawn(self, peeked: Mapping[int, Unfinished]) -> dict[int, Drawn]:
        """The turns so far, by key.

        Args:
            peeked: tokens of the turns that are being drawn, by key.
        """
        now, result = time.time(), {}
        for key in {*self._turns, *self._asked, *self._saved}:
            saved = self._saved.get(key, [])[len(self._turns[key]) :]  # not yet asked for again
            turns = [_drawn_turn(turn) for turn in self._turns[key]]
            if key in self._asked:
                turn = self._asked[key]
                seconds = turn.seconds + (now - turn.since if key in peeked else 0.0)
                turns.append(_drawn_turn(replace(turn, begun=peeked.get(key, turn.begun), seconds=seconds)))
            else:
                turns += [_drawn_turn(turn) for turn in saved]
            turns = [turn for turn in turns if turn.token_ids or turn.stopped is not None]
            if turns:
                result[key] = replace(turns[-1], before=tuple(turns[:-1]), results=dict(self._results[key]))
        return result

    def restore(self, samples: Mapping[int, Drawn]) -> None:
        """Take the turns of a checkpoint. They are not drawn again, if they are asked for with the same prompts."""
        for key, sample in samples.items():
            if key % self._total in self._index:
                self._saved[key] = [_turn(key, drawn) for drawn in (*sample.before, sample)]
                self._results[key] = dict(sample.results)

    def _key(self, position: int) -> int:
        """A position's number among all ranks, by which its turns are seeded: a sample's `index`, or more."""
        round_, row = divmod(position, len(self._index))
        return round_ * self._total + int(self._index[row])

    def _position(self, key: int) -> int:
        round_, index = divmod(key, self._total)
        return round_ * len(self._index) + self._index.index(index)


def _drawn_turn(turn: Turn) -> Drawn:
    if turn.completion is not None:
        made: Any = turn.completion
        return Drawn(
            made.token_ids, made.logprobs, made.versions, made.stopped, turn.seconds, made.routes, turn.prompt_ids
        )
    begun = turn.begun or Unfinished(0, (), (), ())
    return Drawn(begun.token_ids, begun.logprobs, begun.versions, None, turn.seconds, begun.routes, turn.prompt_ids)


def _turn(key: int, drawn: Drawn) -> Turn:
    routes, versions = drawn.routes, drawn.versions
    if drawn.stopped is None:
        begun = Unfinished(key, drawn.token_ids, drawn.logprobs, versions, routes)
        return Turn(drawn.prompt_ids, begun, seconds=drawn.seconds)
    done = Completion(key, drawn.token_ids, drawn.logprobs, drawn.stopped, versions, routes=routes)
    return Turn(drawn.prompt_ids, completion=done, seconds=drawn.seconds)
