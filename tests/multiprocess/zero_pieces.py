"""A rank of two that saves a model under ZeRO-3, and counts the largest tensor that is made meanwhile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.models import load_policy
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.zero import ZeroEngine
from trl_realloc.trainer.checkpoint import model_files as models
from trl_realloc.trainer.checkpoint.write_errors import WriteErrors


class LargestMade(TorchDispatchMode):
    """Bytes of the largest tensor with memory of its own that an operation of this thread returns inside."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = torch.is_tensor(result) and not result.is_meta and not result._is_view() and "empty" in str(func)
        self.bytes = max(self.bytes, result.nbytes if is_new else 0)
        return result


def main(folder: Path, cases: dict[str, int]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = MeshGroup((0, 1), rank, dist.group.WORLD)
    alone = [dist.new_group([at]) for at in (0, 1)][rank]
    results = {}
    for name, limit in cases.items():
        model = load_policy(str(folder.parent / name), trained=True)
        made = ZeroEngine(PolicyHead(model, 1.0), mesh, torch.device("cpu"), stage=3, alone=alone, make_optimizer=adamw)
        problems = WriteErrors(rank, dist.group.WORLD)
        models.SAVE_BUCKET_BYTES = limit
        with LargestMade() as largest:
            models.write_model(made, mesh, folder / name, problems, max_shard_size="60KB")
        problems.settle("the model")
        results[name] = {"largest": largest.bytes, "parameters": [spec.bytes for spec in made.parameter_specs.values()]}
        made.close()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
