"""Writes docs/results.md and docs/results.png from the results of `evidence.py`.

    python benchmarks/evidence_page.py [--json FILE]

The tables stand between two marks of the page; its other text is kept.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence import RESULTS, ROOT, load_rows


PAGE, PICTURE = ROOT / "docs" / "results.md", ROOT / "docs" / "results.png"
BEGIN, END = "<!-- from benchmarks/results/evidence.json -->", "<!-- end -->"
MISMATCH = "sampling/sampling_logp_difference/mean"
Row = Mapping[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracies: a line of panels for each task, over the updates and over the seconds of training."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(10, 3.6 * len(tasks)), layout="constrained")
    for panels, task in zip(figure.subplots(len(tasks), 2, squeeze=False, sharey="row"), tasks, strict=True):
        for axes, (at, unit) in zip(panels, ((0, "updates"), (1, "seconds of training")), strict=True):
            for row in (row for row in rows if row["task"] == task):
                places, shares = [point[at] for point in row["curve"]], [point[2] for point in row["curve"]]
                style = "--" if row["arm"] == "trl" else "-"
                axes.plot(places, shares, style, marker="o", markersize=3, label=label(row))
            axes.set(title=task, xlabel=unit, ylabel="held-out rows answered rightly")
            axes.yaxis.set_major_formatter("{x:.0%}")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)


def label(row: Row) -> str:
    trainer = "TRL" if row["arm"] == "trl" else "trl_realloc"
    adapters = {"": "", "lora": " of LoRA", "qlora": " of QLoRA"}[row.get("adapters", "")]
    device = "" if row["device"] == "cpu" else f", {row['device']}"
    return f"{row['algorithm'].upper()}{adapters}, {trainer}{device}, seed {row['seed']}"


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    return ["", *("| " + " | ".join(map(str, line)) + " |" for line in (head, ["---"] * len(head), *lines))]


def tables(rows: Sequence[Row]) -> list[str]:
    """What was learned and how fast, the accuracies at equal updates, the plans, and the seconds of their calls."""
    updates = sorted({point[0] for row in rows for point in row["curve"]})
    calls = [
        [label(row), call["call"], *(f"{s:.2f} s" if s else "" for s in (call["estimated"], call["measured"]))]
        for row in rows
        for call in row.get("calls", ())
    ]
    return [
        *table(
            ["runs", "seeds", "after", "to the common accuracy", "training"],
            map(over_seeds, several_seeds(rows)),
        ),
        *table(
            ["run", "before", "after", "to the common accuracy", "training", "tokens/s", "memory"], map(result, rows)
        ),
        *table(["right after updates", *updates], ([label(row), *at_updates(row, updates)] for row in rows)),
        *table(
            ["rewards of the trainings, this package minus TRL", "runs", "first half", "last half", "all updates"],
            reward_differences(rows),
        ),
        *table(
            ["`--rows`", "greedy, before and after", "engine against trainer", "plan", "commit"],
            map(run, rows),
        ),
        *(table(["run", "call", "estimated", "measured"], calls) if calls else []),
    ]


def several_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows that differ in the seed alone, where there are several."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(str(row.get(key, "")) for key in ("algorithm", "adapters", "task", "arm", "device"))
        groups.setdefault(key, []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def over_seeds(group: Sequence[Row]) -> list[str]:
    """Means over the seeds, each with the standard deviation of the seeds."""
    name = label(group[0]).rpartition(", ")[0]
    to = [row["seconds_to"]["seconds"] for row in group if row["seconds_to"]]
    return [
        f"{group[0]['task']}: {name}",
        ", ".join(str(row["seed"]) for row in group),
        mean_and_spread([100 * row["after"] for row in group], "%"),
        mean_and_spread(to, " s") if len(to) > 1 else "",
        mean_and_spread([row["seconds"] for row in group], " s"),
    ]


def mean_and_spread(values: Sequence[float], unit: str) -> str:
    digits = 1 if unit == "%" else 0
    return f"{statistics.fmean(values):,.{digits}f}{unit} ± {statistics.stdev(values):,.{digits}f}"


def result(row: Row) -> list[str]:
    to, rate = row["seconds_to"], row["tokens_per_s"]
    return [
        f"{row['task']}: {label(row)}",
        f"{row['before']:.1%}",
        f"{row['after']:.1%} ± {row['error']:.1%}",
        f"{to['accuracy']:.1%} in {to['seconds']:,.0f} s" if to else "",
        f"{row['updates']} updates in {row['seconds']:,.0f} s",
        f"{rate:,.0f}" if rate else "",
        f"{row['memory_gb']:.1f} GB",
    ]


def at_updates(row: Row, updates: Sequence[int]) -> list[str]:
    shares = {update: share for update, _, share in row["curve"]}
    return [f"{shares[update]:.1%}" if update in shares else "" for update in updates]


def reward_differences(rows: Sequence[Row]) -> list[list[str]]:
    """The mean rewards of updates on the same prompts, with the standard error of the mean over updates. TRL's PPO
    shuffles its prompts otherwise, so it has no pairs."""
    of_trl = {row["name"]: row["rewards"] for row in rows if row["arm"] == "trl"}
    pairs = [
        [ours - trl for ours, trl in zip(row["rewards"], of_trl[other], strict=True)]
        for row in rows
        if row["arm"] == "ours" and row["algorithm"] != "ppo"
        if (other := row["name"].replace("-ours-", "-trl-")) in of_trl
    ]
    if not pairs:
        return []
    half = len(pairs[0]) // 2
    parts = (slice(half), slice(half, None), slice(None))
    pooled = [[100 * difference for pair in pairs for difference in pair[part]] for part in parts]
    errors = [statistics.stdev(values) / len(values) ** 0.5 for values in pooled]
    points = [
        f"{statistics.fmean(values):+.1f} ± {error:.1f} points" for values, error in zip(pooled, errors, strict=True)
    ]
    return [["GRPO and RLOO", str(len(pairs)), *points]]


def run(row: Row) -> list[str]:
    difference = row["mismatch"].get(MISMATCH)
    plan = [line for line in (row.get("plan") or "").splitlines() if line.startswith("name: ")]
    return [
        f"`{row['name']}`",
        " and ".join(f"{share:.1%}" for share in row["greedy"]),
        "" if difference is None else f"{difference:.1e} nats a token",
        plan[0].removeprefix("name: ") if plan else "",
        row["commit"],
    ]


def write_page(rows: Sequence[Row], page: Path) -> None:
    """Fill the part of the page between its two marks."""
    head, rest = page.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    picture = "![held-out rows answered rightly over updates and over seconds of training](results.png)"
    page.write_text("\n".join([head + BEGIN, *tables(rows), "", picture, END + tail]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    rows = load_rows(parser.parse_args().json)
    draw(rows, PICTURE)
    write_page(rows, PAGE)


if __name__ == "__main__":
    main()
