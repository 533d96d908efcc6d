"""The main program of a vLLM engine's process, started by `vllm` as
`python -m trl_realloc.engines.generation.vllm_host <settings>`: takes commands and sends samples over an inherited
socket, and ends vLLM's workers.

The parent (`vllm`) has checked all arguments, so every exception here ends the process. The unfinished requests are in
`vllm_requests`, loading weights is in `weight_receiver`.

Messages are tuples whose first element is a word:

| from the parent | to the parent |
| --- | --- |
| | `ready` (dtype, wider parameters, why routes are not recorded) once; `failed` (why) at any time, and the end |
| `load` (version), then `bucket` (slot, size, tensors)... | `free` (slot) after each bucket |
| `done` (whether complete, digests, kept tensors) after the last | `loaded` (fields of `weight_sender.SentWeights`) |
| `generate` (sampling, version) | |
| then `add` (requests)... | `samples` (list, time) and `progress`... while there are unfinished requests |
| and `withdraw` (indices, least tokens)... | `withdrawn` (list) |
| and `peek`... | `peeked` (list) |
| and `load`... as above | `loaded`; if it has a problem, the generation has ended |
| `end` of the generation, at any time | `generated` (mean times of its decode steps) |
| `check` (sampling) | `checked` (why vLLM refuses it, or None) |
| `count` | `counted` (tokens that vLLM has given out since the first such message) |
| `sleep` | `asleep` |
| `probe` (handle) | `probed` (why a worker cannot open the handle, or None) |
| `close` | |
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..child_process import Message, die_with_parent, ignore_job_signals, remove_shared_memory_names, started_at
from .vllm_support import cpu_cache_bytes


if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import LLM

    from .vllm_requests import CachedKeys, Sample
    from .vllm_routes import RequestRoutes
    from .weight_receiver import WeightUpdates

PARENT = "TRL_REALLOC_PARENT_PID"
PROGRESS_S = 1.0  # minimum seconds between two messages of progress

# vLLM's workers import this module as __mp_main__, before vLLM. This ties them to the thread of the engine's process
# that started them (`start_workers_in_turn`).
if __name__ in ("__main__", "__mp_main__"):
    ignore_job_signals()  # the owner ends this process, perhaps after it has saved a checkpoint
    die_with_parent(int(os.environ[PARENT]))


class Channel:
    """The socket to the parent. A thread sends, so that generation does not wait for a busy parent."""

    def __init__(self, fd: int) -> None:
        self.connection: Connection[Message, Message] = Connection(fd)
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._sent_at = 0.0

    def _write(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self.connection.send(message)
            except OSError:
                os._exit(1)  # the parent has ended

    def send(self, *message: object) -> None:
        self._sent_at = time.monotonic()
        self._queue.put(message)

    def progress(self) -> None:
        if time.monotonic() - self._sent_at > PROGRESS_S:
            self.send("progress")

    def flush(self) -> None:
        self._queue.put(None)
        self._writer.join(5)


def architecture(model: str) -> dict[str, Any]:
    """The `architectures` entry for a config that lacks it, because no `save_pretrained` has written it. Without it
    vLLM treats some models as encoders."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads(Path(model, "config.json").read_text())
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    return {} if config.get("architectures") or name is None else {"architectures": [name]}


