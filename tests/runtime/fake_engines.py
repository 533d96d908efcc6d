"""Engines whose time and outputs are known, for tests of the executor with many ranks in threads: generation that takes
a time for each token, and forwards that take a time for each token. Their outputs depend on the samples alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from virtual_clock import REAL, Clock

from trl_realloc.algorithms.rollout import Ragged, Rollouts, places
from trl_realloc.engines.base import EngineDied, Updates
from trl_realloc.engines.generation.sample_versions import VersionMarks, versions_of
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling, Unfinished
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan


BUDGET = 100  # most tokens of a forward
ROUNDING = 1e-6  # steps


def token(index: int, place: int) -> int:
    return (7 * index + 13 * place) % 97


def logprob(index: int, place: int) -> float:
    return -1.0 - ((3 * index + place) % 11) / 10


class FakeGeneration:
    """`base.Generation` by the clock: every unfinished sample gets a token in each step. Samples come and go between
    two steps, as in vLLM."""

    def __init__(self, engine: FakeEngine, requests: Sequence[GenerationRequest], updates: Updates) -> None:
        self.engine, self.clock, self.updates = engine, engine.clock, updates
        self.running: dict[int, tuple[int, int]] = {}  # sample -> (tokens it began with, steps that were done then)
        self.begun_versions: dict[int, tuple[int, ...]] = {}  # of the tokens that unfinished samples began with
        self.marks: dict[int, VersionMarks] = {}  # of unfinished samples
        self.finished: list[int] = []  # not yet returned by `poll`
        self.begun_at, self.steps_done = self.clock.monotonic() + engine.delay_s, 0
        self.ended_at = self.clock.time()
        self.closed = False
        self.add(requests)

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.finished)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._advance()
        if not self.running:  # it waits for requests, and begins at once
            self.begun_at = max(self.begun_at, self.clock.monotonic() - self.steps_done * self.engine.step_s)
        first = self._next_step() if self.running else self.steps_done
        for request in requests:
            assert request.index not in self.running
            begun = request.begun
            drawn = len(begun.token_ids) if begun is not None else 0
            if begun is not None:
                assert begun.token_ids == tuple(token(request.index, at) for at in range(drawn))
                assert begun.logprobs == tuple(logprob(request.index, at) for at in range(drawn))
            self.running[request.index] = drawn, first
            self.begun_versions[request.index] = begun.versions if begun is not None else ()
            self.marks[request.index] = VersionMarks(self.engine.version)

    def _steps(self) -> float:
        return (self.clock.monotonic() - self.begun_at) / self.engine.step_s

    def _next_step(self) -> int:
        """The number of the step that comes after the one that runs. One runs always: the engine does not wait for what
        follows from the samples that it has finished."""
        return max(0, math.floor(self._steps() + ROUNDING) + 1)

    def _sleep_until(self, step: int, deadline: float = math.inf) -> None:
        end = min(deadline, self.begun_at + step * self.engine.step_s)
        self.clock.sleep(max(0.0, end - self.clock.monotonic()))

    def _drawn(self, index: int) -> int:
        begun_with, step = self.running[index]
        return begun_with + max(0, self.steps_done - step)

    def _advance(self) -> None:
        """Decode the steps that the clock allows, and none after the engine's death."""
        most = math.inf if self.engine.dies_at is None else self.engine.dies_at
        self.steps_done = max(self.steps_done, min(most, math.floor(self._steps() + ROUNDING)))
        ended = [index for index in self.running if self._drawn(index) >= self.engine.lengths[index]]
        for index in ended:
            del self.running[index]
        self.finished += ended

    def poll(self, timeout_s: float) -> list[Completion]:
        assert not self.closed
        deadline = self.clock.monotonic() + timeout_s
        while True:
            self._advance()
            if self.engine.dies_at is not None and self.steps_done >= self.engine.dies_at:
                raise EngineDied("the engine's process was ended by SIGKILL")
            if self.finished or self.clock.monotonic() >= deadline - ROUNDING * self.engine.step_s:
                break
            self._sleep_until(self._next_step(), deadline)
        ended, self.finished = self.finished, []
        self.ended_at = self.clock.time() if ended else self.ended_at
        return [self._completion(index) for index in ended]

    def _completion(self, index: int) -> Completion:
        length = range(self.engine.lengths[index])
        return Completion(
            index,
            tuple(token(index, at) for at in length),
            tuple(logprob(index, at) for at in length),
            stopped=True,
            versions=self._versions(index, len(length), pop=True),
        )

    def _versions(self, index: int, drawn: int, pop: bool) -> tuple[int, ...]:
        begun, marks = self.begun_versions[index], self.marks[index]
        if pop:
            del self.begun_versions[index], self.marks[index]
        return begun + versions_of(marks.runs(drawn - len(begun)))

    def update(self, version: int) -> None:
        """The engine has new parameters. They take no time, and a step under way is of the old ones."""
        if self.running:
            self._sleep_until(self._next_step())
        self._advance()
        for index in self.running:
            self.marks[index].change(self._drawn(index) - len(self.begun_versions[index]), version)

    def _so_far(self, index: int, drawn: int, pop: bool) -> Unfinished:
        places = range(drawn)
        tokens, logprobs = tuple(token(index, at) for at in places), tuple(logprob(index, at) for at in places)
        return Unfinished(index, tokens, logprobs, self._versions(index, drawn, pop))

    def peek(self) -> list[Unfinished]:
        if self.running:
            self._sleep_until(self._next_step())
        self._advance()
        return [self._so_far(index, self._drawn(index), pop=False) for index in self.running]

    def withdraw(self, indices: Collection[int], least_tokens: int = 1) -> list[Unfinished]:
        if self.running:
            self._sleep_until(self._next_step())
        self._advance()
        stopped = []
        for index in indices:
            if index not in self.running or self.engine.limit - self._drawn(index) < least_tokens:
                continue  # it has finished, or goes on
            drawn = self._drawn(index)
            del self.running[index]
            self.engine.moved[index] = drawn
            stopped.append(self._so_far(index, drawn, pop=True))
        return stopped

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """`base.BackgroundEngine`.

    Args:
        lengths: tokens of the response of each sample.
        dies_at: the step after which its process has ended; `None` if it lives.
        delay_s: from the start of a generation to its first step.

    Attributes:
        moved: the tokens of each sample that was withdrawn, by its index.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        limit: int,
        step_s: float,
        dies_at: int | None = None,
        clock: Clock = REAL,
        delay_s: float = 0.0,
    ) -> None:
        self.lengths, self.limit, self.step_s, self.dies_at = lengths, limit, step_s, dies_at
        self.clock, self.delay_s = clock, delay_s
        self.version, self.moved = 0, dict[int, int]()
        self.started: list[float] = []
        self.stopped_s, self.generation, self.decode_steps = 0.0, None, ()

    generation: FakeGeneration | None  # the latest

    def start(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, updates: Updates = Updates.END
    ) -> FakeGeneration:
        self.started.append(self.clock.time())
        self.generation = FakeGeneration(self, requests, updates)
        return self.generation

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        generation = self.start(requests, sampling)
        while generation.unfinished:
            yield from generation.poll(1.0)

    def kept(self, frozen: Any) -> frozenset[str]:
        return frozenset()

    def load(self, buckets: Any, version: int, frozen: Any = None) -> None:
        generation = self.generation
        if generation is not None and not generation.closed and generation.updates is not Updates.END:
            generation.update(version)
        self.version = version

    def narrower(self, dtypes: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeScoring:
    """The part of `base.ScoringEngine` that a call needs. Under a team of several ranks all must run the same forwards
    in the same order: they wait for each other before and after.

    Args:
        seconds: of a forward, from the tokens of its samples.
        barrier: of the team.
    """

    def __init__(self, kind: str, seconds: Callable[[Sequence[int]], float], barrier: Any, clock: Clock) -> None:
        self.kind, self.seconds, self.barrier, self.clock = kind, seconds, barrier, clock
        self.forwards: list[tuple[int, ...]] = []

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> Mapping[str, Any]:
        self._barrier()
        self.forwards.append(tuple(samples.tensor("index").tolist()))
        self.clock.sleep(self.seconds(samples.lengths.tolist()))
        self._barrier()
        if not len(samples):
            return {}
        responses = samples.ragged("responses")
        if self.kind == "values":  # one more than the response's tokens
            lengths = responses.lengths + 1
            return {"values": Ragged(places(lengths).float() % 5, lengths)}
        return {"logprobs": responses.like(responses.values.float() / 100)}

    def _barrier(self) -> None:
        if self.barrier is not None:
            self.barrier.wait(30)


class FakePlacement:
    """What the executor asks of `Placement`, on one rank of a job in threads.

    Args:
        seconds: of a forward, from the call and the tokens of its samples.
        barriers: by call and number of the team, of calls whose teams have several ranks.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        engine: FakeEngine | None,
        seconds: Callable[[str, Sequence[int]], float],
        barriers: Mapping[tuple[str, int], Any],
        teams: Mapping[str, Sequence[Sequence[Sequence[int]]]],
        clock: Clock = REAL,
    ) -> None:
        self.plan, self.rank, self.started, self.clock = plan, rank, True, clock
        self.generators = {} if engine is None else {"actor.generate": engine}
        self.roles = {
            Role.ACTOR: SimpleNamespace(kind="policy"),
            Role.REFERENCE: SimpleNamespace(kind="policy"),
            Role.CRITIC: SimpleNamespace(kind="value"),
            Role.REWARD: SimpleNamespace(kind="score", names=(), processing_classes=()),
        }
        self.engines: dict[str, list[FakeScoring]] = {}
        for call, kind in (("reference.forward", "logprobs"), ("critic.forward", "values")):
            number = next((at for at, team in enumerate(teams.get(call, ())) if any(rank in r for r in team)), None)
            if number is not None:
                barrier = barriers.get((call, number))
                self.engines[call] = [FakeScoring(kind, partial(seconds, call), barrier, clock)]
        self.refreshed: list[str] = []

    def has(self, call: str) -> bool:
        return self.rank in self.plan.mesh(call)

    def shares_tokens(self, call: str) -> bool:
        return False

    def take_shared_tokens(self, call: str) -> int:
        return 0

    takes_part = has

    def prefetch(self, call: str, beside: Collection[str]) -> None:
        pass

    def refresh(self, call: str) -> None:
        self.refreshed.append(call)

    def check_fresh(self, call: str) -> None:
        pass

    def has_collectives(self, call: str) -> bool:
        return False

    def budget(self, call: str) -> int:
        return self.plan[call].strategy.micro_batch_tokens or BUDGET

    def resident(self, call: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def scoring(self, call: str) -> Iterator[list[FakeScoring]]:
        yield self.engines[call]
