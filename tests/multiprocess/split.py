"""A rank that trains and scores tiny models of many families under many splits. Rank 0 has one whole copy of each too.

Writes `<case>.json` on rank 0: the largest difference in statistics, scores, parameters and optimizer state, and, if
the case asks for it, of the memory of the fullest rank from the planner's estimate, as a share of it, and of a
mixture's auxiliary loss, relative.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replay import rollouts
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from whole_state import load_whole, whole_state

from trl_realloc.algorithms.ppo import PolicyLoss, ValueLoss
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.router_loss import (
    ROUTER_COUNTS,
    ROUTER_GRADS,
    ROUTER_PROBS,
    balance_grads,
    balance_loss,
    over_samples,
    with_router_grads,
)
from trl_realloc.algorithms.trainer_loss import ENTROPY_GRADS, LOGPROB_GRADS, LinearLoss
from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups, split_ranks
from trl_realloc.engines.requests import SamplingMask
from trl_realloc.engines.training import heads, sliced_head
from trl_realloc.engines.training.expert_routing import number_of_experts
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ValueHead
from trl_realloc.engines.training.megatron import MegatronEngine
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.plan.algorithm_graphs import ROUTES
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.batching import balance
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.realloc.layout import megatron_layout
from trl_realloc.trainer.checkpoint.model_files import write_model
from trl_realloc.trainer.checkpoint.write_errors import WriteErrors


SIZES = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "num_labels": 1}
CPU = torch.device("cpu")
_groups: dict[tuple[int, int, int], SplitGroups] = {}


def groups(world: int, tp: int, pp: int) -> SplitGroups:
    """Made once for each split: all ranks make all groups, in one order."""
    rank = dist.get_rank()
    if (world, tp, pp) not in _groups:
        ranks = tuple(range(world))
        mine: dict[str, MeshGroup] = {"mesh": MeshGroup(ranks, rank, dist.group.WORLD)}
        for kind, all_of_it in split_ranks(ranks, tp, pp).items():
            for members in all_of_it:
                group = dist.new_group(list(members))
                line = kind == "ends" and rank in mine["pp"].ranks and set(members) <= set(mine["pp"].ranks)
                if rank in members or line:
                    mine[kind] = MeshGroup(members, rank, group)
        _groups[world, tp, pp] = SplitGroups(**mine)
    return _groups[world, tp, pp]


def model_of(case: Mapping[str, Any], head: str) -> Any:
    torch.manual_seed(7)
    config = AutoConfig.for_model(case.get("family", "llama"), **{**SIZES, **case.get("config", {})})
    kind = AutoModelForCausalLM if head == "policy" else AutoModelForSequenceClassification
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # a norm of ones would hide where it is applied
                parameter.add_(0.1 * torch.randn(parameter.shape))
            if "score" in name:
                parameter.mul_(10)
    if "lora" in case:
        from peft import LoraConfig, get_peft_model

        wanted = {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], **case["lora"]}
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **wanted))
    for part in case.get("frozen", ()):
        model.get_submodule(part).requires_grad_(False)
    return model


def head_of(case: Mapping[str, Any], head: str) -> RoleHead:
    model = model_of(case, head)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sampling_mask = SamplingMask(*case["support"]) if "support" in case else None
    if head == "value":
        return ValueHead(model)
    routes = bool(case.get("routes"))
    balanced = "auxiliary" in case
    return PolicyHead(model, 0.7, sampling_mask, router_sums=balanced, replays_routes=routes, records_routes=routes)


def adagrad(module: nn.Module) -> torch.optim.Optimizer:
    """It makes its state with itself, over the whole model's parameters."""
    return torch.optim.Adagrad([p for p in module.parameters() if p.requires_grad], initial_accumulator_value=0.1)


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1]},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1, eps=1e-4)


def given(model: nn.Module) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """As a user's own optimizer: it knows the parameters that the model has now."""
    named = list(model.named_parameters())

    def part(module: nn.Module) -> torch.optim.Optimizer:
        here = {id(p) for p in module.parameters()}
        groups = [[p for n, p in named if id(p) in here and ("mlp" in n) == inner] for inner in (True, False)]
        return torch.optim.AdamW([{"params": group} for group in groups], lr=0.1, eps=1e-4)

    return part


