"""A pretrained model learns public tasks: TRL's trainers and this project's, on the same model, rows and settings.

    python benchmarks/evidence.py                   # on two CPU cores: the rows of `make evidence`
    python benchmarks/evidence.py --device cuda     # all algorithms, tasks and arms with three seeds; has never run
    python benchmarks/evidence_page.py              # docs/results.md and docs/results.png from the results

The model is SmolLM2-135M-Instruct, after the supervised steps of examples/smollm2/prepare.py. The tasks are in
examples/smollm2/tasks.py. A row is one training in processes of its own; a row that is in the results is not made
again. The arms differ in the trainer alone: TRL's generates by Transformers on a CPU, and by vLLM on a GPU, in its mode
`colocate`; this project's runs under the plan `auto`. TRL's PPO is that of TRL 1.12, which is the last that has it; it
trains in the environment of the oldest releases (`trl_runs.trl_ppo_python`).

The rows lora and qlora train adapters of all linear layers, at ten times the learning rate. QLoRA's base has 4 bits;
for counting it is dequantized, as for generation.

At fixed updates the policy is saved, and after the training one function counts for both arms how many held-out rows
the saved policies answer rightly: at temperature 1, as they are trained, and the first and the last by greedy decoding
too. Neither saving nor counting is in the seconds.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import result_file
from trl_runs import trl_ppo_python, watched


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "smollm2")]
RESULTS = ROOT / "benchmarks" / "results" / "evidence.json"
MODEL, START, CRITIC = (ROOT / "runs" / "smollm2" / name for name in ("model", "start", "critic"))

GROUP, EPISODES, NEW_TOKENS = 8, 64, 8  # completions of a prompt, of an update; most tokens of one
UPDATES = {"cpu": 40, "cuda": 200}
ANSWERS = 2  # drawn of each held-out row
POINTS = 4  # evaluations of a training, after that of the policy it starts from
ALGORITHMS, LEARNING_RATE, VALUE_LEARNING_RATE = ("grpo", "rloo", "ppo"), 1e-5, 1e-4
ADAPTERS, ADAPTERS_LEARNING_RATE = ("lora", "qlora"), 1e-4


@dataclass(frozen=True)
class Row:
    """One training.

    Args:
        algorithm: grpo, rloo or ppo.
        task: a key of `tasks.TASKS`.
        arm: trl or ours.
        device: cpu or cuda.
        seed: of the trainer.
        adapters: lora or qlora; empty if all weights are trained.
    """

    algorithm: str
    task: str
    arm: str
    device: str = "cpu"
    seed: int = 1
    adapters: str = ""

    @property
    def name(self) -> str:
        kind = (self.algorithm, self.adapters) if self.adapters else (self.algorithm,)
        return "-".join((*kind, self.task, self.arm, self.device, str(self.seed)))


def rows_of(device: str) -> list[Row]:
    """What two cores make in some three hours, or all rows."""
    if device == "cpu":
        return [
            *(Row("grpo", "sums", arm, seed=seed) for seed in (1, 2, 3) for arm in ("trl", "ours")),
            *(Row(algorithm, "sums", arm) for algorithm in ("rloo", "ppo") for arm in ("trl", "ours")),
            Row("grpo", "products", "ours"),
            *(Row("grpo", "sums", "ours", adapters=adapters) for adapters in ADAPTERS),
        ]
    kinds = itertools.product((1, 2, 3), ("sums", "products"), ALGORITHMS, ("trl", "ours"))
    # TRL's PPO has no vLLM, and newer releases than 1.12 have no PPO
    return [
        Row(algorithm, task, arm, device, seed)
        for seed, task, algorithm, arm in kinds
        if (algorithm, arm) != ("ppo", "trl")
    ]


# --- one training, in a process of its own ---


class Watch:
    """Saves a trainer's policy at fixed updates, and counts the seconds of the training without those of saving."""

    def __init__(self, trainer: Any, points: Iterable[int], folder: Path) -> None:
        from transformers import TrainerCallback

        self.points: list[tuple[int, float]] = []  # update, seconds
        self.gpu_gb = 0.0
        self._start = 0.0
        watch, wanted = self, set(points)

        class Callback(TrainerCallback):
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                watch._start = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step in wanted:
                    now = time.perf_counter()
                    watch.points.append((state.global_step, now - watch._start))
                    watch.gpu_gb = max(watch.gpu_gb, used_gpu_gb())
                    trainer.save_model(str(folder / str(state.global_step)))
                    watch._start += time.perf_counter() - now

        trainer.add_callback(Callback())


