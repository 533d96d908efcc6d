"""The import rules: the contracts in pyproject.toml, kept by import-linter, and what it cannot say."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

import trl_realloc


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trl_realloc"


def test_the_import_contracts_are_kept() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_process_that_trains_by_ppo_does_without_vllm() -> None:
    code = (
        "import sys\n"
        "from trl_realloc import PPOConfig, PPOTrainer\n"
        "import trl_realloc.engines.generation.vllm\n"
        "assert 'vllm' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_plans_are_made_and_shown_in_a_process_without_torch() -> None:
    folders = ("common", "plan", "planner")
    files = [path for folder in folders for path in sorted((PACKAGE / folder).glob("*.py"))]
    files += [PACKAGE / "realloc" / f"{name}.py" for name in ("layout", "memory", "schedule")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    code = (
        "import importlib, sys\n"
        f"for module in {modules}: importlib.import_module(module)\n"
        "from trl_realloc.cli.main import main\n"
        "assert main(['plan', 'interleave', '--devices', '4096', '--nodes', '512']) == 0\n"
        "heavy = {'torch', 'transformers', 'trl', 'accelerate', 'datasets', 'deepspeed', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'scipy' not in sys.modules, 'it takes half of the time of --help, and show needs none of it'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "mesh: 0-4095" in ended.stdout


def test_what_tests_share_has_a_name_of_its_own_and_no_file_imports_a_conftest() -> None:
    """Tests of all folders are imported into one process, each shared file by its bare name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = settings["tool"]["pytest"]["ini_options"]["pythonpath"]
    names = [path.name for folder in folders for path in (ROOT / folder).glob("*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == ["conftest.py"]
    statement = re.compile(r"^\s*(from|import) conftest\b", re.MULTILINE)
    assert not [path for path in (ROOT / "tests").rglob("*.py") if statement.search(path.read_text(encoding="utf-8"))]


def test_trl_experimental_ppo_is_imported_at_one_seam() -> None:
    statement = re.compile(r"^\s*(from|import) trl\.experimental", re.MULTILINE)
    users = [path for path in PACKAGE.rglob("*.py") if statement.search(path.read_text(encoding="utf-8"))]
    assert users == [PACKAGE / "trainer" / "trl_compat.py"]


def test_every_name_of_the_package_has_a_home() -> None:
    assert set(trl_realloc.__all__) == set(dir(trl_realloc))
    assert all(hasattr(trl_realloc, name) for name in trl_realloc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'PPOTrianer'"):
        _ = trl_realloc.PPOTrianer


def test_benchmarks_and_examples_import_what_the_package_has() -> None:
    """Also inside their functions, which no other test runs."""
    missing = []
    paths = (path for folder in ("benchmarks", "examples", "recipes") for path in (ROOT / folder).rglob("*.py"))
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("trl_realloc"):
                continue
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                is_module = hasattr(module, "__path__") and find_spec(f"{node.module}.{name}") is not None
                if not is_module and not hasattr(module, name):
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {name}")
    assert not missing