def batch(n: int) -> Rollouts:
    """Samples of which four have the same long prompt."""
    made = rollouts(n)
    rows = [torch.arange(3, 21) if at % 3 == 1 else row for at, row in enumerate(made.ragged("prompts").rows())]
    made = made.plus(prompts=Ragged.of(rows, torch.long))
    responses = made.ragged("responses")
    waves = torch.sin(torch.arange(len(responses.values)).float())
    return made.plus(
        logprobs=responses.like(-4.5 + 0.1 * waves),
        advantages=responses.like(waves),
        returns=responses.like(0.5 * waves),
        old_values=responses.like(0.2 * waves),
        policy_weight=torch.full((n,), 1 / len(responses.values)),
        value_weight=torch.full((n,), 1 / len(responses.values)),
    )


def deal(samples: Rollouts, dp: int, replica: int, case: Mapping[str, Any]) -> Rollouts:
    if case.get("idle"):  # one replica has all, the others none
        return samples if replica == 0 else samples.select([])
    return samples.select(balance(samples.lengths.tolist(), dp)[replica])


def with_router_loss(samples: Rollouts, counts: Ragged, coefficient: float, top_k: int) -> Rollouts:
    """The samples with what `LinearLoss` reads: gradients of tokens, and of the auxiliary loss over all samples."""
    of_tokens = samples.ragged("advantages")
    grads = of_tokens.like(of_tokens.values / len(of_tokens.values))
    of_routers = with_router_grads(counts, coefficient * balance_grads(over_samples(counts), top_k))
    return samples.plus(**{LOGPROB_GRADS: grads, ENTROPY_GRADS: grads, ROUTER_GRADS: of_routers})


def with_other_routes(samples: Rollouts, chosen: Ragged, experts: int) -> Rollouts:
    """The samples with other experts than the routers choose, of all tokens but the last, as engines record them."""
    others = [(rows[:-1].int() + 1) % experts for rows in chosen.rows()]
    return samples.plus(**{ROUTES: Ragged.of(others, chosen.values.dtype)})


def unlike_routes(split: MegatronEngine, samples: Rollouts, expected: Ragged, budget: int) -> float:
    """1 if a forward without routes records others than these."""
    recorded = split.forward(samples.only(("index", "prompts", "responses")), budget)[ROUTES]
    return float(not torch.equal(recorded.values, expected.values))


def auxiliary_gap(outputs: Mapping[str, Ragged], scores: Mapping[str, Ragged], top_k: int, copies: int) -> float:
    """The difference of the auxiliary loss over all replicas, each of so many ranks, from the whole model's."""
    ours, theirs = ([over_samples(of[name]) for name in (ROUTER_COUNTS, ROUTER_PROBS)] for of in (outputs, scores))
    for sums in ours:
        dist.all_reduce(sums.div_(copies))
    return abs(float(balance_loss(*ours, top_k) / balance_loss(*theirs, top_k)) - 1)


