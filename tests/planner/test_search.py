"""The best plan of a space: against all combinations where they can be counted, repeatable, and never one too large."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from graphs import GRAPHS
from hypothesis import given
from hypothesis import strategies as st
from llamas import llama, pricing, specs, work

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh, legal_meshes
from trl_realloc.plan.dataflow import CallKind
from trl_realloc.planner.cost.call_cost import CallCost
from trl_realloc.planner.iteration.simulate import Overlap
from trl_realloc.planner.search import choose as choosing
from trl_realloc.planner.search import fastest as searching
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.decision import why_slower
from trl_realloc.planner.search.fastest import _Climb, partitions, search
from trl_realloc.planner.search.ladder import AllowedOptions
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import MAX_CANDIDATES, Candidate, Space, State, _spread, meshes_of, undominated


def random_problem(seed: int, per_call: int = 4, memory: bool = True) -> Problem:
    """Eight devices; for each call some meshes with times and sizes that nobody could guess."""
    draw = random.Random(seed)
    prices = pricing()
    space = Space(prices.cluster, ppo_graph(), specs(1, 1), prices)
    choices = {}
    for call in space.graph.calls:
        own = []
        for mesh in draw.sample(legal_meshes(space.cluster), per_call):
            engine = "vllm" if call.kind is CallKind.GENERATE else "zero"
            size = draw.uniform(1e9, 40e9) if memory else 0.0
            cost = CallCost({"compute": draw.uniform(0.5, 4) * 8 / mesh.size ** draw.uniform(0.3, 1)}, size, size / 4)
            own.append(Candidate(Assignment(mesh, ParallelStrategy(mesh.size), engine), cost))
        choices[call.name] = own
    return Problem(space, choices, draw.choice(list(Overlap)))


@pytest.mark.parametrize("seed", range(36))
def test_the_search_comes_within_a_hundredth_of_all_combinations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(seed, per_call=4)
    best = min(problem.weight(state) for state in itertools.product(*problem.candidates.values()))
    monkeypatch.setattr(searching, "EXHAUSTIBLE", 0)
    monkeypatch.setattr(searching, "ROUND_S", 7)  # one round
    if best >= 1e9:
        with pytest.raises(PlanError, match="fit on no plan"):
            search(problem, time_limit_s=7)
        return
    outcome = search(problem, time_limit_s=7)
    assert not outcome.exhaustive
    assert outcome.weights[0] <= 1.01 * best


def test_few_combinations_are_all_tried() -> None:
    problem = random_problem(1, per_call=2)
    outcome = search(problem)
    assert outcome.exhaustive and not outcome.is_cut_short
    assert outcome.evaluations == 2**6


def test_the_same_problem_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "ROUND_S", 5)  # two rounds
    found = [search(random_problem(5, per_call=8), seed=3, time_limit_s=10).weights for _ in range(2)]
    assert found[0] == found[1]


def test_an_estimate_does_not_depend_on_candidates_that_are_gone() -> None:
    """A new candidate may be where another one was, and then has its `id`."""
    prices = pricing()
    space = Space(prices.cluster, ppo_graph(), specs(1, 1), prices)
    training = Assignment(DeviceMesh(0, 4), ParallelStrategy(4), "zero")
    in_place = {
        **dict.fromkeys(space.graph.order, training),
        "actor.generate": replace(training, engine="transformers"),
    }
    moved = {**in_place, "actor.generate": Assignment(DeviceMesh(4, 4), ParallelStrategy(4), "vllm")}
    of_its_own, problem = Problem(space, {}), Problem(space, {})
    expected = of_its_own.estimate(of_its_own.state_of(moved)).moves
    gone = list(problem.state_of(in_place))
    assert problem.estimate(tuple(gone)).moves == {} != expected
    state = list(problem.state_of(moved))
    for at in map(problem.names.index, ("actor.train", "actor.generate")):
        place = id(gone[at])
        gone[at] = state[at]
        made = [replace(state[at]) for _ in range(1000)]
        state[at] = next((candidate for candidate in made if id(candidate) == place), state[at])
    assert problem.estimate(tuple(state)).moves == expected


def test_the_search_keeps_its_time_limit() -> None:
    outcome = search(random_problem(5, per_call=10), time_limit_s=0.05)
    assert outcome.seconds < 1.0 and outcome.is_cut_short
    assert outcome.states


def test_few_combinations_are_not_all_tried_where_there_is_no_time_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(searching.time, "perf_counter", lambda: next(clock))  # a look takes seconds
    problem = random_problem(1, memory=False)
    outcome = search(problem, time_limit_s=100)
    assert not outcome.exhaustive
    assert outcome.states and outcome.evaluations <= 100 < 4**6


def test_a_choice_without_time_prices_one_plan_that_the_search_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer schedule of several nodes takes a third of a second, and a plan has several."""
    priced: list[str] = []
    price = Problem.priced_plan

    def counted(problem: Problem, state: State, name: str, **how: Any) -> PricedPlan:
        priced.append(name)
        return price(problem, state, name, **how)

    monkeypatch.setattr(Problem, "priced_plan", counted)
    space = Space.of_run(specs(7, 7), pricing(1))
    for share in (math.inf, 0.0):
        monkeypatch.setattr(choosing, "PRICED_SHARE", share)
        priced.clear()
        found = choose(space, AllowedOptions(fused_training=False, streams=False), time_limit_s=0.2).search.states
        assert priced.count("searched") == (len(found) if share else 1) and len(found) > 1