def build(settings: dict[str, Any]) -> LLM:
    """The engine, with dummy weights. Generates one token, because some models, such as those with a head size of 16 on
    the CPU, fail only then."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from .token_draw import seed_arguments
    from .vllm_compat import WeightTransferConfig, meet_in, start_workers_in_turn, wait_without_yielding

    package, on_cpu = "trl_realloc.engines.generation", current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": settings["model"],
        "runner": "generate",
        "hf_overrides": architecture(settings["model"]),
        "tensor_parallel_size": settings["tensor_parallel_size"],
        "dtype": settings["dtype"],
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["max_num_seqs"],
        "gpu_memory_utilization": settings["gpu_memory_utilization"],
        "kv_cache_memory_bytes": cache_bytes(settings) if on_cpu else None,
        "enforce_eager": on_cpu,
        "seed": 0,
        "load_format": "dummy",
        "tokenizer": settings["tokenizer"],
        "skip_tokenizer_init": settings["tokenizer"] is None,
        "generation_config": "vllm",  # not the model's own, whose penalties and top_k would change the sampling
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{package}.weight_receiver.RolloutWorker",
        "weight_transfer_config": WeightTransferConfig(backend="trl_realloc"),
        "disable_log_stats": True,
    }
    by_seed = draws_by_seed(settings, on_cpu)
    if by_seed:
        arguments["logits_processors"] = [f"{package}.vllm_sampler:SeededRows"]
    if settings["sleep_level"] and not on_cpu:  # on a CPU vLLM has no sleep mode
        arguments["enable_sleep_mode"] = True
    start_workers_in_turn()
    if settings["folder"] is not None:
        meet_in(settings["folder"])
    llm = LLM(**{**arguments, **settings["engine_kwargs"]})
    if settings["routes"]:
        llm.collective_rpc("record_routes")
    if by_seed:
        llm.collective_rpc("draw_by_seed")
    if on_cpu:
        llm.collective_rpc("use_amx")
        llm.collective_rpc("pack_experts")
    if on_cpu and settings["tensor_parallel_size"] > 1:  # this process and its workers wait for each other
        wait_without_yielding()
        llm.collective_rpc("share_cores")
    params = SamplingParams(max_tokens=1, detokenize=False, logprobs=0, **seed_arguments(0, 0, by_seed, True))
    llm.generate([{"prompt_token_ids": [0]}], params, use_tqdm=False)
    return llm


def cache_bytes(settings: dict[str, Any]) -> int:
    """Bytes for keys and values in each process on a CPU."""
    if settings["kv_cache_gib"] is not None:
        return int(settings["kv_cache_gib"] * 2**30)
    return cpu_cache_bytes(
        json.loads(Path(settings["model"], "config.json").read_text()),
        settings["dtype"],
        samples=settings["max_num_seqs"],
        tokens=settings["max_model_len"],
        tp=settings["tensor_parallel_size"],
        engine_kwargs=settings["engine_kwargs"],
    )


def draws_by_seed(settings: dict[str, Any], on_cpu: bool) -> bool:
    """True if `vllm_sampler` samples the tokens instead of vLLM's own sampler. Always so on a CPU, where vLLM's sampler
    computes a random number for each token of the vocabulary, and fails on prompts that are prefilled in two steps."""
    return bool(settings["repeatable_sampling"]) or on_cpu


_PARTS = ("weights", "kv_cache")  # vLLM's names of the memory that an engine frees


class Memory:
    """Frees the engine's device memory between its uses, by vLLM's sleep mode. Nothing is freed on a CPU.

    Args:
        level: 1 keeps the weights in host memory, 2 drops them; the cache is dropped in both cases.
    """

    def __init__(self, llm: LLM, level: int) -> None:
        self._llm, self._level = llm, level
        self._asleep: set[str] = set()  # the freed parts

    def sleep(self) -> None:
        if self._asleep != {*_PARTS}:
            self.wake(*_PARTS)  # vLLM does nothing for an engine that is partly asleep
            if self._level == 2:
                self._llm.collective_rpc("keep_plain_tensors")
            self._llm.sleep(level=self._level)
            self._asleep = {*_PARTS}

    def wake(self, *parts: str) -> list[str]:
        """Take the memory of these parts, `weights` or `kv_cache`, again. Returns the parts that had been freed."""
        missing = [part for part in parts if part in self._asleep]
        if missing:
            self._llm.wake_up(tags=missing)
            self._asleep -= set(missing)
            if self._level == 2 and "weights" in missing:
                self._llm.collective_rpc("restore_plain_tensors")
        return missing


class RunningGeneration:
    """A generation from its first request to its end: runs decode steps, and between them adds and withdraws requests
    and loads new parameters.

    Args:
        weights: loads new parameters.
        by_seed: whether `vllm_sampler` samples the tokens.
        keys: usable keys and values. They include those of earlier generations with the same parameters, so a further
            turn of a conversation computes only its new tokens.
        sampling: fields of `requests.Sampling`.
        version: version of the engine's parameters.
        routes: reads the experts of a mixture; `None` if they are not recorded.
    """

    def __init__(
        self,
        llm: LLM,
        channel: Channel,
        weights: WeightUpdates,
        by_seed: bool,
        keys: CachedKeys,
        routes: RequestRoutes | None,
        sampling: dict[str, Any],
        version: int,
    ) -> None:
        from .vllm_requests import RunningRequests

        self._channel, self._weights = channel, weights
        self._next_version, self._keys = version, keys
        self._requests = RunningRequests(llm, sampling, by_seed, version, keys, routes)

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
        self._channel.send("loaded", problem, stopped_s, self._weights.unproven, self._weights.together)
        return problem is None

    def _send(self, samples: list[Sample]) -> None:
        if samples:
            self._channel.send("samples", samples, time.time())


def ended_workers(workers: Sequence[BaseProcess], wait_s: float = 0.0) -> str:
    """A description of vLLM's workers that have ended, and how; empty if all are running."""
    by_sentinel = {worker.sentinel: worker for worker in workers}  # removes duplicates, which `wait` refuses
    ready = wait(list(by_sentinel), wait_s)
    ended = [worker for sentinel, worker in by_sentinel.items() if sentinel in ready]
    deadline = time.monotonic() + 10.0
    # the exit status is set after the sentinel, on a busy machine seconds after it, and perhaps by a thread of vLLM
    while any(worker.exitcode is None for worker in ended) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ", ".join(f"vLLM's worker {w.name} (pid {w.pid}) {_ending(w.exitcode)}" for w in ended)


