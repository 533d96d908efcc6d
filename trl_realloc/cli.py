"""`trl-realloc`: plans on a laptop. Shows a plan and writes one; needs neither torch nor a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .cluster import Cluster
from .errors import PlanError, suggest
from .plan import ExecutionPlan
from .planner.presets import PRESETS, load_plan
from .report import load_metrics, print_summary, report_run
from .timeline import Timeline


def plan_table(plan: ExecutionPlan) -> Table:
    """The plan as a table for people, a row for each call in the order in which they run."""
    title = Text(f"{plan.name or 'plan'}: {plan.cluster}")  # a name is no markup
    table = Table("call", "mesh", "engine", "strategy", "offload", title=title, title_justify="left")
    for name, assignment in plan.assignments.items():
        offload = "yes" if assignment.offload else ""
        table.add_row(name, str(assignment.mesh), assignment.engine, str(assignment.strategy), offload)
    return table


_devices = click.option("--devices", type=int, metavar="N", help="Devices of the whole job (its processes).")
_nodes = click.option("--nodes", type=int, default=1, show_default=True, metavar="M", help="Nodes they are on.")
_engine = click.option(
    "--engine",
    type=click.Choice(["vllm", "transformers"]),
    default="vllm",
    show_default=True,
    help="What generates, in a preset.",
)
_zero_stage = click.option("--zero-stage", type=click.IntRange(0, 3), default=0, show_default=True, help="In a preset.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trl-realloc")
def commands() -> None:
    """Execution plans: which devices run each model function call of an iteration, and how."""


@commands.command()
@click.argument("plan")
@_devices
@_nodes
@_engine
@_zero_stage
def show(plan: str, devices: int | None, nodes: int, engine: str, zero_stage: int) -> None:
    """Print PLAN, a preset's name or a YAML file. With --devices, check that it fits a job of that size."""
    if plan in PRESETS:
        cluster = _cluster(plan, devices, nodes)
        shown = PRESETS[plan](cluster, generation_engine=engine, zero_stage=zero_stage)
    else:
        shown = load_plan(plan)
        if devices is not None:
            shown.check_world(devices)
    Console().print(plan_table(shown))


@commands.command()
@click.argument("preset")
@_devices
@_nodes
@_engine
@_zero_stage
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write here, not to the screen.")
def plan(preset: str, devices: int | None, nodes: int, engine: str, zero_stage: int, output: Path | None) -> None:
    """Write the plan that PRESET stands for as YAML, to be read, edited and run."""
    if preset not in PRESETS:
        raise PlanError(f"there is no preset {preset!r}; {suggest(preset, PRESETS)}")
    cluster = _cluster(preset, devices, nodes)
    written = PRESETS[preset](cluster, generation_engine=engine, zero_stage=zero_stage)
    if output is None:
        click.echo(written.to_yaml(), nl=False)
        return
    try:
        written.save(output)
    except OSError as error:
        raise PlanError(f"the plan cannot be written to {output} ({error.strerror}).") from None
    Console().print(plan_table(written))
    click.echo(f"written to {output}; run it with plan: {output}")


@commands.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(run_dir: Path) -> None:
    """Write the report of the run in RUN_DIR again: reward, time by call, a picture of two updates, a trace."""
    try:
        written = report_run(run_dir)
    except ValueError as error:
        raise PlanError(str(error)) from None
    print_summary(load_metrics(run_dir / "metrics.jsonl"))
    click.echo(f"written to {written}")


@commands.command()
@click.argument("runs", nargs=2, type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(runs: tuple[Path, Path]) -> None:
    """Compare what the calls of two RUNS took, such as of one recipe under two plans: folders with a timeline.json."""
    try:
        first, second = (Timeline.load(run / "timeline.json") for run in runs)
    except (OSError, ValueError) as error:
        raise PlanError(f"{error}; save one with trainer.timeline.save(path).") from None
    table = Table("call", *(str(run) for run in runs), "ratio", title="seconds per update", title_justify="left")
    for call, one, other, _ in first.compare(second):
        ratio = f"{other / one:.2f}x" if one and other else ""
        table.add_row(call, *("" if each is None else f"{each:.3f}" for each in (one, other)), ratio)
    whole = [timeline.seconds_per_step for timeline in (first, second)]
    table.add_row(
        "whole update", *(f"{each:.3f}" for each in whole), f"{whole[1] / whole[0]:.2f}x" if all(whole) else ""
    )
    Console().print(table)


def _cluster(plan: str, devices: int | None, nodes: int) -> Cluster:
    """The job's cluster by the command's options. Raises `PlanError` where they do not make one."""
    if devices is None:
        raise PlanError(f"the size of the job is missing: say --devices N, for instance {plan} --devices 8.")
    if nodes < 1 or devices < 1 or devices % nodes:
        raise PlanError(
            f"--devices {devices} on --nodes {nodes}: both are 1 or more, and each node has equally many devices."
        )
    return Cluster(nodes, devices // nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code: 0, or 2 after a sentence on stderr for what the person got wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        commands.main(given or ["--help"], prog_name="trl-realloc", standalone_mode=False)
    except click.ClickException as error:
        print(f"trl-realloc: {error.format_message()}", file=sys.stderr)
        return 2
    except PlanError as error:
        print("\n".join(f"trl-realloc: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except click.Abort:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
