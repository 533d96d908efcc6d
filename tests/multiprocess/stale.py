"""A rank that trains runs one after another under a plan with a staleness, on the same engines, and writes what was
drawn and logged.

Options: `config` of the trainer, `plan`, and `runs`. A run has a name and may have `resume` (a checkpoint's folder in
this job's), numbers of updates after which a callback acts: `saves`, `evaluates`, `stops`, and `sets`: settings that it
changes at the beginning, on the first process alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import TrainerCallback

from trl_realloc.algorithms.corrections import POLICY_VERSIONS


class Acts(TrainerCallback):
    """Saves, evaluates and stops after the updates that a run's options name."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for name, value in self.options.get("sets", {}).items() if state.is_world_process_zero else ():
            setattr(args, name, value)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for action, what in (("saves", "save"), ("evaluates", "evaluate"), ("stops", "training_stop")):
            if state.global_step in self.options.get(action, ()):
                setattr(control, f"should_{what}", True)


def train(made: Any, folder: Path, options: dict[str, Any]) -> None:
    rank, samples, execute = made.accelerator.process_index, list[dict[str, Any]](), made.executor.run

    def run(*args: Any, **kwargs: Any) -> Any:
        iteration = execute(*args, **kwargs)
        if POLICY_VERSIONS in iteration.samples:
            columns = ("prompts", "responses", "logprobs", "proximal_logprobs", POLICY_VERSIONS)
            samples.append(
                {name: [row.tolist() for row in iteration.samples.ragged(name).rows()] for name in columns}
                | {"step": args[1], "spans": [(s.call, s.device, s.start, s.end) for s in iteration.spans]}
            )
        return iteration

    made.executor.run = run
    acts = Acts(options)
    made.add_callback(acts)
    checkpoint = options.get("resume")
    made.train(resume_from_checkpoint=str(folder / checkpoint) if checkpoint else None)
    made.remove_callback(acts)
    made.executor.run = execute
    written = {"log": made.state.log_history, "samples": samples}
    (folder / f"{options['name']}-{rank}.json").write_text(json.dumps(written))
    made.accelerator.wait_for_everyone()


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    given = {"train_dataset": tiny.prompts(24), "eval_dataset": tiny.prompts(8)}
    made = tiny.trainer(folder / "run", given=given, plan=options["plan"], **options["config"])
    for run in options["runs"]:
        train(made, folder, run)
    made.close()
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
