"""One generation in a vLLM engine's process: runs decode steps, and between them adds and withdraws requests and loads
new parameters. The process's main program is in `vllm_host`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..child_process import Message
from .vllm_requests import CachedKeys, RunningRequests, Sample
from .vllm_update import EngineChannel, WeightUpdates


if TYPE_CHECKING:
    from vllm import LLM


class RunningGeneration:
    """A generation from its first request to its end.

    Args:
        weights: loads new parameters.
        by_seed: whether `vllm_sampler` samples the tokens.
        keys: usable keys and values. They include those of earlier generations with the same parameters, so a further
            turn of a conversation computes only its new tokens.
        sampling: fields of `requests.Sampling`.
        version: version of the engine's parameters.
    """

    def __init__(
        self,
        llm: LLM,
        channel: EngineChannel,
        weights: WeightUpdates,
        by_seed: bool,
        keys: CachedKeys,
        sampling: dict[str, Any],
        version: int,
    ) -> None:
        self._channel, self._weights = channel, weights
        self._next_version, self._keys = version, keys
        self._requests = RunningRequests(llm, sampling, by_seed, version, keys)

    def run(self) -> bool:
        """Generate for requests that come as messages, until the generation is ended. Samples are sent when they
        finish, with the time. When all have finished, wait for more. Returns True if the engine is to be closed."""
        while True:
            if self._requests:
                self._send(self._requests.step())
                self._channel.progress()
            while not self._requests or self._channel.connection.poll():
                message = self._channel.connection.recv()
                if message[0] == "close":
                    return True
                if not self._goes_on_after(message):
                    return False

    def _goes_on_after(self, message: Message) -> bool:
        word, *arguments = message
        if word == "add":
            self._requests.add(*arguments)
        elif word == "withdraw":
            self._channel.send("withdrawn", self._requests.withdraw(*arguments))
        elif word == "peek":
            self._channel.send("peeked", self._requests.peek())
        elif word == "load":  # decoding continues until the first bucket comes
            (self._next_version,) = arguments
        elif word in ("bucket", "done"):
            return self._update(message)
        else:
            assert word == "end", f"a generation got {word!r}"
            self._requests.end()
            self._channel.send("generated", self._requests.times.means())
            return False
        return True

    def _update(self, first: Message) -> bool:
        """Load new parameters between two decode steps, beginning with the message `first`. Returns True if all were
        loaded; otherwise the generation ends without another step."""
        decodes = bool(self._requests)
        self._send(self._requests.settle())
        problem = self._weights.take(first)
        self._keys.drop()
        if problem is None:
            self._requests.updated(self._next_version)
        else:
            self._requests.end()
        stopped_s = time.monotonic() - self._requests.step_ended if decodes else 0.0
        self._channel.send("loaded", problem, stopped_s, self._weights.unproven)
        return problem is None

    def _send(self, samples: list[Sample]) -> None:
        if samples:
            self._channel.send("samples", samples, time.time())
