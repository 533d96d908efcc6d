"""New parameters during a generation, in vLLM engines that have steps under way or run for long: with two batches under
way at the same time, as on a GPU, and over many requests and updates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from generating import buckets, llama, requests
from holding import held
from rescoring import TEMPERATURE, Models, assert_exact, the_rest, wait_for

from trl_realloc.engines.base import Updates
from trl_realloc.engines.generation.engine_process import engine_environment
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Sampling


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

Start = Callable[..., VLLMEngine]


@pytest.fixture
def two_batches(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VLLMEngine, Path]:
    monkeypatch.setenv("TWO_STEPS_AT_A_TIME", "1")
    return start(max_num_seqs=16, log_path=tmp_path / "log"), tmp_path / "log"


@pytest.mark.oldest  # what is used of vLLM to wait for steps is private
def test_steps_under_way_are_waited_for_and_their_tokens_are_of_the_version_before(
    two_batches: tuple[VLLMEngine, Path], models: Models
) -> None:
    engine, log = two_batches
    sampling = Sampling(max_tokens=120, temperature=TEMPERATURE)
    engine.load(buckets(models[1]), 1)
    asked = requests(24)
    with held(engine, 10) as hold:
        generation = engine.start(asked[:5], sampling, Updates.KEEP)
        for version in range(2, 7):
            hold(10 * (version - 1))
            wait_for(generation, 10 * (version - 1))
            generation.add(asked[4 * version - 3 : 4 * version + 1] if version < 6 else asked[21:])
            engine.load(buckets(models[version]), version)
    got = the_rest(generation)
    assert_exact(models, asked, got)
    assert {version for completion in got for version in completion.versions} >= {1, 3, 6}
    generation.close()
    under_way = [int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("under way:")]
    assert max(under_way) >= 1
    assert engine.version == 6


GROWTH = """
import gc, json, sys, tracemalloc
from dataclasses import asdict
from trl_realloc.engines.requests import Sampling
from trl_realloc.engines.generation.vllm_host import build
from trl_realloc.engines.generation.vllm_requests import CachedKeys, RunningRequests
from trl_realloc.engines.generation.vllm_sampler import SeededRows

settings = dict(model=sys.argv[1], max_model_len=256, max_num_seqs=16, tensor_parallel_size=1, dtype="float32",
                kv_cache_gib=1 / 32, gpu_memory_utilization=0.3, repeatable_sampling=False, sleep_level=0,
                engine_kwargs={}, tokenizer=None, folder=None, routes=False)
if __name__ == "__main__":
    llm = build(settings)
    engine, rounds, each = llm.llm_engine, 60, 50
    core = engine.engine_core.engine_core
    running = RunningRequests(llm, asdict(Sampling(4, 0.7, (3,))), by_seed=True, version=0, keys=CachedKeys())

    def run(number):
        running.add([(each * number + i, [i + 1, number % 100, 3] * 50, i, 0, 4) for i in range(each)])
        done, withdrawn = 0, 0
        while running:
            done += len(running.step())
            withdrawn += len(running.withdraw([each * number + 7], 1))
            running.settle()
            running.peek()
            running.updated(number)
        assert done + withdrawn == each

    def used():
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    for number in range(21):  # until each block of the cache has a key, and Python's free lists are filled
        run(number)
    before = used()
    for number in range(21, 21 + rounds):
        run(number)
    after = used()
    processor = engine.output_processor
    tables = [processor.request_states, processor.external_req_ids, processor.parent_requests, core.scheduler.requests,
              core.scheduler.running, core.scheduler.waiting, running._submitted, running._waiting, running._name_of]
    grown = [(last - first) / (rounds * each) for first, last in zip(before, after)]
    print(json.dumps([[len(table) for table in tables], grown]))
"""


def test_nothing_grows_with_the_requests_and_updates_served(run_with_vllm: Callable[..., str], tmp_path: Path) -> None:
    llama(0).config.save_pretrained(tmp_path)
    environment = engine_environment(1, sorted(os.sched_getaffinity(0))[:1], None)
    del environment["PYTHONPATH"]
    written = run_with_vllm(GROWTH, str(tmp_path), limit_s=300, **environment)
    tables, (objects, nbytes) = json.loads(written.splitlines()[-1])
    assert tables == [0] * len(tables)
    assert objects < 0.1, "Python objects of each request"
    assert nbytes < 20, "bytes of each request"


def test_the_trainers_side_forgets_what_has_finished(vllm_engine: VLLMEngine, models: Models) -> None:
    vllm_engine.load(buckets(models[1]), 1)
    generation = vllm_engine.start([], Sampling(8, TEMPERATURE), Updates.KEEP)
    for version in range(2, 6):
        generation.add(requests(20))
        generation.withdraw([100, 101])
        vllm_engine.load(buckets(models[version]), version)
        the_rest(generation)
    assert generation.unfinished == 0 and generation.poll(0) == []
    generation.close()
