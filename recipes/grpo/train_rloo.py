"""RLOO on questions of arithmetic.

accelerate launch --multi_gpu --num_processes 8 recipes/grpo/train_rloo.py --config recipes/grpo/rloo.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arithmetic import questions, right_answer

from trl_realloc import RLOOConfig, RLOOTrainer
from trl_realloc.cli.recipe_parser import parse_recipe, run


@dataclass
class Arguments:
    """What the script reads besides `RLOOConfig`."""

    model_name_or_path: str = field(metadata={"help": "The policy."})


def main() -> None:
    script, args = parse_recipe((Arguments, RLOOConfig))
    trainer = RLOOTrainer(
        model=script.model_name_or_path, reward_funcs=right_answer, args=args, train_dataset=questions(4000)
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
