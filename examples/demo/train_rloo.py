"""The demo's training by RLOO from a recipe.

accelerate launch --config_file recipes/demo/accelerate.yaml examples/demo/train_rloo.py --config recipes/demo/rloo.yaml
"""

from __future__ import annotations

from train_grpo import train

from trl_realloc import RLOOConfig, RLOOTrainer
from trl_realloc.cli.recipe_parser import run


if __name__ == "__main__":
    run(lambda: train(RLOOTrainer, RLOOConfig))
