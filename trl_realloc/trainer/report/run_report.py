"""The report of a run: the rise of the reward, the time by call, and completions before and after training.

Which metrics a run has written is in `logged_updates`. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from pydantic import FiniteFloat
from rich.console import Console
from rich.table import Table
from typing_extensions import TypedDict

from ...common.errors import PlanError
from ...common.files import MOST_RECORD_BYTES, exists, read_json, read_text
from ...common.schema import checked
from ...plan.dataflow import CallKind
from ...plan.execution_plan import ExecutionPlan
from ...plan.fused import Fused
from ...plan.picture import MOVES, draw_timeline
from ...plan.timeline import LOOP, REWARD_FUNCTION, TOOL, Span, Timeline, is_host_work
from ...plan.waits import waits
from ...planner.iteration.simulate import plan_times
from ...planner.search.show import waits_table
from .estimate_part import age_lines, estimate_lines, markdown, means, means_of
from .logged_updates import FACTS_FILE, SCORES, LogRow, logged_updates
from .stage_part import makespans, stage_lines, stages_of


WINDOW = 5  # updates at each end of a run that are compared
SHARED = "shared_tokens/"  # begins the name of a metric: tokens of a call that samples shared
CLEARLY = 3.0  # standard errors of the difference
TIMELINE, PICTURE = "timeline.json", "timeline.png"
ENDS = {  # in the head of the report: name -> metrics of PPO, and of GRPO and RLOO
    "score": (SCORES,),
    "KL": ("objective/kl", "kl"),
    "entropy": ("objective/entropy", "entropy"),
    "response length": ("completions/mean_length",),
    "learning rate": ("lr", "learning_rate"),
}


_Completion = TypedDict("_Completion", {"query": str, "model response": str, "score": FiniteFloat})


class _Completions(TypedDict):
    """The content of `completions.json`: completions of the same prompts before and after training."""

    before: list[_Completion]
    after: list[_Completion]


@dataclass(frozen=True)
class RewardSummary:
    """The mean score and its standard error over the first and over the last `window` updates. The error of one update
    is NaN."""

    updates: int
    window: int
    first: float
    first_error: float
    last: float
    last_error: float

    @property
    def rise(self) -> float:
        return self.last - self.first

    @property
    def verdict(self) -> str:
        """The rise in words: clear, not clear, or too few updates to tell."""
        return "clear" if self.rose_clearly else "not clear" if self.window == WINDOW else "too few updates to tell"

    @property
    def rose_clearly(self) -> bool:
        """The rise is more than three standard errors of the difference. Errors of fewer than `WINDOW` updates are not
        used: they are too uncertain themselves."""
        return self.window == WINDOW and self.rise > CLEARLY * math.hypot(self.first_error, self.last_error)


def reward_summary(rows: Sequence[LogRow], key: str = SCORES) -> RewardSummary:
    """The first against the last `WINDOW` updates, or the first against the second half of fewer.

    Raises:
        ValueError: fewer than two updates.
    """
    scores = [float(row[key]) for row in rows]
    if len(scores) < 2:
        raise ValueError(
            f"a report compares updates, of which the log has {len(scores)}; train longer, or with logging_steps=1."
        )
    window = min(WINDOW, len(scores) // 2)
    (first, first_error), (last, last_error) = _mean(scores[:window]), _mean(scores[-window:])
    return RewardSummary(len(scores), window, first, first_error, last, last_error)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def warm_rows(rows: Sequence[LogRow]) -> Sequence[LogRow]:
    """The updates without the first, as `Timeline.warm`. A row may have the means of several updates."""
    return rows[1:] if len(rows) >= 3 else rows


def update_seconds(rows: Sequence[LogRow], timeline: Timeline | None = None) -> float:
    """The mean seconds of an update (`Timeline.warm`).

    Args:
        timeline: of the run, which has the times of every update; *optional*, defaults to those that were logged.
    """
    if timeline is not None:
        return timeline.warm.seconds_per_update
    return fmean(row["time/step"] for row in warm_rows(rows))


def call_times(rows: Sequence[LogRow], timeline: Timeline | None = None) -> dict[str, tuple[float, float]]:
    """The mean seconds per update of each call, reward function and tool and of the training loop, and its share of the
    update, over the same updates as `update_seconds`. Shares add up to more than 1 where calls overlap."""
    whole = update_seconds(rows, timeline)
    if timeline is not None:
        means = {name: seconds for name, seconds in timeline.warm.seconds_by_call().items() if MOVES not in name}
    else:
        warm = warm_rows(rows)
        keys = dict.fromkeys(key for row in warm for key in row)  # a change of the plan brings new reallocations
        names = [key for key in keys if key.startswith("time/") and key != "time/step"]
        means = {span_name(name.removeprefix("time/")): fmean(row.get(name, 0.0) for row in warm) for name in names}
    ordered = sorted(means.items(), key=lambda each: is_host_work(each[0]) + (each[0] == LOOP))  # calls first
    return {name: (seconds, seconds / whole) for name, seconds in ordered}


def reward_curve(rows: Sequence[LogRow], path: str | Path) -> None:
    """Draw the score of every update and its running mean to `path`, in the image format of its suffix."""
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    scores = [float(row[SCORES]) for row in rows]
    running = [fmean(scores[max(0, end - WINDOW) : end]) for end in range(1, len(scores) + 1)]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, scores, "o", markersize=3, color="#9db4c8", label="mean score of the update")
    axes.plot(steps, running, color="#1f5c99", linewidth=2, label=f"mean of {WINDOW} updates")
    axes.set_xlabel("update")
    axes.set_ylabel("score")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def reward_table(summary: RewardSummary) -> Table:
    table = Table("updates", "mean score", "standard error", title="reward", title_justify="left")
    ends = [("first", summary.first, summary.first_error), ("last", summary.last, summary.last_error)]
    for name, mean, error in ends:
        table.add_row(f"{name} {summary.window}", f"{mean:.3f}", "" if math.isnan(error) else f"{error:.3f}")
    table.add_row("rise", f"{summary.rise:+.3f}", summary.verdict)
    return table


def span_name(metric: str) -> str:
    """The name of the spans whose seconds are logged as `time/<metric>` (`results.observed`)."""
    kind, _, name = metric.partition("/")
    of_host = {"reward": REWARD_FUNCTION, "tool": TOOL}
    return (
        LOOP if metric == LOOP.replace(" ", "_") else f"{of_host[kind]}{name}" if name and kind in of_host else metric
    )


def has_times(rows: Sequence[LogRow]) -> bool:
    """True if the updates have the times of their calls. Those of a trainer without a plan have none."""
    return all("time/step" in row for row in rows)


def time_table(rows: Sequence[LogRow], timeline: Timeline | None = None) -> Table:
    """The times of calls and of the update, as of `update_seconds`."""
    updates = means_of([row["step"] for row in rows]) if timeline is None else means(timeline)
    table = Table("call", "seconds per update", "share", title=f"time by call, {updates}", title_justify="left")
    shared = any(key.startswith(SHARED) for row in rows for key in row)
    if shared:
        table.add_column("tokens not computed again")
    for name, (seconds, share) in call_times(rows, timeline).items():
        of_call = fmean(row.get(f"{SHARED}{name}", 0.0) for row in warm_rows(rows))
        table.add_row(name, f"{seconds:.3f}", f"{share:.0%}", *[f"{of_call:,.0f}" if of_call else ""] * shared)
    timed, speed = [row for row in warm_rows(rows) if "time/step" in row and "tokens/s" in row], ""
    if timed:
        tokens = sum(row["tokens/s"] * row["time/step"] for row in timed)
        speed = f"{tokens / sum(row['time/step'] for row in timed):,.0f} tokens/s"
    table.add_row("whole update", f"{update_seconds(rows, timeline):.3f}", speed)
    if timeline is not None and (between := timeline.warm.seconds_between_updates):
        table.add_row("between updates: logging, evaluation, saving", f"{between:.3f}", "")
    return table


def realloc_table(rows: Sequence[LogRow]) -> Table | None:
    """The bytes that each reallocation sent between devices, summed over all devices; `None` if the plan has none."""
    calls = [key.removeprefix("realloc/bytes/") for key in rows[-1] if key.startswith("realloc/bytes/")]
    if not calls:
        return None
    table = Table("parameters for", "MB per update", "seconds", title="reallocation", title_justify="left")
    for call in calls:
        moved = fmean(row.get(f"realloc/bytes/{call}", 0.0) for row in warm_rows(rows))
        seconds = fmean(row.get(f"realloc/seconds/{call}", 0.0) for row in warm_rows(rows))
        table.add_row(call, f"{moved / 1e6:,.1f}", f"{seconds:.3f}")
    return table


def print_summary(rows: Sequence[LogRow], folder: Path | None = None) -> RewardSummary:
    """Print all tables to the terminal.

    Args:
        folder: of the run. *optional*. The times are those of its timeline then, and what its files say of calls that
            train together is printed too.
    """
    summary = reward_summary(rows)
    console = Console()
    console.print(reward_table(summary))
    timeline = Timeline.load(folder / TIMELINE) if folder is not None and exists(folder / TIMELINE) else None
    if timeline is not None or has_times(rows):
        console.print(time_table(rows, timeline))
    if (moved := realloc_table(rows)) is not None:
        console.print(moved)
    if folder is not None and (found := stages_of(folder)) is not None:
        console.print(makespans(found[1]), highlight=False)
    return summary


def write_report(
    folder: str | Path,
    rows: Sequence[LogRow],
    plan: str,
    before: Sequence[LogRow] = (),
    after: Sequence[LogRow] = (),
    *,
    timeline: Timeline | None = None,
    simulated: float | None = None,
    expected: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Write `report.md` and the reward curve `reward.png` to a folder.

    Args:
        rows: from `logged_updates`.
        plan: the plan's YAML; empty of a run without one.
        before, after: completions of the same prompts (`query`, `model response`, `score`).
        timeline: of the run, if it has one; the folder then has its picture.
        simulated: seconds per update that the plan's timeline takes; printed next to the measured seconds.
        expected: lines on the estimate and on the stages of calls that train together.
        facts: of `run_facts`.

    Returns:
        The path of the report.
    """
    folder = Path(folder)
    reward_curve(rows, folder / "reward.png")
    lines = [
        *_head_lines(rows, facts or {}),
        *_reward_lines(rows),
        *(_time_lines(rows, timeline, simulated, _overlap_in(plan)[0]) if timeline or has_times(rows) else []),
        *expected,
        *([*markdown(moved), ""] if (moved := realloc_table(rows)) is not None else []),
        *(_completion_lines(before, after) if before and after else []),
        *(_plan_lines(plan) if plan else []),
    ]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _head_lines(rows: Sequence[LogRow], facts: Mapping[str, str]) -> list[str]:
    """The run's circumstances, and its metrics at both ends."""
    updates = f"{len(rows)} update{'s' * (len(rows) != 1)}"
    episodes = f", {rows[-1]['episode']:,.0f} episodes" if "episode" in rows[-1] else ""
    return [
        "# Report",
        "",
        f"{updates}{episodes}.",
        "",
        *(["| run | |", "| --- | --- |"] if facts else []),
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()),
        *([""] if facts else []),
        *markdown(ends_table(rows)),
        "",
    ]


