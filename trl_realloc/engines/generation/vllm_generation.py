"""One generation in a vLLM engine's process: decode steps, and between them requests that come and go.

The process's main program is in `vllm_host`; the owner's side of a generation in `background_generation`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from .sample_seeds import seed_arguments
from .vllm_compat import abort, drain, drawn_so_far, draws_by_position


if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm import LLM

# index, prompt and the tokens that the response has begun with, seed, number of these tokens
Request = tuple[int, list[int], int, int]
Sample = tuple[int, list[int], list[float], bool]  # index, tokens drawn here, their log-probabilities, stopped


class Channel(Protocol):
    """`vllm_host.Channel`."""

    @property
    def connection(self) -> Connection[Any, Any]: ...
    def send(self, *message: Any) -> None: ...
    def progress(self) -> None: ...


class RunningRequests:
    """The unfinished requests of a generation inside vLLM.

    Args:
        sampling: the fields of `base.Sampling`.
        by_seed: whether tokens are drawn by `vllm_sampler`.
    """

    def __init__(self, llm: LLM, sampling: dict[str, Any], by_seed: bool) -> None:
        self._engine, self._sampling, self._by_seed = llm.llm_engine, sampling, by_seed
        self._by_position = not by_seed and draws_by_position(self._engine)
        # The name of a request in vLLM is used once: vLLM may still be computing a token of the one that was withdrawn
        # when the request comes back.
        self._names = map(str, itertools.count())
        self._running: dict[str, tuple[int, int]] = {}  # by name: index, number of tokens that it has begun with
        self._name_of: dict[int, str] = {}  # by index

    def __bool__(self) -> bool:
        return bool(self._running)

    def add(self, requests: Sequence[Request]) -> None:
        stop = self._sampling["stop_token_id"]
        for index, prompt, seed, begun in requests:
            name = next(self._names)
            params = SamplingParams(
                temperature=self._sampling["temperature"],
                max_tokens=self._sampling["max_tokens"] - begun,
                stop_token_ids=None if stop is None else [stop],
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
                # DELTA makes Python objects for each token: with a tiny model on the CPU a step of 64 requests takes
                # 0.5 ms (10 %) longer, one of 256 requests 3.0 ms (21 %)
                output_kind=RequestOutputKind.FINAL_ONLY,
                **seed_arguments(seed, begun, self._by_seed, self._by_position),
            )
            self._engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, params)
            self._running[name], self._name_of[index] = (index, begun), name

    def step(self) -> list[Sample]:
        """Decode one token of each running request. Returns the samples that this has finished."""
        samples = []
        for output in self._engine.step():
            (sample,) = output.outputs
            stopped = sample.finish_reason == "stop"
            if not stopped and sample.finish_reason != "length":  # vLLM aborted the request
                raise RuntimeError(f"vLLM ended request {output.request_id} early: {sample.finish_reason}")
            index, _ = self._running.pop(output.request_id)
            del self._name_of[index]
            samples.append((index, list(sample.token_ids), sample.logprobs.logprobs, stopped))
        return samples

    def withdraw(self, indices: Sequence[int], least_tokens: int) -> list[tuple[int, list[int], list[float]]]:
        """Abort these requests, except those that have finished and those with fewer than `least_tokens` tokens left.

        With asynchronous scheduling (vLLM's default on a GPU) the next decode step has been launched already. vLLM
        drops its tokens of requests that have been aborted (`Scheduler.update_from_output`). They are not in what is
        returned here, so the engine that goes on draws them again, with the same random numbers: the last token of a
        sample may be computed twice, and none is lost or counted twice.

        Returns:
            The index, the tokens that were drawn here and their log-probabilities.
        """
        withdrawn = []
        for index in indices:
            name = self._name_of.get(index)
            if name is None:
                continue
            tokens, logprobs = drawn_so_far(self._engine, name)
            _, begun = self._running[name]
            if self._sampling["max_tokens"] - begun - len(tokens) >= least_tokens:
                withdrawn.append((index, tokens, logprobs))
        self._abort([self._name_of[index] for index, _, _ in withdrawn])
        return withdrawn

    def end(self) -> None:
        """Abort all requests, and wait for the decode step that is under way."""
        self._abort(list(self._running))
        drain(self._engine)

    def _abort(self, names: Sequence[str]) -> None:
        abort(self._engine, names)
        for name in names:
            index, _ = self._running.pop(name)
            del self._name_of[index]


def generate(llm: LLM, channel: Channel, sampling: dict[str, Any], by_seed: bool) -> bool:
    """Generate for requests that come as messages, until the generation is ended. The samples that a step finishes are
    sent at once, with the time. When all have finished, wait for more.

    Returns:
        Whether the engine is to be closed.
    """
    # its keys and values are of the weights before; and a call must not depend on the calls before it
    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM did not reset its prefix cache, which has keys and values of earlier weights: blocks are in use"
        )
    requests = RunningRequests(llm, sampling, by_seed)
    while True:
        if requests:
            if samples := requests.step():
                channel.send("samples", samples, time.time())
            channel.progress()
        while not requests or channel.connection.poll():
            word, *arguments = channel.connection.recv()
            if word == "add":
                requests.add(*arguments)
            elif word == "withdraw":
                channel.send("withdrawn", requests.withdraw(*arguments))
            elif word == "end":
                requests.end()
                channel.send("generated")
                return False
            else:
                return True
