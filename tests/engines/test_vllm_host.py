"""What an engine's process decides without vLLM: how tokens are drawn, and which memory it takes when."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

from trl_realloc.engines.generation.engine_process import engine_environment
from trl_realloc.engines.generation.vllm_host import Memory, draws_by_seed, ended_workers


class Engine:
    """In place of vLLM, which refuses to wake what is awake."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.done: list[Any] = []

    def sleep(self, level: int) -> None:
        assert not self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.done.append(level)

    def wake_up(self, tags: list[str]) -> None:
        assert self.asleep.issuperset(tags)
        self.asleep -= set(tags)
        self.done.append(tags)

    def collective_rpc(self, method: str) -> None:
        """Of the plain tensors, which are there while the weights are."""
        assert "weights" not in self.asleep
        self.done.append(method)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_takes_memory_for_weights_before_that_for_its_cache(level: int) -> None:
    engine: Any = Engine()
    memory = Memory(engine, level)
    memory.wake("weights")  # of an engine that has not slept
    for _ in range(2):
        memory.sleep()
        memory.sleep()
        memory.wake("weights")  # a load
        memory.wake("weights", "kv_cache")  # a generation
        memory.wake("weights", "kv_cache")
    keeps, restores = (["keep_plain_tensors"], ["restore_plain_tensors"]) if level == 2 else ([], [])
    assert engine.done == [*keeps, level, ["weights"], *restores, ["kv_cache"]] * 2


def test_an_engine_that_has_loaded_and_generated_nothing_sleeps_again() -> None:
    engine: Any = Engine()
    memory = Memory(engine, 2)
    memory.sleep()
    memory.wake("weights")
    memory.sleep()
    assert engine.asleep == {"weights", "kv_cache"}
    slept, woken = ["keep_plain_tensors", 2], [["weights"], "restore_plain_tensors"]
    assert engine.done == [*slept, *woken, ["kv_cache"], *slept]


def test_an_engine_that_generates_with_the_weights_that_it_kept_wakes_whole() -> None:
    engine: Any = Engine()
    memory = Memory(engine, 1)
    memory.sleep()
    memory.wake("weights", "kv_cache")
    assert engine.done == [1, ["weights", "kv_cache"]]


@pytest.mark.parametrize(
    ("repeatable", "on_cpu", "by_seed"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_vllms_sampler_draws_on_a_gpu_unless_draws_must_repeat(repeatable: bool, on_cpu: bool, by_seed: bool) -> None:
    assert draws_by_seed({"repeatable_sampling": repeatable}, on_cpu) == by_seed


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_no_engine_has_the_expandable_segments_of_its_training(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A sleeping engine cannot give them back, and the workers of an awake tensor group cannot open each other's."""
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert engine_environment(2, None, [0, 1])[name] == "max_split_size_mb:64"


def test_flashinfers_sampler_does_not_draw_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no log-probabilities of the distribution that is drawn from, and no seeds of samples."""
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert engine_environment(1, None, [0])["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


@pytest.mark.parametrize(
    ("given", "level"), [(None, "INFO"), ("ERROR", "INFO"), ("WARNING", "WARNING"), ("DEBUG", "DEBUG")]
)
def test_an_engines_log_keeps_what_vllm_says(monkeypatch: pytest.MonkeyPatch, given: str | None, level: str) -> None:
    if given is None:
        monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    else:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", given)
    assert engine_environment(1, None, [0])["VLLM_LOGGING_LEVEL"] == level


def test_this_packages_sampler_draws_in_vllms_older_runner_in_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 takes its newest runner where nothing is said, and refuses there the processors of the older one."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine_environment(1, None, [0])
    assert engine_environment(1, None, [0], repeatable=True)["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_a_worker_that_is_known_twice_is_named_once() -> None:
    worker = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,), name="worker-0")
    worker.start()
    worker.join()
    assert ended_workers([worker, worker]) == f"vLLM's worker worker-0 (pid {worker.pid}) ended with exit status 3"
