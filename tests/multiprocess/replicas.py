"""A rank that is given models of its own, and writes how far those it trains and scores with are from rank 0's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig

from trl_realloc import PPOTrainer
from trl_realloc.engines.quantized import quantized_layers, stored
from trl_realloc.engines.training.tensor_parallel import box_of, local
from trl_realloc.engines.training.weight_source import fill
from trl_realloc.plan.dataflow import Role
from trl_realloc.realloc.layout import whole
from trl_realloc.runtime.parameters.replica_check import ReplicaError, check_replicas


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    results: dict[str, Any] = {}
    for name, case in options["cases"].items():
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # as processes have it before a seed is set
        made = trainer(folder, case)
        rank = made.accelerator.process_index
        models = made.policy_model, made.setup.roles[Role.CRITIC].load[0]()
        fill(models[1], torch.device("cpu"))  # by path: its parameters are read by its engine
        expected = [{n: tensor.clone() for n, _, tensor in tensors(model)} for model in models]
        made.placement.start()
        dist.broadcast_object_list(expected, 0)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, distances(made, *expected))
        results[name] = {role: max(d.get(role, 0.0) for d in told) for role in {r for d in told for r in d}}
        if case.get("parts_on") == rank:
            next(iter(made.placement.engine("actor.train").parts().values()))[0][1].view(-1)[0] += 1e-3
        try:
            check_replicas(made.placement.engine("actor.train"), made.placement.group("actor.train"), "actor")
        except ReplicaError as error:
            (folder / f"{name}-{rank}.txt").write_text(str(error))
        dist.barrier()
        made.close()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))


def trainer(folder: Path, case: dict[str, Any]) -> PPOTrainer:
    rank = int(__import__("os").environ["RANK"])
    given: dict[str, Any] = {"model": tiny.policy(seed=rank), "value_model": tiny.classifier(seed=10 + rank)}
    if bits := case.get("quantized"):
        given["model"] = tiny.quantized(folder / f"base-{rank}", seed=rank, **bits)
    if case.get("lora"):
        how = {"init_lora_weights": False, "use_dora": case.get("dora", False)}
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **how)
    if case.get("policy_by_path"):
        given["model"] = str(folder.parent / "policy")
    if case.get("critic_by_path"):
        given["value_model"] = str(folder.parent / "policy")
    torch.manual_seed(rank)
    return tiny.trainer(folder, given=given, plan=case["plan"], per_device_train_batch_size=4)


def tensors(model: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Name, position and values of each part of a parameter, and of the scales of quantized weights."""
    yield from ((name, box_of(p), local(p.data)) for name, p in model.named_parameters())
    for name, layer in quantized_layers(model):
        yield from ((f"{name} {number}", whole(t.shape), t) for number, t in enumerate(stored(layer)))


def distances(made: PPOTrainer, policy: dict[str, Any], critic: dict[str, Any]) -> dict[str, float]:
    """The largest difference of what this rank holds of each role, and of each copy of it, from rank 0's."""
    placement = made.placement
    base = {n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in policy.items()}
    engines = {
        "actor": (placement.engine("actor.train"), policy),
        "critic": (placement.engine("critic.train"), critic),
        "reference": (placement.engine("reference.forward"), base),
        **{
            call: (e, policy if "actor" in call else critic)
            for call in placement.copies
            for e in placement.engines[call]
        },
    }
    found = {}
    for role, (engine, expected) in engines.items():
        if engine is None:
            continue
        if getattr(engine, "stage", 0) == 3:
            held = [(name, box, part) for name, parts in engine.parts().items() for box, part in parts]
        else:
            held = [(name, box, part) for name, box, part in tensors(engine.head.model) if part.numel()]
        assert held
        gaps = [part - expected[n][tuple(slice(a, b) for a, b in box)] for n, box, part in held]
        found[role] = max(float(gap.abs().max()) for gap in gaps if gap.numel())
    return found


if __name__ == "__main__":
    main()
