"""A rank of a run with `enable_jit_checkpoint` that trains until a signal stops it, and then says how far it came."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny

from trl_realloc import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    algorithm, plan = options["algorithm"], options["plan"]
    settings: dict[str, Any] = {"plan": plan, "max_steps": 100_000, "enable_jit_checkpoint": True}
    made: Any
    if algorithm == "ppo":
        made = tiny.trainer(folder, response_length=4, generation_engine="vllm", **settings)
    else:
        config, kind = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
        settings |= {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
        args = config(str(folder), **tiny.BARE, **settings, use_vllm=True, dataloader_num_workers=1)
        data = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
        made = kind(tiny.policy(), tiny.short, args, **data)
    rank = made.accelerator.process_index
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    made.train()
    made.accelerator.wait_for_everyone()
    (folder / f"ended-{rank}.json").write_text(json.dumps(made.state.global_step))
    made.close()


if __name__ == "__main__":
    main()