def gap(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference, of numbers above 1 relative to them (statistics are sums over a sample's tokens)."""
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    gaps = [(one[name] - other[name]).abs() / other[name].abs().clamp(min=1) for name in one]
    return max((float(each.max()) for each in gaps), default=0.0)


def run(case: Mapping[str, Any], head: str, world: int) -> dict[str, float]:
    rank, tp, pp = dist.get_rank(), case.get("tp", 1), case.get("pp", 1)
    dp = world // (tp * pp)
    # of this case alone: the head's logits in slices of five rows, in the whole model too
    heads.MAX_WHOLE_ON_CPU, sliced_head.SLICE_ON_CPU = (0, 5 * 50) if case.get("slices") else (1 << 26, 1 << 24)
    loss: Any = PolicyLoss(0.2) if head == "policy" else ValueLoss(0.2, 0.1)
    samples = batch(11)
    norm = case.get("max_grad_norm", 0.05)

    def engine(kind: Any, *place: Any, **more: Any) -> Any:
        made = head_of(case, head)
        make = {"adagrad": adagrad, "given": given(made.model)}.get(case.get("optimizer", ""), optimizer)
        return kind(made, *place, CPU, make_optimizer=make, max_grad_norm=norm, **more)

    whole = engine(ReplicatedEngine, MeshGroup((0,), 0)) if rank == 0 else None
    if whole is not None:
        whole.head.tree = lambda samples: None  # each prompt is computed for its sample alone

    def of_whole(compute: Callable[[Any], Any]) -> Any:
        """What rank 0 computes with the whole model, on every rank."""
        found = [compute(whole) if whole is not None else None]
        dist.broadcast_object_list(found)
        return found[0]

    chosen: Ragged | None = None
    if head == "policy" and case.get("routes"):
        chosen = of_whole(lambda w: w.forward(samples, 1000))[ROUTES]
        samples = with_other_routes(samples, chosen, of_whole(lambda w: number_of_experts(w.head.model)))
    is_balanced, top_k, scores = head == "policy" and "auxiliary" in case, 0, dict[str, Ragged]()
    if is_balanced:
        top_k, scores = case["config"]["num_experts_per_tok"], of_whole(lambda w: w.forward(samples, 1000))
        loss, samples = LinearLoss(), with_router_loss(samples, scores[ROUTER_COUNTS], case["auxiliary"], top_k)
    mine = deal(samples, dp, rank // (tp * pp), case)
    if case.get("memory"):
        gc.freeze()  # tensors that were made before are not counted
    split = engine(MegatronEngine, groups(world, tp, pp), shard_optimizer=bool(case.get("shard")))
    layout_gap(split, case, head, tp, pp, world)
    differences: dict[str, float] = {}
    budget = case.get("tokens", 40)
    if chosen is not None:
        differences["other recorded routes"] = unlike_routes(split, mine, chosen.select(mine.tensor("index")), budget)
        chosen = None  # it would count as the rank's memory
    held: list[int] = []
    if is_balanced:
        differences["auxiliary loss"] = auxiliary_gap(split.forward(mine, budget), scores, top_k, tp * pp)
    for _ in range(2):
        expected, expected_norm = of_whole(lambda w: (w.train(samples, loss, 60, 1e-2), w.grad_norm))
        hook = register_optimizer_step_pre_hook(lambda *_: held.append(held_bytes(whole) if case.get("memory") else 0))
        made = split.train(mine, loss, budget, 1e-2)
        hook.remove()
        at = mine.tensor("index")
        here = {name: sums[at] for name, sums in expected.items()} if len(mine) else {}
        differences["statistics"] = max(differences.get("statistics", 0.0), gap(made, here))
        differences["norm"] = max(differences.get("norm", 0.0), abs(split.grad_norm / expected_norm - 1))
    if case.get("memory"):
        gc.unfreeze()
        of_ranks: list[int] = [0] * world
        dist.all_gather_object(of_ranks, max(held, default=0))
        differences["memory"] = abs(max(of_ranks) / estimated_bytes(split.head.model.config, case, head, world) - 1)
    assert dp > 1 or split.head.shared_tokens > 0, "the split model computes the common prompt once"
    scores, ours = of_whole(lambda w: w.forward(samples, 1000)), split.forward(mine, budget)
    if len(mine):
        scored = Rollouts(index=samples.tensor("index"), **scores).select(mine.tensor("index"))
        differences["scores"] = gap(
            {name: scored.ragged(name).values for name in scores}, {name: c.values for name, c in ours.items()}
        )
    assert not case.get("slices") or (split.head.may_slice and of_whole(lambda w: w.head.may_slice))
    state, kept = of_whole(whole_state), whole_state(split)
    weights: dict[str, Tensor] = {}
    for bucket in split.export(1 << 14, merged=False):
        weights.update(bucket)
    if whole is not None:
        names = dict(whole.head.model.named_parameters())
        differences["parameters"] = gap({n: p.detach() for n, p in names.items()}, weights)
        for key in ("master", "sum") if case.get("optimizer") == "adagrad" else ("master", "exp_avg", "exp_avg_sq"):
            differences[key] = gap(*({n: c[key] for n, c in s["parameters"].items()} for s in (state, kept)))
        assert {n: float(c["step"]) for n, c in kept["scalars"].items()} == dict.fromkeys(state["parameters"], 2.0)
    # a checkpoint of the one goes on in the other
    fresh = engine(MegatronEngine, groups(world, tp, pp))
    load_whole(fresh, copy.deepcopy(state))
    loaded = whole_state(fresh)
    if rank == 0:
        same = [
            torch.equal(cell, loaded["parameters"][n][k])
            for n, c in state["parameters"].items()
            for k, cell in c.items()
        ]
        differences["bits lost in loading"] = float(not all(same))
    fresh.train(mine, loss, budget, 1e-2)
    resumed = whole_state(fresh)
    if whole is not None:
        whole.train(samples, loss, 60, 1e-2)
        after = whole_state(whole)
        differences["resumed"] = gap(*({n: c["master"] for n, c in s["parameters"].items()} for s in (after, resumed)))
    differences["files unlike save_pretrained's"] = unlike_files(split, case, head, weights)
    told: list[dict[str, float]] = [{} for _ in range(world)]
    dist.all_gather_object(told, differences)
    return {key: max(each.get(key, 0.0) for each in told) for key in told[0]}


def unlike_files(split: MegatronEngine, case: Mapping[str, Any], head: str, weights: Mapping[str, Tensor]) -> float:
    """How many files of the saved model are not those that `save_pretrained` writes of a whole one."""
    with tempfile.TemporaryDirectory() as folder:
        size = case.get("shard_size", "20KB")
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        problems = WriteErrors(dist.get_rank(), None)
        write_model(split, split.groups.mesh, ours, problems, max_shard_size=size)
        problems.settle("the model")
        if dist.get_rank():
            return 0.0
        model = model_of(case, head)
        model.load_state_dict(weights, strict=False)
        model.save_pretrained(theirs, max_shard_size=size)
        files = [{p.name: content(p) for p in of.iterdir() if p.suffix != ".md"} for of in (ours, theirs)]
        return float(len([name for name in {**files[0], **files[1]} if files[0].get(name) != files[1].get(name)]))


def content(path: Path) -> Any:
    """A file's bytes; a JSON file's values, because PEFT writes sets as lists in any order."""
    if path.suffix != ".json":
        return path.read_bytes()
    values = json.loads(path.read_text())
    return {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}


def held_bytes(whole: ReplicatedEngine | None) -> int:
    """Bytes of the tensors, and their gradients, that were made since `gc.freeze`, but for the whole model's."""
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if not tensor.is_meta]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    found = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    states = [] if whole is None or whole.optimizer is None else whole.optimizer.state.values()
    for value in (value for state in states for value in state.values() if isinstance(value, Tensor)):
        found.pop(value.untyped_storage().data_ptr(), None)
    return sum(found.values())


def estimated_bytes(config: Any, case: Mapping[str, Any], head: str, world: int) -> float:
    """The planner's estimate of the parameters, gradients and optimizer state of the fullest rank."""
    tp, pp = case.get("tp", 1), case.get("pp", 1)
    strategy = ParallelStrategy(world // (tp * pp), tp, pp, int(bool(case.get("shard"))))
    assignment = Assignment(DeviceMesh(0, world), strategy, "megatron")
    kind = "lm" if head == "policy" else "score"
    spec = ModelSpec.from_config(config, kind, bytes_per_element=4)
    pricing = Pricing(Cluster(1, world), Workload(8, 8, (8,)), AnalyticRates(DEVICES["h100"]))
    cost = pricing.price(Call(Role.ACTOR, CallKind.TRAIN, ()), [spec], assignment)
    return cost.static + cost.gradients


def layout_gap(engine: MegatronEngine, case: Mapping[str, Any], head: str, tp: int, pp: int, world: int) -> None:
    """What the engine holds is what the layout says that is made from the config alone."""
    if "lora" in case or "frozen" in case:
        return
    kind = "lm" if head == "policy" else "score"
    spec = ModelSpec.from_config(engine.head.model.config, kind, bytes_per_element=4)  # type: ignore[arg-type]
    expected = megatron_layout(spec, DeviceMesh(0, world), tp, pp).parts(dist.get_rank())
    held = {name: tuple(box for box, t in parts if t.numel()) for name, parts in engine.parts().items()}
    assert {name: boxes for name, boxes in held.items() if boxes} == expected


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in options["cases"].items():
        results = {head: run(case, head, int(os.environ["WORLD_SIZE"])) for head in case.get("heads", ["policy"])}
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(results))
            print(name, results, flush=True)
    dist.barrier()
    sys.stdout.flush()
    # Hundreds of gloo groups were made here. Taken down while other ranks take down theirs, gloo's threads now and then
    # abort a process that has done all its work ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
