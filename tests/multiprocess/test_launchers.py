"""Every launcher gives the same cluster: real jobs of two processes, each by its launcher."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import patience
from ports import free_port


pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("cluster_rank.py")


def command(folder: Path, launcher: str) -> list[str]:
    """The command line that starts a job of two processes."""
    script = [str(SCRIPT), str(folder)]
    match launcher:
        case "accelerate":
            options = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
            options += ["--num_processes", "2", "--main_process_port", str(free_port())]
            return ["-m", "accelerate.commands.launch", *options, *script]
        case "torchrun":
            options = ["--nproc_per_node", "2", "--master_port", str(free_port())]
            return ["-m", "torch.distributed.run", *options, *script]
    hosts = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    options = [f"--world_info={hosts}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    return ["-m", "deepspeed.launcher.launch", *options, *script]


def test_accelerate_torchrun_and_deepspeed_give_the_same_cluster(tmp_path: Path) -> None:
    processes = []
    ranked = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_", "ACCELERATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ranked)}
    environment |= {"PYTHONPATH": str(SCRIPT.parents[2]), "DS_ACCELERATOR": "cpu"}
    launchers = ("accelerate", "torchrun", "deepspeed")
    for launcher in launchers:
        folder = tmp_path / launcher
        folder.mkdir()
        with (folder / "log.txt").open("w") as log:
            started = [sys.executable, *command(folder, launcher)]
            processes.append(subprocess.Popen(started, env=environment, stdout=log, stderr=subprocess.STDOUT))
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
