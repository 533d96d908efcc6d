"""The process of a vLLM engine, seen from its owner: start, messages, time limits and end.

The contents of the messages are in `vllm`; `vllm_host` handles them in the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

from ..base import EngineDied, EngineError
from ..child_process import Message, end, how_it_ended, spawn, stopped, tail, without_launcher


CHECK_S = 0.5  # seconds between two checks of the processes of a silent engine
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of an engine, in seconds.

    Args:
        start: time from the constructor until the engine is ready.
        step: longest wait for a message during generation. The engine reports at least once per step of all samples.
        load: longest wait for a message while weights are loaded; each bucket is reported.
        stop: longest time for which a process of the engine may be stopped by a signal (SIGSTOP).
    """

    start: float = 600.0
    step: float = 300.0
    load: float = 300.0
    stop: float = 30.0


class EngineProcess:
    """The engine's process and the connection to it. The constructor returns at once.

    Args:
        name: name of the engine in messages.
        settings: settings of the engine as JSON. The process gets them and `socket`, its end of the connection.
        environment: environment variables of the process.
        log_path: the file that the process's output is appended to; `None` for a temporary one. Messages quote its end.
        inherited_fds: file descriptors that the process inherits. They are closed here when the process ends.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, object],
        environment: Mapping[str, str],
        log_path: str | os.PathLike[str] | None,
        inherited_fds: Sequence[int],
        limits: TimeLimits,
    ) -> None:
        self.name, self.limits = name, limits
        self.is_ready = False
        self._dead: str | None = None
        self._log_name = "its log" if log_path is None else str(log_path)
        self._log: IO[bytes] = tempfile.TemporaryFile() if log_path is None else open(log_path, "ab+")  # noqa: SIM115
        self._log.write(f"--- {name}, started {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
        self._log.flush()
        self._log_start = self._log.tell()  # the file may hold the logs of earlier engines
        ours, theirs = socket.socketpair()
        most = int(max(limits.step, limits.load)) + 1
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # a stopped process may have sent half a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", most, 0))
        self.started = time.monotonic()
        self._quiet_since = self.started  # time of the last message, or of the start of the current operation
        self._stopped_since: float | None = None  # time at which a process was first seen stopped by a signal
        self._looked_at = 0.0  # time of the last check for that
        with theirs:
            arguments = json.dumps({**settings, "socket": theirs.fileno()})
            self._process = spawn(
                [sys.executable, "-P", "-m", "trl_realloc.engines.generation.vllm_host", arguments],
                environment,
                self._log,
                keep_fds=[theirs.fileno(), *inherited_fds],
            )
        self._connection: Connection[Message, Message] = Connection(ours.detach())
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._process, self._connection, tuple(inherited_fds)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True until the process is ended from here or found dead."""
        return self._dead is None and self._finalizer.alive

    def check_alive(self) -> None:
        """Raise `EngineDied` or `EngineError` if the process has ended."""
        if self._dead is not None:
            raise EngineDied(self._dead)
        if not self._finalizer.alive:
            raise EngineError(
                f"{self.name}: the engine is closed, as all engines of a trainer are after its close() and when a call "
                f"has failed or was interrupted; after a failure in a job of one process, train() and evaluate() start "
                f"it again; otherwise make a new trainer, whose train(resume_from_checkpoint=True) goes on from the "
                f"last checkpoint."
            )

    def wait_ready(self) -> Message:
        """The process's first message. Raises `EngineError` with the end of the log if the process does not start."""
        message = self.receive("starting", self.started + self.limits.start - time.monotonic())
        self.is_ready = True
        return message

    def send(self, *message: object) -> None:
        self.check_alive()
        try:
            self._connection.send(message)
        except OSError:
            self._lose(f"sending {message[0]!r}", None)

    def expect(
        self,
        word: str,
        doing: str,
        limit_s: float,
        passing: Sequence[str] = (),
        take: Callable[[Message], bool] = lambda message: False,
    ) -> list[Any]:
        """The arguments of the next message, whose word must be `word`.

        Args:
            passing: words of messages that are skipped.
            take: gets every other message that comes before. Returns True if it handled the message.
        """
        while True:
            message = self.receive(doing, limit_s)
            got, *arguments = message
            if got == word:
                return arguments
            if got not in passing and not take(message):
                self._lose(doing, f"sent {got!r} instead of {word!r}")

    def receive(self, doing: str, limit_s: float) -> Message:
        """The next message from the process. If none comes, the process is ended.

        Args:
            doing: the engine's current operation, for messages.
            limit_s: longest time without a message.

        Raises:
            EngineDied, EngineError: the process ended, was stopped, reported an error or sent nothing in time.
        """
        self.expect_message()
        while (message := self.receive_within(CHECK_S, doing, limit_s)) is None:
            pass
        return message

    def expect_message(self) -> None:
        """Restart the clock of the time without a message, because the engine begins an operation."""
        self._quiet_since, self._stopped_since = time.monotonic(), None

    def receive_within(self, timeout_s: float, doing: str, limit_s: float) -> Message | None:
        """The next message from the process; `None` if there is none within `timeout_s` seconds.

        Args:
            limit_s: longest time without a message, since the last one or the last `expect_message`.

        Raises:
            EngineDied, EngineError: see `receive`.
        """
        self.check_alive()
        deadline = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(max(0.0, min(CHECK_S, deadline - time.monotonic()))):
                self._check_answers(doing, limit_s)
                if time.monotonic() >= deadline:
                    return None
            message: Message = self._connection.recv()
        except (EOFError, OSError):
            self._lose(doing, None)
        self.expect_message()
        if message[0] == "failed":
            self._lose(doing, f"failed: {message[1]}")
        return message

    def _check_answers(self, doing: str, limit_s: float) -> None:
        """With no message waiting: end the process if it has ended, was stopped or was silent for too long."""
        if self._process.poll() is not None and not self._connection.poll():
            self._lose(doing, how_it_ended(self._process))
        now = time.monotonic()
        if now - self._quiet_since > limit_s:
            self._lose(doing, f"gave no sign of life for {limit_s:.0f} s")
        if now - self._looked_at < CHECK_S:  # a check takes about a millisecond
            return
        self._looked_at = now
        stopped_pids = stopped(self._process.pid)
        self._stopped_since = (self._stopped_since or now) if stopped_pids else None
        if self._stopped_since is not None and now - self._stopped_since > self.limits.stop:
            which = "its worker" if self._process.pid not in stopped_pids else "it"
            pids = ", ".join(map(str, stopped_pids))
            self._lose(doing, f"was stopped by a signal (SIGSTOP; {which}, pid {pids})")

    def _lose(self, doing: str, what: str | None) -> NoReturn:
        """End the process and raise the reason. `what` is `None` if the connection broke; the reason is then how the
        process ended."""
        if what is None:
            with contextlib.suppress(Exception):
                self._process.wait(2)
            what = how_it_ended(self._process)
        by_transformers = "generation_engine: transformers (of GRPO and RLOO, use_vllm: false)"
        remedy = "" if self.is_ready else f"If vLLM cannot serve this model, set {by_transformers}. "
        cause = worker_error(self._log, self._log_start)
        reported = f"Its worker reported: {cause}. " if cause is not None and cause not in what else ""
        self._dead = (
            f"{self.name}: the engine's process ({self._process.pid}) {what}, while {doing}. {reported}{remedy}"
            f"The end of {self._log_name}:\n{tail(self._log)}"
        )
        self._finalizer()
        raise EngineDied(self._dead) if self.is_ready else EngineError(self._dead)

    def close(self) -> None:
        """End the process. May be called twice."""
        if self.is_running and self.is_ready:
            with contextlib.suppress(Exception):
                self._connection.send(("close",))
                self._process.wait(5)
        self._finalizer()
        self._log.close()


