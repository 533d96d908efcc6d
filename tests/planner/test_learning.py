"""What a run teaches the planner: its own times correct the estimates, on a simulated machine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import work
from test_profile import ACTOR, CRITIC, made_up

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import PRESETS
from trl_realloc.plan.spans import Span
from trl_realloc.plan.staleness import Staleness
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.estimate_factors import CalibrationFactors, layout_name
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.profile import Profile
from trl_realloc.planner.iteration.stream_cost import StreamPrices
from trl_realloc.planner.search.learning import MIN_UPDATES, WARM_UP, PlanEvidence
from trl_realloc.planner.search.measured_update import MeasuredUpdate
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.runtime.samples.routes import sources


CLUSTER = Cluster(1, 4)
SPECS = {c.name: (ACTOR,) if c.role in (Role.ACTOR, Role.REFERENCE) else (CRITIC,) for c in ppo_graph().calls}
LENGTHS = tuple(range(20, 120))
Slower = Callable[[str], float]


def pricing(calibration: CalibrationFactors | None = None, processors: float | None = None) -> Pricing:
    rates = MeasuredRates(made_up(processors))
    return Pricing(CLUSTER, work(episodes=64), rates, calibration=calibration or CalibrationFactors())


def plan(name: str) -> ExecutionPlan:
    return PRESETS[name](CLUSTER, generation_engine="vllm")


class Machine:
    """Runs a plan as the planner's own simulation does, slower than it was measured.

    Args:
        slower: by the name of a call or of a reallocation, how many times longer it takes.
        dispatch: seconds between calls, of each call.
    """

    def __init__(
        self, slower: Slower, *, dispatch: float = 0.01, processors: float | None = None, seed: int = 0
    ) -> None:
        self.slower, self.dispatch, self.processors = slower, dispatch, processors
        self.draw = random.Random(seed)

    def pricing(self, factor: float = 1.0) -> Pricing:
        calls = {name: factor * self.slower(name) for name in SPECS}
        moves = {name: factor * self.slower(f"move to {name}") for name in SPECS}
        return pricing(CalibrationFactors(calls, moves=moves, dispatch=factor * self.dispatch), self.processors)

    def update(self, of: ExecutionPlan, lengths: tuple[int, ...] = LENGTHS, factor: float = 1.0) -> MeasuredUpdate:
        factor *= self.draw.uniform(0.98, 1.02)
        costs = self.pricing(factor)
        estimate = estimate_plan(of, SPECS, replace(costs, workload=costs.workload.of_lengths(lengths)))
        told = [s for s in estimate.timeline.spans if " -> " in s.call or s.device in sources(of, s.call)]
        return MeasuredUpdate.of(told if of.streams else estimate.timeline.spans, lengths)


def learned(
    machine: Machine, of: ExecutionPlan, before: CalibrationFactors | None = None, updates: int = 9
) -> CalibrationFactors:
    evidence = PlanEvidence(of, SPECS, pricing(before, machine.processors))
    evidence.add(machine.update(of, factor=20.0))  # kernels are compiled
    for _ in range(updates):
        evidence.add(machine.update(of))
    return evidence.calibration()


def errors(
    machine: Machine, of: ExecutionPlan, calibration: CalibrationFactors, lengths: tuple[int, ...]
) -> Mapping[str, float]:
    """By call and for the iteration, estimate over truth minus 1."""
    estimates = []
    for costs in (pricing(calibration, machine.processors), machine.pricing()):
        made = estimate_plan(of, SPECS, replace(costs, workload=costs.workload.of_lengths(lengths)))
        estimates.append({**made.timeline.by_call(), "iteration": made.timeline.seconds_per_step})
    return {name: estimates[0][name] / true - 1 for name, true in estimates[1].items()}


@pytest.mark.parametrize("processors", [None, 2.0])
@pytest.mark.parametrize("name", PRESETS)
def test_a_machine_that_is_three_times_slower_than_it_was_measured_ends_with_estimates_within_ten_percent(
    name: str, processors: float | None
) -> None:
    machine = Machine(lambda _: 3.0, dispatch=0.03, processors=processors)
    before = errors(machine, plan(name), CalibrationFactors(), LENGTHS)
    assert before["iteration"] == pytest.approx(-2 / 3, abs=0.02)
    after = errors(machine, plan(name), learned(machine, plan(name)), LENGTHS)
    assert {call: error for call, error in after.items() if abs(error) > 0.1} == {}


@pytest.mark.parametrize("processors", [None, 2.0])
def test_each_call_and_each_reallocation_is_corrected_by_its_own_factor(processors: float | None) -> None:
    slower = {"actor.train": 4.0, "critic.train": 0.5, "reward.forward": 2.0, "move to actor.generate": 50.0}
    machine = Machine(lambda name: slower.get(name, 1.0), dispatch=0.2, processors=processors)
    split = plan("separate")
    after = errors(machine, split, learned(machine, split), LENGTHS)
    assert {call: error for call, error in after.items() if abs(error) > 0.1} == {}
    assert any(" -> actor.generate" in call for call in after), "parameters are moved in it"


def test_other_lengths_than_those_learned_from_are_estimated_as_well() -> None:
    machine = Machine(lambda _: 3.0)
    after = errors(machine, plan("flatten"), learned(machine, plan("flatten")), tuple(range(200, 400)))
    assert max(map(abs, after.values())) < 0.1


@given(factors=st.dictionaries(st.sampled_from(sorted(SPECS)), st.floats(0.02, 50.0)), seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_updates_that_something_else_slowed_down_do_not_count(factors: dict[str, float], seed: int) -> None:
    machine, flat = Machine(lambda name: factors.get(name, 1.0), seed=seed), plan("flatten")
    evidence = PlanEvidence(flat, SPECS, pricing())
    for factor in (20.0, 1.0, 1.0, 10.0, 1.0, 1.0, 10.0, 1.0, 1.0):
        evidence.add(machine.update(flat, factor=factor))
    after = errors(machine, flat, evidence.calibration(), LENGTHS)
    assert max(map(abs, after.values())) < 0.1


def test_the_first_updates_and_too_few_of_them_correct_nothing() -> None:
    machine = Machine(lambda _: 3.0)
    evidence = PlanEvidence(plan("flatten"), SPECS, pricing())
    for _ in range(WARM_UP + MIN_UPDATES - 1):
        evidence.add(machine.update(plan("flatten")))
        assert evidence.calibration() == CalibrationFactors()
    evidence.add(machine.update(plan("flatten")))
    assert evidence.calibration().calls["actor.train"] == pytest.approx(3.0, rel=0.05)


def test_what_is_learned_of_a_layout_is_kept_apart_and_a_slower_machine_slows_them_all() -> None:
    """Otherwise a run would leave each plan that it has seen for one that it has not."""
    call = ppo_graph().call("actor.train")
    flat, split = plan("flatten"), plan("separate")
    first = learned(Machine(lambda _: 1.0), flat)
    both = learned(Machine(lambda _: 2.0), split, first)
    assert both.factor(call, flat["actor.train"]) == pytest.approx(1.0, rel=0.05)
    assert both.factor(call, split["actor.train"]) == pytest.approx(2.0, rel=0.05)
    unseen = Assignment(DeviceMesh(0, 4), ParallelStrategy(1, 4), "megatron")
    assert both.factor(call, unseen) == pytest.approx(1.5, rel=0.05), "between those that were seen"
    slower = learned(Machine(lambda _: 3.0), flat, both)
    assert slower.factor(call, flat["actor.train"]) == pytest.approx(3.0, rel=0.05)
    assert slower.factor(call, split["actor.train"]) == pytest.approx(6.0, rel=0.1)


def test_reward_functions_which_have_no_estimate_get_the_seconds_that_they_took() -> None:
    specs = {**SPECS, "reward.forward": ()}
    costs = pricing()
    evidence = PlanEvidence(plan("flatten"), specs, costs)
    estimate = estimate_plan(plan("flatten"), specs, costs)
    for _ in range(WARM_UP + MIN_UPDATES):
        spans = [
            Span("reward.forward", 0, 0.0, 7.0, 1),
            *(s for s in estimate.timeline.spans if s.call != "reward.forward"),
        ]
        evidence.add(MeasuredUpdate.of(spans, LENGTHS))
    calibration = evidence.calibration()
    assert calibration.functions == {"reward.forward": 4 * 7.0}, "of the whole batch, of which a replica has a quarter"
    call, prices = ppo_graph().call("reward.forward"), replace(costs, calibration=calibration)
    for preset, seconds in (("flatten", 7.0), ("interleave", 14.0), ("separate", 14.0)):
        assert prices.price(call, (), plan(preset)["reward.forward"]).parts["functions"] == seconds


@pytest.mark.parametrize(("preset", "expected"), [("flatten", 7.0), ("separate", 14.0)])
def test_reward_functions_take_as_long_with_streams_as_their_devices_have_samples(preset: str, expected: float) -> None:
    prices = StreamPrices.of(
        replace(plan(preset), streams=Streams()),
        {**SPECS, "reward.forward": ()},
        pricing(CalibrationFactors(functions={"reward.forward": 28.0}, dispatch=0.0)),
    )
    share = 64 // plan(preset)["reward.forward"].strategy.dp
    assert prices.score("reward.forward", [[100] * share], loads=False) == pytest.approx(expected)


def test_a_call_that_takes_no_time_by_estimate_has_a_place_in_the_timeline() -> None:
    made = made_up()
    rates = MeasuredRates(
        replace(made, observations=tuple(row for row in made.observations if row.work != "iteration"))
    )
    specs = {**SPECS, "reward.forward": ()}
    timeline = estimate_plan(plan("flatten"), specs, replace(pricing(), rates=rates)).timeline
    assert timeline.by_call()["reward.forward"] == 0.0


def test_calls_of_which_none_waits_for_another_hand_nothing_over() -> None:
    graph = DataflowGraph((Call(Role.REFERENCE, CallKind.FORWARD, ("prompts",), ("scores",)),))
    assignments = {"reference.forward": Assignment(DeviceMesh(0, 4), ParallelStrategy(4), "zero")}
    only = ExecutionPlan(CLUSTER, assignments, graph, "one call")
    evidence = PlanEvidence(only, SPECS, pricing())
    for _ in range(WARM_UP + MIN_UPDATES):
        evidence.add(MeasuredUpdate({"reference.forward": 5.0}, 6.0, LENGTHS))
    assert evidence.calibration().dispatch == 0.0


def test_what_another_librarys_loop_does_between_calls_is_no_handover() -> None:
    """GRPO's own reward functions run for ten seconds in it, without a span."""
    graph = grpo_graph()
    specs = {call.name: SPECS.get(call.name, (ACTOR,)) for call in graph.calls}
    flat = PRESETS["flatten"](CLUSTER, generation_engine="vllm", graph=graph)
    evidence = PlanEvidence(flat, specs, pricing())
    update = MeasuredUpdate.of(estimate_plan(flat, specs, pricing()).timeline.spans, LENGTHS)
    for _ in range(WARM_UP + MIN_UPDATES):
        evidence.add(replace(update, seconds=update.seconds + 10.0))
    calibration = evidence.calibration()
    assert calibration.dispatch is None
    assert calibration.calls.keys() == specs.keys()


