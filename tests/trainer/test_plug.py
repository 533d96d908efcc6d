"""TRL's own GRPO and RLOO trainers generate with this package's vLLM engines, while Accelerate trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_realloc import ReallocationPlugin, plug
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.grpo_config import GRPOConfig as ReallocGRPOConfig
from trl_realloc.trainer.policy.accelerate_fallback import plan_generation
from trl_realloc.trainer.policy.generation_plan import GENERATE
from trl_realloc.trainer.policy.planned_generation import NoImagesError, PlannedGeneration
from trl_realloc.trainer.policy.plug import _context_length, _engine_settings


needs_vllm = pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
DIFFERENCE = "sampling/sampling_logp_difference/max"


def arguments(kind: Any, folder: Path, **changes: Any) -> Any:
    return kind(
        output_dir=str(folder),
        **{
            **tiny.BARE,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "temperature": 0.9,
            **changes,
        },
    )


def trainer(folder: Path, kind: Any = GRPOTrainer, peft_config: Any = None, **changes: Any) -> Any:
    config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[kind]
    return kind(
        model=tiny.policy(tie_word_embeddings=True),
        peft_config=peft_config,
        reward_funcs=tiny.short,
        args=arguments(config, folder, **changes),
        train_dataset=tiny.prompts(32),
        processing_class=tiny.tokenizer(),
    )


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.oldest
def test_grpo_trains_on_samples_of_the_policy_before_and_after_an_update(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    generation = plug(made)
    try:
        made.train()
        steps = [row for row in made.state.log_history if DIFFERENCE in row]
        # TRL scores the samples again with its own forward
        assert [row[DIFFERENCE] < 1e-4 for row in steps] == [True, True]
        assert engine_version(generation) == 2
        with pytest.raises(NoImagesError, match="images"):
            generation.generate([[2, 3]], [[object()]], 4)
        prompts, tokens, logprobs, drawn = generation.generate([[2, 3], [4]], [None, None], 1)
        assert prompts == [[2, 3], [4]] and drawn == [[[token] for token in sample] for sample in tokens]
        assert [len(sample) for sample in logprobs] == [len(sample) for sample in tokens]
        assert generation.generate([], None, 4) == ([], [], [], [])
    finally:
        generation.close()


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_rloo_with_adapters_and_an_engine_that_sleeps_samples_from_the_merged_policy(tmp_path: Path) -> None:
    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}  # the policy's head is tied
    lora = LoraConfig(r=4, **targets, init_lora_weights=False, task_type="CAUSAL_LM")
    made = trainer(tmp_path, RLOOTrainer, peft_config=lora, vllm_enable_sleep_mode=True, learning_rate=1e-2)
    generation = plug(made)
    assert generation.plan[GENERATE].drop
    generate, differences = generation.generate, list[float]()

    def compared(*args: Any, **kwargs: Any) -> Any:
        prompts, tokens, logprobs, ids = generate(*args, **kwargs)
        for prompt, sample, of_sample in zip(prompts, tokens, logprobs, strict=True):
            differences.append(difference(made, prompt, sample, [value for (value,) in of_sample]))
        return prompts, tokens, logprobs, ids

    generation.generate = compared  # type: ignore[method-assign]
    try:
        made.train()
        assert len(differences) == 16 and max(differences) < 1e-4
        made.vllm_generation.generate([[2, 3]], None, 1)  # the weights were dropped after the last use
        assert max(differences) < 1e-4
    finally:
        generation.close()


def engine_version(generation: PlannedGeneration) -> int:
    assert generation.engine is not None
    return generation.engine.version


def difference(made: Any, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
    """The largest difference of log-probabilities to those of the trained model at the temperature of sampling."""
    made.model.eval()
    with torch.no_grad():
        logits = made.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    made.model.train()
    expected = torch.log_softmax(logits / made.temperature, -1)[range(len(tokens)), tokens]
    return float((expected - torch.tensor(logprobs)).abs().max())


def test_a_trainer_that_does_not_generate_with_trls_engines_is_refused(tmp_path: Path) -> None:
    made = Trainer(tiny.policy(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(ConfigError, match="a Trainer does not generate with TRL's vLLM engines"):
        plug(made)


@needs_vllm
@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        ({}, {"gpu_memory_utilisation": 0.5}, "did you mean 'gpu_memory_utilization'"),
        ({}, {"engine_kwargs": {"seed": 3}}, "^engine_kwargs cannot set seed"),
        ({}, {"max_model_len": 12}, "leaves no room for a prompt"),
        ({"temperature": 0.001}, {}, "temperature"),
        ({"loss_type": "vespo"}, {}, "'token_truncate' or 'token_mask', not 'sequence_mask'"),
        ({"generation_kwargs": {"num_beam": 2}}, {}, "SamplingParams has no argument 'num_beam'"),
        ({"generation_kwargs": {"do_sample": True, "num_beams": 2}}, {}, "num_beams 2 is beam search"),
    ],
)
def test_settings_that_the_engines_cannot_follow_are_refused_before_one_starts(
    tmp_path: Path, settings: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    made = trainer(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        plug(made, **engine)
    assert not made.use_vllm and not hasattr(made, "vllm_generation")


def test_the_engines_settings_of_a_configuration_are_theirs_and_arguments_come_first(tmp_path: Path) -> None:
    limits = {"vllm_start_timeout": 1800.0, "vllm_load_timeout": 50.0, "vllm_repeatable_sampling": True}
    args = arguments(ReallocGRPOConfig, tmp_path, vllm_engine_kwargs={"enforce_eager": True}, **limits)
    settings = _engine_settings(args, {"load_timeout_s": 70.0, "max_model_len": 99}, engines=1, ranks=1)
    expected = {"start_timeout_s": 1800.0, "load_timeout_s": 70.0, "repeatable_sampling": True, "max_num_seqs": 8}
    assert settings | expected == settings and settings["engine_kwargs"] == {"enforce_eager": True}
    plain = _engine_settings(arguments(GRPOConfig, tmp_path), {}, engines=1, ranks=1)
    assert set(plain) == {"gpu_memory_utilization", "max_num_seqs"}


def test_engines_have_room_for_the_prompts_that_the_trainer_has(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    config = made.model.config
    lengths = [len(text.split()) for text in made.train_dataset["prompt"]]
    assert _context_length(made, None, 12, config) == max(lengths) + 12
    made.eval_dataset = Dataset.from_dict({"prompt": ["w2 " * 30]})
    assert _context_length(made, None, 12, config) == 30 + 12
    assert _context_length(made, 77, 12, config) == 77
    made.eval_dataset = Dataset.from_dict({"prompt": ["w2 " * 300]})
    assert _context_length(made, None, 12, config) == 128


def test_engines_have_room_for_all_that_the_model_has_where_prompts_are_made_in_the_run(tmp_path: Path) -> None:
    config = tiny.config()
    made = trainer(tmp_path)
    made.rollout_func = lambda *args: {}
    assert _context_length(made, None, 12, config) == 128
    made = trainer(tmp_path)
    made._tokenize_prompts = lambda prompts: [[2] * 100 for _ in prompts]
    assert _context_length(made, None, 12, config) == 128


@needs_vllm
def test_models_and_launches_that_cannot_be_served_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made._is_vlm = True
    with pytest.raises(ConfigError, match="reads images"):
        plug(made)
    made._is_vlm = False
    made.args.use_vllm, made.args.vllm_mode = True, "server"
    with pytest.raises(ConfigError, match="vllm_mode is server"):
        plug(made)


@needs_vllm
def test_a_refusal_of_images_says_what_to_leave_out(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made._is_vlm = True
    of_ours = {"score_groups_early": False, "async_save": False, "skip_nonfinite_updates": False}
    vars(made.args).update(use_vllm=True, **of_ours)
    with pytest.raises(ConfigError, match="of text alone; leave plug out, and train it with TRL's own generation"):
        plug(made)
    with pytest.raises(ConfigError, match="of text alone; leave use_vllm out, and train it with TRL's own generation"):
        plan_generation(made, ReallocationPlugin(generation_engine="vllm"))
