"""Two calls that train are fused where the schedule of both saves more than estimates are good for."""

from __future__ import annotations

import io
import math
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from graphs import DPO
from llamas import pricing, specs, work
from rich.console import Console

from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.fused import joined
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.plan.staleness import Staleness
from trl_realloc.plan.streams import Streams
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.cost.hardware import Link
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.fused.check import (
    MAX_MEMORY,
    UniformPipeline,
    check,
    lower_bound,
    memory_limit,
    serial_memory,
    serial_time,
    uniform_bound,
)
from trl_realloc.planner.fused.pipelines import FusedPipelines, Pipeline
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.fused_choice import choose_fused, pair_of
from trl_realloc.planner.search.fused_cost import fused_prices
from trl_realloc.planner.search.ladder import FUSED, AllowedOptions, Option
from trl_realloc.planner.search.overlap_worth import OverlapWorth
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import Problem, estimate_plan
from trl_realloc.planner.search.show import overlap_table
from trl_realloc.planner.search.space import Candidate, Space


PAIR = ("actor.train", "critic.train")
MODELS = specs(7, 7)


def slow_links(bandwidth: float = 1e9, error: float = 0.02, **changes: Any) -> Pricing:
    """Four hosts of one device of 96 GB, and a link between them that is too slow for the gradients of replicas."""
    prices = replace(pricing(4, 1, work(**changes)), memory=DeviceMemory(96e9, headroom=0.0))
    rates = prices.rates.changed(between=Link(bandwidth, 1e-4))  # type: ignore[attr-defined]
    return replace(prices, rates=replace(rates, error=error))


# a mini-batch has four samples, and so four micro-batches at most
FEW = slow_links(episodes=64, prompt_tokens=512, response_tokens=(512,), mini_batches=16)


def split(mesh: str = "0-3", **degrees: int) -> Assignment:
    return Assignment(DeviceMesh.parse(mesh), ParallelStrategy(**degrees), "megatron")


def pipelined(prices: Pricing, actor: Assignment | None = None, critic: Assignment | None = None) -> ExecutionPlan:
    """Both roles train in pipelines on all devices, one after the other."""
    plan = flatten(prices.cluster)
    homes = {"actor": actor or split(pp=4), "critic": critic or split(pp=4)}
    calls = {name: homes[name.partition(".")[0]] for name in (*PAIR, "critic.forward")}
    return replace(plan, assignments={**plan.assignments, **calls})


def fused_plan(prices: Pricing, **homes: Assignment) -> PricedPlan:
    return estimate_plan(replace(pipelined(prices, **homes), fused=PAIR), MODELS, prices)


def chosen(prices: Pricing, baseline: ExecutionPlan, deadline: float = math.inf, latest: float = math.inf) -> Option:
    space = Space(prices.cluster, baseline.graph, MODELS, prices)
    return choose_fused(space, space.candidates(), estimate_plan(baseline, MODELS, prices), deadline, latest)


def overlaps(timeline: Timeline) -> list[str]:
    """What runs at the same time on one device."""
    by_device = defaultdict(list)
    for span in timeline.spans:
        by_device[span.device].append(span)
    return [
        f"{one.call} and {other.call} on device {device}"
        for device, spans in by_device.items()
        for one, other in pairwise(sorted(spans, key=lambda span: (span.start, span.end)))
        if other.start < one.end - 1e-9
    ]


