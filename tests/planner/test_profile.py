"""Measured unit costs: fitted from a table made of known ones, kept on disk, refused on another machine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamas import llama, work

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.call_cost import CallCost
from trl_realloc.planner.cost.estimate_factors import CalibrationFactors
from trl_realloc.planner.cost.hardware import DEVICES, Sharing
from trl_realloc.planner.cost.measured_rates import MeasuredRates, fit_unit_costs
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.profile import Observation, Profile, model_key
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.space import Space, selection_bias


ACTOR, CRITIC = llama(1), llama(1, "score")
FORWARD, TRAIN, STEP = 2e-4, 7e-4, 0.3  # seconds a token, a token, an optimizer step
DECODE, SAMPLE, PREFILL = 4e-3, 1e-4, 1e-4
LATENCY, BANDWIDTH = 1e-4, 1e9


def made_up(processors: float | None = None, devices: int = 4, **changes: object) -> Profile:
    """A machine whose costs are known; where processors are shared, all took as much longer."""
    crowd = max(1.0, devices / processors) if processors else 1.0
    rows = []
    for size in (1 << 14, 1 << 18, 1 << 22):
        rows.append(Observation("send", "", (LATENCY + size / BANDWIDTH) * crowd, devices, bytes=size))
        ring = 2 * LATENCY + 2 * (devices - 1) / devices * size / BANDWIDTH
        rows.append(Observation("all_reduce", "", ring * crowd, devices, bytes=size))
    for spec in (ACTOR, CRITIC):
        model = {"layers": spec.layers, "elements": float(spec.elements)}
        key = model_key(spec)
        for tokens, length in ((1000.0, 100.0), (2000.0, 100.0), (2000.0, 50.0), (4000.0, 50.0)):
            counts = {"tokens": tokens, "squared": tokens * length, "answered": tokens / 2}
            rows.append(Observation("forward", key, FORWARD * tokens * crowd, devices, **counts, **model))
            own = TRAIN * tokens + STEP + 2 * LATENCY + 1.5 * spec.elements * 4 / BANDWIDTH
            rows.append(Observation("train", key, own * crowd, devices, steps=1.0, **counts, **model))
    for samples, steps in ((16, 64), (32, 64), (16, 16), (32, 32), (8, 64)):
        own = DECODE * steps + SAMPLE * samples * steps + PREFILL * samples * 10
        counts = {"tokens": samples * 10.0, "steps": steps, "grown": samples * steps, "cached": samples * steps**2 / 2}
        model = {"layers": ACTOR.layers, "elements": float(ACTOR.elements)}
        rows.append(Observation("generate", model_key(ACTOR), own * crowd, devices, **counts, **model))
    rows.append(Observation("iteration", "", 0.06 * crowd, devices))
    sharing = Sharing.of(processors) if processors else None
    return Profile("a machine", {}, devices, sharing, False, tuple(rows), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("processors", [None, 2.0])
def test_what_was_measured_is_what_is_priced(processors: float | None) -> None:
    """Shared processors or not: what one device takes alone comes out."""
    rates = MeasuredRates(made_up(processors))
    whole = ACTOR.layers * rates.layer(ACTOR, 3000, 3000 * 80, 1) + rates.head(ACTOR, 1500, 1)
    assert whole == pytest.approx(FORWARD * 3000, rel=1e-6)
    back = ACTOR.layers * rates.layer_backward(ACTOR, 3000, 3000 * 80, 1) + rates.head(ACTOR, 1500, 1, backward=True)
    assert whole + back == pytest.approx(TRAIN * 3000, rel=1e-6)
    assert rates.optimizer(ACTOR.elements, 4) == pytest.approx(STEP, rel=0.05)
    assert rates.step == pytest.approx(DECODE, rel=1e-6)
    sample = ACTOR.layers * rates.decode(ACTOR, 10, 50, 1)[0] + rates.decode_head(ACTOR, 10, 1)
    assert sample == pytest.approx(10 * SAMPLE, rel=1e-6)
    assert rates.inside.send(1e6) == pytest.approx(LATENCY + 1e6 / BANDWIDTH)
    assert rates.inside.all_reduce(1e6, 4) == pytest.approx(2 * LATENCY + 1.5e6 / BANDWIDTH, rel=0.01)
    assert rates.call == pytest.approx(0.01)


def test_a_deeper_model_of_the_same_layers_takes_as_much_longer_as_it_has_layers() -> None:
    rates = MeasuredRates(made_up())
    deep = replace(llama(1), layers=3 * ACTOR.layers, parameters=())
    deep.__dict__.update(layer_elements=ACTOR.layer_elements, head_elements=ACTOR.head_elements)
    assert rates.measured(deep, 1, 1, True)
    for one, other in (
        (rates.layer(ACTOR, 1000, 1e5, 1), rates.layer(deep, 1000, 1e5, 1)),
        (rates.layer_backward(ACTOR, 1000, 1e5, 1), rates.layer_backward(deep, 1000, 1e5, 1)),
        (rates.head(ACTOR, 500, 1), rates.head(deep, 500, 1)),
        (rates.decode(ACTOR, 10, 50, 1)[0], rates.decode(deep, 10, 50, 1)[0]),
    ):
        assert one == other > 0


def test_a_step_of_several_devices_is_as_long_as_it_was_measured() -> None:
    """Its collectives are in it, and are not priced again."""
    profile = made_up()
    split = tuple(
        replace(row, tp=2, seconds=0.5 * row.seconds + 3e-3 * row.steps)
        for row in profile.observations
        if row.work == "generate"
    )
    alone = MeasuredRates(replace(profile, observations=(*profile.observations, *split)))
    assert not alone.measured(ACTOR, 2, 1, True), "nothing is known of reading the prompts"
    split += tuple(replace(row, tp=2) for row in profile.observations if row.work == "forward")
    rates = MeasuredRates(replace(profile, observations=(*profile.observations, *split)))
    assert rates.measured(ACTOR, 2, 1, True)
    call, assignment = ppo_graph().call("actor.generate"), Assignment(DeviceMesh(0, 4), ParallelStrategy(2, 2), "vllm")
    short, long = (
        Pricing(Cluster(1, 4), work(episodes=64, response_tokens=(length,)), rates).price(call, [ACTOR], assignment)
        for length in (64, 128)
    )
    assert short.parts["tensor"] == long.parts["tensor"] > 0, "of reading the prompts alone"
    each_step = 0.5 * (DECODE + 32 * SAMPLE) + 3e-3
    assert long.seconds - short.seconds == pytest.approx(64 * each_step, rel=0.15)


def test_of_equal_runs_the_fastest_counts() -> None:
    profile = made_up()
    rows = tuple(
        replace(row, seconds=factor * row.seconds) for factor in (5.0, 1.0, 3.0) for row in profile.observations
    )
    one, other = MeasuredRates(profile), MeasuredRates(replace(profile, observations=rows))
    assert one.layer(ACTOR, 1000, 1e5, 1) == other.layer(ACTOR, 1000, 1e5, 1)
    assert one.step == other.step


def test_a_tensor_parallel_part_computes_at_least_its_share_of_a_layer() -> None:
    """Where four ranks share two processors, one computes while another waits for a message."""
    profile = made_up()
    rows = [row for row in profile.observations if row.work in ("forward", "train")]
    for factor in (0.1, 10.0):
        split = tuple(replace(row, tp=2, seconds=factor * row.seconds) for row in rows)
        rates = MeasuredRates(replace(profile, observations=(*profile.observations, *split)))
        for of_layer in (rates.layer, rates.layer_backward):
            whole, part = (of_layer(ACTOR, 1000, 1e5, tp) for tp in (1, 2))
            assert part == pytest.approx(whole / 2) if factor < 1 else part > whole


def test_layouts_among_which_a_search_chooses_take_longer_than_estimated_until_a_run_has_shown_them() -> None:
    assert selection_bias([1.0], 0.1) == 0 == selection_bias([1.0, 1.0], 0.0) == selection_bias([0.0, 0.0], 0.1)
    assert selection_bias([1.0, 1.0], 0.1) == pytest.approx(0.1 / math.pi**0.5, rel=0.15), "the lower of two normals"
    assert selection_bias([1.0, 1.1], 0.1) < selection_bias([1.0, 1.0], 0.1) < selection_bias([1.0] * 4, 0.1)
    assert selection_bias([1.0, 3.0], 0.1) < 1e-3
    profile = made_up()
    rows = (row for row in profile.observations if row.work in ("forward", "train"))
    split = tuple(replace(row, tp=2, seconds=1.1 * row.seconds) for row in rows)
    rates = MeasuredRates(replace(profile, observations=(*profile.observations, *split)))
    models = {call: [CRITIC if call.startswith(("critic", "reward")) else ACTOR] for call in ppo_graph().order}
    learned = CalibrationFactors({"critic.train": 1.0}, {"critic.train": {"zero dp4": 1.0}})
    for calibration in (CalibrationFactors(), learned):
        prices = Pricing(Cluster(1, 4), work(episodes=64, response_tokens=(64,)), rates, calibration=calibration)
        space = Space(prices.cluster, ppo_graph(), models, prices, zero_stages=(0,))
        longer = {
            str(each.assignment.strategy): each.seconds
            / prices.price(space.graph.call("critic.train"), [CRITIC], each.assignment).seconds
            for each in space.candidates()["critic.train"]
            if each.assignment.mesh.size == 4
        }
        assert longer["dp4"] > 1 if calibration is not learned else longer["dp4"] == 1
        assert all(factor > 1 or calibration is learned for factor in longer.values())
    on_gpus = MeasuredRates(replace(rates.profile, is_accelerator=True))
    for unbiased in (AnalyticRates(DEVICES["h100"]), on_gpus):
        known = replace(prices, rates=unbiased, calibration=CalibrationFactors())
        for each in replace(space, pricing=known).candidates()["critic.train"]:
            assert each.cost == known.price(space.graph.call("critic.train"), [CRITIC], each.assignment)


def test_links_between_nodes_are_told_from_those_inside() -> None:
    profile = made_up()
    far = tuple(
        replace(row, seconds=10 * row.seconds, far=True)
        for row in profile.observations
        if row.work in ("send", "all_reduce")
    )
    rates = MeasuredRates(replace(profile, observations=(*profile.observations, *far)))
    assert rates.between.send(1e6) == pytest.approx(10 * rates.inside.send(1e6))
    assert MeasuredRates(profile).between == MeasuredRates(profile).inside


def _over(seconds_per_byte: float) -> list[Observation]:
    """Of 4 devices on 2 nodes: links between the nodes."""
    rows = []
    for size in (1 << 14, 1 << 18, 1 << 22):
        rows.append(Observation("send", "", LATENCY + size * seconds_per_byte, 4, bytes=size, far=True))
        ring = 2 * LATENCY + 1.5 * size * seconds_per_byte
        rows.append(Observation("all_reduce", "", ring, 4, bytes=size, far=True))
    return rows


def test_an_optimizer_step_costs_the_same_whatever_the_network_that_it_was_measured_over() -> None:
    """Gradients were reduced over the link between the nodes, which is slow; on the network of today it is fast."""
    before, today = _over(1e-7), tuple(_over(1e-9))
    near = made_up()
    rows = []
    for each in near.observations:
        if each.work == "train":
            fast, slow = (_over_ring(each.elements * 4, bandwidth) for bandwidth in (BANDWIDTH, 1e7))
            each = replace(each, seconds=each.seconds - fast + slow)
        rows.append(each)
    profile = replace(near, nodes=2, observations=(*rows, *before))
    elements = float(ACTOR.elements)
    for links in ((), today):
        rates = MeasuredRates(replace(profile, links=links))
        assert rates.optimizer(elements, 4) == pytest.approx(MeasuredRates(near).optimizer(elements, 4), rel=1e-3)
    assert MeasuredRates(profile).between.bandwidth == pytest.approx(1e7)
    assert MeasuredRates(replace(profile, links=today)).between.bandwidth == pytest.approx(1e9)


def test_a_link_that_lets_bursts_pass_has_the_rate_that_large_messages_see() -> None:
    rows = [replace(each, seconds=2e-4) if each.bytes == 1 << 18 else each for each in _over(1e-7)]
    between = MeasuredRates(replace(made_up(), nodes=2, links=tuple(rows))).between
    assert between.bandwidth == pytest.approx(1e7)
    assert between.all_reduce(4e6, 4) == pytest.approx(_over_ring(4e6, 1e7), rel=1e-3)


def _over_ring(size: float, bandwidth: float) -> float:
    return 2 * LATENCY + 1.5 * size / bandwidth


def test_devices_of_other_nodes_do_not_share_processors() -> None:
    """Two on each of two nodes, each with two processors: none waits for another."""
    near = made_up()
    two = replace(near, nodes=2, sharing=Sharing.of(2.0))
    assert MeasuredRates(two).layer(ACTOR, 100, 1000, 1) == pytest.approx(
        MeasuredRates(near).layer(ACTOR, 100, 1000, 1)
    )


def test_parameters_come_from_host_memory_as_fast_as_was_measured() -> None:
    profile = made_up()
    assert MeasuredRates(profile).host_bandwidth == 5e9, "nobody measured it"
    rows = [Observation("copy", "", 1e-5 + size / 20e9, 1, bytes=size) for size in (1e5, 1e6, 1e7)]
    rates = MeasuredRates(replace(profile, observations=(*profile.observations, *rows)))
    assert rates.host_bandwidth == pytest.approx(20e9)


def test_a_reallocation_takes_its_agreement_and_its_packing_beside_its_messages() -> None:
    """On CPU ranks that move 1 to 4 MB each, at 20 GB/s of copies in memory, and 30 ms that no byte explains."""
    profile = made_up()
    copies = [Observation("copy", "", 1e-5 + size / 20e9, 1, bytes=size) for size in (1e5, 1e6, 1e7)]
    link = MeasuredRates(profile).inside.bandwidth
    moves = [
        Observation("move", "", 0.03 + size * (1 / link + 2 / 20e9), 2, bytes=size) for size in (1e6, 2e6, 4e6, 2e6)
    ]
    shared = replace(profile, sharing=Sharing.of(2.0), observations=(*profile.observations, *copies, *moves))
    assert MeasuredRates(shared).reallocation(20e9) == pytest.approx(2.03, rel=1e-3)
    assert MeasuredRates(replace(shared, sharing=None)).reallocation(20e9) == pytest.approx(0.03, rel=0.02)
    assert MeasuredRates(profile).reallocation(20e9) == 0.0, "nobody measured it"


def working(cost: CallCost) -> float:
    """Bytes beside parameters, gradients and optimizer states."""
    return cost.transient - cost.gradients


def test_activations_that_were_measured_are_priced() -> None:
    profile = made_up()
    model = {"layers": CRITIC.layers, "elements": float(CRITIC.elements)}
    rows = [
        Observation("activations", model_key(CRITIC), 0.0, 1, tokens=n, squared=n * n, bytes=1e5 * n, **model)
        for n in (50.0, 100.0)
    ]
    rates = MeasuredRates(replace(profile, observations=(*profile.observations, *rows)))
    assert rates.kept(CRITIC, 200, 200 * 100) == pytest.approx(1e5 * 200 / CRITIC.layers)
    assert rates.kept(ACTOR, 200, 200 * 100) is None
    call, assignment = ppo_graph().call("critic.train"), Assignment(DeviceMesh(0, 4), ParallelStrategy(4), "zero")
    less, more = (
        working(Pricing(Cluster(1, 4), work(recompute=False), each).price(call, [CRITIC], assignment))
        for each in (rates, MeasuredRates(replace(profile, observations=(*profile.observations, *_times(rows, 3)))))
    )
    assert more > 1.8 * less


def _times(rows: list[Observation], factor: float) -> list[Observation]:
    return [replace(row, bytes=factor * row.bytes) for row in rows]


def test_a_profile_is_the_same_after_saving(tmp_path: Path) -> None:
    made = replace(made_up(2.0), nodes=2, links=tuple(_over(1e-9)))
    made.save(tmp_path / "folder" / "profile.json")
    assert Profile.load(tmp_path / "folder" / "profile.json") == made
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["profile.json"]


def test_a_profile_of_other_hardware_is_refused() -> None:
    with pytest.raises(PlanError, match="made on 'a machine', but this job runs on 'another'"):
        made_up().check_hardware("another")


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(PlanError, match="is no profile"):
        Profile.load(tmp_path / "x.json")
    with pytest.raises(PlanError, match="cannot be read"):
        Profile.load(tmp_path / "absent.json")


def test_a_model_that_was_not_measured_is_refused() -> None:
    rates = MeasuredRates(made_up())
    assert not rates.measured(llama(7), 1, 1, False)
    assert not rates.measured(ACTOR, 2, 1, False)
    assert not rates.measured(ACTOR, 1, 2, False), "no pipeline was measured"
    with pytest.raises(PlanError, match="has no model like"):
        rates.layer(llama(7), 100, 100, 1)


@given(
    units=st.tuples(st.floats(1e-6, 1e-3), st.floats(0, 1e-3)),
    counts=st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=3, max_size=9),
)
def test_unit_costs_are_found_and_not_negative(units: tuple[float, float], counts: list[tuple[float, float]]) -> None:
    seconds = [units[0] * a + units[1] * b for a, b in counts]
    found = fit_unit_costs(counts, seconds)
    assert all(each >= 0 for each in found)
    for (a, b), expected in zip(counts, seconds, strict=True):
        assert found[0] * a + found[1] * b == pytest.approx(expected, rel=1e-3)


def test_a_measured_machine_is_planned_with_the_splits_that_were_measured() -> None:
    models = {
        name: (ACTOR if name.startswith(("actor", "reference")) else CRITIC,)
        for name in ("actor.generate", "reference.forward", "reward.forward", "critic.forward")
    } | {"actor.train": (ACTOR,), "critic.train": (CRITIC,)}
    pricing = Pricing(Cluster(1, 4), work(), MeasuredRates(made_up(2.0)), default_cap=1024)
    chosen = choose(Space.of_run(models, pricing), time_limit_s=1.0)
    strategies = [assignment.strategy for assignment in chosen.best.plan.assignments.values()]
    assert all(strategy.tp == 1 for strategy in strategies)
    assert all(strategy.zero_stage == 0 for strategy in strategies), "ZeRO gives memory, of which nothing is known"
