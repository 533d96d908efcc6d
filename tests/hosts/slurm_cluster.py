"""Slurm's own daemons on hosts made by namespaces: the controller on the first, and one for the jobs of each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jobs import ROOT
from limits import patience
from namespaces import Hosts


TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sinfo": "slurm-client", "srun": "slurm-client"}
# Every connection is of one user inside the hosts' network, so nobody proves who he is (auth/none). The processors and
# GPUs are those of the scripts that are tried, not the machine's: Slurm only counts them.
_CONFIGURATION = """
ClusterName=hosts
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/out/state
SlurmdSpoolDir={folder}/out/spool
SlurmctldPidFile={folder}/tmp/slurmctld.pid
SlurmdPidFile={folder}/tmp/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str | None:
    """Why Slurm cannot be started here, or `None` where it can."""
    absent = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    return f"Slurm is in the packages {', '.join(sorted(absent))}, which are not installed" if absent else None


class Slurm:
    """Slurm on hosts. Its daemons end with them.

    Args:
        hosts: where it runs; their hostnames can be resolved.
        environment: of commands, beside this process's, less what a launcher has set there.
    """

    def __init__(self, hosts: Hosts, environment: dict[str, str]) -> None:
        self.hosts = hosts
        file = hosts.folder / "slurm.conf"
        names, addresses = [host.name for host in hosts], [host.address for host in hosts]
        nodes = [
            f"NodeName={name} NodeAddr={address} CPUs=64 Gres=gpu:8\n"
            for name, address in zip(names, addresses, strict=True)
        ]
        file.write_text(_CONFIGURATION.format(folder=hosts.folder, names=names, addresses=addresses) + "".join(nodes))
        (hosts.folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-7]\n")  # any files that there are
        (hosts.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        launched = ("SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "ACCELERATE_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
        self.environment = {**kept, **environment, "SLURM_CONF": str(file)}
        for host in hosts:
            host.sh(f"mkdir -p {hosts.folder}/out/state {hosts.folder}/out/spool")
        self._logs = [hosts.folder / "slurmctld.log", *(hosts.folder / f"slurmd-{name}.log" for name in names)]
        daemons = [(hosts[0], ["slurmctld", "-D", "-c"]), *((host, ["slurmd", "-D"]) for host in hosts)]
        for (host, command), path in zip(daemons, self._logs, strict=True):
            with path.open("w") as log:
                host.popen(command, log, self.environment)
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + patience(60)
        states = ""
        while states.split() != ["idle", str(len(self.hosts))]:
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self._logs)
                raise RuntimeError(f"Slurm's hosts are not ready, but: {states}\n{logs}")
            time.sleep(0.2)
            states = self.run(["sinfo", "--noheader", "--format", "%t %D"], 30).stdout

    def run(self, command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, within a time limit for an idle machine."""
        return subprocess.run(
            self.hosts[0].enter(["timeout", "--kill-after=5", str(patience(seconds)), *command]),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def batch(self, script: str, log: Path, seconds: float) -> tuple[str, str]:
        """Submit a batch script for all hosts and wait until it ends; `sbatch --wait` would look after 10 s, and then
        after 42.

        Args:
            log: made with the script's output; its folder is the same on every host.

        Returns:
            The state in which Slurm leaves the job, and what was written.
        """
        file = log.with_suffix(".slurm")
        file.write_text(script)
        where = [f"--nodes={len(self.hosts)}", f"--chdir={ROOT}", f"--output={log}"]
        submitted = self.run(["sbatch", "--parsable", *where, str(file)], 30)
        if submitted.returncode:
            return "REFUSED", submitted.stdout
        job, state = submitted.stdout.strip(), "PENDING"
        deadline = time.monotonic() + patience(seconds)
        while state in ("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < deadline:
            time.sleep(0.2)
            shown = self.run(["scontrol", "show", "job", job], 30).stdout
            state = next(iter(re.findall(r"JobState=(\w+)", shown)), state)
        return state, log.read_text(errors="replace") if log.exists() else ""
