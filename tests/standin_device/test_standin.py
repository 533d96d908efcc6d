"""The package on a device that is not the host. The tests themselves are in `on_one_process.py` and `on_two_ranks.py`,
which run in processes of their own, because a process that has the stand-in has an accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import patience
from ports import free_port

import standin_device


HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(standin_device.compiler() is None, reason="the stand-in device needs a C++ compiler")


def run(script: str, processes: int, folder: Path) -> None:
    """Run a file of tests in so many processes, which end together."""
    port = free_port()
    folders = [HERE.parent, HERE.parent / "trainer", HERE.parent / "multiprocess", HERE.parent.parent]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "STANDIN_FOLDER": str(folder),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    started, logs = [], []
    for rank in range(processes):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        own = {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
        logs.append((folder / f"rank-{rank}.txt").open("w+"))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-v",
            "-rP",
            "--durations=10",
            "-p",
            "no:cacheprovider",
            str(HERE / script),
        ]
        command += ["--basetemp", str(folder / f"temporary-{rank}")]
        started.append(
            subprocess.Popen(
                command,
                env=environment | (own if processes > 1 else {}),
                stdout=logs[-1],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    codes: list[int | None] = []
    try:
        for process in started:
            codes.append(process.wait(patience(200)))
            if codes[-1]:
                break  # the others wait for this one
    except subprocess.TimeoutExpired:
        codes.append(None)
    finally:
        for process in started:
            process.kill()
            process.wait()
    if codes != [0] * processes:
        texts = [Path(log.name).read_text(errors="replace")[-6000:] for log in logs]
        pytest.fail("\n\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_process_does_on_an_accelerator_what_it_does_on_the_host(tmp_path: Path) -> None:
    run("on_one_process.py", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_two_ranks_do_on_accelerators_what_they_do_on_the_host(tmp_path: Path) -> None:
    run("on_two_ranks.py", 2, tmp_path)
