"""The drop-in is a drop-in: TRL's arguments, names and outputs, and a real `Trainer` behind them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from datasets import Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    TrainerCallback,
)
from trl import TrlParser

from trl_realloc import PPOConfig, PPOTrainer
from trl_realloc.algorithms.prompts import DataError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.trainer.report.completions import show_completions
from trl_realloc.trainer.trl_compat import HAS_TRL_PPO


if HAS_TRL_PPO:
    from trl.experimental.ppo.ppo_trainer import PolicyAndValueWrapper as TheirWrapper


pytestmark = pytest.mark.oldest  # where TRL's PPO is the base class
needs_trl_ppo = pytest.mark.skipif(not HAS_TRL_PPO, reason="this TRL has no PPO to compare with")

TRL_METRICS = """
    eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
    policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg
    val/clipfrac_avg val/ratio val/ratio_var val/num_eos_tokens lr episode epoch
"""


def test_the_default_arguments_warn_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        PPOConfig(output_dir=str(tmp_path))
    assert [str(warning.message) for warning in given if "gradient_checkpointing" in str(warning.message)] == []


def test_only_trl_up_to_1_12_has_a_ppo_to_stand_on() -> None:
    major, minor = (int(part) for part in trl.__version__.split(".")[:2])
    assert ((major, minor) <= (1, 12)) == HAS_TRL_PPO


def test_the_config_has_trl_1_12s_defaults_on_every_trl() -> None:
    expected = {"num_ppo_epochs": 4, "kl_coef": 0.05, "cliprange": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95}
    expected |= {"learning_rate": 3e-6, "logging_steps": 10}
    fields = PPOConfig.__dataclass_fields__
    assert {name: fields[name].default for name in expected} == expected


@needs_trl_ppo
def test_the_config_has_every_field_of_trls_in_its_order_with_its_default(tmp_path: Path) -> None:
    from trl.experimental.ppo import PPOConfig as TheirConfig

    theirs, ours = dataclasses.fields(TheirConfig), dataclasses.fields(PPOConfig)
    assert [f.name for f in ours][: len(theirs)] == [f.name for f in theirs]
    by_name = {f.name: f for f in ours}
    for field in theirs:
        assert by_name[field.name].default == field.default, field.name
        assert by_name[field.name].default_factory == field.default_factory, field.name
    assert isinstance(tiny.arguments(tmp_path), TheirConfig)


@needs_trl_ppo
def test_the_trainer_takes_trls_arguments_in_their_order(tmp_path: Path) -> None:
    from trl.experimental.ppo import PPOTrainer as TheirTrainer

    theirs = list(inspect.signature(TheirTrainer.__init__).parameters)
    assert list(inspect.signature(PPOTrainer.__init__).parameters)[: len(theirs)] == theirs
    assert issubclass(PPOTrainer, TheirTrainer)


@pytest.mark.parametrize("plan", ["interleave", "plans/mine.yaml", {"name": "x"}])
def test_a_recipe_gives_the_plan_by_name_path_or_mapping(tmp_path: Path, plan: object) -> None:
    import yaml

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "plan": plan, "bf16": False, "report_to": "none"}))
    (args,) = TrlParser([PPOConfig]).parse_args_and_config(args=["--config", str(recipe)])
    assert args.plan == plan


class Recorder(TrainerCallback):
    """The names of the events it was told of, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _record(name: str):
    def event(self: Recorder, args, state, control, **kwargs):
        self.events.append(name)

    return event


for _event in (*(f"{part}_{at}" for part in ("train", "epoch", "step") for at in ("begin", "end")), "init_end", "log"):
    setattr(Recorder, f"on_{_event}", _record(_event))
for _event in ("evaluate", "save"):
    setattr(Recorder, f"on_{_event}", _record(_event))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[PPOTrainer, Recorder, Path]:
    """One run with everything on: four updates, two passes, evaluation, checkpoints."""
    folder, recorder = tmp_path_factory.mktemp("run"), Recorder()
    given = {"train_dataset": tiny.prompts(16), "eval_dataset": tiny.prompts(6)}
    shows = {"report_to": ["tensorboard"], "num_sample_generations": 1}
    made = tiny.trained(folder, callbacks=[recorder], given=given, max_steps=4, **tiny.every(2), **shows)
    made.save_model()
    return made, recorder, folder


