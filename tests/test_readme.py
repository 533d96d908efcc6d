"""What README tells a reader to type works as it stands, on a machine without a GPU too."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml


ROOT = Path(__file__).parent.parent


def blocks(document: Path, language: str) -> list[str]:
    """The document's code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


def snippet() -> str:
    return next(text for text in blocks(ROOT / "README.md", "python") if "PPOTrainer(" in text)


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


def test_the_snippet_trains_as_it_stands(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "path" / "to" / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "path" / "to" / "policy")
    tiny.classifier().save_pretrained(tmp_path / "path" / "to" / "critic")
    (tmp_path / "train.py").write_text(snippet())
    ended = run([sys.executable, "train.py"], tmp_path, 280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "trl_realloc: 1 process on 1 host (" in ended.stderr
    assert "objective/scores" in ended.stdout


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
