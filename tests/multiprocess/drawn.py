"""Random cases for contract 1: a legal execution plan, tiny models of a family, and PPO's settings, from one seed.

Pure: what runs a case and compares it with one process is `random_plans`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from trl_realloc.algorithms.corrections import MODES
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.cluster import Cluster, DeviceMesh, legal_meshes
from trl_realloc.plan.dataflow import CallKind, Role
from trl_realloc.plan.execution_plan import ExecutionPlan, PlanError
from trl_realloc.plan.model_spec import FAMILIES
from trl_realloc.plan.parameter_spec import MIXTURES
from trl_realloc.trainer.checks.plan_checks import check_layouts


SIZES = {"hidden_size": 32, "intermediate_size": 52, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
OF_MIXTURES = 1_000_000  # the first seed of cases whose models are mixtures of experts
# without the auxiliary loss, and one expert after the other, because torch's grouped products have no float64
EXPERTS = {"router_aux_loss_coef": 0.0, "experts_implementation": "eager", "moe_intermediate_size": 12}
EXPERTS |= {"shared_expert_intermediate_size": 20}


def case_of(seed: int, processes: tuple[int, ...] = (1, 2, 2, 4, 4, 4)) -> dict[str, Any]:
    """The case of a seed, as JSON. The same seed gives the same case on every rank and in every run.

    Args:
        processes: how many a case may have, each as often as it stands here.
    """
    draw = random.Random(seed)
    devices = draw.choice(processes)
    model = _model(draw, is_mixture=seed >= OF_MIXTURES)
    for _ in range(1000):
        plan = _plan(draw, devices)
        if not _is_legal(plan, model):
            continue
        plan, correction = _corrected(random.Random(f"corrections of {seed}"), plan, model)
        plan = _overlapping(random.Random(f"overlaps of {seed}"), plan, model)
        made = ExecutionPlan.from_dict(plan)
        return {
            "seed": seed,
            "devices": devices,
            "plan": plan,
            # the generation is run, by an engine that replays
            "replays": bool(made.streamed) or made["actor.generate"].engine == "vllm",
            "model": model,
            "samples": draw.choice([8, 12, 16]),
            "mini_batches": draw.choice([1, 2, 3, 5]),
            "config": {
                "num_ppo_epochs": draw.choice([1, 2]),
                "max_grad_norm": draw.choice([0.0, 0.05, 1.0]),
                "weight_decay": draw.choice([0.0, 0.1]),
                "whiten_rewards": draw.random() < 0.5,
                "missing_eos_penalty": draw.choice([None, 1.0]),
                "gradient_checkpointing": draw.random() < 0.3,
                "kl_estimator": draw.choice(["k1", "k3"]),
                **correction,
            },
        }
    raise AssertionError(f"no legal plan in 1000 draws from seed {seed}")


def _is_legal(plan: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    try:
        made = ExecutionPlan.from_dict(plan)
        config = config_of(model, num_labels=1)
        check_layouts(made, {role: [config] for role in Role}, [Role.ACTOR] if model["lora"] else [])
    except PlanError:
        return False
    return True


def config_of(model: Mapping[str, Any], **more: Any) -> Any:
    return AutoConfig.for_model(model["family"], **{**SIZES, **model["config"], **more})


def _model(draw: random.Random, *, is_mixture: bool) -> dict[str, Any]:
    # a critic is a sequence classifier, which Transformers has of these mixtures
    families = ["mixtral", "qwen2_moe", "qwen3_moe"] if is_mixture else sorted(FAMILIES - MIXTURES.keys())
    family = draw.choice(families)
    config: dict[str, Any] = {
        "vocab_size": draw.choice([100, 101, 131]),
        "num_hidden_layers": draw.choice([2, 3, 4, 5]),
        "num_key_value_heads": 4 if family == "gpt_neox" else draw.choice([2, 4]),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if family == "mistral":
        config["sliding_window"] = draw.choice([None, 5])
    if family == "llama":
        config["attention_bias"] = config["mlp_bias"] = draw.random() < 0.3
    if is_mixture:
        experts = draw.choice([3, 4, 6, 8])
        config |= {**EXPERTS, "num_experts": experts, "num_local_experts": experts}
        config["num_experts_per_tok"] = draw.choice([1, 2, 3])
    targets = ["query_key_value", "dense_4h_to_h"] if family == "gpt_neox" else ["q_proj", "down_proj"]
    lora = draw.choice([None, None, None, targets, [*targets, "embed_out" if family == "gpt_neox" else "lm_head"]])
    if lora and is_mixture:
        lora = targets = ["q_proj", "o_proj"]
    if lora and config["tie_word_embeddings"]:
        lora = targets
    return {"family": family, "config": config, "lora": lora}


def _plan(draw: random.Random, devices: int) -> dict[str, Any]:
    cluster = Cluster(1, devices)
    meshes = [*sorted(set(legal_meshes(cluster))), *[cluster.mesh] * 3]
    calls = {call.name: _call(draw, call.kind, draw.choice(meshes)) for call in ppo_graph().calls}
    if draw.random() < 0.4:  # what is in place is drawn too seldom
        calls["critic.forward"] = {k: v for k, v in calls["critic.train"].items() if k != "micro_batch_tokens"}
    return {"cluster": {"nodes": 1, "devices_per_node": devices}, "calls": calls}


def _corrected(
    draw: random.Random, plan: dict[str, Any], model: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan and the config's settings, of a third of the cases with a correction of the rollouts. Has random numbers
    of its own."""
    if draw.random() >= 1 / 3:
        return plan, {}
    most, least = draw.choice([(3.0, None), (1.1, 0.5), (0.9, 0.2)])
    correction = {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": draw.choice(MODES),
        "vllm_importance_sampling_clip_max": most,
        "vllm_importance_sampling_clip_min": least,
    }
    cluster = Cluster(**plan["cluster"])
    meshes = [*sorted(set(legal_meshes(cluster))), *[cluster.mesh] * 3]
    for _ in range(1000):
        here = _call(draw, CallKind.FORWARD, draw.choice(meshes))
        made = {**plan, "calls": {**plan["calls"], "actor.forward": here}}
        if _is_legal(made, model):
            return draw.choice([(plan, correction), *[(made, correction)] * 3])  # in place where the plan has none
    raise AssertionError(f"no legal actor.forward in 1000 draws for {plan}")


