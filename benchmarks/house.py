"""Size and shape of the package, counted from its source.

    python benchmarks/house.py --json benchmarks/results/house.json
    python benchmarks/house.py --at 3e85f29 --json benchmarks/results/house.json

`--at` counts another commit with this script, so that two commits are compared by one definition. The result file has
one section per commit that `--at` named, and `checkout` for the working tree. The files of an iteration are those that
docs/structure.md lists. 3e85f29 has no list; 798f22d, the first that has one, has the same package.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

import result_file


PACKAGE = "trl_realloc"
TRAINERS = ("PPOTrainer", "GRPOTrainer")
RELATIVE_OPENINGS = {"What", "Whether", "How", "Of", "Where", "Which"}
SHORT_LINES = 100
Figure = int | float | None


class Source:
    """The parsed files of a folder, by their path below the root."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root = root
        paths = sorted(path for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts)
        self.texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def nodes(self) -> Iterator[ast.AST]:
        for tree in self.trees.values():
            yield from ast.walk(tree)

    def lines(self, below: str = "") -> int:
        return sum(text.count("\n") for name, text in self.texts.items() if name.startswith(below))

    def imports(self, name: str) -> Iterator[tuple[str, str, str]]:
        """For every name that a file imports from the package: its name there, the file it is from, its own name."""
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.ImportFrom):
                parts = name.split("/")[: -node.level] if node.level else []
                module = "/".join([*parts, *(node.module or "").split(".")]).rstrip("/")
                for alias in node.names:
                    file = self.file(f"{module}/{alias.name}") or self.file(module)
                    if file:
                        yield alias.asname or alias.name, file, alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    file = self.file(alias.name.replace(".", "/"))
                    if file:
                        yield alias.asname or alias.name, file, alias.name

    def file(self, module: str) -> str | None:
        return next((name for name in (f"{module}.py", f"{module}/__init__.py") if name in self.texts), None)


def iteration_files(root: Path, algorithm: str) -> tuple[int | None, list[str]]:
    """The number of files listed for an algorithm's iteration, and those of them that are missing."""
    text = (root / "docs" / "structure.md").read_text(encoding="utf-8")
    section = re.search(rf"^### An iteration of {algorithm}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return None, []
    files = set(re.findall(r"`([\w/]+\.py)`", section[1]))
    return len(files), sorted(file for file in files if not (root / PACKAGE / file).is_file())


def family(source: Source, trainer: str) -> dict[tuple[str, str], ast.ClassDef]:
    """The trainer's class and all classes of the package that it inherits from, by file and name."""
    classes = {
        (name, node.name): node
        for name, tree in source.trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    found: dict[tuple[str, str], ast.ClassDef] = {}
    waiting = [key for key in classes if key[1] == trainer]
    while waiting:
        key = waiting.pop()
        if key not in classes or key in found:
            continue
        found[key] = classes[key]
        waiting += bases(source, key, classes[key])
    return found


def bases(source: Source, key: tuple[str, str], node: ast.ClassDef) -> list[tuple[str, str]]:
    imported = {name: (file, original) for name, file, original in source.imports(key[0])}
    names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [imported.get(name.id, (key[0], name.id)) for name in names if isinstance(name, ast.Name)]


def methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def mixin_calls(source: Source, trainer: str) -> int:
    """Calls through `self` of a method that neither the class nor a class that it inherits from defines, but another
    class of the trainer does."""
    classes = family(source, trainer)
    count = 0
    for key, node in classes.items():
        inherited, waiting = set(methods(node)), bases(source, key, node)
        while waiting:
            base = waiting.pop()
            if base in classes:
                inherited |= methods(classes[base])
                waiting += bases(source, base, classes[base])
        others = set().union(*(methods(each) for each in classes.values())) - inherited
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in others:
                count += isinstance(call.func.value, ast.Name) and call.func.value.id == "self"
    return count


def bare_declarations(source: Source, trainer: str) -> int:
    """Attributes that a class of the trainer declares without a value."""
    return sum(
        isinstance(statement, ast.AnnAssign) and statement.value is None
        for node in family(source, trainer).values()
        for statement in ast.walk(node)
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Attribute))
    )


