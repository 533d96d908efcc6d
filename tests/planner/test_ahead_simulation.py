"""Iterations with a staleness in the simulation: the bound holds, calls wait for their data and their devices, the
order is that of the run, and what must be faster is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import SMALL, pricing, specs, work

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.plan.spans import Span
from trl_realloc.plan.staleness import Staleness, calls_ahead, devices_ahead
from trl_realloc.planner.cost.hardware import Sharing
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration import ahead_simulation
from trl_realloc.planner.iteration.ahead_engine import engine_prices
from trl_realloc.planner.iteration.ahead_order import EndIteration, RunCall, TakeUpdate
from trl_realloc.planner.iteration.ahead_simulation import BETWEEN
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import estimate_plan


GRAPH = ppo_graph(proximal=True)
MODELS = specs(1, 1, GRAPH)
LONG_TAIL = (*range(16, 256, 8), 1024)


def halves(cluster: Cluster) -> ExecutionPlan:
    """The critic scores ahead, with a copy of the critic that trains."""
    return separate(cluster, graph=GRAPH)


def critic_at_home(cluster: Cluster) -> ExecutionPlan:
    plan = halves(cluster)
    home = replace(plan["critic.forward"], mesh=plan.mesh("critic.train"))
    return replace(plan, assignments={**plan.assignments, "critic.forward": home})


def apart(cluster: Cluster) -> ExecutionPlan:
    """Engines of two devices; some devices ahead score and do not generate; each role trains on devices of its own."""
    half, quarter = cluster.size // 2, cluster.size // 4
    meshes = {"actor.generate": DeviceMesh(half, half), "actor.train": DeviceMesh(0, quarter)}
    meshes |= {"critic.train": DeviceMesh(quarter, quarter), "reference.forward": DeviceMesh(half + quarter, quarter)}
    meshes |= {"reward.forward": DeviceMesh(half, quarter), "critic.forward": DeviceMesh(half, half)}
    meshes |= {"actor.forward": DeviceMesh(0, quarter)}
    assignments = {}
    for call in GRAPH.calls:
        mesh = meshes[call.name]
        tp = 2 if call.name == "actor.generate" else 1
        engine = "vllm" if call.name == "actor.generate" else "zero"
        assignments[call.name] = Assignment(mesh, ParallelStrategy(mesh.size // tp, tp), engine)
    return ExecutionPlan(cluster, assignments, GRAPH)


PLANS = {"halves": halves, "critic at home": critic_at_home, "apart": apart}


def costs(workload: Workload, processors: float | None = None) -> Pricing:
    prices = replace(pricing(1, 8, workload), memory=None)
    if processors is None:
        return prices
    return replace(prices, rates=replace(prices.rates, sharing=Sharing.of(processors)))  # type: ignore[type-var]


def priced(plan: ExecutionPlan, versions: int, prices: Pricing) -> PricedPlan:
    return estimate_plan(replace(plan, staleness=Staleness(versions)), MODELS, prices, exact=False)


def of_call(spans: tuple[Span, ...], call: str, step: int) -> list[Span]:
    return [span for span in spans if span.call == call and span.step == step]


def check_a_device_runs_one_at_a_time(spans: tuple[Span, ...], *, but: str) -> None:
    """One call, reallocation or forward at a time, `but` for the call that generates."""
    on_device: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.call != but:
            on_device[span.device].append(span)
    for of_device in on_device.values():
        for one, other in pairwise(sorted(of_device, key=lambda span: (span.start, span.end))):
            assert other.start >= one.end - 1e-9


makers = st.sampled_from(list(PLANS.values()))
many_lengths = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    makers, many_lengths, st.integers(8, 70), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 1.0, 3.0])
)
def test_the_bound_holds_and_calls_wait_for_data_and_devices(
    maker: Callable[[Cluster], ExecutionPlan],
    lengths: list[int],
    episodes: int,
    epochs: int,
    versions: int,
    processors: float | None,
) -> None:
    prices = costs(work(episodes=episodes, response_tokens=tuple(lengths), epochs=epochs), processors)
    plan = replace(maker(prices.cluster), staleness=Staleness(versions))
    found = estimate_plan(plan, MODELS, prices, exact=False).ahead()
    assert 0 <= found.mean_age <= found.oldest <= versions
    graph, ahead, devices = plan.graph, calls_ahead(plan.graph), devices_ahead(plan.graph, plan.assignments)
    steps = sorted({span.step for span in found.spans})
    for step in steps:
        for name in plan.order:
            starts = min(span.start for span in of_call(found.spans, name, step))
            for producer in filter(None, map(graph.producer, graph.call(name).inputs)):
                assert starts >= max(s.end for s in of_call(found.spans, producer, step)) - 1e-9
        trained = max(span.end for span in of_call(found.spans, "actor.train", step))
        if step + 1 in steps:
            following = of_call(found.spans, "actor.forward", step + 1)
            assert min(span.start for span in following) >= trained - 1e-9
        if step + versions + 1 in steps:
            update = max(span.end for span in of_call(found.spans, "actor.train -> actor.generate", step))
            admitted = [span.start for span in of_call(found.spans, ahead[0], step + versions + 1)]
            assert min(admitted) >= update - 1e-9, "a prompt was started before its sample could be trained in time"
    check_a_device_runs_one_at_a_time(found.spans, but=ahead[0])
    assert all(span.device in devices for span in found.spans if span.call in ahead)


def test_what_is_handed_over_between_two_iterations_takes_time() -> None:
    prices = costs(work(episodes=64, response_tokens=(64,), epochs=1))
    slow = replace(prices, calibration=replace(prices.calibration, dispatch=0.05))
    for plan in (halves(prices.cluster), critic_at_home(prices.cluster)):
        spans = priced(plan, 2, slow).ahead().spans
        for step in (1, 2, 3):
            ended = max(span.end for span in of_call(spans, "critic.train", step - 1))
            begins = min(span.start for span in of_call(spans, "actor.forward", step))
            assert begins >= ended + BETWEEN * 0.05 - 1e-9


@pytest.mark.parametrize("maker", PLANS.values(), ids=PLANS)
def test_the_devices_ahead_do_what_the_run_would_be_ordered_to_do(maker: Callable[[Cluster], ExecutionPlan]) -> None:
    prices = costs(work(episodes=64, response_tokens=LONG_TAIL, epochs=1))
    plan = replace(maker(prices.cluster), staleness=Staleness(2))
    found = estimate_plan(plan, MODELS, prices, exact=False).ahead()
    iterations = sum(isinstance(order, EndIteration) for order in found.orders)
    first = iterations - len({span.step for span in found.spans})
    update = "actor.train -> actor.generate"
    for device in plan.mesh("actor.generate").devices:
        ordered = [
            (order.iteration - first, order.call if isinstance(order, RunCall) else update)
            for order in found.orders
            if not isinstance(order, EndIteration) and first <= order.iteration < iterations
            if isinstance(order, TakeUpdate) or device in plan.mesh(order.call)
        ]
        spans = sorted((s for s in found.spans if s.device == device), key=lambda span: (span.start, span.end))
        ran = [(s.step, s.call) for s in spans if s.call == update or not (" -> " in s.call or "generate" in s.call)]
        assert ran == ordered
    assert [o.iteration for o in found.orders if isinstance(o, TakeUpdate)] == list(range(iterations))


@pytest.mark.parametrize("maker", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("epochs", [1, 2, 6])
def test_a_larger_bound_is_not_slower(maker: Callable[[Cluster], ExecutionPlan], epochs: int) -> None:
    prices = costs(work(episodes=64, response_tokens=LONG_TAIL, epochs=epochs))
    seconds = [priced(maker(prices.cluster), versions, prices).seconds for versions in (0, 1, 2, 3, 4, 8)]
    for less, more in pairwise(seconds):
        assert more <= 1.01 * less


@pytest.mark.parametrize("versions", [1, 2, 4])
def test_where_training_takes_longest_samples_wait_for_it_until_they_are_as_old_as_they_may(versions: int) -> None:
    prices = costs(work(episodes=64, response_tokens=(32,), epochs=16))
    plan = priced(halves(prices.cluster), versions, prices)
    assert plan.estimate.mean_age == pytest.approx(versions, abs=0.05)
    trains = sum(plan.costs[name].seconds for name in ("actor.forward", "actor.train", "critic.train"))
    moves = sum(plan.estimate.moves.values()) + plan.costs["critic.forward"].seconds
    assert trains <= plan.seconds <= trains + moves + 0.05 * trains, "generation and scoring cost no time"


@pytest.mark.parametrize("maker", PLANS.values(), ids=PLANS)
def test_an_iteration_takes_what_it_takes_in_the_mean_of_many(
    maker: Callable[[Cluster], ExecutionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a staleness of 2, a slow iteration comes after two fast ones: where one begins to count must not matter."""
    prices = costs(work(episodes=256, response_tokens=LONG_TAIL, epochs=1))
    few = priced(maker(prices.cluster), 2, prices)
    monkeypatch.setattr(ahead_simulation, "BATCHES", 8 * ahead_simulation.BATCHES)
    assert few.seconds == pytest.approx(priced(maker(prices.cluster), 2, prices).seconds, rel=0.01)


