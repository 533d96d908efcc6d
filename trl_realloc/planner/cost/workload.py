"""`Workload`: the amount of work of one iteration, as episodes, prompt and response lengths, and optimizer steps.

The time and memory that the work takes are in `pricing`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from random import Random
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from ...common.errors import PlanError, Problems
from ...plan.batching import MIN_SHARED


# Number of quantiles that represent a measured length distribution. The longest samples of a batch decide how long its
# generation takes. So many quantiles keep about the longest of a batch of this size.
QUANTILES = 256
MAX_SAMPLES = 4096  # largest number of simulated samples of an engine; more only repeat the pattern
BATCHES = 16  # number of different batches, over which the lengths of the longest samples average out
MAX_DEALT = 65_536  # largest number of samples in all these batches; larger batches differ less
# Mean number of tokens in the partly filled last block of vLLM's cache (16 tokens a block), and of its empty places.
# These tokens are not shared with other samples of the prompt.
HALF_BLOCK = 8


class Decoding(NamedTuple):
    """The decoding of one engine.

    Args:
        phases: (steps, samples in the batch, mean cached tokens of a sample), one after the other.
        reread: tokens that are computed again because a full cache had to drop their keys and values.
    """

    phases: tuple[tuple[int, int, float], ...]
    reread: float = 0.0


@dataclass(frozen=True)
class Workload:
    """The number and lengths of the samples of one iteration, and how they are trained on.

    Args:
        episodes: number of episodes in the global batch.
        prompt_tokens: mean length of a prompt, tokens.
        response_tokens: equally likely lengths of a response, tokens, ascending. One entry if all have the same length.
        mini_batches: optimizer steps in one training pass over the batch. Below 1 if a step trains on several batches:
            0.5 for two.
        epochs: training passes over the batch.
        recompute: whether training computes every forward again in its backward (activation checkpointing).
        forward_tokens: largest number of tokens of one scoring forward if a plan sets no `micro_batch_tokens`.
        train_tokens: the same for one training forward.
        generation_batch: samples that a Transformers engine generates at once; `None`: as many of the longest samples
            as fit into one scoring forward.
        completions: number of samples per prompt.
        together: mean number of samples that share one computation of their prompt.

    Raises:
        PlanError: a number is below 1, `mini_batches` is not above 0, or `response_tokens` is empty.
    """

    episodes: int
    prompt_tokens: float
    response_tokens: tuple[int, ...]
    mini_batches: float = 1
    epochs: int = 4
    recompute: bool = False
    forward_tokens: int = 65_536
    train_tokens: int = 8_192
    generation_batch: int | None = None
    completions: int = 1
    together: float = 1.0

    def __post_init__(self) -> None:
        numbers = ["episodes", "prompt_tokens", "epochs", "forward_tokens", "train_tokens", "completions", "together"]
        problems = Problems(
            f"a workload's {name} is 1 or more, not {getattr(self, name)!r}."
            for name in numbers
            if not getattr(self, name) >= 1
        )
        if not self.mini_batches > 0:
            problems.append(f"a workload's mini_batches is above 0, not {self.mini_batches!r}.")
        if not self.response_tokens or min(self.response_tokens) < 1:
            problems.append(f"a workload's response_tokens are lengths from 1, not {self.response_tokens!r}.")
        problems.refuse()
        object.__setattr__(self, "response_tokens", tuple(sorted(self.response_tokens)))

    @staticmethod
    def of_groups(
        *, steps_per_generation: int, gradient_accumulation_steps: int, num_iterations: int, **sizes: Any
    ) -> Workload:
        """The work of one generation of GRPO or RLOO. An iteration is a generation.

        Args:
            steps_per_generation, gradient_accumulation_steps, num_iterations: TRL's settings.
            sizes: the other fields, except `epochs`.
        """
        per_pass = steps_per_generation / gradient_accumulation_steps
        return Workload(mini_batches=per_pass, epochs=num_iterations, **sizes)

    def once(self, episodes: int, response_tokens: int) -> Workload:
        """The same work on `episodes` samples of one length, with one sample per prompt, one epoch and one optimizer
        step."""
        once: dict[str, Any] = {"epochs": 1, "mini_batches": 1, "completions": 1}
        return replace(self, episodes=episodes, response_tokens=(response_tokens,), **once)

    @staticmethod
    def quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
        """The `QUANTILES` quantiles of measured response lengths. Raises `PlanError` if `lengths` is empty."""
        if not lengths:
            raise PlanError("no response length was measured; run an update first.")
        ordered = sorted(lengths)
        n = len(ordered)
        return tuple(max(1, ordered[min(n - 1, int((index + 0.5) * n / QUANTILES))]) for index in range(QUANTILES))

    @staticmethod
    def tail(mean: float, p99: float, longest: int) -> tuple[int, ...]:
        """`QUANTILES` quantiles of the log-normal distribution with this mean and this 99th percentile, cut at
        `longest`. The lengths of generated responses have about this distribution.

        With the normal deviate z = 2.326 at 99 %, ln p99 = mu + z s and ln mean = mu + s^2 / 2. The smaller solution s
        is used.

        Raises:
            PlanError: not 1 <= mean <= p99 <= longest, or no log-normal distribution has this 99th percentile.
        """
        if not 1 <= mean <= p99 <= longest:
            raise PlanError(
                f"response lengths of {mean:g}/{p99:g} tokens: the mean is 1 or more, and the 99th percentile from the "
                f"mean to the {longest:,} tokens that a response may have."
            )
        normal = NormalDist()
        deviate, ratio = normal.inv_cdf(0.99), math.log(p99 / mean)
        if 2 * ratio > deviate**2:
            most = mean * math.exp(deviate**2 / 2)
            raise PlanError(
                f"response lengths of {mean:g}/{p99:g} tokens: the 99th percentile of such lengths is at most "
                f"{most:,.0f}."
            )
        spread = deviate - math.sqrt(deviate**2 - 2 * ratio)
        middle = math.log(mean) - spread**2 / 2
        lengths = (math.exp(middle + spread * normal.inv_cdf((index + 0.5) / QUANTILES)) for index in range(QUANTILES))
        return tuple(min(longest, max(1, round(length))) for length in lengths)

    def sharing(self, samples: float, budget: int, *, mini_batches: float = 1.0) -> Workload:
        """The same work if the samples of a prompt that are in one micro-batch compute it once.

        A mini-batch is a random part of all samples. A rank has whole prompt groups of it, or a part of one group.

        Args:
            samples: number of samples of a rank in a mini-batch; in a pipeline, divided by the number of stages.
            budget: largest number of tokens of a micro-batch.
            mini_batches: number of random parts into which the samples are divided.
        """
        if self.completions == 1 or self.prompt_tokens < MIN_SHARED:
            return self
        part = 1 / max(1.0, mini_batches)
        # mean number of samples of a prompt in a mini-batch that has at least one of them
        in_mini_batch = self.completions * part / (1 - (1 - part) ** self.completions)
        most = (budget - self.prompt_tokens) / self.mean_response
        together = min(in_mini_batch, samples, most)
        return self if together <= 1 else replace(self, together=together)

    def of_lengths(self, lengths: Sequence[int]) -> Workload:
        """A copy of this workload with the quantiles of measured response lengths."""
        return replace(self, response_tokens=self.quantiles(lengths))

    @cached_property
    def mean_length(self) -> float:
        """Mean number of tokens that are computed for a sample, prompt and response together."""
        return self.prompt_tokens / self.together + fmean(self.response_tokens)

    @property
    def longest(self) -> float:
        return self.prompt_tokens + self.response_tokens[-1]

    @cached_property
    def tokens(self) -> float:
        """Number of tokens that are computed for all samples."""
        return self.episodes * self.mean_length

    @cached_property
    def mean_square(self) -> float:
        """Mean of the samples' squared lengths, to which the cost of attention is proportional. A prompt that is
        computed once counts for one of its samples."""
        again = (1 - 1 / self.together) * self.prompt_tokens**2
        return fmean((self.prompt_tokens + length) ** 2 for length in self.response_tokens) - again

    @cached_property
    def mean_response(self) -> float:
        return fmean(self.response_tokens)

    @property
    def lengths_text(self) -> str:
        """The lengths of the samples as text: `prompts of 16 tokens, responses of 64`."""
        longest = self.response_tokens[-1]
        responses = f"{longest:,}"
        if self.response_tokens[0] != longest:
            responses = f"{self.mean_response:,.0f} in the mean and {longest:,} at most"
        return f"prompts of {self.prompt_tokens:g} tokens, responses of {responses}"

    @property
    def updates(self) -> float:
        """Number of optimizer steps in an iteration; below 1 if a step trains on the batches of several iterations."""
        return self.epochs * self.mini_batches

    def engine_prompt(self, samples: float) -> float:
        """Mean number of prompt tokens that a vLLM engine with `samples` samples computes and caches per sample. It
        computes a prompt once for all of its samples, except the last block. An engine gets whole prompt groups, or a
        part of one (`runtime.samples.routes.deal`)."""
        together = samples / math.ceil(samples / self.completions)
        return self.prompt_tokens - (1 - 1 / together) * max(0.0, self.prompt_tokens - HALF_BLOCK)

    def most_cached(self, samples: int) -> float:
        """The largest number of tokens in a vLLM engine's cache if it begins all of its samples at once."""
        held, n = self.engine_prompt(samples) + HALF_BLOCK, len(self.response_tokens)
        return max(samples * (n - index) / n * (held + length) for index, length in enumerate(self.response_tokens))

    def decoding(self, engines: int, slots: int, room: float = math.inf) -> Decoding:
        """The decoding of the vLLM engine with the longest sample.

        When a sample ends, waiting samples take its slot and its room. If the cache is full, the sample that was begun
        last is preempted: it waits, and its tokens are computed again when there is room.

        Args:
            engines: number of engines, among which the samples are divided (`engine_lengths`).
            slots: largest number of samples in the batch.
            room: capacity of the engine's KV cache, tokens.
        """
        share = math.ceil(self.episodes / engines)
        room = math.inf if room >= self.most_cached(share) else room
        prompts = self.prompt_tokens, self.engine_prompt(share)
        return _decoding(prompts, self.response_tokens, self.episodes, engines, max(1, min(slots, share)), room)

    def engine_lengths(self, engines: int) -> tuple[tuple[int, ...], ...]:
        """The response lengths of each engine's samples, in the engine's order. All lengths are equally frequent in
        each engine, and mixed, as in a real batch."""
        return tuple(_engine_lengths(self.response_tokens, self.episodes, engines, engine) for engine in range(engines))

    def longest_engine_by_batch(self, engines: int, most: int = MAX_SAMPLES) -> tuple[tuple[int, ...], ...]:
        """The response lengths of the engine with the longest response, at most `most` of them, in the engine's order.
        For each of `BATCHES` batches, or fewer if they are large, that differ as random batches do. All lengths are
        equally frequent in the batches together."""
        return _longest_engine_by_batch(self.response_tokens, self.episodes, engines, most)


