"""Size and shape of the package, counted from its source.

    python benchmarks/house.py --json benchmarks/results/house.json
    python benchmarks/house.py --at 3e85f29 --json benchmarks/results/house.json

`--at` counts another commit with this script, so that two commits are compared by one definition. The result file has
one section per commit that `--at` named, and `checkout` for the working tree. Bare lines are those without blank lines,
comments and docstrings. What an iteration runs through is measured by `follow.py`.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from io import BytesIO, StringIO
from pathlib import Path

import result_file


PACKAGE = "trl_realloc"
RELATIVE_OPENINGS = {"What", "Whether", "How", "Of", "Where", "Which"}
SHORT_LINES = 100
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Source:
    """The parsed files of some folders, by their path below the root."""

    def __init__(self, root: Path, *folders: str) -> None:
        paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
        self.texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def nodes(self) -> Iterator[ast.AST]:
        for tree in self.trees.values():
            yield from ast.walk(tree)

    def lines(self, below: str = "") -> int:
        return sum(text.count("\n") for name, text in self.texts.items() if name.startswith(below))

    def bare_lines(self) -> int:
        """The lines that have code."""
        return sum(len(code_lines(text) - docstring_lines(self.trees[name])) for name, text in self.texts.items())

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


def code_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return {line for each in tokens if each.type not in NO_CODE for line in range(each.start[0], each.end[0] + 1)}


def docstring_lines(tree: ast.AST) -> set[int]:
    nodes = [node.body[0] for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


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


def constants(source: Source) -> Iterator[str]:
    for tree in source.trees.values():
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
        inner = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        yield from {name.id for name in inner if re.fullmatch(r"[A-Z][A-Z0-9_]+", name.id)}


def docstrings(source: Source) -> list[str]:
    return [text for node in source.nodes() if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))]


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


def count(root: Path) -> dict[str, float]:
    source, tests = Source(root, PACKAGE), Source(root, "tests")
    lengths, openings = function_lines(source), [re.split(r"\W", text)[0] for text in docstrings(source)]
    figures: dict[str, float] = {"files of the package": len(source.texts)}
    around = Source(root, "benchmarks", "examples")
    for name, of in (("the package", source), ("tests/", tests), ("benchmarks/ and examples/", around)):
        figures[f"lines of {name}"], figures[f"bare lines of {name}"] = of.lines(), of.bare_lines()
    figures["lines of planner/"] = source.lines(f"{PACKAGE}/planner/")
    figures[f"files with one importer, under {SHORT_LINES} lines"] = len(one_importer(source))
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
        print(f"{name:<66} {figure:>10,}")
    if given.json:
        result_file.merge(given.json, {given.at or "checkout": figures})


if __name__ == "__main__":
    main()
