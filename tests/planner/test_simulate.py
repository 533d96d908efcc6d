"""A plan's timeline from its calls' seconds: who waits for whom, by hand and in general."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import PRESETS, flatten, interleave, separate
from trl_realloc.plan.spans import Span
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.cost.hardware import Sharing
from trl_realloc.planner.iteration.simulate import (
    STEADY,
    IterationTask,
    Overlap,
    plan_times,
    simulated_iterations,
    tasks_of,
    undisturbed_iteration,
)


CALLS = ("actor.generate", "reference.forward", "reward.forward", "critic.forward", "actor.train", "critic.train")
ONE = dict.fromkeys(CALLS, 1.0)


def on(**meshes: str) -> ExecutionPlan:
    """Eight devices; every call on all but those put elsewhere."""
    assignments = {}
    for name in CALLS:
        mesh = DeviceMesh.parse(meshes.get(name.replace(".", "__"), "0-7"))
        engine = "vllm" if name == "actor.generate" else "zero"
        assignments[name] = Assignment(mesh, ParallelStrategy(mesh.size), engine)
    return ExecutionPlan(Cluster(1, 8), assignments)


def simulate(
    plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float] | None = None, *, iterations: int = 1
) -> Timeline:
    """The first iterations of a run that moves parameters in each of them."""
    tasks = tasks_of(plan, seconds, moves or {})
    return Timeline(
        Span(task.name, device, *times, step)
        for step, row in enumerate(simulated_iterations(tasks, iterations, Overlap.of(plan)))
        for task, times in zip(tasks, row, strict=True)
        for device in task.devices
    )


def iteration_seconds(plan: ExecutionPlan, seconds: Mapping[str, float], moves: Mapping[str, float]) -> float:
    return plan_times(plan, seconds, moves)[0]


def end(plan: ExecutionPlan, seconds: Mapping[str, float], iterations: int = 1) -> float:
    return max(span.end for span in simulate(plan, seconds, iterations=iterations).spans)


def test_on_one_mesh_calls_run_one_after_the_other() -> None:
    assert end(flatten(Cluster(1, 4)), ONE) == 6
    assert end(flatten(Cluster(1, 4)), ONE, iterations=3) == 18


def test_calls_on_disjoint_meshes_overlap() -> None:
    assert end(interleave(Cluster(1, 4)), ONE) == 5


def test_a_long_training_beside_five_short_calls_takes_120_seconds_in_five_iterations() -> None:
    """ReaL's simulator says 104 s, for a successor there may start before all of its predecessors have ended."""
    five = {name.replace(".", "__"): "4-7" for name in CALLS if name != "actor.train"}
    assert end(on(actor__train="0-3", **five), {**ONE, "actor.train": 20.0}, iterations=5) == 120


def test_the_critics_training_runs_beside_the_next_generation() -> None:
    """ReaL's case study."""
    apart = on(actor__train="0-3", critic__train="4-7", actor__generate="0-3")
    timeline = simulate(apart, {**ONE, "critic.train": 1.5}, iterations=2)
    spans = {(span.call, span.step): span for span in timeline.spans}
    training, generation = spans["critic.train", 0], spans["actor.generate", 1]
    assert generation.start < training.end, "the actor's devices do not wait for the critic's"
    assert spans["critic.forward", 1].start >= training.end


def test_a_move_keeps_both_of_its_meshes_busy() -> None:
    """Device 0 trains both roles till 6. Without moves device 1 generates from 5 on, when the actor is trained; a move
    needs device 0 too, so it waits for the critic's training: 2.5 s later for its own move and the critic's."""
    plan = separate(Cluster(1, 2))
    moves = {"actor.generate": 2.0, "critic.forward": 0.5}
    still, moved = (simulate(plan, ONE, each, iterations=2) for each in ({}, moves))
    assert max(span.end for span in still.spans) == 11
    assert max(span.end for span in moved.spans) == 17
    busy = sorted(span for span in moved.spans if span.call == "actor.train -> actor.generate")
    assert [(span.device, span.start, span.end) for span in busy] == [
        (0, 0, 2),
        (0, 8.5, 10.5),
        (1, 0, 2),
        (1, 8.5, 10.5),
    ]
    assert iteration_seconds(plan, ONE, {}) == 5
    assert iteration_seconds(plan, ONE, moves) == 8.5
    waiting = replace(plan, barrier=True)
    assert iteration_seconds(waiting, ONE, moves) == 8.5
    assert iteration_seconds(waiting, ONE, {}) == 6, "the critic's training is waited for"


