"""Generation engine with vLLM: starts vLLM in a process, sends it the actor's weights and requests, and ends it.

vLLM is imported only in that process (`vllm_host`), so that the trainer's process keeps its threads, signal handlers
and torch settings. The processes end together (`child_process`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ...common.notices import working
from ..base import Bucket, Completion, EngineDied, EngineError, GenerationEngine, GenerationRequest, Sampling
from ..child_process import end, how_it_ended, spawn, stopped, tail, without_launcher
from .weight_buffers import WeightBuffers, asks_for_cuda_ipc


_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.27
MIN_TEMPERATURE = 0.01  # vLLM silently raises lower ones to this


def is_vllm_available() -> bool:
    """Whether vLLM is installed. Does not import it."""
    return importlib.util.find_spec("vllm") is not None


def why_not_served(config: Any, on_cpu: bool) -> str | None:
    """The reason why vLLM cannot generate with a model of this Transformers config; `None` if none is known."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if not on_cpu or not heads or getattr(text, "kv_lora_rank", None) is not None:
        return None
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if size in _CPU_HEAD_SIZES:
        return None
    known = ", ".join(map(str, _CPU_HEAD_SIZES))
    return f"on a CPU vLLM has attention for heads of {known}, not for this model's {size}"


class VLLMEngine:
    """One vLLM engine in a process of its own. Keeps `base.GenerationEngine`. The constructor returns at once; the
    engine starts in the background.

    Args:
        model: a directory with the actor's config.json; weights and a tokenizer are not needed.
        max_model_len: maximum number of tokens of a prompt and its response together.
        max_num_seqs: maximum number of responses that are generated at the same time.
        tensor_parallel_size: number of processes over which vLLM splits the model.
        dtype: of vLLM's computation: "float32", "bfloat16", "float16".
        cpu_cores: the cores to run on, divided evenly among the tensor-parallel processes; `None` for any.
        cuda_devices: one per tensor-parallel process, as torch numbers them in this process; `None` for an engine on
        the
            CPU.
        kv_cache_gib: memory for keys and values per process, in GiB. CPU only.
        gpu_memory_utilization: share of each GPU's memory for weights, keys and values.
        log_path: the file for the engine's output; `None` for a temporary file. Error messages quote its end.
        start_timeout_s: maximum time from the constructor until the engine is ready.
        step_timeout_s: maximum time without a message, while a bucket is loaded or a token of each sample is generated.
        stop_timeout_s: maximum time that one of the engine's processes may be stopped by a signal (SIGSTOP).
        name: of the engine in messages.

    Raises:
        EngineError: vLLM is not installed, or an argument is invalid. Raised before a process is started.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        tensor_parallel_size: int = 1,
        dtype: str = "float32",
        cpu_cores: Sequence[int] | None = None,
        cuda_devices: Sequence[int] | None = None,
        kv_cache_gib: float = 1.0,
        gpu_memory_utilization: float = 0.3,
        log_path: str | os.PathLike[str] | None = None,
        start_timeout_s: float = 300.0,
        step_timeout_s: float = 60.0,
        stop_timeout_s: float = 30.0,
        name: str = "actor.generate",
    ) -> None:
        self.name, self.max_model_len = name, max_model_len
        self.start_timeout_s, self.step_timeout_s = start_timeout_s, step_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.version = -1
        self._vocabulary = self._check(model, tensor_parallel_size, cpu_cores, cuda_devices)
        self._ready = False
        self._dead: str | None = None
        self._generation = 0  # number of the latest call of `generate`
        self._generating = False
        # the other workers of a tensor group are on other GPUs and cannot open memory of this one by its handle
        one_gpu = cuda_devices is not None and tensor_parallel_size == 1
        self._buffers = WeightBuffers(cuda_ipc=one_gpu and asks_for_cuda_ipc())
        self._log_name = "its log" if log_path is None else str(log_path)
        self._log: IO[bytes] = tempfile.TemporaryFile() if log_path is None else open(log_path, "ab+")  # noqa: SIM115

        ours, theirs = socket.socketpair()
        for option in (
            socket.SO_RCVTIMEO,
            socket.SO_SNDTIMEO,
        ):  # a process that is stopped may have sent half a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(step_timeout_s) + 1, 0))
        settings = {
            "model": str(model),
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "cpu_cores": list(cpu_cores or ()),
            "kv_cache_gib": kv_cache_gib,
            "gpu_memory_utilization": gpu_memory_utilization,
            "socket": theirs.fileno(),
            "slots": self._buffers.fds,
        }
        self._started = time.monotonic()
        with theirs:
            self._process = spawn(
                [sys.executable, "-P", "-m", "trl_realloc.engines.generation.vllm_host", json.dumps(settings)],
                _environment(tensor_parallel_size, cpu_cores, cuda_devices),
                self._log,
                keep_fds=[theirs.fileno(), *self._buffers.fds],
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self._buffers.fds)

    def _check(
        self, model: str | os.PathLike[str], tp: int, cores: Sequence[int] | None, devices: Sequence[int] | None
    ) -> int | None:
        """Check the arguments. Returns the size of the vocabulary if the config has it."""
        if not is_vllm_available():
            remedy = "install trl_realloc[vllm], or set generation_engine='transformers'"
            raise EngineError(f"{self.name}: vLLM is not installed; {remedy}.")
        if cores is not None and devices is not None:
            raise EngineError(f"{self.name}: both cpu_cores and cuda_devices are given; an engine has one kind.")
        if cores is not None and (not cores or len(cores) % tp):
            raise EngineError(
                f"{self.name}: {len(cores)} cores cannot be divided among {tp} processes; give a multiple."
            )
        if devices is not None and len(devices) != tp:
            raise EngineError(f"{self.name}: {len(devices)} GPUs for tensor_parallel_size {tp}; give one for each.")
        try:
            size = json.loads((Path(model) / "config.json").read_text()).get("vocab_size")
        except OSError as error:
            raise EngineError(f"{self.name}: no config.json in {model}; save the actor's config there.") from error
        return size if isinstance(size, int) else None

    def wait_ready(self) -> None:
        """Wait until the engine has started.

        Raises:
            EngineError: it did not start; with the end of its log.
        """
        self._alive()
        if not self._ready:
            with working("waiting for the vLLM engine to start", "it loads and compiles, 10 to 60 s as a rule"):
                self._receive("starting", self._started + self.start_timeout_s - time.monotonic())
            self._ready = True

    def load(self, buckets: Iterable[Bucket], version: int) -> None:
        """See `base.GenerationEngine`. Needs memory for two buckets in this process and for a layer in the engine.
        After an error `version` is -1 and `generate` is refused until a load succeeds.

        Raises:
            EngineError: a parameter was missing, unknown or of the wrong shape.
            EngineDied: the engine's process ended.
        """
        self._settle()
        self.version = -1
        self._send("load")
        free = [0, 1]
        complete = False
        try:
            for bucket in buckets:
                if not free:
                    free.append(self._expect("free", "loading weights")[0])
                slot = free.pop(0)
                filled = self._buffers.fill(slot, bucket)
                if filled.tensors:
                    self._send("bucket", slot, *filled)
                else:
                    free.append(slot)
            complete = True
        finally:
            if self._dead is None:
                self._send("done")
                (problem,) = self._expect("loaded", "loading weights", passing=("free",))
        if complete and problem is not None:
            raise EngineError(f"{self.name}: vLLM could not load the weights of version {version}: {problem}")
        self.version = version

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        """See `base.GenerationEngine`. The engine generates in the background, without waiting for the caller. The next
        call of `load` or `generate` aborts a generation that is not finished.

        Raises:
            EngineError: a request cannot be served (which one, and why), or there are no weights to serve it with.
            EngineDied: the engine's process ended, or was silent for `step_timeout_s`.
        """
        if not requests:
            return iter(())
        if self.version < 0:
            raise EngineError(f"{self.name}: no complete weights; load() has not been called, or has failed.")
        self._refuse(requests, sampling)
        self._settle()
        asked = [(request.index, list(request.prompt_ids), request.seed & (2**63 - 1)) for request in requests]
        self._send("generate", asked, asdict(sampling))
        self._generating = True
        self._generation += 1
        return self._completions(self._generation)

    def _refuse(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        if sampling.max_tokens < 1:
            raise EngineError(f"{self.name}: max_tokens is {sampling.max_tokens}; it must be at least 1.")
        if not sampling.temperature >= MIN_TEMPERATURE:
            raise EngineError(f"{self.name}: temperature {sampling.temperature} is below vLLM's {MIN_TEMPERATURE}.")
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise EngineError(f"{self.name}: the prompt of request {request.index} is empty.")
            if length + sampling.max_tokens > self.max_model_len:
                raise EngineError(
                    f"{self.name}: the prompt of request {request.index} has {length} tokens; with up to "
                    f"{sampling.max_tokens} new ones that is more than max_model_len {self.max_model_len}. "
                    "Shorten the prompt or the response, or raise max_model_len."
                )
            if self._vocabulary and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
                raise EngineError(
                    f"{self.name}: the prompt of request {request.index} holds a token outside the model's vocabulary "
                    f"of {self._vocabulary}; is it from another tokenizer?"
                )

    def _completions(self, generation: int) -> Iterator[Completion]:
        try:
            while generation == self._generation and self._generating:
                word, *arguments = self._receive("generating")
                if word == "generated":
                    self._generating = False
                elif word == "samples":
                    for index, tokens, logprobs, stopped in arguments[0]:
                        yield Completion(index, tuple(tokens), tuple(logprobs), stopped)
            if generation != self._generation:
                raise EngineError(f"{self.name}: this generation was ended by a later call of the engine.")
        finally:
            if generation == self._generation and self._dead is None and self._finalizer.alive:
                self._settle()

    def _settle(self) -> None:
        """Wait until the engine has started, and abort a generation that is not finished."""
        self._alive()
        self.wait_ready()
        if self._generating:
            self._send("abort")
            self._expect("generated", "ending a generation", passing=("samples", "progress"))
            self._generating = False

    def _expect(self, word: str, doing: str, passing: Sequence[str] = ()) -> list[Any]:
        while True:
            got, *arguments = self._receive(doing)
            if got == word:
                return arguments
            if got not in passing:
                self._lose(doing, f"sent {got!r} instead of {word!r}")

    def _receive(self, doing: str, patience_s: float | None = None) -> tuple[Any, ...]:
        """The next message from the engine's process. If none comes, the engine is ended.

        Raises:
            EngineDied, EngineError: the process ended, was stopped, reported an error or sent nothing in time.
        """
        self._alive()
        patience_s = self.step_timeout_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        running_at = time.monotonic()  # the last time that no process of the engine was stopped
        try:
            while not self._connection.poll(0.5):
                if self._process.poll() is not None and not self._connection.poll():
                    self._lose(doing, how_it_ended(self._process))
                if not (stopped_pids := stopped(self._process.pid)):
                    running_at = time.monotonic()
                elif time.monotonic() - running_at > self.stop_timeout_s:
                    which = "its worker" if self._process.pid not in stopped_pids else "it"
                    pids = ", ".join(map(str, stopped_pids))
                    self._lose(doing, f"was stopped by a signal (SIGSTOP; {which}, pid {pids})")
                if time.monotonic() > deadline:
                    self._lose(doing, f"gave no sign of life for {patience_s:.0f} s")
            message: tuple[Any, ...] = self._connection.recv()
        except (EOFError, OSError):
            self._lose(doing, None)
        if message[0] == "failed":
            self._lose(doing, f"failed: {message[1]}")
        return message

    def _send(self, *message: Any) -> None:
        self._alive()
        try:
            self._connection.send(message)
        except OSError:
            self._lose(f"sending {message[0]!r}", None)

    def _alive(self) -> None:
        if self._dead is not None:
            raise EngineDied(self._dead)
        if not self._finalizer.alive:
            raise EngineError(f"{self.name}: the engine is closed.")

    def _lose(self, doing: str, what: str | None) -> NoReturn:
        """End the engine and raise the reason. `what` is `None` if the connection broke: then it is how the process
        ended."""
        if what is None:
            with contextlib.suppress(Exception):
                self._process.wait(2)
            what = how_it_ended(self._process)
        remedy_text = "" if self._ready else "If vLLM cannot serve this model, set generation_engine: transformers. "
        self._dead = (
            f"{self.name}: the engine's process ({self._process.pid}) {what}, while {doing}. {remedy_text}"
            f"The end of {self._log_name}:\n{tail(self._log)}"
        )
        self._finish()
        raise EngineDied(self._dead) if self._ready else EngineError(self._dead)

    def _finish(self) -> None:
        self._finalizer()
        self._buffers.clear()
        self.version = -1

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process ended by itself, or was ended because it did not answer."""
        return self._dead is not None

    def close(self) -> None:
        """See `base.GenerationEngine`."""
        if self._finalizer.alive and self._ready and self._dead is None:
            with contextlib.suppress(Exception):
                self._connection.send(("close",))
                self._process.wait(5)
        self._finish()
        self._log.close()