def one_importer(source: Source) -> list[str]:
    """Files with one importer, shorter than `SHORT_LINES`."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name in source.texts:
        for _, file, _ in source.imports(name):
            importers[file].add(name)
    return [
        file
        for file, by in sorted(importers.items())
        if len(by) == 1 and source.texts[file].count("\n") < SHORT_LINES and not file.endswith("__init__.py")
    ]


def shared(names: Iterable[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


def public_classes(source: Source) -> Iterator[str]:
    for tree in source.trees.values():
        yield from {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}


def constants(source: Source) -> Iterator[str]:
    for tree in source.trees.values():
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
        inner = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        yield from {name.id for name in inner if re.fullmatch(r"[A-Z][A-Z0-9_]+", name.id)}


def docstrings(source: Source) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in source.nodes() if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def private_reaches(tests: Source) -> int:
    """Tests that read or set an attribute with a leading underscore of anything but `self`."""
    return sum(
        any(isinstance(each, ast.Attribute) and is_private(each) for each in ast.walk(node))
        for node in tests.nodes()
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def is_private(node: ast.Attribute) -> bool:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    return re.match(r"_[^_]", node.attr) is not None and owner not in ("self", "cls")


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths if path.is_file())


def function_lines(source: Source) -> list[int]:
    functions = [node for node in source.nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)


def count(root: Path) -> dict[str, Figure]:
    source, tests = Source(root, PACKAGE), Source(root, "tests")
    lengths, openings = function_lines(source), [re.split(r"\W", text)[0] for text in docstrings(source)]
    figures: dict[str, Figure] = {}
    for algorithm in ("PPO", "GRPO"):
        figures[f"files of an iteration of {algorithm}"], missing = iteration_files(root, algorithm)
        if missing:
            print(f"docs/structure.md lists files for {algorithm} that are missing: {', '.join(missing)}")
    figures["files of the package"] = len(source.texts)
    figures["lines of the package"] = source.lines()
    figures["lines of planner/"] = source.lines(f"{PACKAGE}/planner/")
    for trainer in TRAINERS:
        figures[f"{trainer}: calls from mixin to mixin"] = mixin_calls(source, trainer)
        figures[f"{trainer}: bare attribute declarations"] = bare_declarations(source, trainer)
    figures[f"files with one importer, under {SHORT_LINES} lines"] = len(one_importer(source))
    figures["public class names of several files"] = shared(public_classes(source))
    stems = [Path(name).stem for name in source.texts]
    figures["module names of several files"] = shared(stem for stem in stems if not stem.startswith("__"))
    figures["constant names of several files"] = shared(constants(source))
    figures["docstrings that begin with What, Whether, How, Of, Where, Which"] = sum(
        opening in RELATIVE_OPENINGS for opening in openings
    )
    figures["docstrings"] = len(openings)
    figures["Any"] = sum(isinstance(node, ast.Name) and node.id == "Any" for node in source.nodes())
    figures["tests that reach a private attribute"] = private_reaches(tests)
    front = [root / name for name in ("README.md", "recipes/README.md", "CHANGELOG.md")]
    figures["words of user pages"] = words([*(root / "docs").glob("*.md"), *front])
    figures["words of studies"] = words((root / "docs" / "studies").glob("*.md"))
    figures["function lines, median"] = statistics.median(lengths)
    figures["function lines, 9 of 10 at most"] = lengths[9 * len(lengths) // 10]
    figures["function lines, longest"] = lengths[-1]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to add the figures to")
    parser.add_argument("--at", metavar="COMMIT", help="count this commit, not the working tree")
    given = parser.parse_args()
    if given.at is None:
        figures = count(result_file.ROOT)
    else:
        command = ["git", "archive", given.at]
        packed = subprocess.run(command, cwd=result_file.ROOT, capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=BytesIO(packed)) as archive:
                archive.extractall(folder, filter="data")
            figures = count(Path(folder))
    for name, figure in figures.items():
        print(f"{name:<66} {'not listed' if figure is None else f'{figure:,}':>10}")
    if given.json:
        result_file.merge(given.json, {given.at or "checkout": figures})


if __name__ == "__main__":
    main()
