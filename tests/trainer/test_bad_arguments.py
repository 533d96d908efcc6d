"""Wrong arguments of the trainer and its config, a row each: refused in a sentence, before anything is loaded or
started. And arguments in other forms than usual, which are taken."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_groups
import torch
from datasets import Dataset, DatasetDict
from transformers import T5Config
from transformers import TrainingArguments as PlainArguments

from trl_realloc import GRPOConfig, PPOConfig, PPOTrainer
from trl_realloc.algorithms.rewards import FunctionReward, RewardError
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.streams import Streams
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.checks.plan_checks import check_plan
from trl_realloc.trainer.run.run_setup import frozen_in_part


NAN, INF = math.nan, math.inf

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"kl_coef": NAN}, "kl_coef must be a finite number, not nan"),
    ({"kl_coef": "0.05"}, "kl_coef must be a finite number, not '0.05'"),
    ({"gamma": 2}, "gamma must be a finite number from 0 to 1, not 2"),
    ({"gamma": -1}, "gamma .* not -1"),
    ({"gamma": None}, "gamma .* not None"),
    ({"lam": 5}, "lam must be a finite number from 0 to 1, not 5"),
    ({"lam": NAN}, "lam .* not nan"),
    ({"vf_coef": INF}, "vf_coef .* not inf"),
    ({"vf_coef": True}, "vf_coef .* not True"),
    ({"cliprange": -1}, "cliprange must be a finite number from 0, not -1"),
    ({"cliprange_value": NAN}, "cliprange_value .* not nan"),
    ({"missing_eos_penalty": INF}, r"missing_eos_penalty must be a finite number from 0 \(or None\), not inf"),
    ({"missing_eos_penalty": -1.0}, "missing_eos_penalty .* not -1.0"),
    ({"temperature": NAN}, "temperature .* not nan"),
    ({"temperature": -0.1}, "temperature must be a finite number from 0, not -0.1"),
    ({"learning_rate": NAN}, "learning_rate .* not nan"),
    ({"learning_rate": "3e-6"}, "learning_rate .* not '3e-6'"),
    ({"learning_rate": -1e-5}, "learning_rate .* not -1e-05"),
    ({"value_learning_rate": INF}, "value_learning_rate .* not inf"),
    ({"max_grad_norm": -1}, "max_grad_norm .* not -1"),
    ({"max_grad_norm": NAN}, "max_grad_norm .* not nan"),
    ({"weight_decay": NAN}, "weight_decay .* not nan"),
    ({"adam_beta1": 1.0}, "adam_beta1 must be a finite number from 0 and below 1"),
    ({"num_train_epochs": 0}, "num_train_epochs must be a finite number above 0"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be a whole number from 1, not 0"),
    ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size .* not '8'"),
    ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size .* not 0"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps .* not 0"),
    ({"num_mini_batches": None}, "num_mini_batches .* not None"),
    ({"num_ppo_epochs": 0}, "num_ppo_epochs .* not 0"),
    ({"response_length": 16.5}, "response_length must be a whole number from 1, not 16.5"),
    ({"response_length": [16]}, r"response_length .* not \[16\]"),
    ({"local_rollout_forward_batch_size": 0}, "local_rollout_forward_batch_size .* not 0"),
    ({"total_episodes": -5}, "total_episodes .* not -5"),
    ({"max_steps": -7}, "max_steps .* not -7"),
    ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, not -1"),
    ({"stop_token": None, "stop_token_id": -1}, "stop_token_id .* not -1"),
    ({"stop_token": "<|im_end|>"}, r"stop_token must be 'eos' \(or None\), not '<|im_end|>'"),
    ({"generation_engine": "vlm"}, "generation_engine must be 'vllm' or 'transformers'"),
    ({"vllm_gpu_memory_utilization": 2}, "vllm_gpu_memory_utilization must be a finite number above 0 to 1 .*, not 2"),
    ({"vllm_step_timeout": 0}, "vllm_step_timeout must be a finite number from 5 to 86400, not 0"),
    ({"vllm_enable_sleep_mode": "level 2"}, "vllm_enable_sleep_mode must be true, false or None, not 'level 2'"),
    ({"max_staleness": -1}, "max_staleness must be a whole number from 0 to 64, not -1"),
    ({"max_staleness": 2}, "max_staleness is 2, so older policies .* true weights the loss .* false clips PPO's ratio"),
    ({"vllm_importance_sampling_correction": "yes"}, "correction must be true, false or None, not 'yes'"),
    ({"vllm_importance_sampling_correction": True, "match_trl": True}, "leave out match_trl or vllm_importance"),
    ({"vllm_importance_sampling_mode": "token"}, "mode must be 'token_truncate' or .*, not 'token'"),
    ({"vllm_importance_sampling_clip_max": 0}, r"clip_max must be a finite number above 0 \(or None\), not 0"),
    ({"vllm_importance_sampling_clip_min": 3}, "clip_min 3 must be below vllm_importance_sampling_clip_max 3"),
    (
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
        "mode token_truncate needs a bound to truncate weights at",
    ),
    ({"vllm_engine_kwargs": [1]}, r"vllm_engine_kwargs is a mapping like {max_num_seqs: 128}, or None, not \[1\]"),
    ({"vllm_engine_kwargs": {"dtype": "half"}}, "cannot set dtype: .*; set bf16, fp16 or neither"),
    ({"reward_weights": [1.0, NAN]}, "reward_weights must be a list of finite numbers, or None"),
    ({"reward_weights": "1,2"}, "reward_weights must be a list"),
    ({"plan": 7}, "plan must be auto, a preset, .* not 7"),
    ({"plan": ["flatten"]}, r"plan must be auto, a preset, .* not \['flatten'\]"),
]


OF_GRPO: list[tuple[dict[str, Any], str]] = [
    ({"tool_workers": -1}, "tool_workers must be a whole number from 0 to 1024, not -1"),
    ({"tool_workers": 1025}, "tool_workers .* not 1025"),
    ({"tool_workers": 1.5}, "tool_workers .* not 1.5"),
    ({"tool_workers": "8"}, "tool_workers .* not '8'"),
    ({"tool_workers": None}, "tool_workers .* not None"),
    ({"tool_workers": True}, "tool_workers .* not True"),
    ({"tool_timeout": 0}, r"tool_timeout must be a finite number above 0 to 86400 \(or None\), not 0"),
    ({"tool_timeout": -5}, "tool_timeout .* not -5"),
    ({"tool_timeout": NAN}, "tool_timeout .* not nan"),
    ({"tool_timeout": INF}, "tool_timeout .* not inf"),
    ({"tool_timeout": "5 s"}, "tool_timeout .* not '5 s'"),
    ({"router_replay": "rolout"}, "router_replay must be 'none' or 'rollout' or 'recompute' .*, not 'rolout'"),
    ({"router_replay": True}, "router_replay .* not True"),
    ({"router_aux_loss_coef": -1}, r"router_aux_loss_coef must be a finite number from 0 \(or None\), not -1"),
    ({"router_aux_loss_coef": NAN}, "router_aux_loss_coef .* not nan"),
    ({"router_aux_loss_coef": "small"}, "router_aux_loss_coef .* not 'small'"),
]


@pytest.mark.parametrize(("changes", "told"), OF_GRPO, ids=[str(changes) for changes, _ in OF_GRPO])
def test_an_impossible_setting_of_grpo_is_refused_by_name_and_value(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        tiny_groups.settings(tmp_path, **changes)


@pytest.mark.parametrize(("changes", "told"), SETTINGS, ids=[str(changes) for changes, _ in SETTINGS])
def test_an_impossible_setting_is_refused_by_name_and_value(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tiny.arguments(tmp_path, **changes)


def test_all_wrong_settings_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny.arguments(tmp_path, gamma=2, lam=NAN, num_ppo_epochs="4", plan=3)
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["num_ppo_epochs", "gamma", "lam", "plan"]


def test_numbers_of_numpy_and_whole_numbers_written_as_floats_are_taken(tmp_path: Path) -> None:
    args = tiny.arguments(
        tmp_path, total_episodes=1e4, response_length=np.int64(8), gamma=np.float32(1), learning_rate=0, kl_coef=0
    )
    assert (args.total_episodes, args.response_length, args.gamma, args.learning_rate) == (10_000, 8, 1.0, 0.0)
    assert type(args.total_episodes) is type(args.response_length) is int
    assert type(args.logging_steps) is type(args.save_steps) is int, "as with TRL's configuration"


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_a_plan_in_any_form_is_logged_with_the_settings(tmp_path: Path, kind: type) -> None:
    plan = flatten(Cluster(1, 1))
    for given, logged in ((plan, plan.to_dict()), (tmp_path / "a.yaml", str(tmp_path / "a.yaml")), ("auto", "auto")):
        args = kind(output_dir=str(tmp_path), use_cpu=True, plan=given)
        assert json.loads(args.to_json_string())["plan"] == logged
        assert args.plan is given and "plan=" in str(args)


def test_temperatures_that_vllm_cannot_sample_with_are_refused_before_it_starts(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, temperature=0.0)
    check_plan(args, flatten(Cluster(1, 1), generation_engine="transformers"), {}, [])
    with pytest.raises(ConfigError, match="temperature 0 is below the 0.01 that vLLM samples with"):
        check_plan(args, flatten(Cluster(1, 1)), {}, [])


def test_streams_by_the_clock_are_refused_where_runs_are_to_be_equal(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path)
    args.full_determinism = True  # set afterwards, because the constructor switches this process to it
    plan = flatten(Cluster(1, 2), generation_engine="transformers")
    check_plan(args, replace(plan, streams=Streams(deterministic=True)), {}, [])
    with pytest.raises(ConfigError, match="write streams: {deterministic: true}"):
        check_plan(args, replace(plan, streams=Streams()), {}, [])


def test_a_word_in_the_place_of_a_boolean_is_refused_by_its_setting(tmp_path: Path) -> None:
    for name in ("full_vocabulary_logprobs", "vllm_repeatable_sampling"):
        with pytest.raises(ConfigError, match=f"{name} must be true or false, not 'x'"):
            GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **{name: "x"})  # type: ignore[arg-type]


def test_an_optimizer_on_an_nvme_drive_is_refused_because_it_could_not_be_saved(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path)
    plan = flatten(Cluster(1, 2), generation_engine="transformers").to_dict()
    plan["calls"]["critic.train"]["zero_stage"] = 3
    for device, refused in (("cpu", False), ("nvme", True)):
        zero = {"zero_optimization": {"offload_optimizer": {"device": device}}}
        with pytest.raises(ConfigError, match="optimizer of critic.train to an NVMe") if refused else nullcontext():
            check_plan(args, ExecutionPlan.from_dict(plan), {}, [], deepspeed=zero)


def test_a_zero_stage_without_deepspeed_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = flatten(Cluster(1, 2), generation_engine="transformers").to_dict()
    monkeypatch.setattr("trl_realloc.engines.training.deepspeed_compat.is_installed", lambda: False)
    check_plan(tiny.arguments(tmp_path), ExecutionPlan.from_dict(plan), {}, [])
    plan["calls"]["critic.train"]["zero_stage"] = 2
    with pytest.raises(ConfigError, match="critic.train has zero_stage 2.*DeepSpeed is not installed: pip install"):
        check_plan(tiny.arguments(tmp_path), ExecutionPlan.from_dict(plan), {}, [])


def test_a_model_that_is_frozen_in_part_is_known_on_ranks_that_do_not_train_it() -> None:
    whole, critic = tiny.policy(), tiny.classifier()
    assert not frozen_in_part(whole, critic) and not frozen_in_part("a name", None)
    critic.get_input_embeddings().requires_grad_(False)
    assert frozen_in_part(whole, critic) and frozen_in_part("a name", critic)


# --- models, tokenizers, datasets -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in folders: whole ones, damaged ones, and ones that no role can use."""
    root = tmp_path_factory.mktemp("models")
    tiny.policy().save_pretrained(root / "policy")
    tiny.classifier().save_pretrained(root / "classifier")
    tiny.classifier(num_labels=2).save_pretrained(root / "two")
    shutil.copytree(root / "policy", root / "torn")
    whole = (root / "policy" / "model.safetensors").read_bytes()
    (root / "torn" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    shutil.copytree(root / "policy", root / "bare")
    (root / "bare" / "model.safetensors").unlink()
    config = json.loads((root / "policy" / "config.json").read_text())
    for name, changes in {
        "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "remote": {
            "model_type": "ours",
            "auto_map": {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"},
        },
        "text": {"hidden_size": "wide"},
        "small": {"vocab_size": 50},
    }.items():
        shutil.copytree(root / "policy", root / name)
        (root / name / "config.json").write_text(json.dumps({**config, **changes}))
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_text("")
    T5Config().save_pretrained(root / "t5")
    (root / "t5" / "model.safetensors").write_bytes(whole)
    return root


def _meta() -> Any:
    with torch.device("meta"):
        return tiny.policy()


def _positional(prompts: Any, completions: Any, /) -> list[float]:
    return []


def _twice() -> dict[str, Any]:
    critic = tiny.classifier()
    return {"value_model": critic, "reward_model": critic}


GIVEN: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "no model": (lambda at: {"model": None}, "model is missing; give the policy"),
    "a number as a model": (lambda at: {"model": 5}, "model must be a Transformers model, or its name or path, not 5"),
    "a model on the meta device": (lambda at: {"model": _meta()}, "parameters on the meta device"),
    "a classifier as the policy": (
        lambda at: {"model": tiny.classifier()},
        r"model \(LlamaForSequenceClassification\) has no language head",
    ),
    "a classifier's path as the policy": (
        lambda at: {"model": str(at / "classifier")},
        "is a LlamaForSequenceClassification, which has no language head",
    ),
    "a torn file": (lambda at: {"model": at / "torn"}, r"model: .*model\.safetensors is not whole"),
    "a folder without weights": (lambda at: {"ref_model": at / "bare"}, "ref_model: there are no weights"),
    "an empty config": (lambda at: {"model": str(at / "empty")}, "model: "),
    "text in a config": (lambda at: {"model": str(at / "text")}, "model: cannot read a model from"),
    "a model of its own code": (
        lambda at: {"model": str(at / "remote")},
        r"model: .* has custom code in its repository \(trust_remote_code",
    ),
    "a quantized model": (lambda at: {"model": str(at / "quantised")}, "model is quantized, .*give a peft_config"),
    "an encoder-decoder": (lambda at: {"model": str(at / "t5")}, "model is an encoder-decoder"),
    "a classifier of two by its path": (lambda at: {"value_model": str(at / "two")}, "value_model: .* has 2 outputs"),
    "a reward of two by its path": (lambda at: {"reward_model": at / "two"}, "reward_model: .* has 2 outputs"),
    "a language model's path as a reward": (
        lambda at: {"reward_model": str(at / "policy")},
        "is a LlamaForCausalLM, so its score layer would be random",
    ),
    "a language model as a reward": (
        lambda at: {"reward_model": tiny.policy()},
        r"reward_model \(LlamaForCausalLM\) is a language model; load it with",
    ),
    "a language model as a critic": (lambda at: {"value_model": tiny.policy()}, "value_model .* is a language model"),
    "a critic that is the reward": (lambda at: _twice(), "`value_model` and `reward_model` are the same object"),
    "a reference of fewer words": (
        lambda at: {"ref_model": tiny.policy(vocab_size=50)},
        "ref_model has a vocabulary of 50, but reads the policy's tokens, of which there are 100",
    ),
    "a reference's path of fewer words": (
        lambda at: {"ref_model": str(at / "small")},
        "ref_model has a vocabulary of 50",
    ),
    "a reward of fewer words": (
        lambda at: {"reward_model": tiny.classifier(vocab_size=50)},
        "or its own tokenizer in reward_processing_classes",
    ),
    "a critic without the ids that the policy has beyond the tokenizer": (
        lambda at: {"model": tiny.policy(vocab_size=120)},
        r"value_model has a vocabulary of 100, .* there are 120; .*value_model\.resize_token_embeddings\(120\)",
    ),
    "a reference without them": (
        lambda at: {
            "model": tiny.policy(vocab_size=120),
            "ref_model": tiny.policy(),
            "value_model": tiny.classifier(vocab_size=120),
        },
        "ref_model has a vocabulary of 100",
    ),
    "a reward model without them": (
        lambda at: {
            "model": tiny.policy(vocab_size=120),
            "reward_model": tiny.classifier(),
            "value_model": tiny.classifier(vocab_size=120),
        },
        "reward_model has a vocabulary of 100, .* or its own tokenizer in reward_processing_classes",
    ),
    "a dict as a reward": (lambda at: {"reward_model": {"a": 1}}, "a reward is a model, a name or path, or a function"),
    "a function by position": (lambda at: {"reward_model": _positional}, "'_positional' takes prompts, completions by"),
    "a built-in function": (lambda at: {"reward_model": max}, "'max' has no readable signature"),
    "a tokenizer's name": (lambda at: {"processing_class": "gpt2"}, r"AutoTokenizer\.from_pretrained\('gpt2'\)"),
    "a reward tokenizer's name": (
        lambda at: {"reward_model": tiny.classifier(), "reward_processing_classes": "gpt2"},
        "reward_processing_classes must be a tokenizer, not the name 'gpt2'",
    ),
    "a collator that is none": (lambda at: {"data_collator": "pad"}, "data_collator must be a function or None"),
    "one optimizer": (lambda at: {"optimizers": None}, "optimizers must be a pair"),
    "a dataset's name": (lambda at: {"train_dataset": "trl-lib/tldr"}, "load it with datasets.load_dataset"),
    "a mapping of columns": (lambda at: {"train_dataset": {"prompt": ["w2"] * 8}}, r"Dataset\.from_dict"),
    "several splits": (
        lambda at: {"train_dataset": DatasetDict({"train": tiny.prompts(8)})},
        r"has the splits 'train'; pass one of them, like dataset\['train'\]",
    ),
    "a stream": (
        lambda at: {"train_dataset": tiny.prompts(8).to_iterable_dataset()},
        "is a stream .* whose number of rows is not known; take as many",
    ),
    "a generator": (lambda at: {"train_dataset": (row for row in ())}, "must be a datasets.Dataset or a list of rows"),
    "a list of texts": (lambda at: {"train_dataset": ["w2 w3"] * 8}, "its rows must be dicts like"),
    "an evaluation list of texts": (lambda at: {"eval_dataset": ["w2 w3"] * 8}, "eval_dataset: its rows must be dicts"),
    "prompts that are None": (
        lambda at: {"train_dataset": Dataset.from_dict({"prompt": ["w2", None] * 8})},
        "rows 1, 3, 5, 7, 9 and 3 more have no 'prompt'",
    ),
    "prompts that are numbers": (
        lambda at: {"train_dataset": Dataset.from_dict({"prompt": [1, 2] * 8})},
        "the column 'prompt' must hold text, or conversations .*, and holds int64",
    ),
    "prompts that are lists of words": (
        lambda at: {"train_dataset": Dataset.from_dict({"prompt": [["w2"]] * 8})},
        "must hold text, or conversations",
    ),
    "conversations of no message": (
        lambda at: {"train_dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": "w2"}], []] * 8})},
        "have no 'prompt', an empty one",
    ),
    "ids that are text": (
        lambda at: {"train_dataset": Dataset.from_dict({"input_ids": [["a"]] * 8})},
        "the column 'input_ids' must hold lists of token ids",
    ),
    "ids that are None": (
        lambda at: {"train_dataset": Dataset.from_dict({"input_ids": [[2, None], None, [3]] * 4})},
        "rows 0, 1, 3, 4, 6 and 3 more have no 'input_ids'",
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_an_impossible_argument_is_refused_before_anything_starts(tmp_path: Path, saved: Path, case: str) -> None:
    given, told = GIVEN[case]
    with pytest.raises(ValueError, match=told):
        tiny.trainer(tmp_path, given=given(saved))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stop_token": None, "stop_token_id": 100}, "stop_token_id 100 is outside the model's vocabulary of 100"),
        (
            {"model_adapter_name": "mine"},
            "model_adapter_name is 'mine', but the model has no such adapter; it has none",
        ),
    ],
)
def test_a_setting_that_the_model_cannot_follow_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tiny.trainer(tmp_path, **changes)


