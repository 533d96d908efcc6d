"""A rank that trains by GRPO with a reward function that raises in the second update on one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny

from trl_realloc import GRPOConfig, GRPOTrainer


def main() -> None:
    folder, fails = Path(sys.argv[1]), json.loads(sys.argv[2])["fails_on_rank"]
    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 3}
    args = GRPOConfig(str(folder), **tiny.BARE, **settings, use_vllm=False, plan="flatten")

    def judged(completions: list[str], **columns: Any) -> list[float]:
        if args.process_index == fails and made.state.global_step == 1:
            raise KeyError("no answer of the judge")
        return [float(len(text)) for text in completions]

    made = GRPOTrainer(tiny.policy(), judged, args, tiny.prompts(), processing_class=tiny.tokenizer())
    made.train()


if __name__ == "__main__":
    main()
