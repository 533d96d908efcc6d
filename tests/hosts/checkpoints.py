"""A rank of runs that each resume, or are refused, one after the other in one job: what each said is written on every
host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny
import torch.distributed as dist

from trl_realloc.trainer.checkpoint import CheckpointError


FIRST, SECOND = ({"mesh": rank, "engine": "zero", "dp": 1} for rank in "01")
PLAN = {
    "cluster": {"nodes": 2, "devices_per_node": 1},
    "calls": {
        "actor.generate": {**FIRST, "engine": "transformers"},
        "reward.forward": FIRST,
        "actor.train": FIRST,
        "reference.forward": SECOND,
        "critic.forward": SECOND,
        "critic.train": SECOND,
    },
}
OPTIONS: dict[str, Any] = {
    "plan": PLAN,  # the policy is trained on the first host, the critic on the second
    "save_strategy": "steps",
    "save_steps": 1,
    "per_device_train_batch_size": 4,
    "num_ppo_epochs": 1,
    "response_length": 6,
    "max_steps": 3,
}


def main() -> None:
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    said: dict[str, str] = {}
    for name, resume in runs.items():
        made = tiny.trainer(folder / name, **OPTIONS)
        try:
            made.train(resume_from_checkpoint=resume)
        except CheckpointError as error:
            said[name] = str(error)
        made.close()
    (folder / "said.json").write_text(json.dumps(said))
    dist.barrier()


if __name__ == "__main__":
    main()
