"""What README tells a reader to type works as it stands, on a machine without a GPU too."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

import trl_realloc
from trl_realloc.cli.main import main


ROOT = Path(__file__).parent.parent


def blocks(document: Path, language: str) -> list[str]:
    """The document's code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def snippet(trainer: str) -> str:
    return next(text for text in blocks(ROOT / "README.md", "python") if f"{trainer}(" in text)


LAUNCHES = [
    line.partition("  #")[0].strip()
    for text in blocks(ROOT / "README.md", "bash")
    for line in text.splitlines()
    if re.match(r"(accelerate launch|torchrun) .*train\.py", line)
]


def run(command: list[str], folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")},
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TRL_REALLOC_GENERATION_ENGINE": "transformers",  # an engine of vLLM's takes long to start
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


def models(folder: Path) -> None:
    tiny.policy().save_pretrained(folder / "policy")
    tiny.tokenizer().save_pretrained(folder / "policy")
    tiny.classifier().save_pretrained(folder / "critic")


@pytest.mark.parametrize(
    ("trainer", "logged"), [("PPOTrainer", "objective/scores"), ("GRPOTrainer", "rewards/brief/mean")]
)
def test_the_snippet_trains_as_it_stands(tmp_path: Path, trainer: str, logged: str) -> None:
    models(tmp_path / "path" / "to")
    (tmp_path / "train.py").write_text(snippet(trainer))
    ended = run([sys.executable, "train.py"], tmp_path, 280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "trl_realloc: 1 process on 1 host (" in ended.stderr
    assert logged in ended.stdout


def test_the_snippets_have_a_batch_of_data_for_the_processes_that_are_launched() -> None:
    most = max(int(n) for line in LAUNCHES for n in re.findall(r"--(?:num_processes|nproc_per_node) (\d+)", line))
    for trainer, default, per_row in (("PPOTrainer", 8, 1), ("GRPOTrainer", 8, 8)):
        given = re.search(r"per_device_train_batch_size=(\d+)", snippet(trainer))
        rows = 2 * int(re.search(r"bread.\"\] \* (\d+)", snippet(trainer))[1])
        assert most * int(given[1] if given else default) // per_row <= rows


def test_getting_started_begins_with_readmes_run_of_grpo() -> None:
    assert snippet("GRPOTrainer") in blocks(ROOT / "docs" / "index.md", "python")


def test_the_swap_is_of_names_that_both_packages_have() -> None:
    swaps = re.findall(r"^([-+])from (\S+) import (\w+), (\w+)$", blocks(ROOT / "README.md", "diff")[0], re.MULTILINE)
    assert [(sign, home) for sign, home, *_ in swaps] == [
        ("-", "trl.experimental.ppo"),
        ("+", "trl_realloc"),
        ("-", "trl"),
        ("+", "trl_realloc"),
    ]
    assert swaps[0][2:] == swaps[1][2:] and swaps[2][2:] == swaps[3][2:]
    assert {name for _, _, *names in swaps for name in names} <= set(trl_realloc.__all__)


def test_the_plan_in_readme_is_what_the_command_above_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    command = next(
        line for line in "".join(blocks(ROOT / "README.md", "bash")).splitlines() if "plan interleave" in line
    )
    words = shlex.split(command.partition(" -o ")[0])
    assert words[0] == "trl-realloc" and main(words[1:]) == 0
    written = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert blocks(ROOT / "README.md", "yaml")[0].splitlines() == written


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"])
def test_every_link_leads_to_a_file_or_a_heading(document: str) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif ":" not in link:
            assert (path.parent / link.partition("#")[0]).is_file(), link


@pytest.mark.multiprocess
@pytest.mark.parametrize("line", LAUNCHES)
def test_each_launch_command_starts_as_many_processes_as_it_says(tmp_path: Path, line: str) -> None:
    said = re.search(r"--(?:num_processes|nproc_per_node) (\d+)", line)
    assert said is not None, line
    (tmp_path / "train.py").write_text("import os\nopen(f\"rank-{os.environ['RANK']}\", 'w').close()\n")
    ended = run(shlex.split(line.replace(said[0], said[0].replace(said[1], "2"))), tmp_path, 200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}


def test_there_are_launch_commands_to_try() -> None:
    assert any("accelerate" in line for line in LAUNCHES) and any("torchrun" in line for line in LAUNCHES)


@pytest.mark.parametrize("hosts", ["two", "four"])
def test_the_configs_for_several_hosts_are_read_by_accelerate(hosts: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = ROOT / "recipes" / "accelerate_configs" / f"{hosts}_hosts.yaml"
    config = load_config_from_file(str(path))
    assert config.num_machines == {"two": 2, "four": 4}[hosts]
    assert config.num_processes == 8 * config.num_machines
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_GPU"


@pytest.mark.parametrize("text", blocks(ROOT / "docs" / "several_machines.md", "bash"))
def test_the_shell_commands_for_several_machines_are_well_formed(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for config in re.findall(r"recipes/\S+\.yaml", text):
        assert (ROOT / config).is_file()


def test_the_judge_of_the_page_on_rewards_repeats_and_then_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    async def ask(prompt: str, completion: str) -> float:
        tries.append(completion)
        if completion == "lost" or tries.count(completion) < 3:
            raise ConnectionError
        return 1.0

    async def at_once(seconds: float) -> None:
        return None

    monkeypatch.setattr(asyncio, "sleep", at_once)
    names: dict[str, Any] = {"ask": ask}
    exec(blocks(ROOT / "docs" / "rewards.md", "python")[0], names)
    assert asyncio.run(names["judged"](["a", "b"], ["found", "lost"])) == [1.0, None]


def test_the_report_of_getting_started_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [text for text in blocks(ROOT / "docs" / "index.md", "bash") if "trl-realloc report" in text]
    models(tmp_path / "path" / "to")
    (tmp_path / "train.py").write_text(snippet("GRPOTrainer").replace("num_train_epochs=1", "max_steps=4"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_REALLOC_GENERATION_ENGINE", "transformers")
    tiny.forget_accelerate()
    runpy.run_path("train.py", run_name="__main__")
    tiny.forget_accelerate()
    capsys.readouterr()
    written = {"report.md", "timeline.png", "trace.json"}
    assert written <= {path.name for path in (tmp_path / "out").iterdir()}
    command, *words = shlex.split(commands[0].splitlines()[0].partition("  #")[0])
    assert command == "trl-realloc" and main(words) == 0
    assert "time by call" in capsys.readouterr().out
