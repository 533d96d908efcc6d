"""Every launcher gives the same cluster: real jobs of two processes, each by its launcher; `srun` by its variables
(Slurm itself: tests/hosts/test_slurm_on_hosts.py)."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from limits import patience
from ports import free_port


pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("cluster_rank.py")


def commands(folder: Path, launcher: str) -> list[tuple[list[str], dict[str, str]]]:
    """The command lines that start a job of two processes, each with its additional variables."""
    script = [str(SCRIPT), str(folder)]
    match launcher:
        case "accelerate":
            options = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
            options += ["--num_processes", "2", "--main_process_port", str(free_port())]
            return [(["-m", "accelerate.commands.launch", *options, *script], {})]
        case "torchrun":
            options = ["--nproc_per_node", "2", "--master_port", str(free_port())]
            return [(["-m", "torch.distributed.run", *options, *script], {})]
        case "deepspeed":
            hosts = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
            options = [f"--world_info={hosts}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
            return [(["-m", "deepspeed.launcher.launch", *options, *script], {})]
    step = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": socket.gethostname(), "SLURM_NTASKS": "2"}
    tasks = [{**step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    return [(script, task) for task in tasks]


def test_accelerate_torchrun_deepspeed_and_srun_give_the_same_cluster(tmp_path: Path) -> None:
    processes = []
    ranked = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_", "ACCELERATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ranked)}
    environment |= {"PYTHONPATH": str(SCRIPT.parents[2]), "DS_ACCELERATOR": "cpu"}
    launchers = ("accelerate", "torchrun", "deepspeed", "srun")
    for launcher in launchers:
        folder = tmp_path / launcher
        folder.mkdir()
        with (folder / "log.txt").open("w") as log:
            for arguments, variables in commands(folder, launcher):
                command = [sys.executable, *arguments]
                processes.append(
                    subprocess.Popen(command, env={**environment, **variables}, stdout=log, stderr=subprocess.STDOUT)
                )
    try:
        for process in processes:
            process.wait(patience(120))
    finally:
        for process in processes:
            process.kill()
    for launcher in launchers:
        folder = tmp_path / launcher
        for rank in range(2):
            found = folder / f"{rank}.json"
            assert found.exists(), (launcher, (folder / "log.txt").read_text()[-3000:])
            expected = {"cluster": [1, 2], "local_ranks": [0, 1], "rank": [rank, rank, rank], "size": [2, 2]}
            assert json.loads(found.read_text()) == expected, launcher
