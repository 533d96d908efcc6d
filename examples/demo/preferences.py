"""The demo's preferences: how a sentence of the documentation goes on, over a continuation that is worse.

Owns what "worse" is: what the policy itself writes, the same at a high temperature, shuffled words, and sentences that
stop too early or never. Trains nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


# Of 20 pairs. What the policy writes leads, because that is what PPO will have scored.
KINDS = {"sampled": 10, "hot": 3, "shuffled": 3, "broken_off": 2, "unended": 2}


@dataclass(frozen=True)
class Preference:
    """Prompt and continuation as token ids, `chosen` ended by the end token; `kind` says what is wrong with the other."""

    chosen: list[int]
    rejected: list[int]
    kind: str

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))


def cut(sentence: str, rng: random.Random) -> tuple[str, str]:
    """The first 2 to 8 words, at most half of the sentence, and the rest with its leading space."""
    words = sentence.split(" ")
    length = rng.randint(2, min(8, len(words) // 2))
    prompt = " ".join(words[:length])
    return prompt, sentence[len(prompt) :]


def make_preferences(
    policy: Any, tokenizer: Any, text: Sequence[str], sample_tokens: int, seed: int
) -> list[Preference]:
    """One pair for each sentence, its kind drawn with the weights of `KINDS`."""
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=len(text))
    parts = [cut(sentence, rng) for sentence in text]
    prompts = [tokenizer(prompt).input_ids for prompt, _ in parts]
    rests = [tokenizer(rest).input_ids for _, rest in parts]
    worse: list[list[int]] = [[] for _ in text]
    torch.manual_seed(seed)
    for kind, temperature in (("sampled", 1.0), ("hot", 1.5)):
        at = [number for number, drawn in enumerate(kinds) if drawn == kind]
        written = sample(policy, tokenizer, [prompts[number] for number in at], temperature, sample_tokens)
        for number, tokens in zip(at, written, strict=True):
            worse[number] = tokens
    end = tokenizer.eos_token_id
    for number, kind in enumerate(kinds):
        rest = rests[number]
        if kind == "shuffled":
            words = parts[number][1].split()
            worse[number] = [*tokenizer(" " + " ".join(rng.sample(words, len(words)))).input_ids, end]
        elif kind == "broken_off":
            worse[number] = [*rest[: rng.randrange(max(1, len(rest) - 1))], end]
        elif kind == "unended":
            worse[number] = rest[: rng.randint(1, len(rest))]
    return [
        Preference([*prompt, *rest, end], [*prompt, *rejected], kind)
        for prompt, rest, rejected, kind in zip(prompts, rests, worse, kinds, strict=True)
    ]


@torch.no_grad()
def sample(
    policy: Any, tokenizer: Any, prompts: Sequence[list[int]], temperature: float, tokens: int, batch: int = 128
) -> list[list[int]]:
    """Continuations of at most `tokens` tokens, with the end token where there is one and without padding."""
    written: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        inputs = tokenizer.pad({"input_ids": prompts[start : start + batch]}, return_tensors="pt")
        rows = policy.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=tokens,
        )[:, inputs.input_ids.shape[1] :].tolist()
        pad = tokenizer.pad_token_id
        written += [row[: row.index(pad)] if pad in row else row for row in rows]
    return written