def used_gpu_gb() -> float:
    """Memory of the GPU that is in use, by whatever process; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def train(row: Row, updates: int, folder: Path) -> None:
    """Train, save the policies, and write what was measured to `training.json`."""
    made = policy_trainer if row.algorithm != "ppo" else trl_ppo_trainer if row.arm == "trl" else ppo_trainer
    trainer = made(row, updates, folder)
    watch = Watch(trainer, points_of(updates)[1:], folder)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log or "objective/scores" in log]
    measured = {"points": watch.points, "tokens_per_s": tokens_per_s(logs), "mismatch": mismatch(logs)}
    measured["gpu_gb"] = watch.gpu_gb
    measured["rewards"] = [log.get("reward", log.get("objective/scores")) for log in logs]
    if row.arm == "ours":
        trainer.close()
        measured |= planned(folder)
    (folder / "training.json").write_text(json.dumps(measured))


def settings(row: Row, updates: int, folder: Path) -> dict[str, Any]:
    """The arguments that all trainers have."""
    on_gpu = row.device == "cuda"
    return {
        "output_dir": str(folder),
        "report_to": [],
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "disable_tqdm": True,
        "max_steps": updates,
        "per_device_train_batch_size": EPISODES,
        "temperature": 1.0,
        "learning_rate": ADAPTERS_LEARNING_RATE if row.adapters else LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "seed": row.seed,
    }


def data(row: Row, updates: int) -> Any:
    from datasets import Dataset
    from tasks import training_rows

    # TRL's PPO drops the last batch, and looks for a batch for ever where the rows make none
    return Dataset.from_list(training_rows(row.task, min(1000, max(EPISODES, updates * EPISODES // GROUP))))


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(START, padding_side="left")


def quantization(row: Row) -> Any:
    """The format of the policy's weights; `None` if they are not quantized."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if row.adapters == "qlora" else None


def adapters(row: Row) -> dict[str, Any]:
    """The arguments of a policy's trainer for adapters, those of recipes/smollm2/grpo-lora.yaml and grpo-qlora.yaml."""
    if not row.adapters:
        return {}
    from peft import LoraConfig

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return {"peft_config": lora, "quantization_config": quantization(row)}


def policy_trainer(row: Row, updates: int, folder: Path) -> Any:
    """GRPO's or RLOO's, of either arm."""
    import trl
    from tasks import right_answer

    import trl_realloc

    name = row.algorithm.upper()
    module = trl if row.arm == "trl" else trl_realloc
    own: dict[str, Any] = {"plan": "auto"}
    if row.arm == "trl":  # its vLLM does not run on a CPU
        own = {"use_vllm": True, "vllm_mode": "colocate"} if row.device == "cuda" else {}
    args = getattr(module, f"{name}Config")(
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        beta=0.0,
        model_init_kwargs={"dtype": "float32"},
        **settings(row, updates, folder),
        **own,
    )
    return getattr(module, f"{name}Trainer")(
        model=str(START),
        reward_funcs=right_answer,
        args=args,
        train_dataset=data(row, updates),
        processing_class=tokenizer(),
        **adapters(row),
    )


def ppo_settings(row: Row, updates: int, folder: Path) -> dict[str, Any]:
    """The arguments of PPO's trainers."""
    return {
        "response_length": NEW_TOKENS,
        "stop_token": "eos",
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "kl_coef": 0.0,
        "num_sample_generations": 0,
        **settings(row, updates, folder),
    }


