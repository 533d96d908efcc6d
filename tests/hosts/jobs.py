"""One job over several hosts: a launcher on each, and what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from limits import patience
from namespaces import Hosts
from ranks import SEARCHED, Ranks, RankServers


ROOT = Path(__file__).parents[2]
PORT = 29500  # of the first host; no other job is in these networks


def accelerate_launch(hosts: int, host: int, per_host: int, address: str, config: Path | None = None) -> list[str]:
    """`accelerate launch` on one of several hosts, up to the script's name."""
    way = ["--config_file", str(config)] if config else ["--multi_gpu", "--mixed_precision", "no"]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", *way, "--dynamo_backend", "no"),
        *("--num_machines", str(hosts), "--num_processes", str(hosts * per_host), "--machine_rank", str(host)),
        *("--main_process_ip", address, "--main_process_port", str(PORT), "--rdzv_backend", "static"),
    ]


class HostsJob:
    """A script under a launcher on every host; ends with the hosts at the latest.

    Args:
        script: Python's arguments, the script's file first, the same on every host.
        per_host: processes, a number for all hosts or one for each.
        environment: beside this process's.
        name: of its logs, which lie in `hosts.folder`.
        launcher: Accelerate's; without it one process on each host, with the variables that every launcher sets.
        servers: fork the launchers, which fork their ranks, or these processes; else all are started.
    """

    def __init__(
        self,
        hosts: Hosts,
        script: Sequence[str],
        per_host: int = 1,
        *,
        environment: Mapping[str, str] | None = None,
        config: Path | None = None,
        name: str = "job",
        launcher: bool = True,
        servers: RankServers | None = None,
    ) -> None:
        given = {
            "TRL_REALLOC_PLAN": "flatten",
            "DS_ACCELERATOR": "cpu",
            "TRL_REALLOC_CACHE": str(hosts.folder / "tmp" / "cache"),
            "PYTHONPATH": os.pathsep.join((SEARCHED, str(ROOT / "tests" / "multiprocess"))),
        }
        self.logs = [hosts.folder / f"{name}-{host.number}.log" for host in hosts]
        self.processes: list[subprocess.Popen[bytes] | Ranks] = []
        for host, path in zip(hosts, self.logs, strict=True):
            command, own = [sys.executable], {**os.environ, **given, **(environment or {})}
            if launcher:
                command = accelerate_launch(len(hosts), host.number, per_host, hosts[0].address, config)
            else:
                own |= {"RANK": str(host.number), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(hosts))}
                own |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
            with path.open("w") as log:
                if servers is None:
                    self.processes.append(host.popen([*command, *script], log, own))
                else:
                    own["TMPDIR"] = host.environment["TMPDIR"]
                    self.processes.append(servers.alone([*command, *script][1:], path, own, host.number, host.init))

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes by host; `None` where it still runs after that time on an idle machine."""
        deadline = time.monotonic() + patience(seconds)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        return [process.poll() for process in self.processes]

    def text(self) -> str:
        """What all hosts wrote."""
        return "\n".join(path.read_text(errors="replace") for path in self.logs)
