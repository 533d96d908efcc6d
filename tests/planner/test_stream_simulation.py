"""The streamed phase in the simulation: nothing is lost, nothing is faster than it can be, nothing happens twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import pricing, specs, work

from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten, interleave, separate
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.cost.hardware import Sharing
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration.stream_cost import StreamPrices
from trl_realloc.planner.iteration.stream_simulation import MESSAGE, StreamedIteration, simulate_streams
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import estimate_plan


SCORING = ("reference.forward", "reward.forward", "critic.forward")
MODELS = specs(1, 1)


def split(cluster: Cluster, **_: Any) -> ExecutionPlan:
    """Scoring in teams of two devices, and one call sharded over all."""
    plan = flatten(cluster)
    mesh, size = cluster.mesh, cluster.size
    assignments = dict(plan.assignments)
    assignments["reference.forward"] = Assignment(mesh, ParallelStrategy(dp=size // 2, tp=2), "megatron")
    assignments["critic.forward"] = Assignment(mesh, ParallelStrategy(dp=size, zero_stage=3), "zero")
    return replace(plan, assignments=assignments)


def prices(lengths: list[int], episodes: int, devices: int, **device: float) -> Pricing:
    workload = work(episodes=episodes, prompt_tokens=16, response_tokens=tuple(lengths), forward_tokens=2048)
    return replace(pricing(1, devices, workload, **device), memory=None)


def streamed(
    plan: ExecutionPlan, costs: Pricing, streams: Streams, models: Any = MODELS
) -> tuple[PricedPlan, StreamedIteration]:
    priced = estimate_plan(replace(plan, streams=streams), models, costs, exact=False)
    return priced, priced.streamed()


makers = st.sampled_from([flatten, interleave, separate, split])
many_lengths = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    makers,
    st.sampled_from([2, 4, 8]),
    many_lengths,
    st.integers(8, 60),
    st.one_of(st.none(), st.tuples(st.floats(0.02, 0.98), st.integers(1, 2), st.integers(1, 60))),
    st.sampled_from([None, 1.0, 2.5]),
    st.booleans(),
)
def test_every_sample_is_decoded_and_scored_once_and_no_device_does_two_things_at_once(
    maker: Any,
    devices: int,
    lengths: list[int],
    episodes: int,
    migration: tuple[float, int, int] | None,
    processors: float | None,
    barrier: bool,
) -> None:
    costs = prices(lengths, episodes, devices)
    if processors is not None:
        costs = replace(costs, rates=replace(costs.rates, sharing=Sharing.of(processors)))  # type: ignore[type-var]
    plan = replace(maker(costs.cluster), barrier=barrier)
    moves = None
    if migration is not None and migration[1] < plan["actor.generate"].strategy.dp:
        moves = Migration(*migration)
    priced, result = streamed(plan, costs, Streams(migration=moves))
    found = Counter((order.call, index) for order in result.forwards for part in order.parts for index in part)
    assert found == {(call, index): 1 for call in SCORING for index in range(episodes)}
    engines = plan["actor.generate"].strategy.dp
    drawn = [length for engine in costs.workload.engine_lengths(engines) for length in engine]
    assert result.decoded == sum(drawn), "a migrated sample decodes no token twice"
    assert not result.moved or moves is not None
    calls = [span for span in result.spans if " -> " not in span.call]
    for device in range(devices):
        mine = sorted((span for span in calls if span.device == device), key=lambda span: (span.start, span.end))
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(mine))
        assert sum(span.seconds for span in mine) <= result.seconds + 1e-6, "each device's work is a lower bound"
    assert priced.seconds == result.seconds
    assert {span.call for span in priced.timeline.spans if " -> " not in span.call} == set(plan.order)
    assert priced.streamed().spans == result.spans, "deterministic"


@settings(max_examples=100, deadline=None)
@given(many_lengths, st.integers(4, 60), st.sampled_from([2, 4]))
def test_an_engine_takes_as_long_as_all_its_steps_one_by_one(lengths: list[int], episodes: int, devices: int) -> None:
    costs = prices(lengths, episodes, devices)
    plan = replace(flatten(costs.cluster), streams=Streams(), barrier=True)
    unit, result = StreamPrices(plan, MODELS, costs), streamed(plan, costs, Streams())[1]
    for engine, drawn in enumerate(costs.workload.engine_lengths(devices)):
        seconds = unit.start("actor.generate") + unit.prefill("actor.generate", [16] * len(drawn))
        for step in range(max(drawn)):
            batch = sum(length > step for length in drawn)
            seconds += unit.step("actor.generate", batch, 16 + step)
        spans = [span for span in result.spans if span.call == "actor.generate" and span.device == engine]
        assert sum(span.seconds for span in spans) == pytest.approx(seconds + 2 * MESSAGE, rel=0.02)
        assert sum(span.samples for span in spans) == len(drawn)


@pytest.mark.parametrize("completions", [1, 8])
@pytest.mark.parametrize("share", [0.032, 0.036, 0.5])
def test_an_engine_whose_cache_is_full_takes_as_long_as_priced_and_reads_the_prompt_of_a_group_once(
    completions: int, share: float
) -> None:
    """A 1B has 1.9 GB of weights, and 131,072 bytes of a token: the caches hold 5,000 tokens, 7,400, and all."""
    lengths = tuple(range(100, 420, 10))
    many = work(episodes=64, prompt_tokens=512, response_tokens=lengths, completions=completions)
    costs = replace(pricing(1, 2, many), vllm_share=share)
    plan = replace(flatten(costs.cluster, generation_engine="vllm"), streams=Streams(), barrier=True)
    priced, result = streamed(plan, costs, Streams())
    spans = [span for span in result.spans if span.call == "actor.generate" and span.device == 0]
    whole = costs.price(plan.graph.call("actor.generate"), MODELS["actor.generate"], plan["actor.generate"])
    assert priced.seconds == result.seconds
    assert sum(span.seconds for span in spans) == pytest.approx(whole.seconds, rel=0.05)
    assert result.decoded == 2 * sum(lengths)


@settings(max_examples=150, deadline=None)
@given(makers, st.sampled_from([2, 4, 8]), many_lengths, st.integers(8, 60), st.booleans())
def test_streams_are_not_slower_than_whole_batches_by_more_than_a_forward_and_messages(
    maker: Any, devices: int, lengths: list[int], episodes: int, barrier: bool
) -> None:
    """Where a forward takes as long as its tokens do, however few they are."""
    costs = prices(lengths, episodes, devices, launch=0.0, memory_bandwidth=1e30, call=0.0)
    plan = replace(maker(costs.cluster), barrier=barrier)
    whole = estimate_plan(plan, MODELS, costs, exact=False)
    result = streamed(plan, costs, Streams())[1]
    longest: Mapping[str, float] = {
        call: max(span.seconds for span in result.spans if span.call == call) for call in SCORING
    }
    messages = MESSAGE * (8 + 2 * len(result.forwards))
    assert result.seconds <= 1.02 * whole.seconds + sum(longest.values()) + messages


def long_tail(episodes: int) -> Workload:
    """A twentieth of the responses are 20 times as long as the others."""
    return work(episodes=episodes, prompt_tokens=64, response_tokens=(50,) * 19 + (1000,))


def test_few_long_samples_are_worth_moving() -> None:
    """A critic of 13B scores long prompts on the seven devices that are released."""
    costs = replace(pricing(1, 8, replace(long_tail(160), prompt_tokens=1024)), memory=None)
    plan, models = flatten(costs.cluster), specs(1, 13)
    still = streamed(plan, costs, Streams(), models)[0].seconds
    priced, moved = streamed(plan, costs, Streams(migration=Migration(0.1, 1)), models)
    assert moved.moved == 7, "the longest sample of each engine but one"
    assert priced.seconds < still
    assert len({span.device for span in moved.spans if span.call == "actor.generate"}) == 8


def test_a_sample_that_is_nearly_at_its_limit_stays() -> None:
    costs = replace(pricing(1, 8, long_tail(160)), memory=None)
    moved = streamed(flatten(costs.cluster), costs, Streams(migration=Migration(0.1, 1, least_tokens=960)))[1]
    assert moved.moved == 0, "50 of 1,000 tokens are there when the others have ended"


def test_the_next_generation_begins_beside_the_critics_training() -> None:
    """The critic, of 13B on devices of its own, trains for longer than the actor."""
    costs, models = replace(pricing(1, 8, long_tail(64)), memory=None), specs(1, 13)
    assignments = dict(flatten(costs.cluster).assignments)
    for name in ("actor.generate", "actor.train"):
        assignments[name] = replace(assignments[name], mesh=DeviceMesh(0, 4), strategy=ParallelStrategy(4))
    assignments["critic.train"] = replace(
        assignments["critic.train"], mesh=DeviceMesh(4, 4), strategy=ParallelStrategy(4)
    )
    plans = (ExecutionPlan(costs.cluster, assignments, barrier=barrier) for barrier in (True, False))
    late, early = (streamed(plan, costs, Streams(), models)[1] for plan in plans)
    assert early.seconds < late.seconds
    assert early.decoded == late.decoded


def test_an_iteration_of_hundreds_of_engines_is_simulated_in_a_second_or_two() -> None:
    """And a plan without migration decides the same twice."""
    costs = replace(pricing(32, 8, long_tail(512)), memory=None)
    plan = flatten(costs.cluster)
    first, second = (streamed(plan, costs, Streams(calls=("reward.forward",)))[1] for _ in range(2))
    assert first == second
    assert first.decoded == sum(sum(engine) for engine in costs.workload.engine_lengths(256))


@settings(max_examples=25, deadline=None)
@given(
    makers,
    st.sampled_from([2, 4]),
    st.integers(0, 10_000),
    st.sampled_from([None, 0.13, 0.37]),
    st.sampled_from([2, 4]),
)
def test_equal_samples_may_be_one(maker: Any, devices: int, seed: int, threshold: float | None, weight: int) -> None:
    """A forward has room for many of the samples that stand for several, and lengths differ: where a fifth of the batch
    ends in one step, a single sample decides whether the others move then or at the next length."""
    draw = Random(seed)
    costs = prices([draw.randint(20, 400) for _ in range(60)], 96 * devices * weight, devices)
    costs = replace(costs, workload=replace(costs.workload, forward_tokens=16_384))
    plan = maker(costs.cluster)
    migrates = threshold is not None and plan["actor.generate"].strategy.dp > 1
    plan = replace(plan, streams=Streams(migration=Migration(threshold) if migrates and threshold else None))
    whole = estimate_plan(replace(plan, streams=None), MODELS, costs, exact=False)
    rest = {name: cost.seconds for name, cost in whole.run_costs.items()}
    one_by_one, together = (
        simulate_streams(StreamPrices(plan, MODELS, costs, each), rest, whole.estimate.moves) for each in (1, weight)
    )
    assert together.seconds == pytest.approx(one_by_one.seconds, rel=0.03)
    assert together.decoded == pytest.approx(one_by_one.decoded, rel=0.03)
    scored = [index for order in together.forwards for part in order.parts for index in part]
    assert len(scored) == len(SCORING) * costs.workload.episodes // weight
