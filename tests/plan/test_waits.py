"""Shares of an iteration in which devices wait, and the calls that they wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.spans import LOOP, Span
from trl_realloc.plan.timeline import Timeline
from trl_realloc.plan.waits import ranges, waits, waits_of_iteration


GRAPH = ppo_graph()


def on(call: str, devices: range, start: float, end: float) -> list[Span]:
    return [Span(call, device, start, end, 0) for device in devices]


def test_devices_wait_for_the_call_that_ends_last_before_their_next_one() -> None:
    spans = [
        *on("actor.generate", range(4), 0, 6),
        *on("reference.forward", range(2), 6, 7),
        *on("reward.forward", range(2, 4), 6, 6.5),
        *on("actor.train", range(2), 7, 10),
        *on("critic.train", range(2, 4), 7, 8),
    ]
    (first,) = waits_of_iteration(Timeline(spans), 10.0, GRAPH, 4)
    assert first.devices == (2, 3)
    # 0.5 s until the reference has scored, 2 s until the actor whose weights generate next is trained
    assert first.calls == pytest.approx({"actor.train": 0.2, "reference.forward": 0.05})
    assert first.sentence == "devices 2-3 wait 20% of an iteration for actor.train and 5% for others"


def test_a_device_without_work_waits_for_no_call() -> None:
    timeline = Timeline(on("actor.generate", range(1), 0, 1))
    (found,) = waits_of_iteration(timeline, 1.0, GRAPH, 3)
    assert (found.devices, dict(found.calls)) == ((1, 2), {"no call": 1.0})


def test_an_iteration_that_ends_after_the_next_began_is_folded() -> None:
    """Device 1 trains the iteration that device 0 generated, while device 0 generates the next one."""
    spans = [*on("actor.generate", range(1), 0, 4), *on("critic.train", range(1, 2), 4, 7)]
    (wait,) = waits_of_iteration(Timeline(spans), 4.0, GRAPH, 2)
    assert (wait.devices, dict(wait.calls)) == ((1,), {"actor.generate": 0.25})


@given(
    st.lists(
        st.tuples(st.sampled_from(GRAPH.order), st.integers(0, 3), st.floats(0, 10), st.floats(0, 10)), max_size=12
    )
)
def test_waits_and_work_of_a_device_are_its_whole_time(drawn: list[tuple[str, int, float, float]]) -> None:
    timeline = Timeline(Span(call, device, start, start + length, 0) for call, device, start, length in drawn)
    found = waits(timeline, GRAPH, 2.0, 9.0, 4)
    share = {device: wait.share for wait in found for device in wait.devices}
    for device in range(4):
        own = sorted((max(s.start, 2.0), min(s.end, 9.0)) for s in timeline.spans if s.device == device)
        busy, reached = 0.0, 2.0
        for start, end in own:
            busy, reached = busy + max(0.0, end - max(start, reached)), max(reached, end)
        # waits of less than half a percent are not shown, and the others are rounded
        assert share.get(device, 0.0) == pytest.approx(1 - busy / 7, abs=0.0055 * (len(own) + 1))


def test_devices_are_named_by_ranges() -> None:
    assert ranges([3]) == "device 3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "devices 0-2, 5, 7-8"


@pytest.mark.parametrize("slower", [0, 1])
def test_no_device_waits_while_the_training_loop_runs(slower: int) -> None:
    spans = [
        Span("actor.generate", slower, 0.0, 4.0, 0),
        Span("actor.generate", 1 - slower, 0.0, 2.0, 0),
        Span(LOOP, 0, 4.0, 5.0, 0),
        Span("actor.train", 0, 5.0, 10.0, 0),
        Span("actor.train", 1, 5.0, 10.0, 0),
    ]
    (wait,) = waits(Timeline(spans), GRAPH, 0.0, 10.0, 2)
    assert wait.devices == (1 - slower,) and dict(wait.calls) == {"actor.generate": 0.2}


@pytest.mark.timeout(20)
def test_the_waits_of_thousands_of_devices_are_found_at_once() -> None:
    half = 4096
    spans = [*on("actor.generate", range(half), 0, 6), *on("critic.train", range(half, 2 * half), 6, 9)]
    assert [len(wait.devices) for wait in waits_of_iteration(Timeline(spans), 9.0, GRAPH, 2 * half)] == [half, half]
