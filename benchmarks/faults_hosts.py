"""Faults of hosts and links for `benchmarks/faults.py`: two hosts made by `tests/hosts`, one process on each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import HostsJob
from namespaces import Hosts, missing


if TYPE_CHECKING:
    from faults import Row

LIMIT_S = 240.0
START_S = 900.0
DROP_S = 10.0


def run_hosts(row: Row, work: Path) -> Row:
    """Let one fault happen to two hosts, and resume on both; the checkpoints of a lost host are lost with it, so then
    nothing is resumed."""
    from faults import ROOT, equal, sentence

    if reason := missing():
        row.note = reason
        return row
    folder = work / row.key.replace("/", "-").replace(" ", "-")
    options = {"plan": "flatten", "per_device_train_batch_size": 4, "num_ppo_epochs": 1, "response_length": 8}
    options |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    out = folder / f"{time.time_ns()}"
    with Hosts(out) as hosts:

        def launch(fault: str, name: str, resume: str | None = None) -> HostsJob:
            settings = {"out": str(out / "out" / "run"), "notes": str(out / "out" / "fault.json"), "fault": fault}
            settings |= {"moment": row.moment, "options": options, "to": None, "resume": resume}  # type: ignore[dict-item]
            script = [str(ROOT / "benchmarks" / "faults_job.py"), json.dumps(settings)]
            return HostsJob(hosts, script, name=name)

        job = launch(row.fault, "fault")
        note, deadline = hosts[1].out / "fault.json", time.monotonic() + START_S
        while not note.exists() and None in [p.poll() for p in job.processes] and time.monotonic() < deadline:
            time.sleep(0.1)
        if not note.exists():
            row.note, row.message = "the fault did not happen", job.text()[-400:]
            return row
        begun = time.time()
        if row.fault == "host-lost":
            hosts[1].kill()
        else:
            hosts.link(1, up=False)
            if row.fault == "link-drop":
                time.sleep(DROP_S)
                hosts.link(1, up=True)
        living = [hosts[0]] if row.fault == "host-lost" else list(hosts)
        deadline = time.monotonic() + LIMIT_S
        while any(host.members() for host in living) and time.monotonic() < deadline:
            time.sleep(0.1)
        row.seconds = round(time.time() - begun, 1) if time.monotonic() < deadline else None
        survived = row.fault == "link-drop" and (hosts[0].out / "run" / "log.json").exists()
        row.message = "the run went on" if survived else sentence(row, job.text())
        row.cause_named = bool(row.message)
        row.left = [
            f"{host.name}: {path.name}" for host in living for path in host.tmp.iterdir() if path.name != "cache"
        ]
        finished = hosts[0].out / "run"
        if row.fault == "host-lost":
            row.note = "the host's checkpoints are lost with it"
            return row
        if not survived:
            hosts.link(1, up=True)
            if None in launch("", "resumed", "auto").wait(START_S):
                row.note = "resuming did not end"
                return row
        with Hosts(out / "whole") as others:
            settings = {"out": str(out / "whole" / "out" / "run"), "notes": "", "fault": "", "moment": row.moment}
            settings |= {"options": options, "to": None, "resume": None}  # type: ignore[dict-item]
            HostsJob(others, [str(ROOT / "benchmarks" / "faults_job.py"), json.dumps(settings)]).wait(START_S)
            try:
                row.note = equal(finished, others[0].out / "run")
            except OSError as error:
                row.note = str(error)
        row.resumed_equal = not row.note
    return row
