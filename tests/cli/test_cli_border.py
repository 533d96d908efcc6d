"""Whatever file and option the command line is given, it ends in sentences: no traceback, no hang, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_realloc import PPOConfig
from trl_realloc.cli import measure
from trl_realloc.cli.main import main
from trl_realloc.cli.recipe_parser import RecipeError
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.plan.spans import Span
from trl_realloc.plan.timeline import Timeline
from trl_realloc.planner.cost.hardware import Sharing
from trl_realloc.planner.cost.profile import Observation, Profile, model_key
from trl_realloc.planner.recipe.recipe import read_recipe
from trl_realloc.trainer.report.logged_updates import SCORES


DEMO = Path(__file__).parents[2] / "recipes" / "demo"
ON = ["--cluster", "h100:2", "--time-limit", "0.2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with its models' configs, a plan, a profile and a run, all of them right; and the current folder."""
    for model in ("policy", "reward"):
        shutil.copytree(DEMO / model, tmp_path / model)
    (tmp_path / "ppo.yaml").write_text("sft_model_path: policy\nreward_model_path: reward\nresponse_length: 16\n")
    flatten(Cluster(1, 2)).save(tmp_path / "plan.yaml")
    specs = [part[0] for part in read_recipe(tmp_path / "ppo.yaml").specs().values()]
    counts: dict[str, Any] = {"steps": 1.0, "grown": 9.0, "cached": 99.0}
    rows = tuple(
        Observation(work, key, 0.1 * n, 1, tokens=100.0 * n, squared=1e4 * n, answered=50.0 * n, **counts)
        for key in sorted({model_key(spec) for spec in specs})
        for work in ("forward", "train", "generate")
        for n in (1, 2)
    )
    Profile("a machine", {"torch": "2"}, 2, Sharing(((2, 1.5),)), False, rows).save(tmp_path / "profile.json")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("timeline.json", "estimate.json", "first_estimate.json"):
        Timeline(Span("actor.train", 0, 2.0 * n, 2.0 * n + 1, n) for n in range(3)).save(run / name)
    updates = [{"step": n, SCORES: 0.1 * n, "time/step": 1.0, "tokens/s": 9.0, "episode": n} for n in range(12)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(update) + "\n" for update in updates))
    completions = [{"query": "a", "model response": "b", "score": 1.0}]
    (run / "completions.json").write_text(json.dumps({"before": completions, "after": completions}))
    shutil.copy(tmp_path / "plan.yaml", run / "plan.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What each kind of file is read by.
READERS: dict[str, list[str]] = {
    "plan.yaml": ["show", "plan.yaml"],
    "ppo.yaml": ["plan", "ppo.yaml", *ON],
    "policy/config.json": ["plan", "ppo.yaml", *ON],
    "profile.json": ["plan", "ppo.yaml", "--profile", "profile.json", "--time-limit", "0.2"],
    "run/timeline.json": ["compare", "run", "run"],
    "run/metrics.jsonl": ["report", "run"],
    "run/completions.json": ["report", "run"],
    "run/estimate.json": ["report", "run"],
    "run/first_estimate.json": ["report", "run"],
}


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentences on stderr, after a command that has to end with exit code 2."""
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert all(line.startswith("trl-realloc: ") and len(line) < 1500 for line in err.splitlines()), err
    return err


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF\0\1", "name: ä".encode("latin-1"), "name: a".encode("utf-16"), b"[" * 100_000, b'{"a": ', b"7"],
    ids=["empty", "binary", "latin-1", "utf-16", "nested", "torn", "a number"],
)
def test_a_wrong_file_kind_is_named(folder: Path, name: str, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).write_bytes(data)
    if name == "run/metrics.jsonl" and not data:  # nothing is logged yet
        assert main(READERS[name]) == 0
        return
    assert Path(name).name in refusal(READERS[name], capsys)
    assert not [*folder.rglob("*.png"), *folder.rglob("*.md")], "all files are read before a picture is drawn"


def _edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """The JSON file with one thing in it changed."""

    def edit(path: Path) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return edit


def _written(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def _recipe(line: str) -> Callable[[Path], None]:
    return _written(f"sft_model_path: policy\nreward_model_path: reward\n{line}\n")


def _config(**changes: Any) -> Callable[[Path], None]:
    return _edited(lambda config: config.update(changes))


def _observation(**changes: Any) -> Callable[[Path], None]:
    return _edited(lambda profile: profile["observations"][0].update(changes))


def _update(**changes: Any) -> Callable[[Path], None]:
    return _written(json.dumps({"step": 1, SCORES: 1.0, "time/step": 1.0, "tokens/s": 1, **changes}))


def _link(**values: Any) -> Callable[[Path], None]:
    """The profile with messages and reductions that have these values."""
    row = {"model": "", "seconds": 0.1, "devices": 2, "bytes": 9.0, **values}
    return _edited(lambda profile: profile["observations"].extend({"work": w, **row} for w in ("send", "all_reduce")))


WRONG: dict[str, dict[str, tuple[Callable[[Path], None], str]]] = {
    "ppo.yaml": {
        "text for a number": (_recipe("response_length: many"), "response_length must be a whole number from 1"),
        "nothing for a number": (_recipe("num_ppo_epochs:"), "num_ppo_epochs must be a whole number from 1"),
        "a list for a number": (_recipe("num_mini_batches: [1]"), "not [1]"),
        "a batch of none": (_recipe("per_device_train_batch_size: 0"), "from 1, not 0"),
        "an absurd batch": (_recipe("per_device_train_batch_size: 99999999999"), "than the 10,000,000 that"),
        "an unknown engine": (_recipe("generation_engine: sglang"), "'vllm' or 'transformers' (or None), not"),
        "a share above 1": (_recipe("vllm_gpu_memory_utilization: 2"), "above 0 to 1 (or None), not 2"),
        "a discount above 1": (_recipe("gamma: 2.0"), "gamma must be a finite number from 0 to 1"),
        "a number that is none": (_recipe("kl_coef: .nan"), "kl_coef must be a finite number, not nan"),
        "a key twice": (_recipe("sft_model_path: other"), "'sft_model_path' is written twice (line 3)"),
        "a model that is a number": (_recipe("value_model_path: 5"), "is a model's name or path, not 5"),
        "a model with a long name": (_recipe(f"value_model_path: {'x' * 5000}"), "no config.json in"),
        "a plan as a recipe": (lambda path: shutil.copy("plan.yaml", path) and None, "is a plan"),
        "an algorithm that is a list": (_recipe("algorithm: [ppo]"), "there is no algorithm ['ppo']"),
        "an algorithm that is a mapping": (_recipe("algorithm: {a: 1}"), "there is no algorithm {'a': 1}"),
        "a number for a boolean": (_recipe("vllm_enable_sleep_mode: 3"), "must be true or false, not 3"),
        "a word for a boolean": (_recipe("bf16: 'off'"), "bf16 must be true or false, not 'off'"),
        "uneven mini-batches": (
            _recipe("num_mini_batches: 3"),
            "= 8 episodes do not divide into num_mini_batches 3 equal parts",
        ),
        "an engine that takes the device": (
            _recipe("vllm_gpu_memory_utilization: 1.0"),
            "set vllm_gpu_memory_utilization to at most 0.88",
        ),
        "an engine that leaves no room for contexts": (
            _recipe("vllm_gpu_memory_utilization: 0.9"),
            "vllm_gpu_memory_utilization 0.9 reserves 72.0 GB",
        ),
        "a date that is none": (_recipe("run_name: 2020-13-45"), "month must be in 1..12"),
        "no models": (_written("response_length: 16"), "names no models"),
        "a model that is not there": (_recipe("value_model_path: nowhere"), "no config.json in 'nowhere'"),
        "a misspelt key": (
            _recipe("respones_length: 9"),
            "no setting 'respones_length'; did you mean 'response_length'?",
        ),
        "a quantized model": (_recipe("load_in_4bit: true"), "quantized weights are not trained"),
        "a model of FSDP": (_recipe("fsdp: full_shard"), "PPO is not trained under fsdp"),
    },
    "policy/config.json": {
        "no heads": (_config(num_attention_heads=0), "num_attention_heads must be a whole number"),
        "negative layers": (_config(num_hidden_layers=-2), "must be a whole number from 1 to 10,000"),
        "absurd layers": (_config(num_hidden_layers=10**9), "it is 1000000000"),
        "no vocabulary": (_edited(lambda c: c.pop("vocab_size")), "is missing"),
        "text for a size": (_config(hidden_size="wide"), "it is 'wide'"),
        "uneven key heads": (_config(num_key_value_heads=3), "cannot share 3 key/value heads"),
        "a family that is a list": (_config(model_type=["llama"]), "has none (known: gemma"),
    },
    "profile.json": {
        "a profile without devices": (_edited(lambda p: p.pop("devices")), "devices is missing"),
        "a profile of no devices": (_edited(lambda p: p.update(devices=0)), "devices is 0"),
        "an unknown key": (_observation(colour=1), "there is no key observations[0].colour"),
        "an unknown key of two lines": (_observation(**{"a\x85b": 1}), r"there is no key observations[0].'a\x85b'"),
        "no time at all": (_observation(seconds=0), "observations[0].seconds is 0, below the minimum of"),
        "negative time": (_observation(seconds=-1), "observations[0].seconds is -1"),
        "time that is text": (_observation(seconds="long"), "observations[0].seconds is 'long'"),
        "no tokens": (_observation(tokens=0), "observations[0].tokens is 0"),
        "messages of nothing": (_link(bytes=0), "].bytes is 0"),
        "a reduction of one device": (_link(devices=1), "].devices is 1"),
        "sharing that is text": (_edited(lambda p: p.update(sharing="yes")), "sharing is 'yes'"),
        "a profile of other models": (
            _edited(lambda p: [row.update(model="m") for row in p["observations"]]),
            "profile.json has no measurements of llama of",
        ),
        "a memory of nothing": (_edited(lambda p: p.update(memory=0)), "memory is 0"),
        "corrections of nothing": (
            _edited(lambda p: p["calibration"].update(calls={"actor.train": 0})),
            "calibration.calls.actor.train is 0",
        ),
    },
    "plan.yaml": {
        "a plan of no nodes": (_written("cluster: {nodes: 0, devices_per_node: 2}"), "from 1, not 0"),
        "an absurd cluster": (
            _written("cluster: {nodes: 99999999, devices_per_node: 99999999}"),
            "than the 1,048,576 devices",
        ),
        "aliases of aliases": (
            _written(
                "a: &a [x,x,x,x,x,x,x,x,x]\n"
                + "".join(
                    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
                )
            ),
            "more than 20,000 values",
        ),
        "a mesh of many digits": (
            _written(f"cluster: {{nodes: 1, devices_per_node: 1}}\ncalls: {{actor.train: {{mesh: '0-{'9' * 5000}'}}}}"),
            "a mesh is written as 0-3",
        ),
        "a call's name of two lines": (
            _written('cluster: {nodes: 1, devices_per_node: 1}\ncalls: {"actor\\n.train\\x85": 7}'),
            r"'actor\n.train\x85': an assignment reads like",
        ),
        "many unknown keys": (_written("\n".join(f"k{n}: 1" for n in range(9000))), "8,990 more keys"),
    },
    "run/metrics.jsonl": {
        "metrics without a step": (_written(json.dumps({SCORES: 1.0, "time/step": 1.0})), "line 1: there is no 'step'"),
        "metrics of text": (_update(**{SCORES: "good"}), "'objective/scores' is 'good', and must be a finite number"),
        "an update in no time": (_update(**{"time/step": 0}), "'time/step' is 0"),
    },
    "run/completions.json": {
        "completions without scores": (
            _written('{"before": [{"query": "a"}], "after": []}'),
            "before[0].score is missing",
        )
    },
    "run/timeline.json": {
        "a span of no device": (_edited(lambda t: t["spans"][0].__setitem__(1, -1)), "spans[0].device is -1"),
        "a span that is short": (_edited(lambda t: t["spans"][1].pop()), "spans[1] has 9 values for 10 columns"),
    },
    "run/estimate.json": {
        "a span of a time that no clock shows": (
            _edited(lambda t: t["spans"][0].__setitem__(2, -1e308)),
            "spans[0].start is -1e+308",
        ),
        "more samples than any run has": (
            _edited(lambda t: t["spans"][0].__setitem__(7, 10**400)),
            "spans[0].samples is 10000",
        ),
    },
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in WRONG.items() for case in cases])
def test_a_wrong_value_is_named_by_key(folder: Path, name: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, told = WRONG[name][case]
    wrong(folder / name)
    said = refusal(READERS[name], capsys)
    assert told in said
    assert Path(name).name in said or "vllm_gpu_memory_utilization" in told  # which the whole job has
    assert "of these devices would" not in said, "no number of devices mends it"


@pytest.mark.parametrize("name", READERS)
def test_the_files_as_they_are_here_are_taken(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(READERS[name]) == 0, capsys.readouterr().err


def test_a_report_takes_an_estimate_without_spans_and_names_that_look_like_formulas(folder: Path) -> None:
    spans = Timeline.load(folder / "run" / "timeline.json").spans
    Timeline(replace(span, call="reward: $1_{$") for span in spans).save(folder / "run" / "timeline.json")
    Timeline().save(folder / "run" / "estimate.json")
    assert main(READERS["run/estimate.json"]) == 0
    assert "Estimated and measured" not in (folder / "run" / "report.md").read_text()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("plan ppo.yaml --cluster h100:99999999x99999999", "than the 1,048,576 devices"),
        ("plan ppo.yaml --cluster h100:1024x1024", "1,048,576 devices, and the planner chooses for 8,192 at most"),
        ("plan ppo.yaml --cluster h100:0", "from 1, not 0"),
        ("plan ppo.yaml --cluster h100:8 --devices 8", "leave --devices out"),
        ("plan ppo.yaml --cluster h100:8 --profile profile.json", "keep one"),
        ("plan ppo.yaml --cluster h100:8 --time-limit nan", "--time-limit is a number of seconds above 0"),
        ("plan ppo.yaml --cluster h100:8 --time-limit inf", "--time-limit is a number of seconds above 0"),
        ("plan ppo.yaml --cluster h100:8 --prompt-tokens nan", "--prompt-tokens is a number from 1"),
        ("plan ppo.yaml --cluster h100:8 --prompt-tokens 0", "--prompt-tokens is a number from 1"),
        ("plan ppo.yaml --cluster h100:8 --explain actor.trian", "--explain: there is no call 'actor.trian'; did you"),
        ("plan ppo.yaml --cluster h100:8 -o run/plan.yaml/x.yaml", "cannot be written"),
        ("plan ppo.yaml --cluster h100", "written as h100:16x8"),
        ("plan ppo.yaml --cluster h10:2x8", "no specification of 'h10'; did you mean 'h100'"),
        ("plan ppo.yaml --profile absent.json", "cannot be read"),
        ("plan ppo.yaml -o ppo.yaml/plan.yaml", "cannot be written"),
        ("plan ppo.yml --cluster h100:8", "did you mean 'ppo.yaml'"),
        ("plan ppo.yaml --devices -1", "1 or more, not -1"),
        ("plan ppo.yaml --devices 100000", "--devices 100000: too many processes for this machine"),
        ("plan ppo.yaml --profile profile.json --nodes 3", "is a measurement of 1 node(s), but --nodes is 3"),
        ("plan ppo.yaml --nodes 2", "this machine, which is one node"),
        ("plan ppo.yaml --nodes 0", "--nodes is 1 or more, not 0"),
        ("plan ppo.yaml --cluster h100:8 --nodes 4", "--cluster sets the number of nodes; leave --nodes out"),
        ("plan ppo.yaml --cluster h100:8 --engine transformers --zero-stage 3", "--engine and --zero-stage are for"),
        ("plan ppo.yaml --cluster h100:8 --engine vllm", "--engine is for a preset"),
        ("plan flatten --devices 8 --cluster h100:8", "--cluster is for a recipe, and flatten is a preset"),
        (
            "plan flatten --devices 8 --profile p.json --prompt-tokens 9 --time-limit 1 --explain",
            "--profile and --prompt-tokens and --explain and --time-limit are for a recipe",
        ),
        ("show plan.yaml --engine transformers", "--engine is for a preset, and 'plan.yaml' is a plan's file"),
        ("show plan.yaml --nodes 2", "the size of the job is missing"),
        ("plan ppo.yaml --profile profile.json --devices 5", "was measured on 2 devices, but --devices is 5"),
        ("plan flatten --devices 99999999999999", "1,048,576 devices at most"),
        ("show plan.yaml --devices -1", "both are 1 or more"),
        ("show plan.yaml --devices 3", "trl-realloc: plan.yaml: the plan 'flatten' is for 2 devices"),
        (f"show {'x' * 5000}", "is neither a file nor one of the presets"),
        (f"plan {'x' * 5000}", "is neither a recipe nor a preset"),
        ("show /dev/zero", "no regular file"),
        ("show run", "it is a folder"),
        ("show ppo.yaml", "is a recipe, and not a plan; trl-realloc plan"),
        ("compare policy policy", "a run writes it to its output_dir when it ends"),
        ("plan run", "it is a folder"),
        ("profile ppo.yaml -o ppo.yaml/profile.json", "cannot be written to ppo.yaml/profile.json"),
        ("profile ppo.yaml --devices -1", "give a number from 1"),
        ("profile ppo.yaml policy reward", "not 3 arguments"),
        ("profile nowhere", "neither a recipe nor a folder with a model's config.json"),
        ("report policy", "holds no timeline.json"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    folder: Path, command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(command.split(), capsys)


def test_a_profile_in_which_a_decode_step_takes_no_time_is_planned_for(folder: Path) -> None:
    """Equal numbers of steps leave nothing to fit a step's seconds by. Moving samples has to be reached in time."""
    assert main(["plan", "ppo.yaml", "--profile", "profile.json", "--time-limit", "4"]) == 0


def test_an_accelerate_config_that_says_no_number_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "accelerate.yaml").write_text("num_processes: .inf\n")
    assert "accelerate.yaml: num_processes is a whole number from 1" in refusal(["plan", "ppo.yaml"], capsys)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**9)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["zero", "vllm", "0-1", "0", "policy", "reward"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def _mutated(value: Any, draw: st.DataObject, depth: int = 0) -> Any:
    """The value with one of its parts replaced, left out, doubled or added to."""
    into = isinstance(value, dict | list) and value and depth < 4 and draw.draw(st.integers(0, 3)) > 0
    if not into:
        return draw.draw(values)
    if isinstance(value, dict):
        key = draw.draw(st.sampled_from(sorted(value)))
        kind = draw.draw(st.sampled_from(["change", "change", "change", "drop", "add"]))
        if kind == "drop":
            return {name: part for name, part in value.items() if name != key}
        if kind == "add":
            return {**value, draw.draw(st.text(max_size=8)): draw.draw(values)}
        return {**value, key: _mutated(value[key], draw, depth + 1)}
    at = draw.draw(st.integers(0, len(value) - 1))
    return [*value[:at], _mutated(value[at], draw, depth + 1), *value[at + 1 :]]


READ_SLOWLY = ("plan", "report")  # these draw pictures
EXAMPLES = os.environ.get("BORDER_EXAMPLES", "")  # how many, in place of what fits into a run of all tests


@pytest.mark.timeout(300 + 20 * int(EXAMPLES or 0))
@pytest.mark.parametrize("name", READERS)
def test_a_file_with_anything_in_it_changed_is_taken_or_refused_in_sentences(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = int(EXAMPLES or ("8" if READERS[name][0] in READ_SLOWLY else "60"))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(draw=st.data())
    def holds(draw: st.DataObject) -> None:
        _is_taken_or_refused(folder, name, capsys, draw)

    holds()


def _is_taken_or_refused(folder: Path, name: str, capsys: pytest.CaptureFixture[str], draw: st.DataObject) -> None:
    path = folder / name
    right = path.read_text()
    lines = name.endswith(".jsonl")
    try:
        if name.endswith(".yaml"):
            path.write_text(yaml.safe_dump(_mutated(yaml.safe_load(right), draw)))
        elif lines:
            rows = [json.loads(line) for line in right.splitlines()]
            changed = _mutated(rows, draw)  # another value in place of all rows is a file of one line
            path.write_text("\n".join(json.dumps(row) for row in (changed if isinstance(changed, list) else [changed])))
        else:
            path.write_text(json.dumps(_mutated(json.loads(right), draw)))
        code = main(READERS[name])
        err = capsys.readouterr().err
        assert code in (0, 2)
        assert code == 0 or all(line.startswith("trl-realloc: ") and len(line) < 1500 for line in err.splitlines())
    finally:
        path.write_text(right)


def test_measuring_that_fails_says_the_jobs_own_sentence_and_leaves_no_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs: list[Path] = []

    def failing(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        outputs.extend(Path(part) for part in command if part.endswith("profile.json"))
        assert outputs[-1].parent.is_dir()
        said = "error: model: there is none.\nTraceback (most recent call last):\n  in the launcher\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr("trl_realloc.cli.measuring_job.subprocess.run", failing)
    for command, processes in (
        (["plan", "ppo.yaml"], "1 process"),
        (["profile", "ppo.yaml", "--devices", "2"], "2 processes"),
    ):
        told = refusal(command, capsys)
        assert told.rstrip().endswith(f"on {processes} failed: model: there is none.")
    assert len(outputs) == 2
    assert not any(path.parent.exists() for path in outputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bf16 is refused on a machine without a GPU")
def test_a_recipe_that_this_machine_cannot_run_is_refused_with_the_way_to_plan_it(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "bf16": True}
    with pytest.raises(RecipeError, match=r"big\.yaml cannot be run on this machine.*bf16.*--cluster h100:8"):
        measure.trainer_config(PPOConfig, settings, "big.yaml")


def test_a_plan_for_measured_gpus_fits_their_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _edited(lambda profile: profile.update(is_accelerator=True, memory=1e6))(folder / "profile.json")
    assert main(READERS["profile.json"]) == 2
    assert "has 0.0 GB of a device" in capsys.readouterr().err


def test_a_profile_of_two_nodes_is_planned_for_two_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _edited(lambda profile: profile.update(nodes=2))(folder / "profile.json")
    assert main([*READERS["profile.json"], "-o", "new.yaml"]) == 0, capsys.readouterr().err
    assert ExecutionPlan.load(folder / "new.yaml").cluster == Cluster(2, 1)
    assert main([*READERS["profile.json"], "--nodes", "2"]) == 0
    assert "is a measurement of 2 node(s), but --nodes is 1" in refusal(
        [*READERS["profile.json"], "--nodes", "1"], capsys
    )


def test_a_cluster_is_checked_before_models_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: /nowhere/model\nreward_model_path: /nowhere/reward\noutput_dir: out\n")
    err = refusal(["plan", str(recipe), "--cluster", "h100x8"], capsys)
    assert "--cluster: a cluster is written as h100:16x8" in err and "nowhere" not in err
