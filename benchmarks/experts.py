"""Mixtures of experts: how far a vLLM engine's log-probabilities are from the trained model's, with and without router
replay, whether the auxiliary loss is Transformers', and whether experts divided over ranks learn what the whole model
does.

    python benchmarks/experts.py --json FILE [--families qwen3_moe,mixtral] [--samples 16] [--tokens 64] [--plans 10]

A row for each family, of a random model on this machine's CPU:

- `kl`, `kl_replayed`: k3 of the KL between engine and model in bfloat16, without and with the engine's experts.
- `flips`: share of the routers' choices that differ between the two, in bfloat16.
- `difference`: the largest change of a log-probability by the replay in float32. `error`: the largest difference of
  engine and model in float32, with the replay; `flips_float32`: as `flips`.
- `aux_difference`: between the auxiliary loss of packed samples and Transformers' of the padded batch, relative.
- `slices_difference`, `memory_difference`: those of `experts_slices.py`, over `--plans` random plans.

All families have one set of sizes (`SIZES`). Rows of other families in FILE stay, and so do the other columns of a row
with `--samples 0` (only the slices) or `--plans 0` (all but these).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import experts_slices
import result_file
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor


sys.path[:0] = [str(result_file.ROOT), *(str(result_file.ROOT / "tests" / place) for place in (".", "multiprocess"))]

import mixtures  # noqa: E402
from engine_forks import EngineForks  # noqa: E402

from trl_realloc.algorithms.rollout import Ragged, Rollouts  # noqa: E402
from trl_realloc.algorithms.router_loss import ROUTER_COUNTS, ROUTER_PROBS, balance_loss, over_samples  # noqa: E402
from trl_realloc.engines.generation import engine_process  # noqa: E402
from trl_realloc.engines.generation.vllm import VLLMEngine  # noqa: E402
from trl_realloc.engines.mesh_group import MeshGroup  # noqa: E402
from trl_realloc.engines.requests import GenerationRequest, Sampling  # noqa: E402
from trl_realloc.engines.training.expert_routing import BALANCED_FAMILIES, experts_per_token  # noqa: E402
from trl_realloc.engines.training.heads import PolicyHead  # noqa: E402
from trl_realloc.engines.training.replicated import ReplicatedEngine  # noqa: E402
from trl_realloc.engines.training.weight_export import persistent_buffers  # noqa: E402
from trl_realloc.plan.algorithm_graphs import ROUTES  # noqa: E402


# 0.1 is about 1 / sqrt(hidden): each product keeps the scale of its input, as in a trained model
SIZES = mixtures.Sizes(
    hidden=128, layers=8, heads=4, experts=32, chosen=4, width=64, vocabulary=512, positions=256, scale=0.1
)
TEMPERATURE, CPU = 1.0, torch.device("cpu")


def model_of(family: str, dtype: torch.dtype) -> Any:
    return mixtures.mixture(family, sizes=SIZES).to(dtype).eval()


def sampled(engine: VLLMEngine, samples: int, tokens: int) -> tuple[Rollouts, Tensor]:
    """Samples with their routes, and the engine's log-probabilities of all response tokens. Four samples share a
    prompt."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(2, SIZES.vocabulary) for _ in range(24)) for _ in range(-(-samples // 4))]
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
    differ, count = 0, 0
    columns = (samples.ragged(name).rows() for name in ("prompts", "responses", ROUTES))
    for prompt, response, routes in zip(*columns, strict=True):
        chosen = mixtures.chosen(model, torch.cat([prompt, response]))[:-1].sort(-1).values
        same = (chosen == routes.long().view(chosen.shape).sort(-1).values).all(-1)
        differ, count = differ + int((~same).sum()), count + same.numel()
    return differ / count


def aux_difference(family: str, samples: Rollouts) -> float | None:
    """Relative; `None` for a family without an auxiliary loss."""
    if family not in BALANCED_FAMILIES:
        return None
    model = model_of(family, torch.float32)
    columns = (samples.ragged(name).rows() for name in ("prompts", "responses"))
    tokens = [torch.cat(pair) for pair in zip(*columns, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    with torch.no_grad():
        expected = model(input_ids=padded, attention_mask=mask, output_router_logits=True).aux_loss
    head = PolicyHead(model, TEMPERATURE, router_sums=True)
    outputs = ReplicatedEngine(head, MeshGroup((0,), 0), CPU).forward(samples, 512)
    sums = [over_samples(outputs[name]) for name in (ROUTER_COUNTS, ROUTER_PROBS)]
    return float((balance_loss(*sums, experts_per_token(model.config)) / expected - 1).abs())


def measured(family: str, dtype: torch.dtype, samples: int, tokens: int) -> dict[str, float | None]:
    """The figures of one family in one dtype."""
    model = model_of(family, dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        name = str(dtype).removeprefix("torch.")
        engine = VLLMEngine(folder, max_model_len=SIZES.positions, max_num_seqs=samples, dtype=name, routes=True)
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
        return {"difference": difference, **errors, "aux_difference": aux_difference(family, without)}
    shares = {"flips": flips(model, drawn), "mean": float((plain - by_engine).abs().mean())}
    shares["mean_replayed"] = float((replayed - by_engine).abs().mean())
    return {"kl": k3(by_engine, plain), "kl_replayed": k3(by_engine, replayed), **shares}


def merge(path: Path, made: dict[str, dict[str, Any]]) -> None:
    """Write rows by family to the file, which keeps the other rows and the other columns of these."""
    known = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = {row["family"]: row for row in known}
    rows |= {family: {"family": family, **rows.get(family, {}), **row} for family, row in made.items()}
    result_file.merge(path, {"rows": [*rows.values()]})


def show(rows: dict[str, dict[str, Any]]) -> None:
    columns = {"flips": ".1%", "kl": ".1e", "kl_replayed": ".1e", "times smaller": ".1f"}
    columns |= dict.fromkeys(("difference", "slices_difference", "aux_difference", "slices_aux_difference"), ".1e")
    columns["memory_difference"] = ".1%"
    table = Table("family", *columns)
    for family, row in rows.items():
        if "kl" in row:
            row = {**row, "times smaller": row["kl"] / row["kl_replayed"]}
        table.add_row(
            family, *("" if row.get(name) is None else format(row[name], form) for name, form in columns.items())
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--families", default=",".join(mixtures.FAMILIES))
    parser.add_argument("--samples", type=int, default=16, help="0 for no engine")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--plans", type=int, default=10, help="random plans of each family")
    asked = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {family: {} for family in asked.families.split(",")}
    if asked.samples:
        forks = EngineForks.started()
        with contextlib.closing(forks), mock.patch.object(engine_process, "spawn", forks.spawn):
            for family, row in rows.items():
                for dtype in (torch.bfloat16, torch.float32):
                    row |= measured(family, dtype, asked.samples, asked.tokens)
                if asked.json is not None:
                    merge(asked.json, {family: row})
    if asked.plans:
        for family, figures in experts_slices.slices([*rows], asked.plans).items():
            rows[family] |= figures
        if asked.json is not None:
            merge(asked.json, rows)
    show(rows)


if __name__ == "__main__":
    main()
