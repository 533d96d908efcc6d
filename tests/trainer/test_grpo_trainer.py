"""`GRPOTrainer` and `RLOOTrainer` on one process: what a user passes and gets."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import trl
from datasets import Dataset, concatenate_datasets
from tiny_groups import PROMPTS, distinct, settings, trained, trainer
from transformers import AutoModelForSequenceClassification, BertConfig, ProcessorMixin, TrainerCallback
from trl import TrlParser

from trl_realloc import Cluster, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_realloc.algorithms.prompts import DataError
from trl_realloc.algorithms.rewards import RewardError
from trl_realloc.engines.generation.sampling_checks import argument_names, why_not_moved
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.model_configs import ModelError
from trl_realloc.engines.requests import Sampling
from trl_realloc.engines.transformers_compat import attention_name
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.presets import separate
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.trainer import grpo_trainer
from trl_realloc.trainer.checkpoint import CheckpointError
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.checks.data_checks import check_columns
from trl_realloc.trainer.checks.trainable import why_not_trained
from trl_realloc.trainer.grpo_config import check_init_kwargs
from trl_realloc.trainer.policy.policy_setup import check_moves, check_turns, of_host_loop
from trl_realloc.trainer.policy.trl_sampling import sampling_of
from trl_realloc.trainer.run.plan_request import PlanRequest


def classifier(folder: Path) -> str:
    model = tiny.classifier()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_training_changes_the_policy_that_the_user_holds(tmp_path: Path, kind: type) -> None:
    model = tiny.policy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = trained(tmp_path, kind, given={"model": model}, beta=0.04)
    assert made.state.global_step == 2
    assert made.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert any(not torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    assert made.state.log_history[-1]["train_loss"] is not None
    assert made.state.log_history[0]["grad_norm"] > 0


class Processor(ProcessorMixin):  # type: ignore[misc]
    """A processor of text alone, such as a model of text and images has when it is given without images."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat_template = tokenizer, None

    def __call__(self, text: Any = None, **settings: Any) -> Any:
        return self.tokenizer(text, **settings)


def test_a_processor_serves_as_its_tokenizer_does(tmp_path: Path) -> None:
    logs = []
    for processing_class in (tiny.tokenizer(), Processor(tiny.tokenizer())):
        model = tiny.policy()
        model.config.image_token_id = tiny.VOCABULARY  # TRL 1.16 reads it of every model with a processor
        made = trained(tmp_path, given={"model": model, "processing_class": processing_class})
        logs.append(made.state.log_history[0])
    for name in ("reward", "grad_norm", "completions/mean_length"):
        assert logs[0][name] == logs[1][name]


