"""Reallocation on real wires: train layout -> generate layout, beside raw bandwidth and beside gather-and-broadcast.

    python benchmarks/realloc.py --json benchmarks/results/realloc.json

Four gloo processes hold a Llama of 0.3 billion parameters (float32, random). For each pair of layouts, alternating in
one run: (1) the transfer as the trainer runs it; (2) the same processes' raw point-to-point time for the same bytes
between the same pairs of ranks, nothing packed; (3) the way most trainers do it: the full state is gathered on every
training rank parameter by parameter, and the first broadcasts it to all that generate. Then, without processes, the
schedule of a 70-billion-parameter Llama on 1,024 devices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_file
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trl_realloc.plan.cluster import Cluster, DeviceMesh  # noqa: E402
from trl_realloc.plan.model_spec import ModelSpec  # noqa: E402
from trl_realloc.realloc import layout as layouts  # noqa: E402
from trl_realloc.realloc.layout import Layout  # noqa: E402
from trl_realloc.realloc.schedule import TransferSchedule, make_schedule  # noqa: E402
from trl_realloc.realloc.transfer import Parts, Transfer, TransferOptions  # noqa: E402


PROCESSES = 4
MODEL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


def pairs(spec: ModelSpec) -> dict[str, tuple[Layout, Layout]]:
    """Eight that plans for four devices ask for."""
    everywhere, low, high = DeviceMesh(0, 4), DeviceMesh(0, 2), DeviceMesh(2, 2)
    zero3 = layouts.zero3_layout(spec, everywhere)
    dp2_tp2 = layouts.megatron_layout(spec, everywhere, 2, 1)
    tp2_pp2 = layouts.megatron_layout(spec, everywhere, 2, 2)
    pp4 = layouts.megatron_layout(spec, everywhere, 1, 4)
    return {
        "zero3 0-3 -> owners 0-3 (tp 2)": (zero3, layouts.owners_layout(spec, everywhere, 2)),
        "zero3 0-3 -> whole 2-3": (zero3, layouts.replicated_layout(spec, high)),
        "dp2 tp2 0-3 -> whole 0-3": (dp2_tp2, layouts.replicated_layout(spec, everywhere)),
        "dp2 tp2 0-3 -> vllm tp4 slices": (dp2_tp2, layouts.vllm_layout(spec, everywhere, 4)),
        "tp2 pp2 0-3 -> whole 0-1": (tp2_pp2, layouts.replicated_layout(spec, low)),
        "tp2 pp2 0-3 -> dp2 tp2": (tp2_pp2, dp2_tp2),
        "pp4 0-3 -> tp 2 dp 2": (pp4, dp2_tp2),
        "whole 0-1 -> whole 2-3": (layouts.replicated_layout(spec, low), layouts.replicated_layout(spec, high)),
    }


# --- one rank ---


def parts_of(layout: Layout, rank: int, shapes: dict[str, tuple[int, ...]]) -> Parts:
    made: dict[str, list[tuple[Any, torch.Tensor]]] = {}
    for name, boxes in layout.parts(rank).items():
        made[name] = [(box, torch.ones([stop - start for start, stop in box])) for box in boxes]
    return made


def point_to_point(schedule: TransferSchedule, rank: int, bucket_bytes: int) -> None:
    """The same bytes between the same ranks, from and into one buffer: what the wire allows."""
    works, most = [], 0
    steps = list(schedule.steps(rank, bucket_bytes))
    for step in steps:
        most = max([most, *(message.bytes for message in (*step.sends, *step.receives))])
    buffer = torch.zeros(most, dtype=torch.uint8)
    for number, step in enumerate(steps):
        tag = 100_000 + step.bucket * 8 + step.wave
        works += [dist.irecv(buffer[: m.bytes], m.source, tag=tag) for m in step.receives]
        works += [dist.isend(buffer[: m.bytes], m.target, tag=tag) for m in step.sends]
        if number % 2:
            for work in works:
                work.wait()
            works = []
    for work in works:
        work.wait()


def gather_and_broadcast(
    source: Layout,
    target: Layout,
    held: Parts,
    wanted: Parts,
    shapes: dict[str, tuple[int, ...]],
    rank: int,
) -> None:
    """Parameter by parameter: whole on every rank of the source, from its first to every rank of the target, each of
    which keeps what is its own."""
    leader = min(source.devices)
    for name, placed in source.parameters.items():
        whole = torch.empty(shapes[name])
        for cell in placed:  # each box from its first holder to all: an all-gather of unequal parts
            part = torch.empty([stop - start for start, stop in cell.box])
            if rank == cell.devices[0]:
                part.copy_(next(tensor for box, tensor in held[name] if box == cell.box))
            if len(source.devices) > 1:
                dist.broadcast(part, cell.devices[0])
            whole[tuple(slice(a, b) for a, b in cell.box)] = part
        dist.broadcast(whole, leader)
        for box, tensor in wanted.get(name, ()):
            tensor.copy_(whole[tuple(slice(a, b) for a, b in box)])


def worker(out: Path, repeats: int) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = ModelSpec.from_config(MODEL, "lm", bytes_per_element=4)
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    cluster, bucket_bytes = Cluster(1, PROCESSES), 64 << 20
    rows = []
    for name, (source, target) in pairs(spec).items():
        schedule = make_schedule(cluster, source, target)
        group, device = dist.group.WORLD, torch.device("cpu")
        dtypes = dict.fromkeys(shapes, torch.float32)
        moving = Transfer(name, schedule, rank, group, device, dtypes, TransferOptions(bucket_bytes))
        held, wanted = parts_of(source, rank, shapes), parts_of(target, rank, shapes)

        def transfer(moving: Transfer = moving, held: Parts = held, wanted: Parts = wanted) -> None:
            for _ in moving.run(held, lambda names: {n: wanted[n] for n in names if n in wanted}):
                pass

        def raw(schedule: TransferSchedule = schedule) -> None:
            point_to_point(schedule, rank, bucket_bytes)

        def gather(s: Layout = source, t: Layout = target, held: Parts = held, wanted: Parts = wanted) -> None:
            gather_and_broadcast(s, t, held, wanted, shapes, rank)

        ways: dict[str, Callable[[], None]] = {"seconds": transfer, "p2p_seconds": raw, "gather_seconds": gather}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(repeats + 1):
            for way, do in ways.items():
                dist.barrier()
                start = time.perf_counter()
                do()
                dist.barrier()
                if repeat:  # the first touches the memory
                    times[way].append(time.perf_counter() - start)
        told: list[Any] = [None] * PROCESSES
        dist.all_gather_object(told, moving.sent_bytes)
        medians = {way: statistics.median(each) for way, each in times.items()}
        rows.append({"pair": name, "bytes": sum(told), "lower_bound_bytes": lacked_bytes(schedule), **medians})
    if rank == 0:
        out.write_text(json.dumps({"rows": rows, "parameters": spec.bytes // 4}))
    dist.destroy_process_group()


# --- the benchmark ---


def lacked_bytes(schedule: TransferSchedule) -> int:
    """What the target's devices lack, the least that can be sent."""
    wanted = sum(schedule.target.bytes(device) for device in schedule.target_devices)
    kept = sum(layouts.volume(piece.box) for device in schedule.target_devices for piece in schedule.kept(device))
    return wanted - kept * schedule.spec.bytes_per_element


