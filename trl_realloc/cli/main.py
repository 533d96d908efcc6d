"""The command `trl-realloc`: chooses, prints and writes plans without torch, and starts jobs that measure a machine or
train.

These jobs are in `measure` and `train`, their start in `measuring_job` and `training_job`, planning of recipes in
`recipe_planning`.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click
import yaml
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..common.errors import PlanError, in_file, shown
from ..common.files import exists, or_packaged, shortened
from ..plan.assignment import between_uses
from ..plan.execution_plan import ExecutionPlan
from ..plan.presets import PRESETS
from ..plan.timeline import Timeline
from ..planner.fused.lists import example
from ..planner.recipe.defaults import DEFAULTS_OF
from ..planner.recipe.recipe import Recipe, is_plan, read_recipe
from ..planner.search.clusters import COLOCATED, with_colocated
from ..planner.search.decision import Decision
from ..planner.search.overlap_worth import OverlapWorth
from ..planner.search.show import (
    alternatives_table,
    draw_estimate,
    explained,
    longest_wait,
    overlap_table,
    plan_tables,
    schedule_table,
    waits_table,
)
from ..trainer.report.run_files import RunFiles
from ..trainer.report.run_report import print_summary, report_run
from .cluster_comparison import compare_clusters
from .inputs import accelerate_trains, check_output, no_such_input, plan_file
from .measuring_job import check_processes, measured_profile, processes_of
from .recipe_planning import IterationSize, check_request, choose_for_recipe, job_cluster, overlap_worth
from .training_job import training_command


# Options of `plan` and `show` that only apply to one kind of input, by parameter name.
OF_PRESETS = {"engine": "--engine", "zero_stage": "--zero-stage"}
OF_RECIPES = {
    "cluster": "--cluster",
    "measured": "--profile",
    "prompt_tokens": "--prompt-tokens",
    "calls": "--explain",
    "time_limit": "--time-limit",
    "clusters": "--clusters",
    "episodes": "--episodes",
    "response_tokens": "--response-tokens",
}
# Options for planning a recipe for one cluster, and for several.
OF_ONE = {"devices": "--devices", "nodes": "--nodes", "cluster": "--cluster", "measured": "--profile"}
OF_ONE |= {"calls": "--explain"}
OF_SEVERAL = {"prices": "--price", "own": "--plan", "as_json": "--json"}


def plan_table(plan: ExecutionPlan) -> Table:
    """The plan as a table with one row per call, in order of execution, followed by how calls overlap."""
    name = plan.name if plan.name.isprintable() else shown(plan.name)  # an escape sequence must not reach the terminal
    title = Text(f"{name or 'plan'}: {plan.cluster}")  # Text, so that rich does not read markup in the name
    overlap = [str(plan.streams)] if plan.streams else []
    overlap += ["an iteration begins when the one before has ended"] if plan.barrier else []
    overlap += [plan.staleness.in_words(plan.graph)] if plan.staleness.versions else []
    overlap += [f"{' and '.join(plan.fused)} train together"] if plan.fused else []
    caption = Text("; ".join(overlap)) if overlap else None
    table = Table("call", "mesh", "engine", "strategy", "between uses", title=title, title_justify="left")
    table.caption, table.caption_justify = caption, "left"
    for name, assignment in plan.assignments.items():
        strategy = str(assignment.strategy)
        if assignment.memory_share is not None:
            strategy += f" share {assignment.memory_share:g}"
        table.add_row(name, str(assignment.mesh), assignment.engine_name, strategy, between_uses(assignment))
    return table


_devices = click.option("--devices", type=int, metavar="N", help="Number of devices (processes) of the whole job.")
_nodes = click.option("--nodes", type=int, metavar="M", help="Number of nodes of these devices; 1 if left out.")
_prompt_tokens = click.option(
    "--prompt-tokens", type=float, metavar="T", help="Mean tokens of a recipe's prompts; 64 if left out."
)
_engine = click.option(
    "--engine",
    type=click.Choice(["vllm", "transformers"]),
    default="vllm",
    show_default=True,
    help="Engine that generates, for a preset.",
)
_zero_stage = click.option(
    "--zero-stage",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="ZeRO stage, for a preset.",
)


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
def show(plan: str, devices: int | None, nodes: int | None, engine: str, zero_stage: int) -> None:
    """Print PLAN, a preset's name or a YAML file. With --devices, check that it fits a job of that size."""
    if plan in PRESETS:
        cluster = job_cluster(plan, devices, nodes)
        chosen = PRESETS[plan](cluster, generation_engine=engine, zero_stage=zero_stage)
    else:
        chosen = plan_file(plan)
        _refuse_given(OF_PRESETS, f"a preset, and {shown(plan)} is a plan's file, which contains them")
        if devices is not None or nodes is not None:
            cluster = job_cluster(plan, devices, nodes)
            with in_file(plan):
                chosen.check_world(cluster.size)
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
@click.option(
    "--cluster",
    metavar="KIND:[Nx]M",
    help="Plan a recipe for N nodes (one if left out) of M known devices, like h100:16x8; without --devices and "
    "--nodes.",
)
@click.option(
    "--profile", "measured", type=click.Path(path_type=Path), help="Plan a recipe for the machine of a profile."
)
@_prompt_tokens
@click.option(
    "--response-tokens",
    metavar="MEAN[/P99]",
    help="Mean and 99th percentile of the responses' tokens, like 400/1024; as many as they may have if left out.",
)
@click.option(
    "--episodes",
    type=int,
    metavar="N",
    help="Episodes of an iteration, on any cluster; by default by the recipe, for --clusters by the largest of them.",
)
@click.option(
    "--clusters",
    metavar="KIND:[Nx]M,...",
    help="Compare clusters, like h100:8x8,h200:8x8: seconds, GPU-hours, memory, and what a colocated run takes.",
)
@click.option("--price", "prices", multiple=True, metavar="KIND=P", help="Price of a device's hour, for --clusters.")
@click.option("--plan", "own", type=click.Path(path_type=Path), help="A plan file to compare with, for --clusters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for --clusters.")
@click.option(
    "--explain",
    "calls",
    multiple=True,
    is_flag=False,
    flag_value="",
    metavar="[CALL]",
    help="Print what CALL spends its time on; with no CALL (last argument), the savings of each way to overlap calls.",
)
@click.option("--time-limit", type=float, default=5.0, show_default=True, metavar="S", help="Seconds of the search.")
def plan(
    what: str,
    devices: int | None,
    nodes: int | None,
    engine: str,
    zero_stage: int,
    output: Path | None,
    cluster: str | None,
    measured: Path | None,
    prompt_tokens: float | None,
    response_tokens: str | None,
    episodes: int | None,
    clusters: str | None,
    prices: tuple[str, ...],
    own: Path | None,
    as_json: bool,
    calls: tuple[str, ...],
    time_limit: float,
) -> None:
    """Choose the plan for a RECIPE and print the alternatives, or write the plan of a PRESET.

    RECIPE is a YAML file, or one that comes with the package, by its name: llama-8b/ppo.yaml.

    A recipe is planned for --cluster, for the machine of --profile, or for this one, which is measured the first time.
    The plan is written to plan.yaml with pictures, plan.png and plan.memory.png, and a trace for Perfetto,
    plan.trace.json. Without -o nothing is overwritten: where there is a plan.yaml, it is plan-2.yaml, and so on.

    With --clusters no plan is written: a table compares the clusters, and clusters.png (or -o) shows it.
    """
    if what not in PRESETS:
        file = or_packaged(what)
        if not exists(file):
            raise PlanError(no_such_input(what))
        if is_plan(file):
            raise PlanError(f"{what} is a plan, and not a recipe to plan for; look at it with trl-realloc show {what}.")
        _refuse_given(OF_PRESETS, f"a preset, and {what} is a recipe: the planner chooses the layouts")
        work = IterationSize.parse(episodes, response_tokens)
        if clusters is not None:
            _refuse_given(OF_ONE, "one cluster, and --clusters names those to compare")
            check_request(None, None, None, None, time_limit, ())
            recipe = read_recipe(file, prompt_tokens)
            _say_who_trains(recipe)
            compare_clusters(recipe, clusters, work, prices, own, output or Path("clusters.png"), time_limit, as_json)
            return
        _refuse_given(OF_SEVERAL, "--clusters, which is not set")
        output = output or _free_name()
        check_output(output, "the plan")
        named = [call for call in calls if call]  # "" is --explain without a call
        check_request(cluster, measured, devices, nodes, time_limit, named)
        recipe = read_recipe(file, prompt_tokens)
        _say_who_trains(recipe)
        for call in named:
            recipe.graph.call(call)  # the run may have no actor.forward
        decision = choose_for_recipe(recipe, cluster, measured, devices, nodes, time_limit, work)
        chosen = with_colocated(decision, time_limit)
        if corrected := chosen.best.space.pricing.calibration.described():
            click.echo(f"The estimates are corrected by the times of runs on this machine: {corrected}.")
        worth = overlap_worth(recipe, chosen, time_limit) if len(named) < len(calls) else None
        _show_choice(chosen, named, worth, output, assumes_prompts=prompt_tokens is None)
        if chosen.search.is_cut_short:
            click.echo(
                f"The time limit of {time_limit:g} s ended the search; a longer --time-limit may find a better plan."
            )
        return
    _refuse_given(OF_RECIPES, f"a recipe, and {what} is a preset, for which nothing is chosen")
    written = PRESETS[what](job_cluster(what, devices, nodes), generation_engine=engine, zero_stage=zero_stage)
    if output is None:
        click.echo(written.to_yaml(), nl=False)
        return
    _save(written, output)
    Console().print(plan_table(written))
    click.echo(f"written to {output}; run it with plan: {output}")


