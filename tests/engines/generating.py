"""Tiny Llamas, prompts and checks for tests of engines that generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_realloc.engines.base import GenerationEngine
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling


VOCABULARY = 128
LENGTH = 256  # max_model_len
SAMPLING = Sampling(max_tokens=24, temperature=0.7)
# An engine has not done so many requests before it is killed, stopped or closed, however long a busy machine lets the
# test wait for a core: they take minutes.
ENDLESS, MANY = Sampling(max_tokens=200, temperature=0.7), 20_000


def llama(seed: int, tied: bool = False) -> LlamaForCausalLM:
    """A random Llama whose distributions are far from uniform, so that wrong weights show."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # vLLM's least on the CPU
    rest = {"max_position_embeddings": LENGTH, "tie_word_embeddings": tied, "initializer_range": 0.2}
    config = LlamaConfig(**sizes, **heads, **rest, architectures=["LlamaForCausalLM"])
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def buckets(model: LlamaForCausalLM, size: int = 5) -> Iterator[list[tuple[str, torch.Tensor]]]:
    named = list(model.named_parameters())  # a tied head is not named twice
    for start in range(0, len(named), size):
        yield named[start : start + size]


def requests(count: int, seed: int = 0, length: int = 7) -> list[GenerationRequest]:
    """Prompts of unlike lengths; `index` is not the position."""
    return [
        GenerationRequest(
            index=100 + i,
            prompt_ids=tuple((i * 13 + j * 5 + 1) % VOCABULARY for j in range(length + i % 4)),
            seed=seed + i,
        )
        for i in range(count)
    ]


def samples(
    engine: GenerationEngine, asked: Sequence[GenerationRequest], sampling: Sampling = SAMPLING
) -> list[Completion]:
    """The completions in the order of the requests."""
    by_index = {completion.index: completion for completion in engine.generate(asked, sampling)}
    assert len(by_index) == len(asked)
    return [by_index[request.index] for request in asked]


def worst_difference(
    model: LlamaForCausalLM, asked: Sequence[GenerationRequest], got: Sequence[Completion], temperature: float
) -> float:
    """Greatest difference between an engine's log-probabilities and those of the model itself."""
    worst = 0.0
    for request, completion in zip(asked, got, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
        own = logprobs[len(request.prompt_ids) - 1 : -1].gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]