def test_only_a_vllm_engine_begins_before_the_end_of_the_previous_iteration() -> None:
    """Device 0 trains: the actor till 5, the critic till 6. Device 1 is free from 4 on, and needs the actor."""
    plan, inside = (separate(Cluster(1, 2), generation_engine=engine) for engine in ("vllm", "transformers"))
    assert iteration_seconds(plan, ONE, {}) == 5
    assert iteration_seconds(inside, ONE, {}) == 6


def test_scoring_waits_for_the_end_of_the_previous_iteration() -> None:
    """The critic trains for 9 s on devices of its own, the next generation takes 1 s beside it."""
    apart = on(actor__train="0-3", critic__train="4-7", actor__generate="0-3", reference__forward="0-3")
    seconds = {**ONE, "critic.train": 9.0}
    spans = {(span.call, span.step): span for span in simulate(apart, seconds, iterations=2).spans}
    assert spans["actor.generate", 1].end == 6
    assert spans["reference.forward", 1].start == spans["critic.train", 0].end == 13
    assert iteration_seconds(apart, seconds, {}) == 12
    assert iteration_seconds(replace(apart, barrier=True), seconds, {}) == 13


def test_a_move_between_equal_layouts_costs_nothing_whatever_is_said() -> None:
    plan = flatten(Cluster(1, 2))
    assert iteration_seconds(plan, ONE, {"actor.generate": 9.0}) == 6


def test_a_call_without_seconds_is_missed() -> None:
    with pytest.raises(KeyError, match="critic.train"):
        simulate(flatten(Cluster(1, 1)), {name: 1.0 for name in CALLS if name != "critic.train"})


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 8), st.data())
def test_a_few_iterations_show_the_seconds_of_all_later_ones(preset: str, devices: int, data: st.DataObject) -> None:
    plan, seconds = PRESETS[preset](Cluster(1, devices)), data.draw(times)
    moves = data.draw(st.fixed_dictionaries(dict.fromkeys(("actor.generate", "critic.forward"), st.floats(0, 3))))
    ends = [
        max(span.end for span in simulate(plan, seconds, moves, iterations=each).spans if span.step == each - 1)
        for each in (11, 12)
    ]
    assert iteration_seconds(plan, seconds, moves) == pytest.approx(ends[1] - ends[0])


times = st.fixed_dictionaries(dict.fromkeys(CALLS, st.floats(0.01, 10)))


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 8), times, st.integers(1, 4))
def test_no_device_does_two_things_at_once_and_nothing_starts_before_what_it_needs(
    preset: str, devices: int, seconds: dict[str, float], iterations: int
) -> None:
    plan = PRESETS[preset](Cluster(1, devices))
    timeline = simulate(plan, seconds, {"actor.generate": 0.3}, iterations=iterations)
    for device in timeline.devices:
        mine = sorted((span for span in timeline.spans if span.device == device), key=lambda span: span.start)
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(mine))
    ends = {(span.call, span.step): span.end for span in timeline.spans}
    for span in timeline.spans:
        for edge in plan.graph.data_edges:
            if edge.consumer == span.call:
                assert span.start >= ends[edge.producer, span.step] - 1e-9
        for source, target in plan.graph.parameter_edges:
            if target == span.call and span.step:
                assert span.start >= ends[source, span.step - 1] - 1e-9
    longest = max(sum(seconds[name] for name in plan.calls_on(device)) for device in range(devices))
    one_by_one = sum(seconds.values()) + 0.3
    assert longest * iterations <= max(ends.values()) + 1e-6 <= one_by_one * iterations + 1


@st.composite
def drawn_tasks(draw: st.DrawFn) -> list[IterationTask]:
    tasks: list[IterationTask] = []
    count = draw(st.integers(1, 7))
    for at in range(count):
        mesh = DeviceMesh(draw(st.integers(0, 3)), draw(st.integers(1, 2)))
        after = draw(st.lists(st.integers(0, at - 1), max_size=2)) if at else []
        previous = draw(st.one_of(st.none(), st.integers(0, count - 1)))
        tasks.append(
            IterationTask(str(at), (mesh,), draw(st.floats(0, 10)), tuple(after), previous, early=draw(st.booleans()))
        )
    return tasks


