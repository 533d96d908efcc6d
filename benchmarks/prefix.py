"""Training and memory where the samples of a group share one copy of their prompt, beside a copy for each.

    python benchmarks/prefix.py --json benchmarks/results/prefix.json

A Llama with random weights in float32, one group of 8 completions, one engine of this package (`zero_stage: 0`). The
ratio is that of a prompt's tokens to a completion's. Both ways alternate on the same samples; seconds are medians of an
optimizer step, and `saved_mb` are the bytes that the forward keeps for its backward, without the weights. `bound` is
the number of tokens of one way over that of the other. `gradient_difference` is the largest difference of an element of
the gradients, as a share of the largest gradient. `estimate_error` is that of the planner's formula.

`cases`: the same difference, and that of the outputs, in random samples of few tokens, of which some begin alike,
continue another or are equal, through small models of several families with each head. `--cases 0` leaves them out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


sys.path[:0] = [str(result_file.ROOT), str(result_file.ROOT / "tests" / "engines")]

from families import FAMILIES, VOCABULARY, causal, classifier  # noqa: E402

from trl_realloc.algorithms.rollout import Ragged, Rollouts, token_keys  # noqa: E402
from trl_realloc.engines.mesh_group import MeshGroup  # noqa: E402
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ScoreHead, ValueHead  # noqa: E402
from trl_realloc.engines.training.packed_row import PackedRow  # noqa: E402
from trl_realloc.engines.training.replicated import ReplicatedEngine  # noqa: E402
from trl_realloc.plan.batching import PrefixTree  # noqa: E402
from trl_realloc.planner.cost.measured_rates import dot, fit_unit_costs  # noqa: E402


GROUP = 8
RATIOS = {"4:1": (512, 128), "1:1": (512, 512), "1:8": (128, 1024)}  # tokens of the prompt and of a completion
SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2}
BUDGET = 1 << 20  # tokens of a micro-batch


class AloneHead(PolicyHead):
    """A head that computes each sample's prompt for it alone."""

    def tree(self, samples: Rollouts) -> PrefixTree | None:
        return None


def rollouts(prompts: list[list[int]], responses: list[list[int]]) -> Rollouts:
    columns = {"prompts": Ragged.of(prompts, torch.long), "responses": Ragged.of(responses, torch.long)}
    return Rollouts(index=torch.arange(len(prompts)), **columns)


