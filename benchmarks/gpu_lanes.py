"""Runs parts of a check side by side, each with a time limit and as ranks that may share one GPU. What the parts are is
in `gpu_parts`; what is kept of them, in `check_gpu`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_realloc.common.ports import reserve_port


ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
MARK = "TRL_REALLOC_CHECK_GPU"
NUMBERS = "{numbers}"  # in a command: the JSON file for what it measures
GRACE_S = 20.0  # in which the other ranks end after one has ended by an error


@dataclass(frozen=True)
class Part:
    """One thing to check.

    Args:
        name: short, and the only one of its kind.
        claim: what holds if it passes.
        command: what is run, without the interpreter.
        ranks: processes of one job; they share GPUs where there are fewer.
        gpus: the least that it needs.
        limit_s: seconds after which it is ended with all that it has started.
        environment: additional variables.
        vllm: whether it starts a vLLM engine.
        alone: whether nothing may run beside it, because it measures times.
        says: what a rank prints of a job that has to fail; empty for one that has to end well.
        rehearsed_on: `sim` (the stand-in device) or `cpu`.
        rehearsal: arguments that its command has in a rehearsal alone.
    """

    name: str
    claim: str
    command: tuple[str, ...]
    ranks: int = 1
    gpus: int = 1
    limit_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    vllm: bool = False
    alone: bool = False
    says: str = ""
    rehearsed_on: str = "sim"
    rehearsal: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Args:
        outcome: `passed`, `failed`, or `limit` if its time limit ended it.
        seconds: from the start of its first process to the end of its last.
        numbers: what it measured.
        tail: the last lines of each rank; empty where it passed.
    """

    outcome: str
    seconds: float
    numbers: dict[str, Any]
    tail: str = ""


def rank_environment(rank: int, ranks: int, gpus: int, port: int) -> dict[str, str]:
    """The variables of one rank of a job on this host.

    NCCL refuses two ranks on one GPU of one host. Where there are fewer GPUs than ranks, each rank says that it is on a
    host of its own, and they send by sockets over loopback: kernels, streams, order and waiting are those of several
    GPUs, and times mean nothing.

    Args:
        gpus: of this machine; 0 where none is used.
    """
    own: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if 0 < gpus < ranks:
        own |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        own |= {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_TORCH_DEVICE": f"cuda:{rank % gpus}"}
    return {name: str(value) for name, value in own.items()}


def members(mark: str) -> list[int]:
    """The processes that have this mark in their environment, engines and their workers included."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


class Running:
    """A part under way.

    Args:
        gpus: of this machine; 0 for a rehearsal.
        folder: for its logs and files.
    """

    def __init__(self, part: Part, gpus: int, folder: Path, threads: int) -> None:
        self.part, self.folder = part, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.numbers = folder / "numbers.json"
        self.numbers.unlink(missing_ok=True)
        self.mark, self.start = f"{folder} {time.time_ns()}", time.monotonic()
        self.failed_at: float | None = None
        port, _ = reserve_port()
        paths = [ROOT, TESTS, TESTS / "trainer", TESTS / "multiprocess"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "STANDIN_FOLDER": str(folder),
            "TRL_REALLOC_TEST_DEVICE": "cuda" if gpus else part.rehearsed_on,
            MARK: self.mark,
        }
        if not gpus:
            environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
        if not part.alone:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [word.replace(NUMBERS, str(self.numbers)) for word in part.command]
        command = [sys.executable, *command, *(() if gpus else part.rehearsal)]
        self.processes = []
        for rank in range(part.ranks):
            own = rank_environment(rank, part.ranks, gpus, port) if part.ranks > 1 else {}
            with log_of(folder, rank).open("w") as log:
                process = subprocess.Popen(
                    command,
                    env={**environment, **part.environment, **own},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.processes.append(process)

    def poll(self, most_s: float = float("inf")) -> Outcome | None:
        """How it ended; `None` while it runs. A rank that ends by an error ends the others, after some seconds in which
        they may say why they end.

        Args:
            most_s: seconds that it may take, if that is less than its limit.
        """
        codes, now = [process.poll() for process in self.processes], time.monotonic()
        if any(codes) and self.failed_at is None:
            self.failed_at = now
        over = now - self.start > min(self.part.limit_s, most_s)
        late = self.failed_at is not None and now - self.failed_at > GRACE_S
        if None in codes and not over and not late:
            return None
        self.end()
        texts = [log_of(self.folder, rank).read_text(errors="replace") for rank in range(self.part.ranks)]
        numbers = {**counts(texts[0]), **(json.loads(self.numbers.read_text()) if self.numbers.is_file() else {})}
        passed = not any(codes)
        if self.part.says:
            passed = all(codes) and any(re.search(self.part.says, text) for text in texts)
            if "failed_at" in numbers:
                numbers["ended_after_s"] = round(time.time() - numbers.pop("failed_at"), 1)
        outcome = "passed" if passed and None not in codes else "limit" if over else "failed"
        tail = "" if outcome == "passed" else "\n".join(f"rank {r}:\n{last(text)}" for r, text in enumerate(texts))
        return Outcome(outcome, round(now - self.start, 1), numbers, tail)

    def end(self) -> None:
        """Kill what still runs of it."""
        for pid in members(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()


def log_of(folder: Path, rank: int) -> Path:
    """The file of what a rank prints."""
    return folder / f"rank-{rank}.txt"


def counts(text: str) -> dict[str, int]:
    """How many tests passed, failed and were skipped, from the last line of pytest."""
    found = re.findall(r"^.*\bin \d+\.\d+s.*$", text, re.MULTILINE)
    return {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped)", found[-1] if found else "")}


def last(text: str, lines: int = 15) -> str:
    return "\n".join(text.splitlines()[-lines:])


def next_part(waiting: Sequence[Part], running: Sequence[Part], lanes: int) -> Part | None:
    """The part that starts now, if one may. One part with a vLLM engine runs at a time, and it has a lane as long as
    one waits, because these take longest together. Parts that run alone come last.

    Args:
        waiting: in the order in which they are to start.
        lanes: how many parts may run at a time.
    """
    if len(running) >= lanes or any(part.alone for part in running):
        return None
    together = [part for part in waiting if not part.alone]
    if not together:
        return waiting[0] if waiting and not running else None
    if lanes == 1:
        return together[0]
    engines = [part for part in together if part.vllm]
    if engines and not any(part.vllm for part in running):
        return engines[0]
    return next((part for part in together if not part.vllm), None)


def run(
    parts: Sequence[Part],
    start: Callable[[Part], Running],
    record: Callable[[Part, Outcome], None],
    lanes: int,
    seconds: float,
) -> list[Part]:
    """Run the parts, and return those that there was no time for: they were not started, or were ended with the run.

    Args:
        record: called as each part ends.
        seconds: of the whole run.
    """
    waiting, running, left = list(parts), list[Running](), list[Part]()
    deadline = time.monotonic() + seconds
    try:
        while running or (waiting and time.monotonic() < deadline):
            while time.monotonic() < deadline and (part := next_part(waiting, [each.part for each in running], lanes)):
                waiting.remove(part)
                running.append(start(part))
            for each in list(running):
                outcome = each.poll(deadline - each.start)
                if outcome is None:
                    continue
                running.remove(each)
                if outcome.outcome == "limit" and time.monotonic() >= deadline:
                    left.append(each.part)
                else:
                    record(each.part, outcome)
            time.sleep(0.1)
    finally:
        for each in running:
            each.end()
    return [*left, *waiting]
