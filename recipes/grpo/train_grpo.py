"""GRPO on questions of arithmetic, with or without a calculator.

accelerate launch --multi_gpu --num_processes 8 recipes/grpo/train_grpo.py --config recipes/grpo/grpo-reward.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arithmetic import calculate, questions, right_answer

from trl_realloc import GRPOConfig, GRPOTrainer
from trl_realloc.cli.recipe_parser import parse_recipe, run


@dataclass
class Arguments:
    """What the script reads besides `GRPOConfig`."""

    model_name_or_path: str = field(metadata={"help": "The policy."})
    tools: bool = field(default=False, metadata={"help": "Whether the policy can call the calculator."})


def main() -> None:
    script, args = parse_recipe((Arguments, GRPOConfig))
    trainer = GRPOTrainer(
        model=script.model_name_or_path,
        reward_funcs=right_answer,
        args=args,
        train_dataset=questions(4000),
        tools=[calculate] if script.tools else None,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
