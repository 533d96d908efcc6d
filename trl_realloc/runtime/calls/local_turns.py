"""`LocalTurns`: a generation in which this rank's engine draws the turns of this rank's samples, each as soon as it is
asked for. A turn's prompt is known only after the turn before it, for example from the results of tools.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...algorithms.rollout import Ragged, Rollouts
from ...engines.base import Generation
from ...plan.dataflow import Call
from ...plan.spans import Span
from ..samples.routes import FIRST_INDEX
from .generate_and_score import CallSettings, Step, completed, requests_of


class LocalTurns:
    """The turns of one rank's samples. A sample takes one turn at a time.

    Args:
        generation: a running generation of this rank's engine.
        first: `index` of this rank's first sample in the global batch.
        rank: this rank.

    Attributes:
        spans: the times in which the engine had something to generate.
    """

    def __init__(
        self, generation: Generation, settings: CallSettings, call: Call, step: Step, first: int, rank: int
    ) -> None:
        self.spans: list[Span] = []
        self._generation, self._settings, self._call, self._step = generation, settings, call, step
        self._first, self._rank = first, rank
        self._turns: dict[int, int] = {}  # number of turns of each sample so far
        self._busy: Span | None = None  # since the engine was last idle

    @property
    def unfinished(self) -> int:
        """The number of turns that have been added and have not ended."""
        return self._generation.unfinished

    def add(self, position: int, prompt_ids: Sequence[int]) -> None:
        """Begin the next turn of a sample.

        Args:
            position: the sample's position among this rank's samples.

        Raises:
            EngineError: the context has no room for a response, or the engine cannot serve it.
        """
        turn = self._turns.get(position, 0)
        self._turns[position] = turn + 1
        index = torch.tensor([position], dtype=torch.long)
        prompts = {self._call.inputs[0]: Ragged.of([prompt_ids], torch.long)}
        samples = Rollouts(index=index, **{FIRST_INDEX: index + self._first}, **prompts)
        self._generation.add(requests_of(self._settings, self._call, samples, replace(self._step, turn=turn)))
        if self._busy is None:
            now = time.time()
            self._busy = Span(self._call.name, self._rank, now, now, self._step.number)

    def poll(self, timeout_s: float) -> dict[int, Rollouts]:
        """The turns that have ended since the last call, by their sample's position, each with the columns of
        `completed`. Waits at most `timeout_s` seconds for the first."""
        completions = self._generation.poll(timeout_s)
        if self._busy is not None:
            tokens = sum(len(completion.token_ids) for completion in completions)
            self._busy = replace(
                self._busy,
                end=max(self._busy.end, self._generation.ended_at),
                tokens=self._busy.tokens + tokens,
                samples=self._busy.samples + len(completions),
            )
            if not self.unfinished:
                self.spans.append(self._busy)
                self._busy = None
        return {
            completion.index: completed([completion], self._settings.eos_token_id, self._call.outputs)
            for completion in completions
        }
