"""A staleness is chosen where a division of the devices gains more than estimates are good for, and the user allows
it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from graphs import DPO
from limits import patience
from llamas import pricing, specs, work

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness, calls_ahead, devices_ahead
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.search.ahead_choice import choose_staleness
from trl_realloc.planner.search.ahead_problem import AheadProblem, Split, splits
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.decision import Decision
from trl_realloc.planner.search.fastest import SearchResult
from trl_realloc.planner.search.ladder import STALENESS, AllowedOptions, saving
from trl_realloc.planner.search.overlap_worth import OverlapWorth
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.space import Space


GRAPH = ppo_graph(proximal=True)
MODELS = specs(7, 7, GRAPH)
LONG_TAIL = (*range(16, 256, 8), 1024)
BALANCED = work(episodes=256, response_tokens=LONG_TAIL, epochs=1)


def costs(workload: Workload = BALANCED, nodes: int = 2) -> Pricing:
    return pricing(nodes, 8, workload)


def test_generation_and_training_of_equal_weight_are_separated() -> None:
    decision = choose(Space.of_run(MODELS, costs(), graph=GRAPH), AllowedOptions(max_staleness=2), time_limit_s=1.5)
    best = decision.best
    option = decision.option(STALENESS)
    assert option.fastest is best
    assert best.staleness.versions in (1, 2)
    baseline = option.baseline
    assert best.seconds * 1.02 < baseline.seconds and not baseline.staleness.versions
    assert f"staleness {best.staleness.versions} saves {1 - best.seconds / baseline.seconds:.0%}" in decision.summary
    plan = best.plan
    ahead = devices_ahead(plan.graph, plan.assignments)
    assert not any(ahead.intersection(plan.mesh(name).devices) for name in ("actor.train", "critic.train"))
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    again = estimate_plan(plan, MODELS, costs())
    assert (again.seconds, again.estimate.mean_age) == (best.seconds, best.estimate.mean_age)
    assert baseline.name in [other.name for other in decision.alternatives if other.plan is baseline]
    assert all(other.reason for other in decision.alternatives)
    seconds = [plan.seconds for plan in option.plans.values()]
    assert all(more <= 1.01 * less for less, more in pairwise(seconds))


def test_without_max_staleness_the_decision_is_as_before() -> None:
    plain = choose(Space.of_run(MODELS, costs(), graph=GRAPH), time_limit_s=0.5)
    assert plain.option(STALENESS) is None
    assert not plain.best.staleness.versions
    assert not any(other.plan.staleness.versions for other in plain.alternatives if other.plan)


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ("vllm", {"deterministic": True}, "full_determinism"),
        ("transformers", {}, "only a vLLM engine"),
        ("vllm", {"barrier": True}, "begins after the one before has ended"),
    ],
)
def test_where_no_plan_has_a_staleness_the_summary_says_why(engine: str, changes: dict[str, Any], said: str) -> None:
    space = Space.of_run(MODELS, costs(), graph=GRAPH, generation_engine=engine)
    decision = choose(space, AllowedOptions(max_staleness=2, **changes), time_limit_s=0.5)
    assert not decision.best.staleness.versions
    assert said in decision.summary


def test_one_device_is_not_divided() -> None:
    prices = replace(pricing(1, 1, work(episodes=8)), memory=None)
    decision = choose(
        Space.of_run(specs(1, 1, GRAPH), prices, graph=GRAPH), AllowedOptions(max_staleness=4), time_limit_s=1.0
    )
    assert not decision.best.staleness.versions
    assert "the only device cannot generate while it trains" in decision.summary


def test_engines_that_the_user_lets_sleep_do_not_run_ahead() -> None:
    space = Space.of_run(MODELS, replace(costs(), vllm_sleeps=True), graph=GRAPH)
    decision = choose(space, AllowedOptions(max_staleness=1), time_limit_s=0.5)
    assert not decision.best.staleness.versions
    assert "vllm_enable_sleep_mode" in decision.summary


def test_a_division_that_has_no_memory_for_the_models_is_not_chosen() -> None:
    models = specs(13, 13, GRAPH)
    prices = replace(pricing(1, 8, BALANCED), vllm_share=0.5, memory=DeviceMemory(84e9))
    limit_s = patience(1.0)  # in less the search finds no plan that fits
    baseline = choose(Space.of_run(models, prices, graph=GRAPH), time_limit_s=limit_s).best
    choice = choose_staleness(replace(baseline.space, pricing=prices), baseline, 1, time_limit_s=limit_s)
    for plan in choice.plans.values():
        assert plan.fits
    assert choice.plans or "memory" in choice.sentence


def test_a_graph_without_generation_has_none() -> None:
    graph = DPO
    models = {call.name: MODELS["actor.train"] for call in graph.calls}
    decision = choose(Space.of_run(models, costs(), graph=graph), AllowedOptions(max_staleness=1), time_limit_s=0.5)
    assert "no call generates" in decision.summary


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(8.0, "saves 20% of an iteration"), (9.99, "saves nothing"), (11.0, "costs 10% of an iteration")],
)
def test_a_difference_of_two_plans_in_words(seconds: float, said: str) -> None:
    prices = replace(costs(nodes=1), memory=None)
    plan = estimate_plan(separate(prices.cluster, graph=GRAPH), MODELS, prices, exact=False)
    one, other = (replace(plan, estimate=replace(plan.estimate, seconds=each)) for each in (seconds, 10.0))
    assert saving(one, other) == said


def test_a_chosen_plan_that_saves_nothing_is_not_said_to_save() -> None:
    prices = replace(costs(nodes=1), memory=None)
    plan = estimate_plan(separate(prices.cluster, graph=GRAPH), MODELS, prices, exact=False)
    decision = Decision(plan, (), SearchResult((), (), 0, 0.0, exhaustive=True))
    worth = OverlapWorth(decision, AllowedOptions(), GRAPH, MODELS, corrects=False)
    vars(worth)["apart"] = replace(plan, estimate=replace(plan.estimate, seconds=1.001 * plan.seconds))
    assert worth.rows[0].verdict == "as fast as the chosen plan"
    assert "saves" not in worth.sentences[-1]


@pytest.mark.parametrize("cluster", [Cluster(1, 2), Cluster(1, 8), Cluster(2, 8), Cluster(3, 4), Cluster(16, 8)])
def test_every_split_leaves_devices_on_both_sides_and_allows_plans_that_are_legal(cluster: Cluster) -> None:
    prices = replace(pricing(cluster.nodes, cluster.devices_per_node, work()), memory=None)
    space = Space(cluster, GRAPH, MODELS, prices, offload=False, zero_stages=(0,))
    candidates = space.candidates()
    found = 0
    for split in splits(cluster):
        assert 0 < len(split.ahead) < cluster.size
        allowed = split.candidates(space, candidates)
        if allowed is not None:
            found += 1
            problem = AheadProblem(space, allowed, split=split, versions=1)
            state = tuple(allowed[name][0] for name in problem.names)
            if problem.estimate(state).seconds < float("inf"):
                problem.priced_plan(state, "", exact=False).with_staleness(Staleness(1))  # PlanError where it is not
    assert found


@pytest.mark.parametrize("versions", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1, 4])
def test_the_bound_is_close_to_the_simulation(versions: int, epochs: int) -> None:
    prices = replace(costs(replace(BALANCED, epochs=epochs), 1), memory=None)
    plan = replace(separate(prices.cluster, graph=GRAPH), staleness=Staleness(versions))
    found = estimate_plan(plan, MODELS, prices, exact=False)
    ahead = sorted(devices_ahead(plan.graph, plan.assignments))
    split = Split(prices.cluster, range(ahead[0], ahead[-1] + 1))
    problem = AheadProblem(found.space, {}, split=split, versions=versions)
    bound = problem.estimate(tuple(found.calls.values())).seconds
    assert 0.75 * found.seconds < bound < 1.1 * found.seconds


def test_a_call_on_some_devices_ahead_and_on_idle_ones_is_left_out() -> None:
    """The critic scores on four devices, of which two generate."""
    prices = replace(pricing(1, 8, work()), memory=None)
    space = Space(prices.cluster, GRAPH, MODELS, prices, offload=False, zero_stages=(0,))
    split = Split(prices.cluster, range(4, 8))
    allowed = split.candidates(space, space.candidates())
    assert allowed is not None
    problem = AheadProblem(space, allowed, split=split, versions=1)

    def on(first: int, last: int, name: str) -> Any:
        return next(c for c in allowed[name] if (c.assignment.mesh.first, c.assignment.mesh.last) == (first, last))

    meshes = {"actor.train": (0, 3), "critic.train": (0, 3), "actor.forward": (0, 3)}
    meshes |= dict.fromkeys(calls_ahead(GRAPH), (4, 5))
    one_kind, two_kinds = (
        tuple(on(*{**meshes, "critic.forward": mesh}[name], name) for name in problem.names)
        for mesh in ((4, 5), (4, 7))
    )
    assert problem.allows(one_kind)
    assert not problem.allows(two_kinds) and problem.weight(two_kinds) > problem.weight(one_kind)
