"""The process that holds one vLLM engine: started by `vllm` as
`python -m trl_realloc.engines.generation.vllm_host <settings>`.

Takes commands and returns samples over an inherited socket. Owns vLLM's own workers and what they leave in the system;
everything that could be refused has been refused by the parent, so that any exception here ends the process.

Messages are tuples that begin with a word:

| from the parent | to the parent |
| --- | --- |
| | `ready` once; `failed` (why) at any time, and the end |
| `load`, then `bucket` (slot, size, tensors)... | `free` (slot) after each bucket |
| `done` after the last | `loaded` (problem or None) |
| `generate` (requests, sampling) | `samples` (list) and `progress`..., then `generated` |
| `abort` | `generated`, unless it was sent already |
| `close` | |
"""

from __future__ import annotations

import contextlib
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

from ..child_process import die_with_parent, remove_shared_memory_names, started_at


if TYPE_CHECKING:
    from vllm import LLM

PARENT = "TRL_REALLOC_PARENT_PID"
PROGRESS_S = 1.0  # at most one word of progress in this time

# vLLM's workers import this module too, as __mp_main__, before they import vLLM: so they are tied to this process
if __name__ in ("__main__", "__mp_main__"):
    die_with_parent(int(os.environ[PARENT]))


class Channel:
    """The socket to the parent. A thread writes, so generation never waits for a parent that is busy with a sample."""

    def __init__(self, fd: int) -> None:
        self.connection: Connection[Any, Any] = Connection(fd)
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._told = 0.0

    def _write(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self.connection.send(message)
            except OSError:
                os._exit(1)  # the parent has gone

    def send(self, *message: Any) -> None:
        self._told = time.monotonic()
        self._queue.put(message)

    def progress(self) -> None:
        if time.monotonic() - self._told > PROGRESS_S:
            self.send("progress")

    def flush(self) -> None:
        self._queue.put(None)
        self._writer.join(5)


def architecture(model: str) -> dict[str, Any]:
    """What a config that no `save_pretrained` of a model has written lacks: without it vLLM takes some for encoders."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads(Path(model, "config.json").read_text())
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    return {} if config.get("architectures") or name is None else {"architectures": [name]}


def build(settings: dict[str, Any]) -> LLM:
    """The engine, with weights that mean nothing yet. Has made one token: some models fail only there, such as those
    with heads of 16 on the CPU."""
    from vllm import LLM, SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    worker = "trl_realloc.engines.generation.vllm_worker"
    llm = LLM(
        model=settings["model"],
        runner="generate",
        hf_overrides=architecture(settings["model"]),
        tensor_parallel_size=settings["tensor_parallel_size"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        gpu_memory_utilization=settings["gpu_memory_utilization"],
        kv_cache_memory_bytes=int(settings["kv_cache_gib"] * 2**30) if current_platform.is_cpu() else None,
        enforce_eager=current_platform.is_cpu(),
        seed=0,
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the model's own: its penalties and top_k would leak into the sampling
        logprobs_mode="processed_logprobs",
        logits_processors=[f"{worker}:SeededRows"],
        worker_extension_cls=f"{worker}.RolloutWorker",
        weight_transfer_config=WeightTransferConfig(backend="trl_realloc"),
        disable_log_stats=True,
    )
    llm.collective_rpc("draw_by_seed")
    params = SamplingParams(max_tokens=1, detokenize=False, logprobs=0, extra_args={"trl_realloc_seed": 0})
    llm.generate([{"prompt_token_ids": [0]}], params, use_tqdm=False)
    return llm


def ended_workers(workers: Sequence[Any], wait_s: float = 0.0) -> str:
    """Which of vLLM's workers have ended, and how; an empty string while all run."""
    ready = wait([worker.sentinel for worker in workers], wait_s)
    ended = [worker for worker in workers if worker.sentinel in ready]
    deadline = time.monotonic() + 10.0
    # its exit status is there a moment after its sentinel, on a busy machine seconds, and vLLM's own thread may be the
    # one that collects it
    while any(worker.exitcode is None for worker in ended) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ", ".join(f"vLLM's worker {w.name} (pid {w.pid}) {_how(w.exitcode)}" for w in ended)


def _how(code: int | None) -> str:
    if code is None:
        return "ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def tie_to_workers(channel: Channel) -> threading.Event:
    """End this process when one of vLLM's workers ends, for vLLM would wait for its answer; unless the event is set."""
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
    # All have opened what they share; without names, not even a kill of the whole group leaves any of it behind. Before
    # this, the start of several workers on the CPU has a gap: vLLM's own "...cpushm_0" stays if all are killed in it.
    pids = [os.getpid(), *(worker.pid for worker in workers if worker.pid)]
    remove_shared_memory_names(pids, started_at(os.getpid()))
    return closing


def load(llm: LLM, channel: Channel, slots: list[int]) -> None:
    """Put buckets into vLLM as they come, through its weight-transfer interface."""
    llm.start_weight_update()
    while True:
        word, *arguments = channel.connection.recv()
        if word == "bucket":
            slot, size, tensors, handle = arguments
            path = f"/proc/{os.getpid()}/fd/{slots[slot]}"
            llm.update_weights({"update_info": {"path": path, "size": size, "tensors": tensors, "handle": handle}})
            channel.send("free", slot)
            continue
        llm.finish_weight_update()  # also of a torn update: vLLM takes no other before it
        problems = [problem for problem in llm.collective_rpc("weight_problem") if problem]
        channel.send("loaded", problems[0] if problems else None)
        return


def generate(llm: LLM, channel: Channel, requests: list[tuple[int, list[int], int]], sampling: dict[str, Any]) -> None:
    """Continue all prompts; each step's finished samples go to the parent at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = sampling["stop_token_id"]
    engine = llm.llm_engine
    # after new weights it must go; and a call must not depend on the calls before it
    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM kept its prefix cache, whose keys and values are of earlier weights: blocks are in use"
        )
    for number, (_, prompt, seed) in enumerate(requests):
        params = SamplingParams(
            temperature=sampling["temperature"],
            max_tokens=sampling["max_tokens"],
            stop_token_ids=None if stop is None else [stop],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"trl_realloc_seed": seed},
        )
        engine.add_request(str(number), {"type": "token", "prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        samples = []
        for output in engine.step():
            (sample,) = output.outputs
            tokens = list(sample.token_ids)
            stopped = sample.finish_reason == "stop"
            if not stopped and sample.finish_reason != "length":  # vLLM gave the request up; a part is no sample
                raise RuntimeError(f"vLLM ended request {output.request_id} early: {sample.finish_reason}")
            samples.append((requests[int(output.request_id)][0], tokens, sample.logprobs.logprobs, stopped))
        if samples:
            channel.send("samples", samples)
        channel.progress()
        if channel.connection.poll():  # the only thing a parent says during a generation is "abort"
            channel.connection.recv()
            engine.abort_request([str(number) for number in range(len(requests))])
            break
    channel.send("generated")


def serve(llm: LLM, channel: Channel, slots: list[int]) -> None:
    """Commands until `close`, or until the parent has gone."""
    while True:
        word, *arguments = channel.connection.recv()
        if word == "load":
            load(llm, channel, slots)
        elif word == "generate":
            generate(llm, channel, *arguments)
        elif word == "close":
            return


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.environ[PARENT] = str(os.getpid())
    if settings["cpu_cores"]:
        os.sched_setaffinity(0, settings["cpu_cores"])
    channel = Channel(settings["socket"])
    workers: list[Any] = []
    try:
        llm = build(settings)
        workers = multiprocessing.active_children()
        closing = tie_to_workers(channel)
        channel.send("ready")
        with contextlib.suppress(EOFError):  # the parent has gone
            serve(llm, channel, settings["slots"])
        closing.set()
    except BaseException as error:
        traceback.print_exc()
        # vLLM may notice a worker's end in its own way, before or after the thread that waits for it does
        reason = ended_workers(multiprocessing.active_children() + workers, 1.0 if workers else 0.0)
        channel.send("failed", reason or f"{type(error).__name__}: {error}")
        channel.flush()
        os._exit(1)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    os._exit(0)  # nothing else to tidy up: the names of what is shared have gone already


if __name__ == "__main__":
    main()
