"""The command `trl-realloc`: chooses, prints and writes plans without torch, and starts a job that measures a machine.

That job is in `measure`, and its start in `measuring_job`. Choosing a plan is in `planner`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..common.errors import PlanError, Problems, shown, suggest
from ..common.files import exists, shortened
from ..plan.algorithm_graphs import ppo_graph
from ..plan.assignment import CACHED_TOKENS
from ..plan.cluster import MOST_DEVICES, Cluster
from ..plan.execution_plan import ExecutionPlan
from ..plan.presets import PRESETS, load_plan
from ..plan.timeline import Timeline
from ..planner.analytic_rates import AnalyticRates
from ..planner.choose import Decision, choose
from ..planner.cost import Pricing
from ..planner.device_memory import gpu_memory
from ..planner.fused_lists import example
from ..planner.hardware import Rates, parse_cluster
from ..planner.measured_rates import MeasuredRates
from ..planner.overlap_worth import OverlapWorth
from ..planner.profile import Profile, model_key
from ..planner.recipe import Recipe, is_plan, read_recipe
from ..planner.show import alternatives_table, draw_estimate, explained, overlap_table, plan_tables, schedule_table
from ..trainer.report import REPORTED, load_metrics, print_summary, report_run
from .measuring_job import check_processes, measured_profile, processes_of


LONGEST_SEARCH = 86_400  # seconds
OVERLAPS = ""  # --explain without a call


def plan_table(plan: ExecutionPlan) -> Table:
    """The plan as a table with a row for each call, in the order in which calls run. Below it how calls overlap."""
    name = plan.name if plan.name.isprintable() else shown(plan.name)  # an escape sequence must not reach the terminal
    title = Text(f"{name or 'plan'}: {plan.cluster}")  # Text, so that rich does not read markup in the name
    overlap = [str(plan.streams)] if plan.streams else []
    overlap += ["an iteration begins when the one before has ended"] if plan.barrier else []
    overlap += [plan.staleness.in_words(plan.graph)] if plan.staleness.versions else []
    overlap += [f"{' and '.join(plan.fused)} train together"] if plan.fused else []
    caption = Text("; ".join(overlap)) if overlap else None
    table = Table("call", "mesh", "engine", "strategy", "between turns", title=title, title_justify="left")
    table.caption, table.caption_justify = caption, "left"
    for name, assignment in plan.assignments.items():
        between_turns = "offload" if assignment.offload else "drop" if assignment.drop else ""
        table.add_row(name, str(assignment.mesh), assignment.engine, str(assignment.strategy), between_turns)
    return table


_devices = click.option("--devices", type=int, metavar="N", help="Devices of the whole job (its processes).")
_nodes = click.option("--nodes", type=int, default=1, show_default=True, metavar="M", help="Nodes they are on.")
_prompt_tokens = click.option("--prompt-tokens", type=float, metavar="T", help="Mean length of a recipe's prompts.")
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
        chosen = PRESETS[plan](cluster, generation_engine=engine, zero_stage=zero_stage)
    else:
        chosen = load_plan(plan)
        if devices is not None:
            chosen.check_world(_cluster(plan, devices, nodes).size)
    Console().print(plan_table(chosen))
    if chosen.fused:
        Console().print(schedule_table(chosen, example(chosen), is_example=True))


@commands.command()
@click.argument("what", metavar="RECIPE|PRESET")
@_devices
@_nodes
@_engine
@_zero_stage
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here.")
@click.option("--cluster", metavar="KIND:NxM", help="Plan a recipe for N nodes of M known devices, like h100:16x8.")
@click.option("--profile", "measured", type=click.Path(path_type=Path), help="Plan a recipe for a measured machine.")
@_prompt_tokens
@click.option(
    "--explain",
    "calls",
    multiple=True,
    is_flag=False,
    flag_value=OVERLAPS,
    metavar="[CALL]",
    help="Say what bounds a call, in numbers; without CALL what each way to overlap calls is worth.",
)
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
    if what not in PRESETS:
        if not exists(what):
            raise PlanError(f"{shown(what)} is neither a recipe nor a preset; {suggest(what, PRESETS)}")
        if is_plan(Path(what)):
            raise PlanError(f"{what} is a plan, and not a recipe to plan for; look at it with trl-realloc show {what}.")
        output = output or Path("plan.yaml")
        _check_output(output, "the plan")
        named = [call for call in calls if call != OVERLAPS]
        _check_request(cluster, measured, devices, nodes, time_limit, named)
        recipe = read_recipe(what, prompt_tokens)
        for call in named:
            recipe.graph.call(call)  # the run may have no actor.forward
        chosen = _choose(recipe, cluster, measured, devices, nodes, time_limit)
        worth = _worth(recipe, chosen, time_limit) if len(named) < len(calls) else None
        _show_choice(chosen, named, worth, output)
        return
    written = PRESETS[what](_cluster(what, devices, nodes), generation_engine=engine, zero_stage=zero_stage)
    if output is None:
        click.echo(written.to_yaml(), nl=False)
        return
    _save(written, output)
    Console().print(plan_table(written))
    click.echo(f"written to {output}; run it with plan: {output}")


def _check_output(output: Path, what: str) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if not exists(output.parent):
        raise PlanError(f"{what} cannot be written to {shortened(output)} (there is no folder {output.parent}).")
    if not os.access(output if exists(output) else output.parent, os.W_OK):
        raise PlanError(f"{what} cannot be written to {output} (no permission to write there).")


def _check_request(
    cluster: str | None,
    measured: Path | None,
    devices: int | None,
    nodes: int,
    time_limit: float,
    calls: Sequence[str],
) -> None:
    """Refuse options that exclude each other, and values that are out of range."""
    problems = Problems()
    if cluster is not None and measured is not None:
        problems.append(
            "--cluster plans for devices by their specification and --profile for a measured machine; keep one."
        )
    if cluster is not None and devices is not None:
        problems.append("--cluster says how many devices there are; leave --devices out.")
    if not 0 < time_limit <= LONGEST_SEARCH:
        problems.append(
            f"--time-limit is a number of seconds above 0 and up to {LONGEST_SEARCH:,}, not {time_limit:g}."
        )
    if nodes < 1 or (devices is not None and devices < 1):
        problems.append(f"--devices and --nodes are 1 or more, not {devices} and {nodes}.")
    for call in calls:
        with problems.of("--explain"):
            ppo_graph(proximal=True).call(call)
    problems.refuse()


def _choose(
    recipe: Recipe, cluster: str | None, measured: Path | None, devices: int | None, nodes: int, time_limit: float
) -> Decision:
    if cluster is not None:
        machine, device = parse_cluster(cluster)
        pricing = _pricing(recipe, machine, AnalyticRates(device), device.memory)
    else:
        if measured is None:
            check_processes(devices)
        recipe.specs()  # refuses a model that cannot be planned for, before it is measured
        profile = Profile.load(measured) if measured else measured_profile(recipe, devices or processes_of(recipe.path))
        if devices is not None and devices != profile.devices:
            raise PlanError(f"{measured} was measured on {profile.devices} devices, but --devices is {devices}.")
        machine = _cluster(recipe.path.name, profile.devices, nodes)
        _check_measured(profile, recipe, measured)
        if corrected := profile.corrections.described():
            click.echo(f"The estimates are corrected by the times of runs on this machine: {corrected}.")
        pricing = _pricing(recipe, machine, MeasuredRates(profile), profile.memory if profile.is_accelerator else None)
        cap = None if profile.is_accelerator else CACHED_TOKENS
        pricing = replace(pricing, default_cap=cap, corrections=profile.corrections)
    return choose(
        recipe.specs(),
        pricing,
        graph=recipe.graph,
        generation_engine=recipe.engine,
        max_staleness=recipe.max_staleness,
        time_limit_s=time_limit,
    )


def _worth(recipe: Recipe, chosen: Decision, time_limit: float) -> OverlapWorth:
    """What each way to overlap calls is worth."""
    graph = recipe.stale_graph
    corrects = recipe.algorithm != "rloo"
    return OverlapWorth(chosen, graph, recipe.specs(graph), recipe.max_staleness, recipe.engine, time_limit, corrects)


def _pricing(recipe: Recipe, machine: Cluster, rates: Rates, memory: float | None) -> Pricing:
    """The cost model of a recipe.

    Args:
        memory: of a device in bytes; `None` if it is not known.
    """
    names = ("vllm_gpu_memory_utilization", "memory_headroom", "vllm_enable_sleep_mode")
    share, headroom, sleeps = (recipe.settings[key] for key in names)
    of_device = None if memory is None else gpu_memory(memory, headroom)
    return Pricing(machine, recipe.workload(machine), rates, memory=of_device, vllm_share=share, vllm_sleeps=sleeps)


def _check_measured(profile: Profile, recipe: Recipe, path: Path | None) -> None:
    """Refuse a profile that has no measurements of the recipe's models."""
    rates = MeasuredRates(profile)
    unknown = {
        model_key(spec)
        for call, specs in recipe.specs().items()
        for spec in specs
        if not rates.measured(spec, 1, 1, generates=call.endswith(".generate"))
    }
    if unknown:
        raise PlanError(
            f"{path or 'the profile'} has no measurements of {' or of '.join(sorted(unknown))}; make one with "
            f"trl-realloc profile {recipe.path}."
        )


