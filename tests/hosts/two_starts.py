"""A job over two hosts, one process on each, that is started twice: what tests of training, planning and checkpoints
look at.

It is one job for all of them, because most of its time is starting. Between the two starts the network becomes slower,
and files of checkpoints are damaged or lost.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jobs import HostsJob
from namespaces import Hosts
from ranks import RankServers


EPISODES = 16  # of an update, however many processes share them
SLOW = 200e6 / 8  # bytes/s, of the second start's network
CRITIC = "training_state/__1_0.distcp"  # written by the second host, which trains the critic
SCRIPT = str(Path(__file__).parent / "runs.py")


def plan(nodes: int, per_node: int, **calls: dict[str, Any]) -> dict[str, Any]:
    """`flatten` with the calls changed."""
    size = nodes * per_node
    whole = {"mesh": f"0-{size - 1}", "engine": "zero", "dp": size}
    names = ("reference.forward", "reward.forward", "critic.forward", "actor.train", "critic.train")
    made = {"actor.generate": {**whole, "engine": "transformers"}, **dict.fromkeys(names, whole)}
    made |= {name.replace("__", "."): call for name, call in calls.items()}
    return {"cluster": {"nodes": nodes, "devices_per_node": per_node}, "calls": made}


def share(processes: int) -> dict[str, Any]:
    """The options of a run that trains as one process does with `EPISODES` episodes."""
    return {"per_device_train_batch_size": EPISODES // processes, "learning_rate": 1e-3}


FIRST, SECOND = ({"mesh": rank, "engine": "zero", "dp": 1} for rank in "01")
PIPELINE = {"mesh": "0-1", "engine": "megatron", "pp": 2}
TENSOR = {"mesh": "0-1", "engine": "megatron", "tp": 2}
TRAINED = {  # as one process trains
    "flatten": "flatten",
    "interleave": "interleave",
    "separate": "separate",
    "split across the link": plan(2, 1, actor__train=PIPELINE, critic__train=TENSOR),
    "planned": "auto",
}
SAVED: dict[str, Any] = {  # the policy is trained on the first host, the critic on the second
    "plan": plan(
        2,
        1,
        actor__generate={**FIRST, "engine": "transformers"},
        reward__forward=FIRST,
        actor__train=FIRST,
        reference__forward=SECOND,
        critic__forward=SECOND,
        critic__train=SECOND,
    ),
    "save_strategy": "steps",
    "save_steps": 1,
    "per_device_train_batch_size": 4,
    "num_ppo_epochs": 1,
    "response_length": 6,
    "max_steps": 3,
}


class TwoStarts:
    """Both starts.

    Args:
        hosts: with disks as the second start left them.
        servers: fork the jobs' processes.

    Attributes:
        first, second: for each host the outcome of every run.
        unstopped: what the run that was to be damaged had trained before.
        logs: of each start, all hosts'.
    """

    def __init__(self, hosts: Hosts, servers: RankServers) -> None:
        self.hosts, self.servers, self.logs = hosts, servers, []
        self.out = hosts.folder / "out"
        runs = {name: {"plan": of, **share(2)} for name, of in TRAINED.items()}
        self.first = self._start({**runs, "stopped": SAVED})
        self.unstopped = self.trained("stopped")
        self._damage()
        hosts.shape(f"{SLOW * 8:.0f}")
        again = {"lost": "auto", "damaged": str(self.out / "damaged" / "checkpoint-3"), "stopped": "auto"}
        self.second = self._start(
            {"planned": runs["planned"], **{name: {**SAVED, "resume": resume} for name, resume in again.items()}}
        )

    def _start(self, runs: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
        script, name = [SCRIPT, str(self.out), json.dumps(runs)], f"start{len(self.logs)}"
        job = HostsJob(self.hosts, script, name=name, servers=self.servers)
        assert job.wait(400) == [0, 0], job.text()[-6000:]
        self.logs.append(job.text())
        return [json.loads((host.out / "outcomes.json").read_text()) for host in self.hosts]

    def _damage(self) -> None:
        """Leave half of the only copy of the critic's newest state in two runs; lose all that the second host has of
        another."""
        for name in ("lost", "damaged"):
            for host in self.hosts:
                shutil.copytree(host.out / "stopped", host.out / name)
        second = self.hosts[1].out
        shutil.rmtree(second / "lost")
        for name in ("stopped", "damaged"):
            path = second / name / "checkpoint-3" / CRITIC
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def trained(self, name: str) -> tuple[bytes, bytes, list[dict[str, float]]]:
        """A finished run's policy, its critic, and the logs of its updates less what time makes differ."""
        first, second = (host.out / name / "checkpoint-3" for host in self.hosts)
        logs = json.loads((first / "trainer_state.json").read_text())["log_history"]
        rows = [{key: value for key, value in row.items() if key.startswith(("objective", "loss"))} for row in logs]
        return (first / "model.safetensors").read_bytes(), (second / "value_model/model.safetensors").read_bytes(), rows
