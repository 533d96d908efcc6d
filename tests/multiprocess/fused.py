"""A rank that trains a policy and a value model in one fused pipeline, beside one whole copy of each.

Writes `<case>.json` on rank 0: the largest difference in statistics, parameters and optimizer state; and in 16 bits,
as `rounding <name>`, that of the whole copies and copies in float32.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from split import CPU, adagrad, batch, deal, gap, groups, head_of, optimizer, with_router_loss
from whole_state import whole_state

from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.algorithms.ppo import PolicyLoss, ValueLoss
from trl_realloc.algorithms.router_loss import ROUTER_COUNTS
from trl_realloc.algorithms.trainer_loss import LinearLoss
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training import stage_run
from trl_realloc.engines.training.fused_training import FusedShare, FusedTraining
from trl_realloc.engines.training.megatron import MegatronEngine
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.engines.training.stage_figures import FusedShape
from trl_realloc.engines.training.stage_messages import StageTask
from trl_realloc.engines.training.stage_run import Orders
from trl_realloc.runtime.fused.orders import FusedOrders


HEADS = ("policy", "value")
LOSSES = (PolicyLoss(0.2), ValueLoss(0.2, 0.1))


def infinite(outputs: Any, micro: Any) -> Any:
    """The value loss, which is infinite for one sample."""
    value, statistics = LOSSES[1](outputs, micro)
    spoiled = torch.where(micro.tensor("index") == 4, torch.inf, 0.0)
    return value + spoiled.sum(), {n: s + spoiled if n.endswith("_loss") else s for n, s in statistics.items()}


def at_random(draw: random.Random) -> Callable[[FusedShape], Orders]:
    """Any order that does not end in a deadlock; neighbours may take the micro-batches in different orders."""

    def orders(shape: FusedShape) -> Orders:
        size = len(shape.figures[0])
        made: list[list[StageTask]] = [[] for _ in range(size)]
        waiting = []  # for each micro-batch, what is left to be done: (stage, task)
        for model, copies in enumerate(shape.tokens):
            stages = size // len(copies)
            for copy, tokens in enumerate(copies):
                line = list(range(copy * stages, (copy + 1) * stages))[:: -1 if model else 1]
                for number in range(len(tokens)):
                    forwards = [(stage, StageTask(model, number, False)) for stage in line]
                    waiting.append(forwards + [(stage, StageTask(model, number, True)) for stage in line[::-1]])
        while waiting := [left for left in waiting if left]:
            stage, task = draw.choice(waiting).pop(0)
            made[stage].append(task)
        return made

    return orders


def values_of(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: column.values for name, column in outputs.items()}


def run(case: Mapping[str, Any], name: str, world: int) -> dict[str, float]:
    rank, tp, stages = dist.get_rank(), case.get("tp", 1), case["pp"]
    norm = case.get("max_grad_norm", 0.05)
    torch.use_deterministic_algorithms(bool(case.get("deterministic")))

    def engine(kind: Any, head: str, *place: Any, precision: str = case.get("kind", ""), **more: Any) -> Any:
        of_head = {**case, **case.get(head, {})}
        make = {"adagrad": adagrad}.get(case.get("optimizer", ""), optimizer)
        dtype = torch.bfloat16 if precision == "autocast" else None
        made = head_of(of_head, head)
        if precision == "bfloat16":
            made.to(torch.bfloat16)
        return kind(made, *place, CPU, make_optimizer=make, max_grad_norm=norm, compute_dtype=dtype, **more)

    whole = [engine(ReplicatedEngine, head, MeshGroup((rank,), rank)) for head in HEADS]
    exact = []
    if "kind" in case:
        exact = [engine(ReplicatedEngine, head, MeshGroup((rank,), rank), precision="") for head in HEADS]
    places = [groups(world, tp, stages[0]), groups(world, tp, stages[1]).reversed()]
    more = {"shard_optimizer": bool(case.get("shard"))}
    split: list[MegatronEngine] = [
        engine(MegatronEngine, head, place, **more) for head, place in zip(HEADS, places, strict=True)
    ]
    orders = FusedOrders() if not case.get("random") else at_random(random.Random(name))
    fused = FusedTraining((split[0], split[1]), orders)
    samples = batch(case.get("samples", 11))
    budgets = case.get("tokens", [40, 40])
    losses: list[Any] = [LOSSES[0], infinite if case.get("refused") else LOSSES[1]]
    policy = {**case, **case.get("policy", {})}
    if "auxiliary" in policy:
        counts = whole[0].forward(samples, 1000)[ROUTER_COUNTS]
        samples = with_router_loss(samples, counts, policy["auxiliary"], policy["config"]["num_experts_per_tok"])
        losses[0] = LinearLoss()
    finite = losses[0], LOSSES[1]
    differences: dict[str, float] = {}

    def differ(what: str, made: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        differences[what] = max(differences.get(what, 0.0), gap(made, expected))

    for _ in range(2):
        shares = []
        for head, pp, loss, budget in zip(HEADS, stages, losses, budgets, strict=True):
            of_head = {**case, **case.get(head, {})}
            own = deal(samples, world // (tp * pp), rank // (tp * pp), of_head)
            shares.append(FusedShare(own, loss, budget, 1e-2))
        outcomes = fused.train((shares[0], shares[1]))
        for model, (share, made) in enumerate(zip(shares, outcomes, strict=True)):
            if isinstance(made, NonFiniteError):
                assert (model, made.sample) == (1, 4)
                with pytest.raises(NonFiniteError, match="the loss of sample 4 of the batch"):
                    whole[model].train(samples, share.loss, 60, 1e-2)
                continue
            assert not (case.get("refused") and model), "the value model's step is refused"
            expected = whole[model].train(samples, share.loss, 60, 1e-2)
            at = share.samples.tensor("index")
            differ("statistics", made, {key: sums[at] for key, sums in expected.items()} if len(at) else {})
            norms = split[model].grad_norm, whole[model].grad_norm
            differences["norm"] = max(differences.get("norm", 0.0), abs(norms[0] / norms[1] - 1))
            if exact:
                differ("rounding statistics", exact[model].train(samples, share.loss, 60, 1e-2), expected)
                rounding = abs(exact[model].grad_norm / whole[model].grad_norm - 1)
                differences["rounding norm"] = max(differences.get("rounding norm", 0.0), rounding)
    for model, share in enumerate(shares):  # in the reversed pipeline by itself
        made = split[model].forward(share.samples, budgets[model])
        if len(share.samples):
            differ("scores", values_of(made), scores := values_of(whole[model].forward(share.samples, 1000)))
            if exact:
                differ("rounding scores", values_of(exact[model].forward(share.samples, 1000)), scores)
        split[model].train(share.samples, finite[model], budgets[model], 1e-2)
        for engine_of in (whole, exact)[: 1 + bool(exact)]:
            engine_of[model].train(samples, finite[model], 60, 1e-2)
        states = [whole_state(split[model]), *(whole_state(each[model]) for each in (whole, exact) if each)]
        for key in ("master", "sum") if case.get("optimizer") == "adagrad" else ("master", "exp_avg", "exp_avg_sq"):
            if rank == 0:
                made, expected, *of_exact = ({n: c[key] for n, c in s["parameters"].items()} for s in states)
                differ(f"{HEADS[model]} {key}", made, expected)
                for rounded in of_exact:
                    differ(f"rounding {HEADS[model]} {key}", rounded, expected)
    told: list[dict[str, float]] = [{} for _ in range(world)]
    dist.all_gather_object(told, differences)
    return {key: max(each.get(key, 0.0) for each in told) for key in told[0]}


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in options["cases"].items():
        with pytest.MonkeyPatch.context() as patched:
            if case.get("untagged"):  # as on accelerators
                patched.setattr(stage_run, "is_accelerator", lambda device: True)
            results = run(case, name, int(os.environ["WORLD_SIZE"]))
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(results))
            print(name, results, flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in split.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