def _engine_lengths(lengths: Sequence[int], episodes: int, engines: int, engine: int) -> tuple[int, ...]:
    """The batch's lengths in ascending order are divided into groups with one length for each engine."""
    whole, rest = divmod(episodes, engines)
    stride = next((s for s in range(max(1, int(whole * 0.618)), whole) if math.gcd(s, whole) == 1), 1)
    groups = [index * stride % whole for index in range(whole)]
    ranks = [group * engines + (engine + group) % engines for group in groups]
    if engine < rest:
        ranks.append(whole * engines + engine)
    return tuple(lengths[(2 * rank + 1) * len(lengths) // (2 * episodes)] for rank in ranks)


def _longest_engine(lengths: tuple[int, ...], episodes: int, engines: int, most: int) -> tuple[int, ...]:
    share = math.ceil(episodes / engines)
    samples = episodes if share <= most else most * engines
    whole, rest = divmod(samples, engines)
    longest = rest - 1 if rest else (engines - whole) % engines
    return _engine_lengths(lengths, samples, engines, longest)


@lru_cache(64)
def _longest_engine_by_batch(
    lengths: tuple[int, ...], episodes: int, engines: int, most: int
) -> tuple[tuple[int, ...], ...]:
    samples = episodes if math.ceil(episodes / engines) <= most else most * engines
    return tuple(_longest_engine(batch, samples, engines, most) for batch in _batches(lengths, samples))


def _batches(lengths: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """The lengths dealt at random into batches of `size`, each ascending."""
    batches = max(1, min(BATCHES, MAX_DEALT // size))
    total = batches * size
    dealt = [lengths[(2 * index + 1) * len(lengths) // (2 * total)] for index in range(total)]
    Random(0).shuffle(dealt)
    return (tuple(sorted(dealt[index * size : (index + 1) * size])) for index in range(batches))


@lru_cache(1024)
def _decoding(
    prompts: tuple[float, float], lengths: tuple[int, ...], episodes: int, engines: int, slots: int, room: float
) -> Decoding:
    """`prompts`: the prompt tokens that a sample attends to, and those that the engine caches per sample."""
    share = math.ceil(episodes / engines)
    engine_lengths = _longest_engine(lengths, episodes, engines, MAX_SAMPLES)
    count = len(engine_lengths)
    weight = share / count
    slots, room = max(1, slots * count // share), room / weight
    prompt, held = prompts[0], prompts[1] + HALF_BLOCK
    waiting = deque((length, 0) for length in engine_lengths)  # (response length, tokens generated so far)
    running = dict[int, tuple[int, int]]()  # in the order of their start: (response length, step of the first token)
    ends = list[tuple[int, int]]()  # heap of (step, number of the sample), with entries of preempted samples
    now = number = began_sum = 0
    reread = 0.0
    phases = list[tuple[int, int, float]]()
    while running or waiting:
        while waiting and len(running) < slots:
            length, has = waiting[0]
            n = len(running) + 1
            if running and n * (held + now + 1) - began_sum + has - now > room:
                break
            waiting.popleft()
            running[number] = length, now - has
            heapq.heappush(ends, (now + length - has, number))
            began_sum += now - has
            number += 1
        n = len(running)
        free = room - n * (held + now) + began_sum
        while ends[0][1] not in running:
            heapq.heappop(ends)
        if n > 1 and free < n:
            _, (length, began) = running.popitem()
            began_sum -= began
            waiting.appendleft((length, now - began))
            reread += prompts[1] + now - began
            continue
        steps = ends[0][0] - now
        if n > 1 and free < n * steps:
            steps = int(free / n)
        if steps:
            phases.append((steps, max(1, round(n * weight)), prompt + now + steps / 2 - began_sum / n))
            now += steps
        while ends and ends[0][0] <= now:
            _, ended = heapq.heappop(ends)
            if ended in running:
                began_sum -= running.pop(ended)[1]
    return Decoding(_merged(phases), weight * reread)


def _merged(phases: Sequence[tuple[int, int, float]], most: int = 48) -> tuple[tuple[int, int, float], ...]:
    """Merges neighbouring phases into at most `most` phases, with weighted means of batch and cached tokens."""
    if len(phases) <= most:
        return tuple(phases)
    width = -(-len(phases) // most)
    joined = []
    for first in range(0, len(phases), width):
        part = phases[first : first + width]
        steps = sum(phase[0] for phase in part)
        batch = sum(phase[0] * phase[1] for phase in part) / steps
        cached = sum(phase[0] * phase[1] * phase[2] for phase in part) / (steps * batch)
        joined.append((steps, max(1, round(batch)), cached))
    return tuple(joined)
