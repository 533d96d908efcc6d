"""GRPO and RLOO are planned: a graph without a critic, perhaps without a reference and reward models."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from llamas import llama, pricing, specs, work

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.batching import PrefixTree
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import DataflowGraph
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import PRESETS
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration.simulate import Overlap
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.ladder import STALENESS, STREAMING, AllowedOptions
from trl_realloc.planner.search.overlap_worth import OverlapWorth
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.space import Space


FORMS = [grpo_graph(reference=r, reward_models=m) for r in (True, False) for m in (True, False)]
forms = pytest.mark.parametrize("graph", FORMS, ids=lambda graph: "+".join(graph.roles))
SIZES = {"prompt_tokens": 128.0, "response_tokens": (128,), "recompute": True}


def groups(steps: int, accumulated: int, iterations: int = 1, episodes: int = 128) -> Workload:
    return Workload.of_groups(
        steps_per_generation=steps,
        gradient_accumulation_steps=accumulated,
        num_iterations=iterations,
        episodes=episodes,
        **SIZES,
    )


@forms
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)])
def test_every_form_is_planned_beside_the_presets_it_has(graph: DataflowGraph, nodes: int, per_node: int) -> None:
    space = Space.of_run(specs(1, 1, graph), pricing(nodes, per_node, groups(1, 1)), graph=graph)
    decision = choose(space, time_limit_s=1.0)
    plan = decision.best.plan
    assert plan.graph == graph and decision.best.fits
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    compared = {
        name.partition(",")[0] for name in (decision.best.name, *(other.name for other in decision.alternatives))
    }
    assert compared & set(PRESETS) <= ({*PRESETS} if len(graph.roles) == 3 else {"flatten", "separate"})
    assert "fused" not in decision.summary, "one model is trained"
    assert decision.best.seconds <= 1.05 * min(o.plan.seconds for o in decision.alternatives if o.plan is not None)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_workload_of_groups_counts_what_samples_of_a_prompt_compute(parts: int) -> None:
    """As the trees of the samples of random mini-batches do, with all of a mini-batch on one rank."""
    work = replace(groups(parts, 1, episodes=256), completions=8)
    prompt, response = round(work.prompt_tokens), work.response_tokens[0]
    keys = [bytes([at // 8]) * prompt + bytes([at // 8, at % 8]) * (response // 2) for at in range(256)]
    whole, draw, tokens, squared = PrefixTree.of(keys, [prompt] * 256, 1), Random(0), list[int](), list[float]()
    for _ in range(50):
        tree = whole.select(draw.sample(range(256), 256 // parts))
        tokens.append(tree.tokens)
        squared.append(sum(n * n for n in tree.lengths) - sum(n * n for n in tree.shared))
    shared = work.sharing(256 / parts, 1 << 20, mini_batches=parts)
    assert shared.tokens / parts == pytest.approx(fmean(tokens), rel=0.02)
    assert shared.episodes * shared.mean_square / parts == pytest.approx(fmean(squared), rel=0.02)


def test_samples_that_are_not_in_one_micro_batch_share_nothing() -> None:
    work = replace(groups(1, 1), completions=8)
    assert work.sharing(1, 1 << 20) is work, "each rank has one"
    assert work.sharing(128, round(work.longest)) is work, "no second one fits"
    assert replace(work, prompt_tokens=4.0).sharing(128, 1 << 20).together == 1, "so short a prompt is not shared"
    assert work.sharing(128, 128 + 3 * 128).together == 3
    assert groups(1, 1).sharing(128, 1 << 20).together == 1, "one completion of a prompt"


@pytest.mark.parametrize("call", ["actor.forward", "actor.train"])
def test_scoring_and_training_are_priced_by_the_tokens_that_are_computed(call: str) -> None:
    graph = grpo_graph(reference=False, reward_models=False)
    work = Workload(episodes=128, prompt_tokens=512, response_tokens=(128,), epochs=1, train_tokens=1 << 20)
    alone, shared = (
        pricing(1, 1, replace(work, completions=count)).price(
            graph.call(call), [llama(7)], Assignment(DeviceMesh(0, 1), ParallelStrategy(1), "zero")
        )
        for count in (1, 8)
    )
    assert 2.8 < alone.parts["compute"] / shared.parts["compute"] < 640 / 192
    assert shared.transient < 0.5 * alone.transient or call == "actor.forward"


def test_adapters_of_a_model_that_cannot_be_trained_whole_fit_on_one_device() -> None:
    """7B take 121 GB with their gradients, masters and moments, of which adapters have half a percent."""
    graph = grpo_graph(reference=False, reward_models=False)
    whole = {name: [replace(spec, bytes_per_element=2) for spec in of] for name, of in specs(7, 7, graph).items()}
    lora = {**whole, "actor.train": [replace(spec, trained_share=0.005) for spec in whole["actor.train"]]}
    prices = pricing(1, 1, groups(1, 1))
    with pytest.raises(PlanError, match="actor.train fits on no mesh"):
        choose(Space.of_run(whole, prices, graph=graph), time_limit_s=0.5)
    best = choose(Space.of_run(lora, prices, graph=graph), time_limit_s=0.5).best
    (spec,) = lora["actor.train"]
    cost = best.costs["actor.train"]
    assert cost.static + cost.gradients == pytest.approx(spec.elements * (2 + 0.005 * 16))
    slower = prices.price(graph.call("actor.train"), whole["actor.train"], best.plan["actor.train"])
    assert cost.parts["compute"] < 0.8 * slower.parts["compute"]


@forms
def test_generation_may_run_ahead_of_another_librarys_loop_and_nothing_else(graph: DataflowGraph) -> None:
    prices = pricing(1, 4, groups(1, 1))
    decision = choose(
        Space.of_run(specs(1, 1, graph), prices, graph=graph), AllowedOptions(max_staleness=2), time_limit_s=2.0
    )
    plans = decision.option(STALENESS).plans
    assert [plan.staleness.versions for plan in plans.values()] == [1, 2]
    for versions, stale in enumerate(plans.values(), 1):
        assert 0 < stale.estimate.mean_age <= stale.estimate.oldest <= versions
        assert ExecutionPlan.from_yaml(stale.plan.to_yaml()) == stale.plan
        assert not stale.plan.barrier


@forms
def test_without_a_staleness_the_next_generation_waits_for_another_librarys_loop(graph: DataflowGraph) -> None:
    """Though its devices may be free before."""
    decision = choose(Space.of_run(specs(1, 1, graph), pricing(1, 4, groups(1, 1)), graph=graph), time_limit_s=1.0)
    assert not decision.best.barrier and decision.best.overlap is Overlap.NONE
    assert Overlap.of(decision.best.plan) is Overlap.NONE


def test_runs_whose_completions_take_turns_do_not_stream() -> None:
    graph = FORMS[0]
    space = Space.of_run(specs(7, 7, graph), pricing(1, 4, groups(1, 1)), graph=graph)
    decision = choose(space, AllowedOptions(streams=False), time_limit_s=1.0)
    assert decision.option(STREAMING) is None and decision.best.plan.streams is None


def test_what_a_staleness_is_worth_is_said_in_generations_and_not_without_a_correction() -> None:
    graph, prices = FORMS[-1], pricing(1, 4, groups(1, 1))
    decision = choose(Space.of_run(specs(1, 1, graph), prices, graph=graph), time_limit_s=1.0)
    for corrects in (True, False):
        worth = OverlapWorth(decision, AllowedOptions(), graph, specs(1, 1, graph), corrects, time_limit_s=1.0)
        said = " ".join((*worth.sentences, *(row.name for row in worth.rows)))
        assert "cannot begin early, because TRL's loop asks for it" in said
        assert "the next generation begins early" not in said
        assert ("generations old on average" in said) == corrects
        assert ("the loss is not corrected" in said) != corrects


def test_models_that_fit_nowhere_are_refused_with_the_cluster_that_would_do() -> None:
    graph = FORMS[-1]
    prices = replace(pricing(1, 1, groups(1, 1)), vllm_share=0.4)  # a 13B has 26 GB
    with pytest.raises(PlanError, match="of these devices would be enough"):
        choose(Space.of_run(specs(13, 13, graph), prices, graph=graph), time_limit_s=1.0)


@pytest.mark.parametrize(
    ("steps", "accumulated", "iterations", "updates"),
    [
        (8, 8, 1, 1.0),
        (8, 2, 1, 4.0),
        (8, 8, 3, 3.0),
        (8, 4, 2, 4.0),
        (2, 4, 1, 0.5),  # a step on two generations
    ],
)
def test_optimizer_steps_of_a_generation(steps: int, accumulated: int, iterations: int, updates: float) -> None:
    made = groups(steps, accumulated, iterations)
    assert (made.updates, made.epochs) == (updates, iterations)


def test_a_step_on_two_generations_costs_half_a_step_for_each() -> None:
    """The samples of both are computed, and their gradients and the optimizer's step are paid once."""
    graph, mesh = FORMS[-1], DeviceMesh(0, 8)
    train = Assignment(mesh, ParallelStrategy(8), "zero")
    one, half = (
        pricing(1, 8, made).price(graph.call("actor.train"), [llama(7)], train) for made in (groups(2, 2), groups(2, 4))
    )
    assert half.parts["compute"] == pytest.approx(one.parts["compute"], rel=0.05)
    assert half.parts["optimizer"] == pytest.approx(one.parts["optimizer"] / 2)


