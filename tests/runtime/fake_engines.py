"""Engines whose time and outputs are known, for tests of the executor with many ranks in threads: generation that takes
a time for each token, and forwards that take a time for each token. Their outputs depend on the samples alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from trl_realloc.algorithms.rollout import Ragged, Rollouts, places
from trl_realloc.engines.base import Completion, EngineDied, GenerationRequest, Sampling, Unfinished
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan


BUDGET = 100  # most tokens of a forward


def token(index: int, place: int) -> int:
    return (7 * index + 13 * place) % 97


def logprob(index: int, place: int) -> float:
    return -1.0 - ((3 * index + place) % 11) / 10


class FakeGeneration:
    """`base.Generation` by the clock: every unfinished sample gets a token in each step."""

    def __init__(self, engine: FakeEngine, requests: Sequence[GenerationRequest]) -> None:
        self.engine = engine
        self.running: dict[int, list[int]] = {}  # sample -> [place of its next token]
        self.begun_at, self.steps_done, self.ended_at = time.monotonic(), 0, time.time()
        self.closed = False
        self.add(requests)

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._advance()
        for request in requests:
            assert request.index not in self.running
            begun = request.begun
            drawn = len(begun.token_ids) if begun is not None else 0
            if begun is not None:
                assert begun.token_ids == tuple(token(request.index, at) for at in range(drawn))
                assert begun.logprobs == tuple(logprob(request.index, at) for at in range(drawn))
            self.running[request.index] = [drawn]

    def _advance(self) -> None:
        """Decode the steps that the clock allows."""
        steps = int((time.monotonic() - self.begun_at) / self.engine.step_s)
        for place in self.running.values():
            place[0] += steps - self.steps_done
        self.steps_done = steps

    def poll(self, timeout_s: float) -> list[Completion]:
        assert not self.closed
        deadline = time.monotonic() + timeout_s
        while True:
            if self.engine.dies_at is not None and self.steps_done >= self.engine.dies_at:
                raise EngineDied("the engine's process was ended by SIGKILL")
            self._advance()
            ended = [index for index, (place,) in self.running.items() if place >= self.engine.lengths[index]]
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(self.engine.step_s / 2)
        for index in ended:
            del self.running[index]
            self.engine.decoded[index] = self.engine.decoded.get(index, 0)
        self.ended_at = time.time() if ended else self.ended_at
        return [self._completion(index) for index in ended]

    def _completion(self, index: int) -> Completion:
        length = range(self.engine.lengths[index])
        return Completion(
            index,
            tuple(token(index, at) for at in length),
            tuple(logprob(index, at) for at in length),
            stopped=True,
        )

    def withdraw(self, indices: Collection[int], least_tokens: int = 1) -> list[Unfinished]:
        self._advance()
        stopped = []
        for index in indices:
            drawn = self.running.get(index, [10**9])[0]
            if drawn >= self.engine.lengths[index] or self.engine.limit - drawn < least_tokens:
                continue  # it has finished, or goes on
            del self.running[index]
            self.engine.moved.append(index)
            stopped.append(
                Unfinished(
                    index,
                    tuple(token(index, at) for at in range(drawn)),
                    tuple(logprob(index, at) for at in range(drawn)),
                )
            )
        return stopped

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """`base.BackgroundEngine`.

    Args:
        lengths: tokens of the response of each sample.
        dies_at: the step after which its process has ended; `None` if it lives.
    """

    def __init__(self, lengths: Sequence[int], limit: int, step_s: float, dies_at: int | None = None) -> None:
        self.lengths, self.limit, self.step_s, self.dies_at = lengths, limit, step_s, dies_at
        self.version, self.moved, self.decoded = 0, list[int](), dict[int, int]()
        self.started: list[float] = []

    def start(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> FakeGeneration:
        self.started.append(time.time())
        return FakeGeneration(self, requests)

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        generation = self.start(requests, sampling)
        while generation.unfinished:
            yield from generation.poll(1.0)

    def load(self, buckets: Any, version: int) -> None:
        self.version = version

    def narrower(self, dtypes: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeScoring:
    """The part of `base.ScoringEngine` that a call needs. Under a team of several ranks all must run the same forwards
    in the same order: they wait for each other."""

    def __init__(self, kind: str, token_s: float, barrier: threading.Barrier | None) -> None:
        self.kind, self.token_s, self.barrier = kind, token_s, barrier
        self.forwards: list[tuple[int, ...]] = []

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> Mapping[str, Any]:
        if self.barrier is not None:
            self.barrier.wait(30)
        self.forwards.append(tuple(samples.tensor("index").tolist()))
        time.sleep(self.token_s * samples.tokens)
        if not len(samples):
            return {}
        responses = samples.ragged("responses")
        if self.kind == "values":  # one more than the response's tokens
            lengths = responses.lengths + 1
            return {"values": Ragged(places(lengths).float() % 5, lengths)}
        return {"logprobs": responses.like(responses.values.float() / 100)}


class FakePlacement:
    """What the executor asks of `Placement`, on one rank of a job in threads.

    Args:
        barriers: by call and number of the team, of calls whose teams have several ranks.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        engine: FakeEngine | None,
        token_s: float,
        barriers: Mapping[tuple[str, int], threading.Barrier],
        teams: Mapping[str, Sequence[Sequence[Sequence[int]]]],
    ) -> None:
        self.plan, self.rank, self.started = plan, rank, True
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
                self.engines[call] = [FakeScoring(kind, token_s, barriers.get((call, number)))]
        self.refreshed: list[str] = []

    def has(self, call: str) -> bool:
        return self.rank in self.plan.mesh(call)

    takes_part = has

    def prefetch(self, call: str) -> None:
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