def _show_choice(chosen: Decision, calls: Sequence[str], worth: OverlapWorth | None, output: Path) -> None:
    console = Console()
    work = chosen.best.space.pricing.workload
    console.print(
        f"{work.episodes:,} episodes an iteration, prompts of {work.prompt_tokens:g} tokens (--prompt-tokens), "
        f"responses of {work.response_tokens[-1]}, as long as they may be."
    )
    console.print(f"{chosen.summary[0].upper()}{chosen.summary[1:]}.")
    for table in plan_tables(chosen.best):
        console.print(table)
    if chosen.alternatives:
        console.print(alternatives_table(chosen))
    for call in calls:
        console.print(explained(chosen.best, call))
    if worth is not None:
        console.print(overlap_table(worth))
        for sentence in worth.sentences:
            console.print(sentence)
    _save(chosen.best.plan, output)
    try:
        drawn = ", ".join(str(path) for path in draw_estimate(chosen.best, output.with_suffix("")))
    except OSError as error:
        raise PlanError(f"the plan's picture cannot be written beside {output} ({error.strerror}).") from None
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
@_prompt_tokens
def profile(what: tuple[str, ...], devices: int | None, output: Path, prompt_tokens: float | None) -> None:
    """Measure what this machine needs for a recipe's models, or for those in the folders ACTOR and CRITIC, with as many
    processes as the run will have; generation under tensor degrees too, which a run's own measuring leaves out."""
    if len(what) > 2:
        raise PlanError(f"profile takes a recipe, or the folders of actor and critic, not {len(what)} arguments.")
    check_processes(devices)
    _check_output(output, "the profile")
    with tempfile.TemporaryDirectory(prefix="trl_realloc_") as folder:
        path = Path(what[0])
        if not path.is_file():
            models = {"sft_model_path": str(path.resolve()), "reward_model_path": str(Path(what[-1]).resolve())}
            path = Path(folder) / "models.yaml"
            path.write_text(yaml.safe_dump(models), encoding="utf-8")
        recipe = read_recipe(path, prompt_tokens)
        recipe.specs()
        measured = measured_profile(recipe, devices or processes_of(path), "thorough")
    try:
        measured.save(output)
    except OSError as error:
        raise PlanError(f"the profile cannot be written to {output} ({error.strerror}).") from None
    click.echo(f"{len(measured.observations)} observations in {output}")


