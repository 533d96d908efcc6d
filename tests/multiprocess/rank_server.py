"""A process that has imported what ranks import, and forks ranks: `python rank_server.py [engines]`.

Importing torch, Transformers, TRL and DeepSpeed takes a rank of the tests longer than what it then does. Each line of
the standard input asks for a rank (`script`, `arguments`, `environment`, `log`, `host`, and whether it `launches`
others); the standard output names each forked process (`pid`), and its exit status when it has ended (`pid`, `code`).
The client is in `ranks`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import mmap
import os
import selectors
import signal
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import engine_forks
from ranks import MARK_FILE


ENGINES = "engines"  # argument: ranks fork their vLLM engines
# what a rank has in memory by which it is found, and its forks are, whose environment /proc does not show
_marks: list[mmap.mmap] = []


def imports() -> None:
    """What the scripts of this folder import at the latest when they train."""
    import peft  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tiny  # noqa: F401
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification  # noqa: F401

    import trl_realloc.engines.training.megatron
    import trl_realloc.trainer.ppo_trainer

    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401
    if ENGINES in sys.argv:
        engine_forks.imports()
        # TRL's trainers of GRPO and RLOO, and with them vLLM; pytest, which the scripts that use them take checks from
        import recorded_rollouts  # noqa: F401

        import trl_realloc.trainer.grpo_trainer  # noqa: F401


class Server:
    """Forks ranks until its standard input ends, and ends them then.

    Args:
        asked: file descriptor of the requests.
        told: file descriptor of the replies.
    """

    def __init__(self, asked: int, told: int) -> None:
        self.asked, self.told = asked, told
        self.running: set[int] = set()
        self.pid = os.getpid()
        self.ended, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> dict[str, Any] | None:
        """Returns in each rank with its request, and in this process at the end with `None`."""
        handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup = signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.asked, selectors.EVENT_READ)
            selector.register(self.ended, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                if self.ended in ready:
                    os.read(self.ended, 4096)
                    self._reap()
                if self.asked not in ready:
                    continue
                content = os.read(self.asked, 1 << 16)
                if not content:
                    self._end()
                    return None
                *lines, rest = (rest + content).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(wakeup)
                        signal.signal(signal.SIGCHLD, handler)
                        return json.loads(line)
                    self.running.add(pid)
                    self._tell(pid=pid)

    def _tell(self, **reply: int) -> None:
        os.write(self.told, json.dumps(reply).encode() + b"\n")

    def _reap(self) -> None:
        for pid in sorted(self.running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.running.remove(pid)
                self._tell(pid=pid, code=os.waitstatus_to_exitcode(status))

    def _end(self) -> None:
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def become(rank: dict[str, Any], server: Server) -> None:
    """Make of this fork a process as if it had been started by itself: its environment, output, session and random
    numbers."""
    import numpy

    from trl_realloc.engines.child_process import die_with_parent

    os.setsid()
    die_with_parent(server.pid)
    for descriptor in (server.asked, server.told, server.ended, server.wake):
        os.close(descriptor)
    log = os.open(rank["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if rank["host"]:
        _enter(rank["host"])
    os.environ.clear()
    os.environ.update(rank["environment"])
    tempfile.tempdir = None  # which is read from there
    if MARK_FILE in os.environ:
        with open(os.environ.pop(MARK_FILE), "rb") as mark:
            _marks.append(mmap.mmap(mark.fileno(), 0, prot=mmap.PROT_READ))
    numpy.random.seed()


def _enter(process: int) -> None:
    """Go on in the namespaces of another process, as `nsenter -n -u -m -p`. This process stays outside of the last ones
    and ends with the one that goes on in there."""
    from trl_realloc.engines.child_process import die_with_parent

    library = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt", "pid")]
    for descriptor in namespaces:
        if library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to the namespaces of process {process} failed")
        os.close(descriptor)
    inside = os.fork()
    if inside:
        code = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    die_with_parent(0)  # it has no number in there
    os.setsid()


def fork_engines() -> None:
    """Have the engines of this rank forked, if vLLM has been imported."""
    if "vllm" in sys.modules:
        from trl_realloc.engines.generation import engine_process

        engine_process.spawn = engine_forks.EngineForks.forked().spawn  # type: ignore[assignment]


def run(script: str, arguments: list[str]) -> int:
    """Run a script as the main module; its exit status. Without the end of the interpreter, which would take apart all
    that was imported for as long as a short training takes."""
    sys.argv = [script, *arguments]
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), vars(module))
    except SystemExit as ending:
        code = engine_forks.exit_status(ending)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    asked, told = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    imports()
    gc.freeze()  # a collection in a rank would copy the memory of all that was imported
    os.write(told, b"{}\n")
    server = Server(asked, told)
    rank = server.serve()
    if rank is None:
        os._exit(0)
    become(rank, server)
    if not rank["launches"]:
        fork_engines()
    os._exit(run(rank["script"], rank["arguments"]))


if __name__ == "__main__":
    main()
