"""PPO on local models and data, in the manner of TRL's own example script: only the import of the trainer differs.

    accelerate launch examples/ppo.py --dataset_name path/to/data --sft_model_path path/to/policy \
        --reward_model_path path/to/reward --output_dir runs/ppo --stop_token eos --missing_eos_penalty 1.0
"""

from pathlib import Path

from datasets import load_dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, ScriptArguments

from trl_realloc import PPOConfig, PPOTrainer  # was: from trl.experimental.ppo import PPOConfig, PPOTrainer


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(training_args.sft_model_path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)

    local = Path(script_args.dataset_name).is_dir()
    dataset = load_from_disk(script_args.dataset_name) if local else load_dataset(script_args.dataset_name)

    def tokenize(split):
        return split.map(
            lambda rows: {"input_ids": tokenizer(rows["prompt"])["input_ids"]},
            batched=True,
            remove_columns=split.column_names,
        )

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=tokenize(dataset[script_args.dataset_train_split]),
        eval_dataset=tokenize(dataset[script_args.dataset_test_split]),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.generate_completions()
