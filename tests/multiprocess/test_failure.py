"""A failure is every rank's, and nothing outlives its job (contract 5)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shared_memory
from limits import patience
from ranks import MARK_FILE, Ranks, RankServers
from test_plans import plan
from test_streamed import CONFIG, MIGRATION, ONE_ENGINE, TWO_ENGINES

from trl_realloc.engines.child_process import JOB_SIGNALS
from trl_realloc.trainer.checkpoint.resuming import newest_whole


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

# The model never learns to stop in the first update, so a generation of this length takes minutes.
LONG: dict[str, Any] = {"generation_engine": "vllm", "per_device_train_batch_size": 32, "response_length": 100}
LONG |= {"stop_token": None, "max_steps": 2000, "learning_rate": 0.0}
REPORTED_WITHIN_S = 30.0  # every rank says why
GONE_WITHIN_S = 20.0  # and then nothing is left
GRACE_S = 60.0  # in which a rank ends by itself after another has failed, where a test looks at how it ends


def test_a_reward_that_fails_on_a_rank_fails_on_all_untrained(start: Callable[..., Any], servers: RankServers) -> None:
    job = start("train.py", 2, {"fails_on_rank": 1}, servers=servers, grace_s=GRACE_S)
    begun = time.monotonic()
    assert job.wait(90) != 0
    sentence = f"reward.forward failed on rank 1 (host {socket.gethostname()}): reward function '<lambda>' returned nan"
    assert job.text().count(f"JobFailed: {sentence}") == 2, job.text()[-3000:]
    for rank in (0, 1):
        assert json.loads((job.folder / f"failed-{rank}.json").read_text()) == {"unchanged": True}
    assert time.monotonic() - begun < patience(60) and job.gone_within(GONE_WITHIN_S)


def test_a_reward_function_that_raises_on_one_rank_is_named(start: Callable[..., Any], servers: RankServers) -> None:
    """In TRL's loop the other rank waits for the rewards in a collective that never ends."""
    options = {"algorithm": "grpo", "in": "reward", "fails_on_rank": 1}
    job = start("failing_user_code.py", 2, options, servers=servers, grace_s=GRACE_S)
    assert job.wait(90) != 0
    why = "failed in reward function 'judged' of update 2: KeyError: 'no answer of the judge'"
    said = f"[rank0] trl_realloc: rank 1 on host {socket.gethostname()} {why}."
    assert f"{said} This rank ends for that reason; it was still in the rewards of update 2." in job.text()
    assert job.gone_within(GONE_WITHIN_S)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_callback_that_raises_on_one_rank_is_told_from_the_calls_before_it(
    start: Callable[..., Any], servers: RankServers, algorithm: str
) -> None:
    options = {"algorithm": algorithm, "in": "callback", "fails_on_rank": 1}
    job = start("failing_user_code.py", 2, options, servers=servers, grace_s=GRACE_S)
    assert job.wait(90) != 0
    why = "failed in on_step_end of a callback, after update 1: OSError: no space left for the plots"
    sentence = f"rank 1 on host {socket.gethostname()} {why}"
    assert [line for line in job.text().splitlines() if line.startswith("[rank0]") and sentence in line], job.text()
    assert job.gone_within(GONE_WITHIN_S)


def wait_for_generation(job: Any, engines: int, logged: str = "objective/scores") -> list[int]:
    """The pids of the engines, once they work on a run, which has then logged an update."""
    deadline = time.monotonic() + patience(90)
    while time.monotonic() < deadline:
        hosts = [pid for pid, command in job.members().items() if "vllm_host" in command]
        if len(hosts) >= engines and logged in job.text():
            return hosts
        assert job.process.poll() is None, job.text()[-3000:]
        time.sleep(0.2)
    pytest.fail(f"no generation after 90 s:\n{job.text()[-3000:]}")


@pytest.mark.vllm
def test_an_engine_killed_in_mid_run_is_reported_on_every_rank_and_nothing_stays(
    start: Callable[..., Any], servers: RankServers
) -> None:
    shared_before = shared_memory.names()
    job = start("train.py", 2, LONG, servers=servers, grace_s=GRACE_S)
    hosts = wait_for_generation(job, 2)
    os.kill(hosts[0], signal.SIGKILL)
    assert job.wait(REPORTED_WITHIN_S + GONE_WITHIN_S) != 0
    text = job.text()
    reasons = [line for line in text.splitlines() if "SIGKILL" in line and "actor.generate engine" in line]
    for rank in (0, 1):
        assert any(f"[rank{rank}]" in line for line in reasons), text[-4000:]
    assert job.gone_within(GONE_WITHIN_S), job.members()
    assert not shared_memory.left(shared_before, 5.0)


