"""The tables of a run's report: the rise of the reward, metrics at both ends, the time by call, reallocations.

Inputs are logs (`logged_updates`) and the timeline. Imports no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from rich.table import Table

from ...plan.picture import MOVES
from ...plan.spans import LOOP, REWARD_FUNCTION, TOOL, TOOL_WORKERS, is_host_work
from ...plan.timeline import Timeline
from .estimate_part import means, means_of
from .logged_updates import SCORES, LogRow


WINDOW = 5  # number of logs to compare at each end of a run
COSTLY = 0.1  # minimum share of an update that a tool has if it is reported to cost much
SHARED = "shared_tokens/"  # prefix of a metric: tokens of a call that samples shared
CLEARLY = 3.0  # minimum of a clear rise, in standard errors of the difference
ENDS = {  # in the head of the report: name -> metrics of PPO, and of GRPO and RLOO
    "score": (SCORES,),
    "KL": ("objective/kl", "kl"),
    "entropy": ("objective/entropy", "entropy"),
    "response length": ("completions/mean_length",),
    "learning rate": ("lr", "learning_rate"),
}


@dataclass(frozen=True)
class RewardSummary:
    """The mean score and its standard error over the first and the last `window` logs. The error of one log is NaN."""

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
        """True if the rise is more than three standard errors of the difference. Errors of fewer than `WINDOW` updates
        are not used, because they are too uncertain."""
        return self.window == WINDOW and self.rise > CLEARLY * math.hypot(self.first_error, self.last_error)


def reward_summary(rows: Sequence[LogRow]) -> RewardSummary:
    """Compares the first with the last `WINDOW` logs, or the first with the second half if there are fewer. At least
    two logs."""
    scores = [float(row[SCORES]) for row in rows]
    window = min(WINDOW, len(scores) // 2)
    return RewardSummary(window, *_mean(scores[:window]), *_mean(scores[-window:]))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def unit(rows: Sequence[LogRow]) -> str:
    """The noun for a row: a log, if some rows are means of several updates."""
    return "update" if rows[-1]["step"] - rows[0]["step"] < len(rows) else "log"


def reward_table(rows: Sequence[LogRow]) -> Table:
    summary = reward_summary(rows)
    table = Table(f"{unit(rows)}s", "mean score", "standard error", title="reward", title_justify="left")
    ends = [("first", summary.first, summary.first_error), ("last", summary.last, summary.last_error)]
    for name, mean, error in ends:
        table.add_row(f"{name} {summary.window}", f"{mean:.3f}", "" if math.isnan(error) else f"{error:.3f}")
    table.add_row("rise", f"{summary.rise:+.3f}", summary.verdict)
    return table


def ends_table(rows: Sequence[LogRow]) -> Table:
    """The means of a few logged metrics over the first and the last updates."""
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


def warm_rows(rows: Sequence[LogRow]) -> Sequence[LogRow]:
    """The updates without the first, like `Timeline.warm`. A row may be the mean of several updates."""
    return rows[1:] if len(rows) >= 3 else rows


def has_times(rows: Sequence[LogRow]) -> bool:
    """True if the updates have times of calls. Those of a trainer without a plan have none."""
    return bool(rows) and all("time/step" in row for row in rows)


def update_seconds(rows: Sequence[LogRow], timeline: Timeline | None = None) -> float:
    """The mean seconds of an update (`Timeline.warm`).

    Args:
        timeline: times of every update of the run; by default the logged times.
    """
    if timeline is not None:
        return timeline.warm.seconds_per_update
    return fmean(row["time/step"] for row in warm_rows(rows))


def call_times(rows: Sequence[LogRow], timeline: Timeline | None = None) -> dict[str, tuple[float, float]]:
    """The mean seconds per update of each call, reward function and tool and of the training loop, with its share of
    the update, over the same updates as `update_seconds`. Shares add up to more than 1 if calls overlap."""
    whole = update_seconds(rows, timeline)
    if timeline is not None:
        means = {name: seconds for name, seconds in timeline.warm.seconds_by_call().items() if MOVES not in name}
    else:
        warm = warm_rows(rows)
        keys = dict.fromkeys(key for row in warm for key in row)  # a plan change brings new calls
        names = [key for key in keys if key.startswith("time/") and key != "time/step"]
        means = {span_name(name.removeprefix("time/")): fmean(row.get(name, 0.0) for row in warm) for name in names}
    ordered = sorted(means.items(), key=lambda item: is_host_work(item[0]) + (item[0] == LOOP))  # calls first
    return {name: (seconds, seconds / whole if whole else 0.0) for name, seconds in ordered}


def span_name(metric: str) -> str:
    """The name of the spans that are logged as `time/<metric>` (`results.observed`)."""
    kind, _, name = metric.partition("/")
    of_host = {"reward": REWARD_FUNCTION, "tool": TOOL}
    return (
        LOOP if metric == LOOP.replace(" ", "_") else f"{of_host[kind]}{name}" if name and kind in of_host else metric
    )


def time_table(rows: Sequence[LogRow], timeline: Timeline | None = None) -> Table:
    """The times of the calls and of the update, over the updates of `update_seconds`."""
    updates = means_of([row["step"] for row in rows]) if timeline is None else means(timeline)
    table = Table("call", "seconds per update", "share", title=f"time by call, {updates}", title_justify="left")
    has_shared = any(key.startswith(SHARED) for row in rows for key in row)
    if has_shared:
        table.add_column("tokens not computed again")
    for name, (seconds, share) in call_times(rows, timeline).items():
        shared = fmean(row.get(f"{SHARED}{name}", 0.0) for row in warm_rows(rows)) if has_shared else 0.0
        table.add_row(name, f"{seconds:.3f}", f"{share:.0%}", *[f"{shared:,.0f}" if shared else ""] * has_shared)
    timed, speed = [row for row in warm_rows(rows) if "time/step" in row and "tokens/s" in row], ""
    if timed:
        tokens = sum(row["tokens/s"] * row["time/step"] for row in timed)
        speed = f"{tokens / sum(row['time/step'] for row in timed):,.0f} tokens/s"
    table.add_row("whole update", f"{update_seconds(rows, timeline):.3f}", speed)
    if timeline is not None and (between := timeline.warm.seconds_between_updates):
        table.add_row("between updates: logging, evaluation, saving", f"{between:.3f}", "")
    return table


def tool_lines(timeline: Timeline) -> list[str]:
    """A line for each tool whose calls, one after the other, took at least a tenth of an update, and would take at most
    half of that in threads."""
    warm = timeline.warm
    whole, seconds = warm.seconds_per_update, warm.seconds_by_call()
    threaded = Timeline(replace(span, start=0.0, end=span.threaded_s) for span in warm.spans).seconds_by_call()
    return [
        f"{call.replace(': ', ' ')}: its calls one after the other took {seconds[call] / whole:.0%} of an update; "
        f"tool_workers {TOOL_WORKERS} would take about {threaded[call] / whole:.0%}"
        for call in sorted(threaded, key=lambda call: -seconds[call])
        if threaded[call] and seconds[call] >= max(COSTLY * whole, 2 * threaded[call])
    ]


def realloc_table(timeline: Timeline) -> Table | None:
    """The bytes of each reallocation between devices, summed over devices, and its seconds; `None` if there was
    none."""
    warm = timeline.warm
    moved: dict[str, dict[int, int]] = defaultdict(dict)  # every device's span has the bytes of all devices
    for span in warm.spans:
        if MOVES in span.call:
            moved[span.call][span.step] = max(span.bytes, moved[span.call].get(span.step, 0))
    if not moved:
        return None
    table = Table("parameters for", "MB per update", "seconds", title="reallocation", title_justify="left")
    seconds = warm.seconds_by_call()
    for call, sent in moved.items():
        table.add_row(
            call.partition(MOVES)[2], f"{sum(sent.values()) / len(warm.steps) / 1e6:,.1f}", f"{seconds[call]:.3f}"
        )
    return table
