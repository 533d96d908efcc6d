"""vLLM engines for the tests of this folder: one that they share, and others where a test needs its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from engine_forks import EngineForks
from generating import LENGTH, llama
from holding import holdable
from transformers import GenerationConfig, LlamaForCausalLM

from trl_realloc.engines.generation import engine_process
from trl_realloc.engines.generation.vllm import VLLMEngine


Start = Callable[..., VLLMEngine]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines that are closed, and whose processes are looked for, after the tests. They are forked
    (`engine_forks`) unless a test asks otherwise; tests that call `VLLMEngine` themselves start them."""
    with contextlib.ExitStack() as stack:
        forks = EngineForks.started()
        stack.callback(forks.close)

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
