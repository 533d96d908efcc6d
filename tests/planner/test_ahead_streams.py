"""Streams beside a staleness in the simulation: every sample is scored once and after it has ended, forwards are spread
over the devices ahead, and the planner takes streams where they gain."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import pricing, specs, work
from test_ahead_simulation import (
    GRAPH,
    LONG_TAIL,
    MODELS,
    PLANS,
    check_a_device_runs_one_at_a_time,
    costs,
    halves,
    makers,
    many_lengths,
    of_call,
)

from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.assignment import ParallelStrategy
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.staleness import Staleness, devices_ahead
from trl_realloc.plan.streams import Streams
from trl_realloc.plan.timeline import Span
from trl_realloc.planner import ahead_simulation
from trl_realloc.planner.ahead_order import AheadOrder, AheadTask, EndIteration, EndScoring, ScoreSamples
from trl_realloc.planner.choose import choose
from trl_realloc.planner.cost import Pricing
from trl_realloc.planner.dispatcher import DEPTH
from trl_realloc.planner.free_teams import FreeTeams
from trl_realloc.planner.overlap_worth import OverlapWorth
from trl_realloc.planner.priced_plan import PricedPlan
from trl_realloc.planner.problem import estimate_plan
from trl_realloc.planner.stream import stream_of
from trl_realloc.planner.stream_choice import choose_streams


LARGE_SCORERS = {**specs(1, 1, GRAPH), "reward.forward": specs(70, 1)["actor.generate"]}


def streamed(plan: ExecutionPlan, versions: int, prices: Pricing, models: Any = MODELS) -> PricedPlan:
    both = replace(plan, staleness=Staleness(versions), streams=Streams())
    return estimate_plan(both, models, prices, exact=False)


@settings(max_examples=20, deadline=None)
@given(
    makers,
    many_lengths,
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, 1.0, 3.0]),
)
def test_every_sample_is_scored_once_when_it_has_ended_and_the_bound_holds(
    maker: Callable[[Cluster], ExecutionPlan],
    lengths: list[int],
    episodes: int,
    epochs: int,
    versions: int,
    processors: float | None,
) -> None:
    prices = costs(work(episodes=episodes, response_tokens=tuple(lengths), epochs=epochs), processors)
    plan = streamed(maker(prices.cluster), versions, prices)
    found, scorings = plan.ahead(), plan.plan.streamed[1:]
    assert 0 <= found.mean_age <= found.oldest <= versions
    iterations = sum(isinstance(order, EndIteration) for order in found.orders)
    scored = defaultdict[tuple[str, int], Counter[int]](Counter)
    ended = set[tuple[str, int]]()
    for order in found.orders:
        if isinstance(order, ScoreSamples):
            assert (order.score.call, order.iteration) not in ended
            scored[order.score.call, order.iteration].update(at for part in order.score.parts for at in part)
        elif isinstance(order, EndScoring):
            ended.add((order.call, order.iteration))
    for call in scorings:
        for iteration in range(iterations):
            assert scored[call, iteration] == Counter(range(episodes))
    steps = sorted({span.step for span in found.spans})
    for step in steps:
        first = min(span.start for span in of_call(found.spans, "actor.generate", step))
        last = max(span.end for span in of_call(found.spans, "actor.generate", step))
        for call in scorings:
            spans = of_call(found.spans, call, step)
            assert min(span.start for span in spans) >= first and max(span.end for span in spans) >= last - 1e-9
    check_a_device_runs_one_at_a_time(found.spans, but="actor.generate")


@pytest.mark.parametrize("maker", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("versions", [1, 2])
def test_engines_one_by_one_take_as_long_as_engines_that_are_all_alike(
    maker: Callable[[Cluster], ExecutionPlan], versions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what streams are worth is not a matter of two ways to simulate the same."""
    prices = costs(work(episodes=256, response_tokens=LONG_TAIL, epochs=1))
    plan = replace(maker(prices.cluster), staleness=Staleness(versions))
    whole = estimate_plan(plan, MODELS, prices, exact=False)

    class WholeBatches(AheadOrder):
        def __init__(self, plan: ExecutionPlan, sources: Any, first: int, stream: object) -> None:
            super().__init__(plan, sources, first)

        def generated(self, *event: object) -> list[AheadTask]:
            return []

    monkeypatch.setattr(ahead_simulation, "AheadOrder", WholeBatches)
    one_by_one = streamed(maker(prices.cluster), versions, prices)
    assert one_by_one.seconds == pytest.approx(whole.seconds, rel=0.015)


def test_forwards_are_spread_over_the_devices_ahead() -> None:
    """Scoring holds up the engine of the same device, and the slowest engine holds up the training."""
    prices = costs(work(episodes=256, response_tokens=LONG_TAIL, epochs=1))
    plan = streamed(halves(prices.cluster), 2, prices)
    spent = Counter[int]()
    for order in plan.ahead().orders:
        if isinstance(order, ScoreSamples):
            spent[plan.plan.mesh(order.score.call).first + order.score.team] += 1
    ahead = devices_ahead(GRAPH, plan.plan.assignments)
    assert set(spent) == ahead
    assert max(spent.values()) < 1.2 * min(spent.values())


def teams_of(plan: ExecutionPlan) -> FreeTeams:
    plan = replace(plan, staleness=Staleness(1), streams=Streams())
    budgets = dict.fromkeys(plan.streamed[1:], 100)
    teams = FreeTeams(stream_of(plan, [5] * 8, 60, budgets, scores_beside=True), DEPTH)
    for rank in devices_ahead(GRAPH, plan.assignments):
        teams.join(rank)
    return teams


