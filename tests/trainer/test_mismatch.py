"""The mismatch of engine and trainer: measured, logged, warned of, corrected for, and the end of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny
import tiny_groups
import torch
from datasets import Dataset
from torch import Tensor

from trl_realloc import RLOOTrainer
from trl_realloc.engines.requests import Sampling
from trl_realloc.runtime.call_server import CallServer
from trl_realloc.trainer.policy.ahead import PromptsAhead
from trl_realloc.trainer.policy.mismatch import EngineMismatch
from trl_realloc.trainer.policy.planned_generation import EngineGeneration
from trl_realloc.trainer.policy.sampled_routes import SampledRoutes
from trl_realloc.trainer.policy.single_candidates import SingleCandidates
from trl_realloc.trainer.policy.turns import Turns
from trl_realloc.trainer.run.mismatch_gate import MismatchError


ERROR = "sampling/token_mult_prob_error"
DIFFERENCE = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio"
GIVEN: dict[str, Any] = {
    "reward_funcs": lambda completions, **_: [*range(len(completions))],
    "train_dataset": Dataset.from_dict({"prompt": ["w1 w2", "w3"] * 4}),
}


# --- PPO ----------------------------------------------------------------------------------------------------------


def told_wrongly(tmp_path: Path, by: float, **changes: Any) -> Any:
    """A trainer whose engine tells log-probabilities that are too small."""
    made = tiny.trainer(tmp_path, num_ppo_epochs=2, num_mini_batches=2, **changes)
    run = made.executor.run

    def shifted(*args: Any, **kwargs: Any) -> Any:
        engine = made.placement.generators["actor.generate"]
        if "generate" not in vars(engine):
            generate = engine.generate
            engine.generate = lambda *of: (
                replace(one, logprobs=tuple(value - by for value in one.logprobs)) for one in generate(*of)
            )
        return run(*args, **kwargs)

    made.executor.run = shifted
    return made


@pytest.mark.parametrize("corrects", [False, True])
def test_ppo_logs_the_mismatch_before_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, corrects: bool) -> None:
    made = told_wrongly(tmp_path, 0.2, vllm_importance_sampling_correction=corrects, learning_rate=1e-2)
    made.train()
    first, *_ = rows = tiny.updates(made)
    for row in rows:
        assert row[ERROR] == pytest.approx(math.exp(0.2), rel=1e-4)
        assert row[f"{DIFFERENCE}/mean"] == pytest.approx(0.2, rel=1e-4)
    if not corrects:
        assert first[f"{RATIO}/min"] == pytest.approx(math.exp(0.2), rel=1e-4) == first[f"{RATIO}/max"]
    (warning,) = [record.message for record in caplog.records if ERROR in record.message]
    assert "is 1.221 in update 1, above max_mismatch 1.1" in warning and "bf16: false" in warning
    assert ("PPO's ratio is relative to the engine's" in warning) != corrects


def test_a_run_ends_above_its_limit_where_that_is_set(tmp_path: Path) -> None:
    made = told_wrongly(tmp_path, 0.2, mismatch_action="end", save_strategy="steps", save_steps=5)
    with pytest.raises(MismatchError, match=r"1\.221 in update 1, above max_mismatch 1\.1"):
        made.train()
    assert (tmp_path / "checkpoint-1").exists(), "the state is saved"
    assert tiny.updates(made)[0][ERROR] == pytest.approx(math.exp(0.2), rel=1e-4)


def test_a_run_without_a_limit_is_warned_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = told_wrongly(tmp_path, 0.2, max_mismatch=None, mismatch_action="end")
    made.train()
    assert "in update 1, above 1.05. " in caplog.text


# --- GRPO and RLOO ------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
TRAINER = -torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.5, 0.5, 0.0, 0.0]])


def trainer_of(**changes: Any) -> Any:
    settings = {"max_mismatch": 1.1, "mismatch_action": "correct", "vllm_importance_sampling_correction": None}
    made = SimpleNamespace(
        args=SimpleNamespace(**{**settings, **changes}),
        accelerator=SimpleNamespace(is_main_process=True, gather=lambda rows: torch.cat([rows, rows])),  # two ranks
        state=SimpleNamespace(global_step=4),
        model=SimpleNamespace(training=True),
        plan={"actor.generate": SimpleNamespace(engine="vllm")},
        vllm_generation=EngineGeneration(
            cast(CallServer, SimpleNamespace(begin_generation=lambda: None)),
            *(8, cast(PromptsAhead, None), cast(SingleCandidates, None), cast(Turns, None), SampledRoutes()),
        ),
        run=SimpleNamespace(checkpoints=SimpleNamespace(saving_good_state=nullcontext)),
        _metrics={"train": defaultdict(list)},
    )
    made.mismatch = EngineMismatch(made)
    return made


def generated(
    trainer: Any, engine: Tensor, *, known: bool = True, ages: list[Tensor] | None = None, **columns: Any
) -> dict[str, Any]:
    trainer.mismatch.begin_generation()
    trainer.vllm_generation.logprobs, trainer.vllm_generation.ages = [TRAINER[0, :3], TRAINER[1, :2]], ages
    if known:
        with torch.no_grad():
            trainer.mismatch.see(TRAINER)
    made = {"completion_mask": MASK, "sampling_per_token_logps": engine, **columns}
    return trainer.mismatch.of_generation(made)  # type: ignore[no-any-return]


def logged(trainer: Any) -> dict[str, float]:
    return {name: value for name, (value,) in trainer._metrics["train"].items()}


def test_the_mismatch_of_a_generation_is_over_its_tokens_and_ratios_over_its_completions() -> None:
    trainer, engine = trainer_of(), TRAINER.clone()
    engine[0, 1] += 0.2
    engine[1, 0] = float("nan")  # vLLM has told nothing
    engine[1, 3] = -9.0  # padding
    generated(trainer, engine)
    assert logged(trainer) == pytest.approx(
        {
            f"{DIFFERENCE}/mean": 0.05,
            f"{DIFFERENCE}/max": 0.2,
            f"{RATIO}/min": math.exp(-0.2),
            f"{RATIO}/mean": (math.exp(-0.2) + 1) / 2,
            f"{RATIO}/max": 1.0,
            ERROR: (3 + math.exp(0.2)) / 4,
        }
    )


def test_what_trl_logs_itself_is_logged_once_and_tool_calls_do_not_count() -> None:
    trainer, tools = trainer_of(), torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    engine = TRAINER.clone()
    engine[0, 1] = 0.0  # a tool's token
    generated(trainer, engine, tool_mask=tools, importance_sampling_ratio=torch.ones(2, 1))
    assert logged(trainer) == {ERROR: 1.0}


def test_tokens_of_older_policies_are_not_judged() -> None:
    trainer = trainer_of(mismatch_action="end")
    ages, engine = [torch.tensor([1, 1, 0]), torch.tensor([1, 1])], TRAINER.clone()
    engine[:, :2] -= 1.0
    generated(trainer, engine, ages=ages)
    assert logged(trainer)[ERROR] == 1.0 and logged(trainer)[f"{DIFFERENCE}/max"] == 1.0
    ages[0][2] = 1
    trainer._metrics["train"].clear()
    generated(trainer, engine, ages=ages)
    assert ERROR not in logged(trainer)


def test_tokens_of_unknown_ages_are_not_judged() -> None:
    """Of completions of several calls the latest has not made all."""
    trainer = trainer_of(mismatch_action="end")
    trainer.mismatch.begin_generation()
    trainer.vllm_generation.logprobs, trainer.vllm_generation.ages = [TRAINER[0, :3]], [torch.tensor([0, 0, 0])]
    with torch.no_grad():
        trainer.mismatch.see(TRAINER)
    trainer.mismatch.of_generation({"completion_mask": MASK, "sampling_per_token_logps": TRAINER - 1.0})
    assert logged(trainer)[f"{DIFFERENCE}/max"] == 1.0 and ERROR not in logged(trainer)


def test_the_losses_of_the_first_optimizer_step_measure_where_nothing_else_does() -> None:
    trainer = trainer_of()
    made = generated(trainer, TRAINER - 0.1, known=False)
    assert not logged(trainer)
    for rows in ([0], [1]):
        with trainer.mismatch.of_loss({name: column[rows] for name, column in made.items()}):
            trainer.mismatch.see(TRAINER[rows].requires_grad_())
    trainer.mismatch.end_update()
    assert logged(trainer)[ERROR] == pytest.approx(math.exp(0.1)) and trainer.mismatch.corrects
    trainer.state.global_step += 1  # the policy has changed
    with trainer.mismatch.of_loss(made):
        trainer.mismatch.see(TRAINER.clone().requires_grad_())
    trainer.mismatch.end_update()
    assert logged(trainer)


def test_rloos_engine_tells_its_trainer_and_a_limit_is_no_correction() -> None:
    trainer = trainer_of()
    trainer.mismatch.begin_generation()
    trainer.vllm_generation.logprobs = [TRAINER[0, :3], TRAINER[1, :2]]
    with torch.no_grad():
        trainer.mismatch.see(TRAINER)
    made = trainer.mismatch.of_generation({"completion_mask": MASK, "old_logps": TRAINER.sum(1)})
    assert "sampling_per_token_logps" not in made, "TRL's RLOO has none"
    assert logged(trainer)[ERROR] == 1.0 and not trainer.mismatch.corrects
    trainer._metrics["train"].clear()
    trainer.vllm_generation.logprobs = [TRAINER[0, :3] - 1.0, TRAINER[1, :2]]
    trainer.mismatch.of_generation({"completion_mask": MASK, "old_logps": TRAINER.sum(1)})
    assert logged(trainer)[ERROR] > 1.1 and trainer.mismatch.corrects


@pytest.mark.parametrize("latest", ["none", "of fewer rows", "of more rows", "of other lengths"])
def test_completions_that_a_subclass_generates_by_itself_have_no_mismatch(latest: str) -> None:
    """Its own, or those of several calls of the engines, of which the latest does not tell all."""
    trainer = trainer_of()
    rows = [TRAINER[0, :3] - 1.0, TRAINER[1, :2]]
    told = {"of fewer rows": rows[:1], "of more rows": [*rows, rows[0]], "of other lengths": rows[::-1], "none": rows}
    trainer.vllm_generation.logprobs = told[latest]
    if latest == "none":
        trainer.vllm_generation.begin(None)
    trainer.mismatch.begin_generation()
    with torch.no_grad():
        trainer.mismatch.see(TRAINER)
    made = trainer.mismatch.of_generation({"completion_mask": MASK})
    assert "sampling_per_token_logps" not in made, "TRL would take them for the engine's"
    assert not logged(trainer) and not trainer.mismatch.corrects


@pytest.mark.parametrize("asked", [True, False, None])
def test_only_a_correction_that_is_left_open_is_turned_on(caplog: pytest.LogCaptureFixture, asked: bool | None) -> None:
    """GRPO's is on by default, and True weights each loss already."""
    trainer = trainer_of(vllm_importance_sampling_correction=asked)
    generated(trainer, TRAINER - 0.3)
    assert trainer.mismatch.corrects == (asked is None)
    assert ("is set to False, so the loss is not corrected" in caplog.text) == (asked is False)
    ends = trainer_of(mismatch_action="end")
    with pytest.raises(MismatchError, match="in update 5"):
        generated(ends, TRAINER - 0.3)


