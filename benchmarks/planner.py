"""The planner's estimates against measured iterations, on CPU processes of this machine.

    python benchmarks/planner.py [--json FILE] [--processes 2 4] [--pairs equal ...] [--updates N]

For each pair of models and number of processes it trains under the planner's choice and under every preset, a few
updates each, and sets the estimated seconds of every call and of the iteration beside the measured ones: the median of
the updates after the first (the JSON has them all, and the fastest). The first run of a pair measures the machine; the
others read its profile. Where the planner chose a preset, both are runs of one plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import AUTO, PRESETS
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.cost.estimate_factors import CalibrationFactors, layout_name
from trl_realloc.planner.cost.profile import Profile


# (hidden, layers) of actor and critic; reference is the actor's, reward the critic's shape
BIG, SMALL = (256, 4), (128, 2)
PAIRS = {"equal": (BIG, BIG), "big actor": (BIG, SMALL), "big critic": (SMALL, BIG)}
# several CPU processes are started as if each had a GPU; the config then takes gloo
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]
VOCABULARY, PROMPT, RESPONSE, EPISODES = 1000, 16, 64, 64
LIMIT_S = 600


def make_trainer(pair: str, plan: str, folder: Path, updates: int, engine: str | None, callbacks: Any = None) -> Any:
    """The trainer of a run of a pair of models."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    from trl_realloc import PPOConfig, PPOTrainer

    vocabulary = {"[PAD]": 0, "[EOS]": 1, **{f"w{at}": at for at in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")

    def config(shape: tuple[int, int]) -> LlamaConfig:
        hidden, layers = shape
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=PROMPT + RESPONSE,
            pad_token_id=0,
            num_labels=1,
        )

    torch.manual_seed(0)
    actor, critic = (config(shape) for shape in PAIRS[pair])
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, VOCABULARY, (4 * EPISODES, PROMPT), generator=draw)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = PPOConfig(
        output_dir=str(folder),
        plan=plan,
        generation_engine=engine,
        per_device_train_batch_size=EPISODES // world,
        max_steps=updates,
        num_ppo_epochs=2,
        response_length=RESPONSE,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    return PPOTrainer(
        args,
        tokenizer,
        LlamaForCausalLM(actor),
        None,
        LlamaForSequenceClassification(critic),
        Dataset.from_dict({"input_ids": prompts.tolist()}),
        LlamaForSequenceClassification(critic),
        callbacks=callbacks,
    )


def child(pair: str, plan: str, folder: Path, updates: int, engine: str | None) -> None:
    """One run: what it measured and what was expected of it, in `folder`."""
    trainer = make_trainer(pair, plan, folder, updates, engine)
    trainer.train()
    if trainer.accelerator.is_main_process:
        trainer.plan.save(folder / "plan.yaml")
        trainer.timeline.save(folder / "timeline.json")
        steps = [row["time/step"] for row in trainer.state.log_history if "time/step" in row]
        found = trainer.setup.job_plan.priced
        estimated = None
        if found is not None:
            estimated = {"iteration": found.seconds, **found.timeline.by_call()}
        (folder / "run.json").write_text(json.dumps({"steps": steps, "estimated": estimated}), encoding="utf-8")


def _forget(cache: Path) -> None:
    """Remove from the profiles what earlier runs have taught: estimates are from measurements made before any run."""
    for path in cache.glob("profile-*.json"):
        replace(Profile.load(path), calibration=CalibrationFactors()).save(path)


def measure(pair: str, plan: str, processes: int, given: argparse.Namespace, cache: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        launch = [*LAUNCH, "--num_processes", str(processes)] if processes > 1 else [sys.executable]
        engine = ["--engine", given.engine] if given.engine else []
        command = [*launch, __file__, "--child", pair, plan, folder, "--updates", str(given.updates), *engine]
        environment = {**os.environ, "TRL_REALLOC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        environment["TRL_REALLOC_MEASURE"] = "first"
        _forget(cache)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        run = json.loads(Path(folder, "run.json").read_text(encoding="utf-8"))
        timeline = Timeline.load(Path(folder, "timeline.json"))
        ran = ExecutionPlan.load(Path(folder, "plan.yaml"))
    warm = [timeline.of_step(step).by_call() for step in sorted({span.step for span in timeline.spans})[1:]]
    estimated = run["estimated"] or {}
    by_call = {
        call: {
            "estimated_s": estimated.get(call),
            "measured_s": round(median(step[call] for step in warm if call in step), 4),
            "fastest_s": round(min(step[call] for step in warm if call in step), 4),
        }
        for call in warm[0]
    }
    return {
        "models": pair,
        "processes": processes,
        "plan": plan,
        "estimated_s": estimated.get("iteration"),
        "measured_s": median(run["steps"][1:]),
        "fastest_s": min(run["steps"][1:]),
        "updates_s": [round(seconds, 4) for seconds in run["steps"]],
        "chosen": plan == AUTO,
        "name": ran.name,
        "layouts": {call: f"{ran.mesh(call)} {layout_name(ran[call])}" for call in ran.order},
        "calls": by_call,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("models", "processes", "plan", "estimated", "measured", "error")
    for row in rows:
        estimated = row["estimated_s"]
        error = f"{estimated / row['measured_s'] - 1:+.1%}" if estimated else ""
        plan = f"{row['plan']} = {row['name']}" if row["chosen"] else row["plan"]
        number = f"{estimated:.3f} s" if estimated else "not measured"
        shown.add_row(row["models"], str(row["processes"]), plan, number, f"{row['measured_s']:.3f} s", error)
    return shown


def call_table(row: dict[str, Any]) -> Table:
    title = f"{row['models']}, {row['processes']} processes, {row['plan']}"
    shown = Table("call", "estimated", "measured", "error", title=title)
    for name, each in row["calls"].items():
        estimated, measured = each["estimated_s"], each["measured_s"]
        error = f"{estimated / measured - 1:+.0%}" if estimated else ""
        shown.add_row(name, f"{estimated:.3f} s" if estimated else "", f"{measured:.3f} s", error)
    return shown


def kind_of(call: str) -> str:
    return "reallocation" if " -> " in call else call.rpartition(".")[2]


def errors_by_kind(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The relative errors of the estimates, by kind of call; of the iteration of all rows, and of searched plans."""
    found = defaultdict[str, list[float]](list)
    for row in rows:
        if row["estimated_s"]:
            error = row["estimated_s"] / row["measured_s"] - 1
            found["iteration"].append(error)
            if "searched" in row["name"]:
                found["iteration of a searched plan"].append(error)
            for call, each in row["calls"].items():
                if each["estimated_s"]:
                    found[kind_of(call)].append(each["estimated_s"] / each["measured_s"] - 1)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for kind, errors in errors_by_kind(rows).items():
        sizes = [abs(error) for error in errors]
        found[f"{kind}, mean error"], found[f"{kind}, worst error"] = fmean(sizes), max(sizes)
        found[f"{kind}, mean of signed errors"] = fmean(errors)
    for key in dict.fromkeys((row["models"], row["processes"]) for row in rows):
        runs = defaultdict[str, list[float]](list)  # of a plan, which the planner's choice and a preset may both be
        chosen = None
        for row in rows:
            if (row["models"], row["processes"]) == key:
                plan = row["name"].removeprefix("auto (").removesuffix(")")
                runs[plan].append(row["measured_s"])
                chosen = plan if row["chosen"] else chosen
        others = [fmean(seconds) for plan, seconds in runs.items() if plan in PRESETS and plan != chosen]
        if others and chosen is not None:
            found[f"{key[0]}, {key[1]} processes: planner's over best other preset"] = fmean(runs[chosen]) / min(others)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--plans", nargs="+", default=[AUTO, *PRESETS])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--engine", choices=["vllm", "transformers"])
    parser.add_argument("--child", nargs=3, metavar=("PAIR", "PLAN", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], given.child[1], Path(given.child[2]), given.updates, given.engine)
        return
    console, rows = Console(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as cache:
        for processes in given.processes:
            for pair in given.pairs:
                for plan in given.plans:
                    rows.append(measure(pair, plan, processes, given, Path(cache)))
                    console.print(call_table(rows[-1]))
                    if given.json:
                        kept = {"rows": rows, "summary": summary(rows)}
                        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    console.print(table(rows))
    for name, value in summary(rows).items():
        console.print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
