"""The simulated part of `fusion.py`: RLHFuse's published setting (arXiv 2409.13221), and 16 nodes of 8 H100s.

No constant is fitted to the published gains: H100s are priced by their data sheet, as `trl-realloc plan --cluster`
does. The paper gives neither its lengths nor its strategies in numbers. Assumed are
- lengths: log-normal with a median of an eighth of the limit and a P99.9 of 10 times the median, cut at the limit. The
  paper's figure 2 shows tails of that kind: the P99.9 of chat models is more than 10 times their median;
- strategies: every call on all devices, tensor parallel in the fewest devices of 4 and 8 that divide the heads and of
  which a quarter of the memory holds the weights; so generation has 32 or 64 engines, and scoring as many replicas.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.dataflow import CallKind, Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.cost.estimate_factors import Corrections
from trl_realloc.planner.cost.hardware import parse_cluster
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration import stream_simulation
from trl_realloc.planner.iteration.stream_dispatcher import Dispatcher, Score
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.ladder import STREAMING, Ways
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.planner.search.space import Space
from trl_realloc.planner.search.stream_choice import THRESHOLDS, MigrationSweep, streams_of


GRAPH = ppo_graph()
SHAPES = {  # layers, hidden, intermediate, heads; LLaMA-1's have as many key/value heads
    7: (32, 4096, 11008, 32),
    13: (40, 5120, 13824, 40),
    33: (60, 6656, 17920, 52),
    65: (80, 8192, 22016, 64),
}
PAIRS = ((13, 33), (33, 13), (33, 65), (65, 33))  # actor and critic, billions
LIMITS = (512, 1024, 2048)
BATCH, PROMPT, ENGINE_SHARE = 512, 128, 0.5
SHARES = (1 - 1 / 1.2, 0.25, 1 - 1 / 1.6)  # of scoring; a gain of 1.2 needs at least the first, of 1.6 the last
PUBLISHED_THRESHOLD = 0.2  # the best one at a limit of 1,024
SIGMA = math.log(10) / NormalDist().inv_cdf(0.999)  # P99.9 = 10 times the median


def lengths(limit: int, count: int = 512) -> tuple[int, ...]:
    """Equally likely response lengths."""
    draws = (NormalDist().inv_cdf((at + 0.5) / count) for at in range(count))
    return tuple(min(limit, max(1, round(limit / 8 * math.exp(SIGMA * draw)))) for draw in draws)


def spec(billions: int, head: Any) -> ModelSpec:
    layers, hidden, inner, heads = SHAPES[billions]
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 32000,
    }
    return ModelSpec.from_config(config, head, bytes_per_element=2)


def models(actor: int, critic: int) -> dict[str, Sequence[ModelSpec]]:
    policy = (Role.ACTOR, Role.REFERENCE)
    return {c.name: (spec(actor, "lm") if c.role in policy else spec(critic, "score"),) for c in GRAPH.calls}


def pricing(
    cluster_name: str, limit: int, drawn: tuple[int, ...] = (), corrections: Corrections | None = None
) -> Pricing:
    cluster, device = parse_cluster(cluster_name)
    workload = Workload(BATCH, PROMPT, drawn or lengths(limit), mini_batches=4, epochs=1, recompute=True)
    return Pricing(
        cluster,
        workload,
        AnalyticRates(device),
        gpu_memory(device.memory),
        vllm_share=ENGINE_SHARE,
        corrections=corrections or Corrections(),
    )


def colocated(prices: Pricing, specs: dict[str, Sequence[ModelSpec]]) -> PricedPlan:
    """Every call on all devices."""
    assignments = {}
    for call in GRAPH.calls:
        heads, weights = specs[call.name][0].heads, specs[call.name][0].bytes
        assert prices.memory is not None
        tp = next(tp for tp in (4, 8) if heads % tp == 0 and (weights / tp <= prices.memory.total / 4 or heads % 8))
        pp = 4 if call.kind is CallKind.TRAIN else 1
        strategy = ParallelStrategy(prices.cluster.size // (tp * pp), tp, pp)
        engine = "vllm" if call.kind is CallKind.GENERATE else "megatron"
        assignments[call.name] = Assignment(prices.cluster.mesh, strategy, engine)
    return estimate_plan(ExecutionPlan(prices.cluster, assignments, barrier=True), specs, prices, exact=False)


def serial_seconds(whole: PricedPlan) -> dict[str, float]:
    """Seconds of each call that generates or scores, one after the other."""
    calls = (call for call in GRAPH.calls if call.kind is not CallKind.TRAIN)
    return {call.name: whole.costs[call.name].seconds for call in calls}


def scoring(serial: dict[str, float]) -> float:
    """Seconds of the calls that score."""
    return sum(serial.values()) - serial["actor.generate"]


def decoding_by_reading(whole: PricedPlan) -> float:
    """Seconds of generation without launches and without the collectives of tensor parallelism."""
    parts = whole.costs["actor.generate"].parts
    return sum(seconds for name, seconds in parts.items() if name not in ("launch", "tensor"))


@dataclass(frozen=True)
class Swept:
    """Generation and scoring with migration at one threshold, with RLHFuse's number of engines."""

    seconds: float
    threshold: float
    engines: int
    moved: int


