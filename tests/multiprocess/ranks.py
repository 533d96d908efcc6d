"""The ranks of one launch, forked by processes that have already imported what they need (`rank_server`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
# the tree that is tested, whichever one is installed
SEARCHED = os.pathsep.join(str(HERE.parent / folder) for folder in ("", "trainer", "runtime", "..", "../examples"))

MARK_FILE = "TRL_REALLOC_TEST_MARK"  # variable: a file that a rank keeps in memory, as do its forks


class RankServer:
    """A `rank_server` process, started with the first rank that is asked for.

    Args:
        engines: its ranks fork their vLLM engines (`engine_forks`).

    Attributes:
        codes: the exit status of every rank that has ended, by pid.
    """

    def __init__(self, engines: bool = False) -> None:
        self.engines = engines
        self.codes: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def begin(self) -> None:
        """Start the process, without waiting for its imports."""
        if self._process is None:
            # as it is in a launched process, but that asking for CUDA must not start it, which forks cannot use
            environment = {**os.environ, "PYTHONPATH": SEARCHED, "DS_ACCELERATOR": "cpu"}
            environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            command = [sys.executable, str(HERE / "rank_server.py"), *(["engines"] if self.engines else [])]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            os.set_blocking(self._stream("stdout"), False)

    def fork(
        self,
        script: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        host: int = 0,
        launches: bool = False,
    ) -> int:
        """The pid of a new process that runs `script`; its output is appended to `log`. It runs in the namespaces of
        the process `host`, if there is one. `launches`: it is not a rank, but forks ranks."""
        self.begin()
        request: dict[str, Any] = {"script": str(script), "arguments": [*arguments], "environment": {**environment}}
        request |= {"log": str(log), "host": host, "launches": launches}
        os.write(self._stream("stdin"), json.dumps(request).encode() + b"\n")
        while True:
            for reply in self.replies(None):
                if "pid" in reply and "code" not in reply:
                    return reply["pid"]

    def replies(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """What the server has said since; at least one reply without a time limit."""
        found: list[dict[str, Any]] = []
        out = self._stream("stdout")
        while not found and select.select([out], [], [], timeout_s)[0]:
            content = os.read(out, 1 << 16)
            if not content:
                raise RuntimeError("the rank server has ended; its reason is above.")
            *lines, self._rest = (self._rest + content).split(b"\n")
            found = [json.loads(line) for line in lines]
        self.codes |= {reply["pid"]: reply["code"] for reply in found if "code" in reply}
        return found

    def _stream(self, name: str) -> int:
        assert self._process is not None
        return int(getattr(self._process, name).fileno())

    def close(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.stdin.close()  # type: ignore[union-attr]


class RankServers:
    """Two servers: ranks of odd and of even number have different seeds of `hash`, as all ranks of a launcher have. A
    program whose messages follow the order of a set fails, as it would there."""

    def __init__(self, engines: bool = False) -> None:
        self.servers = (RankServer(engines), RankServer(engines))

    def launch(
        self,
        script: Path,
        processes: int,
        arguments: Sequence[str],
        log: Path,
        grace_s: float = 0.0,
        **environment: str,
    ) -> Ranks:
        """Start `script` on so many ranks; alone, one has no variables of a launcher. `grace_s`: see `Ranks`."""
        for server in self.servers[:processes]:
            server.begin()
        members = []
        for rank in range(processes):
            server = self.servers[rank % 2]
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            variables = {name: str(value) for name, value in names.items()} if processes > 1 else {}
            members.append((server, server.fork(script, arguments, {**environment, **variables}, log)))
        return Ranks(members, grace_s)

    def alone(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], number: int = 0, host: int = 0
    ) -> Ranks:
        """One process, as `python command`: a script, or `-m` and the module of a launcher, which forks its ranks
        (`forked_launch`). `number`: of the server. `host`: see `RankServer.fork`."""
        server, launches = self.servers[number % 2], command[0] == "-m"
        script, *arguments = (str(HERE / "forked_launch.py"), *command[1:]) if launches else command
        return Ranks([(server, server.fork(Path(script), arguments, environment, log, host, launches))])

    def close(self) -> None:
        for server in self.servers:
            server.close()


class Ranks:
    """As `subprocess.Popen`, of all ranks of a launch together: one that fails ends the others.

    Args:
        grace_s: that the others have to end by themselves, from when the first failure was seen.
    """

    def __init__(self, members: Sequence[tuple[RankServer, int]], grace_s: float = 0.0) -> None:
        self.members, self.grace_s = members, grace_s
        self._end_at: float | None = None

    def poll(self) -> int | None:
        """The first exit status that is not 0, or 0 if all have ended well; `None` while one runs."""
        for server in {server for server, _ in self.members}:
            server.replies(0)
        codes = [server.codes.get(pid) for server, pid in self.members]
        failed = [code for code in codes if code]
        if failed and self._end_at is None:
            self._end_at = time.monotonic() + self.grace_s
        if None in codes and (self._end_at is None or time.monotonic() < self._end_at):
            return None
        self.kill()
        return failed[0] if failed else 0

    def wait(self, timeout_s: float | None = None) -> int:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("ranks", timeout_s or 0.0)
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        """End the ranks that still run, each with its session."""
        for server, pid in self.members:
            if pid not in server.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        for server, pid in self.members:
            while pid not in server.codes:
                server.replies(None)