def test_calibration_factors_are_kept_in_the_profile_and_a_file_with_wrong_ones_is_refused(tmp_path: Path) -> None:
    profile = replace(made_up(), calibration=learned(Machine(lambda _: 3.0), plan("separate")))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    for wrong in ({"calls": {"actor.train": 0.0}}, {"dispatch": -1.0}, {"handovers": 1.0}):
        made_up().save(tmp_path / "wrong.json")
        saved: dict[str, Any] = json.loads((tmp_path / "wrong.json").read_text())
        saved["calibration"] = {**saved["calibration"], **wrong}
        (tmp_path / "wrong.json").write_text(json.dumps(saved))
        with pytest.raises(PlanError, match="calibration"):
            Profile.load(tmp_path / "wrong.json")


def test_a_profile_with_the_names_of_version_0_2_is_read(tmp_path: Path) -> None:
    profile = replace(made_up(), calibration=CalibrationFactors({"actor.train": 3.0}, dispatch=0.5))
    profile.save(tmp_path / "profile.json")
    saved: dict[str, Any] = json.loads((tmp_path / "profile.json").read_text())
    saved["corrections"] = saved.pop("calibration")
    saved["corrections"]["handover"] = saved["corrections"].pop("dispatch")
    (tmp_path / "profile.json").write_text(json.dumps(saved))
    assert Profile.load(tmp_path / "profile.json") == profile


