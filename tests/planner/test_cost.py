"""What a call is priced at. First the errors of ReaL's estimator, one each (`docs/studies/planner.md`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamas import llama, pricing, specs, work

from trl_realloc.engines.mesh_group import split_ranks
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import MAX_LOGITS, REDUCE_BUCKET, Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.activation_memory import layer_activations, working_bytes
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.call_cost import PARTS, CallCost
from trl_realloc.planner.cost.hardware import DEVICES, Link, Sharing
from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.planner.cost.profile import Observation, Profile
from trl_realloc.planner.cost.specification import rates_of
from trl_realloc.planner.cost.zero_costs import LIVE
from trl_realloc.planner.search.problem import Problem, move_seconds, quick_move_seconds
from trl_realloc.planner.search.space import Space
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
    prices = pricing(changes.pop("nodes", 1), changes.pop("per_node", 8), workload=workload, **changes)
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
    assert price("reward.forward", on(8, "zero")).parts["dispatch"] == DEVICES["h100"].call


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
    plan = {"actor.generate": on(4, "vllm"), "actor.forward": on(4, tp=2), "actor.train": on(4, first=4)}
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
    activations = (cost.transient - cost.gradients for cost in (large, small))
    assert next(activations) == pytest.approx(2 * next(activations), rel=0.05)


@pytest.mark.parametrize("call", ["actor.train", "reference.forward"])
def test_memory_is_priced_for_a_full_micro_batch_and_time_for_the_mean_of_all(call: str) -> None:
    """First-fit fills the first micro-batch up to the budget, whatever is left for the last one."""
    budget = work().tokens / 8
    one, more = (
        price(call, on(8, "zero", micro_batch_tokens=int(budget)), workload=work(episodes=episodes))
        for episodes in (128, 129)
    )
    assert more.transient == pytest.approx(one.transient)
    assert price(call, on(8, "zero", micro_batch_tokens=100)).transient == pytest.approx(
        price(call, on(8, "zero", micro_batch_tokens=256)).transient
    ), "a sample of 256 tokens is not divided"
    stages = [price(call, on(8, pp=4, micro_batch_tokens=tokens)).transient for tokens in (4096, 100_000)]
    assert stages[0] == stages[1], "a pipeline has at least a micro-batch for each stage"


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


def test_tensor_parallelism_splits_a_layers_activations_but_for_those_as_wide_as_its_input() -> None:
    of_layer = [
        working_bytes(llama(7, "score"), 1000.0, ParallelStrategy(tp=tp), pricing().rates, work(), backward=False)
        for tp in (1, 8)
    ]
    logits = [4 * 1000.0 * work().mean_response / work().mean_length / tp for tp in (1, 8)]
    layers = [of - of_logits for of, of_logits in zip(of_layer, logits, strict=True)]
    kept = layer_activations(llama(7, "score"))
    assert kept.whole == 16 * 4096 + 8 and layers[1] / layers[0] == pytest.approx(kept.of(8) / kept.of(1))


def test_layer_inputs_that_are_kept_for_recomputation_have_the_parameters_dtype() -> None:
    """Under autocast the embedding gives the residual stream its float32."""
    spec = llama(7, "score")
    narrow, wide = (
        [
            working_bytes(each, 1000.0, ParallelStrategy(), pricing().rates, work(), backward=True, held=held)
            for held in (0, 1)
        ]
        for each in (spec, replace(spec, bytes_per_element=4))
    )
    assert narrow[1] - narrow[0] == 2 * 1000 * spec.hidden * spec.layers
    assert wide[1] - wide[0] == 4 * 1000 * spec.hidden * spec.layers


@given(stage=st.integers(0, 3), dp=st.sampled_from([2, 4, 8]))
def test_each_zero_stage_holds_less(stage: int, dp: int) -> None:
    cost = price("actor.train", on(dp, "zero", zero_stage=stage))
    held = cost.static + cost.gradients
    elements = llama(7).elements
    expected = {
        0: 2 + 4 + 12,  # gradients of replicas are added up in float32
        1: 2 + 2 + 12 / dp,
        2: 2 + 2 / dp + 12 / dp,
        3: (2 + 2 + 12) / dp,
    }[stage]
    assert held == pytest.approx(elements * expected + (2 * REDUCE_BUCKET if stage == 3 else 0))


def test_a_sharded_optimizer_of_16_bit_weights_sums_gradients_in_float32_and_gathers_weights_in_16_bits() -> None:
    deepspeed, megatron = (price("actor.train", on(8, engine, dp=8, zero_stage=1)) for engine in ("zero", "megatron"))
    elements = llama(7).elements
    assert (deepspeed.gradients, megatron.gradients) == (2 * elements, 4 * elements)
    link, steps = pricing().rates.inside, work().updates
    sent = link.gather(4 * elements, 8) + link.gather(2 * elements, 8)  # a reduction to the owners, and a broadcast
    assert megatron.parts["data"] == pytest.approx(steps * sent)
    assert deepspeed.parts["data"] == pytest.approx(
        steps * (link.all_reduce(2 * elements, 8) + link.gather(2 * elements, 8))
    )


def test_deepspeeds_buffers_are_counted() -> None:
    """A bucket of gradients, all the time under stage 3, and up to a billion gathered elements of parameters."""
    costs = [price("actor.train", on(8, "zero", zero_stage=stage)) for stage in range(4)]
    training = [cost.transient - cost.gradients for cost in costs]
    more = [of_stage - training[0] for of_stage in training[1:]]
    assert more == pytest.approx([2 * REDUCE_BUCKET, 2 * REDUCE_BUCKET, 2 * LIVE])
    scoring = [price("reference.forward", on(8, "zero", zero_stage=stage)).transient for stage in (0, 3)]
    assert scoring[1] - scoring[0] == 2 * LIVE
    small = [price("reference.forward", on(8, "zero", zero_stage=stage), 1).transient for stage in (0, 3)]
    assert small[1] - small[0] == 2 * min(LIVE, llama(1).elements)
    megatron = [price("actor.train", on(8, zero_stage=stage)).transient for stage in (0, 1)]
    assert megatron[0] == megatron[1]


def test_stage_3_has_the_gradient_of_the_largest_parameter_whole_once_or_twice() -> None:
    head = llama(70).largest_parameter
    assert head == 32000 * 8192 > REDUCE_BUCKET
    few = {"workload": work(prompt_tokens=1, response_tokens=(1,), episodes=64, recompute=True), "nodes": 16}

    def beyond(devices: int) -> float:
        three, two = (
            price("actor.train", on(devices, "zero", zero_stage=stage), 70, **few).transient for stage in (3, 2)
        )
        gradients = [
            price("actor.train", on(devices, "zero", zero_stage=stage), 70, **few).gradients for stage in (3, 2)
        ]
        return three - gradients[0] - (two - gradients[1]) + 2 * REDUCE_BUCKET - 2 * LIVE

    even, odd = beyond(64), beyond(88)
    assert odd - even == pytest.approx(2 * head, rel=0.01), "16-bit gradients; 88 does not divide its elements"
    assert even < 2 * head


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


@pytest.mark.parametrize("slowdown", [1.0, 1.2, 2.0])
def test_stages_that_wait_leave_others_what_they_share(slowdown: float) -> None:
    """Two stages: while the pipeline fills and empties one of them works, as fast as alone."""
    alone = pricing(1, 2)
    shared = replace(alone, rates=AnalyticRates(DEVICES["h100"], sharing=Sharing(((2, slowdown),))))
    one, both = (each.price(GRAPH.call("critic.train"), [llama(1)], on(2, pp=2)).parts for each in (alone, shared))
    assert both["compute"] == pytest.approx(slowdown * one["compute"])
    slots = one["compute"] - one["bubble"]  # in which both work
    expected = slowdown * slots + 2 * one["bubble"]
    assert both["compute"] + both["bubble"] == pytest.approx(expected)


def test_logits_that_cannot_be_computed_in_slices_are_priced_whole() -> None:
    """Of models that cap or scale their logits, and of heads that an adapter changes."""
    rows = pricing(workload=work(episodes=1024, response_tokens=(1024,), forward_tokens=1 << 15, train_tokens=1 << 15))
    answered = (1 << 15) * 1024 / (1024 + 128)
    assert answered * 32000 > MAX_LOGITS
    for call, each in (("actor.train", 8), ("reference.forward", 4)):
        spec, assignment, graph_call = llama(7), on(8, "zero", dp=8), ppo_graph().call(call)
        sliced = rows.price(graph_call, [spec], assignment).transient
        whole = rows.price(graph_call, [replace(spec, whole_logits=True)], assignment).transient
        logits = each * (1 << 15) * 1024 / (1024 + 128) * 32000
        assert whole > sliced and whole > logits
        few = replace(rows, default_cap=1 << 10)
        assert few.price(graph_call, [replace(spec, whole_logits=True)], assignment).transient < whole


def test_a_model_known_by_its_shapes_has_logits_and_a_critic_has_none() -> None:
    shapes = [("wte.weight", (256_000, 64))]
    policy, critic = (ModelSpec.of_shapes(shapes, bytes_per_element=2, vocabulary=size) for size in (256_000, 0))
    assert (policy.outputs, critic.outputs) == (256_000, 1)
    assert (llama(7).outputs, llama(7, "score").outputs) == (32_000, 1)
    call, assignment = ppo_graph().call("actor.train"), on(8, "zero", dp=8)
    costs = [pricing().price(call, [spec], assignment) for spec in (policy, critic)]
    transients = [cost.transient - cost.gradients for cost in costs]
    tokens = work().episodes * 256 / 8
    assert transients[0] - transients[1] == pytest.approx(8 * tokens / 2 * 255_999)
    ours, judged = (pricing().price(call, [llama(7, head)], assignment) for head in ("lm", "score"))
    heads = (ours.transient - ours.gradients) - (judged.transient - judged.gradients)
    assert heads == pytest.approx(8 * tokens / 2 * 31_999)


# --- collectives between nodes ----------------------------------------------------------------------------------------

bandwidths = st.floats(1e8, 1e12)


def traffic_of_rings(nodes: int, members: int, size: float) -> tuple[float, float]:
    """The most bytes that an adapter and a link inside a node send in a ring all-gather of `size` bytes.

    There is a ring for each member of a node. It visits the nodes one after the other, enters each at this member,
    passes all members of the node and leaves by the adapter of the last one. It gathers its share of the bytes.
    """
    adapters: dict[tuple[int, int], float] = defaultdict(float)
    inside: dict[tuple[int, int], float] = defaultdict(float)
    for ring in range(members):
        order = [(node, (ring + at) % members) for node in range(nodes) for at in range(members)]
        for place, follower in zip(order, [*order[1:], order[0]], strict=True):
            sent = adapters if place[0] != follower[0] else inside
            sent[place] += (len(order) - 1) / len(order) * size / members
    return max(adapters.values()), max(inside.values(), default=0.0)


def rates_with(inside: float, between: float) -> AnalyticRates:
    links = {"inside": inside, "between": between}
    bare = {name: Link(bandwidth, 0.0, 0.0, 1.0) for name, bandwidth in links.items()}
    return AnalyticRates(DEVICES["h100"]).changed(**bare)  # type: ignore[arg-type]


@given(nodes=st.integers(2, 9), members=st.integers(1, 8), slow=bandwidths, faster=st.floats(1, 100))
def test_a_collective_between_nodes_takes_as_long_as_the_busiest_link_of_its_rings(
    nodes: int, members: int, slow: float, faster: float
) -> None:
    fast, size, n = faster * slow, 1e9, nodes * members
    by_adapter, by_link = traffic_of_rings(nodes, members, size)
    seconds = max(by_adapter / slow, by_link / fast)
    link = rates_with(fast, slow).across(members)
    assert link.all_reduce(size, n) == pytest.approx(2 * link.gather(size, n))
    if members * slow <= fast:
        assert link.gather(size, n) == pytest.approx(seconds)
    else:  # a device is priced as if it sent to the next one in its node in all rings, and in one it leaves the node
        assert seconds * 0.999 <= link.gather(size, n) <= seconds * 1.001 * max(1.0, members / max(members - 1, 1))


@given(inside=bandwidths, between=bandwidths, members=st.integers(1, 15))
def test_more_members_in_a_node_never_make_a_collective_slower(inside: float, between: float, members: int) -> None:
    fewer, more = (rates_with(inside, between).across(number) for number in (members, members + 1))
    assert more.gather(1e9, 64) <= fewer.gather(1e9, 64)
    assert fewer.gather(1e9, 64) <= rates_with(inside, between).between.gather(1e9, 64)


@given(
    between=bandwidths,
    stage=st.integers(0, 3),
    split=st.sampled_from([{"tp": 1}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]),
)
def test_devices_in_fewer_nodes_never_communicate_longer(between: float, stage: int, split: dict[str, int]) -> None:
    """The same groups on 16 nodes of 4 devices up to 2 nodes of 32."""
    if split != {"tp": 1}:
        stage = min(stage, 1)
    engine = "megatron" if split != {"tp": 1} else "zero"
    seconds = [
        price(
            "actor.train", on(64, engine, zero_stage=stage, **split), nodes=64 // n, per_node=n, between=Link(between)
        )
        for n in (4, 8, 16, 32)
    ]
    data = [cost.parts["data"] for cost in seconds]
    assert all(later <= before * (1 + 1e-9) for before, later in pairwise(data))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_over_whole_nodes_sends_by_the_adapters_of_all_devices(stage: int) -> None:
    """8 adapters of 50 GB/s are as fast as one of 400 GB/s, which the devices of a node share."""
    own, shared = (
        price("actor.train", on(16, "zero", zero_stage=stage), nodes=2, overlap=0.0, **changes)
        for changes in ({}, {"between": Link(8 * 50e9), "own_adapters": False})
    )
    one = price("actor.train", on(16, "zero", zero_stage=stage), nodes=2, overlap=0.0, own_adapters=False)
    assert own.parts == pytest.approx(shared.parts)
    assert one.parts["data"] > 7 * own.parts["data"]
    assert {**one.parts, "data": 0} == {**own.parts, "data": 0}


def test_links_inside_a_node_bound_a_collective_between_nodes() -> None:
    slow, fast = (
        price("actor.train", on(16, "zero"), nodes=2, overlap=0.0, inside=Link(60e9), between=Link(bandwidth))
        for bandwidth in (50e9, 200e9)
    )
    assert slow.parts["data"] == pytest.approx(
        price("actor.train", on(16), per_node=16, inside=Link(60e9), overlap=0.0).parts["data"]
    )
    assert slow.parts["data"] >= fast.parts["data"]


@dataclass(frozen=True)
class Asked(AnalyticRates):
    """Notes for how many members in a node it was asked."""

    members: list[int] = field(default_factory=list)

    def across(self, members: int) -> Link:
        self.members.append(members)
        return super().across(members)


@given(per_node=st.integers(1, 12), nodes=st.integers(2, 6), first=st.integers(0, 2), data=st.data())
def test_a_group_has_as_many_adapters_as_it_has_members_in_the_node_with_the_fewest(
    per_node: int, nodes: int, first: int, data: st.DataObject
) -> None:
    """Groups are those that the engines make (`split_ranks`)."""
    size = nodes * per_node
    tp = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    pp = data.draw(st.sampled_from([n for n in range(1, size // tp + 1) if size // tp % n == 0]))
    asked = Asked(DEVICES["h100"])
    prices = replace(pricing(first + nodes, per_node), rates=asked)
    assignment = on(size, first=first * per_node, tp=tp, pp=pp)
    groups = split_ranks(tuple(assignment.mesh.devices), tp, pp)

    def least(kind: str) -> int | None:
        """`None` if every group is in one node."""
        held = [Counter(rank // per_node for rank in group) for group in groups[kind]]
        return min((min(each.values()) for each in held if len(each) > 1), default=None)

    prices.training_stage(llama(7), assignment)
    assert asked.members == [number for number in (least("tp"),) if number is not None]
    asked.members.clear()
    prices.price(GRAPH.call("actor.train"), [llama(7)], assignment)
    if assignment.strategy.dp > 1:
        assert asked.members[-1] == least("dp")


@given(between=bandwidths, own=st.booleans(), tp=st.sampled_from([1, 2, 4]), stage=st.integers(0, 1))
def test_groups_in_one_node_cost_the_same_over_any_network(between: float, own: bool, tp: int, stage: int) -> None:
    assignment = on(8, tp=tp, zero_stage=stage)
    expected = price("actor.train", assignment)
    assert price("actor.train", assignment, between=Link(between), own_adapters=own) == expected
    assert price("actor.train", assignment, nodes=4, between=Link(between), own_adapters=own) == expected


@given(dp=st.sampled_from([2, 4, 8]), stage=st.integers(0, 1))
def test_groups_with_one_device_in_a_node_have_one_adapter_each(dp: int, stage: int) -> None:
    """The eight groups of a node use its eight adapters together."""
    assignment = on(8 * dp, tp=8, zero_stage=stage)
    own, shared = (price("actor.train", assignment, nodes=dp, own_adapters=adapters) for adapters in (True, False))
    assert own == shared


def test_messages_and_reallocations_between_nodes_are_of_one_adapter_each() -> None:
    own, shared = (pricing(2, own_adapters=adapters) for adapters in (True, False))
    spec, home, other = llama(7), on(8, pp=8), on(8, pp=8, first=8)
    schedule = make_schedule(own.cluster, layout_of(home, spec), layout_of(other, spec))
    seconds = move_seconds(schedule, own.rates)
    assert seconds == move_seconds(schedule, shared.rates)
    assert seconds == pytest.approx(max(schedule.traffic()[1][0]) / 50e9, rel=0.01)
    stages = [price("critic.forward", on(16, pp=16), nodes=2, own_adapters=adapters) for adapters in (True, False)]
    assert stages[0] == stages[1]


@given(members=st.integers(1, 16))
def test_a_measured_link_is_used_as_it_was_measured(members: int) -> None:
    """It was fitted to all-reduces over whole nodes, and has the bandwidth of all adapters already."""
    rows = tuple(
        Observation(work, "", 1e-4 * times + times * size * 1e-10, 16, bytes=float(size), far=True)
        for size in (1 << 18, 1 << 22, 1 << 26)
        for work, times in (("send", 1.0), ("all_reduce", 2 * 15 / 16))
    )
    profile = Profile("NVIDIA H100", {}, 16, None, True, (), nodes=2, links=rows)
    specified = rates_of(profile)
    assert isinstance(specified, AnalyticRates)
    for rates in (specified, MeasuredRates(profile)):
        assert rates.across(members) == rates.between
        assert rates.between.bandwidth == pytest.approx(1e10)
