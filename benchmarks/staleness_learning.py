"""Learning part of `staleness`: the demo's task on samples that are exactly k updates old, in one process.

`models` makes the task, `learn` runs one training. The tables and the commands are in `staleness`.

The behaviour policy of update n is the actor as it was k updates before (`DelayedEngine`), so every token is as old as
a staleness of k allows. A run with vLLM engines has younger tokens, and mixes their ages within a sample. Everything
else is `PPOTrainer`'s: critic, KL to the reference, PPO's epochs and mini-batches, the correction.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]

from trl_realloc import PPOConfig, PPOTrainer  # noqa: E402
from trl_realloc.algorithms.ppo import PPO, PolicyLoss  # noqa: E402
from trl_realloc.engines.base import Completion, GenerationRequest, Sampling  # noqa: E402
from trl_realloc.engines.generation.transformers import TransformersEngine  # noqa: E402
from trl_realloc.plan.algorithm_graphs import PROXIMAL_LOGPROBS  # noqa: E402
from trl_realloc.plan.dataflow import Role  # noqa: E402


BATCH, UPDATES, LAST, HELD_OUT = 64, 40, 10, 512
RATES = 5e-4, 1e-3  # of the actor: the demo's and twice that; at four times the demo's nothing learns, fresh or not
VALUE_RATE = 1e-3  # the demo's
PRETRAIN_STEPS, REWARD_STEPS = 800, 200
METHODS = ("corrected", "behaviour", "hidden")
DELAYS = (1, 2, 4)  # updates
LOGGED = {
    "score": "objective/scores",
    "kl": "objective/kl",
    "right": "rewards/right_end",
    "approxkl": "policy/approxkl_avg",
    "ppo_clipped": "policy/clipfrac_avg",
    "value_loss": "loss/value_avg",
    "entropy": "policy/entropy_avg",
    "sample_size": "sampling/effective_sample_size",
    "weights_clipped": "sampling/importance_sampling_ratio/clipfrac",
    "log_ratio_max": "sampling/sampling_logp_difference/max",
    "behaviour_kl": "sampling/kl_k3",
}

# --- the task ---------------------------------------------------------------------------------------------------------


def models(folder: Path) -> None:
    """Save policy, reward model and prompts of the demo's stories, with half the demo's width and layers (0.7 million
    parameters, heads of 32 as vLLM wants them on a CPU). A minute; nothing to do where they are."""
    import prepare
    from stories import any_end, draw_story

    if (folder / "complete").is_file():
        return
    torch.manual_seed(0)
    draw = random.Random(2)
    examples = [(story, *any_end(story, draw)) for story in (draw_story(draw) for _ in range(5000))]
    tokenizer = prepare.make_tokenizer([text for story, end, _ in examples for text in (story.prompt, end)])
    config = prepare.llama_config(tokenizer)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 128, 352, 2, 32
    policy = prepare.pretrain(tokenizer, config, PRETRAIN_STEPS)
    reward, _ = prepare.train_reward(tokenizer, policy, REWARD_STEPS)
    for model, name in ((policy, "policy"), (reward, "reward")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    prepare.TEST_PROMPTS = HELD_OUT
    prepare.make_prompts(draw).save_to_disk(folder / "prompts")
    (folder / "complete").touch()


def arguments(out: Path, seed: int, **changes: Any) -> PPOConfig:
    """The demo's settings (recipes/demo/ppo.yaml) for one process."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "max_steps": UPDATES,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "response_length": 24,
        "stop_token": "eos",
        "temperature": 1.0,
        "learning_rate": RATES[0],
        "value_learning_rate": VALUE_RATE,
        "kl_coef": 0.03,
        "whiten_rewards": False,
        "missing_eos_penalty": 1.0,
        "reward_weights": [0.25, 1.0],
        "generation_engine": "transformers",
        "plan": "flatten",
        "per_device_eval_batch_size": HELD_OUT,
        **changes,
    }
    return PPOConfig(
        output_dir=str(out),
        seed=seed,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        num_sample_generations=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **given,
    )


def trainer(folder: Path, args: PPOConfig, kind: type[PPOTrainer] = PPOTrainer) -> PPOTrainer:
    """A trainer of the task."""
    from datasets import load_from_disk
    from stories import right_end
    from transformers import AutoTokenizer, PrinterCallback

    prompts = load_from_disk(str(folder / "prompts"))
    made = kind(
        args=args,
        processing_class=AutoTokenizer.from_pretrained(str(folder / "policy"), padding_side="left"),
        model=str(folder / "policy"),
        ref_model=None,
        reward_model=[str(folder / "reward"), right_end],
        value_model=str(folder / "reward"),
        train_dataset=prompts["train"],
        eval_dataset=prompts["test"],
    )
    made.remove_callback(PrinterCallback)
    return made


# --- old samples ------------------------------------------------------------------------------------------------------


class DelayedEngine(TransformersEngine):
    """Generates by the parameters that the policy had so many updates before. It is asked once for each update.

    Args:
        now: the engine of the policy as it is.
        delay: updates; 0 generates by the present parameters.

    Attributes:
        ages: of the tokens of each update.
    """

    def __init__(self, now: TransformersEngine, delay: int) -> None:
        super().__init__(self._older_model, now.device, batch_size=now.batch_size)
        self.now, self.delay = now, delay
        self.ages: list[int] = []
        self._model: torch.nn.Module | None = None
        self._versions: deque[dict[str, torch.Tensor]] = deque(maxlen=delay + 1)

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        with self.now.whole_model() as model:
            self._versions.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if self._model is None:
                self._model = copy.deepcopy(model)
        self._model.load_state_dict(self._versions[0])
        self.ages.append(len(self._versions) - 1)
        return super().generate(requests, sampling)

    @contextlib.contextmanager
    def _older_model(self) -> Iterator[torch.nn.Module]:
        assert self._model is not None
        yield self._model