def _ending(code: int | None) -> str:
    if code is None:
        return "ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def tie_to_workers(channel: Channel) -> threading.Event:
    """End this process when one of vLLM's workers ends, because vLLM would wait for its answer. Setting the returned
    event turns this off."""
    workers = multiprocessing.active_children()
    closing = threading.Event()

    def watch() -> None:
        wait([worker.sentinel for worker in workers])
        if not closing.is_set():
            reason = ended_workers(workers)
            print(reason, file=sys.stderr, flush=True)
            channel.send("failed", reason)
            channel.flush()
            os._exit(1)

    if workers:
        threading.Thread(target=watch, daemon=True).start()
    # All processes have opened the shared memory. Without names it is freed even if all are killed. If all are killed
    # before this line, vLLM's "...cpushm_0" is left behind on a CPU with several workers.
    pids = [os.getpid(), *(worker.pid for worker in workers if worker.pid)]
    remove_shared_memory_names(pids, started_at(os.getpid()))
    return closing


def read_routes(llm: LLM, settings: dict[str, Any]) -> tuple[RequestRoutes | None, str | None]:
    """What reads the experts of a mixture, if the engine records them; or the reason why it cannot."""
    from .vllm_compat import NoRoutes
    from .vllm_routes import RequestRoutes

    try:
        return (RequestRoutes(llm), None) if settings["routes"] else (None, None)
    except (NoRoutes, AttributeError) as error:  # a release with other attributes
        return None, str(error)


def serve(llm: LLM, channel: Channel, settings: dict[str, Any], routes: RequestRoutes | None) -> None:
    """Run commands until `close`, or until the parent ends (EOFError)."""
    from vllm.platforms import current_platform

    from .vllm_requests import CachedKeys, why_not_sampled
    from .weight_receiver import WeightUpdates

    memory = Memory(llm, settings["sleep_level"])
    weights = WeightUpdates(llm, channel.send, channel.connection.recv, settings["slots"])
    by_seed, keys = draws_by_seed(settings, current_platform.is_cpu()), CachedKeys()
    while True:
        word, *arguments = channel.connection.recv()
        if word == "load":
            memory.wake("weights")  # the cache's memory is not needed yet
            keys.drop()
            problem = weights.take(channel.connection.recv())
            channel.send("loaded", problem, 0.0, weights.unproven, weights.together)
        elif word == "generate":
            if "weights" in memory.wake("weights", "kv_cache"):
                weights.prove_again()
            if RunningGeneration(llm, channel, weights, by_seed, keys, routes, *arguments).run():
                return
        elif word == "check":
            channel.send("checked", why_not_sampled(llm, *arguments))
        elif word == "sleep":
            keys.drop()
            memory.sleep()
            channel.send("asleep")
        elif word == "probe":
            channel.send("probed", next(filter(None, llm.collective_rpc("why_no_ipc", args=tuple(arguments))), None))
        elif word == "close":
            return


def main() -> None:
    """Start the engine with the settings of the command line, and serve until it is closed."""
    settings = json.loads(sys.argv[1])
    gc.disable()  # vLLM imports 5,400 modules: collecting meanwhile frees little and takes 1.8 of 8 s of processor time
    os.environ[PARENT] = str(os.getpid())
    if settings["cpu_cores"]:
        os.sched_setaffinity(0, settings["cpu_cores"])
    channel = Channel(settings["socket"])
    workers: list[BaseProcess] = []
    try:
        llm = build(settings)
        workers = multiprocessing.active_children()
        closing = tie_to_workers(channel)
        routes, problem = read_routes(llm, settings)
        channel.send("ready", *llm.collective_rpc("weight_dtypes")[0], problem)
        gc.collect()
        gc.freeze()  # otherwise a collection between two decode steps looks at 650,000 objects for 0.4 s
        gc.enable()
        with contextlib.suppress(EOFError):  # the parent has ended
            serve(llm, channel, settings, routes)
        closing.set()
    except BaseException as error:
        traceback.print_exc()
        # vLLM may raise because a worker has ended, before or after the thread of `tie_to_workers` notices it
        reason = ended_workers(multiprocessing.active_children() + workers, 1.0 if workers else 0.0)
        channel.send("failed", reason or f"{type(error).__name__}: {error}")
        channel.flush()
        os._exit(1)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    os._exit(0)  # the names of shared memory are removed already


if __name__ == "__main__":
    main()
