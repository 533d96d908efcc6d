"""Numbers that are not finite never reach the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny_groups import trainer

from trl_realloc import GRPOTrainer, PPOTrainer
from trl_realloc.algorithms.nonfinite import NonFiniteError, problem_of
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.runtime.calls import batch
from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.trainer.policy.rewards import LEFT_OUT


REFUSED = (NonFiniteError, JobFailed)
SHORT: dict[str, Any] = {"response_length": 4, "num_ppo_epochs": 1, "max_steps": 1}


def spoiled(model: Any) -> Any:
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    return model


def returning(score: float) -> Callable[..., list[float]]:
    return lambda completions, **columns: [score if at == 3 else 1.0 for at in range(len(completions))]


GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "a score of 1e38": ({"reward_model": returning(1e38)}, r"1e\+38 for sample 3 of the batch \(prompt 'w"),
    "a score that float32 has not": ({"reward_model": returning(1e300)}, r"1e\+300 for sample 3 of the batch"),
    "a score of -inf": ({"reward_model": returning(-math.inf)}, "returned -inf for sample 3"),
    "a broken reward model": ({"reward_model": spoiled(tiny.classifier(2))}, "reward model .* gave nan for sample"),
    "a broken policy": ({"model": spoiled(tiny.policy())}, "actor's weights are not finite"),
    "a broken critic": ({"value_model": spoiled(tiny.classifier())}, "critic's weights are not finite"),
    "a broken reference": ({"ref_model": spoiled(tiny.policy())}, "log-probability of reference.forward of sample"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_was_given_and_is_not_finite_is_refused_with_the_sample_it_spoils(tmp_path: Path, what: str) -> None:
    given, said = GIVEN[what]
    made = tiny.trainer(tmp_path, given=given, **SHORT)
    made.placement.start()
    before = tiny.weights(made)
    with pytest.raises(REFUSED, match=said):
        made.train()
    assert same(before, tiny.weights(made))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor.nan_to_num(), other[name].nan_to_num()) for name, tensor in one.items())


@pytest.mark.parametrize("column", ["scores", "logprobs", "ref_logprobs", "values", "kl", "advantages", "returns"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e30])
def test_a_number_of_a_sample_that_cannot_be_trained_on_is_found_with_its_sample(column: str, number: float) -> None:
    """The second sample of two, of three tokens and of two."""
    lengths = torch.tensor([3, 2])
    rows = {name: Ragged(torch.ones(5), lengths) for name in ("logprobs", "ref_logprobs", "values", "kl", "advantages")}
    samples = Rollouts(index=torch.tensor([8, 9]), scores=torch.ones(2), returns=rows["kl"], **rows)
    assert problem_of(samples) is None
    broken = torch.ones(2 if column == "scores" else 5)
    broken[-1] = number
    error = problem_of(samples.plus(**{column: broken if column == "scores" else Ragged(broken, lengths)}))
    assert error is not None and error.sample == 9 and "of sample 9 of the batch is" in str(error)


SETTINGS: dict[str, tuple[dict[str, float], str]] = {
    "kl_coef": ({"kl_coef": math.nan}, "an advantage of sample .* kl_coef"),
    "gamma": ({"gamma": math.nan}, "an advantage of sample"),
    "lam": ({"lam": math.inf}, "an advantage of sample"),
    "missing_eos_penalty": ({"missing_eos_penalty": math.inf}, "the score after missing_eos_penalty of sample"),
    "vf_coef": ({"vf_coef": math.nan}, "critic.train in update 1 was not taken: .*gradients"),
    "cliprange": ({"cliprange": math.nan}, "actor.train in update 1 .* loss of sample . .* not finite .prompt 'w"),
    "cliprange_value": ({"cliprange_value": math.nan}, "critic.train in update 1 .* loss of sample"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_makes_losses_overflow_is_refused_before_a_step(tmp_path: Path, setting: str) -> None:
    changed, said = SETTINGS[setting]
    made = tiny.trainer(tmp_path, **SHORT)
    tiny.change_ppo(made, **changed)
    made.placement.start()
    before = tiny.weights(made)
    with pytest.raises(REFUSED, match=said):
        made.train()
    after, role = tiny.weights(made), "policy" if setting != "cliprange" else "critic"
    trains_first = setting in ("vf_coef", "cliprange_value")  # then the policy's steps of this update were good ones
    kept = {n: t for n, t in before.items() if not (trains_first and n.startswith("policy"))}
    kept = {n: t for n, t in kept.items() if setting != "cliprange" or not n.startswith(role)}
    assert same(kept, after)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 1e38}, "weights are not finite after update 1, at learning rate 1e\\+38"),
        ({"learning_rate": 1.0, "weight_decay": 1e39}, "weights are not finite after update 1"),
    ],
)
def test_weights_made_infinite_end_the_run_and_stay_unsaved(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    made = tiny.trainer(tmp_path, save_strategy="steps", save_steps=1, **{**SHORT, **changes})
    with pytest.raises(REFUSED, match=said):
        made.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_learning_rate_that_is_no_number_is_refused(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, **SHORT)
    made.setup.rates.scheduled.param_groups[0]["lr"] = math.nan
    with pytest.raises(REFUSED, match="the learning rate of actor.train is nan"):
        made.train()


class Sometimes:
    """A reward that is infinite in the second update."""

    __name__ = "sometimes"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [math.inf if self.calls == 2 and at == 3 else float(len(text)) for at, text in enumerate(completions)]


def test_an_update_that_is_not_finite_is_left_out_and_counted_where_a_setting_says_so(tmp_path: Path) -> None:
    """The run goes on as if the update had not been, and its logs hold no NaN."""
    made = tiny.trainer(
        tmp_path,
        given={"reward_model": Sometimes()},
        **{**SHORT, "max_steps": 3, "num_mini_batches": 2, "skip_nonfinite_updates": True},
    )
    steps = engine_steps(made)
    made.train()
    rows = [row for row in made.state.log_history if "skipped_updates/policy" in row]
    assert [row["skipped_updates/policy"] for row in rows] == [0.0, 2.0, 0.0]
    assert [row["skipped_updates/value"] for row in rows] == [0.0, 2.0, 0.0]
    assert all(math.isfinite(v) for row in rows for k, v in row.items() if k != "val/ratio_var")
    assert steps() == (4, 4)


def test_an_update_with_a_sample_that_no_function_scores_is_left_out_where_a_setting_says_so(tmp_path: Path) -> None:
    calls: list[int] = []

    def unsure(completions: list[str], **columns: Any) -> list[float | None]:
        calls.append(len(completions))
        return [None if len(calls) == 2 and at == 3 else 1.0 for at in range(len(completions))]

    made = tiny.trained(
        tmp_path, given={"reward_model": unsure}, **{**SHORT, "max_steps": 3}, skip_nonfinite_updates=True
    )
    skipped = [row["skipped_updates/policy"] for row in made.state.log_history if "skipped_updates/policy" in row]
    assert [bool(count) for count in skipped] == [False, True, False]


def test_one_optimizer_step_that_is_not_finite_is_left_out_of_an_update(tmp_path: Path) -> None:
    options = {**SHORT, "num_mini_batches": 2, "skip_nonfinite_updates": True}
    made = tiny.trainer(tmp_path, **options)
    made.placement.start()
    engine, seen = made.placement.engine("critic.train"), []
    train = engine.train

    def broken(samples: Any, loss: Any, *rest: Any) -> Any:
        seen.append(len(samples))
        return train(samples, replace(loss, vf_coef=math.inf) if len(seen) == 1 else loss, *rest)

    engine.train = broken  # type: ignore[method-assign, union-attr, assignment]
    steps = engine_steps(made)
    made.train()
    (row,) = tiny.updates(made)
    assert (row["skipped_updates/policy"], row["skipped_updates/value"]) == (0.0, 1.0)
    assert math.isfinite(row["loss/value_avg"]) and steps() == (2, 1)


def engine_steps(made: PPOTrainer) -> Callable[[], tuple[int, int]]:
    return lambda: (made.placement.engine("actor.train").version, made.placement.engine("critic.train").version)  # type: ignore[union-attr]


def test_a_float16_scaler_skips_overflowed_gradients_by_itself_but_not_a_loss(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, **SHORT)
    made.placement.start()
    engine: Any = made.placement.engine("actor.train")
    engine.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    hook = engine.head.model.lm_head.weight.register_hook(lambda gradient: gradient * 1e38)
    made.train()  # the gradients overflow under this scale: no step, and a smaller scale
    assert engine.scaler.get_scale() == 2.0**39
    hook.remove()
    tiny.change_ppo(made, cliprange=math.nan)
    with pytest.raises(REFUSED, match="loss of sample . of the batch is not finite"):
        made.train()


def test_the_means_of_an_evaluation_are_of_the_batches_that_have_the_metric(tmp_path: Path) -> None:
    calls: list[int] = []

    def scores(completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        return [1.0] * (len(completions) - 1) + [math.inf if len(calls) == 2 else 1.0]

    given = {"reward_model": scores, "eval_dataset": tiny.prompts(16)}
    made = tiny.trainer(tmp_path, given=given, per_device_eval_batch_size=8, skip_nonfinite_updates=True)
    metrics = made.evaluate()
    assert calls == [8, 8] and metrics["eval_objective/scores"] == 1.0


def test_a_score_that_is_not_finite_is_named_if_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that was returned, and with the function's name."""
    messages: list[str] = []
    monkeypatch.setattr(batch.logger, "warning", messages.append)
    functions = [named("length", 1.0), named("judge", math.nan)]
    tiny.trained(tmp_path, given={"reward_model": functions}, **SHORT, skip_nonfinite_updates=True)
    (message,) = messages
    assert message.startswith("the score by 'judge' of sample 3 of the batch is nan (prompt 'w")


