"""The part of a run's report that compares it with the plan's estimate: seconds by call, and ages of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import FiniteFloat
from rich.table import Table
from typing_extensions import TypedDict

from ..common.files import MOST_RECORD_BYTES, exists, read_json
from ..common.schema import checked
from ..plan.timeline import Timeline


AGES = {"staleness/mean": "mean_age", "staleness/oldest": "oldest"}  # metric -> field of an estimate
AGES_FILE, ESTIMATE_FILE = "ages.json", "estimate.json"


def estimate_table(estimate: Timeline, measured: Timeline) -> Table:
    """The estimated and the measured seconds of every call and of the iteration. The first update, which is slower
    because kernels are compiled in it, is left out if there are more."""
    steps = measured.steps[1:] or measured.steps
    warm = Timeline(span for span in measured.spans if span.step in steps)
    table = Table("call", "estimated", "measured", "error", title="estimate against measurement", title_justify="left")

    def add_row(name: str, estimated_s: float | None, measured_s: float | None) -> None:
        cells = ["" if seconds is None else f"{seconds:.3f} s" for seconds in (estimated_s, measured_s)]
        table.add_row(name, *cells, f"{estimated_s / measured_s - 1:+.0%}" if estimated_s and measured_s else "")

    for call, estimated_s, measured_s, _ in estimate.compare(warm):
        add_row(call, estimated_s, measured_s)
    if estimate.runs_ahead or warm.runs_ahead:  # a step's spans are as long as several iterations
        add_row("iteration", estimate.seconds_between_ends, warm.seconds_between_ends)
        return table
    whole = fmean(warm.of_step(step).seconds_per_step for step in steps) if steps else None
    add_row("iteration", estimate.seconds_per_step, whole)
    return table


class _Ages(TypedDict):
    """The content of `ages.json`: `Estimate.mean_age` and `Estimate.oldest`."""

    mean_age: FiniteFloat
    oldest: FiniteFloat


def age_table(expected: Mapping[str, float] | None, rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """The estimated and the measured ages of tokens when they are trained on; `None` for a run without a staleness.

    Args:
        expected: `mean_age` and `oldest`; `None` without an estimate, and the table then has the measured ages alone.
        rows: of updates. Those of the first fifth are left out, in which the first batches arrive.
    """
    known = [row for row in rows if all(name in row for name in AGES)]
    if not known:
        return None
    settled = known[len(known) // 5 :]
    columns = ["measured"] if expected is None else ["estimated", "measured"]
    table = Table("age of tokens", *columns, title="age, in versions of the policy", title_justify="left")
    measured = fmean(row["staleness/mean"] for row in settled), max(row["staleness/oldest"] for row in known)
    for name, value in zip(AGES, measured, strict=True):
        values = [value] if expected is None else [expected[AGES[name]], value]
        table.add_row(name.removeprefix("staleness/"), *(f"{each:.2f}" for each in values))
    return table


def age_lines(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the tokens' ages; empty for a run without a staleness."""
    file = folder / AGES_FILE
    expected = None
    if exists(file):
        ages = checked(_Ages, read_json(file, "the ages", MOST_RECORD_BYTES), str(file))
        expected = {"mean_age": ages["mean_age"], "oldest": ages["oldest"]}
    table = age_table(expected, rows)
    return [] if table is None else ["### Age of the tokens", "", *markdown(table), ""]


def estimate_lines(folder: Path, measured: Timeline) -> list[str]:
    """A table and a picture of the estimate in the run's folder; empty without one."""
    file = folder / ESTIMATE_FILE
    if not exists(file):
        return []
    estimate = Timeline.load(file)
    estimate.draw(folder / "estimate.png")
    return [
        "### Estimated and measured",
        "",
        *markdown(estimate_table(estimate, measured)),
        "",
        "![the iteration as it was expected](estimate.png)",
        "",
    ]


def markdown(table: Table) -> list[str]:
    """A rich table as Markdown, so that the terminal and the file show the same cells."""
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return [
        "| " + " | ".join(str(column.header) for column in table.columns) + " |",
        "|" + " --- |" * len(table.columns),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