def test_the_next_forward_beside_engines_is_for_the_ranks_with_the_fewest_tokens() -> None:
    teams = teams_of(halves(Cluster(1, 8)))
    given_to = []
    for tokens in (50, 10, 20, 30, 5, 5):
        [best] = teams.beside_one_engine(0)
        teams.give(best, tokens)
        teams.end(best)
        given_to.append(best[1])
    assert given_to == [0, 1, 2, 3, 1, 1]  # tokens so far: 50, 10, 20, 30, then 15 and 20 of the second


def test_ranks_of_one_engine_score_at_the_same_time() -> None:
    """Otherwise each of them would hold up the engine at another time."""
    prices = replace(pricing(4, 8, work(episodes=512, response_tokens=LONG_TAIL, epochs=1)), memory=None)
    plan = halves(prices.cluster)
    by_four = replace(plan["actor.generate"], strategy=ParallelStrategy(4, 4))
    plan = replace(plan, assignments={**plan.assignments, "actor.generate": by_four})
    teams = teams_of(plan)
    first = teams.beside_one_engine(0)
    for team in first:
        teams.give(team, 10)
    assert [number for _, number in first] == [0, 1, 2, 3]
    assert [number for _, number in teams.beside_one_engine(0)] == [4, 5, 6, 7]
    of_engine = range(plan.mesh("actor.generate").first, plan.mesh("actor.generate").first + 4)
    spans = [span for span in streamed(plan, 2, prices).ahead().spans if span.device in of_engine]
    scoring = [span for span in spans if span.call in ("reference.forward", "reward.forward")]
    longest = max(sum(span.seconds for span in scoring if span.device == device) for device in of_engine)
    assert stopped(scoring) < 1.15 * longest, "the engine stands still for one of them after the other"


def stopped(spans: list[Span]) -> float:
    """Seconds in which at least one span is."""
    seconds, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        seconds += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return seconds


def test_more_samples_than_are_simulated_one_by_one_cost_as_much_as_they_are() -> None:
    few, many = (
        streamed(halves(prices.cluster), 1, prices).seconds
        for prices in (costs(work(episodes=n, response_tokens=LONG_TAIL, epochs=1)) for n in (512, 4096))
    )
    assert 2 * few < many < 8 * few


def test_scoring_that_takes_long_begins_earlier_where_that_gains() -> None:
    """A reward model of 70B: with whole batches a batch is late by all of its scoring."""
    prices = replace(pricing(1, 8, work(episodes=64, response_tokens=LONG_TAIL, epochs=1)), memory=None)
    plan = replace(halves(prices.cluster), staleness=Staleness(1))
    whole = estimate_plan(plan, LARGE_SCORERS, prices, exact=False)
    choice = choose_streams(whole)
    assert choice.still is not None and choice.moved is None, "no sample moves beside a staleness"
    assert choice.still.seconds == whole.with_streams(Streams()).seconds
    assert choice.still.staleness == whole.staleness
    assert choice.fastest is (choice.still if choice.still.seconds < 0.98 * whole.seconds else whole)


def test_streams_are_not_simulated_where_the_training_takes_all_of_an_iteration() -> None:
    prices = costs(work(episodes=64, response_tokens=(32,), epochs=16))
    plan = replace(PLANS["critic at home"](prices.cluster), staleness=Staleness(2))
    choice = choose_streams(estimate_plan(plan, MODELS, prices, exact=False))
    assert choice.still is None and "no more than estimates are good for" in choice.sentence


@pytest.fixture(scope="module")
def decided() -> tuple[Any, OverlapWorth]:
    models = specs(7, 7, GRAPH)
    prices = pricing(2, 8, work(episodes=256, response_tokens=LONG_TAIL, epochs=1))
    decision = choose(models, prices, graph=GRAPH, max_staleness=2, time_limit_s=3.0)
    return decision, OverlapWorth(decision, GRAPH, models, 2, time_limit_s=1.0)


def test_the_decision_says_what_streams_are_worth_beside_the_staleness(decided: tuple[Any, OverlapWorth]) -> None:
    decision, worth = decided
    assert set(decision.streams_ahead) <= {1, 2} and decision.best.staleness.versions in decision.streams_ahead
    chosen = decision.streams_ahead[decision.best.staleness.versions]
    assert decision.best is chosen.fastest
    assert f"beside that staleness {chosen.sentence}" in decision.summary
    rows = {way.name: way for way in worth.ways}
    for versions in decision.streams_ahead:
        assert {f"staleness {versions}", f"staleness {versions}, streams"} <= rows.keys()
    assert sum(way.verdict == "chosen" for way in worth.ways) == 1
    assert any("Streams beside this staleness" in sentence for sentence in worth.sentences)


def test_runs_whose_samples_cannot_stream_have_none_beside_a_staleness() -> None:
    models = specs(1, 1, GRAPH)
    prices = pricing(1, 8, work(episodes=64, response_tokens=LONG_TAIL, epochs=1))
    decision = choose(models, prices, graph=GRAPH, max_staleness=1, streams=False, time_limit_s=1.0)
    assert decision.best.staleness.versions and decision.best.streams is None and not decision.streams_ahead
    group = grpo_graph()
    found = choose(specs(1, 1, group), prices, graph=group, max_staleness=1, time_limit_s=1.0)
    assert all(choice.still is None for choice in found.streams_ahead.values()), "TRL's loop asks for the scoring"