def named(name: str, score: float) -> Any:
    function = returning(score)
    function.__name__ = name
    return function


def group_trainer(folder: Path, reward: Any, **changes: Any) -> GRPOTrainer:
    of_run = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "save_strategy": "steps"}
    return trainer(folder, given={"reward_funcs": reward}, **of_run, save_steps=100, **changes)


def test_an_infinite_reward_of_grpo_is_refused_and_the_state_before_it_is_saved(tmp_path: Path) -> None:
    made = group_trainer(tmp_path, [named("length", 1.0), Sometimes()])
    with pytest.raises(NonFiniteError, match=r"'sometimes' returned inf for sample 3 of the batch; .*\(prompt 'w"):
        made.train()
    assert made.state.global_step == 1 and (tmp_path / "checkpoint-1" / "trainer_state.json").exists()


def test_a_completion_with_an_infinite_reward_is_left_out_of_its_group_where_a_setting_says_so(tmp_path: Path) -> None:
    made = group_trainer(tmp_path, [named("length", 1.0), Sometimes()], skip_nonfinite_updates=True)
    made.train()
    rows = [row for row in made.state.log_history if LEFT_OUT in row]
    assert [row[LEFT_OUT] for row in rows] == [0.0, 1.0]
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in rows)
    assert all(math.isfinite(row["reward"]) for row in rows)
    advantages = list(made._logs["advantages"])[-8:]
    assert advantages[3] == 0.0 and any(advantages)


def test_a_reward_model_of_grpo_that_gives_nan_leaves_the_completion_out(tmp_path: Path) -> None:
    model = tiny.classifier()
    with torch.no_grad():
        model.model.embed_tokens.weight[20:60] = math.nan
    model.save_pretrained(tmp_path / "reward")
    tiny.tokenizer().save_pretrained(tmp_path / "reward")
    rewards = [str(tmp_path / "reward"), Sometimes()]
    made = group_trainer(tmp_path / "run", rewards, skip_nonfinite_updates=True)
    made.train()
    rows = [row for row in made.state.log_history if LEFT_OUT in row]
    assert len(rows) == 2 and all(0 < row[LEFT_OUT] <= 8 for row in rows)
    assert all(math.isfinite(row["grad_norm"]) for row in rows)