def _say_who_trains(recipe: Recipe) -> None:
    if (sentence := accelerate_trains(recipe)) is not None:
        click.echo(sentence, err=True)


def _free_name() -> Path:
    """An unused file name for a plan in the working directory, because an existing plan may have been edited."""
    names = itertools.chain(["plan.yaml"], (f"plan-{number}.yaml" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not exists(path))


def _refuse_given(options: Mapping[str, str], instead: str) -> None:
    """Refuse options that would have no effect.

    Args:
        options: spelling of each option, by parameter name.
        instead: use of the options, and the actual input, for the message.
    """
    source = click.get_current_context().get_parameter_source
    spellings = [text for name, text in options.items() if source(name) is ParameterSource.COMMANDLINE]
    if spellings:
        verb, them = ("is", "it") if len(spellings) == 1 else ("are", "them")
        raise PlanError(f"{' and '.join(spellings)} {verb} for {instead}; leave {them} out.")


def _show_choice(
    chosen: Decision, calls: Sequence[str], worth: OverlapWorth | None, output: Path, *, assumes_prompts: bool
) -> None:
    console = Console()
    source = "assumed; --prompt-tokens sets their length" if assumes_prompts else "--prompt-tokens"
    work = chosen.best.space.pricing.workload
    as_long = ", as long as they may be" if work.response_tokens[0] == work.response_tokens[-1] else ""
    lengths = work.lengths_text.replace(" tokens", f" tokens ({source})", 1)
    console.print(f"{work.episodes:,} episodes an iteration, {lengths}{as_long}.")
    console.print(f"{chosen.summary[0].upper()}{chosen.summary[1:]}.")
    for table in plan_tables(chosen.best):
        console.print(table)
    if chosen.best.waits:
        console.print(waits_table(chosen.best.waits))
    if chosen.alternatives:
        console.print(alternatives_table(chosen))
    if chosen.best.space.cluster.size > 1 and COLOCATED not in {
        alternative.name for alternative in chosen.alternatives
    }:
        console.print("The choice is the best colocated plan: every call on all devices, one after the other.")
    others = [alternative.plan for alternative in chosen.alternatives if alternative.plan is not None]
    for sentence in longest_wait(chosen.best, others):
        console.print(sentence)
    for call in calls:
        console.print(explained(chosen.best, call))
    if worth is not None:
        console.print(overlap_table(worth))
        for sentence in worth.sentences:
            console.print(sentence)
    _save(chosen.best.plan, output)
    try:
        pictures = ", ".join(str(path) for path in draw_estimate(chosen.best, output.with_suffix("")))
    except OSError as error:
        raise PlanError(f"the plan's picture cannot be written beside {output} ({error.strerror}).") from None
    click.echo(f"written to {output}, {pictures}; run it with plan: {output}")


def _save(written: ExecutionPlan, output: Path) -> None:
    try:
        written.save(output)
    except OSError as error:
        raise PlanError(f"the plan cannot be written to {output} ({error.strerror}).") from None


@commands.command()
@click.argument("what", nargs=-1, required=True, metavar="RECIPE | ACTOR [CRITIC]")
@_devices
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("profile.json"),
    show_default=True,
    help="Write the profile here.",
)
@_prompt_tokens
def profile(what: tuple[str, ...], devices: int | None, output: Path, prompt_tokens: float | None) -> None:
    """Measure the models of a RECIPE, or those in the folders ACTOR and CRITIC, on this machine.

    Give as many --devices as the run will have. Generation is measured under tensor degrees too, which a run's own
    measuring leaves out.
    """
    if len(what) > 2:
        raise PlanError(f"profile takes a recipe, or the folders of actor and critic, not {len(what)} arguments.")
    check_processes(devices)
    check_output(output, "the profile")
    with tempfile.TemporaryDirectory(prefix="trl_realloc_") as folder:
        path = or_packaged(what[0])
        if not path.is_file():
            if absent := [shown(name) for name in what if not exists(Path(name) / "config.json")]:
                raise PlanError(f"{' and '.join(absent)}: neither a recipe nor a folder with a model's config.json.")
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


