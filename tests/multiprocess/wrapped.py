"""A rank that trains under two plans in turn and writes down what `trainer.model` is, and who asked the reward."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
from transformers import TrainerCallback


class Watcher(TrainerCallback):
    """Keeps the model that callbacks are handed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.model = others["model"]


def main() -> None:
    folder, plans = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, plan in plans.items():
        asked: list[int] = []

        async def reward(completions: list[str], asked: list[int] = asked, **columns: Any) -> list[float]:
            asked.append(len(completions))
            return [float(len(text.split())) for text in completions]

        watcher = Watcher()
        given = {"reward_model": reward, "eval_dataset": tiny.prompts(1)}
        if name == "parts":
            given |= {"model": str(folder.parent / "policy"), "value_model": str(folder.parent / "critic")}
        options = {"plan": plan, "max_steps": 1, "per_device_train_batch_size": 4}
        made = tiny.trainer(folder / name, callbacks=[watcher], given=given, **options)
        parts = {"policy": made.model.policy, "value_model": made.model.value_model}
        found: dict[str, Any] = {"meta before": {k: _meta(part) for k, part in parts.items()}}
        made.train()
        assert watcher.model is made.model and made.policy_model is made.model.policy
        parts = {"policy": made.model.policy, "value_model": made.model.value_model}
        found["meta"] = {k: _meta(part) for k, part in parts.items()}
        found["engines"] = [
            made.placement.engine("actor.train") is not None
            and made.placement.engine("actor.train").head.model is made.model.policy,
            made.placement.engine("critic.train") is not None
            and made.placement.engine("critic.train").head.model is made.model.value_model,
        ]
        found["names"] = [key for key, _ in made.model.named_parameters()]
        found["state"] = list(made.model.state_dict())
        found["asked"], asked[:] = list(asked), []
        found["score"] = made.evaluate()["eval_objective/scores"]
        found["asked of one"] = list(asked)
        rank = made.accelerator.process_index
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        made.close()


def _meta(module: Any) -> bool:
    return next(module.parameters()).is_meta


if __name__ == "__main__":
    main()
