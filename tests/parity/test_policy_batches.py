"""What GRPOTrainer and RLOOTrainer do under a plan with batches, rewards, masks, adapters and subclasses is what the
installed TRL does, from the same rollouts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import custom_loss
import pytest
import tiny
import torch
import trl
from recorded_rollouts import (
    LONGEST,
    Run,
    arguments,
    check_equal,
    compare,
    make,
    policy,
    recorded,
    responses,
    result,
    run,
    unequal,
)

import trl_realloc
from trl_realloc.algorithms import trainer_loss
from trl_realloc.trainer.policy import loss as policy_loss


@pytest.mark.parametrize(
    ("steps_per_generation", "gradient_accumulation_steps", "num_iterations"),
    [(2, 2, 1), (4, 2, 1), (1, 2, 1), (3, 2, 1), (2, 2, 2), (2, 1, 2)],
)
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_generations_and_optimizer_steps_meet_as_in_trl(
    tmp_path: Path, kind: str, steps_per_generation: int, gradient_accumulation_steps: int, num_iterations: int
) -> None:
    steps = {"steps_per_generation": steps_per_generation, "num_iterations": num_iterations}
    steps["gradient_accumulation_steps"] = gradient_accumulation_steps
    compare(tmp_path, kind=kind, **steps, max_steps=4, beta=0.04)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 3, "num_generations": 2},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "entropy_coef": 0.1},
    ],
    ids=str,
)
def test_the_last_optimizer_step_of_an_epoch_may_have_fewer_batches(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare(tmp_path, given={"train_dataset": tiny.prompts(7)}, max_steps=-1, num_train_epochs=2, **settings)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    given = {"train_dataset": tiny.prompts(6), "eval_dataset": tiny.prompts(4)}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_entropy", "greater_is_better": True}
    by_epoch = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    made = compare(tmp_path, given=given, **by_epoch, **best)
    first, last = (row["eval_entropy"] for row in made.logs if "eval_entropy" in row)
    assert first > last, "the best model is not the last one"


def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
    """No reward for a third of the responses, and for all to some prompts."""
    return [None if len(text) % 3 == 0 else len(text) / 10 for text in completions]


async def later(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(prompt[:2] == text[:2]) for prompt, text in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": "batch"},
        {"scale_rewards": "none", "loss_type": "dr_grpo"},
        {"reward_weights": [0.5, 2.0, -1.0]},
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 3.0, 1.0]},
    ],
    ids=str,
)
def test_rewards_become_the_same_advantages(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare(tmp_path, given={"reward_funcs": [unequal, sometimes, later]}, beta=0.04, **settings)


def test_an_unscorable_response_moves_nothing(tmp_path: Path) -> None:
    compare(tmp_path, given={"reward_funcs": sometimes})


def test_a_step_without_any_advantage_changes_nothing(tmp_path: Path) -> None:
    made = compare(tmp_path, given={"reward_funcs": lambda completions, **_: [1.0] * len(completions)}, max_steps=1)
    assert made.logs[0]["grad_norm"] == 0.0


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_truncated_responses_are_masked(tmp_path: Path, kind: str) -> None:
    made = compare(tmp_path, kind=kind, mask_truncated_completions=True, beta=0.04)
    assert made.logs[0]["completions/clipped_ratio"] > 0


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_step_whose_responses_are_all_masked_decays_the_weights(tmp_path: Path, entropy_coef: float) -> None:
    class AllTruncatedInTheSecondStep:
        state: Any

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            length, end = (LONGEST, 9) if self.state.global_step == 1 else (4, tiny.EOS)
            return [[*(2 + (row * at) % 90 for at in range(1, length)), end] for row in range(len(prompt_ids))], None

    compare(
        tmp_path,
        base=lambda trainer: type(trainer.__name__, (AllTruncatedInTheSecondStep, trainer), {}),
        given={"reward_funcs": lambda completions, **_: [float(len(text) % 5) for text in completions]},
        **{"mask_truncated_completions": True, "entropy_coef": entropy_coef, "weight_decay": 0.1},
        # an epsilon far from the sign of a gradient that is rounding alone
        **{"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-3},
    )


def test_tokens_of_an_environment_have_no_loss(tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        ids, _ = responses(trainer.state.global_step, prompt_ids)
        masks = [[int(at % 3 != 1) for at in range(len(row))] for row in ids]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": masks}

    compare(tmp_path, given={"rollout_func": rollout}, beta=0.04, steps_per_generation=4)


@pytest.mark.parametrize("length", [1, LONGEST])
def test_responses_of_equal_length(tmp_path: Path, length: int) -> None:
    class Equal:
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return [[2 + (row + at) % 90 for at in range(length)] for row in range(len(prompt_ids))], None

    compare(tmp_path, base=lambda trainer: type(trainer.__name__, (Equal, trainer), {}), beta=0.04)


def test_evaluation_has_the_same_loss(tmp_path: Path) -> None:
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    made = compare(tmp_path, given={"eval_dataset": tiny.prompts(6)}, **evaluates, beta=0.04)
    losses = [row["eval_loss"] for row in made.logs if "eval_loss" in row]
    assert len(losses) == 3 and len(set(losses)) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.0},
        {"steps_per_generation": 6, "epsilon": 0.05},
        {"normalize_advantages": True, "reward_clip_range": (0.0, 1.5)},
        {"num_iterations": 2, "temperature": 0.8},
    ],
    ids=str,
)
def test_rloo_is_trls(tmp_path: Path, settings: dict[str, Any]) -> None:
    made = compare(tmp_path, kind="RLOO", **settings)
    assert any(row["grad_norm"] > 0 for row in made.logs[:-1])


class FromTheDrawingPolicy(trl.RLOOTrainer):
    """TRL's loss, told the log-probabilities of `responses` as those of the policy before the update."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        for at, (row, mask) in enumerate(zip(self.drawn, made["completion_mask"].tolist(), strict=True)):
            if None not in row:
                made["old_logps"][at] = sum(value for value, kept in zip(row, mask, strict=False) if kept)
        return made