def test_where_generation_takes_longest_tokens_are_young_and_the_tail_costs_little() -> None:
    lengths = tuple(range(16, 512, 8))
    prices = costs(work(episodes=64, response_tokens=lengths, epochs=1))
    models = {**MODELS, "actor.generate": specs(7, 1)["actor.generate"]}
    found = estimate_plan(replace(halves(prices.cluster), staleness=Staleness(8)), models, prices, exact=False)
    assert found.estimate.mean_age < 1.5, "a batch is trained as soon as it is there"
    assert found.seconds < 0.75 * found.costs["actor.generate"].seconds
    mean = replace(prices, workload=replace(prices.workload, response_tokens=(round(prices.workload.mean_response),)))
    without_tail = estimate_plan(halves(mean.cluster), models, mean, exact=False).costs["actor.generate"].seconds
    assert found.seconds > 0.95 * without_tail, "an engine is not faster than with all of its places taken"


def test_the_trainer_waits_for_a_straggler_rather_than_break_the_bound() -> None:
    """One sample is decoded for as long as six batches take together."""
    prices = costs(work(episodes=64, response_tokens=(*range(16, 256, 8), 1024), epochs=1))
    models = {**MODELS, "actor.generate": specs(7, 1)["actor.generate"]}
    plans = [replace(halves(prices.cluster), staleness=Staleness(versions)) for versions in (1, 2, 4)]
    found = [estimate_plan(plan, models, prices, exact=False) for plan in plans]
    for plan, versions in zip(found, (1, 2, 4), strict=True):
        assert plan.estimate.oldest <= versions
        assert plan.seconds > plan.costs["actor.generate"].seconds / (versions + 1)


