"""Processes that are forked where others would be started, and vLLM engines in particular: importing vLLM takes an
engine of the tests longer than all that it then does.

A process that has imported vLLM forks an engine whenever its owner would start one. The engine becomes a child of the
owner, as one that is started is, because the owner adopts the orphans among its descendants (PR_SET_CHILD_SUBREAPER).

A rank whose server has imported vLLM (`rank_server`) forks that process at its beginning, before it has threads. Other
owners start it: `python engine_forks.py <descriptor of a socket> <pid of the owner>`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from trl_realloc.engines.child_process import die_with_parent, without_launcher


MODULES = ("vllm_compat", "vllm_sampler", "weight_receiver")  # not those that a test changes at an engine's start
# what vLLM imports when an engine starts: half of the time that a forked engine then takes
_OF_AN_ENGINE = (
    "vllm.entrypoints.openai.cli_args",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
)
_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES, _MAX_FDS = 1 << 17, 64
_HIGH = 1 << 10  # descriptors of an engine are below
# what is read when vLLM, torch and OpenMP are loaded, as `engine_process.engine_environment` sets it
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "INFO", "GOMP_SPINCOUNT": "5000"}
_ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}


def imports() -> None:
    """What an engine imports. Functions that vLLM compiles stay as they are, as in an engine on a CPU."""
    import importlib

    import torch

    torch._dynamo.config.disable = True
    try:
        from vllm import LLM, SamplingParams  # noqa: F401
        from vllm.platforms import current_platform

        current_platform.is_cpu()
        for name in MODULES:
            importlib.import_module(f"trl_realloc.engines.generation.{name}")
        for name in _OF_AN_ENGINE:
            with contextlib.suppress(ImportError):  # other releases have others
                importlib.import_module(name)
    finally:
        torch._dynamo.config.disable = False


class Forks:
    """Forks processes that become children of this one.

    Args:
        connection: to the process that forks them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def child(
        self, environment: Mapping[str, str], log: IO[bytes], keep_fds: Sequence[int], **asked: Any
    ) -> ForkedProcess:
        """A new child, with `asked` beside its environment, its output in `log` and only `keep_fds` open besides."""
        asked |= {"environment": {**environment}, "fds": [*keep_fds], "folder": os.getcwd()}
        _adopt_orphans(True)
        try:
            socket.send_fds(self._connection, [json.dumps(asked).encode()], [log.fileno(), *keep_fds])
            return ForkedProcess(int(self._connection.recv(64)))  # which has been adopted when it says its pid
        finally:
            _adopt_orphans(False)  # nobody would wait for others


def fork_forker(be: Callable[[dict[str, Any]], int]) -> socket.socket:
    """A connection to a fork of this process, which has one thread, that forks processes.

    Args:
        be: what each of them does with what is asked of it; its exit status.
    """
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(other.detach(), owner, be)
    other.close()
    return ours


class EngineForks(Forks):
    """Forks engines for this process."""

    @staticmethod
    def forked() -> EngineForks:
        """By a fork of this process, which has imported vLLM and has one thread."""
        return EngineForks(fork_forker(_be_engine))

    @staticmethod
    def started() -> EngineForks:
        """By a new process, which begins to import vLLM."""
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**without_launcher(os.environ), **_ENVIRONMENT}
        command = [sys.executable, __file__, str(other.fileno()), str(os.getpid())]
        subprocess.Popen(command, env=environment, pass_fds=[other.fileno()], start_new_session=True)
        other.close()
        return EngineForks(ours)

    def spawn(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], keep_fds: Sequence[int]
    ) -> ForkedProcess:
        """As `child_process.spawn`, of a command `python ... -m <module> <argument>`."""
        return self.child(environment, log, keep_fds, module=command[-2], argument=command[-1])


def _adopt_orphans(adopts: bool) -> None:
    """Whether orphans among the descendants of this process become its children."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class ForkedProcess:
    """What an engine's owner and a launcher use of `subprocess.Popen`, of a child that another process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)


def _serve(connection: int, owner: int, be: Callable[[dict[str, Any]], int]) -> None:
    """Fork a process for each request, until the owner ends."""
    die_with_parent(owner)
    requests = socket.socket(fileno=connection)
    while True:
        content, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, _MAX_FDS)
        if not content:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _become(json.loads(content), fds, requests, owner, be)
            os._exit(0)  # which makes an orphan of the new process
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become(
    asked: dict[str, Any], fds: Sequence[int], requests: socket.socket, owner: int, be: Callable[[dict[str, Any]], int]
) -> None:
    """Be a process as if it had been started by itself."""
    code = 1
    try:
        while os.getppid() != owner:
            time.sleep(0.001)
        os.setsid()
        requests.send(str(os.getpid()).encode())
        requests.detach()
        _take_descriptors(fds, (1, *asked["fds"]))
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as PYTHONUNBUFFERED, which engines have
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        import numpy

        random.seed()
        numpy.random.seed()
        code = be(asked)
    except SystemExit as ending:
        code = exit_status(ending)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _be_engine(asked: dict[str, Any]) -> int:
    """An engine's process."""
    import torch

    torch._dynamo.config.disable = bool(os.environ.get("TORCH_COMPILE_DISABLE"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = [asked["module"], asked["argument"]]
    sys.orig_argv = [sys.executable, "-P", "-m", *sys.argv]
    with open("/proc/self/comm", "w") as name:  # the command line is that of the process that was forked
        name.write(asked["module"].rpartition(".")[2])
    _begin_as_python(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    return 0


def exit_status(ending: SystemExit) -> int:
    """Of an interpreter that this exception ends, which says what it is not a number for."""
    if not isinstance(ending.code, int | None):
        print(ending.code, file=sys.stderr)
    return ending.code if isinstance(ending.code, int) else int(ending.code is not None)


def _begin_as_python(searched: Sequence[str]) -> None:
    """What an interpreter does at its start with the folders of PYTHONPATH."""
    sys.path[:0] = [folder for folder in searched if folder and folder not in sys.path]
    if any(os.path.exists(os.path.join(folder, "sitecustomize.py")) for folder in searched):
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401


def _take_descriptors(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Have these descriptors under these numbers, the first one as standard error too, and no others."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
    nothing = fcntl.fcntl(os.open(os.devnull, os.O_RDWR), fcntl.F_DUPFD, _HIGH)
    os.closerange(3, _HIGH)
    for fd, number in zip(kept, numbers, strict=True):
        os.dup2(fd, number)
    os.dup2(numbers[0], 2)
    os.dup2(nothing, 0)
    os.closerange(_HIGH, max(*kept, nothing) + 1)


if __name__ == "__main__":
    imports()
    gc.freeze()
    _serve(int(sys.argv[1]), int(sys.argv[2]), _be_engine)
