"""Training over two hosts that share nothing but a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from jobs import HostsJob
from namespaces import Hosts


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(500)]
HERE = Path(__file__).parent
EPISODES = 16  # of an update, however many processes share them


def _plan(nodes: int, per_node: int, **calls: dict[str, Any]) -> dict[str, Any]:
    """`flatten` with the calls changed."""
    size = nodes * per_node
    whole = {"mesh": f"0-{size - 1}", "engine": "zero", "dp": size}
    names = ("reference.forward", "reward.forward", "critic.forward", "actor.train", "critic.train")
    plan = {"actor.generate": {**whole, "engine": "transformers"}, **dict.fromkeys(names, whole)}
    plan |= {name.replace("__", "."): call for name, call in calls.items()}
    return {"cluster": {"nodes": nodes, "devices_per_node": per_node}, "calls": plan}


PIPELINE = {"mesh": "0-1", "engine": "megatron", "pp": 2}
TENSOR = {"mesh": "0-1", "engine": "megatron", "tp": 2}
RUNS: dict[int, dict[str, Any]] = {
    1: {
        "flatten": "flatten",
        "interleave": "interleave",
        "separate": "separate",
        "split across the link": _plan(2, 1, actor__train=PIPELINE, critic__train=TENSOR),
    },
    2: {
        "flatten": "flatten",
        "separate": "separate",
        "split within hosts and across": _plan(
            2,
            2,
            actor__train={"mesh": "0-3", "engine": "megatron", "tp": 2, "pp": 2},
            critic__train={"mesh": "2-3", "engine": "megatron", "tp": 2},
            actor__generate={"mesh": "0-1", "engine": "transformers", "dp": 2},
        ),
    },
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What one process logs."""
    made = tiny.trainer(
        tmp_path_factory.mktemp("alone"), plan="flatten", per_device_train_batch_size=EPISODES, learning_rate=1e-3
    )
    made.train()
    made.close()
    return tiny.updates(made)


@pytest.mark.parametrize("per_host", [1, 2])
def test_two_hosts_train_as_one_process_does(
    make_hosts: Callable[..., Hosts], alone: list[dict[str, float]], per_host: int
) -> None:
    """The same samples, scores and losses under presets and written plans, though each host has disks of its own and
    a hostname that stands for a loopback address."""
    hosts = make_hosts(resolvable=False)
    share = {"per_device_train_batch_size": EPISODES // (2 * per_host), "learning_rate": 1e-3}
    runs = {name: {"plan": plan, **share} for name, plan in RUNS[per_host].items()}
    job = HostsJob(hosts, [str(HERE / "runs.py"), str(hosts.folder / "out"), json.dumps(runs)], per_host)
    assert job.wait(400) == [0, 0], job.text()[-6000:]
    for name in runs:
        found = json.loads((hosts[0].out / f"{name}.json").read_text())
        assert found["cluster"] == [2, per_host]
        for mine, theirs in zip(found["updates"], alone, strict=True):
            learned = {key: value for key, value in mine.items() if not key.startswith("realloc/")}
            assert learned == pytest.approx(theirs, rel=1e-4, abs=1e-5), name
    said = re.findall(r"trl_realloc: \d processes on 2 hosts .*", job.text())  # a bar may stand before it in its line
    assert len(said) == len(runs) and f"(alpha, beta), {per_host} on each; plan flatten;" in said[0]


def test_hosts_that_cannot_reach_each_other_end_in_a_sentence_and_not_in_a_wait(
    make_hosts: Callable[..., Hosts],
) -> None:
    """As where the hostname resolves to the address of a container's bridge."""
    hosts = make_hosts()
    for host in hosts:
        bridge = f"ip link add other0 type bridge; ip address add 10.77.{host.number + 1}.1/24 dev other0"
        host.sh(f"{bridge}; ip link set other0 up")
    script = hosts.folder / "script.py"
    script.write_text("import sys, trl_realloc\ntrl_realloc.PPOConfig(output_dir=sys.argv[1])\n")
    command = [str(script), str(hosts.folder / "out")]
    job = HostsJob(hosts, command, environment={"GLOO_SOCKET_IFNAME": "other0"})
    ended = job.wait(150)
    assert None not in ended and 0 not in ended, job.text()[-4000:]
    for path in job.logs:
        told = r"NetworkError: alpha \(10.77.1.1\) cannot reach beta at 10.77.2.1, .*; set GLOO_SOCKET_IFNAME to the"
        assert re.search(told, path.read_text()), job.text()[-4000:]