def test_the_bound_of_uniform_pipelines_is_the_lower_bound() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one, factor = draw.randint(1, 4), draw.randint(1, 3)
        stages = [one, one * factor]
        draw.shuffle(stages)
        a, b = (
            UniformPipeline(n, draw.randint(1, 6), draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 3))
            for n in stages
        )
        pipelines = FusedPipelines(
            *(
                Pipeline.of(p.stages, p.micro_batches, p.forward, p.memory, p.backward, max(stages) // p.stages)
                for p in (a, b)
            )
        )
        assert uniform_bound(a, b) == lower_bound(pipelines)


@pytest.mark.parametrize("homes", [{}, {"critic": split(dp=2, pp=2)}, {"actor": split(dp=2, pp=2)}])
def test_fused_calls_take_the_makespan_of_their_schedule_and_what_is_outside(homes: dict[str, Assignment]) -> None:
    prices = slow_links(episodes=32, mini_batches=2)
    plan = fused_plan(prices, **homes)
    assert plan.fused_cost is not None and plan.fused_cost.found is not None
    pipelines, schedule = plan.fused_cost.found
    assert check(pipelines, schedule).makespan == pytest.approx(plan.fused_cost.makespan, rel=1e-12)
    updates = prices.workload.updates
    outside = sum(plan.costs[n].parts.get(p, 0.0) for n in PAIR for p in ("data", "optimizer", "dispatch"))
    assert plan.fused_cost.cost.seconds == pytest.approx(updates * plan.fused_cost.makespan + outside, rel=1e-9)
    assert pipelines.stages == 4


def test_one_after_the_other_the_stages_take_what_each_call_alone_is_priced_at() -> None:
    prices = slow_links(episodes=32, mini_batches=2)
    plan = fused_plan(prices)
    assert plan.fused_cost is not None and plan.fused_cost.found is not None
    pipelines, _ = plan.fused_cost.found
    inside = ("compute", "tensor", "bubble", "pipeline")
    alone = sum(plan.costs[name].parts.get(part, 0.0) for name in PAIR for part in inside)
    messages = sum(
        2 * stage.seconds.message
        for which, name in enumerate(PAIR)
        for stage in [fused_prices(plan.space, PAIR).stage(plan.calls[name], which)]
    )
    assert prices.workload.updates * (serial_time(pipelines) - messages) == pytest.approx(alone, rel=1e-9)
    assert plan.fused_cost.cost.seconds < sum(plan.costs[name].seconds for name in PAIR)


def test_the_activations_of_both_models_are_counted() -> None:
    prices = slow_links()
    plan, alone = fused_plan(prices), estimate_plan(pipelined(prices), MODELS, prices)
    assert plan.fused_cost is not None and plan.fused_cost.found is not None
    pipelines, schedule = plan.fused_cost.found
    limit = memory_limit(pipelines)
    assert pipelines.memory_limit == pytest.approx((limit,) * 4)
    assert max(check(pipelines, schedule).memory_peaks) <= limit * (1 + 1e-9)
    assert limit == pytest.approx(MAX_MEMORY * serial_memory(pipelines))
    assert plan.fused_cost.cost.transient > limit
    assert plan.estimate.memory > alone.estimate.memory
    assert f"while {joined(PAIR)} runs" in plan.estimate.holds
    assert sum(plan.estimate.holds.values()) == pytest.approx(plan.estimate.memory)


def test_pipelines_with_few_micro_batches_are_fused() -> None:
    prices = replace(FEW, memory=None)
    choice = chosen(prices, pipelined(prices))
    fused = choice.fastest
    assert [*choice.plans.values()] == [fused]
    saved = 1 - fused.seconds / choice.baseline.seconds
    assert saved > 0.1
    assert choice.sentence == f"fused training saves {saved:.0%} of an iteration"
    plan = fused.plan
    assert plan.fused == PAIR and fused.fits
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    again = estimate_plan(plan, MODELS, prices)
    assert again.seconds == pytest.approx(fused.seconds, rel=1e-12)
    assert again.estimate.memory == fused.estimate.memory


def test_pipelines_are_looked_at_that_neither_call_has_by_itself() -> None:
    """On halves side by side neither trains on the mesh on which both are fused."""
    prices = FEW
    halves = pipelined(prices, split("0-1", pp=2), split("2-3", pp=2))
    choice = chosen(prices, halves)
    assert {str(choice.plans[FUSED].plan.mesh(name)) for name in PAIR} == {"0-3"}


def test_the_chosen_plan_is_fused_and_the_explanation_says_what_that_saves() -> None:
    prices = slow_links(5e10, 0.001, episodes=64, prompt_tokens=900, response_tokens=(124,), mini_batches=16)
    decision = choose(Space.of_run(MODELS, prices), AllowedOptions(barrier=True), time_limit_s=1.0)
    option = decision.option(FUSED)
    fused, baseline = option.plans[FUSED], option.baseline
    assert decision.best.fused == fused.fused == PAIR and not baseline.fused
    assert decision.best.calls == fused.calls  # streams may be added
    assert fused.seconds * 1.001 < baseline.seconds
    saves = f"saves {1 - fused.seconds / baseline.seconds:.0%} of an iteration"
    assert saves in decision.summary
    assert any(other.plan is baseline and saves in other.reason for other in decision.alternatives)
    assert all(other.reason for other in decision.alternatives)
    assert not overlaps(fused.timeline)
    assert {joined(PAIR)} == {call for call in fused.timeline.calls if call.endswith(".train")}
    graph = ppo_graph(proximal=True)
    worth = OverlapWorth(decision, AllowedOptions(), graph, specs(7, 7, graph), time_limit_s=0.5)
    row = next(row for row in worth.rows if row.name == FUSED)
    assert row.plan is fused and row.verdict
    assert not worth.apart.fused and worth.baseline is baseline
    assert any(line.startswith("Fused training ") and saves in line for line in worth.sentences)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(overlap_table(worth))
    assert "fused training" in console.export_text()


def test_calls_that_train_faster_apart_are_not_fused_and_the_summary_says_so() -> None:
    decision = choose(Space.of_run(MODELS, pricing(1, 8)), time_limit_s=1.0)
    assert not decision.best.fused
    assert not decision.option(FUSED).is_chosen
    assert "fused training costs at least" in decision.summary


def test_what_is_within_the_error_of_the_estimates_is_not_chosen() -> None:
    prices = replace(FEW, memory=None)
    gain = chosen(prices, pipelined(prices))
    error = gain.baseline.seconds / gain.plans[FUSED].seconds - 1
    for less, is_chosen in ((0.99, True), (1.01, False)):
        rough = replace(prices, rates=replace(prices.rates, error=less * error))  # type: ignore[type-var]
        choice = chosen(rough, pipelined(rough))
        assert bool(choice.fastest.fused) == is_chosen
    assert "within the estimates' error" in choice.sentence


def test_a_fused_plan_that_does_not_fit_in_memory_is_not_found() -> None:
    """One after the other both fit; the activations of both at once do not."""
    prices = slow_links(episodes=64, prompt_tokens=512, response_tokens=(512,), mini_batches=16, recompute=False)
    prices = replace(prices, default_cap=1024)
    alone, fused = estimate_plan(pipelined(prices), MODELS, prices), fused_plan(prices)
    pair = [candidate for name, candidate in alone.calls.items() if name in PAIR]
    baseline = sum(c.cost.static for c in pair) + max(c.cost.transient for c in pair)
    assert fused.fused_cost is not None
    both = sum(c.cost.static for c in pair) + fused.fused_cost.cost.transient
    assert both > 1.01 * baseline
    small = DeviceMemory((baseline + both) / 2, headroom=0.0)
    tight = replace(prices, memory=small)
    space = Space(tight.cluster, alone.space.graph, MODELS, tight)
    lists = {name: [candidate] for name, candidate in alone.calls.items()}
    choice = choose_fused(space, lists, replace(alone, space=space), math.inf)
    assert not choice.plans
    assert "do not fit in a device's memory" in choice.sentence


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"graph": grpo_graph()}, "no two calls that could train at the same time"),
        ({"graph": DPO}, "no two calls that could train at the same time"),
        ({"engines": ("vllm", "zero")}, "only engine megatron has pipeline stages"),
        ({"cluster": pricing(1, 1).cluster}, "one device is no pipeline"),
    ],
)
def test_where_nothing_can_be_fused_a_sentence_says_why(changes: dict[str, Any], said: str) -> None:
    prices = slow_links()
    baseline = estimate_plan(pipelined(prices), MODELS, prices)
    space = replace(Space(prices.cluster, baseline.space.graph, MODELS, prices), **changes)
    choice = choose_fused(space, {}, baseline, math.inf)
    assert choice.fastest is baseline and said in choice.sentence