def _overlapping(draw: random.Random, plan: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with an engine for its generation, streams and a barrier. Has random numbers of its own, so that a plan
    without them is the same as ever."""
    generate = plan["calls"]["actor.generate"]
    for _ in range(1000):
        whole = Cluster(**plan["cluster"]).mesh
        mesh, size = draw.choice([(generate["mesh"], generate["dp"]), (str(whole), whole.size)])
        tp = draw.choice([t for t in (1, 1, 2) if size % t == 0])
        vllm = {"mesh": mesh, "engine": "vllm", "dp": size // tp, "tp": tp, "offload": draw.random() < 0.3}
        here = {**generate, **draw.choice([{}, vllm, vllm, vllm])}
        kinds: list[Any] = [False, True, {"deterministic": True}]
        if here["engine"] == "vllm" and here["dp"] > 1:
            threshold, engines = draw.choice([0.3, 0.6, 0.9, 0.95]), draw.randint(1, here["dp"] - 1)
            migration = {"threshold": threshold, "engines": engines, "least_tokens": draw.choice([1, 4])}
            kinds += [{"migration": migration}] * 6
        calls = {**plan["calls"], "actor.generate": here}
        made = {**plan, "calls": calls, "streams": draw.choice(kinds), "barrier": draw.random() < 0.3}
        if _is_legal(made, model):
            return made
    raise AssertionError(f"no legal streams in 1000 draws for {plan}")


def _call(draw: random.Random, kind: CallKind, mesh: DeviceMesh) -> dict[str, Any]:
    made: dict[str, Any] = {"mesh": str(mesh), "engine": "transformers", "dp": mesh.size}
    if kind is CallKind.GENERATE:
        return {**made, "drop": draw.random() < 0.2}
    if draw.random() < 0.4:
        made |= {"engine": "zero", "zero_stage": draw.choice([0, 1, 2, 3] if kind is CallKind.TRAIN else [0, 0, 3])}
    else:
        tp, pp = draw.choice(
            [(t, p) for t in (1, 2, 4) for p in (1, 2, 3, 4) if mesh.size % (t * p) == 0 and t * p <= mesh.size]
        )
        made |= {"engine": "megatron", "dp": mesh.size // (tp * pp), "tp": tp, "pp": pp}
        if kind is CallKind.TRAIN:
            made["zero_stage"] = draw.choice([0, 1])
    if kind is not CallKind.TRAIN:
        made[draw.choice(["offload", "drop"])] = draw.random() < 0.3
    if draw.random() < 0.5:
        made["micro_batch_tokens"] = draw.choice([8, 20, 40, 100])
    return made