def ppo_trainer(row: Row, updates: int, folder: Path) -> Any:
    """This project's PPO, with a critic of less than a quarter of the policy's parameters."""
    from tasks import right_answer

    from trl_realloc import PPOConfig, PPOTrainer

    return PPOTrainer(
        args=PPOConfig(plan="auto", value_learning_rate=VALUE_LEARNING_RATE, **ppo_settings(row, updates, folder)),
        processing_class=tokenizer(),
        model=str(START),
        ref_model=None,
        reward_model=right_answer,
        value_model=str(CRITIC),
        train_dataset=data(row, updates),
    )


def trl_ppo_trainer(row: Row, updates: int, folder: Path) -> Any:
    """TRL 1.12's PPO, with the same critic. Its one optimizer has a group of parameters, with a learning rate, of each
    model. TRL takes pad tokens for the end of a response, so the pad token is here another one than eos."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    args = PPOConfig(total_episodes=updates * EPISODES, **ppo_settings(row, updates, folder))
    words, rows = tokenizer(), data(row, updates)
    words.pad_token = words.unk_token
    prompts = [{"input_ids": words(one["prompt"])["input_ids"]} for one in rows]
    policy = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(CRITIC, dtype=torch.float32)
    groups = [
        {"params": model.parameters(), "lr": rate}
        for model, rate in ((policy, LEARNING_RATE), (critic, VALUE_LEARNING_RATE))
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=args.adam_epsilon, weight_decay=args.weight_decay)
    return PPOTrainer(
        args=args,
        processing_class=words,
        model=policy,
        ref_model=None,
        reward_model=answer_model(words, rows),
        value_model=critic,
        train_dataset=Dataset.from_list(prompts),
        optimizers=(optimizer, None),
    )


def answer_model(words: Any, rows: Iterable[Mapping[str, str]]) -> Any:
    """`tasks.right_answer` as a module, because TRL's PPO takes no function: it asks a module for hidden states, by the
    name in `base_model_prefix`, and for a score of these. Here the text is decoded, and the hidden states, (batch,
    tokens, 1) float32, are the reward, which `score` passes on.

    Args:
        words: the tokenizer.
        rows: with the prompts and answers that there may be.
    """
    import torch
    from tasks import right_answer

    end = "\nAnswer:"  # of each prompt
    answers = {row["prompt"]: row["answer"] for row in rows}

    class Decoded(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any, **others: Any) -> SimpleNamespace:
            texts = [
                words.decode(ids[seen.bool()], skip_special_tokens=True)
                for ids, seen in zip(input_ids, attention_mask, strict=True)
            ]
            parts = [text.partition(end) for text in texts]
            prompts = [question + end for question, _, _ in parts]
            right = right_answer(prompts, [made for _, _, made in parts], [answers[prompt] for prompt in prompts])
            rewards = torch.tensor(right, device=input_ids.device)
            return SimpleNamespace(hidden_states=[rewards[:, None, None].expand(*input_ids.shape, 1)])

    class AnswerModel(torch.nn.Module):
        base_model_prefix = "decoded"

        def __init__(self) -> None:
            super().__init__()
            self.decoded, self.score = Decoded(), torch.nn.Identity()

    return AnswerModel()


def tokens_per_s(logs: Sequence[Mapping[str, float]]) -> float | None:
    """Tokens of prompts and completions, without the first update; TRL logs its own count and the seconds of a step."""
    later = logs[1:]
    if later and "tokens/s" in later[0]:
        seconds = [log["time/step"] for log in later]
        return sum(log["tokens/s"] * s for log, s in zip(later, seconds, strict=True)) / sum(seconds)
    if later and "step_time" in later[0]:
        return (logs[-1]["num_tokens"] - logs[0]["num_tokens"]) / sum(log["step_time"] for log in later)
    return None


def mismatch(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the training of how the engine's log-probabilities and the trainer's differ."""
    names = [name for name in logs[0] if name.startswith("sampling/") or name in ("val/ratio", "policy/approxkl_avg")]
    return {name: statistics.fmean(log[name] for log in logs if name in log) for name in names}