def swept(whole: PricedPlan, sweep: MigrationSweep) -> Iterator[Swept]:
    """A plan without streams at every threshold."""
    for threshold in THRESHOLDS:
        engines = sweep.engines_of(threshold)
        migration = Migration(threshold, engines, sweep.least_tokens(threshold, engines))
        result = whole.with_streams(Streams(migration=migration)).streamed()
        yield Swept(result.streaming, threshold, engines, result.moved)


class AfterMigration(Dispatcher):
    """RLHFuse's own rule: nothing is scored before samples have moved, or all have ended."""

    def scores(self) -> list[Score]:
        state = self._generating
        return super().scores() if state.has_migrated or not state.left else []


def published_setting() -> Iterator[dict[str, Any]]:
    """A row for each pair of models and limit: the best of all thresholds, each with RLHFuse's number of engines."""
    for actor, critic in PAIRS:
        for limit in LIMITS:
            whole = colocated(pricing("h100:32x8", limit), models(actor, critic))
            serial = serial_seconds(whole)
            # the largest share that scoring could have under any lengths
            all_long = colocated(pricing("h100:32x8", limit, (limit,)), models(actor, critic))
            longest = serial_seconds(all_long)
            reading = decoding_by_reading(whole)
            still = whole.with_streams(Streams())
            sweep = MigrationSweep(whole, still.plan.streamed)
            of_all = list(swept(whole, sweep))
            best = min(of_all, key=lambda each: each.seconds)
            yield {
                "setting": "RLHFuse",
                "simulated": True,
                "actor_b": actor,
                "critic_b": critic,
                "devices": 256,
                "limit": limit,
                "serial_s": sum(serial.values()),
                "generate_s": serial["actor.generate"],
                "longest_decode_s": limit * sweep.prices.step("actor.generate", 1, PROMPT + limit / 2),
                "streamed_s": still.streamed().streaming,
                "migrated_s": best.seconds,
                "threshold": best.threshold,
                "engines": best.engines,
                "moved": best.moved,
                "flat_batch": sweep.flat_batch,
                "parts": {name: dict(whole.costs[name].parts) for name in serial},
                "step_ms": {n: 1e3 * sweep.prices.step("actor.generate", n, PROMPT + limit / 2) for n in (1, 8, 64)},
                "gain": sum(serial.values()) / best.seconds,
                "most": sum(serial.values()) / serial["actor.generate"],  # the gain if scoring took no time
                "most_of_longest": sum(longest.values()) / longest["actor.generate"],
                # the same if a decode step did nothing but read and compute
                "most_of_reading": 1 + scoring(serial) / reading,
                "most_of_longest_reading": 1 + scoring(longest) / decoding_by_reading(all_long),
                "by_threshold": _gains(serial, of_all),
            }


def _gains(serial: dict[str, float], of_all: Sequence[Swept]) -> dict[str, float]:
    """The gain over one after the other, by threshold."""
    return {f"{each.threshold:.2f}": sum(serial.values()) / each.seconds for each in of_all}


def at_shares(limit: int = 1024) -> Iterator[dict[str, Any]]:
    """A row for each pair of models and share of scoring: gains if all scoring takes as many times as long as estimated
    as are needed for that share."""
    for actor, critic in PAIRS:
        estimated = serial_seconds(colocated(pricing("h100:32x8", limit), models(actor, critic)))
        for share in SHARES:
            factor = share / (1 - share) * estimated["actor.generate"] / scoring(estimated)
            factors = {name: 1.0 if name == "actor.generate" else factor for name in estimated}
            prices = pricing("h100:32x8", limit, corrections=Corrections(factors))
            whole = colocated(prices, models(actor, critic))
            serial, still = serial_seconds(whole), whole.with_streams(Streams())
            sweep = MigrationSweep(whole, still.plan.streamed)
            gains = _gains(serial, list(swept(whole, sweep)))
            with mock.patch.object(stream_simulation, "Dispatcher", AfterMigration):
                later = _gains(serial, list(swept(whole, sweep)))
            yield {
                "setting": "RLHFuse, scoring slowed to a share",
                "simulated": True,
                "fitted": True,
                "actor_b": actor,
                "critic_b": critic,
                "devices": 256,
                "limit": limit,
                "share": share,
                "scoring_factor": factor,
                "serial_s": sum(serial.values()),
                "streamed_gain": sum(serial.values()) / still.streamed().streaming,
                "gain": max(gains.values()),
                "threshold": float(max(gains, key=lambda at: gains[at])),
                "gain_at_published_threshold": gains[f"{PUBLISHED_THRESHOLD:.2f}"],
                "by_threshold": gains,
                # if nothing is scored before the migration
                "later_gain": max(later.values()),
                "later_threshold": float(max(later, key=lambda at: later[at])),
                "later_by_threshold": later,
            }


