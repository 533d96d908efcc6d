"""Training on old rollouts: what is learned, and updates per second.

    python benchmarks/staleness.py --learning --json benchmarks/results/staleness.json
    python benchmarks/staleness.py --throughput --json benchmarks/results/staleness.json

`--learning` trains the demo's stories in one process, at half their model's width and layers. The policy that draws
the samples of an update is the actor of exactly k updates before, so every token is as old as a staleness of k allows.
`--throughput` runs iterations of two processes under the plan `separate`, with vLLM engines and samples of skewed
lengths: phases of one staleness after another, on the same engines. Sections are merged into the file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from skewed import Skewed, tokenizer


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]

from trl_realloc import PPOConfig, PPOTrainer  # noqa: E402
from trl_realloc.algorithms.prompt_batches import PromptBatch  # noqa: E402
from trl_realloc.algorithms.rollout import Ragged, Rollouts  # noqa: E402
from trl_realloc.engines.generation.transformers import TransformersEngine  # noqa: E402
from trl_realloc.engines.requests import Completion, GenerationRequest, Sampling  # noqa: E402
from trl_realloc.plan.dataflow import Role  # noqa: E402
from trl_realloc.plan.staleness import Staleness  # noqa: E402


PLAIN: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "num_sample_generations": 0,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "stop_token": "eos",
    "temperature": 1.0,
}

# --- what is learned --------------------------------------------------------------------------------------------------

BATCH, LAST, HELD_OUT = 64, 10, 512
RATES = 5e-4, 1e-3  # of the actor: the demo's and twice that
DELAYS = (0, 1, 2, 4)  # updates
LOGGED = {
    "score": "objective/scores",
    "kl": "objective/kl",
    "sample_size": "sampling/effective_sample_size",
    "weights_clipped": "sampling/importance_sampling_ratio/clipfrac",
}


def make_task(folder: Path) -> None:
    """Save policy, reward model and prompts of the demo's stories. A minute; nothing to do where they are."""
    import prepare
    from stories import any_end, draw_story

    if (folder / "complete").is_file():
        return
    torch.manual_seed(0)
    draw = random.Random(2)
    examples = [(story, *any_end(story, draw)) for story in (draw_story(draw) for _ in range(5000))]
    words = prepare.make_tokenizer([text for story, end, _ in examples for text in (story.prompt, end)])
    config = prepare.llama_config(words)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 128, 352, 2, 32
    policy = prepare.pretrain(words, config, 800)
    reward, _ = prepare.train_reward(words, policy, 200)
    for model, name in ((policy, "policy"), (reward, "reward")):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    prepare.TEST_PROMPTS = HELD_OUT
    prepare.make_prompts(draw).save_to_disk(folder / "prompts")
    (folder / "complete").touch()


class DelayedEngine(TransformersEngine):
    """Generates by the parameters that the policy had so many updates before. It is asked once for each update.

    Args:
        now: the engine of the policy as it is.
        delay: updates; 0 generates by the present parameters.
    """

    def __init__(self, now: TransformersEngine, delay: int) -> None:
        super().__init__(self._older_model, now.device, batch_size=now.batch_size)
        self.now, self.delay = now, delay
        self._model: torch.nn.Module | None = None
        self._versions: deque[dict[str, torch.Tensor]] = deque(maxlen=delay + 1)

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        with self.now.whole_model() as model:
            self._versions.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if self._model is None:
                self._model = copy.deepcopy(model)
        self._model.load_state_dict(self._versions[0])
        return super().generate(requests, sampling)

    @contextlib.contextmanager
    def _older_model(self) -> Iterator[torch.nn.Module]:
        assert self._model is not None
        yield self._model