def planned(folder: Path) -> dict[str, Any]:
    """The plan that ran, and the estimated and the measured seconds of its calls."""
    from trl_realloc.plan.timeline import Timeline

    plan, estimate, measured = (folder / name for name in ("plan.yaml", "estimate.json", "timeline.json"))
    found: dict[str, Any] = {"plan": plan.read_text()}
    if estimate.is_file():
        table = Timeline.load(estimate).compare(Timeline.load(measured))
        found["calls"] = [{"call": call, "estimated": before, "measured": after} for call, before, after, _ in table]
    return found


# --- counting right answers ---


def points_of(updates: int) -> list[int]:
    """The updates after which the policy is evaluated."""
    count = min(POINTS, updates)
    return [round(at * updates / count) for at in range(count + 1)]


def saved_policy(folder: Path, row: Row) -> Any:
    """A policy that a training started from or has saved, in float32 and with its adapters merged."""
    import torch
    from transformers import AutoModelForCausalLM

    if not row.adapters:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32, quantization_config=quantization(row))
    base = base.dequantize() if row.adapters == "qlora" else base
    return base if folder == START else PeftModel.from_pretrained(base, folder).merge_and_unload()


def share_right(folder: Path, row: Row, answers: int, batch: int = 100) -> tuple[float, float]:
    """The share of right answers of a saved policy to the held-out rows, and its standard error.

    Args:
        answers: drawn of each row at temperature 1; 0 for one by greedy decoding.
    """
    import torch
    from tasks import held_out_rows, right_answer

    words, rows = tokenizer(), held_out_rows(row.task)
    model = saved_policy(folder, row).to(row.device).eval()
    drawing = {"do_sample": True, "top_k": 0, "num_return_sequences": answers} if answers else {"do_sample": False}
    torch.manual_seed(0)
    of_rows: list[float] = []
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        prompts = words([one["prompt"] for one in part], return_tensors="pt", padding=True).to(row.device)
        with torch.no_grad():
            ids = model.generate(**prompts, max_new_tokens=NEW_TOKENS, **drawing)
        texts, each = (
            words.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True),
            answers or 1,
        )
        right = right_answer([], texts, [one["answer"] for one in part for _ in range(each)])
        of_rows += [statistics.fmean(right[first : first + each]) for first in range(0, len(right), each)]
    return statistics.fmean(of_rows), statistics.stdev(of_rows) / math.sqrt(len(of_rows))


def evaluate(row: Row, updates: int, folder: Path) -> None:
    """Write the accuracies of the saved policies, with their standard errors, to `accuracies.json`."""
    saved = [START, *(folder / str(update) for update in points_of(updates)[1:])]
    drawn = [share_right(each, row, ANSWERS) for each in saved]
    greedy = [share_right(each, row, 0) for each in (saved[0], saved[-1])]
    (folder / "accuracies.json").write_text(json.dumps({"drawn": drawn, "greedy": greedy}))


# --- the rows ---


