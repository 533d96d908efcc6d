"""The variables that `srun` sets for a task, as the ranks of a job."""

from __future__ import annotations

import fcntl
import os
import subprocess
import termios

import pytest

from trl_realloc.runtime.launch.slurm import adopt_slurm, first_host


# of task 9 of `srun --nodes 2 --ntasks 16 --ntasks-per-node 8`
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_TASK_PID": str(os.getpid()),
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[07-12]",
}
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def test_a_task_of_srun_is_a_rank() -> None:
    environment = dict(TASK)
    adopt_slurm(environment)
    assert [environment[name] for name in RANKS] == ["9", "1", "16", "8", "gpu07"]
    port = environment["MASTER_PORT"]
    assert 20_000 <= int(port) < 30_000
    other_step = {**TASK, "SLURM_STEP_ID": "1"}
    adopt_slurm(other_step)
    assert other_step["MASTER_PORT"] != port, "two steps on a node at once"


def test_an_address_and_a_port_that_are_set_are_kept() -> None:
    environment = {**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
    adopt_slurm(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29501")


def test_the_tasks_of_one_node_meet_on_its_loopback() -> None:
    environment = {**TASK, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    adopt_slurm(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "3"},  # srun torchrun, srun accelerate launch, DeepSpeed's launcher
        {"OMPI_COMM_WORLD_RANK": "3"},  # mpirun, whose daemons srun starts
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun of one task, which starts a launcher or trains alone
        {"SLURM_STEP_ID": None},  # a batch script, which has the variables of its job's first task
    ],
)
def test_a_process_that_is_no_task_of_several_or_has_a_launcher_is_left_alone(changes: dict[str, str | None]) -> None:
    environment = {name: value for name, value in {**TASK, **changes}.items() if value is not None}
    before = dict(environment)
    adopt_slurm(environment)
    assert environment == before


def test_settings_of_accelerate_in_a_batch_script_are_no_launcher() -> None:
    environment = {**TASK, "ACCELERATE_MIXED_PRECISION": "bf16"}
    adopt_slurm(environment)
    assert environment["RANK"] == "9"


@pytest.mark.parametrize("interactive", [True, False])
def test_a_script_that_is_started_in_an_interactive_shell_is_no_rank(interactive: bool) -> None:
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        if interactive:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    # in place of the shell of `srun --pty bash`, or of the script of `srun bash run.sh`
    stdin = theirs if interactive else subprocess.DEVNULL
    task = subprocess.Popen(["sleep", "100"], stdin=stdin, start_new_session=True, preexec_fn=take_terminal)
    try:
        # a step inside `salloc` inherits the names of its shell
        environment = {**TASK, "SLURM_TASK_PID": str(task.pid), "SLURM_JOB_NAME": "interactive"}
        adopt_slurm(environment)
        assert ("RANK" in environment) is not interactive
    finally:
        task.kill()
        task.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu01", "gpu01"),
        ("gpu01,gpu02", "gpu01"),
        ("gpu[01-04]", "gpu01"),
        ("gpu[7,9-12].cluster,login1", "gpu7.cluster"),
        ("rack[2-3]-node[05,06]", "rack2-node05"),
        ("a-b-1,a-b-[2-3]", "a-b-1"),
    ],
)
def test_the_first_host_of_slurms_lists(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
