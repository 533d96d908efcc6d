"""Two training pipelines in one fused schedule: RLHFuse's cases by the search, and mini-batches on gloo processes.

    python benchmarks/fused.py --json benchmarks/results/fused.json
    python benchmarks/fused.py --measured --json benchmarks/results/fused.json

The first searches schedules for the cases of RLHFuse (arXiv 2409.13221, `papers/rlhfuse.csv`): stages, micro-batches,
and the forward time and activation memory of a micro-batch on a stage. A backward takes two forwards. One core. The
search is compiled before the first case.

The second trains two pipelines fused and one after the other, in one run, beside what the schedule promises from the
stages' measured times. Of `sleeping` rows every layer sleeps for its stage's time, because more stages than cores
cannot compute at the same time: engines, messages, search and optimizer steps are real, the work of a stage is not. Of
`computing` rows it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import result_file
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("multiprocess", "trainer", "runtime"))]

ROUNDS, WARM = 8, 3  # mini-batches of each kind; the first ones are not counted
TOKENS = 64  # of a sample
COMPUTED = 192  # of a sample whose stages compute, so that a mini-batch takes a second and not a fifth of one

# Forward seconds of a micro-batch on each stage of A and B; a backward sleeps twice as long. Or the layers of both
# models, whose hidden width is 512.
CASES: tuple[dict[str, Any], ...] = (
    {"kind": "sleeping", "pp": (2, 2), "micro": (8, 8), "seconds": ([0.04, 0.04], [0.02, 0.02])},
    {"kind": "sleeping", "pp": (2, 2), "micro": (4, 4), "seconds": ([0.05, 0.04], [0.03, 0.04])},
    {"kind": "sleeping", "pp": (4, 4), "micro": (8, 8), "seconds": ([0.04] * 4, [0.02] * 4)},
    {"kind": "sleeping", "pp": (4, 4), "micro": (4, 4), "seconds": ([0.05, 0.04, 0.04, 0.05], [0.03] * 4)},
    {"kind": "sleeping", "pp": (4, 2), "micro": (8, 4), "seconds": ([0.04] * 4, [0.03] * 2)},
    {"kind": "sleeping", "pp": (4, 2), "micro": (8, 4), "seconds": ([0.04] * 4, [0.03] * 2), "unequal": True},
    {"kind": "computing", "pp": (2, 2), "micro": (4, 4), "layers": (8, 4)},
    {"kind": "computing", "pp": (2, 2), "micro": (2, 2), "layers": (8, 8)},
)


def published() -> Iterator[dict[str, Any]]:
    """A row for each of RLHFuse's cases, with what its search reached."""
    from trl_realloc.planner.fused.check import serial_memory, serial_time
    from trl_realloc.planner.fused.pipelines import FusedPipelines
    from trl_realloc.planner.fused.schedule_search import compile_search, search

    compile_search()
    with (ROOT / "benchmarks" / "papers" / "rlhfuse.csv").open(encoding="utf-8", newline="") as file:
        for case in csv.DictReader(file, skipinitialspace=True):
            counts = [tuple(int(case[f"{name}_{model}"]) for model in "ab") for name in ("pp", "micro")]
            sizes = [tuple(float(case[f"{name}_{model}"]) for model in "ab") for name in ("forward", "memory")]
            pipelines = FusedPipelines.uniform(*counts, *sizes)
            begun = time.process_time()
            found = search(pipelines)
            yield {
                **case,
                "serial": round(serial_time(pipelines), 6),
                "makespan": round(found.simulated.makespan, 6),
                "bound": round(found.bound, 6),
                "memory_ratio": round(max(found.simulated.memory_peaks) / serial_memory(pipelines), 4),
                "cpu_seconds": round(time.process_time() - begun, 2),
            }


