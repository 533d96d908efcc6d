"""A vLLM engine with a mixture of experts computes with each update's weights, and says which experts it chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import mixtures
import numpy as np
import pytest
import torch
from engine_forks import EngineForks
from generating import samples, worst_difference
from holding import held, holdable
from rescoring import wait_for
from test_router_replay import chosen_by

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.generation import engine_process
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling
from trl_realloc.engines.training.weight_export import buckets


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
]

SAMPLING = Sampling(max_tokens=12, temperature=1.0)


def assert_exact(model: object, asked: Sequence[GenerationRequest], got: Sequence[Completion]) -> None:
    """In float32 log-probabilities and experts are those of the model."""
    assert worst_difference(model, asked, got, 1.0) < 1e-4  # type: ignore[arg-type]
    for request, completion in zip(asked, got, strict=True):
        columns = {"prompts": Ragged.of([request.prompt_ids], torch.long)}
        given = Rollouts(**columns, responses=Ragged.of([completion.token_ids], torch.long))
        (expected,) = chosen_by(model, given)
        assert completion.routes is not None
        of_layers = (len(expected), -1, 2)
        found = np.sort(completion.routes.reshape(of_layers), axis=-1)
        assert np.array_equal(found, np.sort(expected.numpy().reshape(of_layers), axis=-1))


# GLM-4's routers have a buffer, which vLLM loads in place, after their layer is packed
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_the_experts_of_every_token_are_told_after_every_update(
    family: str, forks: EngineForks, tmp_path: Path
) -> None:
    """Of tokens that come from the prefix cache too, and of samples that were stopped and go on."""
    first, second = (mixtures.mixture(family, seed).eval() for seed in (1, 2))
    first.config.save_pretrained(tmp_path)
    settings = {"max_num_seqs": 8, "kv_cache_gib": 0.25, "routes": True}
    with mock.patch.object(engine_process, "spawn", forks.spawn):
        engine = holdable(lambda: VLLMEngine(tmp_path, max_model_len=128, **settings), tmp_path)  # type: ignore[arg-type]
    try:
        for version, model in enumerate((first, second)):
            engine.load(buckets(model), version)
            draw = np.random.default_rng(version)
            short, long = (tuple(map(int, draw.integers(2, 100, size))) for size in (7, 100))
            asked = [GenerationRequest(number, prompt, number) for number, prompt in enumerate((short, long, long))]
            assert_exact(model, asked, samples(engine, asked, SAMPLING))
        again = samples(engine, asked, SAMPLING)
        assert_exact(second, asked, again)

        with held(engine, 5):
            generation = engine.start(asked, SAMPLING)
            while min(len(part.token_ids) for part in wait_for(generation, 5)) < 5:
                pass
            (stopped,) = generation.withdraw([1])
        assert stopped.routes is not None and len(stopped.routes) == len(long) + 4
        generation.close()
        continued = [GenerationRequest(1, long, 1, begun=stopped)]
        went_on = samples(engine, continued, SAMPLING)
        assert went_on[0].token_ids == again[1].token_ids
        assert_exact(second, continued, went_on)
    finally:
        engine.close()
