"""Compares a recipe on several clusters (`trl-realloc plan --clusters`): a table, a chart, JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..common.errors import PlanError, nearest, shown
from ..plan.picture import new_figure, plain
from ..plan.presets import load_plan
from ..planner.cost.hardware import parse_cluster
from ..planner.cost.specification import ERROR
from ..planner.recipe.recipe import Recipe
from ..planner.search.clusters import (
    COLOCATED,
    UPDATES,
    ClusterAnswer,
    knee,
    saving,
    tokens_per_second,
)
from ..planner.search.ladder import SAME
from ..planner.search.priced_plan import PricedPlan
from ..planner.search.show import longest_wait
from .inputs import check_output
from .recipe_planning import IterationSize, answer_for


NAMES = {"best": "planned", COLOCATED: COLOCATED, "own": "your plan"}


def compare_clusters(
    recipe: Recipe,
    named: str,
    work: IterationSize,
    prices: Sequence[str],
    plan_path: Path | None,
    picture: Path,
    time_limit: float,
    as_json: bool,
) -> None:
    """Print the time and cost of a recipe on several clusters, and draw them."""
    clusters = list(dict.fromkeys(part.strip() for part in named.split(",") if part.strip()))
    if not clusters:
        raise PlanError("--clusters names clusters to compare, like h100:8x8,h200:8x8.")
    kinds = {cluster: parse_cluster(cluster)[1].name for cluster in clusters}
    by_kind = parse_prices(prices, set(kinds.values()))
    check_output(picture, "the chart")
    users_plan = None if plan_path is None else load_plan(plan_path)
    said = ""
    if work.episodes is None:  # iterations of different sizes cannot be compared
        episodes, largest = max((recipe.workload(parse_cluster(text)[0]).episodes, text) for text in clusters)
        said, work = f" as on {largest}", replace(work, episodes=episodes)
    answers = [
        answer_for(recipe, cluster, work, by_kind.get(kind), users_plan, time_limit) for cluster, kind in kinds.items()
    ]
    draw_clusters(answers, picture)
    console = Console()
    if as_json:
        console.file.write(f"{as_json_text(answers)}\n")
        return
    first = work.of(recipe, parse_cluster(clusters[0])[0])
    console.print(f"{first.episodes:,} episodes an iteration{said}, {first.lengths_text}.")
    console.print(clusters_table(answers))
    for sentence in sentences(answers):
        console.print(sentence)
    console.print(
        f"drawn in {picture}; trl-realloc plan {recipe.path} --cluster KIND:NxM writes the plan of one of them"
    )


def parse_prices(texts: Sequence[str], kinds: Collection[str]) -> dict[str, float]:
    """The price of an hour of each device, by device name.

    Args:
        texts: texts like `h100=2.5`.
        kinds: device names of the clusters.

    Raises:
        PlanError: a text has another form, or no cluster has the device.
    """
    prices: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.partition("=")
        try:
            prices[kind.strip().lower()] = price = float(number)
        except ValueError:
            price = -1.0
        if not 0 < price < 1e6:
            raise PlanError(f"--price is written as h100=2.5, the price of an hour of a device, not {shown(text)}.")
        if kind.strip().lower() not in kinds:
            near = nearest(kind, kinds)
            raise PlanError(
                f"--price {shown(text)}: no cluster has {shown(kind)}; "
                + (f"did you mean {near!r}?" if near else f"there are {', '.join(sorted(kinds))}.")
            )
    return prices


def clusters_table(answers: Sequence[ClusterAnswer]) -> Table:
    """A row for each plan of each cluster, and the reason if none fits."""
    priced = any(answer.price is not None for answer in answers)
    table = Table("cluster", "plan", "seconds", "tokens/s", "GPU-hours", title_justify="left")
    table.title = f"seconds of an iteration, GPU-hours{' and cost' if priced else ''} of {UPDATES:,}"
    for name in (*(["cost"] if priced else []), "free GB", "idle"):
        table.add_column(name)
    for answer in answers:
        if not answer.plans:
            table.add_row(answer.cluster, NAMES["best"], "does not fit")
        for name, plan in answer.plans.items():
            cost = answer.cost(plan)
            free = plan.free
            row = [f"{plan.seconds:.1f}", f"{tokens_per_second(plan):,.0f}", f"{answer.device_hours(plan):,.0f}"]
            row += ["" if cost is None else f"{cost:,.0f}"] if priced else []
            row += ["" if free is None else f"{free / 1e9:.0f}" if plan.fits else "does not fit", f"{plan.idle:.0%}"]
            table.add_row(answer.cluster if name == "best" else "", NAMES[name], *row)
        if answer.best is not None and answer.colocated is None:
            table.add_row("", COLOCATED, "does not fit")
        table.add_section()
    return table


def sentences(answers: Sequence[ClusterAnswer]) -> Iterator[str]:
    """Sentences that summarize the table."""
    for answer in answers:
        if answer.refusal:
            yield f"{answer.cluster}: {answer.refusal}"
        for name, plan in answer.plans.items():
            if answer.best is not None and plan is not answer.best:
                yield f"{answer.cluster}: {_compared(answer.best, plan, NAMES[name])}"
        if answer.best is not None:
            others = () if answer.colocated is None else (answer.colocated,)
            yield from (f"{answer.cluster}: {sentence}" for sentence in longest_wait(answer.best, others))
    with_plan = [answer for answer in answers if answer.best is not None]
    if len(with_plan) > 1 and (knee_answer := knee(answers)) is not None:
        by_price = all(answer.price is not None for answer in with_plan)
        unit = "price" if by_price else "GPU-hours"
        yield f"The knee is {knee_answer.cluster}, where seconds x {unit} are least."
        if not by_price and len({answer.kind for answer in with_plan}) > 1:
            yield "GPU-hours of different devices cost differently: --price h100=2.5 compares by price."
    yield (f"All by specification: a run may differ by {ERROR:.0%}; ratios of plans on the same devices are closer.")


def _compared(best: PricedPlan, plan: PricedPlan, name: str) -> str:
    share = saving(best, plan)
    if abs(share) < SAME:
        return f"{name} is as fast as the planned layout."
    if share >= 0:
        return f"the planned layout saves {share:.0%} over {name}."
    return f"{name} is faster by {-share:.0%}; run it."


def as_json_text(answers: Sequence[ClusterAnswer]) -> str:
    """The answers as JSON, with the plans as in their YAML."""
    knee_answer = knee(answers)
    rows = [{**_of_answer(answer), "knee": answer is knee_answer} for answer in answers]
    return json.dumps({"clusters": rows, "error": ERROR}, indent=1)


def _of_answer(answer: ClusterAnswer) -> dict[str, object]:
    plans = {name: _of_plan(answer, plan) for name, plan in answer.plans.items()}
    return {"cluster": answer.cluster, "device": answer.kind, "refusal": answer.refusal or None, "plans": plans}


def _of_plan(answer: ClusterAnswer, plan: PricedPlan) -> Mapping[str, object]:
    return {
        "seconds": plan.seconds,
        "tokens_per_second": tokens_per_second(plan),
        "device_hours_per_1000": answer.device_hours(plan),
        "cost_per_1000": answer.cost(plan),
        "free_bytes": plan.free,
        "fits": plan.fits,
        "idle": plan.idle,
        "waits": [{"devices": list(wait.devices), "for": dict(wait.calls)} for wait in plan.waits],
        "saves_over_colocated": None if answer.colocated is None else saving(plan, answer.colocated),
        "plan": plan.plan.to_dict(),
    }


def draw_clusters(answers: Sequence[ClusterAnswer], path: Path) -> None:
    """Draw seconds against GPU-hours, or against costs if all prices are known: a point for each plan, a line for each
    kind of device.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    with_plan = [answer for answer in answers if answer.best is not None]
    by_price = all(answer.price is not None for answer in with_plan)
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    for number, kind in enumerate(dict.fromkeys(answer.kind for answer in with_plan)):
        of_kind = [answer for answer in with_plan if answer.kind == kind]
        for name, style in (("best", "o-"), (COLOCATED, "x:"), ("own", "^")):
            points = [
                (_worth(answer, plan, by_price), plan.seconds, answer.cluster)
                for answer in of_kind
                if (plan := answer.plans.get(name)) is not None
            ]
            if points:
                axes.plot(
                    *zip(*[point[:2] for point in points], strict=True),
                    style,
                    color=f"C{number}",
                    label=plain(f"{kind}, {NAMES[name]}"),
                )
            for x, y, text in points if name == "best" else ():
                axes.annotate(plain(text), (x, y), textcoords="offset points", xytext=(6, 6), fontsize="small")
    if (elbow := knee(answers)) is not None and elbow.best is not None:
        axes.plot(
            _worth(elbow, elbow.best, by_price), elbow.best.seconds, "o", ms=14, mfc="none", color="black", label="knee"
        )
    axes.set_xlabel(f"{'cost' if by_price else 'GPU-hours'} of {UPDATES:,} iterations")
    axes.set_ylabel("seconds of an iteration")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if with_plan:
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _worth(answer: ClusterAnswer, plan: PricedPlan, by_price: bool) -> float:
    cost = answer.cost(plan)
    return cost if by_price and cost is not None else answer.device_hours(plan)
