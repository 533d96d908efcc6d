"""`BatchInFlight`: one rank's part of a batch that is generated and scored ahead of its training. Its form in
checkpoints is in `partial_rollouts`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...algorithms.corrections import GENERATED_AT, IN_FLIGHT_S, POLICY_VERSIONS
from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Ragged, Rollouts
from ...engines.base import EngineError
from ...engines.requests import Completion, GenerationRequest, Unfinished
from ...plan.dataflow import Call
from ...plan.generation_spans import GenerationSpans
from ...plan.spans import Span
from ..calls import generate_and_score as calls
from ..calls.batch import Batch
from ..calls.generate_and_score import OUTCOMES, CallSettings
from ..samples.partial_rollouts import Drawn
from .turns_in_flight import TurnsInFlight


_SAMPLE_BITS = 32  # low bits of a request's number; the iteration is in the bits above


@dataclass
class BatchInFlight:
    """A batch on this rank.

    Args:
        batch: its samples in all calls.
        prompts: those of the global batch.
        samples: the prompts of this rank's generation engine; empty on a rank without one.

    Attributes:
        turns: the turns of these samples, if a sample takes several.
        is_admitted: whether the generation has begun.
        is_published: whether the responses have been sent.
        completions: finished responses by sample index.
        begun: partial responses at the engine's last stop, by sample index.
    """

    batch: Batch
    prompts: PromptBatch
    samples: Rollouts
    turns: TurnsInFlight | None = None
    is_admitted: bool = False
    is_published: bool = False
    completions: dict[int, Completion] = field(default_factory=dict)
    begun: dict[int, Unfinished] = field(default_factory=dict)
    _spans: GenerationSpans | None = None
    _since: float = 0.0  # time at which the generation began or resumed
    _seconds: dict[int, float] = field(default_factory=dict)  # each sample's time in generation before `_since`
    _ended_at: dict[int, float] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.batch.step.number

    @property
    def unfinished(self) -> list[int]:
        """Indices of the samples, or keys of the turns, that are being generated."""
        if self.turns is not None:
            return self.turns.asked if self.is_admitted else []
        index = self.samples.tensor("index").tolist() if self.is_admitted else []
        return [sample for sample in index if sample not in self.completions]

    @property
    def is_generated(self) -> bool:
        if self.turns is not None:
            return self.turns.outcomes is not None
        return len(self.completions) == len(self.samples)

    def restore(self, partial_samples: Mapping[int, Drawn]) -> None:
        """Restore the tokens of this rank's samples."""
        if self.turns is not None:
            self.turns.restore(partial_samples)
            return
        for index in self.samples.tensor("index").tolist():
            sample = partial_samples.get(index)
            if sample is None:
                continue
            self._seconds[index] = sample.seconds
            content = (sample.token_ids, sample.logprobs)
            if sample.stopped is None:
                self.begun[index] = Unfinished(index, *content, versions=sample.versions, routes=sample.routes)
            else:
                self.completions[index] = Completion(
                    index, *content, sample.stopped, versions=sample.versions, routes=sample.routes
                )
                self._ended_at[index] = time.time()

    def admit(self, settings: CallSettings, call: Call) -> list[GenerationRequest]:
        """Mark the generation as begun. Returns the requests of the samples that have not ended, or of the turns that
        have been asked for."""
        self.is_admitted, self._since = True, time.time()
        if self._spans is None:
            self._spans = GenerationSpans(call.name, self.batch.rank, self.number, self._since)
        if self.turns is not None:
            return self.numbered(self.turns.requests())
        left = [row for row, i in enumerate(self.samples.tensor("index").tolist()) if i not in self.completions]
        return self.numbered(calls.requests_of(settings, call, self.samples.select(left), self.batch.step, self.begun))

    def numbered(self, requests: Iterable[GenerationRequest]) -> list[GenerationRequest]:
        """Requests of this batch's samples with the engine's numbers."""
        return [
            replace(
                request,
                index=request_number(self.number, request.index),
                begun=request.begun and replace(request.begun, index=request_number(self.number, request.index)),
            )
            for request in requests
        ]

    def end(self, index: int, completion: Completion, ended_at: float) -> None:
        """Record a finished sample or turn."""
        assert self._spans is not None, "its generation has begun"
        self._spans.finished(ended_at, 1, len(completion.token_ids))
        if self.turns is not None:
            self.turns.end(index, completion, ended_at)
            return
        self.completions[index] = replace(completion, index=index)
        self.begun.pop(index, None)
        self._ended_at[index] = ended_at
        self._seconds[index] = self._seconds.get(index, 0.0) + ended_at - self._since

    def stop(self, index: int, unfinished: Unfinished, stopped_at: float) -> None:
        """Record a sample or a turn that was stopped and will be resumed."""
        if self.turns is not None:
            self.turns.stop(index, unfinished, stopped_at)
            return
        self.begun[index] = replace(unfinished, index=index)
        self._seconds[index] = self._seconds.get(index, 0.0) + stopped_at - self._since

    def drawn(self, peeked: Mapping[int, Unfinished]) -> dict[int, Drawn]:
        """Finished and partial samples with at least one token, by index (`TurnsInFlight.drawn`: by key).

        Args:
            peeked: partial responses of the samples that are being generated, by index.
        """
        if self.turns is not None:
            return self.turns.drawn(peeked)
        now = time.time()
        result = {}
        for index, unfinished in {**self.begun, **peeked}.items():
            seconds = self._seconds.get(index, 0.0) + (now - self._since if index in peeked else 0.0)
            content = (unfinished.token_ids, unfinished.logprobs, unfinished.versions)
            result[index] = Drawn(*content, None, seconds, unfinished.routes)
        for index, done in self.completions.items():
            seconds = self._seconds.get(index, 0.0)
            content = (done.token_ids, done.logprobs, done.versions)
            result[index] = Drawn(*content, done.stopped, seconds, done.routes)
        return {index: sample for index, sample in result.items() if sample.token_ids}

    def outputs(self, settings: CallSettings, call: Call, update_of: Mapping[int, int]) -> Rollouts:
        """The outputs of the generation.

        Args:
            update_of: number of optimizer updates behind each of the engine's parameter versions.
        """
        if self.turns is not None:
            for index in self.samples.tensor("index").tolist():
                completion, self._seconds[index] = self.turns.joined(index)
                self.completions[index], self._ended_at[index] = completion, completion.ended_at or 0.0
        ended = [self.completions[index] for index in sorted(self.completions)]
        responses = calls.completed(ended, settings.eos_token_id, call.outputs)
        versions: list[list[int]] = [[update_of[version] for version in completion.versions] for completion in ended]
        ended_at = [self._ended_at[completion.index] for completion in ended]
        seconds = [self._seconds[completion.index] for completion in ended]
        columns: dict[str, Any] = {
            POLICY_VERSIONS: Ragged.of(versions, torch.long),
            IN_FLIGHT_S: torch.tensor(seconds, dtype=torch.float32),
            GENERATED_AT: torch.tensor(ended_at, dtype=torch.float64),
        }
        if self.turns is not None:
            columns[OUTCOMES] = Ragged.of_bytes(self.turns.outcomes or ())
        return responses.plus(**columns)

    def all_spans(self) -> list[Span]:
        """The spans of the generation, which has ended."""
        if self._spans is None:  # the rank has no prompts, or all samples were restored
            return []
        return self._spans.end(max(self._ended_at.values(), default=self._since))


def request_number(iteration: int, sample: int) -> int:
    """The engine's request number of a sample, unique over all iterations."""
    return (iteration << _SAMPLE_BITS) + sample


def sample_of(number: int) -> tuple[int, int]:
    """(iteration, sample) of a request's number."""
    return number >> _SAMPLE_BITS, number & ((1 << _SAMPLE_BITS) - 1)


def in_words(error: Exception, numbers: Iterable[int]) -> Exception:
    """An engine's error with the sample and the batch in place of the request's number."""
    message = str(error)
    if type(error) is not EngineError:
        return error
    for number in numbers:
        iteration, sample = sample_of(number)
        message = message.replace(f"request {number}", f"sample {sample} of batch {iteration + 1}")
    return EngineError(message)


def by_iteration(numbers: Iterable[Unfinished]) -> dict[int, dict[int, Unfinished]]:
    """Partial responses by iteration and sample."""
    result: dict[int, dict[int, Unfinished]] = {}
    for unfinished in numbers:
        iteration, sample = sample_of(unfinished.index)
        result.setdefault(iteration, {})[sample] = unfinished
    return result
