from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from graphs import DPO, GRAPHS, GRPO, REMAX, SAMPLE
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.dataflow import Call, CallKind, DataEdge, DataflowGraph, ParameterEdge, Role


GENERATE, FORWARD, TRAIN = CallKind


@st.composite
def graphs(draw: st.DrawFn) -> DataflowGraph:
    """Any acyclic graph of up to eight calls, each with an output of its own, its calls shuffled."""
    kinds = draw(st.permutations([(role, kind) for role in Role for kind in CallKind]))
    made, calls = ["prompts"], []
    for role, kind in kinds[: draw(st.integers(1, 8))]:
        inputs = draw(st.lists(st.sampled_from(made), unique=True, max_size=3))
        outputs = [f"{role}_{kind}_{number}" for number in range(draw(st.integers(0, 2)))]
        calls.append(Call(role, kind, tuple(inputs), tuple(outputs)))
        made += outputs
    return DataflowGraph(tuple(draw(st.permutations(calls))))


def test_ppo_runs_its_six_calls_in_the_order_of_the_papers() -> None:
    graph = ppo_graph()
    assert graph.order == (
        "actor.generate",
        "reference.forward",
        "reward.forward",
        "critic.forward",
        "actor.train",
        "critic.train",
    )
    assert graph.roles == ("actor", "reference", "reward", "critic")
    assert [name for name in graph.order if graph.call(name).trains] == ["actor.train", "critic.train"]
    assert graph == ppo_graph()
    assert graph != ppo_graph(proximal=True)
    assert hash(graph) == hash(ppo_graph())


def test_ppo_hands_samples_along_its_data_edges() -> None:
    edges = {(producer, consumer): set(columns) for producer, consumer, columns in ppo_graph().data_edges}
    rollout = {"responses", "logprobs"}
    assert edges == {
        ("actor.generate", "reference.forward"): {"responses"},
        ("actor.generate", "reward.forward"): {"responses"},
        ("actor.generate", "critic.forward"): {"responses"},
        ("actor.generate", "actor.train"): rollout,
        ("actor.generate", "critic.train"): rollout,
        ("reference.forward", "actor.train"): {"ref_logprobs"},
        ("reference.forward", "critic.train"): {"ref_logprobs"},
        ("reward.forward", "actor.train"): {"scores"},
        ("reward.forward", "critic.train"): {"scores"},
        ("critic.forward", "actor.train"): {"values"},
        ("critic.forward", "critic.train"): {"values"},
    }


def test_grpo_has_the_calls_that_its_run_needs() -> None:
    assert GRPO.order == ("actor.generate", "reference.forward", "reward.forward", "actor.forward", "actor.train")
    bare = grpo_graph(reference=False, reward_models=False)
    assert bare.order == ("actor.generate", "actor.forward", "actor.train")
    assert bare.call("actor.forward").outputs == ("policy_logprobs", "entropies")
    assert bare.call("actor.train").inputs == ("prompts", "responses", "logprobs", "policy_logprobs")
    for name, form in (
        ("reference.forward", grpo_graph(reference=False)),
        ("reward.forward", grpo_graph(reward_models=False)),
    ):
        assert GRPO.without([name]) == form
    assert GRPO.without(["reference.forward", "reward.forward"]) == bare
    assert ppo_graph(proximal=True).without(["actor.forward"]) == ppo_graph()


def test_training_feeds_the_roles_other_calls_in_the_next_iteration() -> None:
    assert ppo_graph().parameter_edges == (
        ParameterEdge("actor.train", "actor.generate"),
        ParameterEdge("critic.train", "critic.forward"),
    )
    assert GRPO.parameter_edges == (("actor.train", "actor.generate"), ("actor.train", "actor.forward"))
    assert REMAX.parameter_edges == (("actor.train", "actor.generate"),)
    assert DPO.parameter_edges == ()


@pytest.mark.parametrize("name", GRAPHS)
def test_other_algorithms_are_graphs_too(name: str) -> None:
    graph = GRAPHS[name]
    assert graph.order[-1].endswith("train")
    assert graph.train_call(Role.ACTOR) == "actor.train"
    assert graph.train_call(Role.REFERENCE) is None
    assert DataflowGraph.from_dict(graph.to_dict()) == graph


@given(graphs())
def test_every_call_comes_after_those_it_reads_from(graph: DataflowGraph) -> None:
    place = {name: number for number, name in enumerate(graph.order)}
    assert sorted(place) == sorted(call.name for call in graph.calls)
    for producer, consumer, columns in graph.data_edges:
        assert place[producer] < place[consumer]
        assert all(graph.producer(column) == producer for column in columns)


@given(graphs())
def test_the_data_edges_bring_every_input_once(graph: DataflowGraph) -> None:
    for call in graph.calls:
        brought = [column for edge in graph.data_edges if edge.consumer == call.name for column in edge.columns]
        assert sorted(brought) == sorted(column for column in call.inputs if column not in graph.sources)


@given(graphs())
def test_a_graph_is_read_back_from_its_dictionary(graph: DataflowGraph) -> None:
    assert DataflowGraph.from_dict(graph.to_dict()) == graph


@given(st.randoms())
def test_independent_calls_keep_the_order_they_were_given_in(shuffle: random.Random) -> None:
    scores = [Call(role, FORWARD, ("prompts",), (role,)) for role in Role]
    shuffle.shuffle(scores)
    assert DataflowGraph(tuple(scores)).order == tuple(call.name for call in scores)


def test_columns_of_the_data_set_have_no_producer() -> None:
    assert ppo_graph().producer("prompts") is None
    assert ppo_graph().producer("scores") == "reward.forward"
    assert ppo_graph().data_edges[0] == DataEdge("actor.generate", "reference.forward", ("responses",))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: ppo_graph().call("actor.trian"), "no call 'actor.trian'; did you mean 'actor.train'"),
        (lambda: ppo_graph().call("x"), "choose from actor.generate, reference.forward"),
        (lambda: ppo_graph().producer("score"), "'score'; did you mean 'scores'"),
        (lambda: DataflowGraph((Call(Role.ACTOR, TRAIN, ("respones",)),), SAMPLE), "did you mean 'responses'"),
        (lambda: DataflowGraph((Call(Role.ACTOR, TRAIN), Call(Role.ACTOR, TRAIN))), "actor.train appears 2 times"),
        (
            lambda: DataflowGraph((Call(Role.ACTOR, TRAIN, (), ("prompts",)),)),
            "'prompts' is made twice, by the data set and by actor.train",
        ),
        (
            lambda: DataflowGraph((Call(Role.ACTOR, TRAIN, ("a",), ("b",)), Call(Role.CRITIC, TRAIN, ("b",), ("a",)))),
            "actor.train, critic.train wait for each other's outputs in a circle",
        ),
        (lambda: DataflowGraph((Call(Role.ACTOR, TRAIN, ("a",), ("a",)),)), "actor.train wait"),
        (lambda: DataflowGraph.from_dict({"calls": {"actor.trian": {}}}), "did you mean 'actor.train'"),
        (lambda: DataflowGraph.from_dict({"cals": {}}), "did you mean 'calls'"),
        (lambda: DataflowGraph.from_dict({"calls": {"actor.train": {"inputs": "prompts"}}}), r"like \[prompts, resp"),
        (lambda: DataflowGraph.from_dict([]), "no table"),
        (lambda: DataflowGraph(()), "one call or more"),
    ],
)
def test_a_graph_that_cannot_run_is_refused_with_the_remedy(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        wrong()
