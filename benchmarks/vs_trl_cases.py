"""`vs_trl.py --model smollm2` and `vs_trl.py --device cuda`: TRL's trainers and this project's, alternating, on whole
cases.

    python benchmarks/vs_trl.py --model smollm2 --json benchmarks/results/vs_trl_smollm2.json
    python benchmarks/vs_trl.py --device cuda --json benchmarks/results/vs_trl_cuda.json

Every run is a process of its own; its first update is warm-up, and the median of the others is the result. On the CPU,
SmolLM2-135M-Instruct in float32, TRL generating by Transformers and this project under its default plan:

grpo, even     2 groups of 8 completions of stories, all cut off at 48 tokens
grpo, natural  2 groups of 8 answers to sums, at most 128 tokens; the model ends them itself
ppo, natural   8 answers, at most 64 tokens; actor, critic, reference and reward model of 135 million parameters each

On one GPU in bf16, TRL with vLLM in its mode colocate and this project under `plan: auto`, with the same vLLM: GRPO and
RLOO, 16 groups of 8 completions,

grpo, natural   of SmolLM2-135M-Instruct, stories of at most 256 tokens, which the model ends itself
grpo, even      of SmolLM2-135M-Instruct, stories that are all cut off at 48 tokens
grpo, longtail  of a random Llama of 1.07 billion parameters, at most 512 tokens. It ends a completion at each token
                with the same probability, 4 / 512

and the same for rloo. A run has 180 s (`--limit-s`). With `--json` the file is written as each run ends, and a run that
is in it with its result is not done again. `--small` has tiny models, also without a GPU: TRL generates by Transformers
there. It checks the script and measures nothing.

Rewards differ within every group, so every update trains.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from trl_runs import (
    ROOT,
    RunFailed,
    about_the_run,
    call_seconds,
    end_by_chance,
    run_worker,
    step_clock,
    tokenizer,
    trl_ppo_python,
)


SMOLLM2 = ROOT / "runs" / "smollm2" / "model"
GROUP = 8
THINGS = ("a river", "an old clock", "two cats", "the sea", "a lost key", "a tall tree", "snow", "a small town")
SIDES = ("trl", "ours")
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32_000}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000}


@dataclass(frozen=True)
class Case:
    """What both sides train.

    Args:
        algorithm: `grpo`, `rloo` or `ppo`.
        lengths: `even`: all completions are cut off at the limit; `natural`: the model ends them; `longtail`: a random
            model ends them by chance.
        limit: the most tokens of a completion.
        episodes: completions of an update.
        micro_batch: of them in a forward with backward.
        device: `cpu`, or `cuda` for a case of one GPU.
        small: a tiny model, and the CPU where there is no GPU.
    """

    algorithm: str
    lengths: str
    limit: int
    episodes: int
    micro_batch: int
    device: str = "cpu"
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.lengths}"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda" and torch.cuda.is_available()

    @property
    def model(self) -> Path:
        """The folder of the model."""
        if self.lengths == "longtail" or self.small:
            return ROOT / "runs" / "vs_trl" / ("tiny" if self.small else "llama-1b")
        return SMOLLM2

    def prompts(self, count: int) -> list[Any]:
        """Questions, each another one."""
        if self.model != SMOLLM2:
            return [" ".join(f"w{2 + (17 * i + 5 * j) % 900}" for j in range(16)) for i in range(count)]
        if self.lengths == "even" or self.device == "cuda":
            texts = [f"Tell me a long story about {THINGS[i % len(THINGS)]} and {i + 2} friends." for i in range(count)]
        else:
            texts = [f"What is {17 + 7 * i} + {23 + 5 * i}?" for i in range(count)]
        return [[{"role": "user", "content": text}] for text in texts]

    def make_model(self) -> None:
        """Save the random model unless it is there."""
        if self.model == SMOLLM2:
            if not (SMOLLM2 / "complete").is_file():
                sys.exit(f"there is no model in {SMOLLM2}; make it with python examples/smollm2/prepare.py")
            return
        if (self.model / "complete").is_file():
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = TINY if self.small else LLAMA
        words = tokenizer(sizes["vocab_size"])
        tokens = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": None}
        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=2048))
        end_by_chance(made, 4 / self.limit)
        made.to(torch.bfloat16).save_pretrained(self.model)
        words.save_pretrained(self.model)
        (self.model / "complete").touch()


CPU_CASES = (
    Case("grpo", "even", 48, 16, 16),
    Case("grpo", "natural", 128, 16, 16),
    Case("ppo", "natural", 64, 8, 8),
)


def gpu_cases(small: bool) -> tuple[Case, ...]:
    if small:
        kinds = [("natural", 32), ("longtail", 32)]
        return tuple(Case(name, kind, limit, 16, 8, "cuda", True) for kind, limit in kinds for name in ("grpo", "rloo"))
    kinds = [("natural", 256), ("even", 48), ("longtail", 512)]
    return tuple(Case(name, kind, limit, 128, 16, "cuda") for kind, limit in kinds for name in ("grpo", "rloo"))


# --- one run, in a process of its own ---


def worker(side: str, case: Case, updates: int, seed: int, out: Path) -> None:
    """Train for a number of updates after one of warm-up, and write the seconds of each."""
    sys.path.insert(0, str(ROOT))
    if not case.on_gpu:
        torch.set_num_threads(os.cpu_count() or 1)
    ends: list[float] = []
    made = (_ppo if case.algorithm == "ppo" else _policy)(side, case, updates + 1, seed, step_clock(ends))
    parts = TRLParts(made) if side == "trl" and case.algorithm != "ppo" else None
    made.train()
    logs = [row for row in made.state.log_history if any(key.endswith("/mean_length") for key in row)][1:]
    lengths = [row["completions/mean_length"] for row in logs if "completions/mean_length" in row]
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    calls = call_seconds(logs, statistics.median) if parts is None else parts.of_update(statistics.median(seconds))
    result = {"seconds": seconds, "mean_length": statistics.fmean(lengths) if lengths else None, "calls": calls}
    if case.on_gpu:
        free, total = torch.cuda.mem_get_info()
        result["gpu_gb"] = (total - free) / 1e9  # of all processes, with what torch keeps
        result["torch_gb"] = torch.cuda.max_memory_allocated() / 1e9
    out.write_text(json.dumps(result))
    if side == "ours":
        made.close()


class TRLParts:
    """Times generation (with the weights that vLLM gets) and scoring of TRL's GRPO and RLOO trainers; the rest of an
    update is training."""

    def __init__(self, trainer: Any) -> None:
        self._seconds: dict[str, list[float]] = {}
        for name in ("_generate_single_turn", "_generate_and_score_completions"):
            self._time(trainer, name)

    def _time(self, trainer: Any, name: str) -> None:
        original, seconds = getattr(trainer, name), self._seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            made = original(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            return made

        setattr(trainer, name, timed)

    def of_update(self, whole: float) -> dict[str, float]:
        """Medians of the updates after the first. `whole`: the seconds of an update."""
        generation, both = (statistics.median(seconds[1:]) for seconds in self._seconds.values())
        return {"generation": generation, "scoring": both - generation, "training": whole - both}


def _arguments(side: str, case: Case, seed: int) -> dict[str, Any]:
    ours = {"plan": "auto"} if side == "ours" and case.device == "cuda" else {}
    return {
        "output_dir": tempfile.mkdtemp(),
        "report_to": [],
        "bf16": case.on_gpu,
        "use_cpu": not case.on_gpu,
        "disable_tqdm": True,
        "gradient_accumulation_steps": case.episodes // case.micro_batch,
        "temperature": 1.0,
        "learning_rate": 1e-7 if case.lengths == "longtail" else 1e-6,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "seed": seed,
        "per_device_train_batch_size": case.micro_batch,
        **ours,
    }


def _policy(side: str, case: Case, updates: int, seed: int, clock: Any) -> Any:
    """A trainer of GRPO or RLOO."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import trl_realloc

    name = case.algorithm.upper()
    module = trl_realloc if side == "ours" else trl
    generation = {"use_vllm": True} if side == "ours" or case.on_gpu else {}
    if generation and side == "trl":
        generation |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    args = getattr(module, f"{name}Config")(
        **_arguments(side, case, seed),
        **generation,
        max_steps=updates,
        num_generations=GROUP,
        max_completion_length=case.limit,
        shuffle_dataset=False,
    )
    return getattr(module, f"{name}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32),
        reward_funcs=_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": case.prompts(updates * case.episodes // GROUP)}),
        processing_class=AutoTokenizer.from_pretrained(case.model, padding_side="left"),
        callbacks=[clock],
    )


