"""Generation that replays recorded rollouts: a streamed iteration with real scoring and training engines whose samples
finish at random times and move at random moments."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trl_realloc.engines.base import Bucket, Updates
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling, Unfinished


Records = Mapping[int, Completion]  # by the seed of the request; `index` is not of any request


@dataclass
class _Running:
    """A sample that is being generated.

    Args:
        drawn: tokens so far.
        speed: the chance of a token in a step.
    """

    record: Completion
    drawn: int
    speed: float


def _so_far(index: int, sample: _Running) -> Unfinished:
    record, drawn = sample.record, sample.drawn
    return Unfinished(index, record.token_ids[:drawn], record.logprobs[:drawn], record.versions[:drawn])


class ReplayedGeneration:
    """`base.Generation` that decodes while it is polled, every sample at a random speed."""

    def __init__(
        self, records: Records, draw: random.Random, limit: int, requests: Sequence[GenerationRequest]
    ) -> None:
        self.records, self.draw, self.limit = records, draw, limit
        self.running: dict[int, _Running] = {}
        self.ended_at, self.closed = time.time(), False
        self.add(requests)

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        assert not self.closed
        for request in requests:
            record, begun = self.records[request.seed], request.begun or Unfinished(request.index, (), (), ())
            assert request.index not in self.running
            drawn = len(begun.token_ids)
            assert (begun.token_ids, begun.logprobs) == (record.token_ids[:drawn], record.logprobs[:drawn])
            self.running[request.index] = _Running(record, drawn, self.draw.choice([1.0, 0.3, 0.1]))

    def poll(self, timeout_s: float) -> list[Completion]:
        assert not self.closed
        deadline, ended = time.monotonic() + timeout_s, dict[int, Completion]()
        while self.running and not ended:
            for index, sample in list(self.running.items()):
                sample.drawn += self.draw.random() < sample.speed
                if sample.drawn == len(sample.record.token_ids):
                    ended[index] = self.running.pop(index).record
            if time.monotonic() >= deadline:
                break
            time.sleep(2e-4)
        self.ended_at = time.time() if ended else self.ended_at
        return [replace(record, index=index) for index, record in ended.items()]

    def withdraw(self, indices: Collection[int], least_tokens: int = 1) -> list[Unfinished]:
        assert not self.closed
        stopped = []
        for index in indices:
            sample = self.running.get(index)
            if sample is not None and self.limit - sample.drawn >= least_tokens:
                del self.running[index]
                stopped.append(_so_far(index, sample))
        return stopped

    def peek(self) -> list[Unfinished]:
        assert not self.closed
        return [_so_far(index, sample) for index, sample in self.running.items()]

    def close(self) -> None:
        self.closed = True


class ReplayingEngine:
    """`base.BackgroundEngine`. Takes parameters as a real engine does, and loses them when it sleeps if the plan says
    so.

    Args:
        records: of all samples of the case.
        seed: of the samples' speeds.
        loses: whether the parameters are lost in its sleep.
    """

    def __init__(self, records: Records, seed: str, *, loses: bool) -> None:
        self.records, self.draw, self.loses = records, random.Random(seed), loses
        self.version, self.stopped_s, self.decode_steps = -1, 0.0, ()
        self.generation: ReplayedGeneration | None = None

    def start(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, updates: Updates = Updates.END
    ) -> ReplayedGeneration:
        assert self.version >= 0, "there are no parameters to generate with"
        assert updates is Updates.END, "what is replayed was drawn with one version"
        self._end()
        self.generation = ReplayedGeneration(self.records, self.draw, sampling.max_tokens, requests)
        return self.generation

    def _end(self) -> None:
        if self.generation is not None:
            self.generation.close()

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        generation = self.start(requests, sampling)
        while generation.unfinished:
            yield from generation.poll(1.0)

    def kept(self, frozen: Any) -> frozenset[str]:
        return frozenset()

    def load(self, buckets: Iterable[Bucket], version: int, frozen: Any = None) -> None:
        self._end()
        self.version = -1
        for bucket in buckets:
            assert all(tensor.numel() for _, tensor in bucket)
        self.version = version

    def narrower(self, dtypes: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def sleep(self) -> None:
        self._end()
        if self.loses:
            self.version = -1

    def close(self) -> None:
        self._end()


def replay(records: Records, seed: int) -> None:
    """From now on this process's new generation engines replay: vLLM's in the background, Transformers' in place, with
    the training engine's parameters gathered."""
    from trl_realloc.engines.generation.transformers import TransformersEngine
    from trl_realloc.runtime.placement import engine_builder
    from trl_realloc.trainer.run import plan_request

    def start(plan: Any, call: str, rank: int, config: Any, options: Any, stack: Any) -> ReplayingEngine | None:
        assignment = plan[call]
        if assignment.mesh.index(rank) % assignment.strategy.tp:
            return None
        engine = ReplayingEngine(records, f"{seed} {rank}", loses=assignment.drop)
        stack.callback(engine.close)
        return engine

    def batch(
        self: TransformersEngine, model: Any, requests: Sequence[GenerationRequest], sampling: Sampling
    ) -> Iterator[Completion]:
        yield from ReplayingEngine.generate(in_place, requests, sampling)

    in_place = ReplayingEngine(records, f"{seed}", loses=False)
    in_place.version = 0
    replaced: list[tuple[Any, str, Any]] = [
        (engine_builder, "start_vllm", start),
        (TransformersEngine, "_batch", batch),
        (plan_request, "why_not_served", lambda *_, **__: None),
        (plan_request, "why_not_this_model", lambda *_: None),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
