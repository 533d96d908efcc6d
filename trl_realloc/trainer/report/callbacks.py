"""Callbacks for users: metrics as a JSON-lines file, and metrics in the progress bar."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class MetricsWriter(TrainerCallback):
    """Appends every log to a file as one JSON line with its `step`. A resumed run first removes lines after the resumed
    step, so that no step appears twice. A training from the start removes all lines except those of evaluations that
    this trainer logged before it.

    Args:
        path: target file. Its folder is created.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._is_training, self._before_training = False, list[str]()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        old, self._before_training, self._is_training = self._before_training, [], True
        if state.global_step and self.path.exists():
            old = self.path.read_text(encoding="utf-8").splitlines()
        kept_lines = [line for line in old if (step := _step_of(line)) is not None and step <= state.global_step]
        new = self.path.with_name(f"{self.path.name}.new")  # a kill during writing loses no metrics
        new.write_text("".join(f"{line}\n" for line in kept_lines), encoding="utf-8")
        new.replace(self.path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # an evaluation may be logged before any training
            line = json.dumps({"step": state.global_step, **logs})
            if not self._is_training:
                self._before_training.append(line)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_training = False


def _step_of(line: str) -> int | None:
    """The step of a line; `None` for an incomplete line, left by a crash or a full disk."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


class CompactProgress(ProgressCallback):
    """Shows a few metrics in the progress bar, instead of a line with all metrics at every log.

    `trainer.remove_callback(ProgressCallback)`, then `trainer.add_callback(CompactProgress())`.
    """

    SHOWN = {  # PPO's, and GRPO's and RLOO's
        "objective/scores": "score",
        "reward": "reward",
        "objective/kl": "kl",
        "kl": "kl",
        "completions/mean_length": "length",
        "tokens/s": "tokens/s",
    }

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if self.training_bar is not None and logs:
            shown = {name: f"{logs[key]:,.4g}" for key, name in self.SHOWN.items() if logs.get(key) is not None}
            self.training_bar.set_postfix(shown)
