"""Drives one vLLM engine: starts its process, hands it the actor's weights, asks it for samples, and ends it.

vLLM itself is imported only in that process (`vllm_host`), so the trainer's keeps its own threads, signals and torch
settings. Owns the process to the death: of the trainer, of the engine, or of both.
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
from .weight_buffers import Slots, asks_for_cuda_ipc


_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.27
MIN_TEMPERATURE = 0.01  # vLLM silently raises lower ones to this


def is_vllm_available() -> bool:
    """Whether vLLM is installed. Does not import it."""
    return importlib.util.find_spec("vllm") is not None


def why_not_served(config: Any, on_cpu: bool) -> str | None:
    """Why vLLM cannot generate with a model, as far as its Transformers config says; `None` where nothing speaks
    against it."""
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
    """One vLLM engine in a process of its own. The constructor returns at once; the engine starts beside the caller.

    Args:
        model: a directory with the actor's config.json. It needs no weights and no tokenizer.
        max_model_len: most tokens of a prompt and its response together.
        max_num_seqs: most responses that grow at the same time.
        tensor_parallel_size: processes over which vLLM cuts the model.
        dtype: in which vLLM computes: "float32", "bfloat16", "float16".
        cpu_cores: the cores to run on, evenly divided among the tensor-parallel processes; `None` for any.
        cuda_devices: as torch numbers them in this process, one per tensor-parallel process; `None` for an engine on
            the CPU.
        kv_cache_gib: memory for keys and values, per process. CPU only.
        gpu_memory_utilization: share of each GPU's memory for weights, keys and values.
        log_path: where the engine's output goes; `None` for a file without a name. Its end is in every error message.
        start_timeout_s: longest time from here to readiness.
        step_timeout_s: longest silence: for the weights of one bucket, for the step that gives each sample a token.
        stop_timeout_s: longest time that one of the engine's processes may be stopped by a signal (SIGSTOP).
        name: how messages call this engine.

    Raises:
        EngineError: vLLM is not installed, or an argument is impossible. All before a process starts.
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
        self._generation = 0  # number of the latest
        self._generating = False
        # a tensor group's other workers are on other GPUs, which cannot open this one's memory by its handle
        one_gpu = cuda_devices is not None and tensor_parallel_size == 1
        self._slots = Slots(cuda_ipc=one_gpu and asks_for_cuda_ipc())
        self._log_name = "its log" if log_path is None else str(log_path)
        self._log: IO[bytes] = tempfile.TemporaryFile() if log_path is None else open(log_path, "ab+")  # noqa: SIM115

        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # a stopped process may leave half a message
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
            "slots": self._slots.fds,
        }
        self._started = time.monotonic()
        with theirs:
            self._process = spawn(
                [sys.executable, "-P", "-m", "trl_realloc.engines.generation.vllm_host", json.dumps(settings)],
                _environment(tensor_parallel_size, cpu_cores, cuda_devices),
                self._log,
                keep_fds=[theirs.fileno(), *self._slots.fds],
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self._slots.fds)

    def _check(
        self, model: str | os.PathLike[str], tp: int, cores: Sequence[int] | None, devices: Sequence[int] | None
    ) -> int | None:
        """Refuse what cannot start; the vocabulary's size where the config tells it."""
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
        """Return when the engine has started. Raises `EngineError` with the end of its log if it does not."""
        self._alive()
        if not self._ready:
            with working("waiting for the vLLM engine to start", "it loads and compiles, 10 to 60 s as a rule"):
                self._receive("starting", self._started + self.start_timeout_s - time.monotonic())
            self._ready = True

    def load(self, buckets: Iterable[Bucket], version: int) -> None:
        """Take the actor's parameters, bucket by bucket; `version` is set only after the last one.

        The extra memory is two buckets on this side, and a layer in the engine. When it raises, no generation is
        possible until a load has gone well.

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
                filled = self._slots.fill(slot, bucket)
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
        """Yield completions as they finish, in any order. The engine begins at once and does not wait for the caller;
        the next call of this engine ends a generation that was left unfinished.

        Raises:
            EngineError: a request cannot be served (which one, and why), or there are no weights to serve it with.
            EngineDied: the engine's process ended, or was silent for `step_timeout_s`.
        """
        if not requests:
            return iter(())
        if self.version < 0:
            raise EngineError(f"{self.name}: no complete weights; load() has not been called, or did not end well.")
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
        """Be ready for the next command: started, and with no generation under way."""
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
                self._lose(doing, f"said {got!r} where {word!r} was due")

    def _receive(self, doing: str, patience_s: float | None = None) -> tuple[Any, ...]:
        """The next message. Whatever keeps it from coming ends the engine."""
        self._alive()
        patience_s = self.step_timeout_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        moved = time.monotonic()  # when none of the engine's processes was stopped
        try:
            while not self._connection.poll(0.5):
                if self._process.poll() is not None and not self._connection.poll():
                    self._lose(doing, how_it_ended(self._process))
                if not (still := stopped(self._process.pid)):
                    moved = time.monotonic()
                elif time.monotonic() - moved > self.stop_timeout_s:
                    which = "its worker" if self._process.pid not in still else "it"
                    pids = ", ".join(map(str, still))
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
        """End the engine and say why. `what` is None where its socket broke: how the process ended is the reason."""
        if what is None:
            with contextlib.suppress(Exception):
                self._process.wait(2)
            what = how_it_ended(self._process)
        way_out = "" if self._ready else "If vLLM cannot serve this model, set generation_engine: transformers. "
        self._dead = (
            f"{self.name}: the engine's process ({self._process.pid}) {what}, while {doing}. {way_out}"
            f"The end of {self._log_name}:\n{tail(self._log)}"
        )
        self._finish()
        raise EngineDied(self._dead) if self._ready else EngineError(self._dead)

    def _finish(self) -> None:
        self._finalizer()
        self._slots.clear()
        self.version = -1

    @property
    def is_dead(self) -> bool:
        """Its process ended, or was ended because it did not answer."""
        return self._dead is not None

    def close(self) -> None:
        """End the engine and everything it started. May be called twice."""
        if self._finalizer.alive and self._ready and self._dead is None:
            with contextlib.suppress(Exception):
                self._connection.send(("close",))
                self._process.wait(5)
        self._finish()
        self._log.close()


def _environment(tp: int, cores: Sequence[int] | None, devices: Sequence[int] | None) -> dict[str, str]:
    """The environment of the engine's process: not a rank of this job, alone on the network, tied to this process."""
    environment = without_launcher(os.environ)
    environment |= {
        "TRL_REALLOC_PARENT_PID": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core, and with tp 1 the worker, in the process itself
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": f"@trl_realloc.{os.getpid()}",  # sockets in the abstract namespace: no files in /tmp
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
    # vLLM compiles one small function for log-probabilities, 13 s at the first token for nothing gained at 64 rows
    environment["TORCH_COMPILE_DISABLE"] = "1"
    used = list(cores) if cores is not None else sorted(os.sched_getaffinity(0))
    share = max(1, len(used) // tp)
    environment["OMP_NUM_THREADS"] = str(share)
    # Turns that a thread spins for the next loop before it sleeps. A decode step is a hundred loops of microseconds:
    # sleeping at once makes 1,540 tokens/s, this 2,650. Spinning long, where others want the cores too, makes 200.
    environment["GOMP_SPINCOUNT"] = "5000"
    environment["KMP_BLOCKTIME"] = "0"  # the same for Intel's runtime, which has milliseconds for a unit
    if cores is None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        parts = [used[rank * share : (rank + 1) * share] for rank in range(tp)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    return environment


def _end(owner_pid: int, process: Any, connection: Connection[Any, Any], slots: Sequence[int]) -> None:
    if os.getpid() != owner_pid:  # a fork of the trainer, a data loader's for instance, owns nothing
        return
    end(process)
    connection.close()
    for fd in slots:
        os.close(fd)


if TYPE_CHECKING:  # the type checker proves that the engine keeps its protocol
    _GENERATES: type[GenerationEngine] = VLLMEngine