def test_the_corrections_are_said_in_a_line() -> None:
    calibration = CalibrationFactors({"actor.train": 3.021, "critic.train": 1.01}, moves={"actor.generate": 0.5})
    assert calibration.described() == "actor.train x 3.02, reallocation to actor.generate x 0.5"
    assert CalibrationFactors().described() == ""


def test_layouts_are_named_by_all_that_their_seconds_depend_on() -> None:
    mesh = DeviceMesh(0, 4)
    assert layout_name(Assignment(mesh, ParallelStrategy(2, 2), "megatron", offload=True)) == "megatron dp2 tp2 offload"


@pytest.mark.parametrize("processors", [None, 2.0])
@pytest.mark.parametrize("migration", [None, Migration(0.3)])
def test_a_run_that_streams_corrects_calls_by_factors(migration: Migration | None, processors: float | None) -> None:
    """Also where its devices slow each other down. What is learned holds for the plan without streams."""
    slower = {"actor.generate": 3.0, "reference.forward": 4.0, "reward.forward": 0.5, "actor.train": 2.0}
    slower |= {"move to actor.generate": 20.0}
    machine = Machine(lambda name: slower.get(name, 1.0), dispatch=0.0, processors=processors)
    streaming = replace(plan("separate"), streams=Streams(migration=migration))
    calibration = learned(machine, streaming, CalibrationFactors(dispatch=0.0))
    for of in (streaming, plan("separate")):
        after = errors(machine, of, calibration, LENGTHS)
        assert {call: error for call, error in after.items() if abs(error) > 0.1} == {}