@pytest.mark.vllm
def test_an_engine_killed_while_samples_reach_it_ends_the_job(start: Callable[..., Any], servers: RankServers) -> None:
    shared_before = shared_memory.names()
    plan = {"plan": TWO_ENGINES, "runs": [{"name": "killed", "streams": MIGRATION, "kills": True}]}
    job = start("streamed.py", 2, {"config": CONFIG, "plans": {"two": plan}}, servers=servers, grace_s=GRACE_S)
    noted, deadline = job.folder / "killed.json", time.monotonic() + patience(90)
    while not noted.exists():
        assert job.process.poll() is None and time.monotonic() < deadline, job.text()[-3000:]
        time.sleep(0.05)
    begun = time.monotonic()
    assert job.wait(REPORTED_WITHIN_S) != 0
    text = job.text()
    killed = json.loads(noted.read_text())["rank"]
    for rank in (0, 1):
        said = [line for line in text.splitlines() if f"[rank{rank}]" in line and "JobFailed" in line]
        assert any("SIGKILL" in line and f"(rank {killed})" in line for line in said), text[-4000:]
    assert time.monotonic() - begun < patience(15)
    assert job.gone_within(GONE_WITHIN_S), job.members()
    assert not shared_memory.left(shared_before, 5.0)


@pytest.mark.vllm
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_with_its_launcher_the_job_ends(start: Callable[..., Any], servers: RankServers, how: signal.Signals) -> None:
    """All processes are started as a user does before the launcher is killed, and forked before it is terminated."""
    shared_before = shared_memory.names()
    options = {**LONG, "plan": plan(2, changed=ONE_ENGINE)}
    job = start("train.py", 2, options, servers=servers if how is signal.SIGTERM else None, launched=True)
    wait_for_generation(job, 1)
    os.kill(job.pid, how)
    job.wait(60)
    assert job.gone_within(40 if how is signal.SIGTERM else GONE_WITHIN_S), job.members()
    assert not shared_memory.left(shared_before, 5.0)


def test_an_exception_on_one_rank_inside_a_collective_call_ends_the_job_with_its_cause(
    tmp_path: Path, servers: RankServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait in a collective that never ends. One row of `benchmarks/faults.py`, but for its seconds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import faults

    def forked(command: list[str], environment: dict[str, str], log: Path) -> Ranks:
        mark = Path(environment[faults.MARK])
        mark.write_bytes(b"\0")
        log.touch()
        return servers.alone(command[1:], log, {**environment, MARK_FILE: str(mark)})

    monkeypatch.setattr(faults, "start", forked)
    row = faults.run(faults.Row("flatten", "error", "actor.train"), tmp_path, None)
    assert row.seconds is not None and not row.left, row
    host = socket.gethostname()
    said = f"rank 1 on host {host} failed in actor.train of update 3: ValueError: an error made by benchmarks/faults.py"
    assert said in row.message, row


TWO_WORKERS: dict[str, Any] = {"actor.generate": {"mesh": "0-1", "dp": 1, "tp": 2, "engine": "vllm"}}


@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_sigterm_saves_a_checkpoint_on_all_ranks_whoever_gets_it_and_no_helper_ends_before(
    start: Callable[..., Any], servers: RankServers, algorithm: str
) -> None:
    """With `enable_jit_checkpoint`. PPO: to every process, the launcher and vLLM's workers among them, as Slurm sends
    it. GRPO: to one rank and its data loader. Before that the other processes get every signal that a cluster sends."""
    shared_before = shared_memory.names()
    launched = algorithm == "ppo"
    options = {"algorithm": algorithm, "plan": plan(2, changed=TWO_WORKERS) if launched else "flatten"}
    job = start("preempted.py", 2, options, servers=servers, launched=launched)
    wait_for_generation(job, 1, "'loss'" if algorithm == "grpo" else "objective/scores")
    members = job.members()
    helpers = [pid for pid, name in members.items() if re.search("watchdog_process|vllm_host|Worker", name)]
    assert len(helpers) == (5 if launched else 4), members  # an engine with two workers, or two engines
    for pid in helpers:
        for number in JOB_SIGNALS:
            os.kill(pid, number)
    loading = [pid for pid, name in members.items() if "pt_data_worker" in name]
    for pid in members if launched else [*loading, int((job.folder / "rank-1.pid").read_text())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    # a launcher that gets SIGTERM ends with status 1, whatever its ranks do
    assert job.wait(60) == int(launched), job.problem()
    (checkpoint,) = job.folder.glob("checkpoint-*")
    assert newest_whole(job.folder) == checkpoint
    steps = [json.loads((job.folder / f"ended-{rank}.json").read_text()) for rank in (0, 1)]
    assert checkpoint.name in (f"checkpoint-{steps[0]}", f"checkpoint-{steps[0] - 1}") and steps[0] == steps[1]
    assert job.gone_within(GONE_WITHIN_S), job.members()
    assert not shared_memory.left(shared_before, 5.0)