def test_at_128_devices_large_meshes_are_still_looked_at() -> None:
    """ReaL's cap of 1,000 candidates in the order of enumeration drops them."""
    prices = pricing(16)
    choices = Space(prices.cluster, ppo_graph(), specs(7, 7), prices).candidates()
    for own in choices.values():
        sizes = {choice.assignment.mesh.size for choice in own}
        assert {8, 64, 120, 128} <= sizes


@pytest.mark.parametrize("per_node", [3, 6, 8, 12])
def test_no_tensor_group_crosses_nodes_whatever_their_size(per_node: int) -> None:
    prices = pricing(2, per_node)
    models = {name: (replace(spec, kv_heads=24, heads=24),) for name, (spec,) in specs(1, 1).items()}
    seen = set()
    for own in Space(prices.cluster, ppo_graph(), models, prices).candidates().values():
        for assignment in (choice.assignment for choice in own):
            tp, mesh = assignment.strategy.tp, assignment.mesh
            seen.add(tp)
            nodes = {
                tuple(sorted({d // per_node for d in mesh.devices[at : at + tp]})) for at in range(0, mesh.size, tp)
            }
            assert all(len(group) == 1 for group in nodes), assignment
    assert seen == {tp for tp in range(1, per_node + 1) if per_node % tp == 0 or tp & (tp - 1) == 0}


@pytest.mark.parametrize(("devices", "degrees"), [(2, {1}), (3, {1, 3}), (6, {1, 3})])
def test_no_tensor_group_divides_heads_unevenly(devices: int, degrees: set[int]) -> None:
    """SmolLM2-135M has 9 heads and 3 key/value heads."""
    prices = pricing(1, devices)
    models = {name: (replace(spec, heads=9, kv_heads=3),) for name, (spec,) in specs(1, 1).items()}
    chosen = Space(prices.cluster, ppo_graph(), models, prices).candidates()
    assert {c.assignment.strategy.tp for own in chosen.values() for c in own} == degrees


def test_of_a_large_cluster_only_some_meshes_are_looked_at() -> None:
    cluster = Cluster(512, 8)
    meshes = meshes_of(cluster)
    assert cluster.mesh in meshes
    assert len(meshes) < 4000
    assert any(not a.overlaps(b) and a.size + b.size == cluster.size for a in meshes for b in meshes[:64])


def test_a_choice_that_another_beats_in_everything_is_left_out() -> None:
    mesh = DeviceMesh(0, 4)

    def make(seconds: float, size: float, tokens: int) -> Candidate:
        strategy = ParallelStrategy(4, micro_batch_tokens=tokens)
        return Candidate(Assignment(mesh, strategy, "zero"), CallCost({"compute": seconds}, size, 0.0))

    fast, small, bad = make(1, 8, 64), make(2, 4, 32), make(3, 9, 16)
    assert undominated([bad, small, fast]) == [fast, small]


def test_of_many_choices_those_are_kept_that_are_fast_in_little_memory_as_in_much() -> None:
    """Seconds fall as memory grows. The fastest dozen of 64 would leave none for a device that is nearly full."""
    mesh, strategy = DeviceMesh(0, 4), ParallelStrategy(4)
    many = [
        Candidate(Assignment(mesh, strategy, "zero"), CallCost({"c": 1 + at}, 2.0 ** (8 - at / 8))) for at in range(64)
    ]
    kept = undominated(many)
    assert len(kept) == MAX_CANDIDATES and kept[0] is many[0] and kept[-1] is many[-1]
    sizes = [c.cost.static for c in kept]
    assert all(before / after <= 2.0 ** (8 / (MAX_CANDIDATES - 1)) * 1.1 for before, after in pairwise(sizes))


def test_of_many_choices_that_take_no_memory_the_fastest_are_kept() -> None:
    """As of a reward that is a Python function."""
    assignment = Assignment(DeviceMesh(0, 4), ParallelStrategy(4), "zero")
    many = [Candidate(assignment, CallCost({"functions": 1 + at})) for at in range(2 * MAX_CANDIDATES)]
    assert _spread(many) == many[:MAX_CANDIDATES]


def test_a_longer_limit_searches_again_from_other_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "EXHAUSTIBLE", 0)
    monkeypatch.setattr(searching, "LOOKS", 300)
    found = [
        [search(random_problem(seed, per_call=10, memory=False), time_limit_s=limit) for limit in (5, 20)]
        for seed in range(4)
    ]
    assert all(again.weights[0] <= once.weights[0] for once, again in found)
    assert any(again.weights[0] < once.weights[0] for once, again in found)


def test_a_plan_that_would_not_fit_is_never_proposed() -> None:
    prices = pricing(1)
    chosen = choose(Space.of_run(specs(7, 7), prices), time_limit_s=1.0)
    assert chosen.best.estimate.memory <= prices.memory.usable
    assert chosen.best.fits
    assert all(each.plan is None or each.plan.fits for each in chosen.alternatives)
    flat = next(each for each in chosen.alternatives if each.name.startswith("flatten"))
    assert flat.plan is not None
    assert "ZeRO" in flat.name, "7B with its optimizer is too large for one device by itself"


def test_models_that_fit_nowhere_are_refused_with_the_smallest_cluster_that_would_do() -> None:
    with pytest.raises(PlanError) as refused:
        choose(Space.of_run(specs(70, 70), pricing(1)), time_limit_s=0.5)
    text = str(refused.value)
    assert "80 GB" in text
    assert "32 of these devices would be enough" in text or "64 of these devices would be enough" in text


def test_the_planner_beats_every_preset_and_says_why_each_lost() -> None:
    chosen = choose(Space.of_run(specs(7, 7), pricing(2)), time_limit_s=1.0)
    named = {each.name.partition(",")[0]: each for each in chosen.alternatives}
    for name in ("flatten", "interleave", "separate"):
        if name in named and named[name].plan is not None:
            assert named[name].plan.seconds >= chosen.best.seconds
            assert named[name].reason
    assert chosen.best.plan.cluster.size == 16


@pytest.mark.parametrize(
    ("wasteful", "reason"),
    [
        (["0-7"] * 6, "its calls take 48 s of devices, those of the best 24 s: more of scheduling"),
        (["0-7", "0-3", "0-1", "0-1", "0-3", "0-3"], "its calls wait for each other: its devices work 50%"),
    ],
)
def test_what_a_slower_plan_wastes_is_said_whether_work_or_waiting(wasteful: list[str], reason: str) -> None:
    prices = pricing()
    space = Space(prices.cluster, ppo_graph(), specs(1, 1), prices)

    def found(meshes: list[str]) -> PricedPlan:
        state = []
        for call, mesh in zip((space.graph.call(name) for name in space.graph.order), meshes, strict=True):
            on, engine = DeviceMesh.parse(mesh), "vllm" if call.kind is CallKind.GENERATE else "zero"
            state.append(Candidate(Assignment(on, ParallelStrategy(on.size), engine), CallCost({"launch": 1.0})))
        return Problem(space, {}).priced_plan(tuple(state), "by hand")

    best = found(["0-7", "0-3", "4-5", "6-7", "0-3", "4-7"])
    assert why_slower(found(wasteful), best).startswith(reason)


def test_where_a_plan_that_is_as_fast_differs_is_said() -> None:
    prices = pricing()
    space = Space(prices.cluster, ppo_graph(), specs(1, 1), prices)
    best = choose(Space.of_run(specs(1, 1), prices), time_limit_s=0.5).best
    state = [best.calls[name] for name in space.graph.order]
    other = Assignment(DeviceMesh.parse("0-3"), ParallelStrategy(2, 2), "megatron")
    at = space.graph.order.index("reward.forward")
    alike = Problem(space, {}).priced_plan((*state[:at], Candidate(other, state[at].cost), *state[at + 1 :]), "another")
    sentence = why_slower(replace(alike, estimate=best.estimate), best)
    assert sentence.startswith("as fast by estimate: reward.forward on 0-3 (dp2 tp2), not ")


def test_a_preset_within_the_estimates_own_error_is_preferred() -> None:
    chosen = choose(Space.of_run(specs(1, 1), pricing(1, 1)))
    assert chosen.best.name.startswith("flatten")


def test_frozen_roles_may_be_in_the_way_of_nothing() -> None:
    """Every call's memory counts on its own devices alone: roles apart need not fit together."""
    problem = random_problem(0)
    apart = {
        name: Assignment(DeviceMesh(at, 1), ParallelStrategy(1), "vllm" if at == 0 else "zero")
        for at, name in enumerate(problem.names)
    }
    state = tuple(Candidate(a, CallCost({"compute": 1.0}, 60e9, 1e9)) for a in apart.values())
    assert problem.estimate(state).memory == pytest.approx(61e9)


@pytest.mark.parametrize("name", GRAPHS)
def test_other_algorithms_are_planned_too(name: str) -> None:
    graph = GRAPHS[name]
    chosen = choose(Space.of_run(specs(7, 7, graph), pricing(1, workload=work()), graph=graph), time_limit_s=0.5)
    planned: Mapping[str, Assignment] = chosen.best.plan.assignments
    assert tuple(planned) == graph.order


def test_remax_generates_twice_for_every_sample_that_it_trains_on() -> None:
    once, twice = (
        pricing(1, workload=work()).price(graph.call("actor.generate"), [llama(7)], on(8))
        for graph in (GRAPHS["grpo"], GRAPHS["remax"])
    )
    one, other = (
        pricing(1, workload=work()).price(graph.call("actor.train"), [llama(7)], on(8, "zero"))
        for graph in (GRAPHS["grpo"], GRAPHS["remax"])
    )
    assert twice.seconds > once.seconds and one == other


def on(size: int, engine: str = "vllm") -> Assignment:
    return Assignment(DeviceMesh(0, size), ParallelStrategy(size), engine)


def test_a_copy_that_is_dropped_between_its_turns_leaves_its_memory_to_the_other_calls() -> None:
    prices = pricing(1, workload=work())
    space = Space(prices.cluster, ppo_graph(), specs(7, 7), prices)
    problem = Problem(space, {})
    shards = ParallelStrategy(8, zero_stage=3)
    plan = {name: on(8, "zero") for name in problem.names} | {"actor.generate": on(8)}
    plan |= {name: replace(on(8, "zero"), strategy=shards) for name in ("actor.train", "critic.train")}
    states = [problem.state_of({**plan, "critic.forward": replace(on(8, "zero"), drop=drop)}) for drop in (False, True)]
    kept, dropped = map(problem.estimate, states)
    assert kept.seconds < dropped.seconds < 1.01 * kept.seconds, "making it again costs next to nothing"
    assert dropped.memory < kept.memory
    here, gone = (state[problem.names.index("critic.forward")].cost for state in states)
    assert gone.static == 0 and gone.transient == here.static + here.transient


def test_what_is_in_place_is_never_dropped() -> None:
    prices = pricing(1, workload=work())
    space = Space(prices.cluster, ppo_graph(), specs(1, 1), prices)
    problem = Problem(space, {})
    plan = {name: on(8, "zero") for name in problem.names} | {"actor.generate": on(8)}
    plan["critic.forward"] = replace(plan["critic.forward"], drop=True)
    found = problem.priced_plan(problem.state_of(plan), "written")
    assert not found.plan["critic.forward"].drop


@given(nodes=st.integers(1, 6), count=st.integers(2, 5))
def test_parts_side_by_side_fill_the_devices_and_share_none(nodes: int, count: int) -> None:
    size = 1 << nodes
    found = partitions(size, count, random.Random(0))
    assert bool(found) == (count <= size)
    for meshes in found:
        assert len(meshes) == count
        assert sorted(device for mesh in meshes for device in mesh.devices) == list(range(size))


def test_three_calls_that_wait_for_the_same_one_are_put_side_by_side() -> None:
    """What changing one call or two does not find: on all devices each takes 4, on a part of them 5, so only the three
    of them apart are faster."""
    problem = random_problem(0, memory=False)
    choices = {}
    for name in problem.names:
        apart = problem.space.graph.call(name).kind is CallKind.FORWARD
        engine = "vllm" if name == "actor.generate" else "zero"
        sizes = (1, 2, 4, 8) if apart else (8,)
        choices[name] = [
            Candidate(
                Assignment(mesh, ParallelStrategy(mesh.size), engine),
                CallCost({"compute": 4.0 if mesh.size == 8 else 5.0 if mesh.size > 1 else 9.0}),
            )
            for mesh in legal_meshes(problem.space.cluster)
            if mesh.size in sizes
        ]
    wide = Problem(problem.space, choices)
    best = search(wide).states[0]
    meshes = [choice.assignment.mesh for name, choice in zip(wide.names, best, strict=True) if name.endswith("forward")]
    assert all(not one.overlaps(other) for one, other in itertools.combinations(meshes, 2))


def test_the_proximal_policys_forward_is_chosen_and_priced_as_any_forward() -> None:
    graph = ppo_graph(proximal=True)
    prices = pricing()
    chosen = choose(Space.of_run(specs(7, 7, graph), prices, graph=graph), time_limit_s=1)
    assert chosen.best.plan.graph == graph
    named = {alternative.name.partition(",")[0] for alternative in chosen.alternatives} | {chosen.best.name}
    assert named & {"flatten", "interleave"}, "presets for this graph are compared with"
    flat = Assignment(DeviceMesh(0, 8), ParallelStrategy(8), "zero")
    costs = [prices.price(graph.call(name), [llama(7)], flat) for name in ("actor.forward", "reference.forward")]
    assert costs[0] == costs[1] and costs[0].seconds > 0
    plain = choose(Space.of_run(specs(7, 7), prices), time_limit_s=1)
    assert chosen.best.seconds > plain.best.seconds


def test_a_boundary_moves_with_all_meshes_that_begin_or_end_there() -> None:
    """One of them alone would overlap with the others, so no step that changes one call leads to another boundary."""
    prices = pricing(4, 8)
    space = Space(prices.cluster, ppo_graph(), specs(1, 1), prices)
    problem = Problem(space, space.candidates())
    climb = _Climb(problem, list(problem.candidates.values()), random.Random(0), math.inf)
    policy = {name for name in problem.names if name.startswith(("actor", "reference"))}
    left, right = DeviceMesh(0, 16), DeviceMesh(16, 16)
    tables = [climb.on_mesh[at][left if name in policy else right] for at, name in enumerate(problem.names)]
    state = tuple(table[0] for table in tables)
    moved = climb._boundary(state)
    edges = set()
    for other in moved:
        ends = {c.assignment.mesh for name, c in zip(problem.names, other, strict=True) if name in policy}
        begins = {c.assignment.mesh for name, c in zip(problem.names, other, strict=True) if name not in policy}
        (edge,) = {mesh.size for mesh in ends}
        assert ends == {DeviceMesh(0, edge)} and begins == {DeviceMesh(edge, 32 - edge)}
        assert [c.assignment.engine for c in other] == [c.assignment.engine for c in state]
        edges.add(edge)
    assert edges == {8, 24}


def test_a_large_cluster_can_be_divided_at_each_sixteenth() -> None:
    for nodes in (32, 48, 100, 512):
        meshes = set(meshes_of(Cluster(nodes, 8)))
        part = math.ceil(nodes / 16) * 8
        for edge in range(part, nodes * 8, part):
            assert {DeviceMesh(0, edge), DeviceMesh(edge, nodes * 8 - edge)} <= meshes