def test_a_long_sample_that_few_batches_have_delays_few_updates() -> None:
    """One sample in 100 is long, and a batch has 64: as in a run, some batches have none."""
    prices = costs(work(episodes=64, response_tokens=(*[32] * 99, 1024), epochs=1))
    models = {**MODELS, "actor.generate": specs(7, 1)["actor.generate"]}
    plan = estimate_plan(replace(halves(prices.cluster), staleness=Staleness(1)), models, prices, exact=False)
    seconds = [span.seconds for span in plan.ahead().spans if span.call == "actor.generate"]
    assert max(seconds) > 5 * min(seconds)
    assert plan.seconds < 0.45 * plan.costs["actor.generate"].seconds, "of two batches in turn, one is short"


def test_an_engine_decodes_on_while_its_rank_scores_where_devices_share_processors() -> None:
    """With processors for all, scoring costs an engine nothing. Where devices have their own, it costs its seconds."""
    lengths = tuple(range(16, 512, 8))
    own, shared = (costs(work(episodes=64, response_tokens=lengths, epochs=1), count) for count in (None, 1000.0))
    models = {**MODELS, "actor.generate": specs(7, 1)["actor.generate"]}
    plan = replace(halves(own.cluster), staleness=Staleness(4))
    alone, beside = (estimate_plan(plan, models, prices, exact=False) for prices in (own, shared))
    assert alone.costs == beside.costs
    scoring = sum(alone.costs[call].seconds for call in ("reference.forward", "reward.forward", "critic.forward"))
    assert alone.seconds - beside.seconds == pytest.approx(scoring, rel=0.1)


def test_a_response_that_an_update_interrupts_has_tokens_of_both_policies() -> None:
    """The update takes less than the step that is decoded when it comes, and that step still counts."""
    spec = ModelSpec.from_config(SMALL, "lm", bytes_per_element=2)
    models = dict.fromkeys(MODELS, (spec,))
    prices = costs(work(episodes=64, prompt_tokens=64, response_tokens=(160,), epochs=4))
    plan = estimate_plan(replace(halves(prices.cluster), staleness=Staleness(1)), models, prices, exact=False)
    step = engine_prices(plan.plan, "actor.generate", models, prices).step("actor.generate", 16, 100.0)
    taken = plan.estimate.moves["actor.generate"] + plan.costs["actor.generate"].parts.get("load", 0.0)
    assert taken < step
    assert plan.estimate.oldest == 1
    assert 0 < plan.estimate.mean_age < 1


def test_without_a_staleness_nothing_changes() -> None:
    prices = costs(work(response_tokens=LONG_TAIL))
    for plan in (flatten(prices.cluster, graph=GRAPH), halves(prices.cluster)):
        plain, zero = (estimate_plan(p, MODELS, prices) for p in (plan, replace(plan, staleness=Staleness(0))))
        assert plain == zero
        assert zero.estimate.mean_age == zero.estimate.oldest == 0


def test_a_batch_of_thousands_for_each_engine_is_simulated_by_a_part_of_it() -> None:
    lengths = tuple(range(16, 400, 4))
    few, many = (
        priced(halves(prices.cluster), 1, prices)
        for prices in (costs(work(episodes=4 * n, response_tokens=lengths, epochs=1)) for n in (512, 2048))
    )
    assert many.seconds == pytest.approx(4 * few.seconds, rel=0.25)
