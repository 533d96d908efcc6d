"""The house as it is drawn: which file may import which of the others, and which outside packages.

`MAY_IMPORT` is the "may import" column of the design. A new file needs a row; a new import, a reason to change one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trl_realloc


ROOT = Path(__file__).parent.parent / "trl_realloc"

# The floor that every file stands on: refusals with the nearest right word, notices on the terminal. They import
# nothing of ours.
BASE = {"errors", "notices"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "schema": set(),
    "settings": set(),
    "notices": set(),
    # 1 vocabulary
    "cluster": set(),
    "dataflow": set(),
    "modelspec": set(),
    "assignment": {"cluster", "dataflow"},
    "plan": {"assignment", "cluster", "dataflow", "files"},
    "timeline": {"cluster", "files", "schema"},
    "rollout": set(),
    "ppo": {"rollout"},
    "finite": {"rollout"},
    # 2 where parameters are
    "realloc": set(),
    "realloc/layout": {"assignment", "cluster", "modelspec", "plan"},
    "realloc/memory": {"assignment", "dataflow", "modelspec", "plan", "realloc/layout"},
    "realloc/schedule": {"cluster", "modelspec", "realloc/layout"},
    # 3 choose
    "planner": set(),
    "planner/workload": set(),
    "planner/hardware": {"cluster", "modelspec"},
    "planner/profile": {"cluster", "files", "modelspec", "planner/hardware", "schema"},
    "planner/cost": {
        "realloc/memory",
        "assignment",
        "cluster",
        "dataflow",
        "modelspec",
        "realloc/schedule",
        "planner/hardware",
        "planner/workload",
    },
    "planner/simulate": {"cluster", "plan", "planner/hardware", "timeline"},
    "planner/presets": {"cluster", "dataflow", "files", "plan"},
    "planner/space": {"assignment", "cluster", "dataflow", "modelspec", "planner/cost"},
    "planner/problem": {
        "assignment",
        "plan",
        "timeline",
        "realloc/layout",
        "realloc/schedule",
        "planner/cost",
        "planner/simulate",
        "planner/space",
    },
    "planner/search": {"cluster", "planner/problem", "planner/space"},
    "planner/choose": {
        "cluster",
        "dataflow",
        "modelspec",
        "planner/cost",
        "planner/presets",
        "planner/problem",
        "planner/search",
        "planner/space",
    },
    "planner/show": {"planner/choose", "planner/problem"},
    "planner/task": {"cluster", "dataflow", "files", "modelspec", "planner/workload", "settings"},
    # 3 do
    "realloc/transfer": {"realloc/layout", "realloc/schedule"},
    "engines": {"plan", "rollout", "ppo", "modelspec", "realloc/layout"},
    "engines/process": set(),
    "engines/group": set(),
    "engines/weights": {"engines"},
    "engines/guard": {"engines/group", "finite", "rollout"},
    "engines/forward": {"engines/group", "engines/guard", "rollout", "ppo"},
    "engines/replicas": {"engines", "engines/group"},
    "engines/replicated": {
        "engines",
        "engines/forward",
        "engines/group",
        "engines/guard",
        "engines/masters",
        "engines/weights",
        "finite",
        "rollout",
        "ppo",
    },
    "engines/zero_setup": {"engines/group"},
    "engines/zero_init": set(),
    "engines/compiled_ops": set(),
    "engines/zero": {
        "engines",
        "engines/forward",
        "engines/group",
        "engines/guard",
        "engines/replicated",
        "engines/weights",
        "engines/zero_setup",
        "engines/compiled_ops",
        "plan",
        "rollout",
        "ppo",
        "realloc/layout",
    },
    "engines/tensor": {"engines/forward", "engines/group"},
    "engines/vocabulary": {"engines/forward", "engines/group"},
    "engines/pipeline": {"engines/forward", "engines/group", "modelspec", "rollout"},
    "engines/masters": {"engines/group", "engines/tensor"},
    "engines/megatron": {
        "engines",
        "engines/masters",
        "engines/pipeline",
        "engines/replicated",
        "engines/tensor",
        "engines/vocabulary",
        "engines/forward",
        "engines/group",
        "engines/guard",
        "engines/weights",
        "modelspec",
        "plan",
        "rollout",
        "ppo",
        "realloc/layout",
    },
    "engines/transformers": {"engines", "plan", "rollout"},
    "engines/slots": {"engines"},
    "engines/vllm": {"engines", "engines/process", "engines/slots", "plan", "rollout", "realloc/layout"},
    "engines/vllm_host": {"engines/process"},
    "engines/vllm_worker": set(),
    # 4 run a plan
    "rewards": {"finite", "rollout"},
    "data": {"rollout"},
    "models": {"engines/zero_init"},
    "runtime": set(),
    "runtime/liveness": set(),
    "runtime/watchdog": {"runtime/liveness"},
    "runtime/alarm": set(),
    "runtime/residency": set(),
    "runtime/groups": {"cluster", "plan", "engines/group"},
    "runtime/reallocation": {"cluster", "modelspec", "engines", "realloc/*"},
    "runtime/options": {"assignment", "realloc/transfer", "runtime/alarm"},
    "runtime/generation": {"assignment", "engines", "engines/vllm", "plan", "runtime/alarm", "runtime/options"},
    "runtime/replica_check": {"engines", "engines/group", "engines/replicas"},
    "runtime/placement": {
        "cluster",
        "dataflow",
        "plan",
        "modelspec",
        "rewards",
        "engines",
        "engines/*",
        "runtime/generation",
        "runtime/groups",
        "runtime/options",
        "runtime/reallocation",
        "runtime/residency",
    },
    "runtime/exchange": {"cluster", "dataflow", "plan", "rollout", "timeline", "runtime/alarm"},
    "runtime/calls": {
        "dataflow",
        "engines",
        "finite",
        "ppo",
        "rewards",
        "rollout",
        "runtime/exchange",
        "runtime/groups",
        "runtime/placement",
        "runtime/replica_check",
    },
    "runtime/executor": {
        "cluster",
        "dataflow",
        "modelspec",
        "plan",
        "timeline",
        "rollout",
        "ppo",
        "data",
        "engines",
        "finite",
        "rewards",
        "runtime/alarm",
        "runtime/calls",
        "runtime/exchange",
        "runtime/placement",
    },
    # 5 the user's side
    "compat": set(),
    "interfaces": set(),
    "hosts": {"cluster", "interfaces", "plan"},
    "launch": {"hosts", "plan"},
    "plugin": {"compat", "plan"},
    "config": {
        "compat",
        "engines/zero_setup",
        "hosts",
        "interfaces",
        "launch",
        "plan",
        "planner/presets",
        "plugin",
        "ppo",
        "settings",
    },
    "checkpoint": set(),
    "checkpoint/manifest": set(),
    "checkpoint/identity": set(),
    "checkpoint/problems": {"checkpoint", "checkpoint/manifest", "runtime/alarm", "runtime/groups"},
    "checkpoint/state": {
        "checkpoint",
        "checkpoint/problems",
        "finite",
        "models",
        "runtime/placement",
        "runtime/replica_check",
    },
    "checkpoint/saving": {"checkpoint", "checkpoint/manifest", "checkpoint/problems", "runtime/groups"},
    "checkpoint/resuming": {
        "hosts",
        "checkpoint",
        "checkpoint/identity",
        "checkpoint/manifest",
        "finite",
        "runtime/groups",
    },
    "checkpoint/mixin": {"checkpoint/*", "finite", "runtime/alarm", "runtime/placement"},
    "report": {"files", "plan", "planner/problem", "planner/simulate", "schema", "timeline"},
    "callbacks": set(),
    "metrics": {"runtime/executor", "timeline"},
    "optimizer": {"config", "dataflow", "engines"},
    "sharding": {"assignment", "config", "optimizer", "plan"},
    "policy_and_value": set(),
    "trl_attributes": {"data", "models", "runtime/placement"},
    "subject": {"dataflow", "models", "modelspec"},
    "job": {
        "assignment",
        "cluster",
        "planner/cost",
        "planner/profile",
        "planner/workload",
        "realloc/memory",
        "runtime/options",
        "subject",
    },
    "profiling": set(),
    "profiling/machine": {"cluster", "planner/hardware", "planner/profile"},
    "profiling/runs": {
        "assignment",
        "data",
        "dataflow",
        "engines",
        "job",
        "models",
        "modelspec",
        "plan",
        "planner/presets",
        "planner/profile",
        "ppo",
        "rewards",
        "rollout",
        "runtime/*",
        "subject",
        "timeline",
    },
    "profiling/cache": {
        "hosts",
        "job",
        "planner/profile",
        "profiling/machine",
        "profiling/runs",
        "rollout",
        "runtime/groups",
    },
    "planning": {
        "assignment",
        "cluster",
        "config",
        "dataflow",
        "job",
        "models",
        "modelspec",
        "optimizer",
        "plan",
        "planner/*",
        "profiling/cache",
        "realloc/memory",
        "runtime/groups",
        "runtime/options",
        "subject",
    },
    "profiling/job": {
        "config",
        "dataflow",
        "hosts",
        "planner/task",
        "planning",
        "profiling/cache",
        "recipe",
        "subject",
    },
    "replanning": {"job", "planner/choose", "planner/profile", "planning", "runtime/groups"},
    "moving": {
        "cluster",
        "models",
        "plan",
        "realloc/layout",
        "realloc/transfer",
        "runtime/placement",
        "runtime/reallocation",
    },
    "completions": {"rollout"},
    "checks": {"config", "dataflow", "models", "rewards"},
    "recipe": {"checkpoint", "config", "data", "files", "finite", "models", "rewards", "runtime/alarm", "settings"},
    "assembly": {
        "assignment",
        "checks",
        "cluster",
        "config",
        "data",
        "dataflow",
        "engines",
        "engines/vllm",
        "engines/zero_init",
        "hosts",
        "job",
        "launch",
        "models",
        "modelspec",
        "optimizer",
        "plan",
        "planner/presets",
        "planning",
        "plugin",
        "realloc/memory",
        "replanning",
        "rewards",
        "rollout",
        "runtime/calls",
        "runtime/options",
        "runtime/placement",
        "sharding",
        "subject",
    },
    "trainer": {"*"},
    "cli": {
        "",
        "assignment",
        "cluster",
        "dataflow",
        "files",
        "plan",
        "realloc/memory",
        "report",
        "timeline",
        "planner/*",
    },
    # The package's own names, imported on first use.
    "": {"*"},
}

# Outside packages that only these files may import, whatever the others do.
ONLY_HERE: dict[str, set[str]] = {
    "deepspeed": {"engines/zero", "engines/zero_init", "engines/zero_setup"},
    "vllm": {"engines/vllm", "engines/vllm_host", "engines/vllm_worker"},
    "trl.experimental.ppo": {"compat"},
    "matplotlib": {"timeline", "report"},
    "click": {"cli"},
    "rich": {"callbacks", "cli", "completions", "launch", "planner/show", "planning", "profiling/cache", "report"},
}

# Pure: they run on a laptop where torch is not installed.
PURE = {
    "",
    "errors",
    "files",
    "schema",
    "settings",
    "cluster",
    "dataflow",
    "modelspec",
    "assignment",
    "plan",
    "timeline",
    "realloc/layout",
    "realloc/memory",
    "realloc/schedule",
    "planner/workload",
    "planner/hardware",
    "planner/profile",
    "planner/cost",
    "planner/simulate",
    "planner/presets",
    "planner/space",
    "planner/search",
    "planner/choose",
    "planner/show",
    "planner/task",
    "cli",
}


def room(path: Path) -> str:
    """`trl_realloc/engines/zero.py` -> `engines/zero`; a package's `__init__.py` -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {room(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """The dotted names of all modules that a file imports, wherever in it, those for type checkers included."""
    package = ["trl_realloc", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from . import plan` imports a module of the package, `from .plan import Assignment` one of its names.
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if as_room(name) in FILES else module for name in names)


def as_room(module: str) -> str | None:
    """`trl_realloc.engines.zero` -> `engines/zero`; `None` for what is not ours."""
    first, *rest = module.split(".")
    return "/".join(rest) if first == "trl_realloc" else None


def rooms_imported(path: Path) -> set[str]:
    return {name for module in imports(path) if (name := as_room(module)) is not None}


def allowed(importer: str, imported: str) -> bool:
    return any(
        pattern in ("*", imported) or (pattern.endswith("/*") and imported.startswith(pattern[:-1]))
        for pattern in MAY_IMPORT.get(importer, set()) | BASE
    )


def test_every_file_has_a_row() -> None:
    assert set(FILES) <= set(MAY_IMPORT)


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_what_its_row_says(name: str) -> None:
    assert {other for other in rooms_imported(FILES[name]) if not allowed(name, other)} == set()


def test_a_file_that_imports_another_is_seen_to_do_so() -> None:
    assert rooms_imported(FILES["planner/presets"]) == {"cluster", "dataflow", "errors", "files", "plan"}
    planner = {f"planner/{name}" for name in ("choose", "cost", "hardware", "presets", "profile", "show", "task")}
    others = {
        "",
        "assignment",
        "cluster",
        "dataflow",
        "errors",
        "files",
        "plan",
        "realloc/memory",
        "report",
        "timeline",
    }
    assert rooms_imported(FILES["cli"]) == others | planner
    assert not allowed("cluster", "plan")


def test_no_files_import_each_other_in_a_circle() -> None:
    # All but the package's own __init__, whose names are imported on first use.
    graph = {name: rooms_imported(path) - {""} for name, path in FILES.items() if name}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_the_rows_themselves_have_no_circle() -> None:
    graph = {name: {row for row in rows if "*" not in row} - {""} for name, rows in MAY_IMPORT.items() if name}
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)  # raises CycleError where there is one


@pytest.mark.parametrize("package", ONLY_HERE)
def test_an_outside_package_is_imported_only_where_it_belongs(package: str) -> None:
    users = {
        name
        for name, path in FILES.items()
        if any(module == package or module.startswith(f"{package}.") for module in imports(path))
    }
    assert users <= ONLY_HERE[package]


def test_plans_need_no_torch() -> None:
    pure = [name for name in FILES if name in PURE or name.startswith("planner")]
    assert {"plan", "planner", "planner/presets", "cli", ""} <= set(pure)
    modules = [".".join(["trl_realloc", *name.split("/")]).rstrip(".") for name in pure]
    code = (
        "import importlib, sys\n"
        f"for module in {modules}: importlib.import_module(module)\n"
        "from trl_realloc.cli import main\n"
        "assert main(['plan', 'interleave', '--devices', '4096', '--nodes', '512']) == 0\n"
        "heavy = {'torch', 'transformers', 'trl', 'accelerate', 'deepspeed', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "mesh: 0-4095" in ended.stdout


def test_every_name_of_the_package_has_a_home() -> None:
    assert set(trl_realloc.__all__) == {*trl_realloc._HOMES, "__version__"} == set(dir(trl_realloc))
    for name, home in trl_realloc._HOMES.items():
        if home in PURE:
            assert getattr(trl_realloc, name).__name__ == name
        elif home in FILES:
            tree = ast.parse(FILES[home].read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    with pytest.raises(AttributeError, match="no attribute 'PPOTrianer'"):
        _ = trl_realloc.PPOTrianer
