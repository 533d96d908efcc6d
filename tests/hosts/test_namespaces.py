"""Hosts made by namespaces are hosts: apart in all but the link, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import patience
from namespaces import Hosts


pytestmark = pytest.mark.multiprocess
REACH = "exec 3<>/dev/tcp/10.77.0.1/1"  # nothing listens at port 1: a host that answers refuses


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(10)
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _reaches(hosts: Hosts) -> bool:
    """Whether the second host hears from the first."""
    tried = hosts[1].enter(["timeout", "1", "bash", "-c", REACH])
    return "refused" in subprocess.run(tried, capture_output=True, text=True, check=False).stderr


def test_two_hosts_share_the_link_and_nothing_else(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts()
    first, second = hosts[0], hosts[1]
    first.sh(f"touch /dev/shm/mine {hosts.folder}/tmp/mine {hosts.folder}/out/mine")
    assert not second.sh(f"ls /dev/shm {hosts.folder}/tmp {hosts.folder}/out | grep mine || true")
    assert (first.out / "mine").exists() and not (second.out / "mine").exists()
    identity = "hostname; cat /proc/sys/kernel/random/boot_id"
    assert not set(first.sh(identity).split()) & set(second.sh(identity).split())
    _wait(lambda: _reaches(hosts))
    hosts.link(1, up=False)
    assert not _reaches(hosts)
    hosts.link(1, up=True)
    _wait(lambda: _reaches(hosts))
    assert "10.77.0" not in subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout


def test_a_host_is_lost_with_all_that_runs_on_it_and_the_other_is_not(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts()
    with (hosts.folder / "log").open("w") as log:
        jobs = [host.popen(["sleep", "100"], log) for host in hosts]
    _wait(lambda: all("sleep 100" in host.members().values() for host in hosts))
    hosts[0].kill()
    assert jobs[0].wait(patience(10)) != 0 and jobs[1].poll() is None
    hosts[1].end()
    assert jobs[1].wait(patience(10)) != 0 and not hosts[1].members()


def test_hosts_end_with_a_killed_maker(can_make_hosts: None, tmp_path: Path) -> None:
    text = f"""
import sys, time
from pathlib import Path
from namespaces import Hosts
hosts = Hosts(Path({str(tmp_path / "hosts")!r}))
hosts[0].popen(["sleep", "100"], open({str(tmp_path / "log")!r}, "w"))
print(*(made.init for made in (hosts.switch, *hosts)), flush=True)
time.sleep(100)
"""
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", text], env=paths, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        inits = maker.stdout.readline().split()
        assert len(inits) == 3 and all(Path("/proc", pid).exists() for pid in inits)
        os.kill(maker.pid, signal.SIGKILL)
    _wait(lambda: not any(Path("/proc", pid).exists() for pid in inits))