def noted(trainer: type) -> type:
    """The responses of `recorded`, whose log-probabilities a trainer gets as from its engine."""

    class Noted(recorded(trainer)):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            ids, self.drawn = responses(self.state.global_step, prompt_ids)
            if isinstance(self, trl_realloc.RLOOTrainer):
                rows = [[math.nan if value is None else value for value in row] for row in self.drawn]
                self.vllm_generation.logprobs = [torch.tensor(row) for row in rows]
            return ids

    Noted.__name__ = trainer.__name__
    return Noted


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "mask_truncated_completions": True}], ids=str)
def test_rloos_ratio_may_be_to_the_policy_that_drew_a_completion(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Here an imagined one, so the ratios are far from one. The wide clip lets them count."""
    settings = {"kind": "RLOO", "epsilon": 0.9, "learning_rate": 0.01, **settings}
    planned = make(trl_realloc, tmp_path / "planned", base=noted, **settings)
    planned.vllm_importance_sampling_correction = True
    plain = make(trl_realloc, tmp_path / "plain", base=noted, **settings)
    by_trl = noted(FromTheDrawingPolicy)(
        args=arguments(trl.RLOOConfig, tmp_path / "trl", **{k: v for k, v in settings.items() if k != "kind"}),
        model=policy(),
        reward_funcs=unequal,
        train_dataset=tiny.prompts(32),
        processing_class=tiny.tokenizer(),
    )
    for trainer in (planned, plain, by_trl):
        torch.manual_seed(0)
        trainer.train()
    made, expected = result(planned), result(by_trl)
    check_equal(made, expected)
    moved = (torch.equal(weight, made.weights[name]) for name, weight in result(plain).weights.items())
    assert not all(moved), "it makes a difference"


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_reference_of_new_adapters_is_the_model_without_them(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    settings: dict[str, Any] = {"kind": kind, "beta": 0.1, "max_steps": 4}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"])
    planned, by_trl = (
        make(library, tmp_path / library.__name__, given={"peft_config": lora}, **settings)
        for library in (trl_realloc, trl)
    )
    by_trl.model.load_state_dict(planned.model.state_dict())  # each has drawn its own
    for trainer in (planned, by_trl):
        torch.manual_seed(0)  # of the order of the samples
        trainer.train()
    check_equal(result(planned), result(by_trl))
    assert planned.state.log_history[2]["kl"] > 0 or kind == "RLOO"


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_reference_of_adapters_that_were_trained_before_is_a_copy_of_them(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> dict[str, Any]:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return {"model": peft.get_peft_model(policy(), lora)}

    settings: dict[str, Any] = {"kind": kind, "beta": 0.1, "max_steps": 3}
    expected = run(trl, tmp_path / "trl", given=adapted(), **settings)
    made = run(trl_realloc, tmp_path / "planned", given=adapted(), **settings)
    check_equal(made, expected)
    assert made.logs[0]["kl"] == pytest.approx(0.0, abs=1e-6) and made.logs[1]["kl"] > 1e-6


def penalized(trainer: type) -> type:
    """A user's trainer with a loss that adds to TRL's."""

    class Penalized(recorded(trainer)):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return 0.5 * super()._compute_loss(model, inputs) + inputs["advantages"].square().mean()

    return Penalized


def reinforced(trainer: type) -> type:
    """A user's trainer with a loss of its own."""

    class Reinforced(recorded(trainer)):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = inputs["completion_mask"]
            attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
            logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))
            self._metrics["train"]["chosen"].append((logprobs * mask).sum().item())
            return -(logprobs * mask * inputs["advantages"][:, None]).sum() / mask.sum()

    return Reinforced


