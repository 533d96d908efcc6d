"""The rank that Slurm's `srun` gives a process, in the variables that torch and Accelerate read.

`accelerate launch`, `torchrun` and DeepSpeed's launcher set these variables themselves, `srun` alone does not. Which
processes share a host is found in `hosts`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

import psutil


_NEEDED = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")  # a batch script has no step
_RANKS = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK")  # by which a launcher tells a process its rank
_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that Linux gives to outgoing connections


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in a process that
    `srun` started as one of several. Does nothing where a launcher has set ranks or in an interactive shell
    (`srun --pty bash`), and keeps an address or a port that is set. Called before a process group is made.
    """
    launched = any(name in environment for name in _RANKS) or _in_shell(environment)
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")
    if launched or any(name not in environment for name in _NEEDED) or not tasks.isdigit() or int(tasks) < 2:
        return
    environment["RANK"], environment["LOCAL_RANK"] = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = tasks
    local = _tasks_of_node(environment)
    if local:
        environment["LOCAL_WORLD_SIZE"] = str(local)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    environment.setdefault("MASTER_ADDR", "127.0.0.1" if local == int(tasks) or not nodes else first_host(nodes))
    # the same on all nodes; another for each step, so that steps on one node do not meet each other
    number = int(environment.get("SLURM_JOB_ID", "0")) * 17 + int(environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _PORTS))


def _in_shell(environment: Mapping[str, str]) -> bool:
    """True if the process was started from an interactive shell, which has the variables of its step's first task. The
    shell is the task and has a terminal. A step that is started in that shell has tasks of its own, without one."""
    task = environment.get("SLURM_TASK_PID", "")
    if task == str(os.getpid()):  # `srun --pty python train.py`
        return False
    try:
        return psutil.Process(int(task)).terminal() is not None
    except (ValueError, psutil.Error):  # in a container that numbers its processes itself
        return os.isatty(0)


def first_host(hosts: str) -> str:
    """The first hostname of Slurm's list of hosts, such as `gpu[07-12,20],login1`."""
    name, depth = "", 0
    for character in hosts:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            break
        name += character
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", name)


def _tasks_of_node(environment: Mapping[str, str]) -> int:
    """The number of this step's tasks on this node; 0 where Slurm does not say."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 0