def make_row(row: Row, updates: int, folder: Path) -> dict[str, Any]:
    """Train and evaluate, each in a process of its own, and return the row of the results.

    Args:
        folder: for logs, `train.log` and `evaluate.log`, and what was measured. What is in it is deleted.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = os.getpid() * 1000
    peak_mb, _ = run_part("train", row, updates, folder, mark)
    run_part("evaluate", row, updates, folder, mark + 1)
    measured = json.loads((folder / "training.json").read_text())
    accuracies = json.loads((folder / "accuracies.json").read_text())
    drawn = accuracies["drawn"]
    for update, _ in measured["points"]:
        shutil.rmtree(folder / str(update))  # half a gigabyte each
    points = [(0, 0.0), *measured.pop("points")]
    gpu_gb = measured.pop("gpu_gb")
    return {
        "name": row.name,
        "algorithm": row.algorithm,
        "task": row.task,
        "arm": row.arm,
        "device": row.device,
        "seed": row.seed,
        "adapters": row.adapters,
        "updates": updates,
        "before": drawn[0][0],
        "after": drawn[-1][0],
        "error": drawn[-1][1],
        "greedy": [share for share, _ in accuracies["greedy"]],
        "seconds": points[-1][1],
        "memory_gb": gpu_gb if row.device == "cuda" else peak_mb * 2**20 / 1e9,
        "curve": [(update, seconds, share) for (update, seconds), (share, _) in zip(points, drawn, strict=True)],
        **measured,
        **result_file.about(),
    }


def run_part(part: str, row: Row, updates: int, folder: Path, mark: int) -> tuple[float, float]:
    """Run `train` or `evaluate` in a process. Returns the most memory that it had (`trl_runs.watched`)."""
    by_trls_ppo = part == "train" and (row.algorithm, row.arm) == ("ppo", "trl")
    python = trl_ppo_python() if by_trls_ppo else sys.executable
    command = [python, str(Path(__file__)), "--part", part, "--rows", row.name, "--device", row.device]
    command += ["--updates", str(updates), "--folder", str(folder)]
    environment = {
        **os.environ,
        "VS_TRL": str(mark),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if row.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    log_path = folder / f"{part}.log"
    with log_path.open("w") as log:
        code, peak = watched(subprocess.Popen(command, env=environment, stdout=log, stderr=log), mark)
    if code:
        sys.exit(f"{row.name} failed ({log_path}):\n{log_path.read_text()[-4000:]}")
    return peak


def with_seconds_to(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `seconds_to`: the accuracy that all arms of a comparison have reached at a point of their curves,
    and the seconds of the row's first point that has it. `None` where there is nothing to compare with."""
    made = []
    for row in rows:
        same = ("algorithm", "adapters", "task", "device", "seed")
        pair = [other for other in rows if all(other.get(key, "") == row.get(key, "") for key in same)]
        target = min(max(share for _, _, share in other["curve"]) for other in pair)
        seconds = next(seconds for _, seconds, share in row["curve"] if share >= target)
        made.append({**row, "seconds_to": {"accuracy": target, "seconds": seconds} if len(pair) > 1 else None})
    return made


def make_missing(wanted: Sequence[Row], updates: int, path: Path) -> list[dict[str, Any]]:
    """Make the rows that the results do not have, and write the results after each."""
    rows = load_rows(path)
    for row in wanted:
        if any(known["name"] == row.name for known in rows):
            print(f"{row.name}: is in {path}")
            continue
        start = time.monotonic()
        made = make_row(row, updates, ROOT / "runs" / path.stem / row.name)
        rows = with_seconds_to([*rows, made])
        result_file.write(path, {"rows": rows})
        print(
            f"{row.name}: {made['before']:.0%} -> {made['after']:.0%} in {made['seconds']:.0f} s of training, "
            f"{time.monotonic() - start:.0f} s in all",
            flush=True,
        )
    return rows


def load_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(UPDATES), default="cpu")
    parser.add_argument("--rows", nargs="+", default=["*"], help="names of rows; * stands for any part of a name")
    parser.add_argument("--updates", type=int, help="40 on a CPU, 200 on a GPU")
    parser.add_argument(
        "--json", type=Path, default=RESULTS, help="the results; logs are in runs/NAME/ROW, with its name"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--part", choices=["train", "evaluate"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    updates = options.updates or UPDATES[options.device]
    wanted = [row for row in rows_of(options.device) if any(fnmatch.fnmatch(row.name, name) for name in options.rows)]
    if not wanted:
        parser.error(f"no row is called {' or '.join(options.rows)}; --list prints them.")
    if options.list:
        print("\n".join(row.name for row in wanted))
    elif options.part:
        {"train": train, "evaluate": evaluate}[options.part](wanted[0], updates, options.folder)
    else:
        from prepare import prepare_critic, prepare_start

        prepare_critic(CRITIC, prepare_start(START, MODEL))
        make_missing(wanted, updates, options.json)


if __name__ == "__main__":
    main()