@commands.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(run_dir: Path) -> None:
    """Write the report of the run in RUN_DIR again: reward, time by call, a picture of two updates, a trace."""
    try:
        written = report_run(run_dir)
        print_summary(load_metrics(run_dir / "metrics.jsonl", REPORTED), run_dir)
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(str(error)) from None
    click.echo(f"written to {written}")


@commands.command()
@click.argument("runs", nargs=2, type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(runs: tuple[Path, Path]) -> None:
    """Compare what the calls of two RUNS took, such as of one recipe under two plans: folders with a timeline.json."""
    try:
        first, second = (Timeline.load(run / "timeline.json") for run in runs)
    except PlanError as error:
        raise PlanError(f"{error.problems[0][:-1]}; save one with trainer.timeline.save(path).") from None
    table = Table("call", *(str(run) for run in runs), "ratio", title="seconds per update", title_justify="left")
    for call, first_s, second_s, _ in first.compare(second):
        ratio = f"{second_s / first_s:.2f}x" if first_s and second_s else ""
        table.add_row(call, *("" if seconds is None else f"{seconds:.3f}" for seconds in (first_s, second_s)), ratio)
    whole = [timeline.seconds_per_step for timeline in (first, second)]
    table.add_row(
        "whole update", *(f"{seconds:.3f}" for seconds in whole), f"{whole[1] / whole[0]:.2f}x" if all(whole) else ""
    )
    Console().print(table)


def _cluster(plan: str, devices: int | None, nodes: int) -> Cluster:
    """The job's cluster by the options of the command. Raises `PlanError` if there is no such cluster."""
    if devices is None:
        raise PlanError(f"the size of the job is missing: say --devices N, for instance {plan} --devices 8.")
    if devices > MOST_DEVICES:
        raise PlanError(f"--devices {devices}: a plan can be for {MOST_DEVICES:,} devices at most.")
    if nodes < 1 or devices < 1 or devices % nodes:
        raise PlanError(
            f"--devices {devices} on --nodes {nodes}: both are 1 or more, and each node has equally many devices."
        )
    return Cluster(nodes, devices // nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, 2 after a message on stderr for a mistake of the user, or 130 after an interrupt.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        commands.main(words or ["--help"], prog_name="trl-realloc", standalone_mode=False)
    except click.ClickException as error:
        print(f"trl-realloc: {error.format_message()}", file=sys.stderr)
        return 2
    except PlanError as error:
        print("\n".join(f"trl-realloc: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except OSError as error:  # a disk that is full, a folder that may not be read
        print(f"trl-realloc: {shortened(error.filename or 'input or output')}: {error.strerror}.", file=sys.stderr)
        return 2
    except click.Abort:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