def test_without_time_no_schedule_is_searched_and_no_training_is_fused() -> None:
    prices = replace(FEW, memory=None)
    assert chosen(prices, pipelined(prices)).fastest.fused
    late = chosen(prices, pipelined(prices), latest=-math.inf)
    assert late.fastest is late.baseline and "no time was left to search its schedules" in late.sentence


def test_where_fused_training_is_not_allowed_it_is_not_searched() -> None:
    decision = choose(Space.of_run(MODELS, FEW), AllowedOptions(fused_training=False), time_limit_s=0.5)
    assert not decision.best.fused and decision.option(FUSED) is None


def test_the_pair_is_the_two_calls_that_train() -> None:
    assert pair_of(ppo_graph()) == pair_of(ppo_graph(proximal=True)) == PAIR
    assert pair_of(grpo_graph()) == ()


def test_fused_calls_are_one_task_also_where_samples_stream_or_are_generated_ahead() -> None:
    prices = pricing(1, 8)
    homes = {name: split("0-3", pp=4) for name in (*PAIR, "critic.forward")}
    base = separate(prices.cluster)
    trained_on = base.mesh("actor.train")
    homes = {name: replace(each, mesh=trained_on) for name, each in homes.items()}
    plan = replace(base, assignments={**base.assignments, **homes}, fused=PAIR)
    for changed in (replace(plan, streams=Streams()), replace(plan, staleness=Staleness(1))):
        fused, alone = (estimate_plan(each, MODELS, prices) for each in (changed, replace(changed, fused=())))
        assert joined(PAIR) in fused.timeline.calls
        assert not [call for call in overlaps(fused.timeline) if "train" in call]
        assert fused.seconds <= alone.seconds
        saved = sum(alone.costs[name].seconds for name in PAIR) - fused.run_costs[joined(PAIR)].seconds
        assert saved > 0
        assert alone.seconds - fused.seconds <= saved + 1e-9
    assert fused.estimate.oldest == 1


def test_the_search_prices_a_fused_state_as_the_plan_has_it() -> None:
    """The problem's tasks, which the search makes in its own way, and the plan's."""
    prices = slow_links()
    space = Space(prices.cluster, ppo_graph(), MODELS, prices)
    problem = Problem(space, {}, fused=PAIR, exact_fused=True)
    plan = pipelined(prices)
    state = problem.state_of(plan.assignments)
    assert all(isinstance(candidate, Candidate) for candidate in state)
    priced = problem.priced_plan(state, "")
    ends = [span.end for span in priced.timeline.spans]
    assert priced.seconds == pytest.approx(max(ends), rel=1e-9)
    optimizer = priced.run_costs[joined(PAIR)].parts["optimizer"]
    assert priced.device_seconds["optimizer"] == pytest.approx(4 * optimizer)
