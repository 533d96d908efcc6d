"""A rank of two that trains under DeepSpeed's settings: whole mini-batches, and the same added by and by. Writes how
much they differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from replay import rollouts
from torch import Tensor, nn

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training.packed_forward import PolicyHead
from trl_realloc.engines.training.zero import ZeroEngine


SAMPLES, STEPS, RATE, TOKENS, DIVISOR = 9, 3, 3e-3, 30, 8.0
# by rank the samples of each `add`: both, one rank alone, more on one than on the other
PARTS = [([0, 1], [2, 3]), ([], [4]), ([5, 6, 7], [8])]
SCORED = [0, 3, 5]


def loss(scale: float) -> Any:
    def of_tokens(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        column = outputs["logprobs"]
        return -scale * column.values.sum() / 10, {"tokens": column.lengths.float()}

    return of_tokens


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """With an eps above the rounding of gradients, which Adam would make steps of."""
    return torch.optim.AdamW(module.parameters(), lr=0.0, eps=1e-4)


def weights(engine: ZeroEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.export() for name, tensor in bucket}


def main(folder: Path, cases: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = MeshGroup((0, 1), rank, dist.group.WORLD)
    alone = [dist.new_group([at]) for at in (0, 1)][rank]
    batch = rollouts(SAMPLES)
    own = [part[rank] for part in PARTS]
    share = batch.select([at for part in own for at in part])
    found = {}
    for name, case in cases.items():

        def build(case: Any = case) -> ZeroEngine:
            head = PolicyHead(tiny.policy(), 1.0)
            options = {"stage": case["stage"], "config": case["config"], "max_grad_norm": 0.5, "alone": alone}
            return ZeroEngine(head, mesh, torch.device("cpu"), make_optimizer=adamw, **options)

        whole, added = build(), build()
        start, differences = weights(whole), []
        for step in range(STEPS):
            statistics = whole.train(share, loss(1.0), TOKENS, RATE)
            if step == 1:
                added.add(batch.select(own[2]), loss(5.0), TOKENS)
                added.drop()
            parts = []
            for at, of_part in enumerate(own):
                parts.append(added.add(batch.select(of_part), loss(1 / DIVISOR), TOKENS))
                if at == 1:  # a forward of the role between them
                    added.forward(batch.select(SCORED[rank:]), TOKENS)
            together = {key: torch.cat([part[key] for part in parts if part]) for key in statistics}
            added.step(share, together, RATE, DIVISOR)
            norms = [float(engine.grad_norm) for engine in (whole, added)]
            assert all(torch.equal(together[key], statistics[key]) for key in statistics)
            differences.append(abs(norms[0] - norms[1]) / norms[0])
        ours, expected = weights(added), weights(whole)
        moved = max(float((tensor - start[key]).abs().max()) for key, tensor in expected.items())
        apart = max(float((tensor - ours[key]).abs().max()) for key, tensor in expected.items())
        found[name] = {"norms": max(differences), "moved": moved, "apart": apart, "version": added.version}
        for engine in (whole, added):
            engine.close()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