def ends_table(rows: Sequence[LogRow]) -> Table:
    """The means of a few metrics over the first and the last updates, of those that were logged."""
    window = reward_summary(rows).window
    table = Table("metric", f"first {window}", f"last {window}")
    for name, keys in ENDS.items():
        key = next((key for key in keys if all(_is_number(row.get(key)) for row in rows)), None)
        if key is not None:
            values = [float(row[key]) for row in rows]
            table.add_row(name, f"{fmean(values[:window]):.4g}", f"{fmean(values[-window:]):.4g}")
    return table


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1e30


def _plan_lines(plan: str) -> list[str]:
    """The plan without the comments that explain its fields."""
    lines = [line for line in plan.strip().splitlines() if not line.startswith("#")]
    return ["## Plan", "", "Its fields are explained in `plan.yaml`.", "", "```yaml", *lines, "```", ""]


def _reward_lines(rows: Sequence[LogRow]) -> list[str]:
    summary = reward_summary(rows)
    return [
        "## Reward",
        "",
        *markdown(reward_table(summary)),
        "",
        "![the mean score of every update](reward.png)",
        "",
    ]


def _time_lines(rows: Sequence[LogRow], timeline: Timeline | None, simulated: float | None, fused: Fused) -> list[str]:
    updates = means_of([row["step"] for row in rows]) if timeline is None else means(timeline)
    picture = f"![two updates, devices down, time across]({PICTURE}); whole run: trace.json"
    both = f" {' and '.join(fused)} train together, so each has the seconds of both." if fused else ""
    return [
        "## Time by call",
        "",
        f"Seconds of the slowest device, {updates}. Calls on disjoint devices overlap.{both} The {LOOP} "
        f"has the time in which no device ran a call, a reward function or a tool.",
        "",
        *markdown(time_table(rows, timeline)),
        "",
        *(_simulated_lines(simulated, timeline) if simulated is not None and timeline is not None else []),
        *([picture, ""] if timeline else []),
    ]


