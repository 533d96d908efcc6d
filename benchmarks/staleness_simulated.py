"""The simulated part of `staleness`: 7B + 7B on 16 nodes of 8 H100s, by the planner's prices and simulation.

Devices, models and lengths are those of `fusion_simulated`: H100s by their data sheet, lengths log-normal with a P99.9
of 10 times the median. Training is on the first nodes of a cluster, and generation and scoring on the others. For each
staleness the best division is taken. No constant is fitted to the published ratios, which are of other models, lengths
and clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusion_simulated import models, pricing

from trl_realloc.plan.algorithm_graphs import PROXIMAL_CALL, ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.staleness import Staleness
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.search.ahead_choice import choose_staleness
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.space import Space


CLUSTER, NODES, PER_NODE = "h100:16x8", 16, 8
GRAPH = ppo_graph(proximal=True)
LIMITS = (1024, 8192)
AHEAD = ("actor.generate", "reference.forward", "reward.forward")
TRAINING_TP, ENGINE_TP = (2, 4, 8), (1, 2)
STALENESS = (0, 1, 2, 4)
SEARCH_S = 10.0  # of the planner


def separate(prices: Pricing, nodes: int, tp: int, engine_tp: int, versions: int) -> ExecutionPlan:
    """Training on the first nodes, generation and scoring on the others."""
    size, cluster = nodes * PER_NODE, prices.cluster
    training, ahead = DeviceMesh(0, size), DeviceMesh(size, cluster.size - size)
    assignments = {}
    for name in GRAPH.order:
        if name == "actor.generate":
            strategy = ParallelStrategy(ahead.size // engine_tp, engine_tp)
            assignments[name] = Assignment(ahead, strategy, "vllm")
        elif name in AHEAD:
            assignments[name] = Assignment(ahead, ParallelStrategy(ahead.size // 2, 2), "megatron")
        else:
            assignments[name] = Assignment(training, ParallelStrategy(size // tp, tp), "megatron")
    return ExecutionPlan(cluster, assignments, GRAPH, staleness=Staleness(versions))


def best(prices: Pricing, specs: Mapping[str, Sequence[ModelSpec]], versions: int) -> tuple[PricedPlan, int]:
    """The fastest division that fits, and its nodes that train."""
    found = []
    for nodes in range(2, NODES, 2):
        for tp in TRAINING_TP:
            for engine_tp in ENGINE_TP:
                plan = separate(prices, nodes, tp, engine_tp, versions)
                priced = estimate_plan(plan, specs, prices, exact=False)
                if priced.fits:
                    found.append((priced.seconds, nodes, priced))
    _, nodes, priced = min(found, key=lambda each: each[:2])
    return priced, nodes


def rows() -> Iterator[dict[str, Any]]:
    """For each limit of the responses: the best synchronous plan, and a row for each staleness."""
    for limit in LIMITS:
        prices, specs = pricing(CLUSTER, limit), models(7, 7)
        specs = {**specs, PROXIMAL_CALL: specs["reference.forward"]}
        planned = choose(Space.of_run(models(7, 7), prices), time_limit_s=SEARCH_S).best
        base = {"simulated": True, "limit": limit}
        yield {**base, "plan": "the planner's, synchronous", "seconds": planned.seconds}
        synchronous = None
        for versions in STALENESS:
            priced, nodes = best(prices, specs, versions)
            synchronous = synchronous or priced.seconds
            yield {
                **base,
                "plan": "separate",
                "k": versions,
                "nodes_that_train": nodes,
                "seconds": priced.seconds,
                "gain": synchronous / priced.seconds,
                "gain_over_planned": planned.seconds / priced.seconds,
                "mean_age": priced.estimate.mean_age,
                "oldest": priced.estimate.oldest,
            }
        yield from searched(limit, planned)


def searched(limit: int, synchronous: PricedPlan, versions: Sequence[int] = STALENESS[1:]) -> Iterator[dict[str, Any]]:
    """A row for each staleness: the plan that the planner finds, of all divisions and layouts.

    Args:
        limit: most tokens of a response.
        synchronous: the planner's best plan without a staleness, which has no `actor.forward`.
    """
    prices, specs = pricing(CLUSTER, limit), models(7, 7)
    specs = {**specs, PROXIMAL_CALL: specs["actor.train"]}
    whole = choose(Space.of_run(specs, prices, graph=GRAPH), time_limit_s=SEARCH_S).best
    found = choose_staleness(whole.space, whole, max(versions), time_limit_s=SEARCH_S).plans
    for number in versions:
        plan = found[f"staleness {number}"]
        yield {
            "simulated": True,
            "limit": limit,
            "plan": "the planner's",
            "k": number,
            "nodes_ahead": plan.calls["actor.generate"].assignment.mesh.size // PER_NODE,
            "seconds": plan.seconds,
            "gain_over_planned": synchronous.seconds / plan.seconds,
            "mean_age": plan.estimate.mean_age,
            "oldest": plan.estimate.oldest,
        }
