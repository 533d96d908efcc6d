"""Callbacks of this package's own: the metrics of a run as a file for programs, and as one line for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class MetricsWriter(TrainerCallback):
    """Appends every log as one JSON line with its `step`. On resuming, lines beyond the resumed step are dropped first,
    so that no step stands there twice.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        old = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in old if json.loads(line)["step"] <= state.global_step] if state.global_step else []
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class CompactProgress(ProgressCallback):
    """The progress bar with the few numbers that one watches, in place of a line of all metrics at every log.

    `trainer.remove_callback(ProgressCallback)`, then `trainer.add_callback(CompactProgress())`.
    """

    SHOWN = {
        "score": "objective/scores",
        "kl": "objective/kl",
        "length": "completions/mean_length",
        "tokens/s": "tokens/s",
    }

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is not None and logs:
            shown = {name: f"{logs[key]:,.4g}" for name, key in self.SHOWN.items() if key in logs}
            self.training_bar.set_postfix(shown)