def test_every_metric_of_trls_is_logged_and_the_time_of_every_call(run) -> None:
    made, _, _ = run
    row = next(row for row in made.state.log_history if "objective/scores" in row)
    assert set(row) >= {*TRL_METRICS.split(), *(f"time/{call}" for call in ppo_graph().order), "tokens/s"}
    assert all(math.isfinite(value) for value in row.values())


def test_all_callbacks_are_told(run) -> None:
    _, recorder, _ = run
    assert recorder.events[:2] == ["init_end", "train_begin"] and recorder.events[-1] == "train_end"
    times = {"step_begin": 4, "step_end": 4, "epoch_begin": 2, "epoch_end": 2, "evaluate": 2, "save": 2}
    assert {event: recorder.events.count(event) for event in times} == times


def test_the_state_counts_episodes(run) -> None:
    made, _, _ = run
    assert made.state.global_step == 4 and made.state.episode == 32 and made.state.epoch == 2.0


def test_policy_tokenizer_and_critic_are_saved_as_from_pretrained_reads_them(run) -> None:
    made, _, folder = run
    kept = tiny.weights(made)
    for path in (folder, folder / "checkpoint-4"):
        saved = AutoModelForCausalLM.from_pretrained(path)
        assert all(torch.equal(p, kept[f"policy.{n}"]) for n, p in saved.named_parameters())
        critic = AutoModelForSequenceClassification.from_pretrained(path / "value_model")
        assert all(torch.equal(p, kept[f"critic.{n}"]) for n, p in critic.named_parameters())
        assert len(AutoTokenizer.from_pretrained(path)) == tiny.VOCABULARY


def test_the_model_card_names_the_method(run) -> None:
    _, _, folder = run
    card = (folder / "README.md").read_text()
    assert "trl-realloc" in card and "ppo" in card


def test_tensorboard_has_the_scores(run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, _, folder = run
    found = next((folder).rglob("events.out.tfevents*"))
    events = EventAccumulator(str(found.parent))
    events.Reload()
    assert any(tag.endswith("objective/scores") for tag in events.Tags()["scalars"])


def test_evaluation_reports_the_objectives_and_repeats_itself(run) -> None:
    made, _, _ = run
    first, second = made.evaluate(), made.evaluate()
    assert first["eval_objective/scores"] == second["eval_objective/scores"]
    parts = made.evaluate({"a": tiny.prompts(3), "b": tiny.prompts(5)})
    assert {"eval_a_objective/scores", "eval_b_objective/scores"} <= set(parts)


def test_an_evaluations_completions_are_alike_in_any_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[int, list[list[int]]] = {1: [], 2: [], 5: []}
    for size, responses in drawn.items():
        given = {"eval_dataset": tiny.prompts(5)}
        made = tiny.trainer(tmp_path / str(size), given=given, per_device_eval_batch_size=size)
        run_batch = made.executor.run

        def recorded(*args: Any, run_batch: Any = run_batch, responses: Any = responses, **kwargs: Any) -> Any:
            iteration = run_batch(*args, **kwargs)
            responses += [row.tolist() for row in iteration.samples.ragged("responses").rows()]
            return iteration

        monkeypatch.setattr(made.executor, "run", recorded)
        made.evaluate()
    assert drawn[1] == drawn[2] == drawn[5] and len({tuple(row) for row in drawn[5]}) == 5


def test_an_evaluation_in_batches_counts_all_eos_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny.trainer(tmp_path, given={"eval_dataset": tiny.prompts(5)}, per_device_eval_batch_size=2)
    run_batch, counts, scores = made.executor.run, [], []

    def recorded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        iteration = run_batch(batch, *args, **kwargs)
        counts.append(len(batch) + 1)
        scores.append(iteration.metrics["objective/scores"] * len(batch))
        return replace(iteration, metrics={**iteration.metrics, "val/num_eos_tokens": counts[-1]})

    monkeypatch.setattr(made.executor, "run", recorded)
    metrics = made.evaluate()
    assert counts == [3, 3, 2] and metrics["eval_val/num_eos_tokens"] == 8
    assert metrics["eval_objective/scores"] == pytest.approx(sum(scores) / 5)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"prompt": ["w3", " ".join(["w3"] * 120)]}, "row 1 has a prompt longer than the 116 tokens"),
        ({"input_ids": [[3, 500]]}, "row 0 has token ids outside the model's vocabulary of 100"),
        ({"input_ids": [[3], []]}, "row 1 has no"),
    ],
)
def test_prompts_of_evaluate_are_checked_as_those_of_the_constructor(run, rows: Any, sentence: str) -> None:
    made, _, _ = run
    for given in (Dataset.from_dict(rows), {"a": Dataset.from_dict(rows)}):
        with pytest.raises(DataError, match=f"eval_dataset: {sentence}"):
            made.evaluate(given)
    assert made.evaluate(), "and the trainer still works"


