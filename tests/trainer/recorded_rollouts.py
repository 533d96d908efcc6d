"""Runs of GRPO and RLOO, by TRL's trainers or this package's, whose responses are fixed, so that two runs differ only
in how they compute: responses of skewed lengths, one token among them, and groups whose rewards are equal.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_realloc


# log keys whose values differ from run to run, by their ends and by their beginnings
TIMES, OF_CALLS = ("time", "_runtime", "per_second", "tokens/s"), ("time/", "realloc/")
LONGEST = 12
LENGTHS = (1, 2, 3, 7, LONGEST)


@dataclass(frozen=True)
class Run:
    """What a run left behind.

    Args:
        logs: every row of the log, without times.
        weights: parameters that train, after the run.
    """

    logs: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


def responses(step: int, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float | None]]]:
    """Token ids and log-probabilities of an imagined generation engine, which has no log-probability for some tokens.
    The longest responses have no end."""
    ids: list[list[int]] = []
    logprobs: list[list[float | None]] = []
    for at, prompt in enumerate(prompts):
        draw = random.Random(f"{step} {at} {list(prompt)}")
        length = draw.choice(LENGTHS)
        tokens = [draw.randrange(2, tiny.VOCABULARY) for _ in range(length)]
        if length < LONGEST:
            tokens[-1] = tiny.EOS
        ids.append(tokens)
        logprobs.append([None if draw.random() < 0.05 else draw.uniform(-5.4, -4.4) for _ in tokens])
    return ids, logprobs


def unequal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward of words, but the same for every response to a prompt whose number of words can be divided by three."""
    pairs = zip(prompts, completions, strict=True)
    return [1.0 if len(p.split()) % 3 == 0 else float(len(c.split()) % 4) for p, c in pairs]


@functools.cache
def _saved() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    tiny.policy(initializer_range=0.1).save_pretrained(made.name)
    return made


def policy() -> Any:
    """A model from a folder, as TRL loads the reference from there. Its weights are so large that its probabilities are
    far from equal."""
    return AutoModelForCausalLM.from_pretrained(_saved().name)


def arguments(config: type, folder: Path | str, **changes: Any) -> Any:
    """Two micro-batches of one group of four for each of three optimizer steps by SGD."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 3}
    steps = {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant"}
    draws = {"use_vllm": False, "max_completion_length": LONGEST}
    return config(output_dir=str(folder), **{**tiny.BARE, **sizes, **steps, **draws, **changes})


def recorded(trainer: type) -> type:
    """A subclass of a trainer that takes its responses from `responses`; with log-probabilities where the loss is
    corrected for them. vLLM has none for some tokens."""

    class Recorded(trainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            ids, logprobs = responses(self.state.global_step, prompt_ids)
            if issubclass(trainer, trl.RLOOTrainer):
                return ids
            return ids, logprobs if self.use_vllm and self.vllm_importance_sampling_correction else None

    Recorded.__name__ = trainer.__name__
    return Recorded


def make(
    library: Any,
    folder: Path | str,
    *,
    kind: str = "GRPO",
    base: Callable[[type], type] = recorded,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer, not yet run.

    Args:
        library: `trl` or `trl_realloc`.
        kind: "GRPO" or "RLOO".
        base: makes the class from the library's.
        given: arguments of the constructor.
        changes: settings.
    """
    if library is trl_realloc:
        changes = {"plan": "flatten", **changes}
    parts: dict[str, Any] = {"model": policy(), "reward_funcs": unequal, "train_dataset": tiny.prompts(32)}
    parts |= {"processing_class": tiny.tokenizer(), **(given or {})}
    args = arguments(getattr(library, f"{kind}Config"), folder, **changes)
    return base(getattr(library, f"{kind}Trainer"))(args=args, **parts)


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters that train."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def result(trainer: Any) -> Run:
    """Of a trainer that has run."""
    logs = [
        {k: v for k, v in row.items() if not k.endswith(TIMES) and not k.startswith(OF_CALLS)}
        for row in trainer.state.log_history
    ]
    return Run(logs, trained(trainer))


def run(library: Any, folder: Path | str, corrects: bool = False, **changes: Any) -> Run:
    """Train to the end.

    Args:
        corrects: the loss is corrected for the log-probabilities of `responses`, as if vLLM had generated.
        changes: the arguments of `make`.
    """
    trainer = make(library, folder, **changes)
    if corrects:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.train()
    return result(trainer)


def check_equal(run: Run, expected: Run, tolerance: float = 1e-6) -> None:
    """The same logs, key by key, and the same parameters."""
    assert len(run.logs) == len(expected.logs)
    for row, other in zip(run.logs, expected.logs, strict=True):
        row, other = ({k: math.nan if v is None else v for k, v in logs.items()} for logs in (row, other))
        wanted = pytest.approx(other, rel=10 * tolerance, abs=10 * tolerance, nan_ok=True)
        different = {key: (row.get(key), other.get(key)) for key in row.keys() | other.keys()}
        assert row == wanted, {key: pair for key, pair in different.items() if pair[0] != pair[1]}
    assert run.weights.keys() == expected.weights.keys()
    for name, tensor in run.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=tolerance, atol=tolerance)


def compare(folder: Path, **changes: Any) -> Run:
    """Run this package's trainer and TRL's; both have the same logs and parameters. Returns this package's run."""
    expected = run(trl, folder / "trl", **changes)
    made = run(trl_realloc, folder / "planned", **changes)
    check_equal(made, expected)
    return made