def measured() -> list[dict[str, Any]]:
    """A row for each of `CASES`."""
    import torch.multiprocessing as mp

    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            port = door.getsockname()[1]
            door.close()
            path = Path(folder) / "row.json"
            mp.spawn(_rank, (case, port, path), nprocs=max(case["pp"]))  # type: ignore[no-untyped-call]
            rows.append(json.loads(path.read_text()))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _rank(rank: int, case: Mapping[str, Any], port: int, path: Path) -> None:
    world = max(case["pp"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fused, shares, orders = _fused(case, world)
    times: dict[str, list[float]] = {"serial": [], "fused": []}
    for _ in range(ROUNDS):
        for name, run in (("serial", lambda: _serial(fused, shares)), ("fused", lambda: fused.train(shares))):
            times[name].append(_timed(run))
    if rank == 0:
        path.write_text(json.dumps(_row(case, times, orders)))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes its groups down


def _timed(run: Callable[[], object]) -> float:
    """Seconds until the last rank has ended."""
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - begun


def _serial(fused: Any, shares: Any) -> None:
    for engine, share in zip(fused.engines, shares, strict=True):
        engine.train(share.samples, share.loss, share.micro_batch_tokens, share.learning_rate)


def _row(case: Mapping[str, Any], times: Mapping[str, list[float]], orders: Any) -> dict[str, Any]:
    from trl_realloc.planner.fused.check import check, serial_time

    serial, fused = (statistics.median(times[name][WARM:]) for name in ("serial", "fused"))
    pipelines, schedule = orders.latest
    serial_promised, promised = serial_time(pipelines), check(pipelines, schedule).makespan
    return {
        "kind": case["kind"],
        "stages": "{} + {}".format(*case["pp"]),
        "micro_batches": "{} + {}".format(*case["micro"]),
        "unequal": bool(case.get("unequal")),
        "serial_s": round(serial, 4),
        "serial_promised_s": round(serial_promised, 4),
        "fused_s": round(fused, 4),
        "fused_promised_s": round(promised, 4),
        "fused_to_promised": round(fused / promised, 3),
        "gain": round(serial / fused, 3),
        "gain_promised": round(serial_promised / promised, 3),
    }


def _fused(case: Mapping[str, Any], world: int) -> tuple[Any, Any, Any]:
    """(fused training, shares of both models, orders)."""
    import torch
    from split import deal, groups

    from trl_realloc.algorithms.algorithm import TokenLoss
    from trl_realloc.algorithms.ppo import PolicyLoss, ValueLoss
    from trl_realloc.engines.training.fused_training import FusedShare, FusedTraining
    from trl_realloc.engines.training.heads import PolicyHead, ValueHead
    from trl_realloc.engines.training.megatron import MegatronEngine
    from trl_realloc.runtime.fused.orders import FusedOrders

    places = groups(world, 1, case["pp"][0]), groups(world, 1, case["pp"][1]).reversed()
    orders, engines, shares = FusedOrders(), [], []
    orders.compile()
    losses: tuple[TokenLoss, TokenLoss] = (PolicyLoss(0.2), ValueLoss(0.2, 0.1))
    tokens = TOKENS if "seconds" in case else COMPUTED
    for model, (groups_of, loss) in enumerate(zip(places, losses, strict=True)):
        own = _model(case, model)
        head = PolicyHead(own, 1.0) if model == 0 else ValueHead(own)
        engine = MegatronEngine(
            head, groups_of, torch.device("cpu"), make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)
        )
        if "seconds" in case:
            _make_sleep(engine, case["seconds"][model][groups_of.pp.index])
        engines.append(engine)
        copies = world // case["pp"][model]
        samples = deal(
            _samples(case["micro"][model] * copies, tokens, bool(case.get("unequal"))), copies, groups_of.dp.index, {}
        )
        budget = 2 * tokens - 1 if case.get("unequal") else tokens
        shares.append(FusedShare(samples, loss, budget, 1e-3))
    return FusedTraining((engines[0], engines[1]), orders), (shares[0], shares[1]), orders


def _model(case: Mapping[str, Any], model: int) -> Any:
    import tiny

    small = {"num_hidden_layers": case["pp"][model]}
    large = {
        "num_hidden_layers": case.get("layers", (0, 0))[model],
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    made = (tiny.policy, tiny.classifier)[model]
    return made(**(small if "seconds" in case else large))


def _samples(count: int, tokens: int, unequal: bool) -> Any:
    """Samples of so many tokens, or `unequal` of half to one and a half times as many."""
    import torch

    from trl_realloc.algorithms.rollout import Ragged, Rollouts

    draw = torch.Generator().manual_seed(1)
    lengths = [tokens] * count
    if unequal:
        lengths = torch.randint(tokens // 2, 3 * tokens // 2, (count,), generator=draw).tolist()
    prompts = Ragged.of([torch.randint(2, 100, (8,), generator=draw) for _ in lengths], torch.long)
    responses = Ragged.of([torch.randint(2, 100, (n - 8,), generator=draw) for n in lengths], torch.long)
    waves = torch.sin(torch.arange(len(responses.values)).float())
    weight = torch.full((count,), 1 / len(responses.values))
    return Rollouts(
        index=torch.arange(count),
        prompts=prompts,
        responses=responses,
        logprobs=responses.like(-4.5 + 0.1 * waves),
        advantages=responses.like(waves),
        returns=responses.like(waves),
        old_values=responses.like(0.2 * waves),
        policy_weight=weight,
        value_weight=weight,
    )


def _make_sleep(engine: Any, seconds: float) -> None:
    """Let the stage's forward sleep so long for `TOKENS` tokens, and its backward twice."""
    import torch

    from trl_realloc.engines.training.packed_attention import backbone_of
    from trl_realloc.engines.training.probe_model import PassThrough

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any) -> Any:
            time.sleep(seconds * hidden.shape[1] / TOKENS)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(2 * seconds * gradients[0].shape[1] / TOKENS)
            return gradients[0]

    (layer,) = (each for each in backbone_of(engine.head.model).layers if not isinstance(each, PassThrough))
    layer.register_forward_hook(lambda module, given, out: Sleep.apply(out))  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measured", action="store_true", help="train fused and one after the other on gloo processes")
    given = parser.parse_args()
    rows = measured() if given.measured else list(published())
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    if given.json:
        result_file.merge(given.json, {"measured" if given.measured else "rows": rows})


if __name__ == "__main__":
    main()