def _completion_lines(before: Sequence[LogRow], after: Sequence[LogRow]) -> list[str]:
    lines = ["## Completions", "", "| prompt | before | score | after | score |", "| --- | --- | --- | --- | --- |"]
    for old, new in zip(before, after, strict=False):
        cells = [old["query"], old["model response"], f"{old['score']:.2f}", new["model response"]]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + f" | {new['score']:.2f} |")
    return lines


def report_run(folder: str | Path) -> Path:
    """Write the report of a finished run from the files in its folder.

    Reads the metrics (`logged_updates`), and if they exist `plan.yaml`, `timeline.json`, `estimate.json`, `ages.json`,
    `stages.json`, `run.json` and `completions.json`. With a timeline it also writes a picture of two updates
    (`timeline.png`) and the whole timeline for Perfetto (`trace.json`), with the stages' tasks in it. With an estimate
    the report compares it with the measured times.

    Returns:
        The path of the report.

    Raises:
        ValueError: there are no metrics or too few updates, or a file of the run cannot be read.
    """
    folder = Path(folder)
    rows = logged_updates(folder)
    reward_summary(rows)  # refuses too few updates before anything is written
    plan, completions_file = folder / "plan.yaml", folder / "completions.json"
    completions = _Completions(before=[], after=[])
    if exists(completions_file):
        completions = checked(
            _Completions, read_json(completions_file, "the completions", MOST_RECORD_BYTES), str(completions_file)
        )
    text = read_text(plan, "the plan") if exists(plan) else ""
    about, facts = folder / FACTS_FILE, dict[str, str]()
    if exists(about):
        facts = checked(dict[str, str], read_json(about, "the facts of the run", MOST_RECORD_BYTES), str(about))
    measured, simulated, expected = None, None, list[str]()
    if exists(folder / TIMELINE):
        fused, versions = _overlap_in(text)
        measured = Timeline.load(folder / TIMELINE)
        timeline = measured.joined(fused)
        simulated = simulated_seconds(text, timeline.warm)
        expected = [*estimate_lines(folder, timeline), *age_lines(folder, rows)]
        traced = timeline
        if (found := stages_of(folder)) is not None:
            expected += stage_lines(folder, *found)
            traced += found[1].measured
        shown = two_updates(timeline, versions)
        updates = " and ".join(str(step + 1) for step in sorted({span.step for span in shown.spans})[-2:])
        title = f"updates {updates}; {timeline.warm.seconds_per_update:.3g} s per update, {means(timeline)}"
        draw_timeline(shown, folder / PICTURE, title=title)
        expected = [*_wait_lines(text, timeline), *expected]
        (folder / "trace.json").write_text(json.dumps(traced.to_chrome_trace()), encoding="utf-8")
    return write_report(
        folder,
        rows,
        text,
        completions["before"][:8],
        completions["after"][:8],
        timeline=measured,
        simulated=simulated,
        expected=expected,
        facts=facts,
    )


