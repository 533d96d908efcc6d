"""What one iteration has to work through: episodes, prompt and response lengths, optimizer steps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from ..common.errors import PlanError, Problems


QUANTILES = 32  # a measured distribution is kept as so many of them


@dataclass(frozen=True)
class Workload:
    """One iteration's samples, in numbers.

    Args:
        episodes: of the global batch.
        prompt_tokens: mean length of a prompt.
        response_tokens: equally likely lengths of a response, ascending; one where all are equally long.
        mini_batches: optimizer steps of one PPO epoch.
        epochs: passes over the batch.
        recompute: training computes every forward again in its backward (activation checkpointing).
        forward_tokens: most tokens of one scoring forward where a plan states no `micro_batch_tokens`.
        train_tokens: the same, training.

    Raises:
        PlanError: a number below 1, or no length.
    """

    episodes: int
    prompt_tokens: float
    response_tokens: tuple[int, ...]
    mini_batches: int = 1
    epochs: int = 4
    recompute: bool = False
    forward_tokens: int = 65_536
    train_tokens: int = 8_192

    def __post_init__(self) -> None:
        numbers = ("episodes", "prompt_tokens", "mini_batches", "epochs", "forward_tokens", "train_tokens")
        problems = Problems(
            f"a workload's {name} is 1 or more, not {getattr(self, name)!r}."
            for name in numbers
            if not getattr(self, name) >= 1
        )
        if not self.response_tokens or min(self.response_tokens) < 1:
            problems.append(f"a workload's response_tokens are lengths from 1, not {self.response_tokens!r}.")
        problems.refuse()
        object.__setattr__(self, "response_tokens", tuple(sorted(self.response_tokens)))

    @staticmethod
    def quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
        """A measured distribution in `QUANTILES` numbers. Raises `PlanError` where nothing was measured."""
        if not lengths:
            raise PlanError("no response length was measured; run an update first.")
        ordered = sorted(lengths)
        n = len(ordered)
        return tuple(max(1, ordered[min(n - 1, int((at + 0.5) * n / QUANTILES))]) for at in range(QUANTILES))

    def of_lengths(self, lengths: Sequence[int]) -> Workload:
        """The same with measured response lengths."""
        return replace(self, response_tokens=self.quantiles(lengths))

    @property
    def mean_length(self) -> float:
        """Tokens of a sample, prompt and response."""
        return self.prompt_tokens + fmean(self.response_tokens)

    @property
    def longest(self) -> float:
        return self.prompt_tokens + self.response_tokens[-1]

    @property
    def tokens(self) -> float:
        """Of all samples."""
        return self.episodes * self.mean_length

    @property
    def mean_square(self) -> float:
        """Mean of the samples' squared lengths: what attention is proportional to."""
        return fmean((self.prompt_tokens + length) ** 2 for length in self.response_tokens)

    @property
    def mean_response(self) -> float:
        return fmean(self.response_tokens)

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return self.epochs * self.mini_batches

    def decoding(self, episodes: int, slots: int) -> tuple[tuple[int, int, float], ...]:
        """How many steps an engine decodes at which batch, as (steps, samples under way, mean tokens in their cache);
        a sample that ends makes room for one that waits.

        Args:
            episodes: that the engine generates for, an even share of every length.
            slots: how many can be under way at once.
        """
        return _decoding(self.prompt_tokens, self.response_tokens, episodes, max(1, slots))


@lru_cache(1024)
def _decoding(prompt: float, lengths: tuple[int, ...], episodes: int, slots: int) -> tuple[tuple[int, int, float], ...]:
    # Long and short mixed as they arrive: a stride that shares no divisor with their number visits all.
    stride = next(
        s for s in range(max(1, int(len(lengths) * 0.618)), 2 * len(lengths) + 2) if math.gcd(s, len(lengths)) == 1
    )
    count = min(episodes, 4096)  # more only repeat
    draw = [lengths[at * len(lengths) // count] for at in range(count)] if count < len(lengths) else None
    waiting = draw or [lengths[at * stride % len(lengths)] for at in range(count)]
    slots = max(1, slots * count // episodes)
    weight = episodes / count
    running = [(length, 0) for length in waiting[:slots]]  # (step at which it ends, step at which it began)
    heapq.heapify(running)
    following = slots
    began_sum = 0
    now, phases = 0, list[tuple[int, int, float]]()
    while running:
        end = running[0][0]
        steps = end - now
        if steps:
            cached = prompt + (now + end) / 2 - began_sum / len(running)
            phases.append((steps, max(1, round(len(running) * weight)), cached))
            now = end
        while running and running[0][0] == now:
            _, began = heapq.heappop(running)
            began_sum -= began
            if following < count:
                heapq.heappush(running, (now + waiting[following], now))
                began_sum += now
                following += 1
    return _merged(phases)


def _merged(phases: Sequence[tuple[int, int, float]], most: int = 48) -> tuple[tuple[int, int, float], ...]:
    """Neighbours joined until there are at most so many."""
    if len(phases) <= most:
        return tuple(phases)
    width = -(-len(phases) // most)
    joined = []
    for at in range(0, len(phases), width):
        part = phases[at : at + width]
        steps = sum(one[0] for one in part)
        batch = sum(one[0] * one[1] for one in part) / steps
        cached = sum(one[0] * one[1] * one[2] for one in part) / (steps * batch)
        joined.append((steps, max(1, round(batch)), cached))
    return tuple(joined)