def test_a_run_that_streams_through_groups_is_not_taken_for_faster_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replica on several devices the first one tells what it did."""
    rates = AnalyticRates(DEVICES["h100"])

    def by_specification(calibration: CalibrationFactors | None = None, processors: float | None = None) -> Pricing:
        return Pricing(CLUSTER, work(episodes=64), rates, calibration=calibration or CalibrationFactors())

    monkeypatch.setitem(globals(), "pricing", by_specification)
    whole, slower = plan("flatten"), {"actor.generate": 3.0, "critic.train": 2.0}
    pairs, mesh = ParallelStrategy(2, 2), plan("flatten").mesh("actor.train")
    split = {name: Assignment(mesh, pairs, "megatron") for name in ("reference.forward", "critic.train")}
    split["critic.forward"] = split["critic.train"]
    split["actor.generate"] = Assignment(mesh, pairs, "vllm")
    streaming = replace(whole, assignments={**whole.assignments, **split}, streams=Streams())
    machine = Machine(lambda name: slower.get(name, 1.0), dispatch=0.0)
    calibration = learned(machine, streaming, CalibrationFactors(dispatch=0.0))
    for name in ("actor.generate", "reference.forward", "critic.train"):
        assert calibration.factor(whole.graph.call(name), streaming[name]) == pytest.approx(
            slower.get(name, 1.0), rel=0.1
        ), name


def test_reward_functions_of_a_run_that_streams_get_the_seconds_that_they_took() -> None:
    specs = {**SPECS, "reward.forward": ()}
    costs = pricing(CalibrationFactors(functions={"reward.forward": 7.0}, dispatch=0.0))
    streaming = replace(plan("flatten"), streams=Streams())
    evidence = PlanEvidence(streaming, specs, pricing(CalibrationFactors(dispatch=0.0)))
    workload = costs.workload.of_lengths(LENGTHS)
    spans = estimate_plan(streaming, specs, replace(costs, workload=workload)).timeline.spans
    for _ in range(WARM_UP + MIN_UPDATES):
        evidence.add(MeasuredUpdate.of(spans, LENGTHS))
    assert evidence.calibration().functions == {"reward.forward": pytest.approx(7.0, rel=0.01)}


def test_a_run_that_streams_keeps_the_handover() -> None:
    machine, before = Machine(lambda _: 3.0, dispatch=0.0), CalibrationFactors({"actor.train": 1.5}, dispatch=0.02)
    streaming = replace(plan("flatten"), streams=Streams())
    after = learned(machine, streaming, before)
    assert after.dispatch == 0.02
    assert after.calls["actor.train"] == pytest.approx(3.0, rel=0.05)


def test_a_run_that_generates_ahead_corrects_nothing() -> None:
    """Its generation's spans are as long as several iterations, and scoring stops the engines."""
    machine, before = Machine(lambda _: 3.0), CalibrationFactors({"actor.train": 1.5})
    ahead = replace(plan("separate"), staleness=Staleness(2))
    assert learned(machine, ahead, before) == before
    assert learned(machine, plan("separate"), before) != before


def test_of_an_iteration_with_several_optimizer_steps_the_seconds_of_each_call_are_added() -> None:
    """A generation on device 0, and two steps that train on it on both devices."""
    spans = [
        Span("actor.generate", 0, 0.0, 4.0, 0),
        Span("actor.train", 0, 4.0, 5.0, 0),
        Span("actor.train", 1, 4.0, 6.0, 0),
        Span("actor.train", 0, 9.0, 10.0, 1),
        Span("actor.train", 1, 9.0, 12.0, 1),
        Span("actor.train -> actor.generate", 0, 12.0, 13.0, 1),
        Span("actor.train -> actor.generate", 1, 10.0, 13.0, 1),
    ]
    expected = {"actor.generate": 4.0, "actor.train": 5.0, "actor.train -> actor.generate": 2.0}
    whole = MeasuredUpdate.of(spans, LENGTHS)
    assert whole.spans == expected
    assert whole.seconds == 6.0 + 4.0, "without what is between the steps, such as an evaluation"
    half = MeasuredUpdate.of(spans, LENGTHS, iterations=2)
    assert half.spans == {name: seconds / 2 for name, seconds in expected.items()}
    assert half.seconds == 5.0