def geometric(trainer: type) -> type:
    """The loss of `examples/custom_loss.py`."""
    return type("Geometric", (recorded(trainer),), {"_compute_loss": custom_loss.GMPOTrainer._compute_loss})


@pytest.mark.parametrize("base", [penalized, reinforced, geometric])
def test_a_users_loss_trains_by_its_own_gradient(tmp_path: Path, base: Any) -> None:
    made = compare(tmp_path, base=base, num_iterations=2)
    assert made.logs[0]["grad_norm"] > 0


@pytest.mark.parametrize("base", [recorded, penalized])
def test_samples_without_gradient_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Any) -> None:
    """By a loss in the engines, and by a user's."""
    made = make(trl_realloc, tmp_path / "without", base=base)
    counts, add, train = list[int](), made.calls.add_gradients, made.calls.train

    def adding(given: Any, loss: Any) -> Any:
        counts.append(len(given))
        return add(given, loss)

    def training(given: Any, rate: Any) -> Any:
        counts.append(len(trainer_loss.without_zero_grads(given)))
        return train(given, rate)

    made.calls.add_gradients, made.calls.train = adding, training
    made.train()
    assert any(1 < count < 8 for count in counts)
    monkeypatch.setattr(trainer_loss, "without_zero_grads", lambda given: given)
    monkeypatch.setattr(policy_loss, "rows_with_grad", lambda *given: torch.ones(4, dtype=torch.bool))
    check_equal(result(made), run(trl_realloc, tmp_path / "with", base=base), tolerance=1e-7)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_an_optimizer_step_runs_each_sample_through_the_model_once(tmp_path: Path, kind: str) -> None:
    made = make(trl_realloc, tmp_path, kind=kind, num_iterations=2, max_steps=2)
    tokens = [0, 0]

    def count(head: Any, given: Any, output: Any) -> None:
        tokens[made.state.global_step] += given[0].tokens

    made.run.placed.start()
    made.placement.engine("actor.train").head.register_forward_hook(count)
    made.train()
    samples = made.state.log_history[0]["num_tokens"]
    assert tokens[1] == samples + 2, "and a sample of two tokens for the step"


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_resumed_run_is_a_straight_one(tmp_path: Path, kind: str, optimizer: str) -> None:
    settings: dict[str, Any] = {"kind": kind, "beta": 0.04, "optim": optimizer, "learning_rate": 0.01}
    settings |= {"lr_scheduler_type": "linear", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    settings |= {"steps_per_generation": 4}
    straight = run(trl_realloc, tmp_path, **settings)
    made = make(trl_realloc, tmp_path / "resumed", **settings)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    last = [row for row in straight.logs if row["step"] > 2]
    resumed = result(made)
    check_equal(Run(resumed.logs[-3:-1], resumed.weights), Run(last[:-1], straight.weights), tolerance=1e-7)


def test_the_entropy_controller_is_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.02}
    settings |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = run(trl_realloc, tmp_path, **settings)
    state = json.loads((tmp_path / "checkpoint-2" / "entropy_ctrl_state.json").read_text())
    assert state["entropy_coef"] == straight.logs[1]["entropy_coef"] != 0.1
    made = make(trl_realloc, tmp_path / "resumed", **settings)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    check_equal(Run([], result(made).weights), Run([], straight.weights), tolerance=1e-7)
