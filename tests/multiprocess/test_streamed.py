"""Streamed, migrated, deterministic and overlapped updates with vLLM engines learn what serial ones learn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from launched_job import Job, slowness
from ranks import RankServers
from safetensors.torch import load_file
from test_plans import plan, whole


pytestmark = [pytest.mark.multiprocess, pytest.mark.vllm, pytest.mark.timeout(1800)]

CONFIG: dict[str, Any] = {
    "generation_engine": "vllm",
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 4,
    "response_length": 64,
    "max_steps": 5,
    # Adam's default epsilon of 1e-8 makes a step of the rounding noise in a gradient that is 0
    "adam_epsilon": 1e-4,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 3,
}
ENGINES = {"actor.generate": {"mesh": "0-1", "engine": "vllm", "dp": 2}}
ONE_ENGINE = {"actor.generate": {"mesh": "0", "engine": "vllm", "dp": 1}}
MIGRATION = {"migration": {"threshold": 0.9}}
TWO_ENGINES = {**plan(2, tokens=300, changed=ENGINES), "streams": MIGRATION}
# the actor's calls on one rank, the critic's on the other
APART = plan(2, tokens=300, changed={**ONE_ENGINE, "reference.forward": whole("0")}, actor="0", critic="1", reward="1")

FIRST = "two/checkpoint-1"
SHARED: list[dict[str, Any]] = [
    {"name": "serial", "saves": [1], "stops": [3]},
    {"name": "streamed", "streams": True, "resume": FIRST, "stops": [3]},
    {"name": "migrated", "streams": MIGRATION, "resume": FIRST, "stops": [3]},
    {"name": "fixed", "streams": {"deterministic": True}, "resume": FIRST, "stops": [3]},
    {"name": "fixed again", "streams": {"deterministic": True}, "resume": FIRST, "stops": [3]},
]
OVERLAPPED: list[dict[str, Any]] = [
    {"name": "barrier", "barrier": True, "resume": FIRST, "critic_s": 0.3},
    {"name": "overlapped", "resume": FIRST, "critic_s": 0.3},
    {"name": "stopped", "streams": True, "resume": FIRST, "evaluates": [2], "stops": [3]},
    {"name": "resumed", "streams": True, "resume": "apart/checkpoint-3"},
]


@dataclass
class Run:
    """What a run has written.

    Args:
        notes: of rank 0; see `streamed.Notes`.
        weights: of all ranks.
    """

    notes: dict[str, Any]
    weights: dict[str, torch.Tensor]

    def samples(self, updates: slice) -> list[dict[str, Any]]:
        return self.notes["samples"][updates]

    @property
    def events(self) -> list[tuple[str, int]]:
        return [(name, step) for name, step in self.notes["events"]]

    def overlaps(self) -> list[int]:
        """The updates, from 0, whose generation began while the critic was trained in the one before."""
        spans = self.notes["spans"]
        ends = {step: end for call, _, _, end, step in spans if call == "critic.train"}
        starts = [(step, start) for call, _, start, _, step in spans if call == "actor.generate"]
        return sorted({step for step, start in starts if start < ends.get(step - 1, 0.0)})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, servers: RankServers) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("streams")
    options = {"config": CONFIG, "plans": {"two": {"plan": TWO_ENGINES, "runs": SHARED}}}
    options["plans"]["apart"] = {"plan": APART, "runs": OVERLAPPED}
    job = Job(folder, "streamed.py", 2, options, None, servers=servers)
    try:
        assert job.wait(300 * slowness()) == 0, job.problem()
    finally:
        job.kill()
        job.log.close()
    made = {}
    for name in (run["name"] for run in (*SHARED, *OVERLAPPED)):
        weights = {}
        for rank in (0, 1):
            weights |= load_file(folder / f"{name}-{rank}.safetensors")
        made[name] = Run(json.loads((folder / f"{name}-0.json").read_text()), weights)
    return made


def assert_same_samples(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) > 0
    for ours, theirs in zip(one, other, strict=True):
        assert ours["responses"] == theirs["responses"]
        for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            assert a == pytest.approx(b, rel=0, abs=1e-5)


def assert_same_weights(one: Run, other: Run) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], rtol=0, atol=1e-5, msg=name)


def assert_same_log(one: Run, other: Run) -> None:
    ours, theirs = (run.notes["log"][-2:] for run in (one, other))
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["streamed", "migrated", "fixed"])
def test_streams_change_nothing(runs: dict[str, Run], name: str) -> None:
    serial, run = runs["serial"], runs[name]
    assert_same_samples(run.samples(slice(None)), serial.samples(slice(1, None)))
    assert_same_log(run, serial)
    assert_same_weights(run, serial)
    assert serial.notes["forwards"] == 0 < run.notes["forwards"]


def test_samples_have_moved_and_only_where_the_plan_says_so(runs: dict[str, Run]) -> None:
    lengths = sorted(len(row) for update in runs["serial"].samples(slice(1, None)) for row in update["responses"])
    assert lengths[0] < 32 < lengths[-1], "there would be nothing to move"
    assert [name for name, run in runs.items() if run.notes["moved"]] == ["migrated"]


def test_a_deterministic_run_repeats_bit_by_bit(runs: dict[str, Run]) -> None:
    one, again = runs["fixed"], runs["fixed again"]
    assert one.notes["samples"] == again.notes["samples"]
    assert one.notes["log"] == again.notes["log"]
    assert all(torch.equal(tensor, again.weights[name]) for name, tensor in one.weights.items())


def test_generation_that_begins_while_the_critic_trains_changes_nothing(runs: dict[str, Run]) -> None:
    barrier, overlapped = runs["barrier"], runs["overlapped"]
    assert_same_samples(barrier.samples(slice(0, 2)), runs["serial"].samples(slice(1, None)))
    assert_same_samples(overlapped.samples(slice(None)), barrier.samples(slice(None)))
    assert_same_log(overlapped, barrier)
    assert_same_weights(overlapped, barrier)
    # the fourth update is evaluated, so there is a barrier
    assert (overlapped.overlaps(), barrier.overlaps()) == ([2, 3], [])
    assert (overlapped.notes["early"], barrier.notes["early"]) == ([2, 3], [])


def test_callbacks_come_in_the_same_order_while_updates_overlap(runs: dict[str, Run]) -> None:
    barrier = runs["barrier"].events
    assert runs["overlapped"].events == barrier
    assert {name for name, _ in barrier} >= {"step_begin", "step_end", "log", "evaluate", "save", "train_end"}
    assert ("evaluate", 4) in barrier
    assert ("save", 3) in barrier
    order = [name for name, step in barrier if step == 4 and name != "log"]
    assert order == ["step_end", "evaluate", "step_begin"]


def test_a_callback_evaluates_and_stops_while_the_next_generation_runs(runs: dict[str, Run]) -> None:
    stopped, barrier = runs["stopped"], runs["barrier"]
    assert stopped.notes["early"] == [2, 3], "it ran when the callbacks were called"
    assert ("evaluate", 2) in stopped.events
    assert stopped.events[-1] == ("train_end", 3)
    assert_same_samples(stopped.samples(slice(None)), barrier.samples(slice(0, 2)))


def test_a_run_resumes_from_what_was_saved_while_the_next_generation_ran(runs: dict[str, Run]) -> None:
    resumed, barrier = runs["resumed"], runs["barrier"]
    assert_same_samples(resumed.samples(slice(None)), barrier.samples(slice(2, None)))
    assert_same_log(resumed, barrier)
    assert_same_weights(resumed, barrier)