def learn(task: Path, delay: int, seed: int, rate: float, updates: int) -> dict[str, Any]:
    """Train once, with the demo's settings (recipes/demo/ppo.yaml). Returns the means of what is logged over the last
    updates, and the score of held-out prompts under the final policy."""
    from datasets import load_from_disk
    from stories import right_end
    from transformers import AutoTokenizer, PrinterCallback

    prompts = load_from_disk(str(task / "prompts"))
    with tempfile.TemporaryDirectory() as out:
        args = PPOConfig(
            output_dir=out,
            seed=seed,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=HELD_OUT,
            max_steps=updates,
            num_ppo_epochs=2,
            num_mini_batches=2,
            response_length=24,
            learning_rate=rate,
            value_learning_rate=1e-3,
            kl_coef=0.03,
            whiten_rewards=False,
            missing_eos_penalty=1.0,
            reward_weights=[0.25, 1.0],
            generation_engine="transformers",
            plan="flatten",
            vllm_importance_sampling_correction=delay > 0,
            logging_steps=1,
            **PLAIN,
        )
        made = PPOTrainer(
            args=args,
            processing_class=AutoTokenizer.from_pretrained(str(task / "policy"), padding_side="left"),
            model=str(task / "policy"),
            ref_model=None,
            reward_model=[str(task / "reward"), right_end],
            value_model=str(task / "reward"),
            train_dataset=prompts["train"],
            eval_dataset=prompts["test"],
        )
        made.remove_callback(PrinterCallback)
        made.run.placed.start()
        engines = made.placement.generators
        now = engines["actor.generate"]
        assert isinstance(now, TransformersEngine)
        engines["actor.generate"] = DelayedEngine(now, delay)
        made.train()
        engines["actor.generate"] = now
        held_out = made.evaluate()["eval_objective/scores"]
        made.close()
    last = [line for line in made.state.log_history if "objective/scores" in line][-LAST:]
    logged = {name: statistics.fmean(line[key] for line in last) for name, key in LOGGED.items() if key in last[0]}
    return {"rate": rate, "delay": delay, "seed": seed, "held_out": held_out, **logged}


def learning(runs: Path, seeds: Sequence[int], updates: int) -> list[dict[str, Any]]:
    """A row for each rate and delay: means over the seeds, and the held-out score relative to that without delay."""
    torch.set_num_threads(1)
    task, result = runs / "task", list[dict[str, Any]]()
    make_task(task)
    for rate in RATES:
        base: list[float] = []
        for delay in DELAYS:
            made = [learn(task, delay, seed, rate, updates) for seed in seeds]
            scores = [run["held_out"] for run in made]
            base = base or scores
            mean = statistics.fmean(base)
            differences = [(own - of_base) / mean for own, of_base in zip(scores, base, strict=True)]
            error = statistics.stdev(differences) / len(seeds) ** 0.5 if len(seeds) > 1 else 0.0
            names = [name for name in ("held_out", *LOGGED) if name in made[0]]
            means = {name: statistics.fmean(run[name] for run in made) for name in names}
            relative = {"relative": statistics.fmean(differences), "error": error, "worst": min(scores)}
            result.append({"rate": rate, "delay": delay, "seeds": len(seeds), **relative, **means})
    return result


# --- updates per second -----------------------------------------------------------------------------------------------

SKEWED = Skewed(hidden=128, layers=2, limit=320, prompt=24, short_mean=16)
PER_ENGINE = 48  # samples of an engine
RATE = 1e-6  # parameters change in every update, lengths hardly do
FILL, TIMED = 4, 8  # updates of a phase: until as much is in flight as later, and those that are timed
STALENESS = (0, 1, 2)


