from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from trl import ModelConfig

import trl_realloc
from trl_realloc.cli import measure
from trl_realloc.cli.main import main
from trl_realloc.cli.measuring_job import processes_of
from trl_realloc.cli.recipe_parser import CONFIGS, RecipeError
from trl_realloc.cli.recipe_planning import choose_for_recipe
from trl_realloc.cli.train import RunArguments
from trl_realloc.cli.training_job import training_command
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import PRESETS, flatten, interleave
from trl_realloc.plan.spans import Span
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.recipe.defaults import LAUNCH
from trl_realloc.planner.recipe.recipe import read_recipe
from trl_realloc.planner.search.ladder import FUSED


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_written_as_a_valid_plan(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", preset, "--devices", "1"]) == 0
    assert ExecutionPlan.from_yaml(capsys.readouterr().out) == PRESETS[preset](Cluster(1, 1))
    assert main(["plan", preset, "--devices", "6", "--nodes", "2"]) == 0
    printed = ExecutionPlan.from_yaml(capsys.readouterr().out)
    assert printed == PRESETS[preset](Cluster(2, 3))
    path = tmp_path / "plan.yaml"
    assert main(["plan", preset, "--devices", "6", "--nodes", "2", "-o", str(path)]) == 0
    assert ExecutionPlan.load(path) == printed
    assert str(path) in capsys.readouterr().out.replace("\n", "")


def test_the_engine_and_the_stage_of_a_preset_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "flatten", "--devices", "2", "--engine", "transformers", "--zero-stage", "3"]) == 0
    expected = flatten(Cluster(1, 2), generation_engine="transformers", zero_stage=3)
    assert ExecutionPlan.from_yaml(capsys.readouterr().out) == expected


def test_a_plan_is_shown_as_a_table_with_a_row_of_each_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = interleave(Cluster(1, 4), zero_stage=2)
    plan.save(tmp_path / "mine.yaml")
    for command in (
        ["show", "interleave", "--devices", "4", "--zero-stage", "2"],
        ["show", str(tmp_path / "mine.yaml")],
    ):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "interleave: 1 node of 4 devices" in out
        rows = {cells[1]: cells for line in out.splitlines() if len(cells := [c.strip() for c in line.split("│")]) == 7}
        assert list(rows) == list(plan.order)
        for name, (_, _, mesh, engine, strategy, offload, _) in rows.items():
            assert (mesh, engine) == (str(plan.mesh(name)), plan[name].engine_name)
            assert strategy == str(plan[name].strategy)
            assert offload == ""
        shown = [rows[name][3] for name in ("actor.generate", "critic.forward", "actor.train")]
        assert shown == ["vllm", "ddp", "zero"], "ZeRO stages 0 and 2"
    assert "dp4 zero2" in out