def test_a_config_of_another_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"args must be a trl_realloc\.PPOConfig, not a transformers"):
        PPOTrainer(PlainArguments(str(tmp_path)), *[None] * 6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("12", "it returned a str"),
        ({"a": 1.0, "b": 2.0}, "it returned a dict"),
        ({1.0, 2.0}, "it returned a set"),
        (["1.0", "2.0"], "'1.0' is text"),
        ([[1.0], {"score": 2.0}], "must return a list of numbers"),
        (3.0, "must return a list of numbers"),
        (None, "must return a list of numbers"),
    ],
)
def test_rewards_that_are_no_list_of_numbers_are_refused(answer: Any, told: str) -> None:
    function = FunctionReward(tiny.short, "short")
    two = Rollouts(index=torch.arange(2), responses=Ragged.of([[2], [3]], torch.long))
    with pytest.raises(RewardError, match=told):
        function.checked(answer, two, None)  # type: ignore[arg-type]


class _Rows:
    """Rows as a torch data set has them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([2 + at, 3])}


def _lists() -> Iterator[Any]:
    yield [{"prompt": "w2 w3"}] * 16
    yield tuple({"input_ids": [2, 3]} for _ in range(16))
    yield _Rows()


@pytest.mark.parametrize("rows", list(_lists()), ids=["a list", "a tuple", "a torch data set"])
def test_rows_in_other_forms_and_paths_as_models_are_taken(tmp_path: Path, saved: Path, rows: Any) -> None:
    models = {"model": saved / "policy", "value_model": saved / "classifier"}
    rewards = {"reward_model": [tiny.short, saved / "classifier"]}
    made = tiny.trainer(tmp_path, given={**models, **rewards, "train_dataset": rows, "eval_dataset": rows})
    assert len(made.train_dataset) == len(made.eval_dataset) == 16
    assert made.setup.call_settings.reward_weights == {"short": 1.0, "classifier": 1.0}


def test_a_critic_from_a_language_model_is_said(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("trl_realloc.trainer.checks.model_checks.logger.warning", said.append)
    tiny.trainer(tmp_path, given={"value_model": str(saved / "policy")})
    assert any("the critic begins with a new, random score layer" in line for line in said)
