"""Computes the log-probabilities of an engine's samples again with Transformers, where the engine's parameters have
changed while it generated."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM

from trl_realloc.engines.base import Generation
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.requests import Completion, GenerationRequest, Unfinished


Models = Mapping[int, LlamaForCausalLM]  # by version

TEMPERATURE = 0.7


def wait_for(generation: Generation, tokens: int) -> list[Unfinished]:
    """Look at a generation, whose engine is `held`, until a request has drawn so many tokens."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        so_far = generation.peek()
        assert so_far, "the generation has ended"
        if max(len(unfinished.token_ids) for unfinished in so_far) >= tokens:
            return so_far
    raise AssertionError(f"no request has {tokens} tokens")


def wait_until_idle(engine: VLLMEngine) -> None:
    """Wait until an engine's process has nothing to do: none of its threads runs or waits for a core in 20 looks one
    after the other. It decodes a token in less time than these take."""
    tasks, looks, deadline = Path("/proc", str(engine._process.pid), "task"), 0, time.monotonic() + 60
    while looks < 20:
        assert time.monotonic() < deadline, "the engine is always busy"
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        looks = 0 if "R" in states else looks + 1
        time.sleep(0.01)


def the_rest(generation: Generation) -> list[Completion]:
    """All completions that a generation still has to give, by index."""
    completions: list[Completion] = []
    while generation.unfinished:
        completions += generation.poll(30)
    return sorted(completions, key=lambda completion: completion.index)


def kept_keys(
    models: Models, prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int], already: int = 0
) -> torch.Tensor:
    """The distribution of each token (tokens, vocabulary), where the keys of a position stay those of the parameters
    that first computed it.

    Args:
        already: the number of tokens whose keys were computed with the first token's parameters after them.
    """
    cache, rows, ids = DynamicCache(), [], torch.tensor([[*prompt, *tokens]])
    computed = 0  # positions whose keys are in the cache
    for version, run in groupby(range(already, len(tokens)), key=lambda place: versions[place]):
        end = len(prompt) + max(run)  # the last of the run's tokens is drawn at the position before its own
        with torch.no_grad():
            logits = models[version](ids[:, computed:end], past_key_values=cache, use_cache=True).logits[0]
        rows.append(logits[max(0, len(prompt) + already - 1 - computed) :])
        computed = end
    return (torch.cat(rows) / TEMPERATURE).log_softmax(-1)


def error_of(expected: torch.Tensor, logprobs: Sequence[float], tokens: Sequence[int]) -> float:
    own = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return float((own - torch.tensor(logprobs)).abs().max())


def drawn_by(seed: int, expected: torch.Tensor, tokens: Sequence[int]) -> bool:
    """Whether a sample's random numbers give its tokens, but for rounding: number j belongs to token j."""
    ends = expected.double().exp().cumsum(-1)
    point = torch.from_numpy(np.random.default_rng(seed).random(len(expected))) * ends[:, -1]
    end = ends.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    begin = end - expected.double().exp().gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return bool(((begin - 1e-5 < point) & (point < end + 1e-5)).all())


def shifted(versions: Sequence[int]) -> list[int]:
    """As if each update had come a token later."""
    return [versions[0], *versions[:-1]]


def assert_exact(models: Models, asked: Sequence[GenerationRequest], got: Sequence[Completion]) -> None:
    """Each token is of its version, and drawn with the random number of its place."""
    wrong = []
    for request, completion in zip(asked, got, strict=True):
        assert completion.index == request.index
        assert len(completion.versions) == len(completion.token_ids) == len(completion.logprobs)
        assert list(completion.versions) == sorted(completion.versions)
        tokens, versions = completion.token_ids, completion.versions
        expected = kept_keys(models, request.prompt_ids, tokens, versions)
        assert error_of(expected, completion.logprobs, tokens) < 1e-4
        assert drawn_by(request.seed, expected, tokens)
        assert not drawn_by(request.seed + 1000, expected, tokens)
        if len(set(versions)) > 1:
            other = kept_keys(models, request.prompt_ids, tokens, shifted(versions))
            wrong.append(error_of(other, completion.logprobs, tokens))
    assert not wrong or min(wrong) > 1e-2, "a version that is a token off would not be noticed"