def test_a_plans_name_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(flatten(Cluster(1, 1)), name="[/bold] [red]").save(tmp_path / "mine.yaml")
    assert main(["show", str(tmp_path / "mine.yaml")]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == "[/bold] [red]: 1 node of 1 device"


def test_a_written_plan_is_checked_against_a_jobs_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flatten(Cluster(1, 4)).save(tmp_path / "mine.yaml")
    run(["show", str(tmp_path / "mine.yaml"), "--devices", "4"], capsys)
    assert "is for 4 devices" in run(["show", str(tmp_path / "mine.yaml"), "--devices", "2"], capsys, 2)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("show flaten --devices 2", "did you mean 'flatten'?"),
        ("show nope.yaml", "there is no plan file 'nope.yaml'"),
        ("plan lama-8b/ppo.yaml", "there is no recipe 'lama-8b/ppo.yaml'; did you mean 'llama-8b/ppo.yaml'?"),
        ("plan xxxxxxxx.yml", "those of the package are demo/grpo.yaml, demo/ppo.yaml, demo/rloo.yaml, grpo/"),
        ("show flatten", "set --devices N, for instance flatten --devices 8"),
        ("plan flaten --devices 2", "'flaten' is neither a recipe nor a preset; did you mean 'flatten'?"),
        ("plan flatten", "set --devices N"),
        ("plan flatten --devices two", "'two' is not a valid integer"),
        ("plan flatten --devices 0", "both are 1 or more"),
        ("plan flatten --devices 5 --nodes 2", "each node has equally many devices"),
        ("plan flatten --devices 2 --nodes 0", "both are 1 or more"),
        ("plan flatten --devices 2 --engine vlm", "'vlm' is not one of 'vllm', 'transformers'"),
        ("plan flatten --devices 2 --zero-stage 4", "4 is not in the range 0<=x<=3"),
        ("plan flatten --devices 2 -o /nonexistent/plan.yaml", "cannot be written to /nonexistent/plan.yaml"),
        ("shwo flatten", "No such command 'shwo'"),
        ("show", "Missing argument 'PLAN'"),
        ("show flatten --device 2", "No such option"),
    ],
)
def test_a_mistake_gets_a_sentence_and_exit_code_2(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("trl-realloc: ")
    assert err.count("\n") == 1


def run(command: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What a command says, on one line: its output, or its refusal where the exit code is another than 0."""
    assert main(command) == code
    out, err = capsys.readouterr()
    return " ".join((err if code else out).split())


def test_every_problem_of_a_plan_file_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("cluster: {nodes: 1, devices_per_node: 2}\ncalls: {actor.trian: {mesh: 0-1}}")
    assert main(["show", str(tmp_path / "bad.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7  # the engine, the call's name, and the five other calls
    assert all(line.startswith(f"trl-realloc: {tmp_path}/bad.yaml: ") for line in lines)


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["-h"], ["plan", "--help"], ["--version"]):
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert "trl-realloc" in out
        assert err == ""


def test_the_command_exits_with_2_and_no_traceback_as_a_process_too() -> None:
    command = [sys.executable, "-m", "trl_realloc.cli.main", "show", "flaten", "--devices", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "trl-realloc: 'flaten' is neither a file nor one of the presets flatten, interleave, separate; "
        "did you mean 'flatten'?\n"
    )


def test_two_runs_are_compared_call_by_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("a", 1.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        compiling = Span("actor.train", 0, 0.0, 2.0, 0)
        spans = [compiling, *(Span("actor.train", 0, 2 * step, 2 * step + seconds, step) for step in (1, 2))]
        Timeline(spans).save(tmp_path / name / "timeline.json")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any("actor.train" in row and "1.000" in row and "0.500" in row and "0.50x" in row for row in rows)
    assert any("whole" in row and "1.000" in row and "0.500" in row for row in rows), "without what is between updates"


# --- planning a recipe ------------------------------------------------------------------------------------------------

RECIPE = Path(__file__).parents[2] / "recipes" / "demo" / "ppo.yaml"


ON = ["--cluster", "h100:8", "--time-limit", "1"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def demo(folder: Path, *settings: str, name: str = "ppo", response: int = 24) -> str:
    """A demo recipe with further settings. Of longer responses a staleness pays for itself."""
    text = (RECIPE.parent / f"{name}.yaml").read_text().replace("runs/demo/assets", str(RECIPE.parent))
    assert name != "ppo" or "response_length: 24" in text
    text = text.replace("response_length: 24", f"response_length: {response}")
    (folder / f"{name}.yaml").write_text("\n".join([text, *settings, ""]))
    return str(folder / f"{name}.yaml")


def test_a_recipe_is_planned_for_a_cluster_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    asked = ["plan", str(RECIPE), "--cluster", "h100:2x8", "-o", str(path), "--time-limit", "1", "--explain"]
    assert main([*asked, "actor.train"]) == 0
    said = capsys.readouterr().out
    for call in ppo_graph().order:
        assert call in said
    assert "flatten" in said, "what it beat"
    assert re.search(
        r"[\d,]+ episodes an iteration, prompts of 64 tokens \(assumed; --prompt-tokens sets .*\), responses", said
    )
    assert re.search(r"actor\.train, .* s: \d+%", said)
    plan = ExecutionPlan.load(path)
    assert plan.cluster.size == 16
    assert (tmp_path / "plan.png").stat().st_size > 1000
    trace = json.loads((tmp_path / "plan.trace.json").read_text())
    assert {row["name"] for row in trace["traceEvents"]} >= set(ppo_graph().order)


def test_an_ended_search_says_so_and_the_given_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", str(RECIPE), "-o", str(tmp_path / "plan.yaml"), "--prompt-tokens", "20", "--cluster"]
    assert main([*asked, "h100:4", "--time-limit", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "The time limit of 0.01 s ended the search; a longer --time-limit may find a better plan." in said
    assert "prompts of 20 tokens (--prompt-tokens)," in said
    assert main([*asked, "h100:1", "--time-limit", "100"]) == 0
    assert "time limit" not in capsys.readouterr().out


def test_a_recipe_that_corrects_has_the_proximal_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    asked = ["plan", demo(tmp_path), *ON, "-o", str(path), "--explain", "actor.forward"]
    assert "there is no call 'actor.forward'" in run(asked, capsys, 2)
    demo(tmp_path, "vllm_importance_sampling_correction: true")
    assert main(asked) == 0
    assert re.search(r"actor\.forward, .* s: \d+%", capsys.readouterr().out)
    assert ExecutionPlan.load(path).graph == ppo_graph(proximal=True)


@pytest.mark.parametrize("allowed", [0, 2])
def test_the_choice_is_explained_by_what_each_way_to_overlap_calls_is_worth(
    allowed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    settings = (f"max_staleness: {allowed}", "vllm_importance_sampling_correction: true") if allowed else ()
    assert main(["plan", demo(tmp_path, *settings, response=160), *ON, "-o", str(path), "--explain"]) == 0
    said = capsys.readouterr().out
    rows = {words[0].strip(): words[1:] for line in said.splitlines() if len(words := line.strip("│").split("│")) == 5}
    ways = ["one iteration after the other", "the next generation begins early"]
    assert {*ways, *(f"staleness {versions}" for versions in (1, 2, 3, 4))} <= set(rows)
    assert all(re.search(r"\d s", rows[way][0]) for way in ways)
    for versions in (1, 2, 3, 4):
        refused = f"you allow {allowed} (max_staleness)" in rows[f"staleness {versions}"][3]
        assert refused == (versions > allowed)
    (chosen,) = (way for way, row in rows.items() if row[3].strip().endswith("chosen"))
    plan = ExecutionPlan.load(path)
    assert re.search(rf"Chosen: .*, {plan.name and '[0-9.]+'} s", said)
    assert f"Staleness {1 if not allowed else plan.staleness.versions}" in said
    assert chosen == f"staleness {plan.staleness.versions}" if plan.staleness.versions else "staleness" not in chosen
    assert bool(plan.staleness.versions) == bool(allowed)
    assert ("ahead of the training" in run(["show", str(path)], capsys)) == bool(allowed)


@pytest.mark.parametrize("text", ["full_determinism: true", "fp16: true"])
def test_no_plan_is_chosen_that_the_run_of_the_same_recipe_refuses(text: str, tmp_path: Path) -> None:
    """The clock decides about a staleness, and megatron does not scale losses."""
    recipe = demo(tmp_path, "max_staleness: 2", "vllm_importance_sampling_correction: true", text, response=160)
    best = choose_for_recipe(read_recipe(Path(recipe)), "h100:8", None, None, None, 1.0).best
    plan = best.plan
    if text.startswith("full"):
        assert not plan.staleness.versions
        assert plan.streams is None or plan.streams.deterministic
    assert ("megatron" in best.space.engines) == (text != "fp16: true")


@pytest.mark.parametrize(("setting", "allowed"), [("", False), ("fused_training: true", True)])
def test_fused_training_is_searched_only_where_a_recipe_allows_it(tmp_path: Path, setting: str, allowed: bool) -> None:
    decision = choose_for_recipe(read_recipe(Path(demo(tmp_path, setting))), "h100:8", None, None, None, 0.2)
    assert (decision.option(FUSED) is not None) == allowed


def test_planning_a_recipe_leaves_torch_out(tmp_path: Path) -> None:
    output = str(tmp_path / "plan.yaml")
    code = (
        "import sys; from trl_realloc.cli.main import main; "
        f"main(['plan', {str(RECIPE)!r}, '--cluster', 'h100:8', '-o', {output!r}, '--time-limit', '0.5']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_plan_is_written_to_a_folder_that_is_made(tmp_path: Path) -> None:
    output = tmp_path / "new" / "plan.yaml"
    assert main(["plan", str(RECIPE), "--cluster", "h100:2", "--time-limit", "0.2", "-o", str(output)]) == 0
    assert ExecutionPlan.load(output).cluster.size == 2


@pytest.mark.parametrize(
    "calls", [("reference.forward",), (), ("reference.forward", "reward.forward", "actor.forward")]
)
def test_a_plan_for_grpo_is_shown_with_the_calls_that_it_has(
    calls: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["actor.generate: {mesh: 0-1, engine: vllm, dp: 2}"]
    lines += [f"{call}: {{mesh: 0-1, engine: zero, dp: 2}}" for call in ("actor.train", *calls)]
    plan = tmp_path / "plan.yaml"
    plan.write_text("cluster: {nodes: 1, devices_per_node: 2}\ncalls:\n" + "".join(f"  {line}\n" for line in lines))
    out = run(["show", str(plan)], capsys)
    assert all(call in out for call in ("actor.generate", "actor.train", *calls))
    assert "critic" not in out


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("vllm_mode: server", 2, "vllm_mode 'server' is a separate command"),
        ("use_liger_kernel: true", 0, "Accelerate trains, not"),
        ("fsdp: full_shard", 0, "fsdp is set"),
    ],
)
def test_planning_says_what_a_run_of_the_recipe_would_say(
    setting: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cluster", "h100:2", "--time-limit", "0.2", "-o", str(tmp_path / "plan.yaml")]
    assert main(["plan", demo(tmp_path, setting, name="grpo"), *arguments]) == code
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("setting", ["load_in_4bit", "load_in_8bit"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_adapters_over_quantized_weights_are_planned_and_quantized_weights_alone_refused(
    algorithm: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, quantized = tmp_path / "plan.yaml", f"{setting}: true"
    arguments = ["--cluster", "h100:2", "--time-limit", "0.2", "-o", str(path)]
    assert main(["plan", demo(tmp_path, quantized, "use_peft: true", name=algorithm), *arguments]) == 0
    assert "Accelerate trains" not in capsys.readouterr().err
    trained = ExecutionPlan.load(path)["actor.train"]
    assert (trained.engine, trained.strategy.zero_stage, trained.strategy.tp) == ("zero", 0, 1)
    assert main(["plan", demo(tmp_path, quantized, name=algorithm), *arguments]) == 2
    assert f"{setting}: quantized weights are not trained, only adapters over them; set use_peft: true." in (
        " ".join(capsys.readouterr().err.split())
    )


def test_a_scripts_own_key_of_a_recipe_is_not_refused(tmp_path: Path) -> None:
    assert main(["plan", demo(tmp_path, "our_curriculum: 3"), *ON, "-o", str(tmp_path / "plan.yaml")]) == 0


def test_the_planner_knows_every_setting_that_a_recipe_may_have() -> None:
    """The list is written down, for reading it off the classes takes seconds of imports."""
    listed = Path(trl_realloc.__file__).parent.joinpath("planner", "recipe", "settings.txt").read_text().split()
    assert listed == sorted(set(listed))
    kinds = (RunArguments, *CONFIGS.values(), ModelConfig)
    settings = {*LAUNCH} | {field.name for kind in kinds for field in fields(kind) if field.init}
    assert settings <= set(listed), sorted(settings - set(listed))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_model_that_vllm_cannot_serve_is_not_measured(tmp_path: Path) -> None:
    tiny.config(head_dim=16).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sft_model_path: model\nreward_model_path: model\nbf16: false\nuse_cpu: true\n")
    remedy = "heads of 32, .*, not for this model's 16; set generation_engine: transformers"
    with pytest.raises(RecipeError, match=f"cannot be measured on this machine: on a CPU vLLM has .*{remedy}"):
        measure.main(str(recipe), str(tmp_path / "profile.json"), 64.0, thorough=False)


@pytest.fixture
def measured_jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that would be measured, which takes a minute each."""
    jobs: list[Any] = []

    def measured(job: Any, *, thorough: bool) -> Any:
        jobs.append(job)
        return SimpleNamespace(save=lambda path: None), True

    monkeypatch.setattr(measure, "cached_profile", measured)
    return jobs


def test_measuring_leaves_no_logs_of_engines(tmp_path: Path, measured_jobs: list[Any]) -> None:
    tiny.config().save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    settings = "bf16: false\nuse_cpu: true\ngeneration_engine: transformers\n"
    recipe.write_text(f"sft_model_path: model\nreward_model_path: model\n{settings}")
    measure.main(str(recipe), str(tmp_path / "profile.json"), 64.0, thorough=False)
    assert measured_jobs[0].options.log_folder is None, "the engines' logs go to temporary files"


def test_a_recipe_is_measured_with_the_adapters_that_its_run_trains(tmp_path: Path, measured_jobs: list[Any]) -> None:
    tiny.config().save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    adapters = "use_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"
    settings = f"bf16: false\nuse_cpu: true\nuse_vllm: false\noutput_dir: {tmp_path}\n{adapters}"
    recipe.write_text(f"algorithm: grpo\nmodel_name_or_path: model\nmax_completion_length: 8\n{settings}")
    measure.main(str(recipe), str(tmp_path / "profile.json"), 64.0, thorough=False)
    models = measured_jobs[0].models
    assert models.peft_config.r == 4 and models.peft_config.target_modules == {"q_proj", "v_proj"}
    assert 0 < models.trained_share < 1


@pytest.mark.parametrize(
    ("recipe", "config", "processes"),
    [
        ("num_processes: 3", "num_processes: 2", 3),
        ("accelerate_config: {folder}/named.yaml", "num_processes: 2", 4),
        ("learning_rate: 1.0e-6", "num_processes: 2", 2),
        ("learning_rate: 1.0e-6", None, 1),
    ],
)
def test_a_recipe_is_planned_for_the_processes_that_its_run_has(
    recipe: str, config: str | None, processes: int, tmp_path: Path
) -> None:
    (tmp_path / "named.yaml").write_text("num_processes: 4\n")
    if config is not None:
        (tmp_path / "accelerate.yaml").write_text(f"{config}\n")
    (tmp_path / "recipe.yaml").write_text(recipe.format(folder=tmp_path) + "\n")
    assert processes_of(tmp_path / "recipe.yaml") == processes


def test_an_accelerate_config_that_is_not_there_is_refused_as_in_a_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("accelerate_config: nowhere.yaml\n")
    for read in (lambda: processes_of(recipe), lambda: training_command("grpo", ["--config", str(recipe)])):
        with pytest.raises(PlanError, match="there is no accelerate_config 'nowhere.yaml'; give the path of a YAML"):
            read()


def test_a_plan_that_is_there_already_is_not_overwritten_without_being_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["plan", str(RECIPE.resolve()), "--prompt-tokens", "20", "--cluster", "h100:2", "--time-limit", "0.3"]
    for name in ("plan.yaml", "plan-2.yaml", "plan-3.yaml"):
        assert f"written to {name}" in run(asked, capsys)
        (tmp_path / name).write_text(f"{(tmp_path / name).read_text()}# edited\n")
    assert [(tmp_path / name).read_text().count("# edited") for name in ("plan.yaml", "plan-2.yaml")] == [1, 1]