@dataclass(frozen=True)
class HiddenStaleness(PPO):
    """The negative control: PPO's ratio is taken to the proximal policy as if that one had drawn the samples."""

    def loss(self, call: str) -> Any:
        made = super().loss(call)
        if self.graph.call(call).role is Role.ACTOR:
            return replace(made, of_tokens=PolicyLoss(self.settings.cliprange, PROXIMAL_LOGPROBS, None))
        return made


def delayed_trainer(method: str, delay: int) -> type[PPOTrainer]:
    """The trainer's class for one method and one age of the samples."""

    class Delayed(PPOTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            if method == "hidden":
                placed = self.run.placed
                own = {name: getattr(placed.setup.algorithm, name) for name in ("settings", "seed", "eos_token_id")}
                placed.setup = replace(placed.setup, algorithm=HiddenStaleness(**own))
            super().create_accelerator_and_postprocess()

        def train(self, *args: Any, **kwargs: Any) -> Any:
            placed = self.run.placed
            if not placed.placement.started:
                placed.start()
                for call, engine in placed.placement.generators.items():
                    assert isinstance(engine, TransformersEngine)
                    placed.placement.generators[call] = DelayedEngine(engine, delay)
            return super().train(*args, **kwargs)

    return Delayed


def learn(folder: Path, method: str, delay: int, seed: int, rate: float, updates: int = UPDATES) -> dict[str, Any]:
    """Train once.

    Returns:
        The scores of every update; of the last `LAST` updates the mean of what is logged; and of the policy at the end
        the score and the share of right ends of `HELD_OUT` prompts.
    """
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        args = arguments(
            Path(out),
            seed,
            max_steps=updates,
            learning_rate=rate,
            vllm_importance_sampling_correction=method != "behaviour",
        )
        made = trainer(folder, args, delayed_trainer(method, delay))
        made.train()
        engine = made.placement.generators["actor.generate"]
        assert isinstance(engine, DelayedEngine) and engine.ages == [min(at, delay) for at in range(updates)]
        made.placement.generators["actor.generate"] = engine.now
        ended = made.evaluate()
        made.close()
    log = [line for line in made.state.log_history if "objective/scores" in line]
    return {
        "method": method,
        "delay": delay,
        "seed": seed,
        "rate": rate,
        "scores": [line["objective/scores"] for line in log],
        "kls": [line["objective/kl"] for line in log],
        **summary(log),
        "held_out_score": ended["eval_objective/scores"],
        "held_out_kl": ended["eval_objective/kl"],
        "seconds": time.perf_counter() - start,
    }


def summary(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the last updates, of what is logged."""
    last = log[-LAST:]
    return {name: statistics.fmean(line[key] for line in last) for name, key in LOGGED.items() if key in last[0]}


# --- all runs and their table -----------------------------------------------------------------------------------------


def cases(seeds: Sequence[int]) -> list[tuple[str, int, int, float]]:
    """Method, delay, seed and learning rate of every run, those that say most first. Without a delay the methods are
    one. Methods that are there to show a harm are trained on the oldest samples alone."""
    low, high = RATES
    oldest = DELAYS[-1]
    without, corrected = ("behaviour", 0), ("corrected", oldest)
    harms = [("behaviour", oldest), ("hidden", oldest)]
    younger = [("corrected", delay) for delay in DELAYS[:-1]]
    groups = [(low, [without, corrected]), (high, [without, corrected, *harms]), (low, harms), (low, younger)]
    return [
        (method, delay, seed, rate)
        for rate, methods in [*groups, (high, younger)]
        for seed in seeds
        for method, delay in methods
    ]


def measure(folder: Path, runs: Path, seeds: Sequence[int], updates: int) -> list[dict[str, Any]]:
    """Train every case that is not in the file `runs` yet, and add it there, a line each."""
    torch.set_num_threads(1)
    models(folder)
    made = [json.loads(line) for line in runs.read_text().splitlines()] if runs.is_file() else []
    known = {(run["method"], run["delay"], run["seed"], run["rate"]) for run in made}
    for case in cases(seeds):
        if case not in known:
            made.append(learn(folder, *case, updates=updates))
            with runs.open("a") as file:
                file.write(json.dumps(made[-1]) + "\n")
    return made


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rate, delay and method: means over the seeds, and scores relative to those of the same seeds
    without delay."""
    by_case: dict[tuple[float, int, str], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_case.setdefault((run["rate"], run["delay"], run["method"]), {})[run["seed"]] = run
    result = []
    for (rate, delay, method), of_seeds in sorted(by_case.items(), key=lambda item: (item[0][0], item[0][1])):
        base = by_case[rate, 0, "behaviour"]
        row: dict[str, Any] = {"rate": rate, "delay": delay, "method": method, "seeds": len(of_seeds)}
        for name in ("score", "held_out_score"):
            pairs = [(of_seeds[seed][name], base[seed][name]) for seed in of_seeds if seed in base]
            row[f"{name}_relative"] = statistics.fmean(a for a, _ in pairs) / statistics.fmean(b for _, b in pairs) - 1
            row[f"{name}_error"] = _error([a - b for a, b in pairs]) / statistics.fmean(b for _, b in pairs)
            row[f"{name}_worst"] = min(a for a, _ in pairs)
        shared = set.intersection(*(set(run) for run in of_seeds.values()))
        for name in (*LOGGED, "held_out_score", "held_out_kl"):
            if name in shared:
                row[name] = statistics.fmean(run[name] for run in of_seeds.values())
        result.append(row)
    return result


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
