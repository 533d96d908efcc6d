"""What a launcher was asked for: said where something else runs, refused where the trainer cannot do it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.launch.hosts import Process
from trl_realloc.runtime.launch.launcher import (
    LaunchError,
    check_device,
    check_launch,
    connect_streams,
    launch_summary,
    requested_processes,
    too_few_connections,
    wait_on_own_device,
)


def test_a_start_says_how_many_processes_on_how_many_hosts_under_which_plan() -> None:
    two = [Process(name, name, local) for name in ("alpha", "beta") for local in range(2)]
    assert list(launch_summary(two, flatten(Cluster(2, 2)), (4, "WORLD_SIZE=4"))) == [
        "trl_realloc: 4 processes on 2 hosts (alpha, beta), 2 on each; plan flatten; generation by vllm."
    ]
    assert "1 process on 1 host (alpha); plan" in next(launch_summary([two[0]], flatten(Cluster(1, 1)), (1, "")))


@pytest.mark.parametrize(
    ("environment", "launcher", "told"),
    [
        (
            {},
            ["python", "/bin/accelerate", "launch", "--num_processes", "2", "train.py", "--num_processes", "9"],
            r"2 processes were asked for \(accelerate launch --num_processes 2\), but 1 process runs .*--multi_gpu",
        ),
        ({}, ["python", "-m", "accelerate.commands.launch", "--num-processes=2", "train.py"], "2 processes were asked"),
        ({"OMPI_COMM_WORLD_SIZE": "16"}, ["mpirun"], r"16 .* \(OMPI_COMM_WORLD_SIZE=16\), but 1 .* with torchrun or"),
    ],
)
def test_a_start_says_where_too_few_processes_run(environment: dict[str, str], launcher: list[str], told: str) -> None:
    said = " ".join(
        launch_summary([Process("alpha")], flatten(Cluster(1, 1)), requested_processes(environment, launcher))
    )
    assert re.search(told, said), said


@pytest.mark.parametrize(("given", "has_begun", "after"), [(None, False, "32"), (None, True, None), ("1", False, "1")])
def test_streams_have_queues_of_their_own_unless_the_user_or_a_start_of_cuda_has_settled_it(
    monkeypatch: pytest.MonkeyPatch, given: str | None, has_begun: bool, after: str | None
) -> None:
    environment = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_begun)
    connect_streams(environment)
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == after
    warning = too_few_connections(environment)
    assert (warning is None) == (after == "32")
    if warning is not None:
        assert f"has {after or 8} queues" in warning and "set it to 32 before the script uses CUDA" in warning


def test_nothing_more_is_said_of_a_job_that_is_as_it_was_asked_for() -> None:
    asked = requested_processes({"WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, ["torchrun", "--num_processes", "4"])
    assert asked == (2, "WORLD_SIZE=2")
    assert len(list(launch_summary([Process("a", "", 0), Process("a", "", 1)], flatten(Cluster(1, 2)), asked))) == 1


def test_few_cores_for_the_processes_of_a_host_with_gpus_are_said() -> None:
    of_host = [Process("a", "", local, local, 4) for local in range(4)]
    plan = flatten(Cluster(1, 4))
    (_, cores) = launch_summary(of_host, plan, (4, ""), cores=1)
    assert "the 4 processes of a host may use 1 of its cores" in cores
    assert len(list(launch_summary(of_host, plan, (4, ""), cores=4))) == 1


def test_gpus_that_are_left_over_and_a_compiler_that_is_not_used_are_said() -> None:
    said = list(launch_summary([Process("a", "", -1, 0, 8)], flatten(Cluster(1, 1)), (1, ""), "INDUCTOR"))
    assert "sees 8 GPUs and the job uses 1" in said[1] and "torch.compile (inductor) is asked for and not" in said[2]


@pytest.mark.parametrize(
    ("environment", "arguments", "told"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, {}, "FSDP is asked for, and the execution plan sets how models are sharded"),
        ({}, {"fsdp": True}, "FSDP is asked for"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "Megatron-LM plugin"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, "parallelism_config"),
        ({"PJRT_DEVICE": "TPU"}, {}, "a TPU is asked for"),
        ({}, {"tpu_num_cores": 8}, "a TPU is asked for"),
        (
            {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"},
            {},
            "start the ranks with torchrun",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "use bf16, fp16 or no"),
    ],
)
def test_a_launch_config_that_no_engine_follows_is_refused_with_what_to_use(
    environment: dict[str, str], arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(LaunchError, match=told):
        check_launch(SimpleNamespace(**arguments), environment)


def test_launches_by_data_parallelism_and_deepspeed_are_not_refused() -> None:
    check_launch(SimpleNamespace(fsdp=None), {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "bf16"})


def test_a_device_that_no_engine_runs_on_is_refused() -> None:
    check_device(torch.device("cuda", 1))
    check_device(torch.device("cpu"))
    with pytest.raises(LaunchError, match="device is xpu:0, .* set use_cpu=True"):
        check_device(torch.device("xpu", 0))


def test_a_process_that_sees_one_gpu_alone_waits_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(PartialState, "wait_for_everyone", PartialState.wait_for_everyone)  # put back at the end
    monkeypatch.setattr(torch.distributed, "barrier", lambda **of_barrier: given.append(of_barrier))
    state: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, local_process_index=3, num_processes=8)
    for gpus in (0, 4, 1):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda gpus=gpus: gpus)
        wait_on_own_device({"LOCAL_RANK": "3"})
        PartialState.wait_for_everyone(state)
    assert given == [{"device_ids": [3]}, {"device_ids": [3]}, {}]
