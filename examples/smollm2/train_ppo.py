"""PPO of SmolLM2 on a task of reasoning-gym, from a recipe.

python examples/smollm2/train_ppo.py --config recipes/smollm2/ppo.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import Dataset
from tasks import held_out_rows, right_answer, training_rows
from transformers import AutoTokenizer

from trl_realloc import PPOConfig, PPOTrainer
from trl_realloc.cli.recipe_parser import parse_recipe, run


@dataclass
class Arguments:
    """What the script reads besides `PPOConfig`."""

    value_model_path: str = field(metadata={"help": "The critic."})
    task: str = field(metadata={"help": "A key of `tasks.TASKS`."})


def main() -> None:
    script, args = parse_recipe((Arguments, PPOConfig))
    trainer = PPOTrainer(
        args=args,
        processing_class=AutoTokenizer.from_pretrained(args.sft_model_path, padding_side="left"),
        model=args.sft_model_path,
        ref_model=None,  # the policy as it is before training
        reward_model=right_answer,
        value_model=script.value_model_path,
        train_dataset=Dataset.from_list(training_rows(script.task, 1000)),
        eval_dataset=Dataset.from_list(held_out_rows(script.task)),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
