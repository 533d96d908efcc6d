"""What a call is priced at. The first tests are the errors of ReaL's estimator, one each (`docs/planner.md`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamas import llama, pricing, specs, work

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import MOST_LOGITS, Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.activation_memory import working_bytes
from trl_realloc.planner.analytic_rates import AnalyticRates
from trl_realloc.planner.call_cost import PARTS, CallCost
from trl_realloc.planner.hardware import DEVICES, Link, Sharing
from trl_realloc.planner.problem import Problem
from trl_realloc.planner.reallocation_cost import move_seconds, quick_move_seconds
from trl_realloc.planner.space import Space
from trl_realloc.realloc.layout import layout_of
from trl_realloc.realloc.schedule import make_schedule


GRAPH = ppo_graph()
SLOW = Link(1e9)


def on(size: int, engine: str = "megatron", *, first: int = 0, offload: bool = False, **degrees: Any) -> Assignment:
    inner = degrees.get("tp", 1) * degrees.get("pp", 1)
    strategy = ParallelStrategy(**{"dp": size // inner, **degrees})
    return Assignment(DeviceMesh(first, size), strategy, engine, offload)


def price(call: str, assignment: Assignment, billions: int = 7, **changes: Any) -> CallCost:
    workload = changes.pop("workload", None)
    prices = pricing(changes.pop("nodes", 1), workload=workload, **changes)
    head = "lm" if call.startswith(("actor", "reference")) else "score"
    return prices.price(GRAPH.call(call), [llama(billions, head)], assignment)


def test_messages_between_stages_cost_what_their_link_takes() -> None:
    fast, slow = (price("critic.forward", on(8, pp=8), **link) for link in ({}, {"inside": SLOW}))
    assert 0 < fast.parts["pipeline"] < slow.parts["pipeline"]
    assert "pipeline" not in price("critic.forward", on(8)).parts


def test_gradients_are_reduced_over_the_data_parallel_group() -> None:
    alone, many = (price("critic.train", on(size)) for size in (1, 8))
    assert "data" not in alone.parts
    assert many.parts["data"] > 0
    assert price("critic.train", on(8), inside=SLOW).parts["data"] > 10 * many.parts["data"]


def test_an_offloaded_role_is_brought_back_over_the_host_link() -> None:
    resting, resident = (price("reward.forward", on(8, "zero", offload=rests)) for rests in (True, False))
    assert resting.parts["load"] == pytest.approx(llama(7, "score").bytes / DEVICES["h100"].host_bandwidth)
    assert resting.static == 0
    assert resting.transient > resident.static


def test_samples_in_and_out_take_their_time() -> None:
    assert price("reward.forward", on(8, "zero")).parts["handover"] == DEVICES["h100"].call


def test_decoding_slows_as_the_cache_grows() -> None:
    rates = AnalyticRates(DEVICES["h100"])
    early, late = (rates.decode(llama(7), 64, cached, 1)[1] for cached in (128, 4096))
    assert late > 1.5 * early
    short, long = (price("actor.generate", on(8, "vllm"), workload=work(prompt_tokens=p)) for p in (128, 8192))
    assert long.parts["memory"] > short.parts["memory"]


def test_training_is_on_responses_too() -> None:
    short, long = (price("actor.train", on(8), workload=work(response_tokens=(r,))) for r in (128, 1024))
    assert long.parts["compute"] > 4 * short.parts["compute"]


def test_a_move_is_in_seconds_like_a_call() -> None:
    prices = pricing(2)
    one, other = on(8), on(8, first=8)
    spec = llama(7)
    schedule = make_schedule(prices.cluster, layout_of(one, spec), layout_of(other, spec))
    seconds = move_seconds(schedule, prices.rates)
    assert seconds == pytest.approx(spec.bytes / 8 / 50e9 + 7 / 8 * spec.bytes / 450e9, rel=0.4)


def test_a_move_to_another_mesh_costs_the_same_strategy_or_not() -> None:
    prices = pricing(2)
    spec = llama(7)
    for home, other in ((on(8), on(8, first=8)), (on(8, tp=2), on(8, tp=2, first=8))):
        assert quick_move_seconds(spec, home, other, prices) > 0
        schedule = make_schedule(prices.cluster, layout_of(home, spec), layout_of(other, spec))
        assert move_seconds(schedule, prices.rates) > 0


def test_a_role_that_generates_and_scores_besides_training_moves_twice() -> None:
    graph = DataflowGraph(
        (
            Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses",)),
            Call(Role.ACTOR, CallKind.FORWARD, ("prompts", "responses"), ("logprobs",)),
            Call(Role.ACTOR, CallKind.TRAIN, ("prompts", "responses", "logprobs")),
        )
    )
    space = Space(pricing().cluster, graph, specs(graph=graph), pricing())
    problem = Problem(space, {})
    plan = {
        "actor.generate": on(4, "vllm"),
        "actor.forward": on(4, tp=2),
        "actor.train": on(4, first=4),
    }
    estimate = problem.estimate(problem.state_of(plan))
    assert set(estimate.moves) == {"actor.generate", "actor.forward"}
    assert all(seconds > 0 for seconds in estimate.moves.values())


def test_a_cache_has_the_key_value_heads_and_not_all_heads() -> None:
    assert llama(70).kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    grouped, full = (
        pricing().price(GRAPH.call("actor.generate"), [llama(7, "lm", kv)], on(8, "vllm")) for kv in (8, 32)
    )
    assert grouped.parts["memory"] < full.parts["memory"]


# --- what should hold anyway ------------------------------------------------------------------------------------------


def test_every_second_has_a_cause_that_can_be_said() -> None:
    for call in GRAPH.order:
        engine = "vllm" if call == "actor.generate" else "megatron"
        cost = price(call, on(8, engine, tp=2))
        assert set(cost.parts) <= set(PARTS)
        assert cost.seconds == pytest.approx(sum(cost.parts.values()))
        assert all(seconds >= 0 for seconds in cost.parts.values())


@pytest.mark.parametrize("call", ["reference.forward", "actor.train"])
def test_twice_the_devices_are_nearly_twice_as_fast(call: str) -> None:
    four, eight = (price(call, on(size, "zero", zero_stage=0)) for size in (4, 8))
    assert 1.5 < four.seconds / eight.seconds <= 2.01


def test_a_pipeline_wastes_less_with_more_micro_batches() -> None:
    few, many = (price("actor.train", on(8, pp=8, micro_batch_tokens=tokens)) for tokens in (4096, 1024))
    assert many.parts["bubble"] < few.parts["bubble"]


def test_a_micro_batch_half_as_large_takes_half_the_activations() -> None:
    large, small = (price("critic.train", on(8, micro_batch_tokens=tokens)) for tokens in (2048, 1024))
    assert small.transient == pytest.approx(large.transient / 2, rel=0.05)


def test_an_engine_whose_weights_do_not_fit_in_its_share_fits_on_no_device() -> None:
    """A 13B in 16 bits has 26 GB, and 0.3 of 80 GB are 24."""
    prices = pricing(1)
    assert prices.memory is not None
    alone, split = (price("actor.generate", on(8, "vllm", tp=tp), 13) for tp in (1, 2))
    assert alone.static > prices.memory.total > split.static


@given(
    billions=st.sampled_from([1, 7, 13, 70]),
    tied=st.booleans(),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
)
def test_no_stage_of_a_pipeline_has_more_than_is_priced(billions: int, tied: bool, tp: int, pp: int) -> None:
    """The first stage has the embedding, the last one the head."""
    spec = replace(llama(billions), tied=tied, parameters=llama(billions).parameters[: -1 if tied else None])
    assignment = Assignment(DeviceMesh(0, tp * pp), ParallelStrategy(1, tp, pp), "megatron")
    layout = layout_of(assignment, spec)
    most = max(layout.bytes(device) for device in layout.devices)
    held = pricing(8).price(GRAPH.call("reference.forward"), [spec], assignment).static
    assert most * 0.999 <= held <= most * 1.01


def test_tensor_parallelism_splits_24_of_34_bytes_of_a_layers_activations() -> None:
    of_layer = [
        working_bytes(llama(7, "score"), 1000.0, ParallelStrategy(tp=tp), pricing().rates, work(), backward=False)
        for tp in (1, 8)
    ]
    logits = [4 * 1000.0 * work().mean_response / work().mean_length / tp for tp in (1, 8)]
    layers = [of - of_logits for of, of_logits in zip(of_layer, logits, strict=True)]
    assert layers[1] / layers[0] == pytest.approx((10 + 24 / 8) / 34)


@given(stage=st.integers(0, 3), dp=st.sampled_from([2, 4, 8]))
def test_each_zero_stage_holds_less(stage: int, dp: int) -> None:
    held = price("actor.train", on(dp, "zero", zero_stage=stage)).static
    elements = llama(7).elements
    expected = {
        0: 2 + 4 + 12,  # gradients of replicas are added up in float32
        1: 2 + 2 + 12 / dp,
        2: 2 + 2 / dp + 12 / dp,
        3: (2 + 2 + 12) / dp,
    }[stage]
    assert held == pytest.approx(elements * expected)


def test_a_long_tail_costs_more_than_its_mean() -> None:
    even, skewed = (
        price("actor.generate", on(8, "vllm"), workload=work(response_tokens=lengths))
        for lengths in ((256,), (64, 64, 64, 64, 64, 64, 64, 1600))
    )
    assert work(response_tokens=(64,) * 7 + (1600,)).mean_response == 256
    assert skewed.seconds > 2 * even.seconds


def test_an_engine_without_room_for_all_takes_them_in_turns() -> None:
    workload = work(episodes=2048, response_tokens=(1024,))
    prices = pricing(workload=workload)
    narrow, wide = (replace(prices, vllm_share=share) for share in (0.2, 0.8))
    call = GRAPH.call("actor.generate")
    here = on(8, "vllm")
    assert narrow.price(call, [llama(7)], here).seconds > wide.price(call, [llama(7)], here).seconds


def test_calls_of_devices_that_share_processors_take_turns() -> None:
    prices = pricing()
    shared = replace(prices, rates=AnalyticRates(DEVICES["h100"], sharing=Sharing.of(2)))
    call = GRAPH.call("reference.forward")
    alone, crowd = (each.price(call, [llama(7)], on(8, "zero")) for each in (prices, shared))
    assert crowd.seconds == pytest.approx(4 * alone.seconds)
    two = [each.price(call, [llama(7)], on(2, "zero")).seconds for each in (prices, shared)]
    assert two[0] == two[1]


def test_logits_that_cannot_be_computed_in_slices_are_priced_whole() -> None:
    """Of models that cap or scale their logits, and of heads that an adapter changes."""
    rows = pricing(workload=work(episodes=1024, response_tokens=(1024,), forward_tokens=1 << 15, train_tokens=1 << 15))
    answered = (1 << 15) * 1024 / (1024 + 128)
    assert answered * 32000 > MOST_LOGITS
    for call, each in (("actor.train", 8), ("reference.forward", 4)):
        spec, assignment, graph_call = llama(7), on(8, "zero", dp=8), ppo_graph().call(call)
        sliced = rows.price(graph_call, [spec], assignment).transient
        whole = rows.price(graph_call, [replace(spec, whole_logits=True)], assignment).transient
        tokens = rows.workload.tokens / 8 / (rows.workload.mini_batches if call == "actor.train" else 1)
        micro = tokens / -(-tokens // (1 << 15))
        logits = each * micro * 1024 / (1024 + 128) * 32000
        assert whole > sliced and whole > logits
        few = replace(rows, default_cap=1 << 10)
        assert few.price(graph_call, [replace(spec, whole_logits=True)], assignment).transient < whole


def test_a_model_known_by_its_shapes_has_logits_and_a_critic_has_none() -> None:
    shapes = [("wte.weight", (256_000, 64))]
    policy, critic = (ModelSpec.of_shapes(shapes, bytes_per_element=2, vocabulary=size) for size in (256_000, 0))
    assert (policy.outputs, critic.outputs) == (256_000, 1)
    assert (llama(7).outputs, llama(7, "score").outputs) == (32_000, 1)
    call, assignment = ppo_graph().call("actor.train"), on(8, "zero", dp=8)
    transients = [pricing().price(call, [spec], assignment).transient for spec in (policy, critic)]
    tokens = work().episodes * 256 / 8
    assert transients[0] - transients[1] == pytest.approx(8 * tokens / 2 * 255_999)
    ours, judged = (pricing().price(call, [llama(7, head)], assignment).transient for head in ("lm", "score"))
    assert ours - judged == pytest.approx(8 * tokens / 2 * 31_999)
