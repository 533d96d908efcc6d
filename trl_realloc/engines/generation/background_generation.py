"""A generation in a vLLM engine's process, seen from the trainer's process. The other side is in `vllm_host`."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from ..base import DecodeStep, EngineError, Generation, Updates
from ..child_process import Message
from ..requests import Completion, GenerationRequest, Sampling, Unfinished
from .engine_process import EngineProcess
from .sample_versions import Run, versions_of
from .sampling_checks import RequestChecks


if TYPE_CHECKING:
    from ..requests import Routes


class BackgroundGeneration:
    """Implements `base.Generation`. The engine generates without waiting for this process and sends every sample when
    it finishes, so this object counts the unfinished samples itself.

    Args:
        process: a started engine without another generation.
        requests: requests that `checks` has accepted.
        version: version of the engine's parameters.

    Attributes:
        decode_steps: durations of the decode steps, once the generation has been closed.
    """

    def __init__(
        self,
        process: EngineProcess,
        checks: RequestChecks,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        updates: Updates,
        version: int,
    ) -> None:
        self._process, self._checks, self._sampling, self._updates = process, checks, sampling, updates
        self._begun: dict[int, Unfinished] = {}  # tokens that each unfinished request began with, by index
        self._finished: list[Completion] = []  # not yet returned by `poll`
        self._closed: str | None = None  # how the generation ended
        self._ended_at = time.time()
        self.decode_steps: list[DecodeStep] = []
        process.send("generate", asdict(sampling), version)
        self._send(requests)

    @property
    def unfinished(self) -> int:
        return len(self._begun)

    @property
    def ended_at(self) -> float:
        return self._ended_at

    @property
    def takes_updates(self) -> bool:
        """True if the generation goes on when the engine loads new parameters."""
        return self._closed is None and self._updates is not Updates.END

    def poll(self, timeout_s: float) -> list[Completion]:
        self._refuse_closed()
        deadline = time.monotonic() + timeout_s
        while True:
            # after the first sample, return only those that have arrived
            wait_s = 0.0 if self._finished or self._is_idle else deadline - time.monotonic()
            limit_s = math.inf if self._is_idle else self._process.limits.step  # an idle engine sends nothing
            message = self._process.receive_within(max(0.0, wait_s), "generating", limit_s)
            if message is None:
                break
            self.take(message)
        finished, self._finished = self._finished, []
        for completion in finished:
            del self._begun[completion.index]
        return finished

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._refuse_closed()
        self._checks.check(requests, self._sampling, self._begun.keys())
        self._send(requests)

    def withdraw(self, indices: Collection[int], least_tokens: int = 1) -> list[Unfinished]:
        """Waits for the end of the current decode step."""
        self._refuse_closed()
        asked = [index for index in dict.fromkeys(indices) if index in self._begun]
        if not asked:
            return []
        withdrawn = self._ask("withdrawn", "withdrawing samples", "withdraw", asked, least_tokens)
        for unfinished in withdrawn:
            del self._begun[unfinished.index]
        return withdrawn

    def peek(self) -> list[Unfinished]:
        """Waits for the end of the current decode step."""
        self._refuse_closed()
        return [] if self._is_idle else self._ask("peeked", "looking at samples", "peek")

    def close(self) -> None:
        self.end("was closed")

    def end(self, how: str) -> None:
        """Close the generation. `how` is a predicate for the messages of later calls."""
        if self._closed is not None:
            return
        self.was_ended(how)
        if self._process.is_running:
            self._process.send("end")
            passing = ("samples", "progress")
            limit_s = self._process.limits.step
            (self.decode_steps,) = self._process.expect("generated", "ending a generation", limit_s, passing)

    def was_ended(self, how: str) -> None:
        """Note that the engine's process has ended the generation, or is about to."""
        self._closed = how

    def take(self, message: Message) -> bool:
        """Take the samples of a message. Returns True if the message has samples or reports progress."""
        if message[0] == "samples":
            _, samples, self._ended_at = message
            ended_at = self._ended_at
            for *partial, stopped, cached in samples:
                whole = self._with_begun(*partial)
                self._finished.append(
                    Completion(
                        whole.index,
                        whole.token_ids,
                        whole.logprobs,
                        stopped,
                        whole.versions,
                        cached,
                        ended_at,
                        whole.routes,
                    )
                )
        return message[0] in ("samples", "progress")

    def _ask(self, word: str, doing: str, *message: object) -> list[Unfinished]:
        """Send a message and return the unfinished samples of the answer, which begins with `word`."""
        self._process.send(*message)
        (samples,) = self._process.expect(word, doing, self._process.limits.step, take=self.take)
        return [self._with_begun(*sample) for sample in samples]

    def _with_begun(
        self,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        runs: Sequence[Run],
        routes: Routes | None,
    ) -> Unfinished:
        """A sample with the tokens that it began with, before the given ones of this generation."""
        begun = self._begun[index]
        return Unfinished(
            index,
            begun.token_ids + tuple(tokens),
            begun.logprobs + tuple(logprobs),
            begun.versions + versions_of(runs),
            _joined(begun.routes, routes),
        )

    @property
    def _is_idle(self) -> bool:
        return len(self._begun) == len(self._finished)

    def _refuse_closed(self) -> None:
        self._process.check_alive()
        if self._closed is not None:
            raise EngineError(f"{self._process.name}: this generation {self._closed}.")

    def _send(self, requests: Sequence[GenerationRequest]) -> None:
        if not requests:
            return
        if self._is_idle:
            self._process.expect_message()
        begun = {request.index: request.begun or Unfinished(request.index, (), (), ()) for request in requests}
        sent = [
            (
                request.index,
                [*request.prompt_ids, *begun[request.index].token_ids],
                request.seed & (2**63 - 1),
                len(begun[request.index].token_ids),
                self._sampling.limit_of(request),
            )
            for request in requests
        ]
        self._process.send("add", sent)
        self._begun |= begun


def _joined(begun: Routes | None, routes: Routes | None) -> Routes | None:
    """The routes of a sample: those with which its begun tokens were drawn, and then those of this engine, which has
    computed these tokens again."""
    if begun is None or routes is None:
        return begun if routes is None else routes
    return np.concatenate([begun, routes[len(begun) :]])


if TYPE_CHECKING:  # the type checker verifies that the protocol is implemented
    _GENERATION: type[Generation] = BackgroundGeneration
