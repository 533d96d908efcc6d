"""What the planner shows: the plan with its estimates, what it beat, what bounds a call, and the picture of it."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from .choose import Chosen, explain
from .problem import Found


def estimate_table(found: Found) -> Table:
    """A row for each call: where and how it runs, the memory it takes of a device, and its time."""
    table = Table("call", "mesh", "engine", "strategy", "memory", "time", title=found.name, title_justify="left")
    for name, choice in found.choices.items():
        assignment, cost = choice.assignment, choice.cost
        rests = " offload" if assignment.offload else " drop" if assignment.drop else ""
        strategy = f"{assignment.strategy}{rests}"
        memory = f"{(cost.static + cost.transient) / 1e9:.2f} GB"
        table.add_row(name, str(assignment.mesh), assignment.engine, strategy, memory, f"{cost.seconds:.3f} s")
    for name, seconds in found.estimate.moves.items():
        table.add_row(f"parameters to {name}", "", "", "", "", f"{seconds:.3f} s")
    table.add_section()
    most = f"{found.estimate.memory / 1e9:.2f} GB"
    table.add_row("iteration", str(found.space.cluster.mesh), "", "", most, f"{found.seconds:.3f} s")
    return table


def beaten_table(chosen: Chosen) -> Table:
    """The alternatives, and why each lost."""
    table = Table("instead", "time", "why not", title="alternatives", title_justify="left")
    for each in chosen.beaten:
        time = f"{each.found.seconds:.3f} s" if each.found else "does not fit"
        table.add_row(each.name, time, each.reason)
    return table


def explained(found: Found, call: str) -> str:
    """What bounds a call of a plan. Raises `PlanError` for a call that there is not."""
    name = found.space.graph.call(call).name
    return f"{name}, {found.costs[name].seconds:.3g} s: {explain(found.costs[name])}"


def draw_estimate(found: Found, stem: str | Path) -> list[Path]:
    """The expected iteration as a picture (`stem.png`) and as a trace for Perfetto (`stem.trace.json`)."""
    picture, trace = Path(f"{stem}.png"), Path(f"{stem}.trace.json")
    found.timeline.draw(picture)
    trace.write_text(json.dumps(found.timeline.to_chrome_trace()), encoding="utf-8")
    return [picture, trace]
