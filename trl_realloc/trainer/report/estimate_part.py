"""The part of a run's report that compares it with the plan's estimate, in seconds per call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ...plan.picture import draw_timeline
from ...plan.timeline import Timeline


ESTIMATE_FILE = "estimate.json"
FIRST_ESTIMATE_FILE = "first_estimate.json"  # estimate when the plan was chosen, if it was corrected during the run
LENGTHS_FACT = "estimated for"  # name of a run fact: sample lengths that the estimates assume


def estimate_table(
    estimate: Timeline, measured: Timeline, first: Timeline | None = None, lengths: str | None = None
) -> Table:
    """The estimated and the measured seconds of every call and of the iteration. Measured seconds are means of
    `Timeline.warm`.

    Args:
        first: estimate when the plan was chosen, if `estimate` was corrected during the run.
        lengths: sample lengths that both estimates assume, in words.
    """
    warm = measured.warm
    columns = ["estimated"] if first is None else ["when chosen", "error", "corrected"]
    table = Table(
        "call",
        *columns,
        "measured",
        "error",
        title=f"estimate{f' for {lengths}' if lengths else ''} against measurement, {means(measured)}",
        title_justify="left",
    )

    def add_row(name: str, estimated_s: float | None, measured_s: float | None, chosen_s: float | None) -> None:
        chosen = [] if first is None else [_seconds(chosen_s), _error(chosen_s, measured_s)]
        table.add_row(name, *chosen, *map(_seconds, (estimated_s, measured_s)), _error(estimated_s, measured_s))

    of_first = {} if first is None else first.by_call()
    for call, estimated_s, measured_s, _ in estimate.compare(warm):
        add_row(call, estimated_s, measured_s, of_first.get(call))
    chosen_s = None if first is None else first.seconds_per_update
    add_row("iteration", estimate.seconds_per_update, warm.seconds_per_update, chosen_s)
    return table


def means(measured: Timeline) -> str:
    """The updates that `Timeline.warm` keeps, in words."""
    return means_of([step + 1 for step in measured.steps])


def means_of(updates: Sequence[int]) -> str:
    """The updates of a mean in words: `mean of updates 2-10, without the first, which compiles`.

    Args:
        updates: ascending numbers of all updates of the run.
    """
    if len(updates) < 3:
        which = " and ".join(map(str, updates))
        return f"mean of update{'s' * (len(updates) > 1)} {which}, the first of which compiles"
    return f"mean of updates {updates[1]}-{updates[-1]}, without the first, which compiles"


def _error(estimated_s: float | None, measured_s: float | None) -> str:
    return f"{estimated_s / measured_s - 1:+.0%}" if estimated_s and measured_s else ""


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f} s"


def estimate_lines(folder: Path, estimate: Timeline, measured: Timeline, first: Timeline | None) -> list[str]:
    """Report lines with a table and a picture of the estimate; the picture is drawn to the run's folder."""
    title = f"estimated: {estimate.seconds_per_update:.3g} s per update"
    draw_timeline(estimate, folder / "estimate.png", title=title)
    return [
        "### Estimated and measured",
        "",
        *markdown(estimate_table(estimate, measured, first)),
        "",
        "![the iteration as it was expected](estimate.png)",
        "",
    ]


def markdown(table: Table) -> list[str]:
    """A rich table as Markdown, so that terminal and file show the same cells."""
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return [
        "| " + " | ".join(str(column.header) for column in table.columns) + " |",
        "|" + " --- |" * len(table.columns),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