def test_prompts_of_evaluate_beyond_the_vllm_engines_room_are_refused(run, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = run
    longest = made.setup.job.options.context_length - made.args.response_length
    calls = made.plan.to_dict()["calls"]
    calls["actor.generate"] |= {"engine": "vllm"}
    plan = ExecutionPlan.from_dict({**made.plan.to_dict(), "calls": calls})
    monkeypatch.setattr(made.run.placed, "setup", replace(made.setup, plan=plan))
    rows = Dataset.from_dict({"input_ids": [[3] * (longest + 1)]})
    with pytest.raises(DataError, match=rf"has {longest + 1} tokens, and the vLLM engines have room for {longest},"):
        made.evaluate(rows)


def test_evaluation_takes_the_name_of_one_of_the_constructors_datasets(run, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = run
    expected = made.evaluate()["eval_objective/scores"]
    with pytest.raises(ValueError, match="'a' is not the name of a dataset of the trainer; the trainer has no named"):
        made.evaluate("a")
    monkeypatch.setattr(made, "eval_dataset", {"a": made.eval_dataset, "b": made.eval_dataset.select(range(5))})
    assert made.evaluate("a")["eval_objective/scores"] == expected
    assert sum(map(len, made.get_eval_dataloader("b"))) == 5
    with pytest.raises(ValueError, match="'c' is not .*; those are 'a', 'b'"):
        made.evaluate("c")


def test_completions_are_shown_for_the_evaluation_prompts(run) -> None:
    made, _, _ = run
    rows = made.generate_completions()
    assert len(rows) == 6 and set(rows[0]) == {"query", "model response", "score"}


def test_predict_names_what_to_use(run) -> None:
    made, _, _ = run
    with pytest.raises(NotImplementedError, match="PPOTrainer has no predict.*generate_completions"):
        made.predict(tiny.prompts(8))


def test_a_table_of_completions_begins_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=2, file=sys.stdout):
        show_completions([{"query": "a", "model response": "b", "score": 1.0}], [], 1)
    title = next(line for line in capsys.readouterr().out.split("\n") if "completions after" in line)
    assert "it/s" not in title.rpartition("\r")[2] and "\r" in title


def test_texts_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_completions([{"query": "[INST] a [/INST]", "model response": "[bold]b[/b]", "score": 1.0}], [], 1)
    shown = capsys.readouterr().out
    assert "[INST] a [/INST]" in shown and "[bold]b[/b]" in shown


def test_completions_go_to_comet_under_trls_name(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, list[dict[str, Any]]]] = []

    def log(name: str, table: Any) -> None:
        logged.append((name, table.to_dict("records")))

    monkeypatch.setattr("trl.trainer.utils.log_table_to_comet_experiment", log)
    rows = [{"query": "a", "model response": "b", "score": 1.0}]
    show_completions(rows, ["tensorboard"], 1)
    show_completions(rows, ["comet_ml"], 1)
    assert logged == [("completions.csv", rows)]


