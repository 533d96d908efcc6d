"""The unfinished requests of a generation inside vLLM, their sampling parameters, and the parameter versions of their
tokens. `vllm_host` decides when they decode, start and stop.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from ..base import DecodeStep
from .sample_versions import Run, VersionMarks
from .token_draw import seed_arguments
from .vllm_compat import abort, count_drawn, drain, drawn_so_far, draws_by_position, end_grammars_by_eos


if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from ..requests import Routes
    from .vllm_routes import RequestRoutes


@dataclass(frozen=True)
class Request:
    """One sample to continue.

    Args:
        prompt: token ids of the prompt and of the response so far.
        begun: number of the response's tokens in it.
        limit: most tokens of the response, including these.
    """

    index: int
    prompt: list[int]
    seed: int
    begun: int
    limit: int


MIN_STEPS = 4  # fewest decode steps that a mean is taken of

# index, tokens sampled here, their log-probabilities and versions, routes of the prompt's and these tokens
Partial = tuple[int, list[int], list[float], list[Run], "Routes | None"]
# the same, and: whether it stopped, number of prompt tokens that were in the prefix cache
Sample = tuple[int, list[int], list[float], list[Run], "Routes | None", bool, int]


class CachedKeys:
    """Salt that separates the keys and values of the current parameters in vLLM's prefix cache from older ones: vLLM
    reuses only those of requests with the same salt. Others stay in the cache until it needs their memory.

    Attributes:
        salt: salt of new requests.
    """

    def __init__(self) -> None:
        self._numbers = map(str, itertools.count(1))
        self.salt = next(self._numbers)

    def drop(self) -> None:
        """Make later requests find nothing, because the parameters changed or the cache's memory was freed."""
        self.salt = next(self._numbers)


