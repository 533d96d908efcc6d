"""Streams and migration are chosen where they gain more than estimates are good for, and nowhere else."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import product

import pytest
from llamas import pricing, specs, work
from rich.console import Console

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration.stream import engine_samples
from trl_realloc.planner.iteration.stream_cost import MAX_OF_ENGINES, MAX_SAMPLES_OF_BATCH, StreamPrices
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.ladder import STREAMING, AllowedOptions
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.show import plan_cost_table
from trl_realloc.planner.search.space import Space
from trl_realloc.planner.search.stream_choice import THRESHOLDS, MigrationSweep, streams_of


LONG_TAIL = work(episodes=160, prompt_tokens=1024, response_tokens=(50,) * 19 + (1000,), epochs=1, recompute=False)
MODELS = specs(1, 13)


def costs(workload: Workload = LONG_TAIL) -> Pricing:
    return replace(pricing(1, 8, workload), memory=None)


def priced(workload: Workload = LONG_TAIL) -> PricedPlan:
    prices = costs(workload)
    return estimate_plan(flatten(prices.cluster), MODELS, prices, exact=False)


def test_a_long_tail_moves_and_the_plan_says_so() -> None:
    option = streams_of(priced())
    best = option.fastest
    assert list(option.plans.values())[1:] == [best] and best.seconds * 1.02 < option.baseline.seconds
    assert "moved to" in option.sentence
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_cost_table(best))
    assert best.streams is not None and best.streams.migration is not None
    table = console.export_text()
    assert best.plan["actor.train"].engine == "zero" and " ddp " in table and " zero " not in table
    assert f"the last {best.streams.migration.threshold:.0%} to" in table and f"{best.seconds:.3g} s" in table
    assert ExecutionPlan.from_yaml(best.plan.to_yaml()).streams == best.streams
    assert estimate_plan(best.plan, MODELS, costs(), exact=False).seconds == best.seconds


def test_the_sweep_comes_close_to_all_thresholds_and_numbers_of_engines() -> None:
    baseline = priced()
    _, moved = streams_of(baseline).plans.values()
    every = [
        baseline.with_streams(Streams(migration=Migration(threshold, engines))).seconds
        for threshold, engines in product(THRESHOLDS[::2], range(1, 8))
    ]
    assert moved.seconds <= 1.01 * min(every)


def test_streams_that_gain_nothing_are_left_out() -> None:
    """Equal lengths: all engines end at once."""
    option = streams_of(priced(replace(LONG_TAIL, response_tokens=(64,))))
    assert option.fastest is option.baseline
    assert option.baseline.plan.streams is None


def test_streams_of_a_batch_of_thousands_are_worth_what_those_of_a_smaller_one_are() -> None:
    shares = []
    for episodes in (MAX_SAMPLES_OF_BATCH, 8 * MAX_SAMPLES_OF_BATCH):
        baseline = priced(replace(LONG_TAIL, episodes=episodes))
        shares.append(baseline.with_streams(Streams()).seconds / baseline.seconds)
    assert shares[1] == pytest.approx(shares[0], rel=0.02)


@pytest.mark.parametrize("episodes", [65536, 131071, 1 << 20])
def test_no_more_samples_of_a_batch_are_simulated_for_a_thousand_engines(episodes: int) -> None:
    prices = pricing(128, 8, replace(LONG_TAIL, episodes=episodes))
    plan = replace(flatten(prices.cluster), streams=Streams())
    assert MAX_OF_ENGINES / 2 <= StreamPrices.of(plan, MODELS, prices).episodes <= MAX_OF_ENGINES


def test_streams_are_chosen_on_hundreds_of_devices() -> None:
    prices = replace(pricing(64, 8, replace(LONG_TAIL, episodes=5120)), memory=None)
    decision = choose(Space.of_run(MODELS, prices), AllowedOptions(fused_training=False), time_limit_s=1.0)
    option = decision.option(STREAMING)
    assert option.plans and decision.best is option.fastest


def test_no_migration_is_tried_after_the_deadline() -> None:
    baseline = priced()
    streamed = replace(baseline, streams=Streams()).plan.streamed
    assert MigrationSweep(baseline, streamed).best() is not None
    assert MigrationSweep(baseline, streamed, deadline=0.0).best() is None


def test_nothing_is_simulated_after_the_deadline_and_the_choice_says_so() -> None:
    option = streams_of(priced(), deadline=0.0)
    assert not option.plans and option.fastest is option.baseline
    assert "no time was left" in option.sentence


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_decision_says_what_streams_are_worth(engine: str) -> None:
    decision = choose(Space.of_run(MODELS, costs(), generation_engine=engine), time_limit_s=1.0)
    option = decision.option(STREAMING)
    assert option.sentence in decision.summary
    assert engine == "vllm" or list(option.plans) in ([], [STREAMING]), "only a vLLM engine can give its samples away"
    if decision.best.streams is not None:
        baseline = next(other.plan for other in decision.alternatives if other.plan is option.baseline)
        assert baseline is not None and baseline.streams is None
        assert baseline.seconds > decision.best.seconds


def test_an_engine_has_room_for_all_samples_that_migration_may_give_it() -> None:
    plan = flatten(costs().cluster)
    assert engine_samples(plan, "actor.generate", 160) == 20
    few, many = (replace(plan, streams=Streams(migration=Migration(threshold))) for threshold in (0.1, 0.4))
    assert engine_samples(few, "actor.generate", 160) == 20
    assert engine_samples(many, "actor.generate", 160) == 64
    two = replace(plan, streams=Streams(migration=Migration(0.4, engines=2)))
    assert engine_samples(two, "actor.generate", 160) == 32, "its part of those that move"


def test_a_deterministic_run_gets_streams_whose_bits_do_not_depend_on_the_clock() -> None:
    (plan,) = streams_of(priced(), deterministic=True).plans.values()
    assert plan.streams == Streams(deterministic=True)
    best = choose(Space.of_run(MODELS, costs()), AllowedOptions(deterministic=True), time_limit_s=1.0).best
    assert best.streams in (None, Streams(deterministic=True))
