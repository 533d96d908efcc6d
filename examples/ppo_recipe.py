"""PPO from a recipe, with models given by name or path: each process reads only its parts of them.

    accelerate launch --config_file recipes/accelerate_configs/one_host_8_gpus.yaml \
        examples/ppo_recipe.py --config recipes/llama-8b/ppo.yaml

The dataset has a column `prompt`. Any setting of the recipe can be overridden on the command line, such as
`--plan auto`.
"""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset, load_from_disk
from transformers import AutoTokenizer
from trl import ScriptArguments

from trl_realloc import PPOConfig, PPOTrainer
from trl_realloc.cli.recipe_parser import parse_recipe, run


def main() -> None:
    script, args = parse_recipe((ScriptArguments, PPOConfig))
    tokenizer = AutoTokenizer.from_pretrained(args.sft_model_path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    is_local = Path(script.dataset_name).is_dir()
    dataset = load_from_disk(script.dataset_name) if is_local else load_dataset(script.dataset_name)
    evaluates = script.dataset_test_split in dataset
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=args.sft_model_path,
        ref_model=None,  # the policy as it is before training
        reward_model=args.reward_model_path,
        value_model=args.reward_model_path,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset[script.dataset_test_split] if evaluates else None,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