def _environment(tp: int, cores: Sequence[int] | None, devices: Sequence[int] | None) -> dict[str, str]:
    """The environment variables of the engine's process: without those of a rank, and with vLLM's settings for its
    devices and for local communication only."""
    environment = without_launcher(os.environ)
    environment |= {
        "TRL_REALLOC_PARENT_PID": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine core, and with tp 1 the worker, in the process itself
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": f"@trl_realloc.{os.getpid()}",  # abstract sockets, which leave no files in /tmp
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if devices is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(device) for device in devices]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            names if visible is None else [visible.split(",")[device] for device in devices]
        )
        return environment
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # vLLM compiles one small function for log-probabilities: 13 s at the first token, no gain at 64 rows
    environment["TORCH_COMPILE_DISABLE"] = "1"
    used = list(cores) if cores is not None else sorted(os.sched_getaffinity(0))
    share = max(1, len(used) // tp)
    environment["OMP_NUM_THREADS"] = str(share)
    # The number of turns that a thread spins before it sleeps. A decode step is a hundred parallel loops of
    # microseconds: 1,540 tokens/s with threads that sleep at once, 2,650 with this, 200 with long spinning on cores
    # that others use.
    environment["GOMP_SPINCOUNT"] = "5000"
    environment["KMP_BLOCKTIME"] = "0"  # the same for Intel's runtime, in milliseconds
    if cores is None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        parts = [used[rank * share : (rank + 1) * share] for rank in range(tp)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    return environment


def _end(owner_pid: int, process: Any, connection: Connection[Any, Any], slots: Sequence[int]) -> None:
    if os.getpid() != owner_pid:  # a forked process, such as a data loader's worker, must not end the engine
        return
    end(process)
    connection.close()
    for fd in slots:
        os.close(fd)


if TYPE_CHECKING:  # the type checker proves that the engine keeps its protocol
    _GENERATES: type[GenerationEngine] = VLLMEngine