def sampling_arguments(llm: LLM, sampling: dict[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's `SamplingParams` that all requests of a generation share, from the fields of
    `requests.Sampling`."""
    extra, structured = dict(sampling["extra"]), None
    if sampling["regex"] is not None:
        structured = StructuredOutputsParams(regex=sampling["regex"])
    elif options := extra.pop("structured_outputs", None):
        structured = StructuredOutputsParams(**options)
    stops = set(sampling["stop_token_ids"])
    if structured is not None:  # after its end a grammar allows only the tokenizer's eos token
        eos = llm.get_tokenizer().eos_token_id
        if eos is None:
            raise ValueError("the tokenizer has no eos token, and a response with structured outputs ends with it")
        stops.add(eos)
        end_grammars_by_eos(llm.llm_engine)
    return {
        **{name: sampling[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,  # the eos token of the model's config may differ
        "structured_outputs": structured,
        "detokenize": bool(extra.get("stop")),
        "logprobs": 0,
        "flat_logprobs": True,
        # DELTA makes Python objects for each token: with a tiny model on the CPU a step of 64 requests takes
        # 0.5 ms (10 %) longer, one of 256 requests 3.0 ms (21 %)
        "output_kind": RequestOutputKind.FINAL_ONLY,
        **extra,
    }


def why_not_sampled(llm: LLM, sampling: dict[str, Any]) -> str | None:
    """The reason why vLLM refuses requests with this sampling; `None` if it accepts them. No generation may run."""
    try:
        params = SamplingParams(**sampling_arguments(llm, sampling), max_tokens=sampling["max_tokens"])
        llm.llm_engine.add_request("check", {"type": "token", "prompt_token_ids": [0]}, params)
    except Exception as error:  # a TypeError, a ValueError or one of vLLM's own
        return str(error)
    abort(llm.llm_engine, ["check"])
    return None


@dataclass(frozen=True)
class _Submitted:
    """A request that was submitted to vLLM. `length` is its prompt's number of tokens minus the number of decode steps
    before it; adding the current number of steps gives its tokens now. `name` is vLLM's own, if routes are recorded."""

    request: Request
    marks: VersionMarks
    length: int
    name: str = ""


class _DecodeTimes:
    """Durations of decode steps: sums, grouped by the bit length of their number of samples.
    `planner.cost.specification` derives the host's share from them."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int, int, float]] = {}  # steps, samples, cached tokens, seconds

    def add(self, samples: int, cached: int, seconds: float) -> None:
        """Add a step. `cached` is the total number of cached tokens of its samples."""
        bits = samples.bit_length()
        steps, all_samples, all_cached, all_seconds = self._sums.get(bits, (0, 0, 0, 0.0))
        self._sums[bits] = steps + 1, all_samples + samples, all_cached + cached, all_seconds + seconds

    def means(self) -> list[DecodeStep]:
        """In ascending order of the number of samples."""
        sums = (self._sums[bits] for bits in sorted(self._sums))
        return [
            (samples / steps, cached / samples, seconds / steps)
            for steps, samples, cached, seconds in sums
            if steps >= MIN_STEPS
        ]


class RunningRequests:
    """The unfinished requests. vLLM gets as many as it may decode at the same time. The others wait here, so that vLLM
    has no long queue when the parameters are updated.

    Args:
        sampling: fields of `requests.Sampling`.
        by_seed: whether `vllm_sampler` samples the tokens.
        version: version of the engine's parameters.
        keys: usable keys and values.
        routes: reads the experts of a mixture; `None` if they are not recorded.

    Attributes:
        step_ended: end of the last decode step, seconds of `time.monotonic`.
        times: durations of the decode steps, except those that read prompts.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: dict[str, Any],
        by_seed: bool,
        version: int,
        keys: CachedKeys,
        routes: RequestRoutes | None = None,
    ) -> None:
        self._engine, self._by_seed, self._keys, self._routes = llm.llm_engine, by_seed, keys, routes
        self._arguments = sampling_arguments(llm, sampling)
        self._by_position = not by_seed and draws_by_position(self._engine)
        self._most = self._engine.vllm_config.scheduler_config.max_num_seqs
        self._version = version
        self.step_ended, self.times = time.monotonic(), _DecodeTimes()
        self._reading = 0  # steps that may read a prompt: the next one, and another one if two are in progress
        self._steps, self._lengths = 0, 0  # decode steps, and the sum of the `length` of the requests in vLLM
        # A request's name in vLLM is used once: vLLM may still be computing a token of a withdrawn request when the
        # request comes back.
        self._names = map(str, itertools.count())
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # by index
        self._submitted: dict[str, _Submitted] = {}  # by name
        self._name_of: dict[int, str] = {}  # by index

    def __bool__(self) -> bool:
        return bool(self._submitted or self._waiting)

    def add(self, requests: Iterable[tuple[int, list[int], int, int, int]]) -> None:
        """Add requests, given as the fields of `Request`."""
        self._waiting.update((request.index, request) for request in itertools.starmap(Request, requests))

    def step(self) -> list[Sample]:
        """Decode one token of each running request. Returns the samples that have finished."""
        while self._waiting and len(self._submitted) < self._most:
            self._give(self._waiting.popitem(last=False)[1])
        before, samples = self.step_ended, len(self._submitted)
        cached = self._lengths + samples * self._steps
        finished = self._finished(self._engine.step())
        self._steps += 1
        if self._reading:
            self._reading -= 1
        elif samples:
            self.times.add(samples, cached, self.step_ended - before)
        return finished

    def settle(self) -> list[Sample]:
        """Wait for the decode steps in progress. Returns the samples that they have finished."""
        return self._finished(drain(self._engine))

    def withdraw(self, indices: Sequence[int], least_tokens: int) -> list[Partial]:
        """Abort these requests, except finished ones and those with fewer than `least_tokens` tokens left.

        With asynchronous scheduling (vLLM's default on a GPU) the next decode step has already been launched. vLLM
        drops its tokens of aborted requests (`Scheduler.update_from_output`). They are not returned here, so the next
        engine samples them again with the same random numbers: the last token of a sample may be computed twice, but
        none is lost or counted twice.

        Returns:
            The tokens of each request that were sampled here.
        """
        active = [index for index in indices if index in self._waiting or index in self._name_of]
        withdrawn = [self._partial(index) for index in active]
        withdrawn = [part for part in withdrawn if self._left(part) >= least_tokens]
        self._abort([self._name_of[index] for index, *_ in withdrawn if index in self._name_of])
        for index, *_ in withdrawn:
            self._waiting.pop(index, None)
        return withdrawn

    def peek(self) -> list[Partial]:
        """The tokens of each request that were sampled here so far."""
        return [self._partial(index) for index in (*self._name_of, *self._waiting)]

    def end(self) -> None:
        """Abort all requests, and wait for the decode steps in progress."""
        self._waiting.clear()
        self._abort(list(self._submitted))
        drain(self._engine)
        if self._routes is not None:
            self._routes.forget()

    def updated(self, version: int) -> None:
        """Set the version of new parameters. Keys and values of the earlier ones are kept, but requests without a token
        start anew. No decode step is in progress."""
        self._version = version
        counts = {name: count_drawn(self._engine, name) for name in self._submitted}
        without = [name for name, count in counts.items() if not count]
        anew = [self._submitted[name].request for name in without]
        self._abort(without)
        for request in reversed(anew):
            self._waiting[request.index] = request
            self._waiting.move_to_end(request.index, last=False)
        for name, submitted in self._submitted.items():
            submitted.marks.change(counts[name], version)

    def _give(self, request: Request) -> None:
        name, most = next(self._names), request.limit - request.begun
        arguments = self._arguments
        if arguments.get("min_tokens", 0) > most:  # more than the context has room for, which vLLM would refuse
            arguments = {**arguments, "min_tokens": most}
        params = SamplingParams(
            **arguments,
            max_tokens=most,
            **seed_arguments(request.seed, request.begun, self._by_seed, self._by_position),
        )
        prompt = {"type": "token", "prompt_token_ids": request.prompt, "cache_salt": self._keys.salt}
        self._engine.add_request(name, prompt, params)
        internal = "" if self._routes is None else self._routes.name(name)
        submitted = _Submitted(request, VersionMarks(self._version), len(request.prompt) - self._steps, internal)
        self._submitted[name], self._name_of[request.index] = submitted, name
        self._reading, self._lengths = 2, self._lengths + submitted.length

    def _finished(self, outputs: Sequence[RequestOutput]) -> list[Sample]:
        self.step_ended = time.monotonic()
        samples = []
        for output in outputs:
            (sample,) = output.outputs
            stopped = sample.finish_reason == "stop"
            if not stopped and sample.finish_reason != "length":  # vLLM aborted the request
                raise RuntimeError(f"vLLM ended request {output.request_id} early: {sample.finish_reason}")
            tokens, submitted = list(sample.token_ids), self._let_go(output.request_id)
            index = submitted.request.index
            runs, cached = submitted.marks.runs(len(tokens)), output.num_cached_tokens or 0
            routes = self._routes_of(submitted, len(tokens), ended=True)
            samples.append((index, tokens, sample.logprobs.logprobs, runs, routes, stopped, cached))
        return samples

    def _left(self, part: Partial) -> int:
        name = self._name_of.get(part[0])
        request = self._waiting[part[0]] if name is None else self._submitted[name].request
        return request.limit - request.begun - len(part[1])

    def _partial(self, index: int) -> Partial:
        name = self._name_of.get(index)
        if name is None:
            return index, [], [], [], None
        tokens, logprobs = drawn_so_far(self._engine, name)
        submitted = self._submitted[name]
        routes = self._routes_of(submitted, len(tokens), ended=False) if tokens else None
        return index, tokens, logprobs, submitted.marks.runs(len(tokens)), routes

    def _routes_of(self, submitted: _Submitted, drawn: int, *, ended: bool) -> Routes | None:
        """The routes of a request's tokens. The last of the `drawn` tokens has not been computed."""
        if self._routes is None:
            return None
        return self._routes.take(submitted.name, len(submitted.request.prompt) + drawn - 1, ended=ended)

    def _abort(self, names: Sequence[str]) -> None:
        abort(self._engine, names)
        for name in names:
            self._let_go(name)

    def _let_go(self, name: str) -> _Submitted:
        """Remove a request that has left vLLM."""
        submitted = self._submitted.pop(name)
        del self._name_of[submitted.request.index]
        self._lengths -= submitted.length
        return submitted