# --- over the same tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_engine_and_trainer_compute_over_the_tokens_that_sampling_keeps(tmp_path: Path, full: bool) -> None:
    """Over the whole vocabulary, as TRL's, a completion's log-probability is smaller."""
    gaps: list[Tensor] = []

    class Compared(RLOOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            drawn = torch.stack([of_one.sum() for of_one in self.vllm_generation.logprobs])
            gaps.append(made["old_logps"] - drawn)
            return made

    draws = {"top_p": 0.8, "top_k": 20, "max_completion_length": 6, "gradient_accumulation_steps": 1}
    made = tiny_groups.trained(tmp_path, Compared, given=GIVEN, **draws, beta=0.1, full_vocabulary_logprobs=full)
    gap = torch.cat(gaps)
    assert len(gap) == 8 and bool((gap < -1).all() if full else (gap.abs() < 1e-4).all())
    assert made.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-5)


def test_forced_tokens_have_neither_log_probability_nor_gradient() -> None:
    logprobs = TRAINER.clone().requires_grad_()
    told: Any = [[0.0, -2.0, None], torch.tensor([-0.5, 0.0])]
    forced = SingleCandidates(Sampling(8, 1.0, regex="a+"), full_vocabulary=False)
    forced.begin_generation(told)
    forced.zeroed(logprobs).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    with forced.of_loss({"sampling_per_token_logps": torch.tensor([[-1.0, 0.0, -1.0, 0.0]])}):
        assert forced.zeroed(TRAINER[:1]).tolist() == [[-1.0, 0.0, -3.0, 0.0]]
    forced.end_generation()
    assert forced.zeroed(TRAINER) is TRAINER
    for of in (
        SingleCandidates(Sampling(8, 1.0), full_vocabulary=False),
        SingleCandidates(Sampling(8, 1.0, top_k=3), full_vocabulary=True),
    ):
        of.begin_generation(told)
        assert of.zeroed(TRAINER) is TRAINER, "nothing excludes tokens, or TRL's log-probabilities are wanted"


@pytest.mark.parametrize(("asked", "corrects"), [(None, True), (False, False)])
def test_a_resumed_run_corrects_as_the_one_before(tmp_path: Path, asked: bool | None, corrects: bool) -> None:
    """Unless the settings have switched the correction off since."""

    def trainer(folder: str, correction: bool | None, steps: int) -> Any:
        run = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
        corrects = {"vllm_importance_sampling_correction": correction}
        return tiny_groups.trainer(tmp_path / folder, RLOOTrainer, given=GIVEN, **{**tiny.BARE, **run}, **corrects)

    first = trainer("first", None, 1)
    first.run.adapter.mismatch.corrects = True  # as `_judge` decides above the limit
    first.train()
    resumed = trainer("resumed", asked, 2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert resumed.run.adapter.mismatch.corrects == corrects
    first.close()
    resumed.close()
