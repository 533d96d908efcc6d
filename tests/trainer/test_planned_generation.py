"""A rank's part of planned generation, without other ranks and with an engine that draws each request's seed."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist

from trl_realloc.engines.base import Completion, EngineError, GenerationRequest, Sampling
from trl_realloc.plan.cluster import Cluster
from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.runtime.placement import engine_builder
from trl_realloc.runtime.placement.vllm_start import VLLMOptions
from trl_realloc.trainer.policy import planned_generation
from trl_realloc.trainer.policy.generation_plan import generation_plan
from trl_realloc.trainer.policy.planned_generation import AcceleratePolicy, PlannedGeneration


class Engine:
    """In the place of a vLLM engine that frees all its memory when it sleeps. A response is the request's seed."""

    def __init__(self) -> None:
        self.version, self.events = -1, list[str]()

    def load(self, buckets: Any, version: int) -> None:
        self.version = version
        self.events.append(f"load {' '.join(buckets)}")

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        self.events.append("generate")
        for request in requests:
            yield Completion(request.index, (request.seed,), (0.0,), stopped=True, versions=(self.version,))

    def sleep(self) -> None:
        self.version = -1
        self.events.append("sleep")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(engine_builder, "start_vllm", lambda *_: made)
    monkeypatch.setattr(planned_generation, "die_with_launcher", lambda: None)
    return made


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def generation(at: Any = None, *, takes_turns: bool = False) -> PlannedGeneration:
    """The generation of a job of one process.

    Args:
        at: where the trainer is: `step`, `evaluates` and the `weights` of its policy.
    """
    at = at or SimpleNamespace(step=0, evaluates=False, weights="first")
    policy = AcceleratePolicy(
        tiny.config(),
        lambda: iter([at.weights]),
        is_collective=lambda: False,
        step=lambda: at.step,
        evaluates=lambda: at.evaluates,
    )
    plan = generation_plan({"mesh": "0", "engine": "vllm", "drop": True}, Cluster(1, 1))
    options = VLLMOptions(torch.device("cpu"), context_length=64)
    return PlannedGeneration(plan, 0, options, policy, Sampling(max_tokens=8, temperature=1.0), takes_turns=takes_turns)


def test_a_run_that_resumes_at_an_evaluation_draws_what_one_without_an_interruption_draws(engine: Engine) -> None:
    at = SimpleNamespace(step=3, evaluates=True, weights="first")
    made = generation(at)
    evaluated = [made.generate([[2, 3]])[1] for _ in range(2)]
    at.evaluates = False
    trained = [made.generate([[2, 3]])[1] for _ in range(2)]
    resumed = generation(at)
    assert [resumed.generate([[2, 3]])[1] for _ in range(2)] == trained
    assert len({completion[0] for ((completion),) in [*evaluated, *trained]}) == 4
    made.close()
    resumed.close()


@pytest.mark.parametrize("takes_turns", [False, True])
def test_an_engine_sleeps_after_its_last_turn_and_takes_the_policy_as_it_is(engine: Engine, takes_turns: bool) -> None:
    at = SimpleNamespace(step=0, evaluates=False, weights="first")
    made = generation(at, takes_turns=takes_turns)
    for at.step, at.weights in enumerate(("first", "second")):
        made.sync_weights()
        for _ in range(2):
            made.generate([[2, 3], [4]])
        if takes_turns:
            made.finish()
    turns = ["generate", "generate"] if takes_turns else ["generate", "sleep", "load {}", "generate"]
    expected = [event.format(weights) for weights in ("first", "second") for event in ["load {}", *turns, "sleep"]]
    assert engine.events == expected
    made.close()


def test_what_an_engine_cannot_serve_ends_the_generation(engine: Engine) -> None:
    made = generation()
    with pytest.raises(JobFailed, match="64 tokens, .* nothing can be generated"):
        made.generate([[2] * 64])
    with pytest.raises(EngineError, match="planned generation is closed"):
        made.generate([[2, 3]])


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_closing_ends_the_connections_to_the_other_ranks(default_group: None, engine: Engine) -> None:
    before = threads()
    made = generation()
    of_group = threads() - before
    assert of_group
    made.close()
    made.close()
    gc.collect()
    deadline = time.monotonic() + 60
    while of_group & threads():  # the system lists a thread a little longer than it can be waited for
        assert time.monotonic() < deadline
    with pytest.raises(EngineError, match="planned generation is closed"):
        made.generate([[2, 3]])


def test_closing_after_a_script_has_destroyed_all_groups_does_nothing(default_group: None, engine: Engine) -> None:
    made = generation()
    dist.destroy_process_group()
    made.close()
