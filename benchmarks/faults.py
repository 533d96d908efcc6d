"""Faults, one by one, in small runs under several plans: what ends them, how fast, what is said and what is left.

    python benchmarks/faults.py --json benchmarks/results/faults.json [--only PATTERN] [--list]

Rows are merged into the file, so a table can be made in slices; `--only` is a regular expression over
"plan/fault/moment". Faults of disks, hosts and links need root (mounts and network namespaces).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / place) for place in ("trainer", "multiprocess", "hosts"))]

import result_file  # noqa: E402
import shared_memory  # noqa: E402
from faults_table import CAUSES, PLANS, READ, Row, rows  # noqa: E402

from trl_realloc.common.ports import reserve_port  # noqa: E402
from trl_realloc.trainer.checkpoint.resuming import newest_whole  # noqa: E402


LIMIT_S = 240.0  # a job that still runs so long after its fault has not noticed it
START_S = 900.0  # until the fault, or the end of a run without one; the machine may be busy
MARK = "TRL_REALLOC_FAULTS_JOB"


def start(command: list[str], environment: dict[str, str], log: Path) -> Any:
    """A process in a session of its own. The test of these faults forks one."""
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


class Job:
    """One launch, with a temporary folder and an output folder of its own."""

    def __init__(self, folder: Path, row: Row, out: Path, *, fault: bool, resume: str | None = None) -> None:
        name = f"{'fault' if fault else 'whole'}-{'resumed' if resume else 'first'}"
        self.tmp, self.notes, log = folder / "tmp", folder / "fault.json", folder / f"{name}.log"
        self.mark = f"{folder}/{time.time_ns()}"
        self.tmp.mkdir(parents=True, exist_ok=True)
        setup = PLANS[row.plan]
        options = {
            "plan": setup["plan"],
            "per_device_train_batch_size": 4,
            "num_ppo_epochs": 1,
            "response_length": 8,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_total_limit": 2,
            **setup.get("options", {}),
        }
        if "algorithm" in setup:
            options = {"max_steps": 4, **setup["options"], "plan": setup["plan"]}
        settings = {
            "out": str(out),
            "notes": str(self.notes),
            "fault": row.fault if fault else "",
            "moment": row.moment,
            "options": options,
            "to": setup.get("to"),
            "algorithm": setup.get("algorithm", "ppo"),
            "mark": f"{MARK}={self.mark}",
            "resume": resume,
        }
        self.port, _ = reserve_port()
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(self.port)]
        command += ["--multi_gpu"] if setup["processes"] > 1 else []
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["--num_processes", str(setup["processes"]), str(ROOT / "benchmarks" / "faults_job.py")]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.tmp),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRL_REALLOC_MEASURE": "first",
            "TRL_REALLOC_CACHE": str(
                folder / "cache" if setup["plan"] == "auto" and fault else folder.parent / "cache"
            ),
            MARK: self.mark,
        }
        self.log = log
        self.process = start([*command, json.dumps(settings)], environment, log)

    def members(self) -> list[int]:
        """The processes of this job, by their environment; forked ones by a file of the mark's name in their memory."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                process = Path("/proc", entry)
                in_environment = f"{MARK}={self.mark}\0".encode() in (process / "environ").read_bytes()
                if in_environment or f"{self.mark}\n" in (process / "maps").read_text():
                    found.append(int(entry))
        return found

    def await_fault(self) -> float | None:
        """When the fault happened; `None` if the job ended before."""
        deadline = time.monotonic() + START_S
        while not self.notes.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return float(json.loads(self.notes.read_text())["time"])

    def await_end(self, limit_s: float) -> bool:
        """Whether nothing of the job runs within so many seconds. What still runs then is killed."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.process.poll()  # a launcher that has ended is no member, but a zombie until it is waited for
            if not self.members():
                self.process.wait()
                return True
            time.sleep(0.1)
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        return False

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def leftovers(job: Job, shared_before: set[str]) -> list[str]:
    """Shared memory, temporary files, locks and ports that a job left."""
    left = [f"/dev/shm/{name}" for name in shared_memory.left(shared_before)]
    left += [str(path.relative_to(job.tmp)) for path in sorted(job.tmp.iterdir())]
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    left += [str(path) for path in extensions.rglob("lock")] if extensions.is_dir() else []
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", job.port))
        except OSError:
            left.append(f"port {job.port}")
    return left


def sentence(row: Row, text: str) -> str:
    """The line that names rank, host, call and cause; an empty string where there is none."""
    call = {
        "save": "saving|checkpoint-3",
        "start": "starting|loading",
        "measuring": "starting|measuring|of update",
        "replan": "move to",
        "tool": "actor.generate|(of|after) update",
        "reset": "of update",
    }
    where = call.get(row.moment, re.escape(row.moment.replace("reallocation", "actor.generate")))
    if row.fault.startswith(("launcher", "all")):  # it ends all ranks, whatever each of them does
        where = "of update|saving"
    for line in text.splitlines():
        needs = [r"rank ?\d|\(rank \d", r"host", CAUSES[row.fault], where]
        if all(re.search(need, line) for need in needs):
            return re.sub(r"^\[rank\d\]:? ?", "", line)[:400]
    return ""


def outcome(out: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return json.loads((out / "log.json").read_text()), load_file(out / "weights.safetensors")


def equal(one: Path, other: Path, tolerance: float = 0.0) -> str:
    """What differs between two finished runs; an empty string where nothing does.

    Args:
        tolerance: largest difference, relative above 1; by default none at all.
    """
    (logs, weights), (logs_2, weights_2) = outcome(one), outcome(other)
    by_step = {row["episode"]: row for row in logs_2}
    for row in logs:
        other_row = by_step[row["episode"]]
        names = [
            name
            for name, number in row.items()
            if not name.startswith("realloc/")
            and abs(number - other_row.get(name, float("inf"))) > tolerance * max(1.0, abs(number))
        ]
        if names:
            return f"logs at episode {row['episode']}: {', '.join(names[:4])}"
    differing = [
        name for name in weights if not torch.allclose(weights[name], weights_2[name], rtol=tolerance, atol=tolerance)
    ]
    return f"weights: {', '.join(differing[:3])}" if differing else ""


def run(row: Row, work: Path, reference: Path | None) -> Row:
    """Let one fault happen, and resume."""
    folder = work / re.sub(r"\W+", "-", row.key)
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "disk" / "out"
    out.mkdir(parents=True)
    disk = folder / "disk"
    if row.fault.startswith("disk"):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
        out.mkdir()
    try:
        shared = shared_memory.names()
        job = Job(folder, row, out, fault=True)
        at = job.await_fault()
        if at is not None and row.fault == "disk-readonly":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        ended = job.await_end(LIMIT_S if at else 1.0)
        row.seconds = round(time.time() - at, 1) if at and ended else None
        row.note, row.exit = "" if at else "the fault did not happen", job.process.poll()
        whole = newest_whole(out)
        row.saved = whole.name if whole is not None else ""
        went_on = at is not None and (out / "log.json").exists()
        saves = PLANS[row.plan]["options"].get("enable_jit_checkpoint") if "options" in PLANS[row.plan] else False
        if went_on:
            row.message = "the run went on"
        elif saves and row.fault != "all-termkill":
            row.message = f"the run saved {row.saved} and ended" if row.saved else ""
        else:
            row.message = sentence(row, job.text())
        row.cause_named, row.left = bool(row.message), leftovers(job, shared)
        if row.fault == "disk-readonly":
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        (disk / "filler").unlink(missing_ok=True)
        if went_on and row.fault in READ:
            row.resumed_equal = None  # the policy has read of the fault
        elif went_on and reference is not None:
            row.note = equal(out, reference)
            row.resumed_equal = not row.note
        elif at and reference is not None:
            again = Job(folder, row, out, fault=False, resume="auto")
            again.await_end(START_S)
            # The run that goes on does not move to the other plan again, and turns are drawn beside others at other
            # times, so it rounds differently
            tolerance = (
                1e-4 if row.plan in ("replan", "grpo, tools", "grpo, tools ahead", "grpo, environments") else 0.0
            )
            row.note = equal(out, reference, tolerance) if (out / "log.json").exists() else "resuming failed"
            row.resumed_equal = not row.note
    finally:
        if row.fault.startswith("disk"):
            subprocess.run(["umount", "-l", str(disk)], check=False)
    return row


def make_reference(row: Row, work: Path) -> Path:
    """The run of a plan that is never stopped."""
    folder = work / f"reference-{re.sub(r'[^a-z0-9]+', '-', row.plan)}"
    out = folder / "out"
    if not (out / "log.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        out.mkdir(parents=True)
        job = Job(folder, row, out, fault=False)
        job.await_end(START_S)
        if not (out / "log.json").exists():
            print(job.text()[-3000:], file=sys.stderr)
            raise SystemExit(f"the run without a fault failed; see {job.log}")
    return out


def print_table(done: list[dict[str, Any]]) -> None:
    print("| plan | fault | moment | seconds | exit | saved | cause named | left | resumed equal |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in done:
        cells = [row["plan"], row["fault"], row["moment"], row["seconds"]]
        cells += [row.get("exit"), row.get("saved"), row["cause_named"]]
        equal = "-" if row["resumed_equal"] is None else row["resumed_equal"]
        print("|", " | ".join(map(str, [*cells, "; ".join(row["left"]) or "nothing", equal])), "|")
    over = sum(row["seconds"] is not None and row["seconds"] <= 60 for row in done)
    named, clean = sum(row["cause_named"] for row in done), sum(not row["left"] for row in done)
    same = sum(row["resumed_equal"] is True for row in done)
    print(f"\n{len(done)} faults: {over} over within 60 s, {named} with their cause, {clean} left nothing,", end=" ")
    print(f"{same} resumed equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="rows are merged into this file")
    parser.add_argument("--only", default="", help="a regular expression over plan/fault/moment")
    parser.add_argument("--missing", action="store_true", help="only what the file lacks or what went wrong in it")
    parser.add_argument("--list", action="store_true", help="print the chosen faults and do nothing")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "trl_realloc_faults")
    given = parser.parse_args()
    kept: dict[str, dict[str, Any]] = {}
    if given.json and given.json.exists():
        kept = {Row(r["plan"], r["fault"], r["moment"]).key: r for r in json.loads(given.json.read_text())["rows"]}

    def good(key: str) -> bool:
        r = kept.get(key)
        return (
            r is not None
            and r["seconds"] is not None
            and r["cause_named"]
            and not r["left"]
            and r["resumed_equal"] is not False
        )

    chosen = [r for r in rows() if re.search(given.only, r.key) and not (given.missing and good(r.key))]
    if given.list:
        print("\n".join(row.key for row in chosen))
        return
    for row in chosen:
        if PLANS[row.plan].get("hosts"):
            from faults_hosts import run_hosts

            done = run_hosts(row, given.work)
        else:
            done = run(row, given.work, make_reference(row, given.work))
        if given.json and given.json.exists():  # another slice may have written to it
            kept = {Row(r["plan"], r["fault"], r["moment"]).key: r for r in json.loads(given.json.read_text())["rows"]}
        kept[row.key] = asdict(done)
        print(json.dumps(kept[row.key]), file=sys.stderr, flush=True)
        if given.json:
            machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "torch": torch.__version__}
            about = {"commit": result_file.commit(), "machine": machine}
            result_file.write(given.json, {**about, "rows": list(kept.values())})
    print_table(list(kept.values()))


if __name__ == "__main__":
    main()
