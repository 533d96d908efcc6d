"""Saving and resuming over two hosts that each have a disk of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import HostsJob
from namespaces import Hosts


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]
SCRIPT = str(Path(__file__).parent / "checkpoints.py")
CRITIC = "value_model/optimizer.pt"


def _run(hosts: Hosts, name: str, runs: dict[str, Any]) -> None:
    job = HostsJob(hosts, [SCRIPT, str(hosts.folder / "out"), json.dumps(runs)], name=name)
    assert job.wait(300) == [0, 0], job.text()[-6000:]


def _trained(hosts: Hosts, name: str) -> tuple[bytes, bytes, list[dict[str, float]]]:
    """A finished run's policy, its critic, and the logs of its updates less what time makes differ."""
    first, second = (host.out / name / "checkpoint-3" for host in hosts)
    logs = json.loads((first / "trainer_state.json").read_text())["log_history"]
    rows = [{key: value for key, value in row.items() if key.startswith(("objective", "loss"))} for row in logs]
    return (first / "model.safetensors").read_bytes(), (second / "value_model/model.safetensors").read_bytes(), rows


def test_hosts_with_a_disk_each_resume_from_the_newest_checkpoint_that_is_whole_among_them(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts()
    first, second = hosts
    _run(hosts, "first", {"run": None})
    whole = _trained(hosts, "run")
    assert not (first.out / "run/checkpoint-3" / CRITIC).exists()
    assert not (second.out / "run/checkpoint-3" / "optimizer.pt").exists()
    for name in ("lost", "damaged"):
        for host in hosts:
            shutil.copytree(host.out / "run", host.out / name)
    shutil.rmtree(second.out / "lost")
    for name in ("run", "damaged"):  # half of the only copy
        path = second.out / name / "checkpoint-3" / CRITIC
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    named = str(hosts.folder / "out" / "damaged" / "checkpoint-3")
    _run(hosts, "again", {"lost": "auto", "damaged": named, "run": "auto"})
    assert _trained(hosts, "run") == whole, "as if it had not been stopped"
    assert (first.out / "run/checkpoint-2" / CRITIC).is_file(), "handed over"
    for host in hosts:
        said = json.loads((host.out / "said.json").read_text())
        assert set(said) == {"lost", "damaged"}
        assert "no checkpoint in" in said["lost"] and f"{CRITIC} is missing" in said["lost"]
        assert f"cannot resume from {named} ({CRITIC} has " in said["damaged"], said["damaged"]
    log = (hosts.folder / "again-0.log").read_text()
    assert "resuming from" in log and "checkpoint-2; passed over" in log
