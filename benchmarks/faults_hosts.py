"""Faults of hosts, of the link between them, and of one host's processes, for `benchmarks/faults.py`: two hosts made by
`tests/hosts`, one process and disks of its own on each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import HostsJob
from namespaces import Host, Hosts, missing


if TYPE_CHECKING:
    from faults_table import Row

LIMIT_S = 240.0
START_S = 900.0
DROP_S = 10.0
NEWS_S = 1.0  # the call that the fault meets has lasted so long: what a rank does is told to the others in 0.2 s
FROM_OUTSIDE = ("host-lost", "link-down", "link-drop")
ON_FIRST_HOST = ("stop",)  # the faults of a process that happen on the first host; the others on the second
REFUSED = r"CheckpointError: (no checkpoint in .* is whole: .*)"


def run_hosts(row: Row, work: Path) -> Row:
    """Let one fault happen to two hosts, and resume on both. A host that was lost comes back with empty disks."""
    from faults import equal, sentence

    if reason := missing():
        row.note = reason
        return row
    reference = _reference(row, work)
    out = work / re.sub(r"\W+", "-", row.key) / f"{time.time_ns()}"
    with Hosts(out) as hosts:
        job = _launch(hosts, row, row.fault)
        begun = _await_fault(hosts, job)
        if begun is None:
            row.note, row.message = "the fault did not happen", job.text()[-400:]
            return row
        if row.fault in FROM_OUTSIDE:
            begun = _happen(hosts, row.fault)
        living = [hosts[0]] if row.fault == "host-lost" else list(hosts)
        ended = _wait(lambda: not any(host.members() for host in living), LIMIT_S)
        row.seconds = round(time.time() - begun, 1) if ended else None
        survived = row.fault == "link-drop" and (hosts[0].out / "run" / "log.json").exists()
        row.message = "the run went on" if survived else sentence(row, job.text())
        row.cause_named = bool(row.message)
        for host in living:
            host.end()
        row.left = [left for host in living for left in _leftovers(host)]
        if row.fault == "host-lost":
            hosts.replace(1)
        elif row.fault == "link-down":
            hosts.link(1, up=True)
        if not survived:
            again = _launch(hosts, row, "", name="resumed", resume="auto")
            if None in again.wait(START_S):
                row.note = "resuming did not end"
                return row
            refusal = re.search(REFUSED, again.text())
            if row.fault == "host-lost" and refusal:  # what the lost disk held is nowhere else
                row.resumed_equal, row.note = None, f"resuming is refused: {refusal[1]}"
                return row
        finished = hosts[0].out / "run"
        row.note = equal(finished, reference) if (finished / "log.json").exists() else "resuming failed"
        row.resumed_equal = not row.note
    return row


def _reference(row: Row, work: Path) -> Path:
    """The output folder of the run that nothing happens to, on the first host."""
    folder = work / "reference-two-hosts"
    finished = folder / "host-0" / "out" / "run"
    if not (finished / "log.json").exists():
        with Hosts(folder) as hosts:
            job = _launch(hosts, row, "")
            job.wait(START_S)
            if not (finished / "log.json").exists():
                raise SystemExit(f"the run without a fault failed: {job.text()[-3000:]}")
    return finished


def _launch(hosts: Hosts, row: Row, fault: str, *, name: str = "fault", resume: str | None = None) -> HostsJob:
    from faults import ROOT
    from faults_table import PLANS

    run: dict[str, Any] = {"plan": PLANS[row.plan]["plan"], "per_device_train_batch_size": 4, "num_ppo_epochs": 1}
    run |= {"response_length": 8, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    out = hosts.folder / "out"
    settings: dict[str, Any] = {"out": str(out / "run"), "notes": str(out / "fault.json"), "fault": fault}
    settings |= {"moment": row.moment, "options": run, "to": None, "resume": resume}
    settings["rank"] = 0 if fault in ON_FIRST_HOST else None
    script: Sequence[str] = [str(ROOT / "benchmarks" / "faults_job.py"), json.dumps(settings)]
    return HostsJob(hosts, script, name=name)


def _wait(until: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := until()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def _await_fault(hosts: Hosts, job: HostsJob) -> float | None:
    """When the fault happened inside the job, or was due from outside; `None` if the job ended before."""
    notes = [host.out / "fault.json" for host in hosts]
    _wait(lambda: any(n.exists() for n in notes) or None not in [p.poll() for p in job.processes], START_S)
    written = [float(json.loads(note.read_text())["time"]) for note in notes if note.exists()]
    return written[0] if written else None


def _happen(hosts: Hosts, fault: str) -> float:
    time.sleep(NEWS_S)
    begun = time.time()
    if fault == "host-lost":
        hosts[1].kill()
    else:
        hosts.link(1, up=False)
        if fault == "link-drop":
            time.sleep(DROP_S)
            hosts.link(1, up=True)
    return begun


def _leftovers(host: Host) -> list[str]:
    """Temporary files, shared memory and listening ports that a job left on a host."""
    left = [f"tmp/{path.name}" for path in host.tmp.iterdir() if path.name != "cache"]
    left += [f"/dev/shm/{name}" for name in host.sh("ls -A /dev/shm").split()]
    for table in ("tcp", "tcp6"):
        for line in Path("/proc", str(host.init), "net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            left += [f"port {int(local.rpartition(':')[2], 16)}"] if state == "0A" else []
    return [f"{host.name}: {each}" for each in left]
