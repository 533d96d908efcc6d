"""vLLM engines for the tests of this folder: one that they share, and others where a test needs its own."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from engine_forks import EngineForks
from generating import LENGTH, llama
from holding import holdable
from transformers import GenerationConfig, LlamaForCausalLM

from trl_realloc.engines.generation import engine_process
from trl_realloc.engines.generation.vllm import VLLMEngine


Start = Callable[..., VLLMEngine]


@pytest.fixture
def run_with_vllm(forks: EngineForks, tmp_path: Path) -> Callable[..., str]:
    """Run a program with one argument in a process that has imported vLLM already, which must stay out of this one.
    Returns what it wrote."""

    def run(program: str, argument: str = "", limit_s: float = 120, **environment: str) -> str:
        (tmp_path / "program_of_test.py").write_text(textwrap.dedent(program))
        searched = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
        command = [sys.executable, "-m", "program_of_test", argument]
        with open(tmp_path / "program_of_test.log", "w+b") as log:
            process = forks.spawn(command, {**os.environ, "PYTHONPATH": searched, **environment}, log, [])
            try:
                code = process.wait(limit_s)
            finally:
                process.kill()
            log.seek(0)
            written = log.read().decode(errors="replace")
        assert code == 0, written[-3000:]
        return written

    return run


@pytest.fixture(scope="session")
def start(forks: EngineForks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines that are closed, and whose processes are looked for, after the tests. They are forked
    (`engine_forks`) unless a test asks otherwise; tests that call `VLLMEngine` themselves start them."""
    with contextlib.ExitStack() as stack:

        def begin(tied: bool = False, forked: bool = True, **settings: object) -> VLLMEngine:
            folder = tmp_path_factory.mktemp("model")
            llama(0, tied).config.save_pretrained(folder)
            # the model's own taste, which must not leak into the samples: every log-probability below would be off
            GenerationConfig(do_sample=True, repetition_penalty=1.5, top_k=3).save_pretrained(folder)
            settings = {"max_num_seqs": 64, "kv_cache_gib": 0.25, "step_timeout_s": 30, **settings}
            spawn = forks.spawn if forked else engine_process.spawn
            with mock.patch.object(engine_process, "spawn", spawn):
                engine = holdable(lambda: VLLMEngine(folder, max_model_len=LENGTH, **settings), folder)  # type: ignore[arg-type]
            stack.callback(engine.close)
            return engine

        yield begin


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return llama(1)


@pytest.fixture(scope="session")
def models() -> dict[int, LlamaForCausalLM]:
    """Parameters of six versions."""
    return {version: llama(20 + version) for version in range(1, 7)}


@pytest.fixture(scope="session")
def vllm_engine(start: Start) -> VLLMEngine:
    return start()
