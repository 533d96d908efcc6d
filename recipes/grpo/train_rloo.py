"""RLOO on questions of arithmetic; with `use_peft` of an adapter.

accelerate launch --multi_gpu --num_processes 8 recipes/grpo/train_rloo.py --config recipes/grpo/rloo.yaml
"""

from __future__ import annotations

from arithmetic import questions, right_answer
from trl import ModelConfig, get_peft_config

from trl_realloc import RLOOConfig, RLOOTrainer
from trl_realloc.cli.recipe_parser import parse_recipe, run


def main() -> None:
    model, args = parse_recipe((ModelConfig, RLOOConfig))
    trainer = RLOOTrainer(
        model=model.model_name_or_path,
        reward_funcs=right_answer,
        args=args,
        train_dataset=questions(4000),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