def test_trainer_model_is_named_as_trls_and_does_what_a_policy_does(run, tmp_path: Path) -> None:
    made, _, _ = run
    model = made.model
    theirs = TheirWrapper(tiny.policy(), tiny.classifier()) if HAS_TRL_PPO else model
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert list(model.state_dict()) == list(theirs.state_dict())
    assert made.policy_model is model.policy is made.placement.engine("actor.train").head.model
    assert made.value_model is model.value_model is made.placement.engine("critic.train").head.model
    assert model.config is model.policy.config and "trl-realloc" in model.policy.model_tags
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, model.policy.get_parameter(n)) for n, p in saved.named_parameters())
    outputs, values = model(input_ids=torch.tensor([[5, 6, 7]]))
    assert outputs.logits.shape == (1, 3, tiny.VOCABULARY) and values.shape == (1, 3, 1)


WITHOUT_MEANING = {"local_seed": r"from args\.seed", "local_dataloader_batch_size": r"use args\.batch_size"}


@needs_trl_ppo
def test_what_trls_trainer_has_this_one_has_or_says_what_to_use(run, tmp_path: Path) -> None:
    from trl.experimental.ppo import PPOConfig as TheirConfig
    from trl.experimental.ppo import PPOTrainer as TheirTrainer

    made, _, _ = run
    tokens, rows = tiny.tokenizer(), tiny.prompts(16)
    ids = Dataset.from_dict({"input_ids": tokens(list(rows["prompt"]))["input_ids"]})
    args = TheirConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, total_episodes=8)
    models = {"ref_model": None, "reward_model": tiny.classifier(3), "value_model": tiny.classifier()}
    data = {"train_dataset": ids, "eval_dataset": ids}
    theirs = TheirTrainer(args=args, processing_class=tokens, model=tiny.policy(), **models, **data)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert {name for name in public if not hasattr(made, name)} == WITHOUT_MEANING.keys()
    for name, way_out in WITHOUT_MEANING.items():
        with pytest.raises(AttributeError, match=way_out):
            getattr(made, name)
    assert {name for name in dir(theirs.model) if not name.startswith("_") and not hasattr(made.model, name)} == set()
    fresh = tiny.trainer(tmp_path, given={"train_dataset": rows}, stop_token=None)
    for name in ("is_peft_model", "model_adapter_name", "ref_adapter_name", "train_dataset_len", "stop_token_id"):
        assert getattr(fresh, name) == getattr(theirs, name), name


def test_trls_attributes_are_those_of_the_run(run, tmp_path: Path) -> None:
    made, recorder, _ = run
    assert recorder in made.callbacks and made.sample_generations_freq == 4 and made.train_dataset_len == 16
    assert len(made.dataloader) == 2, "updates in a pass"
    (batch,) = made.eval_dataloader
    assert len(next(iter(made.dataloader))) == made.args.batch_size and len(batch) == 6
    assert made.ref_model is made.placement.engine("reference.forward").head.model is not made.policy_model
    assert not made.is_peft_model
    with made.null_ref_context():
        assert made.model.policy is made.policy_model
    for name in ("dataloader", "ref_model"):
        with pytest.raises(AttributeError, match="give"):
            setattr(made, name, None)
    fresh = tiny.trainer(tmp_path, given={"eval_dataset": {"a": tiny.prompts(3), "b": tiny.prompts(5)}})
    assert fresh.state.episode == 0 and fresh.eval_dataloader is not None and len(fresh.eval_dataloader.dataset) == 3
    assert fresh.ref_model is None and not hasattr(fresh, "sample_generations_freq"), "no tables are shown"


def test_in_the_null_reference_context_the_policy_is_its_own_reference(tmp_path: Path) -> None:
    from peft import LoraConfig

    given = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    made = tiny.trained(tmp_path, given=given, max_steps=1)
    assert made.is_peft_model and made.ref_model is None
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        trained = made.model.policy(input_ids=ids).logits
        with made.null_ref_context():
            reference = made.model.policy(input_ids=ids).logits
        again = made.model.policy(input_ids=ids).logits
        begun = tiny.policy()(input_ids=ids).logits
    assert torch.allclose(reference, begun, atol=1e-5) and not torch.allclose(reference, trained, atol=1e-3)
    assert torch.equal(trained, again)


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(tmp_path: Path) -> None:
    logs = []
    for at, seed in enumerate((7, 7, 8)):
        made = tiny.trained(tmp_path / str(at), seed=seed)
        logs.append(tiny.updates(made))
    assert logs[0] == logs[1] != logs[2]


