"""Generation and scoring that overlap (streams), against one after the other, with vLLM engines on this machine.

    python benchmarks/fusion.py --json benchmarks/results/fusion.json

Responses have a long tail, and the modes alternate on the same batches. serial: scoring begins when all samples are
generated; streamed: when samples and a device are there; migrated: the last unfinished samples also move to few
engines. One sample of the batch is long, and critic and reward model are larger than the policy. All modes run in one
job, on the same engines, models and prompts; other processes should not run beside it.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from skewed import Skewed, tokenizer


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODES = ("serial", "streamed", "migrated")
STAGE = ("actor.generate", "reference.forward", "reward.forward", "critic.forward")


# --- one rank -------------------------------------------------------------------------------------------------------


def plans(processes: int, threshold: float) -> dict[str, Any]:
    """By mode, the same assignments with other streams."""
    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.presets import flatten
    from trl_realloc.plan.streams import Migration, Streams

    plan = flatten(Cluster(1, processes))
    migration = Migration(threshold, engines=max(1, processes // 2))
    return {
        "serial": plan,
        "streamed": replace(plan, streams=Streams()),
        "migrated": replace(plan, streams=Streams(migration=migration)),
    }


def trainer(plan: Any, skewed: Skewed, episodes: int, folder: str) -> Any:
    from datasets import Dataset

    from trl_realloc import PPOConfig, PPOTrainer

    arguments = PPOConfig(
        output_dir=folder,
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=episodes // plan.cluster.size,
        total_episodes=episodes,
        num_ppo_epochs=1,
        response_length=skewed.limit,
        stop_token="eos",
        temperature=1.0,
        learning_rate=0.0,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        generation_engine="vllm",
        plan=plan,
    )
    policy, critic, reward = skewed.models()
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer(),
        model=policy,
        ref_model=skewed.models()[0],
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": skewed.prompts(episodes, 0)}),
    )


def generate_and_score(made: Any, plan: Any, rows: list[list[int]]) -> dict[str, Any]:
    """An iteration without its training. Returns its figures on rank 0."""
    from trl_realloc.algorithms.prompt_batches import PromptBatch
    from trl_realloc.algorithms.rollout import Ragged, Rollouts
    from trl_realloc.planner.iteration.stream_dispatcher import Continue

    executor = made.executor
    executor.plan = executor.placement.plan = plan
    executor.orders = ()
    prompts = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
    made.accelerator.wait_for_everyone()
    iteration = executor.run(PromptBatch(prompts, [{}] * len(rows)), 0, {}, only=STAGE)
    if made.accelerator.process_index:
        return {}
    spans = [span for span in iteration.spans if span.call in STAGE]
    first = min(span.start for span in spans)
    return {
        "seconds": max(span.end for span in spans) - first,
        "generate_s": max(span.end for span in spans if span.call == STAGE[0]) - first,
        "scoring_core_s": sum(span.seconds for span in spans if span.call != STAGE[0]),
        "moved": sum(len(order.samples) for order in executor.orders if isinstance(order, Continue)),
        "responses": [row.tolist() for row in iteration.samples.ragged("responses").rows()],
    }


def rank(processes: int, skewed: Skewed, samples: int, threshold: float, repeats: int, out: Path) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    of_mode, runs = plans(processes, threshold), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(of_mode["migrated"], skewed, samples * processes, folder)  # with slots for samples that move
        made.run.placed.start()
        for repeat in range(-1, repeats):  # the first warms up
            rows = skewed.prompts(samples * processes, 2 + repeat)
            for mode in [MODES[(repeat + at) % len(MODES)] for at in range(len(MODES))]:
                runs.append({"mode": mode, "repeat": repeat, **generate_and_score(made, of_mode[mode], rows)})
        if not made.accelerator.process_index:
            out.write_text(json.dumps([run for run in runs if run["repeat"] >= 0]))
        made.run.placed.end_together()
        made.close()


# --- the job ----------------------------------------------------------------------------------------------------------


def measure(processes: int, skewed: Skewed, samples: int, threshold: float, repeats: int) -> list[dict[str, Any]]:
    """Runs the job. Returns a row for each mode.

    Args:
        samples: of each engine.
        threshold: share of the batch; the unfinished samples move when there are fewer.
        repeats: batches, each in every mode.

    Raises:
        SystemExit: the job failed, or two modes drew other tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "runs.json", Path(folder) / "log"
        given = [processes, asdict(skewed), samples, threshold, repeats, str(out)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        with log.open("w") as written:
            command += [__file__, "--rank", json.dumps(given)]
            code = subprocess.run(command, env=environment, stdout=written, stderr=written, check=False).returncode
        if code:
            sys.exit(f"the job of {processes} processes failed:\n{log.read_text()[-4000:]}")
        runs = json.loads(out.read_text())
    by_mode = {mode: [run for run in runs if run["mode"] == mode] for mode in MODES}
    for mode, of_mode in by_mode.items():
        by_mode[mode] = sorted(of_mode, key=lambda run: run["repeat"])
        if [run["responses"] for run in by_mode[mode]] != [run["responses"] for run in by_mode["serial"]]:
            sys.exit(f"{mode} drew other tokens than serial")
    return [row(processes, mode, by_mode[mode], by_mode["serial"]) for mode in MODES]


def row(
    processes: int, mode: str, runs: Sequence[Mapping[str, Any]], serial: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    gains = [base["seconds"] / run["seconds"] for base, run in zip(serial, runs, strict=True)]
    names = ("seconds", "generate_s", "scoring_core_s", "moved")
    medians = {name: statistics.median(run[name] for run in runs) for name in names}
    return {"processes": processes, "mode": mode, **medians, "gain": statistics.median(gains), "gains": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4, help="batches that are generated and scored in each mode")
    parser.add_argument("--limit", type=int, default=1536, help="most tokens of a response")
    parser.add_argument("--samples", type=int, default=48, help="samples of each engine")
    parser.add_argument("--threshold", type=float, default=0.2, help="share of the batch of which the rest moves")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        processes, sizes, samples, threshold, repeats, out = options.rank
        rank(processes, Skewed(**sizes), samples, threshold, repeats, Path(out))
        return
    skewed = Skewed(prompt=128, limit=options.limit, long_share=1 / 96, scorer_hidden=448)
    rows = measure(options.processes, skewed, options.samples, options.threshold, options.repeats)
    table = Table("mode", "s", "gain", "of each batch", "generate s", "scoring core-s", "moved")
    for each in rows:
        gains = ", ".join(f"{gain:.2f}" for gain in each["gains"])
        figures = [f"{each[name]:.2f}" for name in ("generate_s", "scoring_core_s", "moved")]
        table.add_row(each["mode"], f"{each['seconds']:.2f}", f"{each['gain']:.2f}x", gains, *figures)
    Console().print(table)
    if options.json:
        about = {"hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU", "torch": torch.__version__}
        result_file.write(options.json, {"rows": rows, **about, "commit": result_file.commit()})


if __name__ == "__main__":
    main()
