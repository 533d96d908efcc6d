"""Peak host memory of every rank while it loads, trains, saves, resumes and changes its plan, beside its share.

    python benchmarks/memory.py --json benchmarks/results/memory.json

A Llama of some 600 million parameters with random weights is written to disk, in float32. Gloo processes train it as
one role under several layouts, with the engines, the placement and the checkpoints of the trainer. Each layout is
launched twice: load, train one step, save; and, in new processes, load, resume, replan (move to the next layout of the
list). The second launch reads what the first has saved.

`peak_mb` is anonymous and shared memory (RssAnon + RssShmem of /proc/self/status, read every 5 ms by a thread) above
that of the process before it loads. The pages of files that are read through mmap are left out, because the kernel
takes them back when memory is short. `share_mb` is what the layout gives the rank: in the phase train its parameters,
gradients and optimizer state, in load its parameters, otherwise parameters and optimizer state, in replan those of both
layouts. The aim is a peak of at most 1.15 x the share + 300 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROCESSES, MB = 4, 1e6
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 4": {"engine": "megatron", "tp": 4},
    "pp 4": {"engine": "megatron", "pp": 4},
    "tp 2 x dp 2": {"engine": "megatron", "tp": 2, "dp": 2, "zero_stage": 1},
    "zero 3": {"engine": "zero", "dp": 4, "zero_stage": 3},
    "replicated x 1": {"engine": "zero", "dp": 1},
}
SIZES: dict[int, dict[str, int]] = {
    600: {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 18, "num_attention_heads": 16},
    60: {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8},
    6: {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 4},
}
# DeepSpeed's defaults are for large GPUs: up to a billion gathered parameters, half a billion gradients in a bucket.
DEEPSPEED = {
    "zero_optimization": {
        "stage3_max_live_parameters": 10_000_000,
        "stage3_max_reuse_distance": 10_000_000,
        "stage3_prefetch_bucket_size": 5_000_000,
        "reduce_bucket_size": 5_000_000,
        "sub_group_size": 10_000_000,
    }
}
SAMPLES, TOKENS = 8, 32
FACTOR, ALLOWED_MB = 1.15, 300


def processes(layout: str) -> int:
    return 1 if layout == "replicated x 1" else PROCESSES


def write_model(folder: Path, size: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = SIZES[size]["num_attention_heads"]
    config = LlamaConfig(**SIZES[size], vocab_size=32000, num_key_value_heads=heads, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")


# --- one rank ---------------------------------------------------------------------------------------------------------


class Memory:
    """The memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        gc.collect()
        self.before = self.now()
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    @staticmethod
    def now() -> int:
        """Bytes of anonymous and shared memory."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak inside."""
        done, samples = threading.Event(), [self.now()]

        def sample() -> None:
            while not done.wait(0.005):
                samples.append(self.now())

        watcher, start = threading.Thread(target=sample, daemon=True), time.perf_counter()
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self.seconds[name] = time.perf_counter() - start
            self.peaks[name] = max(*samples, self.now()) - self.before
            gc.collect()


def plan_of(layout: str) -> Any:
    from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
    from trl_realloc.plan.execution_plan import ExecutionPlan

    columns = ("prompts", "responses")
    graph = DataflowGraph((Call(Role.ACTOR, CallKind.TRAIN, columns),), columns)
    devices = processes(layout)
    call = {"mesh": f"0-{devices - 1}" if devices > 1 else "0", "dp": 1, **LAYOUTS[layout]}
    cluster = {"nodes": 1, "devices_per_node": devices}
    return ExecutionPlan.from_dict({"cluster": cluster, "graph": graph.to_dict(), "calls": {"actor.train": call}})


