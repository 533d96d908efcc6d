"""Pictures of timelines and of memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.fused import joined
from trl_realloc.plan.picture import OTHER, colour, draw_memory, draw_timeline
from trl_realloc.plan.spans import LOOP, Span
from trl_realloc.plan.timeline import Timeline


def test_every_call_has_a_colour_of_its_own_in_whatever_order_and_company() -> None:
    calls = ppo_graph(proximal=True).order
    assert len({colour(call) for call in calls}) == len(calls)
    assert OTHER not in map(colour, calls)
    assert colour("actor.generate.greedy") == colour("actor.generate")
    assert colour("critic.train, backward") == colour("critic.train")
    assert colour(joined(("actor.train", "critic.train"))) == colour("actor.train")
    assert colour("actor.train -> actor.generate") == colour("anything else") == OTHER
    assert len({OTHER, colour("reward: length"), colour(LOOP), *map(colour, calls)}) == len(calls) + 3


def test_a_reward_function_is_drawn_over_the_call_that_runs_it(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    called = [Span("reward.forward", 0, 0.0, 4.0, 0), Span(LOOP, 0, 4.0, 5.0, 0)]

    def yellow(spans: Sequence[Span]) -> int:
        draw_timeline(Timeline(spans), tmp_path / "one.png", calls=["reward.forward", "reward: length", LOOP])
        pixels = (image.imread(tmp_path / "one.png")[..., :3] * 255).round().astype(int)
        return int((pixels == (240, 228, 66)).all(axis=-1).sum())

    without, beneath = yellow(called), yellow([*called, Span("reward: length", 0, 0.0, 4.0, 0)])
    assert 0.4 * without < beneath < 0.8 * without, "the call keeps the height of its bar"


def test_the_memory_of_a_device_is_drawn_to_scale(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    draw_memory({"actor.train": 30e9, "critic.train": 10e9}, 80e9, tmp_path / "memory.png")
    pixels = (image.imread(tmp_path / "memory.png")[..., :3] * 255).round().astype(int)
    middle = pixels[pixels.shape[0] // 3]
    width = {name: (middle == rgb).all(axis=-1).sum() for name, rgb in (("a", (213, 94, 0)), ("c", (230, 159, 0)))}
    assert width["a"] == pytest.approx(3 * width["c"], rel=0.05)


def test_a_picture_has_a_colour_for_each_call_and_a_row_for_each_device(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    timeline = Timeline([Span("actor.generate", 0, 0.0, 1.0, 0), Span("reference.forward", 1, 1.0, 2.0, 0)])
    draw_timeline(timeline, tmp_path / "one.png")
    pixels = (image.imread(tmp_path / "one.png")[..., :3] * 255).round().astype(int)
    colours = {"actor.generate": (0, 114, 178), "reference.forward": (0, 158, 115)}
    where = {
        call: [(y, x) for y, x in zip(*(pixels == colour).all(axis=-1).nonzero(), strict=True)]
        for call, colour in colours.items()
    }
    assert all(len(found) > 1000 for found in where.values())
    # The bars, without the legend's swatches: device 0 above device 1, and 0 s to 1 s left of 1 s to 2 s.
    middle = {call: sorted(found)[len(found) // 2] for call, found in where.items()}
    assert middle["actor.generate"][0] < middle["reference.forward"][0]
    assert middle["actor.generate"][1] < middle["reference.forward"][1]
    draw_timeline(timeline, tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert "actor.generate" in drawn or "<path" in drawn


def test_a_picture_of_generation_ahead_draws_iterations_side_by_side(tmp_path: Path) -> None:
    spans = [Span("generate", 1, 2.0 * step, 2.0 * step + 5.0, step, samples=2) for step in range(4)]
    spans += [Span("train", 0, 5.0 + 2 * step, 7.0 + 2 * step, step) for step in range(4)]
    ahead = Timeline(spans)
    assert ahead.runs_ahead
    assert ahead.seconds_between_ends == 2.0
    lanes = ahead.lanes()
    for one, other in itertools.combinations(spans, 2):
        if one.device == other.device and one.start < other.end and other.start < one.end:
            assert lanes[one] != lanes[other], "side by side"
    assert {of for span, (_, of) in lanes.items() if span.call == "generate"} == {3}
    draw_timeline(ahead, tmp_path / "ahead.png")
    assert (tmp_path / "ahead.png").stat().st_size > 3000
    one_after_the_other = [Span("generate", 1, 6.0 * step, 6.0 * step + 5.0, step) for step in range(4)]
    assert not Timeline(one_after_the_other).runs_ahead


def test_a_picture_hides_no_call_behind_another_on_the_same_device(tmp_path: Path) -> None:
    """Such as the generation ahead of an engine whose device scores meanwhile."""
    generates = [Span("generate", 0, 0.0, 1.0, 0), Span("generate", 0, 1.0, 3.0, 1)]
    for start, beside in ((2.0, True), (2.999, False)):
        timeline = Timeline([*generates, Span("forward", 0, start, start + 1.0, 0)])
        assert not timeline.runs_ahead
        assert timeline.overlaps == beside
        draw_timeline(timeline, tmp_path / f"{beside}.png")


def test_a_picture_of_many_devices_has_one_row_for_neighbours_with_the_same_work(tmp_path: Path) -> None:
    """As in an estimate; of 128 devices each with its row nobody reads a picture of 46 inches."""

    def height(spans: Sequence[Span]) -> int:
        draw_timeline(Timeline(spans), tmp_path / "many.png")
        return int.from_bytes((tmp_path / "many.png").read_bytes()[20:24])  # of the PNG's header

    alike = [Span("actor.train" if rank < 64 else "critic.train", rank, 0.0, 1.0, 0) for rank in range(128)]
    assert height(alike) == height(alike[63:65])
    assert height([replace(span, end=1.0 + span.device) for span in alike]) > 10 * height(alike)


def test_a_timeline_without_spans_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without spans cannot be drawn"):
        draw_timeline(Timeline(), tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


def test_pictures_need_matplotlib_only_when_they_are_drawn() -> None:
    code = "import sys, trl_realloc.plan.picture; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_picture_of_streams_shows_how_many_samples_each_call_has_ended(tmp_path: Path) -> None:
    spans = [
        Span("actor.generate", 0, 0.0, 1.0, 0, samples=3),
        Span("actor.generate", 0, 1.0, 4.0, 0, samples=1),
        Span("reference.forward", 1, 1.0, 2.0, 0, samples=3),
        Span("reference.forward", 1, 4.0, 4.5, 0, samples=1),
        Span("actor.train", 0, 5.0, 6.0, 0),
    ]
    timeline = Timeline(spans)
    assert timeline.streamed_calls() == {"actor.generate", "reference.forward"}
    assert timeline.samples_ended("reference.forward") == ([1.0, 2.0, 4.5], [0, 3, 4])
    draw_timeline(timeline, tmp_path / "streams.png")
    draw_timeline(Timeline(spans[-1:]), tmp_path / "whole.png")
    assert not Timeline([spans[0], spans[-1]]).streamed_calls(), "calls of whole batches have one figure"
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