def _reward(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Another one for almost every completion."""
    return [float(sum(ids) % 97) / 97 for ids in completion_ids]


def _ppo(side: str, case: Case, updates: int, seed: int, clock: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    if side == "ours":
        from trl_realloc import PPOConfig, PPOTrainer
    else:
        from trl.experimental.ppo import PPOConfig, PPOTrainer  # type: ignore[assignment]
    args = PPOConfig(
        **_arguments(side, case, seed),
        total_episodes=case.episodes * updates,
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=case.limit,
        stop_token="eos",
        num_sample_generations=0,
        **({"generation_engine": "vllm"} if side == "ours" else {}),
    )
    words = AutoTokenizer.from_pretrained(case.model, padding_side="left")
    if words.pad_token == words.eos_token:
        words.pad_token = "<|endoftext|>" if words.eos_token != "<|endoftext|>" else "<|im_start|>"
    ids = [
        words.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        for prompt in case.prompts(updates * case.episodes)
    ]
    policy, reference = (AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(0)
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(
            case.model, num_labels=1, dtype=torch.float32, pad_token_id=words.pad_token_id
        )
        for _ in range(2)
    )
    return PPOTrainer(
        args=args,
        processing_class=words,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[clock],
    )


# --- the benchmark ---


def cases(device: str, small: bool) -> tuple[Case, ...]:
    return gpu_cases(small) if device == "cuda" else CPU_CASES


def run(
    names: Sequence[str] | None,
    updates: int,
    repeats: int,
    json_path: Path | None,
    *,
    device: str = "cpu",
    small: bool = False,
    limit_s: float | None = None,
) -> None:
    """Run both sides of each case, alternating, print a table, and write the results as each run ends."""
    if device == "cuda" and not small and not torch.cuda.is_available():
        sys.exit("There is no GPU that PyTorch can use on this machine; --small tries the script without one.")
    console, mark = Console(width=None if sys.stdout.isatty() else 160), os.getpid() * 1000
    chosen = [case for case in cases(device, small) if not names or case.name in names]
    about = {**about_the_run(_gpu_name() if device == "cuda" else "no GPU"), "updates": updates, "repeats": repeats}
    runs = list[dict[str, Any]]()
    if device == "cuda" and json_path is not None and json_path.is_file():
        known = json.loads(json_path.read_text(encoding="utf-8"))
        if all(known.get(key) == value for key, value in about.items()):  # of the same code and machine
            runs = [one for one in known["runs"] if "seconds" in one]
    for case in chosen:
        case.make_model()
        for repeat in range(repeats):
            for side in SIDES:
                which = {"case": case.name, "side": side, "seed": 5 + repeat}
                if any(which.items() <= one.items() for one in runs):
                    continue
                mark += 1
                arguments = ["--model", "smollm2", "--device", device, *(["--small"] if small else [])]
                arguments += ["--worker", side, "--cases", case.name, "--updates", str(updates)]
                python = trl_ppo_python() if (case.algorithm, side) == ("ppo", "trl") else sys.executable
                try:
                    done = run_worker([*arguments, "--seed", str(5 + repeat)], mark, limit_s=limit_s, python=python)
                    console.print(f"{side:5} {case.name}: {statistics.median(done['seconds']):.2f} s per update")
                except RunFailed as failed:
                    if device != "cuda":
                        sys.exit(str(failed))
                    done = {"failed": str(failed)}
                    console.print(done["failed"], markup=False)
                runs.append({**which, **done})
                if json_path is not None:
                    result_file.write(json_path, {"rows": rows_of(chosen, runs), **about, "runs": runs})
    show(rows_of(chosen, runs), console)


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU, tiny models"


def rows_of(chosen: Sequence[Case], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each case of which both sides have a result: medians over the updates of all repeats."""
    rows = list[dict[str, Any]]()
    for case in chosen:
        of = {side: [one for one in runs if one["case"] == case.name and one["side"] == side] for side in SIDES}
        of = {side: [one for one in done if "seconds" in one] for side, done in of.items()}
        if not all(of.values()):
            continue
        seconds = {side: statistics.median(s for one in done for s in one["seconds"]) for side, done in of.items()}
        lengths = {side: done[-1]["mean_length"] for side, done in of.items()}
        row = {
            "case": case.name,
            "limit": case.limit,
            "episodes": case.episodes,
            "seconds": seconds,
            "ratio": seconds["trl"] / seconds["ours"],
            "peak_mb": {side: max(one["peak_mb"] for one in done) for side, done in of.items()},
            "mean_length": lengths,
            "calls_s": {side: done[-1]["calls"] for side, done in of.items()},
            "of_updates": {side: [one["seconds"] for one in done] for side, done in of.items()},
        }
        if all(lengths.values()):
            row["tokens_per_s"] = {side: case.episodes * lengths[side] / seconds[side] for side in SIDES}
        for name in ("gpu_gb", "torch_gb"):
            if all(name in one for done in of.values() for one in done):
                row[name] = {side: max(one[name] for one in done) for side, done in of.items()}
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table, and the seconds of an update by part."""
    table = Table(
        *("case", "TRL s per update", "ours", "ratio", "tokens/s", "host MB", "GPU GB", "mean length"),
        title="TRL and ours",
        title_justify="left",
    )

    def both(values: dict[str, float | None] | None, form: str) -> str:
        if values is None:
            return ""
        return " and ".join("–" if values[side] is None else f"{values[side]:{form}}" for side in SIDES)

    for row in rows:
        table.add_row(
            row["case"],
            *(f"{row['seconds'][side]:.2f}" for side in SIDES),
            f"{row['ratio']:.2f}x",
            both(row.get("tokens_per_s"), ",.0f"),
            both(row["peak_mb"], ",.0f"),
            both(row.get("gpu_gb"), ".1f"),
            both(row["mean_length"], ".0f"),
        )
    console.print(table)
    for row in rows:
        for side, calls in row["calls_s"].items():
            console.print(f"{row['case']}, {side}: " + ", ".join(f"{name} {s:.2f}" for name, s in calls.items()))