@pytest.mark.parametrize(
    ("steps", "accumulated", "iterations", "stay"),
    [(4, 4, 1, False), (8, 4, 1, False), (2, 4, 2, False), (2, 4, 1, True), (3, 2, 1, True)],
)
def test_gradients_stay_while_a_step_goes_on_later(steps: int, accumulated: int, iterations: int, stay: bool) -> None:
    """4 bytes of a parameter, which are there beside the engine."""
    graph, spec = FORMS[-1], llama(7)
    prices = pricing(1, 8, groups(steps, accumulated, iterations))
    cost = prices.price(graph.call("actor.train"), [spec], Assignment(DeviceMesh(0, 8), ParallelStrategy(8), "zero"))
    assert cost.static / spec.elements == 14 + 4 * stay
    assert cost.gradients / spec.elements == 4 - 4 * stay and cost.transient > cost.gradients


def test_a_workload_with_no_optimizer_steps_is_refused() -> None:
    with pytest.raises(PlanError, match=r"mini_batches is above 0, not 0"):
        replace(work(), mini_batches=0)


def test_a_plan_of_every_form_is_estimated_on_two_nodes() -> None:
    cluster = Cluster(2, 4)
    for graph in FORMS:
        plan = PRESETS["separate"](cluster, graph=graph)
        assert estimate_plan(plan, specs(1, 1, graph), pricing(2, 4, groups(1, 1))).seconds > 0
