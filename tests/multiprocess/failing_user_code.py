"""A rank that trains by PPO or GRPO and of which a callback or a reward function raises after the first update."""

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
    fails = options["fails_on_rank"]
    callbacks: list[TrainerCallback] = [Fails(fails)] if options["in"] == "callback" else []
    if options["algorithm"] == "ppo":
        tiny.trainer(folder, callbacks=callbacks, plan="flatten", max_steps=3).train()
        return
    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 3}
    args = GRPOConfig(str(folder), **tiny.BARE, **settings, use_vllm=False, plan="flatten")

    def judged(completions: list[str], **columns: Any) -> list[float]:
        if options["in"] == "reward" and args.process_index == fails and made.state.global_step == 1:
            raise KeyError("no answer of the judge")
        return [float(len(text)) for text in completions]

    data = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
    made = GRPOTrainer(tiny.policy(), judged, args, **data, callbacks=callbacks)
    made.train()


if __name__ == "__main__":
    main()