def _start(algorithm: str, words: tuple[str, ...]) -> None:
    command = training_command(algorithm, words)
    os.execv(command[0], command)


for _algorithm in DEFAULTS_OF:
    commands.command(
        _algorithm,
        context_settings={"ignore_unknown_options": True},
        help=f"""Train by {_algorithm.upper()} as a recipe says.

        Settings given as --KEY VALUE take precedence over the recipe's. It names models, data set (dataset_name or
        dataset_function) and rewards (reward_funcs, by import path, or a reward model). --num_processes N or
        --accelerate_config FILE, in the recipe too, start several processes.
        """,
        params=[
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="--config RECIPE [--KEY VALUE ...]")
        ],
    )(partial(_start, _algorithm))


@commands.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def report(run_dir: Path) -> None:
    """Write the report of the run in RUN_DIR again: reward, time by call, a picture of two updates, a trace."""
    run = RunFiles.load(run_dir)
    written = report_run(run)
    print_summary(run)
    click.echo(f"written to {written}")


@commands.command()
@click.argument("runs", nargs=2, metavar="RUN OTHER_RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(runs: tuple[Path, Path]) -> None:
    """Compare the seconds of the calls of two RUNS, which are folders with a timeline.json."""
    try:
        first, second = (Timeline.load(run / "timeline.json") for run in runs)
    except PlanError as error:
        raise PlanError(f"{error.problems[0][:-1]}; a run writes it to its output_dir when it ends.") from None
    title = "seconds per update, mean without the first update of three or more, which compiles"
    table = Table("call", *(str(run) for run in runs), "ratio", title=title, title_justify="left")
    first, second = first.warm, second.warm
    of_first, of_second = first.seconds_by_call(), second.seconds_by_call()
    for call in dict.fromkeys([*of_first, *of_second]):
        first_s, second_s = of_first.get(call), of_second.get(call)
        ratio = f"{second_s / first_s:.2f}x" if first_s and second_s else ""
        table.add_row(call, *("" if seconds is None else f"{seconds:.3f}" for seconds in (first_s, second_s)), ratio)
    whole = [timeline.seconds_per_update for timeline in (first, second)]
    table.add_row(
        "whole update", *(f"{seconds:.3f}" for seconds in whole), f"{whole[1] / whole[0]:.2f}x" if all(whole) else ""
    )
    Console().print(table)


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
    except OSError as error:  # a full disk, or a folder without read permission
        print(f"trl-realloc: {shortened(error.filename or 'input or output')}: {error.strerror}.", file=sys.stderr)
        return 2
    except click.Abort:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