def samples_of(rank: int, layout: str) -> Any:
    """This rank's samples: those of its data-parallel replica."""
    from trl_realloc.algorithms.rollout import Ragged, Rollouts

    strategy = LAYOUTS[layout]
    replica = rank // (strategy.get("tp", 1) * strategy.get("pp", 1))
    rows = range(replica, SAMPLES, strategy.get("dp", 1))
    ids = [torch.arange(3, 3 + TOKENS // 2) + row for row in rows]
    return Rollouts(index=torch.tensor(rows), prompts=Ragged.of(ids, torch.long), responses=Ragged.of(ids, torch.long))


def negative_logprobs(outputs: Any, samples: Any) -> tuple[Any, dict[str, Any]]:
    column = outputs["logprobs"]
    return -column.values.sum() / (SAMPLES * TOKENS), {"tokens": column.lengths.float()}


def rank_main(layout: str, part: str, model: Path, checkpoint: Path, out: Path) -> None:
    import torch.distributed as dist

    import trl_realloc.trainer.run.checkpoints  # noqa: F401  (the libraries are part of the process, not of a phase)
    from trl_realloc.engines.model_configs import read_config, trained_config
    from trl_realloc.engines.models import load_policy, shell
    from trl_realloc.plan.dataflow import Role
    from trl_realloc.plan.model_spec import ModelSpec
    from trl_realloc.realloc.layout import layout_of
    from trl_realloc.realloc.memory import call_bytes
    from trl_realloc.runtime.placement.engine_options import EngineOptions
    from trl_realloc.runtime.placement.placement import Placement
    from trl_realloc.runtime.placement.roles import RoleModels, Roles
    from trl_realloc.runtime.placement.run_state import RunState
    from trl_realloc.trainer.checkpoint.model_files import save_models
    from trl_realloc.trainer.checkpoint.state_files import StateWrite, load_training_state
    from trl_realloc.trainer.checkpoint.write_errors import WriteErrors

    with contextlib.suppress(ImportError):
        import deepspeed  # noqa: F401

    rank, plan = int(os.environ["RANK"]), plan_of(layout)
    if processes(layout) > 1:
        dist.init_process_group("gloo")
    options = EngineOptions(
        device=torch.device("cpu"),
        temperature=1.0,
        response_length=TOKENS,
        context_length=TOKENS,
        forward_batch_size=2,
        train_batch_size=2,
        pad_token_id=0,
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters()),
        deepspeed=DEEPSPEED,
        transfer_timeout_s=3600.0,  # the machine may be busy
    )
    config = trained_config(read_config(str(model), "model"), str(model))
    load = partial(load_policy, str(model), trained=True)
    roles = Roles({Role.ACTOR: RoleModels("policy", [load], config=config, shell=partial(shell, config))})
    spec = ModelSpec.from_config(config, "lm", bytes_per_element=4)

    def shares(of: str) -> dict[str, float]:
        """Bytes of this rank in the phases of a layout."""
        assignment = plan_of(of)["actor.train"]
        parameters = layout_of(assignment, spec).bytes(rank)
        trains = call_bytes(plan_of(of), {"actor.train": [spec]})[rank]["actor.train"].most
        return {"load": parameters, "train": trains, "save": trains - parameters, "resume": trains - parameters}

    placement = Placement(plan, rank, roles, options)
    memory, share = Memory(), shares(layout)
    with memory.phase("load"):
        placement.start()
    engine = placement.trained(Role.ACTOR)
    assert engine is not None
    if part == "first":
        with memory.phase("train"):
            engine.train(samples_of(rank, layout), negative_logprobs, 2 * TOKENS, 1e-4)
        problems = WriteErrors(rank, placement.control)
        with memory.phase("save"):
            save_models(placement, checkpoint, lambda folder: None, problems)
            StateWrite(placement, checkpoint, problems).finish()
    else:
        with memory.phase("resume"):
            load_training_state(placement, checkpoint, lambda files: None)
        if processes(layout) > 1:
            names = [name for name in LAYOUTS if processes(name) == processes(layout)]
            following = names[(names.index(layout) + 1) % len(names)]
            share["replan"] = share["resume"] + shares(following)["resume"]
            new_plan = plan_of(following)
            with memory.phase("replan"):
                state = RunState(placement)
                placement.close()
                del engine
                placement = Placement(new_plan, rank, state.roles(roles, new_plan), options)
                placement.start()
                state.load_into(placement)
        memory.peaks.pop("load")
    rows = [
        {
            "layout": layout,
            "phase": phase,
            "rank": rank,
            "peak_mb": round(peak / MB, 1),
            "share_mb": round(share[phase] / MB, 1),
            "before_mb": round(memory.before / MB, 1),
            "seconds": round(memory.seconds[phase], 2),
        }
        for phase, peak in memory.peaks.items()
    ]
    (out / f"{part}-{rank}.json").write_text(json.dumps(rows))
    placement.close()
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may abort a process that ends while others end


# --- all launches -----------------------------------------------------------------------------------------------------


def launch(layout: str, part: str, model: Path, checkpoint: Path, out: Path, log: Path) -> list[dict[str, Any]]:
    """The rows of one launch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes(layout)}"]
    command += [str(Path(__file__)), "--rank-of", layout, part, str(model), str(checkpoint), str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # otherwise malloc keeps freed tensors of up to 32 MB
    }
    with log.open("a") as file:
        code = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode
    if code:
        raise SystemExit(f"{layout}, {part} launch: exit status {code}\n{log.read_text()[-4000:]}")
    return [row for path in sorted(out.glob(f"{part}-*.json")) for row in json.loads(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", type=int, choices=SIZES, default=600, help="millions of parameters, about")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--launches", nargs="*", choices=("first", "second"), default=["first", "second"])
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        layout, part, *paths = options.rank_of
        rank_main(layout, part, *map(Path, paths))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", options.size)
        for number, layout in enumerate(options.layouts):
            checkpoint, out = folder / f"checkpoint-{number}", folder / f"out-{number}"
            out.mkdir()
            for part in options.launches:
                rows += launch(layout, part, folder / "model", checkpoint, out, folder / f"log-{number}.txt")
                save(rows, options.size, options.json)
            shutil.rmtree(checkpoint, ignore_errors=True)
            show([row for row in rows if row["layout"] == layout])


def save(rows: list[dict[str, Any]], size: int, path: Path | None) -> None:
    if path is None:
        return
    result = {
        "rows": rows,
        "model": SIZES[size],
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU, {PROCESSES} gloo processes",
        "torch": torch.__version__,
        "commit": result_file.commit(),
    }
    result_file.write(path, result)


def show(rows: list[dict[str, Any]]) -> None:
    """The fullest rank of each phase, relative to its share."""
    table = Table("layout", "phase", "rank", "peak MB", "share MB", "allowed MB", "s")
    for phase in dict.fromkeys(row["phase"] for row in rows):
        of_phase = [row for row in rows if row["phase"] == phase]
        row = max(of_phase, key=lambda row: row["peak_mb"] - FACTOR * row["share_mb"])
        allowed = FACTOR * row["share_mb"] + ALLOWED_MB
        mark = "" if row["peak_mb"] <= allowed else " !"
        peak = f"{row['peak_mb']:,.0f}{mark}"
        table.add_row(
            row["layout"],
            phase,
            str(row["rank"]),
            peak,
            f"{row['share_mb']:,.0f}",
            f"{allowed:,.0f}",
            str(row["seconds"]),
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
