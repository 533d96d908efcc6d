"""The order of forwards on devices that score samples ahead as they end: every sample once, the earliest first."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness
from trl_realloc.plan.streams import Streams
from trl_realloc.planner.ahead_order import AheadOrder, AheadTask, EndIteration, EndScoring, ScoreSamples
from trl_realloc.planner.dispatcher import DEPTH
from trl_realloc.planner.stream import Stream, stream_of


SAMPLES, VERSIONS, UPDATES = 24, 2, 4
STREAMED = ("reference.forward", "reward.forward")
PLAN = replace(separate(Cluster(1, 4)), staleness=Staleness(VERSIONS), streams=Streams())


def stream(iteration: int) -> Stream:
    return stream_of(PLAN, [5] * SAMPLES, 60, dict.fromkeys(STREAMED, 100), scores_beside=True)


class Ranks:
    """The events of a run in random order, as far as the scoring ahead is concerned."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.order = draw, AheadOrder(PLAN, {n: tuple(PLAN.mesh(n).devices) for n in PLAN.order}, 0, stream)
        self.given: list[AheadTask] = []
        self.running: deque[ScoreSamples] = deque()
        self.scored = {name: Counter[tuple[int, int]]() for name in STREAMED}
        self.generating: dict[int, list[tuple[int, int]]] = {}
        self.begun = 0

    def take(self, orders: list[AheadTask]) -> None:
        self.given += orders
        for order in orders:
            if isinstance(order, ScoreSamples):
                self.running.append(order)
            elif isinstance(order, EndScoring):
                of_iteration = [key for key in self.scored[order.call] if key[0] == order.iteration]
                assert len(of_iteration) == SAMPLES, "ended before all samples were scored"
                for rank in PLAN.mesh(order.call).devices:
                    self.take(self.order.done(order.iteration, order.call, rank))

    def generate(self, iteration: int) -> None:
        engine, index = self.generating[iteration].pop(self.draw.randrange(len(self.generating[iteration])))
        self.take(self.order.generated(iteration, engine, [(index, self.draw.randint(1, 60))]))
        if not self.generating[iteration]:
            del self.generating[iteration]
            for rank in PLAN.mesh("actor.generate").devices:
                self.take(self.order.done(iteration, "actor.generate", rank))

    def score(self) -> None:
        at = self.draw.randrange(min(len(self.running), 2))
        order = self.running[at]
        del self.running[at]
        for part in order.score.parts:
            self.scored[order.score.call].update((order.iteration, index) for index in part)
        self.take(self.order.scored(order.iteration, order.score.number))

    def iteration(self, number: int) -> None:
        self.take(self.order.begin(number))
        last = min(UPDATES - 1, number + VERSIONS)
        for later in range(self.begun, last + 1):
            shares = enumerate(stream(later).generation.samples)
            self.generating[later] = [(engine, index) for engine, own in shares for index in own]
        self.begun = last + 1
        while self.generating.get(number) or any(not self._is_scored(number, name) for name in STREAMED):
            moves = [lambda later=later: self.generate(later) for later in self.generating]
            self.draw.choice([*moves, self.score] if self.running else moves)()
        for name in ("critic.forward", "actor.train", "critic.train"):
            for rank in PLAN.mesh(name).devices:
                self.take(self.order.done(number, name, rank))
        assert EndIteration(number) in self.given

    def _is_scored(self, number: int, name: str) -> bool:
        return EndScoring(number, name) in self.given


@given(st.randoms(use_true_random=False))
def test_every_sample_is_scored_once_by_every_streamed_call(draw: random.Random) -> None:
    ranks = Ranks(draw)
    for number in range(UPDATES):
        ranks.iteration(number)
    for name in STREAMED:
        assert ranks.scored[name] == Counter({(it, index): 1 for it in range(UPDATES) for index in range(SAMPLES)})
        ends = [order.iteration for order in ranks.given if isinstance(order, EndScoring) and order.call == name]
        assert ends == [*range(UPDATES)]


def test_earlier_samples_are_scored_first_and_no_rank_has_more_forwards_than_the_depth() -> None:
    order = AheadOrder(PLAN, {n: tuple(PLAN.mesh(n).devices) for n in PLAN.order}, 0, stream)
    order.begin(0)
    given: list[AheadTask] = []
    for iteration in (1, 0):  # the engines end a later batch first
        for engine, own in enumerate(stream(iteration).generation.samples):
            given += order.generated(iteration, engine, [(index, 40) for index in own])
    teams = Counter(o.score.team for o in given if isinstance(o, ScoreSamples))
    assert max(teams.values()) <= DEPTH
    assert {o.iteration for o in given if isinstance(o, ScoreSamples)} == {1}
    first = next(o for o in given if isinstance(o, ScoreSamples))
    assert [o.iteration for o in order.scored(1, first.score.number) if isinstance(o, ScoreSamples)] == [0]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_failure_ends_the_scoring_of_its_iteration(has_begun: bool) -> None:
    order = AheadOrder(PLAN, {n: tuple(PLAN.mesh(n).devices) for n in PLAN.order}, 0, stream)
    order.begin(0)
    if has_begun:
        order.generated(0, 0, [(0, 40)])
    assert order.scoring_failed(0) == [EndScoring(0, name, failed=True) for name in STREAMED]


def test_teams_of_a_failed_scoring_are_free_for_the_next_iteration() -> None:
    order = AheadOrder(PLAN, {n: tuple(PLAN.mesh(n).devices) for n in PLAN.order}, 0, stream)
    order.begin(0)

    def forwards(iteration: int) -> list[ScoreSamples]:
        shares = enumerate(stream(iteration).generation.samples)
        given = [o for e, own in shares for o in order.generated(iteration, e, [(index, 40) for index in own])]
        return [o for o in given if isinstance(o, ScoreSamples)]

    failed = forwards(0)
    order.scoring_failed(0)
    assert len(failed) == len(forwards(1)) > 0
    assert order.scored(0, failed[0].score.number) == [], "reported late by a team that did not fail"


def test_no_order_is_given_between_two_iterations() -> None:
    order = AheadOrder(PLAN, {n: tuple(PLAN.mesh(n).devices) for n in PLAN.order}, 0, stream)
    shares = stream(0).generation.samples
    assert order.generated(0, 0, [(index, 40) for index in shares[0]]) == []
    assert any(isinstance(o, ScoreSamples) for o in order.begin(0))
