"""A rank of two that trains by the token gradients of a loss under ZeRO, tensor and pipeline groups, beside one whole
copy that trains by the loss itself. In float64.

Writes `<case>.json` on rank 0: the largest difference in parameters, relative difference in gradient norms, and the
number of samples of each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import in_float64


in_float64.read_float32_as_float64()  # before anything that computes is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from split import CPU, SIZES, deal, gap, groups, head_of, optimizer  # noqa: E402
from token_grads import bonus, clipped, samples_of, sequence_level, with_grads  # noqa: E402

from trl_realloc.algorithms.rollout import Rollouts  # noqa: E402
from trl_realloc.algorithms.trainer_loss import LinearLoss, without_zero_grads  # noqa: E402
from trl_realloc.engines.mesh_group import MeshGroup  # noqa: E402
from trl_realloc.engines.training import heads, sliced_head  # noqa: E402
from trl_realloc.engines.training.megatron import MegatronEngine  # noqa: E402
from trl_realloc.engines.training.replicated import ReplicatedEngine  # noqa: E402
from trl_realloc.engines.training.zero import ZeroEngine  # noqa: E402


LOSSES = {"clipped": clipped, "sequence": sequence_level, "bonus": bonus}


def with_zeros(samples: Rollouts, every: int) -> Rollouts:
    """The samples with an advantage of 0 for every one of so many."""
    kept = (samples.tensor("index") % every != 0).to(samples.tensor("sequence_advantages").dtype)
    advantages = samples.ragged("advantages")
    return samples.plus(
        advantages=advantages.like(advantages.values * advantages.spread(kept)),
        sequence_advantages=samples.tensor("sequence_advantages") * kept,
    )


def run(case: dict[str, Any], alone: Any) -> dict[str, Any]:
    rank, tp, pp, stage = dist.get_rank(), case.get("tp", 1), case.get("pp", 1), case.get("zero")
    heads.MAX_WHOLE_ON_CPU, sliced_head.SLICE_ON_CPU = (0, 5 * 50) if case.get("slices") else (1 << 26, 1 << 24)
    options: dict[str, Any] = {"make_optimizer": optimizer, "max_grad_norm": 0.05}
    made, split = groups(2, tp, pp), head_of(case, "policy")
    whole = ReplicatedEngine(head_of(case, "policy"), MeshGroup((rank,), rank), CPU, **options)
    engine: Any = (
        ZeroEngine(split, made.mesh, CPU, stage=stage, alone=alone, **options)
        if stage
        else MegatronEngine(split, made, CPU, **options)
    )
    loss, dp = LOSSES[case["loss"]], 2 // (tp * pp)
    samples = samples_of(whole, 11, SIZES["vocab_size"])
    counts, norms = list[int](), list[float]()
    # all samples, all but every third, none
    for batch in (samples, samples, with_zeros(samples, 3), with_zeros(samples, 1)):
        linear = without_zero_grads(with_grads(batch, loss, whole))
        own = deal(linear, dp, rank // (tp * pp), {})
        whole.train(batch, loss, 60, 1e-3)
        # gradients that are dropped, then those of the step in two parts, with a forward between
        engine.add_gradients(own, LinearLoss(), 25)
        engine.drop()
        half = len(own) // 2
        engine.add_gradients(own.select(range(half)), LinearLoss(), 25)
        engine.forward(own, 25)
        engine.train(own.select(range(half, len(own))), LinearLoss(), 25, 1e-3)
        counts.append(len(linear))
        norms.append(abs(engine.grad_norm - whole.grad_norm) / max(whole.grad_norm, 1e-12))
    weights: dict[str, torch.Tensor] = {}
    for bucket in engine.export(1 << 14, merged=False):
        weights.update({name: tensor.clone() for name, tensor in bucket})
    found = {"norms": max(norms), "counts": counts}
    if rank == 0:
        found["parameters"] = gap({n: p.detach() for n, p in whole.head.model.named_parameters()}, weights)
    engine.close()
    return found


def main(folder: Path, cases: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own_groups = [dist.new_group([rank]) for rank in range(2)]
    for name, case in cases.items():
        found = run(case, own_groups[dist.get_rank()])
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))
            print(name, found, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2])["cases"])
