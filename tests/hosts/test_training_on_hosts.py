"""Training over two hosts that share nothing but a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from jobs import HostsJob
from namespaces import Hosts
from ranks import RankServers
from two_starts import SCRIPT, TRAINED, TwoStarts, plan, share


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]
SPLIT = plan(
    2,
    2,
    actor__train={"mesh": "0-3", "engine": "megatron", "tp": 2, "pp": 2},
    critic__train={"mesh": "2-3", "engine": "megatron", "tp": 2},
    actor__generate={"mesh": "0-1", "engine": "transformers", "dp": 2},
)
ON_TWO_EACH = {"flatten": "flatten", "separate": "separate", "split within hosts and across": SPLIT}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What one process logs."""
    made = tiny.trained(tmp_path_factory.mktemp("alone"), plan="flatten", **share(1))
    made.close()
    return tiny.updates(made)


def _check(outcomes: dict[str, Any], log: str, per_host: int, alone: list[dict[str, float]]) -> None:
    for name, outcome in outcomes.items():
        assert outcome["cluster"] == [2, per_host]
        for mine, theirs in zip(outcome["updates"], alone, strict=True):
            learned = {key: value for key, value in mine.items() if not key.startswith("realloc/")}
            assert learned == pytest.approx(theirs, rel=1e-4, abs=1e-5), name
    said = re.findall(r"trl_realloc: \d processes on 2 hosts .*", log)  # a bar may stand before it in its line
    assert f"(alpha, beta), {per_host} on each; plan flatten;" in said[0] and len(said) >= len(outcomes)


def test_two_hosts_train_as_one_process_does(two_starts: TwoStarts, alone: list[dict[str, float]]) -> None:
    """The same samples, scores and losses under presets, written plans and planned ones, though each host has disks of
    its own and a hostname that stands for a loopback address, and the network becomes slower."""
    trained = {name: two_starts.first[0][name] for name in TRAINED}
    _check(trained, two_starts.logs[0], 1, alone)
    _check({"planned again": two_starts.second[0]["planned"]}, two_starts.logs[0], 1, alone)


def test_two_hosts_of_two_processes_train_as_one_process_does(
    make_hosts: Callable[..., Hosts], alone: list[dict[str, float]], servers: RankServers
) -> None:
    hosts = make_hosts(resolvable=False)
    runs = {name: {"plan": of, **share(4)} for name, of in ON_TWO_EACH.items()}
    job = HostsJob(hosts, [SCRIPT, str(hosts.folder / "out"), json.dumps(runs)], 2, servers=servers)
    assert job.wait(400) == [0, 0], job.text()[-6000:]
    _check(json.loads((hosts[0].out / "outcomes.json").read_text()), job.text(), 2, alone)


def test_hosts_that_cannot_reach_each_other_end_in_a_sentence_and_not_in_a_wait(
    make_hosts: Callable[..., Hosts], servers: RankServers
) -> None:
    """As where the hostname resolves to the address of a container's bridge."""
    hosts = make_hosts()
    for host in hosts:
        bridge = f"ip link add other0 type bridge; ip address add 10.77.{host.number + 1}.1/24 dev other0"
        host.sh(f"{bridge}; ip link set other0 up")
    script = hosts.folder / "script.py"
    script.write_text("import sys, trl_realloc; trl_realloc.PPOConfig(output_dir=sys.argv[1])")
    chosen = {"GLOO_SOCKET_IFNAME": "other0"}
    command = [str(script), str(hosts.folder / "out")]
    job = HostsJob(hosts, command, environment=chosen, launcher=False, servers=servers)
    ended = job.wait(150)
    assert None not in ended and 0 not in ended, job.text()[-4000:]
    for path in job.logs:
        told = r"NetworkError: alpha \(10.77.1.1\) cannot reach beta at 10.77.2.1, .*; set GLOO_SOCKET_IFNAME to the"
        assert re.search(told, path.read_text()), job.text()[-4000:]
