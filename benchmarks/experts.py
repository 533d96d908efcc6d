"""Mixtures of experts: how far a vLLM engine's log-probabilities are from the trained model's, with and without router
replay, and whether the auxiliary loss is Transformers'.

    python benchmarks/experts.py --json FILE [--families qwen3_moe,mixtral] [--samples 16] [--tokens 64]

A row for each family, of a random model of 8 layers on this machine's CPU:

- `kl`, `kl_replayed`: k3 of the KL between engine and model in bfloat16, without and with the engine's experts.
- `flips`: share of the routers' choices that differ between the two, in bfloat16.
- `difference`: the largest change of a log-probability by the replay in float32. `error`: the largest difference of
  engine and model in float32, with the replay; `flips_float32`: as `flips`.
- `aux_difference`: between the auxiliary loss of packed samples and Transformers' of the padded batch, relative.
- `slices_difference`: not measured here.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.router_loss import ROUTER_COUNTS, ROUTER_PROBS, balance_loss, over_samples
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.requests import GenerationRequest, Sampling
from trl_realloc.engines.training.expert_routing import BALANCED_FAMILIES, experts_per_token, recorded
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.engines.training.weight_export import persistent_buffers
from trl_realloc.plan.algorithm_graphs import ROUTES


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
INNER: dict[str, Any] = {"moe_intermediate_size": 64, "head_dim": 32}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {**INNER, "num_experts": 32, "norm_topk_prob": True}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {**INNER, "num_experts": 32, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 64},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}),
    "olmoe": (OlmoeConfig, {"num_experts": 32, "intermediate_size": 256}),
    "granitemoe": (
        GraniteMoeConfig,
        {"num_local_experts": 32, "intermediate_size": 64, "attention_multiplier": 32**-0.5},
    ),
    "glm4_moe": (Glm4MoeConfig, {**INNER, "n_routed_experts": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}),
}
TEMPERATURE = 1.0


def model_of(family: str, dtype: torch.dtype, scale: float) -> Any:
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SIZES, **settings, "initializer_range": scale})).to(dtype).eval()


def sampled(engine: VLLMEngine, samples: int, tokens: int) -> tuple[Rollouts, Tensor]:
    """Samples with their routes, and the engine's log-probabilities of all response tokens. Four samples share a
    prompt."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(2, SIZES["vocab_size"]) for _ in range(24)) for _ in range(-(-samples // 4))]
    asked = [GenerationRequest(i, prompts[i // 4], seed=i) for i in range(samples)]
    got = sorted(engine.generate(asked, Sampling(tokens, TEMPERATURE)), key=lambda completion: completion.index)
    routes = [torch.from_numpy(completion.routes) for completion in got if completion.routes is not None]
    assert len(routes) == samples, "this release of vLLM does not tell its experts"
    columns = {
        "prompts": Ragged.of([request.prompt_ids for request in asked], torch.long),
        "responses": Ragged.of([completion.token_ids for completion in got], torch.long),
        ROUTES: Ragged.of(routes, routes[0].dtype),
    }
    logprobs = torch.tensor([value for completion in got for value in completion.logprobs])
    return Rollouts(index=torch.arange(samples), **columns), logprobs


def k3(engine: Tensor, trainer: Tensor) -> float:
    ratio = trainer.double() - engine.double()
    return float((ratio.exp() - 1 - ratio).mean())


def flips(model: Any, samples: Rollouts) -> float:
    """The share of the routers' choices for a token that differ from the routes in one expert or more."""
    differ, count, top_k = 0, 0, experts_per_token(model.config)
    columns = (samples.ragged(name).rows() for name in ("prompts", "responses", ROUTES))
    for prompt, response, routes in zip(*columns, strict=True):
        with torch.no_grad(), recorded(model) as logits:
            model(input_ids=torch.cat([prompt, response])[None], use_cache=False)
        chosen = torch.stack([layer.float().topk(top_k).indices for layer in logits], dim=1)[:-1].sort(-1).values
        same = (chosen == routes.long().view(chosen.shape).sort(-1).values).all(-1)
        differ, count = differ + int((~same).sum()), count + same.numel()
    return differ / count


def aux_difference(family: str, samples: Rollouts, scale: float) -> float | None:
    """Relative; `None` for a family without an auxiliary loss."""
    if family not in BALANCED_FAMILIES:
        return None
    model = model_of(family, torch.float32, scale)
    columns = (samples.ragged(name).rows() for name in ("prompts", "responses"))
    tokens = [torch.cat(pair) for pair in zip(*columns, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    with torch.no_grad():
        expected = model(input_ids=padded, attention_mask=mask, output_router_logits=True).aux_loss
    head = PolicyHead(model, TEMPERATURE, router_sums=True)
    outputs = ReplicatedEngine(head, MeshGroup((0,), 0), torch.device("cpu")).forward(samples, 512)
    sums = [over_samples(outputs[name]) for name in (ROUTER_COUNTS, ROUTER_PROBS)]
    return float((balance_loss(*sums, experts_per_token(model.config)) / expected - 1).abs())


def measured(family: str, dtype: torch.dtype, samples: int, tokens: int, scale: float) -> dict[str, float | None]:
    """The figures of one family in one dtype."""
    model = model_of(family, dtype, scale)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        name = str(dtype).removeprefix("torch.")
        engine = VLLMEngine(folder, max_model_len=256, max_num_seqs=samples, dtype=name, routes=True)
        try:
            trainer = ReplicatedEngine(PolicyHead(model, TEMPERATURE, replays_routes=True), MeshGroup((0,), 0), CPU)
            engine.load([*trainer.export(), list(persistent_buffers(model).items())], 0)
            drawn, by_engine = sampled(engine, samples, tokens)
        finally:
            engine.close()
    without = drawn.only(("index", "prompts", "responses"))
    plain, replayed = (trainer.forward(given, 4096)["logprobs"].values for given in (without, drawn))
    if dtype == torch.float32:
        difference = float((plain - replayed).abs().max())
        errors = {"error": float((replayed - by_engine).abs().max()), "flips_float32": flips(model, drawn)}
        return {"difference": difference, **errors, "aux_difference": aux_difference(family, without, scale)}
    shares = {"flips": flips(model, drawn), "mean": float((plain - by_engine).abs().mean())}
    shares["mean_replayed"] = float((replayed - by_engine).abs().mean())
    return {"kl": k3(by_engine, plain), "kl_replayed": k3(by_engine, replayed), **shares}


CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--scale", type=float, default=0.1, help="standard deviation of the weights")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("family", "flips", "kl", "kl_replayed", "times smaller", "difference", "aux_difference")
    for family in asked.families.split(","):
        row: dict[str, Any] = {"family": family, "slices_difference": None}
        for dtype in (torch.bfloat16, torch.float32):
            row |= measured(family, dtype, asked.samples, asked.tokens, asked.scale)
        rows.append(row)
        aux = "" if row["aux_difference"] is None else f"{row['aux_difference']:.1e}"
        kls = (f"{row['flips']:.1%}", f"{row['kl']:.4f}", f"{row['kl_replayed']:.4f}")
        table.add_row(family, *kls, f"{row['kl'] / row['kl_replayed']:.1f}", f"{row['difference']:.1e}", aux)
        if asked.json is not None:
            result_file.merge(asked.json, {"rows": rows})
    Console().print(table)


if __name__ == "__main__":
    main()
