"""A rank launched with ZeRO-3 that trains models which Transformers has partitioned, and the same models by path."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_realloc import PPOTrainer


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    for kind in ("partitioned", "by path"):
        args = tiny.arguments(folder / kind, use_cpu=False, per_device_train_batch_size=4, num_ppo_epochs=1)
        models: dict[str, Any] = dict(given)
        if kind == "partitioned":
            models["model"] = AutoModelForCausalLM.from_pretrained(given["model"])
            for name in ("value_model", "reward_model"):
                models[name] = AutoModelForSequenceClassification.from_pretrained(given[name], num_labels=1)
            arrived: nn.Module = models["model"]
            arrived_in = {str(parameter.dtype) for parameter in arrived.parameters()}
            assert all(parameter.numel() == 0 for parameter in arrived.parameters()), "Transformers partitions them"
        made = PPOTrainer(args, tiny.tokenizer(), ref_model=None, train_dataset=tiny.prompts(), **models)
        made.train()
        made.save_model(str(folder / kind / "final"))
        rewards = made.placement.engines.get("reward.forward", [])
        engines = [
            made.placement.engine("actor.train"),
            made.placement.engine("critic.train"),
            made.placement.engine("reference.forward"),
            *rewards,
        ]
        packed = [engine.head.packed for engine in engines if engine is not None]
        if made.accelerator.is_main_process:
            (folder / f"{kind}.json").write_text(
                json.dumps({"updates": tiny.updates(made), "packed": packed, "arrived_in": sorted(arrived_in)})
            )
        made.close()


if __name__ == "__main__":
    main()