def big_schedule() -> dict[str, float]:
    """(dp 8, tp 8, pp 16) -> (dp 128, tp 8) of the 70B on 128 nodes of 8."""
    start = time.perf_counter()
    spec = ModelSpec.from_config(LLAMA_70B, "lm", bytes_per_element=2)
    mesh = DeviceMesh(0, 1024)
    source, target = layouts.megatron_layout(spec, mesh, 8, 16), layouts.megatron_layout(spec, mesh, 8, 1)
    laid_out = time.perf_counter()
    schedule = make_schedule(Cluster(128, 8), source, target)
    done = time.perf_counter()
    sent = [size for device in range(mesh.size) if (size := schedule.sent(device))]
    return {
        "seconds": done - laid_out,
        "layout_seconds": laid_out - start,
        "max_over_mean_sender": max(sent) / statistics.mean(sent),
        "bytes": sum(sent),
        "lower_bound_bytes": lacked_bytes(schedule),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"]
        arguments = [str(Path(__file__)), "--worker", str(out), "--repeats", str(options.repeats)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run([*launcher, *arguments], env=environment, check=True)
        measured = json.loads(out.read_text())
    result = {
        **measured,
        "schedule": big_schedule(),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU, {PROCESSES} gloo processes",
        "torch": torch.__version__,
        "commit": result_file.commit(),
    }
    show(result)
    if options.json:
        result_file.write(options.json, result)


def show(result: dict[str, Any]) -> None:
    table = Table("pair", "MB", "lower bound MB", "seconds", "x raw p2p", "gather / ours")
    for row in result["rows"]:
        table.add_row(
            row["pair"],
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['lower_bound_bytes'] / 1e6:,.0f}",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / row['p2p_seconds']:.2f}",
            f"{row['gather_seconds'] / row['seconds']:.1f}x",
        )
    console = Console()
    console.print(table)
    big = result["schedule"]
    console.print(
        f"70B on 1,024 devices: layouts {big['layout_seconds']:.2f} s, schedule {big['seconds']:.2f} s, "
        f"{big['bytes'] / 1e12:.1f} TB, most loaded sender {big['max_over_mean_sender']:.3f} x the mean"
    )


if __name__ == "__main__":
    main()