@given(drawn_tasks(), st.sampled_from(Overlap))
def test_the_searchs_closed_form_has_the_simulations_times(tasks: list[IterationTask], overlap: Overlap) -> None:
    iterations = 1 + STEADY[overlap] if overlap is Overlap.NONE else STEADY[overlap]
    *_, before, last = simulated_iterations(tasks, iterations, overlap)
    zero = max(end for _, end in before)
    seconds, times = undisturbed_iteration(tasks, overlap)
    assert seconds == pytest.approx(max(end for _, end in last) - zero, abs=1e-9)
    for (start, end), (began, ended) in zip(times, last, strict=True):
        assert (start, end) == pytest.approx((began - zero, ended - zero), abs=1e-9)


# --- devices that share processors ---


def test_calls_side_by_side_on_shared_processors_slow_each_other_down() -> None:
    """Four devices on two processors: what runs beside the other takes as long as one after the other."""
    tasks = [IterationTask("one", (DeviceMesh(0, 2),), 3.0), IterationTask("other", (DeviceMesh(2, 2),), 3.0)]
    apart = simulated_iterations(tasks, 1)[0]
    shared = simulated_iterations(tasks, 1, sharing=Sharing.of(2))[0]
    assert [end for _, end in apart] == [3, 3]
    assert [end for _, end in shared] == pytest.approx([6, 6])


def test_calls_on_different_nodes_do_not_slow_each_other_down() -> None:
    """A plan of two nodes of two devices that share one processor each: one call on both, then one on each."""
    tasks = [IterationTask("both", (DeviceMesh(0, 4),), 3.0)]
    tasks += [IterationTask("one", (DeviceMesh(0, 2),), 3.0), IterationTask("other", (DeviceMesh(2, 2),), 3.0)]
    ends = [end for _, end in simulated_iterations(tasks, 1, sharing=Sharing.of(1), devices_per_node=2)[0]]
    assert ends == pytest.approx([3, 6, 6])
    halves = [IterationTask("one", (DeviceMesh(0, 1),), 3.0), IterationTask("other", (DeviceMesh(1, 3),), 3.0)]
    ends = [end for _, end in simulated_iterations(halves, 1, sharing=Sharing.of(1), devices_per_node=2)[0]]
    assert ends == pytest.approx([4.5, 3.0]), "the second is as slow as on its own node, where two compute anyway"


def test_a_processor_that_is_set_free_speeds_up_the_rest() -> None:
    tasks = [IterationTask("short", (DeviceMesh(0, 2),), 1.0), IterationTask("long", (DeviceMesh(2, 2),), 3.0)]
    ends = [end for _, end in simulated_iterations(tasks, 1, sharing=Sharing.of(2))[0]]
    assert ends == pytest.approx([2, 4])


def test_a_device_beside_another_is_slowed_as_two_of_them_are() -> None:
    """Two devices that do not take turns but disturb each other: by 1.25, as measured, where both compute."""
    tasks = [IterationTask("one", (DeviceMesh(0, 1),), 2.0), IterationTask("other", (DeviceMesh(1, 1),), 3.0)]
    ends = [end for _, end in simulated_iterations(tasks, 1, sharing=Sharing(((2, 1.25), (4, 3.0))))[0]]
    assert ends == pytest.approx([2.5, 3.5])


@given(devices=st.lists(st.integers(1, 64), min_size=2, max_size=2).map(sorted), processors=st.floats(1, 16))
def test_more_devices_never_slow_each_other_down_less(devices: list[int], processors: float) -> None:
    sharing = Sharing.of(processors)
    few, many = (sharing.slowdown(n) for n in devices)
    assert 1 <= few <= many + 1e-9
    assert sharing.slowdown(1) == 1
    assert sharing.slowdown(64) == pytest.approx(max(1, 64 / processors))


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    firsts=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_enough_processors_are_as_good_as_one_each(seconds: list[float], firsts: list[int]) -> None:
    tasks = [IterationTask(str(at), (DeviceMesh(firsts[at], 1),), each) for at, each in enumerate(seconds)]
    alone, shared = (simulated_iterations(tasks, 2, sharing=each) for each in (None, Sharing.of(4)))
    for one, other in zip(alone, shared, strict=True):
        for (start, end), (began, ended) in zip(one, other, strict=True):
            assert (began, ended) == pytest.approx((start, end), abs=1e-9)