_WORKER_ERROR = re.compile(
    rb"^\(Worker[^)]*\) ERROR .*?\] ((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.M
)


def worker_error(log: IO[bytes], start: int) -> str | None:
    """The first exception in the log of a vLLM worker process, such as "RuntimeError: out of memory". The engine itself
    reports only that a worker failed.

    Args:
        log: the engine's log.
        start: offset in bytes at which this engine's output begins.
    """
    size = os.fstat(log.fileno()).st_size
    start = max(start, size - 2**20)
    text = os.pread(log.fileno(), size - start, start)
    match = _WORKER_ERROR.search(text)
    return None if match is None else match[1].decode(errors="replace").strip().rstrip(".")


def _end(owner_pid: int, process: Any, connection: Connection[Message, Message], fds: Sequence[int]) -> None:
    if os.getpid() != owner_pid:  # a forked process, such as a data loader's worker, must not end the engine
        return
    end(process)
    connection.close()
    for fd in fds:
        os.close(fd)


def engine_environment(
    tp: int,
    cores: Sequence[int] | None,
    devices: Sequence[int] | None,
    *,
    repeatable: bool = False,
    compiles: bool = False,
) -> dict[str, str]:
    """The environment variables of the engine's process: without those of a rank, and with vLLM's settings for its
    devices and for local communication only.

    Args:
        tp: number of tensor-parallel processes.
        cores: cores to run on; `None` for any.
        devices: GPUs to run on, as torch numbers them in this process; `None` for the CPU.
        repeatable: whether this package's sampler is used, which needs vLLM's older model runner. vLLM 0.26 and 0.27
            choose it if there are logits processors; 0.32 would choose its newest one, and refuse the processor.
        compiles: whether vLLM may compile on the CPU (`enforce_eager: False` of the user). On a GPU it always may.
    """
    environment = without_launcher(os.environ)
    # The setting is for training. Memory in expandable segments can neither be freed by a sleeping engine nor be opened
    # by the other workers of a tensor-parallel group (CUDA IPC), as vLLM's all-reduce does.
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in environment:
            rest = [part for part in environment[name].split(",") if not part.strip().startswith("expandable_segments")]
            environment[name] = ",".join(rest)
    environment |= {
        "TRL_REALLOC_PARENT_PID": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine core, and with tp 1 the worker, in this process
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": f"@trl_realloc.{os.getpid()}",  # abstract sockets, which leave no files in /tmp
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    # TRL sets ERROR when it is imported. The log file also has vLLM's messages about its memory and kernels.
    if environment.get("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR":
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
    if repeatable:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if devices is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(device) for device in devices]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            names if visible is None else [visible.split(",")[device] for device in devices]
        )
        # vLLM's default if FlashInfer is installed. It supports neither log-probabilities of the processed
        # distribution nor a seed per sample.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return environment
    environment |= _cpu_environment(tp, cores)
    if not compiles:
        # vLLM compiles one small function for log-probabilities: 13 s at the first token, no gain at 64 rows
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment


def _cpu_environment(tp: int, cores: Sequence[int] | None) -> dict[str, str]:
    used = list(cores) if cores is not None else sorted(os.sched_getaffinity(0))
    share = max(1, len(used) // tp)
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(share),
        # Number of spins before a thread sleeps. A decode step is a hundred parallel loops of microseconds: 1,540
        # tokens/s with threads that sleep at once, 2,650 with this, 200 with long spinning on cores that other
        # processes use.
        "GOMP_SPINCOUNT": "5000",
        "KMP_BLOCKTIME": "0",  # the same for Intel's runtime, in milliseconds
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if cores is not None:
        parts = [used[rank * share : (rank + 1) * share] for rank in range(tp)]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    return environment