def two_updates(timeline: Timeline, versions: int) -> Timeline:
    """Two updates near the end of a run, as they are drawn.

    Args:
        versions: staleness of the plan. With one, a device generates for later updates meanwhile, and no longer does so
            when the last samples have been drawn. So these are all spans in the time of the last two updates that end
            before those whose samples are the last that were drawn ahead.
    """
    steps = timeline.steps
    generations = sorted({span.step for span in timeline.spans if span.call.endswith(f".{CallKind.GENERATE.value}")})
    until = steps.index(generations[-versions]) if 0 < versions <= len(generations) else 0
    if not until:  # no staleness, or a run as short as it
        return Timeline(span for span in timeline.spans if span.step in steps[-2:])
    last = [max(span.end for span in timeline.of_step(step).spans) for step in steps[max(until - 3, 0) : until]]
    start = last[0] if until > 2 else min(span.start for span in timeline.spans)
    return timeline.between(start, last[-1])


def simulated_seconds(plan: str, timeline: Timeline) -> float | None:
    """Seconds per update by the plan's schedule and the measured times of its calls: calls on different devices
    overlap, calls on the same device do not. `None` if the text is not a plan, the plan has streams or a staleness, or
    a call was never measured.

    Args:
        plan: the plan's YAML.
        timeline: in which calls that train together are `joined`.
    """
    try:
        parsed, busy = ExecutionPlan.from_yaml(plan), timeline.by_call()
        if parsed.streams is not None or parsed.staleness.versions:
            return None  # a call's seconds do not say when its samples were there
        moves = {call.partition(MOVES)[2]: seconds for call, seconds in busy.items() if MOVES in call}
        return plan_times(parsed, busy, moves)[0]
    except (PlanError, KeyError):
        return None


