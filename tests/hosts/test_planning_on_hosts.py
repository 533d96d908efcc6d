"""`plan: auto` over two hosts: the network between them is seen as it is at each start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import HostsJob
from namespaces import Hosts


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]
SLOW = 100e6 / 8  # bytes/s


def test_measurements_made_over_one_network_are_not_used_on_another(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(rate=None)
    job = HostsJob(hosts, [str(Path(__file__).parent / "planned.py"), str(hosts.folder / "out")])
    deadline = time.monotonic() + 300
    while not (hosts[0].out / "before.json").exists():
        assert job.processes[0].poll() is None and time.monotonic() < deadline, job.text()[-6000:]
        time.sleep(0.1)
    hosts.shape("100mbit")
    for host in hosts:
        (host.out / "changed").touch()
    assert job.wait(300) == [0, 0], job.text()[-6000:]
    before, after = (json.loads((hosts[0].out / f"{name}.json").read_text()) for name in ("before", "after"))
    assert (before["measured"], after["measured"]) == (1, 1), "models are measured once"
    assert 0.4 * SLOW < after["bandwidth"] < 1.5 * SLOW
    assert before["bandwidth"] > 2 * after["bandwidth"]
    assert after["about"]["network"] == "alpha at 10.77.0.1, beta at 10.77.0.2"