def loss(outputs: Mapping[str, Ragged], micro: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that weighs every token differently."""
    weights = micro.ragged("responses").values.float() / SIZES["vocab_size"] - 0.5
    return (outputs["logprobs"].values * weights).sum(), {}


def kept_bytes(head: RoleHead, samples: Rollouts) -> int:
    """Bytes that a forward keeps for its backward, without those of the weights."""
    weights = {p.untyped_storage().data_ptr() for p in head.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tree = head.tree(samples)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = head(samples, None if tree is None else PackedRow.of(tree))
    del outputs
    return sum(sizes.values())


def measured(ratio: str, repeats: int) -> dict[str, Any]:
    """A row of the table."""
    prompt_tokens, response_tokens = RATIOS[ratio]
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(SIZES["vocab_size"], (prompt_tokens,), generator=draw).tolist()
    responses = torch.randint(SIZES["vocab_size"], (GROUP, response_tokens), generator=draw).tolist()
    samples = rollouts([prompt] * GROUP, responses)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    heads = {"alone": AloneHead(model, 1.0), "shared": PolicyHead(model, 1.0)}
    engines: dict[str, ReplicatedEngine] = {}
    gradients: dict[str, list[Tensor]] = {}
    for name, head in heads.items():
        # a rate of 0: both ways have the same weights in every step
        engines[name] = ReplicatedEngine(
            head, MeshGroup((0,), 0), torch.device("cpu"), make_optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0)
        )

        def note(*_: object, name: str = name) -> None:
            gradients[name] = [p.grad.clone() for p in model.parameters() if p.grad is not None]

        engines[name].optimizer.register_step_pre_hook(note)  # type: ignore[union-attr]
        engines[name].train(samples, loss, BUDGET, 0.0)  # warm-up
    differences = [float((a - b).abs().max()) for a, b in zip(*gradients.values(), strict=True)]
    largest = max(float(gradient.abs().max()) for gradient in gradients["alone"])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.train(samples, loss, BUDGET, 0.0)
            seconds[name].append(time.perf_counter() - start)
    alone, shared = (statistics.median(seconds[name]) for name in ("alone", "shared"))
    tree = heads["shared"].tree(samples)
    assert tree is not None, "the prompts are equal"
    kept = {name: kept_bytes(head, samples) for name, head in heads.items()}
    return {
        "ratio": ratio,
        "alone_s": alone,
        "shared_s": shared,
        "speedup": alone / shared,
        "bound": samples.tokens / tree.tokens,
        # what the planner's measured costs are fitted to: tokens, and the sum of the squared lengths
        "counts": {
            "alone": [samples.tokens, sum(n * n for n in tree.lengths)],
            "shared": [tree.tokens, sum(n * n for n in tree.lengths) - sum(n * n for n in tree.shared)],
        },
        "saved_mb": {name: size / 1e6 for name, size in kept.items()},
        "saved_ratio": kept["alone"] / kept["shared"],
        "gradient_difference": max(differences) / largest,
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def with_estimates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the errors of the planner's estimates of the steps that share prompts, by costs of a token and of a
    squared length that are fitted to the steps that do not."""
    alone = [row["counts"]["alone"] for row in rows]
    costs = fit_unit_costs(alone, [row["alone_s"] for row in rows])
    return [{**row, "estimate_error": dot(costs, row["counts"]["shared"]) / row["shared_s"] - 1} for row in rows]


def random_samples(seed: int) -> Rollouts:
    """Samples of few prompts and a small vocabulary: some begin alike, some continue another, some are equal."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 30))] for _ in range(2)]
    prompts, answers = list[list[int]](), list[list[int]]()
    for at in range(draw.randrange(2, 9)):
        of = draw.randrange(at + 1)
        prompts.append([*prompts[of], *answers[of], 5] if of < at and draw.random() < 0.4 else draw.choice(stems))
        answers.append([draw.choice([3, 4]) for _ in range(draw.randrange(10))])
    answers[0] = answers[0] or [3]
    return rollouts(prompts, answers)


def differences_of_cases(cases: int) -> dict[str, Any]:
    """The largest differences of the outputs and of the gradients, as shares of the largest of a case."""
    names = [name for name, (_, packs) in FAMILIES.items() if packs]
    heads: list[tuple[str, RoleHead]] = []
    for name in names:
        heads += [(name, PolicyHead(causal(name), 0.7)), *((name, h(classifier(name))) for h in (ValueHead, ScoreHead))]
    worst, saved = {"outputs": 0.0, "gradients": 0.0}, 0
    for case in range(cases):
        _, head = heads[case % len(heads)]
        samples = random_samples(case)
        keys = [prompt + response for prompt, response in token_keys(samples)]
        tree = PrefixTree.of(keys, samples.ragged("prompts").lengths.tolist(), 8, least=1 + case % 5)
        results: list[dict[str, list[Tensor]]] = []
        for row in (None, PackedRow.of(tree)):
            head.zero_grad()
            values = torch.cat([column.values for column in head(samples, row).values()])
            (values * torch.linspace(-1, 2, len(values))).sum().backward()
            learned = [p.grad.clone() for p in head.parameters() if p.grad is not None]
            results.append({"outputs": [values.detach()], "gradients": learned})
        for kind, largest in worst.items():
            pairs = list(zip(results[0][kind], results[1][kind], strict=True))
            scale = max(float(one.abs().max()) for one, _ in pairs) or 1.0
            worst[kind] = max(largest, *(float((one - other).abs().max()) / scale for one, other in pairs))
        saved += sum(tree.shared)
    return {"cases": cases, "families": names, "tokens_not_computed_again": saved, **worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ratios", nargs="*", choices=RATIOS, default=list(RATIOS), help="none: the cases alone")
    parser.add_argument("--repeats", type=int, default=3, help="optimizer steps of each way that count")
    parser.add_argument("--cases", type=int, default=200, help="random cases")
    args = parser.parse_args()
    sections: dict[str, Any] = {}
    if args.ratios:
        sections = {"rows": with_estimates([measured(ratio, args.repeats) for ratio in args.ratios]), "model": SIZES}
    if args.cases:
        sections["cases"] = differences_of_cases(args.cases)
    show(sections)
    if args.json:
        result_file.merge(args.json, sections)


def show(result: Mapping[str, Any]) -> None:
    """Print the table."""
    columns = ("alone, s", "shared, s", "speedup", "bound", "kept, MB", "ratio", "gradients", "estimate")
    table = Table("prompt : completion", *columns)
    for row in result.get("rows", ()):
        kept = row["saved_mb"]
        table.add_row(
            row["ratio"],
            f"{row['alone_s']:.2f}",
            f"{row['shared_s']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['bound']:.2f}x",
            f"{kept['alone']:,.0f}, {kept['shared']:,.0f}",
            f"{row['saved_ratio']:.2f}x",
            f"{row['gradient_difference']:.0e}",
            f"{row['estimate_error']:+.0%}",
        )
    console = Console(width=160)
    if table.rows:
        console.print(table)
    if (cases := result.get("cases")) is not None:
        console.print(
            f"{cases['cases']} random cases of {len(cases['families'])} families: outputs differ by at most "
            f"{cases['outputs']:.0e}, gradients by {cases['gradients']:.0e} of the largest."
        )


if __name__ == "__main__":
    main()