def _overlap_in(plan: str) -> tuple[Fused, int]:
    """The calls that a plan fuses, and its staleness; none and 0 if the text is not a plan."""
    parsed = _parsed(plan)
    return ((), 0) if parsed is None else (parsed.fused, parsed.staleness.versions)


def _parsed(plan: str) -> ExecutionPlan | None:
    """The plan of a YAML; `None` if the text is not a plan."""
    try:
        return ExecutionPlan.from_yaml(plan)
    except PlanError:
        return None


def _wait_lines(plan: str, timeline: Timeline) -> list[str]:
    """A table of how long devices waited in the last update but one, and for which calls; empty if the text is not a
    plan, or the run has fewer than three updates."""
    steps, parsed = timeline.steps, _parsed(plan)
    if parsed is None or len(steps) < 3:
        return []
    start, end = (max(span.end for span in timeline.of_step(step).spans) for step in steps[-3:-1])
    found = waits(timeline, parsed.graph, start, end, parsed.cluster.size)
    if not found:
        return []
    return ["### Waits", "", f"In update {steps[-2] + 1} {found[0].sentence}.", "", *markdown(waits_table(found)), ""]


def _simulated_lines(simulated: float, timeline: Timeline) -> list[str]:
    """The seconds per update that the plan needs for its calls, and what the rest is."""
    measured, seconds = timeline.warm.seconds_per_update, timeline.warm.seconds_by_call()
    calls, host = list[Span](), list[Span]()
    for span in timeline.of_step(timeline.steps[-1]).spans:
        (host if span.is_host_work else calls).append(span)
    inside = {  # PPO's reward functions run in reward.forward
        span.call
        for span in host
        if span.call != LOOP
        and any(call.device == span.device and call.start <= span.start and span.end <= call.end for call in calls)
    }
    names = sorted((name for name in seconds if is_host_work(name) and name not in inside), key=LOOP.__eq__)
    between = [f"{name} {seconds[name]:.3f} s" for name in names]
    return [
        f"From the times of the calls the plan's timeline takes {simulated:.3f} s per update; measured were "
        f"{measured:.3f} s. The rest, {(measured - simulated) / measured:.0%}, is what happens between the calls: "
        f"{', '.join([*between, 'devices that wait for others'])}.",
        "",
    ]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
