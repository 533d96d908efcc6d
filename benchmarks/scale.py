"""Growth of a rank's messages and process groups with the number of devices.

    python benchmarks/scale.py --json benchmarks/results/scale.json

Counted, not timed, and without devices: for each number of devices one update of PPO is run by as many executors, each
in a thread, which send their samples and results over mailboxes in memory. Only the engines are stand-ins: they return
columns of the right shapes at once. Parameters are not sent either; the messages of a reallocation are those of its
transfer schedule, for 64 of the devices. Process groups are those that `runtime.process_groups` asks torch for.

    python benchmarks/scale.py --processes 32 --json FILE

then also trains a tiny model for three updates on so many real processes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("trainer", "runtime"))]

from mailboxes import Mailboxes  # noqa: E402

from trl_realloc.algorithms.ppo import PPO  # noqa: E402
from trl_realloc.algorithms.ppo_settings import PPOSettings  # noqa: E402
from trl_realloc.algorithms.prompt_batches import PromptBatch  # noqa: E402
from trl_realloc.algorithms.rollout import Ragged, Rollouts  # noqa: E402
from trl_realloc.engines.requests import Sampling  # noqa: E402
from trl_realloc.plan.cluster import Cluster, DeviceMesh  # noqa: E402
from trl_realloc.plan.dataflow import Call, CallKind, Role  # noqa: E402
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy  # noqa: E402
from trl_realloc.plan.model_spec import ModelSpec  # noqa: E402
from trl_realloc.realloc.layout import layout_of  # noqa: E402
from trl_realloc.realloc.schedule import make_schedule  # noqa: E402
from trl_realloc.realloc.transfer import TransferOptions  # noqa: E402
from trl_realloc.runtime import process_groups  # noqa: E402
from trl_realloc.runtime.calls.call_runner import CallRunner  # noqa: E402
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step  # noqa: E402
from trl_realloc.runtime.executor import Executor  # noqa: E402
from trl_realloc.runtime.failures.alarm import Alarm  # noqa: E402
from trl_realloc.runtime.messages import Channels, all_reduce  # noqa: E402
from trl_realloc.runtime.samples.routes import Share  # noqa: E402


DEVICES = (8, 64, 512, 4096)
SAMPLES_PER_DEVICE = 4
PROMPT, LIMIT, MEAN = 64, 512, 128  # tokens
M_MMAP_THRESHOLD = -3  # in malloc.h
SAMPLED = 64  # devices whose transfers are counted
LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
}


def plan_of(devices: int) -> ExecutionPlan:
    """All devices generate; then each half scores and trains one of actor and critic, under tensor and pipeline
    parallelism. So every call's mesh grows with the job."""
    cluster = Cluster(max(1, devices // 8), 8)
    half, pp = devices // 2, min(2, devices // 8)
    low, high = DeviceMesh(0, half), DeviceMesh(half, half)
    strategy = ParallelStrategy(half // (4 * pp), 4, pp)

    def megatron(mesh: DeviceMesh) -> Assignment:
        return Assignment(mesh, strategy, "megatron")

    return ExecutionPlan(
        cluster,
        {
            "actor.generate": Assignment(DeviceMesh(0, devices), ParallelStrategy(devices // 4, 4), "vllm"),
            "reference.forward": megatron(low),
            "reward.forward": megatron(high),
            "critic.forward": Assignment(high, ParallelStrategy(half // 4, 4), "megatron"),
            "actor.train": megatron(low),
            "critic.train": megatron(high),
        },
    )


# --- samples: the executors of all ranks, in threads ----------------------------------------------------------------


class NoEngines:
    """What the executor asks of `Placement`, of a rank without engines."""

    def __init__(self, plan: ExecutionPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def has(self, call: str) -> bool:
        return self.rank in self.plan.mesh(call)

    takes_part = has

    def prefetch(self, call: str, beside: Collection[str]) -> None:
        pass

    def refresh(self, call: str) -> None:
        return None

    def has_collectives(self, call: str) -> bool:
        return False

    def check_fresh(self, call: str) -> None:
        pass

    def shares_tokens(self, call: str) -> bool:
        return False

    def take_shared_tokens(self, call: str) -> int:
        return 0

    def resident(self, call: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CountedRunner(CallRunner):
    """Runs calls that return columns of the right shapes at once."""

    lengths: torch.Tensor

    def compute(self, call: Call, share: Share, step: Step) -> Rollouts:
        if call.kind is CallKind.TRAIN:
            name = self.algorithm.loss(call.name).statistic
            names = ("policy_loss", "clipped", "approxkl", "excess_ratio", "entropy")
            names = names if name == "policy_loss" else ("value_loss", "value_clipped")
            parts = [
                Rollouts(
                    index=batch.tensor("index"),
                    update=torch.full((len(batch),), at),
                    **{name: torch.zeros(len(batch)) for name in names},
                )
                for at, batch in enumerate(share.mini_batches())
                if len(batch)
            ]
            return Rollouts.cat(parts) if parts else Rollouts()
        index = share.samples.tensor("index")
        if not len(index):
            return Rollouts()
        lengths = self.lengths[index]
        tokens = Ragged(torch.ones(int(lengths.sum()), dtype=torch.long), lengths)
        match call.outputs:
            case ("responses", "logprobs"):
                columns: dict[str, Any] = {
                    "responses": tokens,
                    "logprobs": tokens.like(torch.zeros(len(tokens.values))),
                    "has_eos": torch.ones(len(index), dtype=torch.bool),
                }
            case ("scores",):
                columns = {"scores": torch.zeros(len(index))}
            case ("values",):
                columns = {"values": Ragged(torch.zeros(int((lengths + 1).sum())), lengths + 1)}
            case (name,):
                columns = {name: tokens.like(torch.zeros(len(tokens.values)))}
        return Rollouts(index=index, **columns)


class TakingTurns(queue.SimpleQueue[Any]):
    """A queue of a rank's thread, which has the turn but while it waits. Thousands of threads that may run at the same
    time would spend most of it on taking Python's lock from each other."""

    turn = threading.Lock()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with contextlib.suppress(queue.Empty):
            return super().get(block=False)
        self.turn.release()
        try:
            return super().get(block, timeout)
        finally:
            self.turn.acquire()


def update(plan: ExecutionPlan) -> Mailboxes:
    """One update of all ranks, and the agreements of two reallocations."""
    n = SAMPLES_PER_DEVICE * plan.cluster.size
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randn(n, generator=draw) * 0.8 + torch.log(torch.tensor(0.7 * MEAN))).exp().long().clamp(1, LIMIT)
    prompts = Rollouts(
        index=torch.arange(n), prompts=Ragged(torch.ones(n * PROMPT, dtype=torch.long), torch.full((n,), PROMPT))
    )
    batch = PromptBatch(prompts, [{}] * n)
    boxes = Mailboxes(timeout_s=None, new_queue=TakingTurns)
    settings = CallSettings(Sampling(LIMIT, 1.0), 0, None, None, [], {})
    failures: list[BaseException] = []

    def rank_of(rank: int) -> None:
        try:
            with TakingTurns.turn:
                run_rank(rank)
        except BaseException as error:
            failures.append(error)
            raise

    def run_rank(rank: int) -> None:
        placement: Any = NoEngines(plan, rank)
        channels = Channels(boxes.of(rank), plan.order, rank, plan.cluster.size)
        algorithm, alarm = PPO(PPOSettings(LIMIT)), Alarm()
        runner = CountedRunner(placement, algorithm, settings, alarm)
        runner.lengths = lengths
        executor = Executor(placement, channels, algorithm, settings, alarm, runner)
        executor.run(batch, 0, {Role.ACTOR: 0.0, Role.CRITIC: 0.0})
        for tag, (source, target) in enumerate(plan.reallocations, 1 << 20):
            ranks = sorted({*plan.mesh(source).devices, *plan.mesh(target).devices})
            if rank in ranks:  # on the versions, and on the outcome
                for _ in range(2):
                    all_reduce(boxes.of(rank), ranks, rank, 0, max, 10 * tag)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(plan.cluster.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            if failures:
                raise failures[0]
    return boxes


# --- parameters, groups -----------------------------------------------------------------------------------------------


def transfers(plan: ExecutionPlan) -> list[int]:
    """Messages that `SAMPLED` devices send in the plan's reallocations."""
    devices = range(0, plan.cluster.size, max(1, plan.cluster.size // SAMPLED))
    counts = dict.fromkeys(devices, 0)
    for source, target in plan.reallocations:
        head = "lm" if source.startswith("actor") else "score"
        spec = ModelSpec.from_config({**LLAMA_7B, "num_labels": 1}, head, bytes_per_element=4)
        schedule = make_schedule(plan.cluster, layout_of(plan[source], spec), layout_of(plan[target], spec))
        for device in devices:
            counts[device] += sum(len(step.sends) for step in schedule.steps(device, TransferOptions().bucket_bytes))
    return list(counts.values())


def groups(plan: ExecutionPlan) -> list[int]:
    """Process groups that each rank is in, of those that `runtime.process_groups` asks torch for."""
    counts = [0] * plan.cluster.size

    def count(ranks: Any = None, **options: Any) -> None:
        for rank in ranks or range(plan.cluster.size):
            counts[rank] += 1

    with (
        mock.patch.object(dist, "is_initialized", lambda: True),
        mock.patch.object(process_groups, "is_accelerator", lambda _: True),
        mock.patch.object(process_groups, "group_device", lambda *_: torch.device("cpu")),
        mock.patch.object(dist, "new_group", count),
    ):
        process_groups.make_groups(plan, 0, timedelta(seconds=1))
        process_groups.make_split_groups(plan, 0, timedelta(seconds=1))
        process_groups.make_reallocation_groups(plan, 0, timedelta(seconds=1))
    return counts


def row_of(devices: int) -> dict[str, Any]:
    plan, start = plan_of(devices), time.perf_counter()
    boxes = update(plan)
    leaders = {assignment.mesh.first for assignment in plan.assignments.values()}
    others = [rank for rank in range(devices) if rank not in leaders]
    of_samples, of_bytes = ([count[rank] for rank in range(devices)] for count in (boxes.sent, boxes.bytes))
    of_parameters, of_groups = transfers(plan), groups(plan)
    return {
        "devices": devices,
        "messages_per_rank": statistics.mean(of_samples) + statistics.mean(of_parameters),
        "messages_per_rank_max": max(of_samples) + max(of_parameters),
        "messages_max_but_leaders": max(of_samples[rank] for rank in others) + max(of_parameters),
        "transfer_messages_per_rank": statistics.mean(of_parameters),
        "transfer_messages_per_rank_max": max(of_parameters),
        "bytes_per_rank": statistics.mean(of_bytes),
        "bytes_per_rank_max": max(of_bytes),
        "bytes_max_but_leaders": max(of_bytes[rank] for rank in others),
        "groups_per_rank": statistics.mean(of_groups),
        "groups_per_rank_max": max(of_groups),
        "counted_in_s": time.perf_counter() - start,
    }


# --- a run of many real processes -------------------------------------------------------------------------------------


def rank_of_a_run(folder: Path) -> None:
    """One rank of a real run of three updates."""
    import tiny

    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    half = world // 2
    low, high, everywhere = f"0-{half - 1}", f"{half}-{world - 1}", f"0-{world - 1}"
    calls = {"actor.generate": {"mesh": everywhere, "engine": "transformers", "dp": world}}
    for call, mesh in (
        ("reference.forward", low), ("reward.forward", high), ("critic.forward", high),
        ("actor.train", low), ("critic.train", high),
    ):  # fmt: skip
        calls[call] = {"mesh": mesh, "engine": "megatron", "dp": half // 4, "tp": 2, "pp": 2}
    plan = {"cluster": {"nodes": 1, "devices_per_node": world}, "calls": calls}
    made = tiny.trainer(folder, plan=plan, per_device_train_batch_size=2, max_steps=3, ddp_timeout=600)
    made.train()
    if made.accelerator.process_index == 0:
        rows = [{k: v for k, v in row.items() if k == "time/step"} for row in made.state.log_history]
        (folder / "run.json").write_text(json.dumps([row["time/step"] for row in rows if row]))
    made.close()


def real_run(processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        start = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*command, __file__, "--rank", folder], check=True, env=environment)
        whole = time.perf_counter() - start
        return {
            "processes": processes,
            "seconds": whole,
            "updates_s": json.loads((Path(folder) / "run.json").read_text()),
        }


def show(result: dict[str, Any]) -> None:
    table = Table("devices", "messages", "most of a rank", "but leaders", "kB", "most but leaders", "groups", "most")
    for row in result["rows"]:
        table.add_row(
            f"{row['devices']:,}",
            f"{row['messages_per_rank']:.1f}",
            f"{row['messages_per_rank_max']:,}",
            f"{row['messages_max_but_leaders']:,}",
            f"{row['bytes_per_rank'] / 1e3:.0f}",
            f"{row['bytes_max_but_leaders'] / 1e3:.0f}",
            f"{row['groups_per_rank']:.1f}",
            f"{row['groups_per_rank_max']:,}",
        )
    console = Console()
    console.print("Sent by one rank in one update; process groups that it is in")
    console.print(table)
    if "run" in result:
        run = result["run"]
        console.print(
            f"{run['processes']} real processes: updates of {run['updates_s']} s, {run['seconds']:.0f} s in all"
        )


def _make_room_for_threads() -> None:
    """Settings of this process for a thread for each rank."""
    torch.set_num_threads(1)  # else every rank's thread makes threads of its own
    # glibc would keep what each thread has freed: 9 GB for 1,024 ranks in place of 2
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)
    threading.stack_size(512 << 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--processes", type=int, help="of a real run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_of_a_run(options.rank)
        return
    _make_room_for_threads()
    result: dict[str, Any] = {"rows": [row_of(devices) for devices in options.devices]}
    if options.processes:
        result["run"] = real_run(options.processes)
    show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
