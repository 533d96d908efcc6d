"""A rank of runs that are stopped and go on by themselves: killed in mid-run under a launcher that starts it again, and
on hosts with a disk each, which two folders stand for. What came of each is written to the folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from test_plans import plan
from transformers import TrainerCallback

from trl_realloc import PPOTrainer
from trl_realloc.trainer.checkpoint import SaveError


OPTIONS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "per_device_train_batch_size": 4,
    "response_length": 6,
    "num_ppo_epochs": 1,
    "lr_scheduler_type": "constant",  # of runs of different lengths the same rates
}
# the critic's parts are written by the second rank
APART = plan(2, actor="0", critic="1", reference="1", reward="0")
SWAPPED = plan(2, actor="1", critic="0", reference="1", reward="0")


class DiesOnce(TrainerCallback):
    """Kills rank 1 after its third update, before that is saved, in the launcher's first attempt."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def trained(folder: Path, resume: Any = None, **changes: Any) -> PPOTrainer:
    made = tiny.trainer(folder, callbacks=[DiesOnce()], **{**OPTIONS, **changes})
    made.train(resume_from_checkpoint=resume)
    return made


def weights_of(made: PPOTrainer) -> dict[str, torch.Tensor]:
    found = {name: tensor.contiguous() for name, tensor in tiny.weights(made).items()}
    made.close()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    again = trained(folder / "killed", "auto", max_steps=4, async_save=True)
    whole = trained(folder / "whole", max_steps=4)
    same = tiny.updates(again)[3:] == tiny.updates(whole)[3:]
    weights, other = weights_of(again), weights_of(whole)
    report: dict[str, Any] = {
        "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "same": same and all(torch.equal(weights[name], other[name]) for name in other),
    }
    # two hosts, each with a disk of its own: one path that is another folder for each rank
    (folder / f"host{rank}").mkdir(exist_ok=True)
    os.chdir(folder / f"host{rank}")
    own = Path("out")
    trained(own, plan=APART, max_steps=2).close()
    report["written"] = sorted(p.relative_to(own / "checkpoint-2").as_posix() for p in own.glob("checkpoint-2/**/*.*"))
    further = weights_of(trained(own, "auto", plan=APART, max_steps=3))
    torch.save(further, folder / f"further-{rank}.pt")
    straight = weights_of(trained(Path("straight"), plan=APART, max_steps=3))
    report["same on its own disk"] = all(torch.equal(further[name], straight[name]) for name in straight)
    report["left"] = sorted(path.name for path in own.glob("checkpoint-*"))
    # a disk that cannot take its part; then a host that has lost it
    if rank == 1:
        (own / "checkpoint-4.tmp").write_text("in the way")
        os.chmod(own / "checkpoint-4.tmp", 0)
    try:
        trained(own, "auto", plan=APART, max_steps=4)
    except SaveError as error:
        report["unwritten"] = str(error)
    report["kept"] = sorted(path.name for path in own.glob("checkpoint-?"))
    report["had"] = sorted(path.name for path in own.glob("checkpoint-3/training_state/*.distcp"))
    # each rank trains the other's role, whose parts the other's disk has
    made = tiny.trainer(own, **{**OPTIONS, "plan": SWAPPED, "max_steps": 4})
    checkpoint = made.run.checkpoints.find("auto")
    assert checkpoint is not None
    made.run.placed.start()
    made.run.checkpoints.load_models(checkpoint)
    expected = torch.load(folder / f"further-{1 - rank}.pt")
    swapped = weights_of(made)
    report["same in the other's place"] = swapped.keys() == expected.keys() and all(
        torch.equal(swapped[name], tensor) for name, tensor in expected.items()
    )
    report["has"] = sorted(path.name for path in own.glob("checkpoint-3/training_state/*.distcp"))
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
