"""A rank's part of planned generation, without other ranks and without an engine."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist

from trl_realloc.engines.base import EngineError, Sampling
from trl_realloc.plan.cluster import Cluster
from trl_realloc.runtime.placement.vllm_start import VLLMOptions
from trl_realloc.trainer.policy import planned_generation
from trl_realloc.trainer.policy.generation_plan import generation_plan
from trl_realloc.trainer.policy.planned_generation import PlannedGeneration, Policy


class Alone:
    """In the place of `Rounds`: no other rank takes part. It refers to the group, as that does."""

    def __init__(self, messages: Any, *rest: Any) -> None:
        self.messages = messages

    def agree(self, error: Exception | None) -> None:
        assert error is None

    def join(self, requests: list[tuple[list[int], int]]) -> list[Any]:
        """The seed of each request, as a completion of one token."""
        return [((seed,), (0.0,)) for _, seed in requests]


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def without_others(monkeypatch: pytest.MonkeyPatch, rounds: type[Alone]) -> None:
    monkeypatch.setattr(planned_generation, "Rounds", rounds)
    monkeypatch.setattr(planned_generation, "watch", lambda timeout_s: None)
    monkeypatch.setattr(planned_generation, "die_with_launcher", lambda: None)


def without_engine(monkeypatch: pytest.MonkeyPatch, at: Any = None) -> PlannedGeneration:
    """Rank 0 of two, whose prompts rank 1's engine serves.

    Args:
        at: where the trainer is: `step` and `evaluates`.
    """
    without_others(monkeypatch, Alone)
    plan = generation_plan({"mesh": "1", "engine": "vllm"}, Cluster(1, 2))
    policy = Policy(
        tiny.config(), lambda: (), is_collective=lambda: False, step=lambda: at.step, evaluates=lambda: at.evaluates
    )
    options = VLLMOptions(torch.device("cpu"), context_length=64)
    return PlannedGeneration(plan, 0, options, policy, Sampling(max_tokens=8, temperature=1.0))


def test_a_run_that_resumes_at_an_evaluation_draws_what_one_without_an_interruption_draws(
    default_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = SimpleNamespace(step=3, evaluates=True)
    generation = without_engine(monkeypatch, at)
    evaluated = [generation.generate([[2, 3]])[1] for _ in range(2)]
    at.evaluates = False
    trained = [generation.generate([[2, 3]])[1] for _ in range(2)]
    resumed = without_engine(monkeypatch, at)
    assert [resumed.generate([[2, 3]])[1] for _ in range(2)] == trained
    assert len({completion[0] for ((completion),) in [*evaluated, *trained]}) == 4
    generation.close()
    resumed.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_goes_on_before_the_engine_on_its_device_sleeps(
    rank: int, default_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of a tensor group is rank 0's and has the devices of both. The accelerator is a stand-in."""
    events: list[str] = []

    class Recorded(Alone):
        def agree(self, error: Exception | None) -> None:
            super().agree(error)
            events.append("all")

    engine = SimpleNamespace(
        wait_ready=lambda: None, load=lambda exported, version: None, sleep=lambda: events.append("sleep")
    )
    without_others(monkeypatch, Recorded)
    monkeypatch.setattr(planned_generation, "is_accelerator", lambda device: True)
    monkeypatch.setattr(planned_generation, "release_cached_memory", lambda device: None)
    monkeypatch.setattr(planned_generation, "start_vllm", lambda plan, call, rank, *rest: None if rank else engine)
    plan = generation_plan({"mesh": "0-1", "engine": "vllm", "tp": 2, "drop": True}, Cluster(1, 2))
    policy = Policy(tiny.config(), lambda: (), is_collective=lambda: False, step=lambda: 0, evaluates=lambda: False)
    options = VLLMOptions(torch.device("cpu"), context_length=64)
    generation = PlannedGeneration(plan, rank, options, policy, Sampling(max_tokens=8, temperature=1.0))
    events.clear()
    generation.generate([[2, 3]])
    # before it wakes up, when it is loaded, and when it sleeps
    assert events == (["all", "all", "sleep", "all"] if rank == 0 else ["all", "all", "all"])
    generation.close()


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_closing_ends_the_connections_to_the_other_ranks(default_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads()
    generation = without_engine(monkeypatch)
    of_group = threads() - before
    assert of_group
    generation.close()
    generation.close()
    gc.collect()
    deadline = time.monotonic() + 60
    while of_group & threads():  # the system lists a thread a little longer than it can be waited for
        assert time.monotonic() < deadline
    with pytest.raises(EngineError, match="planned generation is closed"):
        generation.generate([[2, 3]])


def test_closing_after_a_script_has_destroyed_all_groups_does_nothing(
    default_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = without_engine(monkeypatch)
    dist.destroy_process_group()
    generation.close()
