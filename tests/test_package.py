"""The sdist and the wheel: what is in them, and that an installed wheel works, also where torch is not installed."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trl_realloc
from trl_realloc.plan.spans import Span
from trl_realloc.plan.timeline import Timeline


ROOT = Path(__file__).parent.parent
UNTRACKED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
INSTALL = re.search(r"^pip install (click .*)$", (ROOT / "docs" / "index.md").read_text("utf-8"), re.MULTILINE)
LIGHT = INSTALL[1].split() if INSTALL else []  # of the command for `show`, `plan`, `report` and `compare` alone


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    how = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    return subprocess.run(list(map(str, command)), cwd=folder, env={**kept, **environment}, **how)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it. Without isolation, so nothing is downloaded."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=UNTRACKED)
    (folder / "source" / "recipes" / "demo" / "policy" / "model.safetensors").write_bytes(b"weights of a run")
    ended = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"], folder / "source")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and with what `LIGHT` needs, linked from this one, but without torch."""
    folder = tmp_path_factory.mktemp("environment")
    made = run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    assert made.returncode == 0, made.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in distributions(LIGHT):
        for entry in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / entry).exists():
                (packages / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    install = [sys.executable, "-m", "pip", "--python", folder, "install", "-q", "--no-index", "--no-deps", built[1]]
    installed = run(install, folder)
    assert installed.returncode == 0, installed.stderr
    return folder


def distributions(names: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions of these names, and those that they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            required = map(Requirement, found[name].requires or ())
            waiting += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return list(found.values())


def test_the_wheel_has_every_file_of_the_package_and_every_recipe_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in files_below(ROOT / "trl_realloc")}
    recipes = {f"trl_realloc/{path.relative_to(ROOT).as_posix()}" for path in files_below(ROOT / "recipes")}
    assert names == package | recipes, "of a run, recipes/demo/policy has weights, and they stay out"
    assert {"trl_realloc/py.typed", "trl_realloc/planner/recipe/settings.txt"} <= names


def test_the_sdist_has_what_its_readme_names_and_no_tests_or_benchmarks(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "docs/index.md", "docs/planner.png"} <= names
    assert {"recipes/demo/ppo.yaml", "recipes/plans/flatten-2.yaml", "examples/ppo.py"} <= names
    assert not {
        name for name in names if name.startswith(("tests", "benchmarks", "build", ".")) or "safetensors" in name
    }


def test_the_metadata_has_the_version_the_license_and_the_requirements(built: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(built[1])
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Version"] == trl_realloc.__version__ and f"## [{metadata['Version']}]" in changelog()
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert "GRPO" in metadata["Summary"] and "RLOO" in metadata["Summary"]


def test_the_package_requires_every_library_that_it_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    required = {Requirement(text).name.replace("-", "_").lower() for text in texts} | {"yaml"}  # yaml: pyyaml's module
    assert {name.replace("-", "_") for name in LIGHT} <= required
    imported = set()
    for path in (ROOT / "trl_realloc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names - required == {"wandb"}  # a user's who sets report_to


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["--help"], "report"),
        (["show", ROOT / "recipes" / "plans" / "tensor-pipeline-4.yaml"], "actor.train"),
        (["plan", "interleave", "--devices", "8"], "cluster:"),
        (["plan", "llama-8b/grpo.yaml", "--clusters", "h100:1x8,h200:1x8", "--time-limit", "0.2"], "colocated"),
        (["report", "run"], "actor.train"),
        (["compare", "run", "run"], "1.00x"),
    ],
)
def test_the_command_needs_no_torch(environment: Path, tmp_path: Path, command: list[str | Path], printed: str) -> None:
    (tmp_path / "run").mkdir()
    Timeline(Span("actor.train", 0, 2.0 * n, 2.0 * n + 1, n) for n in range(3)).save(tmp_path / "run" / "timeline.json")
    ended = run([environment / "bin" / "trl-realloc", *command], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout


def test_the_installed_recipes_are_planned_and_plans_shown_without_torch(environment: Path, tmp_path: Path) -> None:
    """Those of models whose config is in the package: `grpo/` and `smollm2/` name models of the Hub."""
    plans = [f"{path.parent.name}/{path.name}" for path in (ROOT / "recipes").glob("*/*plan.yaml")]
    plans += [f"plans/{path.name}" for path in (ROOT / "recipes" / "plans").glob("*.yaml")]
    recipes = [f"{folder}/{name}.yaml" for folder in ("demo", "llama-8b") for name in ("ppo", "grpo")]
    recipes += ["demo/rloo.yaml", "llama-8b/rloo-lora.yaml", "qwen-32b/ppo.yaml", "llama-70b/ppo.yaml"]
    (tmp_path / "all.py").write_text(
        "import sys\n"
        "from trl_realloc.cli.main import main\n"
        f"for plan in {plans}: assert main(['show', plan]) == 0, plan\n"
        f"for name in {recipes}:\n"
        "    assert main(['plan', name, '--cluster', 'h200:4x8', '--time-limit', '0.2']) == 0, name\n"
    )
    ended = run([environment / "bin" / "python", "all.py"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(plans) == 21 and len(list(tmp_path.glob("plan*.png"))) == 2 * len(recipes)


@pytest.mark.parametrize(
    "command", [["grpo", "--config", "llama-8b/grpo.yaml"], ["profile", "demo/ppo.yaml"], ["plan", "demo/ppo.yaml"]]
)
def test_work_for_torch_is_refused_without_torch(environment: Path, tmp_path: Path, command: list[str | Path]) -> None:
    ended = run([environment / "bin" / "trl-realloc", *command], tmp_path)
    assert ended.returncode == 2 and "needs torch, which is not installed here" in ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_without_torch_the_package_is_the_wheels_and_names_what_it_misses(environment: Path, tmp_path: Path) -> None:
    code = "import trl_realloc; print(trl_realloc.__file__); trl_realloc.ExecutionPlan; trl_realloc.PPOTrainer"
    ended = run([environment / "bin" / "python", "-c", code], tmp_path)
    assert ended.stdout.startswith(str(environment))
    assert re.search("No module named '(torch|accelerate)'", ended.stderr)


def test_every_public_name_of_the_installed_wheel_can_be_imported(environment: Path, tmp_path: Path) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    folders = [
        packages,
        *(path for path in sys.path if "site-packages" in path),
    ]  # the wheel, then torch and the others
    code = "import trl_realloc as t; print(t.__file__); [getattr(t, name) for name in t.__all__]"
    ended = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=os.pathsep.join(map(str, folders)))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(packages))