def test_logging_steps_logs_the_mean_over_the_window(tmp_path: Path) -> None:
    each, both = tiny.trainer(tmp_path / "1"), tiny.trainer(tmp_path / "2", logging_steps=2)
    each.train()
    both.train()
    first, second = tiny.updates(each)
    (mean,) = tiny.updates(both)
    assert mean["objective/scores"] == pytest.approx((first["objective/scores"] + second["objective/scores"]) / 2)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_objective/scores"}


def test_early_stopping_stops(tmp_path: Path) -> None:
    made = tiny.trained(
        tmp_path,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        given={"eval_dataset": tiny.prompts(4)},
        **{"max_steps": 8, "learning_rate": 0.0, **tiny.every(1), **BEST},
    )
    assert made.state.global_step == 2
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    given = {"eval_dataset": tiny.prompts(4), "reward_model": tiny.always_one}
    made = tiny.trained(tmp_path, given=given, max_steps=3, missing_eos_penalty=None, **tiny.every(1), **BEST)
    best = AutoModelForCausalLM.from_pretrained(made.state.best_model_checkpoint)
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1"), "no later one is better"
    assert all(torch.equal(p, made.policy_model.get_parameter(n)) for n, p in best.named_parameters())


def test_max_grad_norm_clips(tmp_path: Path) -> None:
    """With plain SGD a step's length is the learning rate times the gradient's norm."""
    lengths = []
    for limit in (1e-3, 1e9):
        made = tiny.trainer(tmp_path, max_steps=1, num_ppo_epochs=1, optim="sgd", max_grad_norm=limit)
        before = {name: tensor.clone() for name, tensor in made.policy_model.named_parameters()}
        made.train()
        moved = [made.policy_model.get_parameter(name) - tensor for name, tensor in before.items()]
        lengths.append(math.sqrt(sum(float((step**2).sum()) for step in moved)))
    assert lengths[0] == pytest.approx(1e-2 * 1e-3, rel=1e-3) and lengths[1] > 10 * lengths[0]


def test_gradient_checkpointing_is_enabled_and_changes_no_number(tmp_path: Path) -> None:
    logs = []
    for enabled in (False, True):
        made = tiny.trained(tmp_path, gradient_checkpointing=enabled)
        assert made.policy_model.is_gradient_checkpointing is enabled
        logs.append(tiny.updates(made))
    for plain, checkpointed in zip(*logs, strict=True):
        assert plain == pytest.approx(checkpointed, rel=1e-4, abs=1e-5)


def test_bf16_is_mixed_precision_in_rollouts_as_in_training(tmp_path: Path) -> None:
    made = tiny.trained(tmp_path, bf16=True, learning_rate=0.0, max_steps=1)
    (row,) = tiny.updates(made)
    assert made.placement.options.compute_dtype is torch.bfloat16
    assert all(p.dtype is torch.float32 for p in made.policy_model.parameters())
    assert row["val/ratio"] == pytest.approx(1.0, abs=5e-3)