def throughput_rank(processes: int, rounds: int, folder: Path) -> None:
    """One rank, which runs the phases of a round one after the other, in another order in each round."""
    from datasets import Dataset

    from trl_realloc.runtime.overlap.ahead_runs import AheadRuns

    torch.set_num_threads(1)
    episodes, most = PER_ENGINE * processes // 2, max(STALENESS)
    policy, critic, reward = SKEWED.models()
    args = PPOConfig(
        output_dir=str(folder / "run"),
        max_steps=1,
        max_staleness=most,
        num_ppo_epochs=1,
        per_device_train_batch_size=PER_ENGINE // 2,
        response_length=SKEWED.limit,
        learning_rate=RATE,
        generation_engine="vllm",
        plan="separate",
        vllm_importance_sampling_correction=True,
        **PLAIN,
    )
    made = PPOTrainer(
        args=args,
        processing_class=tokenizer(),
        model=policy,
        ref_model=SKEWED.models()[0],
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": SKEWED.prompts(32 * episodes, 0)}),
    )
    made.run.placed.start()
    executor, placement, ahead = made.executor, made.placement, made.executor.ahead
    rates, noted = dict.fromkeys((Role.ACTOR, Role.CRITIC), RATE), list[dict[str, Any]]()

    def batch(step: int) -> PromptBatch:
        rows = SKEWED.prompts(episodes, 1 + step)
        prompts = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
        return PromptBatch(prompts, [{}] * len(rows))

    for k in [STALENESS[(at + shift) % len(STALENESS)] for shift in range(rounds) for at in range(len(STALENESS))]:
        executor.cancel_early()
        ahead.batches.give_up()  # what is under way between two phases
        executor.channels.flush()
        made.accelerator.wait_for_everyone()
        executor.plan = placement.plan = replace(made.plan, staleness=Staleness(k))
        executor.ahead = None
        if k:
            executor.ahead = AheadRuns(placement, executor.alarm, executor.runner, ahead.batches.channels)
            ahead = executor.ahead
        batches, ended, ages = [batch(step) for step in range(FILL + TIMED + most + 1)], list[float](), list[float]()
        for step in range(FILL + TIMED):
            iteration = executor.run(batches[step], step, rates, following=batches[step + 1 : step + 2 + k])
            ended.append(time.perf_counter())
            ages.append(iteration.observed.get("staleness/mean", 0.0))
        seconds = (ended[-1] - ended[FILL - 1]) / TIMED
        noted.append({"k": k, "seconds": seconds, "mean_age": statistics.fmean(ages[FILL:])})
    if not made.accelerator.process_index:
        (folder / "phases.json").write_text(json.dumps(noted))
    executor.cancel_early()
    made.run.placed.end_together()
    made.close()


def throughput(processes: int, rounds: int) -> list[dict[str, Any]]:
    """Updates per second of each staleness."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--rank", json.dumps([processes, rounds, folder])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        log = Path(folder, "log")
        with log.open("w") as written:
            code = subprocess.run(command, env=environment, stdout=written, stderr=written, check=False).returncode
        if code:
            sys.exit(f"the job of {processes} processes failed:\n{log.read_text()[-4000:]}")
        phases = json.loads(Path(folder, "phases.json").read_text())
    of = {k: [phase for phase in phases if phase["k"] == k] for k in STALENESS}
    return [
        {
            "processes": processes,
            "k": k,
            "updates_per_s": 1 / statistics.median(phase["seconds"] for phase in of[k]),
            "gain": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(of[0], of[k], strict=True)),
            "mean_age": statistics.fmean(phase["mean_age"] for phase in of[k]),
            "seconds": [phase["seconds"] for phase in of[k]],
        }
        for k in STALENESS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of --learning")
    parser.add_argument("--updates", type=int, default=40, help="of a training of --learning")
    parser.add_argument("--processes", type=int, default=2, help="of --throughput")
    parser.add_argument("--rounds", type=int, default=3, help="of --throughput")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness", help="the models of --learning")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        processes, rounds, folder = options.rank
        throughput_rank(processes, rounds, Path(folder))
        return
    sections: dict[str, list[dict[str, Any]]] = {}
    if options.learning:
        sections["learning"] = learning(options.runs, options.seeds, options.updates)
    if options.throughput:
        sections["throughput"] = throughput(options.processes, options.rounds)
    for title, rows in sections.items():
        names = list(dict.fromkeys(name for row in rows for name in row if name != "seconds"))
        table = Table(*names, title=title)
        for row in rows:
            table.add_row(*(f"{row[name]:.3g}" if name in row else "-" for name in names))
        Console(width=130).print(table)
    if options.json:
        result_file.merge(options.json, sections)


if __name__ == "__main__":
    main()
