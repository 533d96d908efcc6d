"""`trl-realloc`: plans on a laptop. Chooses, shows and writes plans without torch; measures with it, in a job."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .assignment import CACHED_TOKENS
from .cluster import Cluster
from .errors import PlanError, suggest
from .plan import ExecutionPlan
from .planner.choose import Chosen, choose
from .planner.cost import Pricing
from .planner.hardware import Analytic, parse_cluster
from .planner.presets import PRESETS, load_plan
from .planner.profile import Measured, Profile
from .planner.show import beaten_table, draw_estimate, estimate_table, explained
from .planner.task import Task, is_recipe, read_task
from .realloc.memory import MOMENTS
from .report import load_metrics, print_summary, report_run
from .timeline import Timeline


def plan_table(plan: ExecutionPlan) -> Table:
    """The plan as a table for people, a row for each call in the order in which they run."""
    title = Text(f"{plan.name or 'plan'}: {plan.cluster}")  # a name is no markup
    table = Table("call", "mesh", "engine", "strategy", "between turns", title=title, title_justify="left")
    for name, assignment in plan.assignments.items():
        rests = "offload" if assignment.offload else "drop" if assignment.drop else ""
        table.add_row(name, str(assignment.mesh), assignment.engine, str(assignment.strategy), rests)
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
@click.argument("what", metavar="RECIPE|PRESET")
@_devices
@_nodes
@_engine
@_zero_stage
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here.")
@click.option("--cluster", metavar="KIND:NxM", help="Plan a recipe for N nodes of M known devices, like h100:16x8.")
@click.option("--profile", "measured", type=click.Path(path_type=Path), help="Plan a recipe for a measured machine.")
@click.option("--prompt-tokens", type=float, help="Mean length of a prompt, for a recipe.")
@click.option("--explain", "calls", multiple=True, metavar="CALL", help="Say what bounds a call, in numbers.")
@click.option("--time-limit", type=float, default=5.0, show_default=True, metavar="S", help="Of the search.")
def plan(
    what: str,
    devices: int | None,
    nodes: int,
    engine: str,
    zero_stage: int,
    output: Path | None,
    cluster: str | None,
    measured: Path | None,
    prompt_tokens: float | None,
    calls: tuple[str, ...],
    time_limit: float,
) -> None:
    """Choose the plan for a RECIPE, and say what it was chosen over; or write the plan that a PRESET stands for.

    A recipe is planned for --cluster, for the machine of --profile, or for this one, which is measured the first time.
    The plan is written to plan.yaml with a picture of it, plan.png, and a trace for Perfetto, plan.trace.json.
    """
    if is_recipe(what):
        output = output or Path("plan.yaml")
        if not output.parent.is_dir():  # said before anything is measured
            raise PlanError(f"the plan cannot be written to {output} (there is no folder {output.parent}).")
        chosen = _choose(read_task(what, prompt_tokens), cluster, measured, devices, nodes, time_limit)
        _show_choice(chosen, calls, output)
        return
    if what not in PRESETS:
        raise PlanError(f"{what!r} is neither a recipe nor a preset; {suggest(what, PRESETS)}")
    written = PRESETS[what](_cluster(what, devices, nodes), generation_engine=engine, zero_stage=zero_stage)
    if output is None:
        click.echo(written.to_yaml(), nl=False)
        return
    _save(written, output)
    Console().print(plan_table(written))
    click.echo(f"written to {output}; run it with plan: {output}")


def _choose(
    task: Task, cluster: str | None, measured: Path | None, devices: int | None, nodes: int, time_limit: float
) -> Chosen:
    if cluster is not None:
        machine, device = parse_cluster(cluster)
        workload, share = task.workload(machine), task.settings["vllm_gpu_memory_utilization"]
        pricing = Pricing(machine, workload, Analytic(device), memory=device.memory, vllm_share=share)
        specs = task.specs(bytes_per_element=2)
    else:
        path = measured or _measure(task, devices or _processes(task.recipe))
        profile = Profile.load(path)
        machine = Cluster(nodes, profile.devices // nodes)
        pricing = Pricing(
            machine, task.workload(machine), Measured(profile), moments=MOMENTS, default_cap=CACHED_TOKENS
        )
        specs = task.specs()
    return choose(specs, pricing, generation_engine=task.engine, time_limit_s=time_limit)


def _show_choice(chosen: Chosen, calls: Sequence[str], output: Path) -> None:
    console = Console()
    work = chosen.best.space.pricing.workload
    console.print(
        f"{work.episodes:,} episodes an iteration, prompts of {work.prompt_tokens:g} tokens (--prompt-tokens), "
        f"responses of {work.response_tokens[-1]}, as long as they may be."
    )
    console.print(f"{chosen.said[0].upper()}{chosen.said[1:]}.")
    console.print(estimate_table(chosen.best))
    if chosen.beaten:
        console.print(beaten_table(chosen))
    for call in calls:
        console.print(explained(chosen.best, call))
    _save(chosen.best.plan, output)
    drawn = " and ".join(str(path) for path in draw_estimate(chosen.best, output.with_suffix("")))
    click.echo(f"written to {output}, {drawn}; run it with plan: {output}")


def _save(written: ExecutionPlan, output: Path) -> None:
    try:
        written.save(output)
    except OSError as error:
        raise PlanError(f"the plan cannot be written to {output} ({error.strerror}).") from None


@commands.command()
@click.argument("what", nargs=-1, required=True, metavar="RECIPE | ACTOR [CRITIC]")
@_devices
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("profile.json"))
@click.option("--prompt-tokens", type=float, help="Mean length of a prompt.")
def profile(what: tuple[str, ...], devices: int | None, output: Path, prompt_tokens: float | None) -> None:
    """Measure what this machine needs for a recipe's models, or for those in the folders ACTOR and CRITIC, with as many
    processes as the run will have; generation under tensor degrees too, which a run's own measuring leaves out."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(what[0])
        if not is_recipe(recipe):
            models = {"sft_model_path": str(recipe.resolve()), "reward_model_path": str(Path(what[-1]).resolve())}
            recipe = Path(folder) / "models.yaml"
            recipe.write_text(yaml.safe_dump(models), encoding="utf-8")
        measured = _measure(read_task(recipe, prompt_tokens), devices or _processes(recipe), "thorough")
    output.write_bytes(measured.read_bytes())
    click.echo(f"{len(Profile.load(output).observations)} observations in {output}")


def _measure(task: Task, devices: int, *how: str) -> Path:
    """Run the short job that measures; its profile's path."""
    output = Path(tempfile.mkdtemp(prefix="trl_realloc_")) / "profile.json"
    job = ["-m", "trl_realloc.profiling.job", str(task.recipe), str(output), str(task.prompt_tokens), *how]
    launch = [sys.executable]
    if devices > 1:
        launch += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes"]
        launch += [str(devices), "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run([*launch, *job], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode or not output.is_file():
        said = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise PlanError(f"measuring {task.recipe} on {devices} processes failed: {said}")
    return output


def _processes(recipe: Path) -> int:
    """As many as the accelerate config beside the recipe says, else one."""
    config = recipe.parent / "accelerate.yaml"
    try:
        return int(yaml.safe_load(config.read_text(encoding="utf-8"))["num_processes"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return 1


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
