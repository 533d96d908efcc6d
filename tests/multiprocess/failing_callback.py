"""A rank that trains by PPO or GRPO with a callback that raises after the first update on one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
from transformers import TrainerCallback

from trl_realloc import GRPOConfig, GRPOTrainer


class Fails(TrainerCallback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == self.rank:
            raise OSError("no space left for the plots")


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    callbacks: list[TrainerCallback] = [Fails(options["fails_on_rank"])]
    if options["algorithm"] == "ppo":
        tiny.trainer(folder, callbacks=callbacks, plan="flatten", max_steps=3).train()
        return
    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 3}
    args = GRPOConfig(str(folder), **tiny.BARE, **settings, use_vllm=False, plan="flatten")
    data = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
    GRPOTrainer(tiny.policy(), tiny.short, args, **data, callbacks=callbacks).train()


if __name__ == "__main__":
    main()
