"""Tables, texts and pictures of a decision: the plan, its alternatives and the cost of a call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from ...plan.assignment import between_uses
from ...plan.execution_plan import ExecutionPlan
from ...plan.picture import draw_memory, draw_timeline
from ...plan.streams import Streams
from ...plan.waits import Wait, ranges
from ..fused.lists import Found, schedule_timeline, stage_lists, task_names
from .decision import Decision, explain
from .ladder import ages
from .overlap_worth import OverlapWorth
from .priced_plan import PricedPlan


def plan_tables(plan: PricedPlan) -> list[Table]:
    """The tables of a plan: its costs, the schedule of fused calls if any, and the memory of the fullest device if it
    is known."""
    tables = [plan_cost_table(plan)]
    if plan.fused_cost is not None and plan.fused_cost.found is not None:
        tables.append(schedule_table(plan.plan, plan.fused_cost.found))
    if plan.space.pricing.memory is not None:
        tables.append(memory_table(plan))
    return tables


def plan_cost_table(plan: PricedPlan) -> Table:
    """A row for each call with its mesh, engine and strategy, its memory on a device, and its seconds."""
    table = Table("call", "mesh", "engine", "strategy", "memory", "time", title=plan.name, title_justify="left")
    for name, candidate in plan.calls.items():
        assignment, cost = candidate.assignment, candidate.cost
        share = "" if assignment.memory_share is None else f"share {assignment.memory_share:g}"
        strategy = " ".join(filter(None, (str(assignment.strategy), between_uses(assignment), share)))
        memory = f"{(cost.static + cost.transient) / 1e9:.2f} GB"
        table.add_row(name, str(assignment.mesh), assignment.engine_name, strategy, memory, in_seconds(cost.seconds))
    if plan.fused_cost is not None:
        both, cost = " + ".join(plan.fused), plan.fused_cost.cost
        table.add_row(both, "", "", "fused", f"{cost.transient / 1e9:.2f} GB", in_seconds(cost.seconds))
    for name, seconds in plan.estimate.moves.items():
        table.add_row(f"parameters to {name}", "", "", "", "", in_seconds(seconds))
    if plan.streams is not None:
        table.add_row("streams", "", "", _migration(plan.streams), "", "")
    if plan.staleness.versions:
        table.add_row(f"staleness {plan.staleness.versions}", "", "", ages(plan), "", "")
    table.add_section()
    fullest_device = f"{plan.estimate.memory / 1e9:.2f} GB"
    table.add_row("iteration", str(plan.space.cluster.mesh), "", "", fullest_device, in_seconds(plan.seconds))
    return table


def in_seconds(seconds: float) -> str:
    """Estimated seconds with three significant digits; estimates are not more accurate."""
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"


def _migration(streams: Streams) -> str:
    if streams.migration is None:
        return "no migration"
    engines = f"{streams.migration.engines} engine{'s' if streams.migration.engines > 1 else ''}"
    return f"the last {streams.migration.threshold:.0%} to {engines}"


def memory_table(plan: PricedPlan) -> Table:
    """Table of the memory of the fullest device: its parts, the largest first, and the free memory."""
    title = f"memory of device {plan.estimate.fullest}, the fullest"
    table = Table("part", "GB", title=title, title_justify="left")
    for name, size in sorted(plan.estimate.holds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{size / 1e9:.2f}")
    memory, free = plan.space.pricing.memory, plan.free
    if memory is not None and free is not None:
        table.add_section()
        table.add_row(f"free ({memory.headroom:.0%} of {memory.total / 1e9:.0f} GB at least)", f"{free / 1e9:.2f}")
    return table


def waits_table(waits: Sequence[Wait]) -> Table:
    """A row for each group of devices with the same waits: the share of an iteration, and the calls they wait for."""
    table = Table("devices", "wait", "for", title="waits of an iteration", title_justify="left")
    for wait in waits:
        causes = ", ".join(f"{call} {share:.0%}" for call, share in wait.calls.items())
        table.add_row(ranges(wait.devices).partition(" ")[2], f"{wait.share:.0%}", causes)
    return table


def longest_wait(plan: PricedPlan, others: Sequence[PricedPlan]) -> Iterator[str]:
    """A sentence about the wait that wastes most device time, with the wait of these devices under another plan.
    Nothing if no device waits.

    Args:
        others: other plans in the order of preference; the first in which these devices wait less is named.
    """
    if not plan.waits:
        return
    longest, instead = plan.waits[0], ""
    for other in others:
        devices = set(longest.devices)
        waited = sum(wait.share * len(devices & set(wait.devices)) for wait in other.waits) / len(devices)
        if waited < longest.share:
            longer = other.seconds / plan.seconds - 1
            instead = f"; under {other.name}, whose iterations take {longer:.0%} longer, they would wait {waited:.0%}"
            break
    yield f"{longest.sentence[0].upper()}{longest.sentence[1:]}{instead}."


def alternatives_table(decision: Decision) -> Table:
    """A row for each plan that was not chosen, with the reason."""
    table = Table("instead", "time", "why not", title="alternatives", title_justify="left")
    for alternative in decision.alternatives:
        time = in_seconds(alternative.plan.seconds) if alternative.plan else "does not fit"
        table.add_row(alternative.name, time, alternative.reason)
    return table


def overlap_table(worth: OverlapWorth) -> Table:
    """A row for each plan of each option of the ladder."""
    table = Table("overlap", "iteration", "saves", "age of tokens", "", title="ways to overlap", title_justify="left")
    base = worth.apart.seconds
    for row in worth.rows:
        if row.plan is None:
            table.add_row(row.name, "", "", "", row.verdict)
            continue
        age = f"{row.plan.estimate.mean_age:.1f}" if row.plan.staleness.versions else ""
        saves = "" if row.plan is worth.apart else f"{1 - row.plan.seconds / base:.0%}"
        table.add_row(row.name, in_seconds(row.plan.seconds), saves, age, row.verdict)
    return table


def schedule_table(plan: ExecutionPlan, found: Found, *, is_example: bool = False) -> Table:
    """A row for each stage of two fused calls: its devices, its stage of each call, and its list of forwards and
    backwards.

    Args:
        is_example: whether the schedule is that of `lists.example`.
    """
    title = f"{' (A) and '.join(plan.fused)} (B) in fused pipelines"
    table = Table("device", "stage of A, B", "order", "busy", title=title, title_justify="left")
    for stage in stage_lists(plan, found):
        table.add_row(stage.devices, f"{stage.holds[0]}, {stage.holds[1]}", stage.tasks, f"{stage.busy:.0%}")
    table.caption = "A1 is the forward of A's first micro-batch in a pipeline, a1 its backward."
    table.caption_justify = "left"
    if is_example:
        example_of = "An example: all stages alike, backwards of two forwards. A run chooses the order by its times."
        table.caption = f"{table.caption} {example_of}"
    return table


def explained(plan: PricedPlan, call: str) -> str:
    """Seconds of a call and their parts, as text. Raises `PlanError` if the graph has no such call."""
    name = plan.space.graph.call(call).name
    return f"{name}, {plan.costs[name].seconds:.3g} s: {explain(plan.costs[name])}"


def draw_estimate(plan: PricedPlan, stem: str | Path) -> list[Path]:
    """Writes the expected iterations as a picture (`stem.png`) and as a trace for Perfetto (`stem.trace.json`), the
    memory of the fullest device if it is known (`stem.memory.png`), and one mini-batch of fused calls if any, stage by
    stage (`stem.schedule.png`). If iterations overlap, the picture has the time of two iterations, including the work
    that is left of the iteration before them."""
    picture, trace = Path(f"{stem}.png"), Path(f"{stem}.trace.json")
    timeline, cluster = plan.timeline, f"{plan.space.pricing.rates.name}, {plan.space.cluster}"
    if not plan.staleness.versions and timeline.seconds_per_step > 1.01 * plan.seconds:
        start = min(span.start for span in timeline.spans) + plan.seconds
        timeline = timeline.repeated(plan.seconds, 3).between(start, start + 2 * plan.seconds)
    title = f"{plan.name} on {cluster}: {plan.seconds:.3g} s an iteration, devices wait {plan.idle:.0%} of it"
    draw_timeline(timeline, picture, title=title)
    trace.write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")
    written = [picture, trace]
    if plan.space.pricing.memory is not None:
        fullest, memory = plan.estimate, Path(f"{stem}.memory.png")
        title = f"{plan.name} on {cluster}: memory of device {fullest.fullest}, the fullest"
        draw_memory(fullest.holds, plan.space.pricing.memory.total, memory, title=title)
        written.append(memory)
    if plan.fused_cost is not None and plan.fused_cost.found is not None:
        schedule = Path(f"{stem}.schedule.png")
        mini_batch = schedule_timeline(plan.plan, plan.fused_cost.found)
        title = f"{' and '.join(plan.fused)} in fused pipelines: {mini_batch.seconds_per_step:.3g} s a mini-batch"
        draw_timeline(mini_batch, schedule, title=title, calls=task_names(plan.plan))
        written.append(schedule)
    return written