OTHER_ENDS = list(range(50, 80))


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize(
    ("of_model", "kwargs", "ends"),
    [
        ([tiny.EOS, *OTHER_ENDS], None, {tiny.EOS, *OTHER_ENDS}),
        (tiny.EOS, {"stop_token_ids": OTHER_ENDS}, {tiny.EOS, *OTHER_ENDS}),
        (tiny.EOS, {"eos_token_id": OTHER_ENDS}, {*OTHER_ENDS}),
        (tiny.EOS, {"ignore_eos": True}, set()),
    ],
    ids=["of the model", "further ones", "others", "none"],
)
def test_a_completion_has_ended_where_its_engine_has_ended_it(
    tmp_path: Path, kind: type, of_model: Any, kwargs: Any, ends: set[int]
) -> None:
    """In the mask of the loss and in the logs, by whichever token. Reward functions get the tokens themselves."""
    batches: list[Any] = []
    rewarded: list[list[int]] = []

    class Kept(kind):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rewarded.extend(completion_ids)
        assert all(ids[-1] == list(ids).pop() for ids in completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    model = tiny.policy()
    model.generation_config.eos_token_id = of_model
    of_run = {"mask_truncated_completions": True, "max_steps": 1, "max_completion_length": 4}
    made = trained(tmp_path, Kept, given={"model": model, "reward_funcs": reward}, generation_kwargs=kwargs, **of_run)
    counted = [bool(row.any()) for of_batch in batches for row in of_batch["completion_mask"]]
    ended = [list(ids)[-1] in ends for ids in rewarded]
    assert counted == ended and len({*ended}) == 1 + bool(ends)
    assert made.state.log_history[0]["completions/clipped_ratio"] == ended.count(False) / len(ended)


@pytest.mark.parametrize(("count", "pad"), [(1, "<pad>"), (2, "<pad>"), (1, "<eos>")])
def test_a_reward_model_scores_as_trl_scores(tmp_path: Path, count: int, pad: str) -> None:
    """Where the pad token is also the eos token, that is before the eos token with which a text ends."""
    paths = [classifier(tmp_path / f"reward{at}") for at in range(count)]
    completions = [["w2 w3 <eos>", "w4"] * 4] * 2

    def rewards_of(kind: type, config: type) -> Any:
        given = {"processing_class": tiny.tokenizer()}
        given["reward_processing_classes"] = [tiny.tokenizer(pad=pad) for _ in paths] + [None]
        args = settings(tmp_path / kind.__module__, config)
        made = kind(tiny.policy(), [*paths, distinct], args, PROMPTS, **given)
        if kind is GRPOTrainer:
            made.run.placed.start()
        rows = [{"prompt": PROMPTS[0]["prompt"]}] * 8
        table = made._calculate_rewards(rows, [row["prompt"] for row in rows], completions[0], [[2, 3], [4]] * 4)
        names = made.reward_func_names
        if kind is GRPOTrainer:
            made.close()
        return table, names

    expected, names = rewards_of(trl.GRPOTrainer, trl.GRPOConfig)
    table, own_names = rewards_of(GRPOTrainer, GRPOConfig)
    torch.testing.assert_close(table, expected, atol=1e-5, rtol=1e-5)
    assert own_names == names


def test_every_reward_model_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    paths, own = [classifier(tmp_path / f"reward{at}") for at in range(2)], tiny.tokenizer()

    given = {"reward_funcs": paths, "reward_processing_classes": [own, None]}
    made = trainer(tmp_path / "out", given=given)
    assert made.reward_processing_classes[0] is own
    assert made.reward_processing_classes[1].get_vocab() == own.get_vocab()
    with pytest.raises(ConfigError, match=r"reward_processing_classes, 1, must match that of reward_funcs, 2"):
        trainer(tmp_path / "out", given={**given, "reward_processing_classes": own})


def test_accelerate_trains_a_policy_with_dropout_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(grpo_trainer.logger, "warning", said.append)
    made = trainer(tmp_path, given={"model": tiny.policy(attention_dropout=0.1)})
    assert made.run is None
    assert "Accelerate trains, because the model has dropout 0.1" in said[0]
    with pytest.raises(ConfigError, match="TRL generates, so it has no plan"):
        made.plan  # noqa: B018
    made.train()
    made.close()
    assert made.state.global_step == 2


def test_what_accelerate_trains_is_resumed_by_the_setting_of_the_configuration(tmp_path: Path) -> None:
    def run(**changes: Any) -> Any:
        begins: list[int] = []
        given = {"model": tiny.policy(attention_dropout=0.1), "callbacks": [Begins(begins)]}
        trainer(tmp_path, given=given, save_strategy="steps", save_steps=1, **changes).train()
        return begins

    assert run(resume_from_checkpoint="auto") == [0]
    (tmp_path / "checkpoint-2").rename(tmp_path / "other")
    assert run(resume_from_checkpoint="auto") == [1]
    assert run(resume_from_checkpoint=str(tmp_path / "other")) == [2]
    assert run() == [0]


class Begins(TrainerCallback):
    """Notes the step at which a training begins."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


def test_what_accelerate_trains_generates_nothing_ahead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dropout 0.1, .* It generates nothing ahead: set max_staleness to 0"):
        trainer(tmp_path, given={"model": tiny.policy(attention_dropout=0.1)}, max_staleness=1)


def test_a_quantization_config_leaves_the_training_to_accelerate() -> None:
    reason = why_not_trained(SimpleNamespace(), tiny.config(), None, {}, quantization_config=object())
    assert "quantized" in str(reason)


def test_dropout_that_is_disabled_leaves_the_training_to_the_engines(tmp_path: Path) -> None:
    made = trainer(tmp_path, given={"model": tiny.policy(attention_dropout=0.1)}, disable_dropout=True)
    assert made.run is not None
    made.close()


def test_a_config_of_trl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="import GRPOConfig from trl_realloc"):
        trainer(tmp_path, given={"args": settings(tmp_path, trl.GRPOConfig)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_mode": "server"}, "plan: separate"),
        ({"vllm_tensor_parallel_size": 2}, "set tp of actor.generate"),
        ({"use_transformers_continuous_batching": True}, "vLLM batches continuously"),
        ({"vllm_step_timeout": 1}, "vllm_step_timeout must be"),
        ({"vllm_max_model_length": 0}, "vllm_max_model_length must be"),
    ],
)
def test_a_setting_that_the_plan_decides_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **changes)


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_all_tokens_may_be_drawn_as_trl_and_vllm_say_so(tmp_path: Path, kind: type, top_k: int | None) -> None:
    assert sampling_of(settings(tmp_path, kind, top_k=top_k), (1,), 100).top_k == 0


def test_a_reward_model_that_cannot_be_used_is_named_by_the_argument_of_these_trainers(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    for reward, words in (("./no/such/model", "cannot read a model"), (str(tmp_path / "policy"), "would be random")):
        with pytest.raises(ModelError, match=f"^reward_funcs: .*{words}"):
            trainer(tmp_path, given={"reward_funcs": reward})


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_a_data_set_without_prompts_is_refused_before_a_model_is_read(tmp_path: Path, argument: str) -> None:
    given = {"train_dataset": PROMPTS, argument: PROMPTS.rename_column("prompt", "text")}
    with pytest.raises(DataError, match=f"^{argument} has no `prompt` column .* it has 'text'"):
        trainer(tmp_path, given={"model": "./no/such/model", **given})


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("column", ["prompts", "completions"])
def test_a_column_by_the_name_of_an_argument_of_reward_functions_is_refused_before_a_model_is_read(
    tmp_path: Path, column: str, kind: type
) -> None:
    data = PROMPTS.add_column(column, PROMPTS["prompt"])
    for given in ({"train_dataset": data}, {"train_dataset": PROMPTS, "eval_dataset": {"own": data}}):
        with pytest.raises(RewardError, match=f"dataset.* has the column '{column}', .*rename_column"):
            trainer(tmp_path, kind, given={"model": "./no/such/model", **given})
    check_columns({"train_dataset": data, "reward_funcs": "a/model"})


@pytest.mark.parametrize("column", ["question", "prompt"])
def test_a_transform_may_make_the_prompts_from_other_columns(tmp_path: Path, column: str) -> None:
    def ask(rows: dict[str, list[str]]) -> dict[str, list[str]]:
        return {"prompt": [f"w9 {text} {more}" for text, more in zip(rows[column], rows["more"], strict=True)]}

    def judged(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        assert all(prompt.startswith("w9 ") and prompt.endswith(" w3") for prompt in prompts)
        return distinct(completions)

    data = Dataset.from_dict({column: PROMPTS["prompt"], "more": ["w3"] * len(PROMPTS)}).with_transform(ask)
    given = {"reward_funcs": judged, "train_dataset": data}
    assert trained(tmp_path, given=given, max_steps=1, save_strategy="steps", save_steps=1).state.global_step == 1


def test_a_transform_that_makes_no_prompts_is_refused_before_a_model_is_read(tmp_path: Path) -> None:
    data = PROMPTS.with_transform(lambda rows: {"text": rows["prompt"]})
    with pytest.raises(DataError, match=r"^train_dataset has no `prompt` column .* 'text'. Let its transform return"):
        trainer(tmp_path, given={"model": "./no/such/model", "train_dataset": data})


@pytest.mark.parametrize("algorithm", ["PPO", "GRPO"])
def test_a_run_gives_no_warning_that_its_user_cannot_act_on(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, algorithm: str
) -> None:
    run: Any = tiny.trained if algorithm == "PPO" else trained
    run(tmp_path, max_steps=1, gradient_checkpointing=True).close()
    told = [str(warning.message) for warning in recwarn]
    assert not [text for text in told if "gradient_checkpointing" in text or "pin_memory" in text]


FEW = PROMPTS.select(range(1))


@pytest.mark.parametrize(("kind", "accelerate"), [(GRPOTrainer, False), (RLOOTrainer, False), (GRPOTrainer, True)])
@pytest.mark.parametrize(
    ("rows", "told"),
    [(FEW, "has 1 rows, fewer than"), (FEW.to_iterable_dataset(), "a stream that has ended before it gave")],
    ids=["data set", "stream"],
)
def test_too_few_prompts_for_a_generation_are_refused_and_a_data_set_of_them_before_engines_start(
    tmp_path: Path, kind: type, accelerate: bool, rows: Any, told: str
) -> None:
    """TRL would end such a training at once, without an error."""
    model = tiny.policy(attention_dropout=0.1 if accelerate else 0.0)
    made = trainer(tmp_path, kind, given={"model": model, "train_dataset": rows})
    assert (made.run is None) == accelerate
    with pytest.raises(DataError, match=f"{told} the 2 prompts of one generation"):
        made.train()
    assert accelerate or rows is not FEW or not made.placement.started
    made.close()


def test_evaluation_before_training_runs_the_plan_and_is_repeatable(tmp_path: Path) -> None:
    made = trainer(tmp_path, given={"eval_dataset": PROMPTS.select(range(4))}, per_device_eval_batch_size=4)
    metrics, again = made.evaluate(), made.evaluate()
    made.close()
    assert metrics["eval_reward"] >= 0 and "eval_loss" in metrics
    assert again["eval_reward"] == metrics["eval_reward"]


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_prompt_that_the_policy_cannot_respond_to_is_refused_when_it_is_read(tmp_path: Path, kind: type) -> None:
    """Before anything starts where a data set can be read in advance, otherwise when its row is."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<new>"])
    rows = Dataset.from_dict({"prompt": ["w2 w3", "w2 <new>", "w2 w4", "w2 <new>"]})

    def of(data: Any) -> Any:
        given = {"train_dataset": data, "processing_class": tokenizer}
        return trainer(tmp_path, kind, given=given, per_device_eval_batch_size=4)

    told = "train_dataset: rows 1, 3 have token ids outside the model's vocabulary of 100"
    with pytest.raises(DataError, match=told):
        of(rows)
    stream = of(rows.to_iterable_dataset())
    told = "train_dataset: the prompt 'w2 <new>' has the token id 100, outside the model's"
    with pytest.raises(DataError, match=told):
        stream.train()
    stream.close()
    made = of(PROMPTS)
    with pytest.raises(DataError, match="eval_dataset: the prompt '' has no tokens; filter such prompts out"):
        made.evaluate(Dataset.from_dict({"prompt": [""] * 4}))
    made.close()


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_log_probabilities_can_be_asked_for_before_the_training_and_again(tmp_path: Path, coefficient: float) -> None:
    """As a subclass may, or a person who looks at a policy."""
    model = tiny.policy()
    made = trainer(tmp_path, given={"model": model}, entropy_coef=coefficient)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, 3:-1].float()
    expected = logits.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
    for _ in range(2):
        found, entropies, _ = made._get_per_token_logps_and_entropies(
            made.model, ids, torch.ones_like(ids), 4, compute_entropy=True
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert found.requires_grad and entropies.requires_grad == bool(coefficient)
    made.close()


def test_a_generation_outside_of_a_run_is_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own tests generate with a trainer whose constructor has not run."""
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", lambda self, prompts: ("generated", prompts))
    assert object.__new__(GRPOTrainer)._generate(["w2"]) == ("generated", ["w2"])


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_the_engines_do_not_read_is_refused(tmp_path: Path, key: str) -> None:
    args = settings(tmp_path, model_init_kwargs={key: "float16"})
    with pytest.raises(ConfigError, match="model_init_kwargs: dtype is one of .*, not 'float16'"):
        check_init_kwargs(args)


def test_a_model_by_path_is_loaded_with_what_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    asked = {"dtype": "bfloat16", "attn_implementation": "eager"}
    made = trainer(tmp_path, given={"model": str(tmp_path / "policy")}, model_init_kwargs=asked, max_steps=1, beta=0.1)
    assert "model_init_kwargs` will be ignored" not in caplog.text and made.args.model_init_kwargs == asked
    made.train()
    made.close()
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    reference = made.placement.engine("reference.forward").head.model
    assert {attention_name(model.config) for model in (made.model, reference)} == {"eager"}


def test_samples_beyond_the_length_up_to_which_longrope_is_one_embedding_are_refused(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 8.0, "rope_theta": 1e4}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 8, **factors}
    with pytest.raises(ModelError, match=r"actor: its rotary embedding \(longrope\) .* more than 8 tokens"):
        trainer(tmp_path, given={"model": tiny.policy(rope_parameters=rope)})


def test_what_counts_the_tokens_of_a_response_is_not_drawn_in_two_parts(tmp_path: Path) -> None:
    why = why_not_moved(Sampling(8, 1.0, extra={"min_tokens": 3}))
    check_moves(settings(tmp_path), separate(Cluster(1, 4), graph=grpo_graph()), why)
    ahead = settings(tmp_path, max_staleness=1, use_vllm=True, vllm_importance_sampling_correction=True)
    told = "max_staleness is 1, .* min_tokens depends on all tokens .* set max_staleness"
    with pytest.raises(ConfigError, match=told):
        check_moves(ahead, None, why)
    whole = separate(Cluster(1, 4), graph=grpo_graph(reward_models=True))
    moving = replace(whole, streams=Streams(migration=Migration(0.2, 1)))
    with pytest.raises(ConfigError, match="min_tokens depends on all tokens .* Leave migration out of the plan"):
        check_moves(settings(tmp_path), moving, why)
    check_moves(ahead, moving, None)


def test_environments_may_make_the_prompts() -> None:
    routed = Dataset.from_dict({"environment": ["a", "b"]})
    check_columns({"train_dataset": routed, "environment_factory": {"a": object, "b": object}})
    with pytest.raises(DataError, match="train_dataset has no `prompt` column"):
        check_columns({"train_dataset": routed})


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_models_may_be_given_by_a_path_that_is_no_text(tmp_path: Path, dropout: float) -> None:
    """Whether the plan's engines train, or, with dropout, Accelerate."""
    tiny.policy(attention_dropout=dropout).save_pretrained(tmp_path / "policy")
    classifier(tmp_path / "reward")
    rewards = [distinct, tmp_path / "reward"]
    made = trained(tmp_path, given={"model": tmp_path / "policy", "reward_funcs": rewards}, max_steps=1)
    assert (made.run is None) == bool(dropout)
    assert "rewards/reward/mean" in made.state.log_history[0]


class OwnLoop(GRPOTrainer):
    def _tool_call_loop(self, *args: Any) -> Any:
        return super()._tool_call_loop(*args)


@pytest.mark.parametrize(
    ("turns", "trainer_class", "workers", "refused"),
    [
        ("tools", GRPOTrainer, 1, None),
        ("rollout_func", GRPOTrainer, 0, None),
        ("tools", GRPOTrainer, 0, "tool_workers 0 runs tools in the main thread"),
        ("tools", OwnLoop, 1, "OwnLoop._tool_call_loop replaces a method of TRL's"),
        ("environment_factory", GRPOTrainer, 1, "the rewards of completions read environments"),
    ],
)
def test_turns_that_only_the_rank_of_the_prompt_can_make_are_not_generated_ahead(
    tmp_path: Path, turns: str, trainer_class: type, workers: int, refused: str | None
) -> None:
    args = settings(tmp_path, max_staleness=1, tool_workers=workers)
    with pytest.raises(ConfigError, match=re.escape(refused)) if refused else contextlib.nullcontext():
        check_turns(args, [turns], trainer_class)
    check_turns(settings(tmp_path, tool_workers=workers), [turns], trainer_class)


@pytest.mark.parametrize("turns", ["tools", "rollout_func", "environment_factory"])
def test_where_completions_take_turns_nothing_streams(tmp_path: Path, turns: str) -> None:
    plan = separate(Cluster(1, 2), graph=grpo_graph())
    request = PlanRequest(plan, plan.cluster, "vllm", (), None)
    streamed = replace(request, plan=replace(plan, streams=Streams()))
    assert of_host_loop(streamed, [turns]).plan == plan
    assert of_host_loop(streamed, []) is streamed


def test_the_weights_of_a_policy_by_path_can_be_looked_at_before_the_training(tmp_path: Path) -> None:
    given = tiny.policy()
    given.save_pretrained(tmp_path / "policy")
    made = trainer(tmp_path, given={"model": str(tmp_path / "policy")}, max_steps=1)
    before = {name: parameter.clone() for name, parameter in made.model.named_parameters()}
    assert all(torch.equal(parameter, before[name]) for name, parameter in given.named_parameters())
    made.train()
    made.close()
    assert any(not torch.equal(parameter, before[name]) for name, parameter in made.model.named_parameters())


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_new_adapter_is_trained_alone(tmp_path: Path, kind: type) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian")
    made = trainer(tmp_path, kind, given={"peft_config": adapter}, beta=0.04)
    before = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
    made.train()
    made.close()
    assert list(made.model.peft_config) == ["default"]
    changed = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora" in name for name in changed)


@pytest.mark.oldest
def test_the_reference_stays_what_the_policy_was(tmp_path: Path) -> None:
    made = trained(tmp_path, beta=0.04, max_steps=3, num_iterations=2, optim="sgd", learning_rate=1.0)
    kl = [row["kl"] for row in made.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert min(kl[1:]) > 1e-7


def test_an_abandoned_optimizer_step_leaves_nothing_to_the_next_training(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    stop = Stop()
    made = trainer(tmp_path, given={"callbacks": [stop]})
    made.train()
    assert made.state.global_step == 0 and len(made.run.adapter.loss.step_buffer) == 1
    made.remove_callback(stop)
    made.train()
    made.close()
    assert made.state.global_step == 2 and len(made.run.adapter.loss.step_buffer) == 0


def test_prompts_of_an_evaluation_and_of_tools_have_room(tmp_path: Path) -> None:
    made = trainer(tmp_path, given={"eval_dataset": words(40)})
    made.close()
    assert made.setup.job.options.context_length == 40 + 8


def words(count: int, rows: int = 4) -> Dataset:
    return Dataset.from_dict({"prompt": [" ".join(["w5"] * count)] * rows})


def test_generation_in_the_model_that_trains_has_room_for_all_prompts_that_the_model_has(tmp_path: Path) -> None:
    """Also for those of an evaluation that are longer than those of the data set, as in TRL."""
    made = trainer(tmp_path, per_device_eval_batch_size=4)
    assert made.evaluate(words(60))["eval_completions/max_length"] == 8
    assert made.evaluate(words(123))["eval_completions/max_length"] == 5  # of 128 positions
    with pytest.raises(JobFailed, match=r"128 tokens, .* nothing can be generated; the model has no more positions"):
        made.evaluate(words(128))
    made.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
@pytest.mark.usefixtures("forked_engines")
def test_an_engine_that_shortens_completions_says_what_to_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(tmp_path, per_device_eval_batch_size=4, use_vllm=True)
    assert made.evaluate(words(5))["eval_completions/max_length"] == 6
    assert made.evaluate(words(4))["eval_completions/max_length"] == 7
    (message,) = [text for text in caplog.messages if "a prompt has" in text]
    assert "5 tokens" in message and "at most 6, not 8; set vllm_max_model_length" in message
    with pytest.raises(JobFailed, match="11 tokens, .* nothing can be generated; set vllm_max_model_length"):
        made.evaluate(words(11))


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_reward_model_with_fewer_positions_than_a_sample_has_tokens_is_refused(tmp_path: Path, kind: type) -> None:
    for positions in (10, 11):  # three tokens of a prompt and eight of its completion
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
        config = BertConfig(vocab_size=100, max_position_embeddings=positions, num_labels=1, **sizes)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
        tiny.tokenizer().save_pretrained(tmp_path / "reward")
        rewards = [distinct, str(tmp_path / "reward")]
        refused = pytest.raises(ModelError, match="reward: its model has")
        with refused if positions == 10 else contextlib.nullcontext():
            trainer(tmp_path, kind, given={"reward_funcs": rewards}).close()


@pytest.mark.parametrize("use_vllm", [True, False])
@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_a_prompt_without_room_for_a_completion_is_refused_at_once(tmp_path: Path, where: str, use_vllm: bool) -> None:
    positions = tiny.config().max_position_embeddings
    given = {"train_dataset": PROMPTS, where: concatenate_datasets([PROMPTS, words(positions)])}
    told = f"longest prompt of the data sets has {positions} tokens, .*; the model has no more positions"
    with pytest.raises(DataError, match=told):
        trainer(tmp_path, given=given, use_vllm=use_vllm)


def test_vespo_needs_weights_of_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token_truncate"):
        trainer(tmp_path, loss_type="vespo", use_vllm=None)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_flags_need_no_value_on_the_command_line(tmp_path: Path, config: type) -> None:
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    (args,) = TrlParser(config).parse_args_and_config([*given, "--use_vllm", "--vllm_enable_sleep_mode"])
    assert args.use_vllm is True and args.vllm_enable_sleep_mode is True
    (args,) = TrlParser(config).parse_args_and_config([*given, "--use_vllm", "false"])
    assert args.use_vllm is False and args.vllm_enable_sleep_mode is None


def test_init_kwargs_that_ask_for_nothing_are_those_of_trls_scripts(tmp_path: Path) -> None:
    asked = {"revision": "main", "trust_remote_code": False, "token": None, "cache_dir": None, "dtype": "float32"}
    check_init_kwargs(settings(tmp_path, model_init_kwargs=asked))
    with pytest.raises(ConfigError, match="model_init_kwargs has revision, which"):
        check_init_kwargs(settings(tmp_path, model_init_kwargs={**asked, "revision": "v2"}))


@pytest.mark.skipif(not argument_names(), reason="vLLM is not installed")
@pytest.mark.parametrize("by_vllm", [True, False])
def test_generation_kwargs_of_transformers_are_read_or_refused_with_what_to_do(tmp_path: Path, by_vllm: bool) -> None:
    def read(**given: Any) -> Sampling:
        return sampling_of(settings(tmp_path, generation_kwargs=given), (1,), 100, by_vllm=by_vllm)

    assert read(do_sample=True, use_cache=True, pad_token_id=0) == read()
    assert read(eos_token_id=[3, 4]).stop_token_ids == (3, 4) and read(eos_token_id=3).stop_token_ids == (3,)
    with pytest.raises(ConfigError, match="max_new_tokens is of Transformers' generate, .*; set max_completion_length"):
        read(max_new_tokens=4)
    with pytest.raises(ConfigError, match="no_repeat_ngram_size is of Transformers' generate, .*; leave it out"):
        read(no_repeat_ngram_size=2)
    if by_vllm:
        assert read(min_new_tokens=2).extra == {"min_tokens": 2}


class OwnOptimizer(GRPOTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        return self.optimizer


def test_a_subclass_with_its_optimizer_is_for_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(grpo_trainer.logger, "warning", said.append)
    made = trainer(tmp_path, OwnOptimizer)
    assert made.run is None and "OwnOptimizer.create_optimizer makes the optimizer" in said[0]
    made.train()
    assert isinstance(getattr(made.optimizer, "optimizer", made.optimizer), torch.optim.SGD)
    made.close()


def test_an_optimizer_that_is_set_on_a_trainer_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=1e-6)
    with pytest.raises(ConfigError, match=r"trainer.optimizer has been set .* as optimizers=\("):
        made.train()
    made.close()


class CallsTheModel(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with torch.no_grad():
            self.width = model(input_ids=inputs["prompt_ids"]).logits.shape[-1], model.config.hidden_size
        return super()._compute_loss(model, inputs)


class LossOfLogits(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(input_ids=inputs["prompt_ids"]).logits.mean()


def test_a_loss_may_read_the_model_but_not_train_by_its_logits(tmp_path: Path) -> None:
    made = trained(tmp_path, CallsTheModel)
    assert made.width == (made.model.config.vocab_size, made.model.config.hidden_size)
    other = trainer(tmp_path, LossOfLogits, beta=0.1)
    with pytest.raises(ConfigError, match="the loss calls the model itself"):
        other.train()
    with pytest.raises(ConfigError, match="ref_model is in an engine of the plan"):
        other.ref_model(input_ids=torch.tensor([[2]]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": 3}, "model must be a loaded model, or a name or path, not int"),
        ({"processing_class": "words"}, "processing_class must be a tokenizer or a processor, not str"),
        ({"peft_config": {"r": 4}}, "peft_config must be a peft.PeftConfig, .* not dict"),
        ({"train_dataset": Dataset.from_dict({"prompt": [7] * 8})}, r"prompt 0 of a data set is a int \(7\)"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["w2", None] * 4})}, r"prompt 1 of .* a NoneType \(None\)"),
    ],
)
def test_arguments_of_another_type_are_named(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, DataError), match=words):
        trainer(tmp_path, given=given)


def test_a_checkpoint_of_the_engines_is_not_resumed_without_its_optimizer(checkpoint: Path, tmp_path: Path) -> None:
    other = trainer(tmp_path, OwnOptimizer)
    with pytest.raises(CheckpointError, match="in this run Accelerate trains, which does not read training_state"):
        other.train(resume_from_checkpoint=str(checkpoint))
    other.close()


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_reward_models_by_name_are_loaded_with_model_init_kwargs(tmp_path: Path, kind: type) -> None:
    asked = {"dtype": "bfloat16", "attn_implementation": "eager"}
    given = {"reward_funcs": classifier(tmp_path / "reward")}
    made = trainer(tmp_path / "run", kind, given=given, model_init_kwargs=asked)
    made.run.placed.start()
    (engine,) = made.placement.engines["reward.forward"]
    model = engine.head.model
    made.close()
    assert attention_name(model.config) == "eager"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 7}, "its seed is 42, this run's 7"),
        ({"num_generations": 2}, "its num_generations is 4, this run's 2"),
        ({"steps_per_generation": 4}, "its generation_batch_size is 8, this run's 16"),
        ({"num_iterations": 2}, "its num_iterations is 1, this run's 2"),
    ],
)
def test_a_run_with_prompts_in_another_order_is_refused(checkpoint: Path, changes: dict[str, Any], words: str) -> None:
    other = trainer(checkpoint.parent, **changes)
    with pytest.raises(CheckpointError, match=f"{words}.*ignore_data_skip"):
        other.train(resume_from_checkpoint=str(checkpoint))
    other.close()


def test_a_run_with_smaller_micro_batches_resumes(checkpoint: Path, tmp_path: Path) -> None:
    other = trainer(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3)
    other.train(resume_from_checkpoint=str(checkpoint))
    other.close()
    assert other.state.global_step == 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder, save_strategy="steps", save_steps=1)
    return folder / "checkpoint-2"