def test_the_models_generation_config_does_not_leak_into_sampling(tmp_path: Path) -> None:
    model = tiny.policy()
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.top_k = 5
    made = tiny.trained(tmp_path, given={"model": model}, learning_rate=0.0, max_steps=1)
    (row,) = tiny.updates(made)
    assert row["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert model.generation_config.repetition_penalty == 1.5


@pytest.mark.parametrize(("accumulation", "mini_batches"), [(2, 2), (2, 1), (1, 2)])
def test_every_mini_batch_of_an_epoch_is_a_step(tmp_path: Path, accumulation: int, mini_batches: int) -> None:
    """Also where a pass over the data ends in the middle of the run: 4 updates over 2 batches."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    given = {"train_dataset": tiny.prompts(2 * 4 * accumulation)}
    made = tiny.trained(tmp_path, given=given, **sizes, num_mini_batches=mini_batches, num_ppo_epochs=2, max_steps=4)
    versions = [made.placement.engine(call).version for call in ("actor.train", "critic.train")]
    assert versions == [4 * 2 * mini_batches] * 2


def test_with_pad_equal_to_eos_the_reward_is_read_at_eos_and_eos_is_trained_on(tmp_path: Path) -> None:
    tokens = tiny.tokenizer(pad="<eos>")
    seen = []

    def ids(completion_ids: list[list[int]], **columns: object) -> list[float]:
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    given = {"processing_class": tokens, "reward_model": [ids, tiny.classifier(5)]}
    made = tiny.trainer(tmp_path, given=given, max_steps=1, per_device_train_batch_size=32)
    taken = {}
    run = made.executor.run
    made.executor.run = lambda *a, **k: taken.setdefault("iteration", run(*a, **k))  # keeps what the run returned
    made.train()
    samples = taken["iteration"].samples
    stopped = [row for row in seen if row[-1] == tiny.EOS]
    assert stopped, "some response must have ended"
    model = made.placement.engine("reward.forward").head.model
    for at in range(len(samples)):
        whole = torch.cat([samples.ragged("prompts")[at], samples.ragged("responses")[at]])
        hidden = model.model(input_ids=whole[None]).last_hidden_state[0, -1]
        name = next(key for key in samples if key.startswith("reward/") and key != "reward/ids")
        assert float(samples.tensor(name)[at]) == pytest.approx(float(model.score(hidden)), abs=1e-5)
    assert samples.ragged("advantages").lengths.tolist() == samples.ragged("responses").lengths.tolist()


def test_the_users_optimizer_and_scheduler_are_used(tmp_path: Path) -> None:
    model, value = tiny.policy(), tiny.classifier()
    optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    made = tiny.trained(
        tmp_path, given={"model": model, "value_model": value, "optimizers": (optimizer, scheduler)}, max_steps=2
    )
    assert isinstance(made.placement.engine("actor.train").optimizer, torch.optim.SGD)
    assert made.placement.engine("critic.train").optimizer.defaults["momentum"] == 0.9
    assert [row["lr"] for row in tiny.updates(made)] == pytest.approx([0.5, 0.05])


def test_the_critic_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    made = tiny.trained(tmp_path, learning_rate=1e-3, value_learning_rate=5e-3, lr_scheduler_type="constant")
    assert made.placement.engine("actor.train").optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert made.placement.engine("critic.train").optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


def test_trls_default_collator_takes_prompts_beside_columns_of_text(tmp_path: Path) -> None:
    rows, runs = tiny.prompts(16, answer=["a"] * 16), []
    for collator in (None, DataCollatorWithPadding(tiny.tokenizer())):
        made = tiny.trained(tmp_path, given={"train_dataset": rows, "data_collator": collator}, max_steps=1)
        runs.append(tiny.updates(made))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", ["input_ids", "padded", "conversation", "collator"])
def test_prompts_in_every_form_give_the_same_run(tmp_path: Path, kind: str) -> None:
    tokens, plain = tiny.tokenizer(), tiny.prompts(16)
    texts, collator = plain["prompt"], None
    if kind == "conversation":
        data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})
    elif kind == "padded":
        data = Dataset.from_dict(dict(tokens(list(texts), padding=True, return_token_type_ids=False)))
    else:
        ids = tokens(list(texts), return_token_type_ids=False)["input_ids"]
        data = Dataset.from_dict({"input_ids": ids})
        if kind == "collator":
            collator = lambda rows: tokens.pad(rows, return_tensors="pt")  # noqa: E731

    def constant(completions: list[object], **columns: object) -> list[float]:
        return [float(at % 3) for at in range(len(completions))]

    runs = []
    for given in ({"train_dataset": plain}, {"train_dataset": data, "data_collator": collator}):
        made = tiny.trained(tmp_path, given={**given, "reward_model": constant})
        runs.append(tiny.updates(made))
    assert runs[0] == runs[1]
