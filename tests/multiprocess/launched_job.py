"""`Job`: one launch of a script on several ranks, with a time limit, that leaves no process behind.

The fixtures that start and end jobs are in `conftest`, which no file imports: other folders have a `conftest` too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from limits import patience
from ports import free_port
from ranks import HERE, MARK_FILE, SEARCHED, Ranks, RankServers


def slowness() -> float:
    """How many times slower this machine is now than the one that time limits are written for, when that is idle."""
    start = time.perf_counter()
    sum(i * i for i in range(1_000_000))
    return max(1.0, (time.perf_counter() - start) / 0.034)


def variables_of(config: Path, processes: int) -> dict[str, str]:
    """What `accelerate launch` adds to its ranks' environment for a config with DeepSpeed, by its own functions."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    options = ["--config_file", str(config), "--num_processes", str(processes), "--dynamo_backend", "no", "script.py"]
    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(launch.launch_command_parser().parse_args(options))
    made = prepare_deepspeed_cmd_env(*launcher.call_args.args)[1]
    return {name: value for name, value in made.items() if name.startswith("ACCELERATE_")}


def _launcher(processes: int, config: Path | None, restarts: int) -> list[str]:
    """Python's arguments before the script's name."""
    if restarts:
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        return [*torchrun, "--max_restarts", str(restarts), "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    if processes == 1 and config is None:
        return []
    accelerate = ["-m", "accelerate.commands.launch", "--main_process_port", str(free_port())]
    alone = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
    accelerate += ["--config_file", str(config)] if config else alone
    return [*accelerate, "--num_processes", str(processes), "--dynamo_backend", "no"]


class Job:
    """One launch of a script in `accelerate launch`, or alone, with one process; or in `torchrun`, which starts it
    again so many times (`restarts`); or by `servers`, with `grace_s` of `Ranks`. With `servers` and `launched` the
    launcher is forked, and forks its ranks. All of it is marked by an environment variable, by which whatever it left
    running is found; what servers have forked by a file that it has in memory."""

    def __init__(
        self,
        folder: Path,
        script: str,
        processes: int,
        options: dict[str, Any],
        config: Path | None,
        restarts: int = 0,
        servers: RankServers | None = None,
        grace_s: float = 0.0,
        launched: bool = False,
    ) -> None:
        self.folder, self.mark = folder, f"{folder}"
        # what is not about the planner runs under a preset: measuring takes a while, and chooses what it likes
        environment = {
            "TRL_REALLOC_PLAN": "flatten",
            **os.environ,
            "PYTHONPATH": SEARCHED,
            "TRL_REALLOC_TEST_JOB": self.mark,
            "DS_ACCELERATOR": "cpu",
        }
        self.log = (folder / "log.txt").open("w+")
        log, arguments = Path(self.log.name), [str(folder), json.dumps(options)]
        self.process: subprocess.Popen[bytes] | Ranks
        if servers is not None:
            environment[MARK_FILE] = str(folder / "mark")
            (folder / "mark").write_bytes(b"\0")
        if servers is not None and not launched:
            environment |= variables_of(config, processes) if config else {}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if processes > 1 else {}
            self.process = servers.launch(HERE / script, processes, arguments, log, grace_s, **environment)
            return
        command = [*_launcher(processes, config, restarts), str(HERE / script), *arguments]
        if servers is not None:
            self.process = servers.alone(command, log, environment)
            return
        self.process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """Of the launcher, or of the first rank."""
        return self.process.members[0][1] if isinstance(self.process, Ranks) else self.process.pid

    def wait(self, timeout_s: float) -> int:
        timeout_s = patience(timeout_s)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the job did not end within {timeout_s} s:\n{self.text()[-3000:]}")

    def text(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def problem(self) -> str:
        """Of the output, the first traceback and the end: the rank that failed first ends the others, whose tracebacks
        follow."""
        text = self.text()
        first = text.find("Traceback")
        if first < 0 or len(text) - first <= 6000:
            return text[-6000:]
        return f"{text[first:][:3000]}\n[...]\n{text[-3000:]}"

    def members(self) -> dict[int, str]:
        """The living processes of this job by pid, with their command lines and names."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    process = Path("/proc", entry)
                    if self._is_of(process):
                        # a fork has the command line of its parent, but may have a name of its own
                        names = (process / "cmdline").read_text().replace("\0", " "), (process / "comm").read_text()
                        found[int(entry)] = " ".join(names)
        return found

    def _is_of(self, process: Path) -> bool:
        if f"TRL_REALLOC_TEST_JOB={self.mark}\0".encode() in (process / "environ").read_bytes():
            return True
        return isinstance(self.process, Ranks) and f"{self.folder / 'mark'}\n" in (process / "maps").read_text()

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + patience(seconds)
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.2)
        return not self.members()

    def kill(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(self.process, Ranks):
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def folder_of_run(folder: Path, script: str, processes: int, options: dict[str, Any], servers: RankServers) -> Path:
    """What the fixture `run` returns, for a fixture of a whole module: the run's folder, which is `folder`."""
    job = Job(folder, script, processes, options, None, servers=servers)
    try:
        assert job.wait(200 * slowness()) == 0, job.problem()
    finally:
        job.kill()
        job.log.close()
    return job.folder
