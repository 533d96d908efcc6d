"""`report_run`: the report of a run as Markdown with pictures, and its tables for the terminal.

`run_files` reads the files; tables are in `run_tables` and `estimate_part`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from ...plan.dataflow import CallKind
from ...plan.execution_plan import ExecutionPlan
from ...plan.picture import draw_timeline
from ...plan.spans import LOOP
from ...plan.timeline import Timeline
from ...plan.waits import waits
from ...planner.search.show import waits_table
from .estimate_part import estimate_lines, markdown, means, means_of
from .logged_updates import SCORES, LogRow
from .run_files import Completions, RunFiles
from .run_tables import (
    WINDOW,
    ends_table,
    has_times,
    realloc_table,
    reward_table,
    time_table,
    tool_lines,
    unit,
)


PICTURE = "timeline.png"
MAX_COMPLETIONS = 8
NO_LOGS = (
    "The curve of the reward and metrics of the first and the last updates are left out: they need two logs of "
    "updates, in metrics.jsonl or trainer_state.json. Train longer, or with a lower logging_steps."
)


def print_summary(run: RunFiles) -> None:
    """Print all tables to the terminal."""
    console = Console()
    if run.rows:
        console.print(reward_table(run.rows))
    else:
        console.print(NO_LOGS)
    if run.timeline is not None or has_times(run.rows):
        console.print(time_table(run.rows, run.timeline))
    for line in tool_lines(run.timeline) if run.timeline is not None else ():
        console.print(line)
    if run.timeline is not None and (moved := realloc_table(run.timeline)) is not None:
        console.print(moved)


def report_run(run: RunFiles | str | Path) -> Path:
    """Write `report.md` to a run's folder, with pictures: `reward.png` if it has logs, `timeline.png` of two updates if
    it has a timeline, and `estimate.png`. A timeline is also written for Perfetto (`trace.json`).

    Args:
        run: the run, or its folder.

    Returns:
        The path of the report.

    Raises:
        PlanError: see `RunFiles.load`.
    """
    run = run if isinstance(run, RunFiles) else RunFiles.load(run)
    lines = [
        *_head_lines(run),
        *(_reward_lines(run) if run.rows else [NO_LOGS, ""]),
        *(_time_lines(run) if run.timeline is not None or has_times(run.rows) else []),
        *(_timeline_parts(run, run.timeline) if run.timeline is not None else []),
        *(_completion_lines(run.completions) if run.completions is not None else []),
        *(_plan_lines(run.plan_text) if run.plan_text else []),
    ]
    path = run.folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _head_lines(run: RunFiles) -> list[str]:
    updates = f"{run.updates} update{'s' * (run.updates != 1)}"
    episodes = f", {run.rows[-1]['episode']:,.0f} episodes" if run.rows and "episode" in run.rows[-1] else ""
    return [
        "# Report",
        "",
        f"{updates}{episodes}.",
        "",
        *(["| run | |", "| --- | --- |"] if run.facts else []),
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in run.facts.items()),
        *([""] if run.facts else []),
        *([*markdown(ends_table(run.rows)), ""] if run.rows else []),
    ]


def _reward_lines(run: RunFiles) -> list[str]:
    reward_curve(run.rows, run.folder / "reward.png")
    picture = f"![the mean score of every {unit(run.rows)}](reward.png)"
    return ["## Reward", "", *markdown(reward_table(run.rows)), "", picture, ""]


def reward_curve(rows: Sequence[LogRow], path: str | Path) -> None:
    """Draw the score of every log and its running mean to `path`, in the image format of its suffix."""
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    scores = [float(row[SCORES]) for row in rows]
    running = [fmean(scores[max(0, end - WINDOW) : end]) for end in range(1, len(scores) + 1)]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, scores, "o", markersize=3, color="#9db4c8", label=f"mean score of the {unit(rows)}")
    axes.plot(steps, running, color="#1f5c99", linewidth=2, label=f"mean of {WINDOW} {unit(rows)}s")
    axes.set_xlabel("update")
    axes.set_ylabel("score")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _time_lines(run: RunFiles) -> list[str]:
    updates = means_of([row["step"] for row in run.rows]) if run.timeline is None else means(run.timeline)
    fused = () if run.plan is None else run.plan.fused
    both = f" {' and '.join(fused)} train together, so each has the seconds of both." if fused else ""
    return [
        "## Time by call",
        "",
        f"Seconds of the slowest device, {updates}. Calls on disjoint devices overlap.{both} The {LOOP} "
        f"has the time in which no device ran a call, a reward function or a tool.",
        "",
        *markdown(time_table(run.rows, run.timeline)),
        "",
        *((line for tool in tool_lines(run.timeline) for line in (tool + ".", "")) if run.timeline is not None else ()),
    ]


def _timeline_parts(run: RunFiles, measured: Timeline) -> list[str]:
    """The parts derived from the timeline: a picture, waits, the estimate and reallocations."""
    plan = run.plan
    timeline = measured.joined(plan.fused) if plan is not None else measured
    shown = two_updates(timeline, plan.staleness.versions if plan is not None else 0)
    updates = " and ".join(str(step + 1) for step in sorted({span.step for span in shown.spans})[-2:])
    title = f"updates {updates}; {timeline.warm.seconds_per_update:.3g} s per update, {means(timeline)}"
    draw_timeline(shown, run.folder / PICTURE, title=title)
    (run.folder / "trace.json").write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")
    moved = realloc_table(timeline)
    return [
        *(f"![two updates, devices down, time across]({PICTURE}); whole run: trace.json", ""),
        *(_wait_lines(plan, timeline) if plan is not None else []),
        *(estimate_lines(run.folder, run.estimate, timeline, run.first_estimate) if run.estimate is not None else []),
        *([*markdown(moved), ""] if moved is not None else []),
    ]


def two_updates(timeline: Timeline, versions: int) -> Timeline:
    """Two updates near the end of a run, for a picture.

    Args:
        versions: staleness of the plan. With a staleness, a device meanwhile generates for later updates, until the
            last samples have been generated. So the result has all spans during the last two updates that end before
            those trained on the last samples generated ahead.
    """
    steps = timeline.steps
    generations = sorted({span.step for span in timeline.spans if span.call.endswith(f".{CallKind.GENERATE.value}")})
    until = steps.index(generations[-versions]) if 0 < versions <= len(generations) else 0
    if not until:  # no staleness, or a run no longer than it
        return Timeline(span for span in timeline.spans if span.step in steps[-2:])
    last = [max(span.end for span in timeline.of_step(step).spans) for step in steps[max(until - 3, 0) : until]]
    start = last[0] if until > 2 else min(span.start for span in timeline.spans)
    return timeline.between(start, last[-1])


def _wait_lines(plan: ExecutionPlan, timeline: Timeline) -> list[str]:
    """A table of the time that devices waited in the last update but one, by call; empty if the run has fewer than
    three updates."""
    steps = timeline.steps
    if len(steps) < 3:
        return []
    start, end = (max(span.end for span in timeline.of_step(step).spans) for step in steps[-3:-1])
    idle = waits(timeline, plan.graph, start, end, plan.cluster.size)
    if not idle:
        return []
    return ["### Waits", "", f"In update {steps[-2] + 1} {idle[0].sentence}.", "", *markdown(waits_table(idle)), ""]


def _completion_lines(completions: Completions) -> list[str]:
    before, after = completions["before"][:MAX_COMPLETIONS], completions["after"][:MAX_COMPLETIONS]
    if not before or not after:
        return []
    lines = ["## Completions", "", "| prompt | before | score | after | score |", "| --- | --- | --- | --- | --- |"]
    for old, new in zip(before, after, strict=False):
        cells = [old["query"], old["model response"], f"{old['score']:.2f}", new["model response"]]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + f" | {new['score']:.2f} |")
    return lines


def _plan_lines(plan: str) -> list[str]:
    """The plan without the comments that explain its fields."""
    lines = [line for line in plan.strip().splitlines() if not line.startswith("#")]
    return ["## Plan", "", "Its fields are explained in `plan.yaml`.", "", "```yaml", *lines, "```", ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
