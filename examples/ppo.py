"""PPO on local models and data. Nothing but the import of the trainer is this package's: with the commented line in its
place the script runs TRL 1.12's trainer. TRL's own `examples/scripts/ppo/ppo.py` and `ppo_tldr.py` run in the same way.

    accelerate launch examples/ppo.py --dataset_name path/to/data --model_name_or_path path/to/policy \
        --sft_model_path path/to/policy --reward_model_path path/to/reward --output_dir runs/ppo --stop_token eos \
        --missing_eos_penalty 1.0 --dtype float32
"""

from pathlib import Path

import torch
from accelerate import PartialState
from datasets import load_dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_realloc import PPOConfig, PPOTrainer  # was: from trl.experimental.ppo import PPOConfig, PPOTrainer


def model_options(model_args: ModelConfig) -> dict:
    """The options of `from_pretrained` that a `ModelConfig` stands for."""
    named = model_args.dtype not in ("auto", None)
    options = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": getattr(torch, model_args.dtype) if named else model_args.dtype,
    }
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        options["quantization_config"] = quantization
    return options


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    options = model_options(model_args)
    sft, reward = training_args.sft_model_path, training_args.reward_model_path
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path or sft, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1, **options)
    reward_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1, **options)
    policy = AutoModelForCausalLM.from_pretrained(sft, **options)
    peft_config = get_peft_config(model_args)
    # an adapter's reference is the policy without it
    ref_policy = AutoModelForCausalLM.from_pretrained(sft, **options) if peft_config is None else None

    local = Path(script_args.dataset_name).is_dir()
    dataset = load_from_disk(script_args.dataset_name) if local else load_dataset(script_args.dataset_name)

    def tokenize(split):
        return split.map(
            lambda rows: {"input_ids": tokenizer(rows["prompt"])["input_ids"]},
            batched=True,
            remove_columns=split.column_names,
            num_proc=training_args.dataset_num_proc,
        )

    with PartialState().local_main_process_first():  # the other processes read its cache
        train_dataset = tokenize(dataset[script_args.dataset_train_split])
        eval_dataset = tokenize(dataset[script_args.dataset_test_split])

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()