def sixteen_nodes(time_limit_s: float = 10.0) -> Iterator[dict[str, Any]]:
    """The demo's graph at 7B + 7B on 16 nodes, planned with and without overlap and streams."""
    prices, specs = pricing("h100:16x8", 1024), models(7, 7)
    for barrier in (True, False):
        decision = choose(Space.of_run(specs, prices), Ways(barrier=barrier), time_limit_s=time_limit_s)
        tried = decision.rung(STREAMING)
        whole = tried.whole if tried is not None else decision.best
        plans = (whole, *streams_of(whole, time.perf_counter() + 20.0).plans.values(), None, None)
        for mode, plan in zip(("whole batches", "streamed", "migrated"), plans, strict=False):
            streams = plan.streams.to_dict() if plan is not None and plan.streams is not None else None
            yield {
                "setting": "16x8 H100",
                "simulated": True,
                "actor_b": 7,
                "critic_b": 7,
                "devices": 128,
                "limit": 1024,
                "overlap": not barrier,
                "mode": mode,
                "plan": whole.name,
                "seconds": None if plan is None else plan.seconds,
                "streams": streams,
                "is_chosen": decision.best.streams == (plan.streams if plan is not None else None),
            }


def published_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "actor + critic",
        "limit",
        "serial",
        "of it generation",
        "streamed",
        "migrated",
        "gain",
        "at most",
        "at most, all at limit",
        "threshold",
        "engines",
    )
    table.title = "generation and scoring on 256 H100s, batch 512, simulated"
    for row in rows:
        table.add_row(
            f"{row['actor_b']}B + {row['critic_b']}B",
            f"{row['limit']:,}",
            f"{row['serial_s']:.2f} s",
            f"{row['generate_s']:.2f} s",
            f"{row['streamed_s']:.2f} s",
            f"{row['migrated_s']:.2f} s",
            f"{row['gain']:.2f}x",
            f"{row['most']:.2f}x",
            f"{row['most_of_longest']:.2f}x",
            f"{row['threshold']:.0%}",
            str(row["engines"]),
        )
    return table


def share_table(rows: Sequence[dict[str, Any]]) -> Table:
    names = ("actor + critic", "scoring", "slowed", "streamed", "best", "at", f"at {PUBLISHED_THRESHOLD:.0%}")
    table = Table(*names, "scored from then on: best", "at", f"at {PUBLISHED_THRESHOLD:.0%}")
    table.title = "the same at limit 1,024, scoring slowed to a share of the serial time (fitted)"
    for row in rows:
        table.add_row(
            f"{row['actor_b']}B + {row['critic_b']}B",
            f"{row['share']:.0%}",
            f"{row['scoring_factor']:.1f}x",
            f"{row['streamed_gain']:.2f}x",
            f"{row['gain']:.2f}x",
            f"{row['threshold']:.0%}",
            f"{row['gain_at_published_threshold']:.2f}x",
            f"{row['later_gain']:.2f}x",
            f"{row['later_threshold']:.0%}",
            f"{row['later_by_threshold'][f'{PUBLISHED_THRESHOLD:.2f}']:.2f}x",
        )
    return table


def cluster_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("iterations", "samples", "iteration", "streams")
    table.title = "7B + 7B on 16x8 H100, batch 512, simulated"
    for row in rows:
        seconds = "none" if row["seconds"] is None else f"{row['seconds']:.2f} s"
        table.add_row("overlap" if row["overlap"] else "barrier", row["mode"], seconds, str(row["streams"] or ""))
    return table


def simulate(json_file: Path | None, console: Console) -> None:
    """Print the tables, and write their rows."""
    published, shares, cluster = list(published_setting()), list(at_shares()), list(sixteen_nodes())
    console.print(published_table(published))
    console.print(share_table(shares))
    console.print(cluster_table(cluster))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"rows": [*published, *shares, *cluster]}, indent=1) + "\n", encoding="utf-8")
