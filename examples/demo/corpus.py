"""The demo's text: prose sentences from the documentation that comes with every CPython.

Owns where the text is from and how it is cleaned. It is read from the interpreter that runs this file and is not
copied into the repository: the language reference as `help()` prints it (`pydoc_data.topics`) and the docstrings of
the standard library, both under the licence of the Python Software Foundation.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path


SOURCE = "CPython's language reference and standard-library docstrings (PSF licence)"
# Parts of the library that are tests, programs or other people's packages rather than a documented library.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
MARKUP = (
    (re.compile(r":[a-z:]+:`~?([^`]+)`"), r"\1"),  # :class:`~collections.deque`
    (re.compile(r"`+([^`']+)[`']+"), r'"\1"'),  # ``x``, `x`, `x'
    (re.compile(r"\*\*([^*\s][^*]*)\*\*"), r"\1"),  # **bold**
    (re.compile(r"(?<![\w*])\*([^*\s]+(?: [^*\s]+){0,3})\*(?![\w*])"), r"\1"),  # *emphasis*
    (re.compile(r"\s*\[\d+\]"), ""),  # footnotes
    (re.compile(r"\s*\((?:[Ss]ee|cf\.)[^()]*\)"), ""),  # (see section …)
    (re.compile(r"\s+"), " "),
)
QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-"})
ITEM = re.compile(r"^\s*(?:[*-]|\d+\.|[a-z]\))\s+", re.M)
END = re.compile(r"(?<=[a-z\d\")]\.)(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)\s+(?=[A-Z\"])")
PLAIN = re.compile(r"[A-Z\"][A-Za-z\d ,;:'\"().!?/_+-]+\.")
LITTLE = re.compile(r"\b(?:the|a|an|is|are|be|of|to|in|for|and|or|if|it|this|that|with|as|by|not|on|from)\b")


def sentences() -> list[str]:
    """Sentences of 6 to 40 words in plain letters, each once, in an order that depends on the interpreter alone.

    Raises:
        SystemExit: this Python came without its documentation.
    """
    found: dict[str, None] = {}
    for page in pages():
        for paragraph in re.split(r"\n\s*\n", ITEM.sub("\n\n", page.translate(QUOTES))):
            for pattern, replacement in MARKUP:
                paragraph = pattern.sub(replacement, paragraph)
            found.update(dict.fromkeys(filter(is_prose, END.split(paragraph.strip()))))
    if len(found) < 1000:
        raise SystemExit(
            f"this Python has only {len(found)} sentences of documentation where the demo needs 1000; use a CPython "
            f"with its standard library's sources (python.org, conda, uv, or your system's full python3 package)."
        )
    return list(found)


def pages() -> Iterator[str]:
    """The raw texts: topics of the reference first, then docstrings by path and line."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems package it apart
        topics = {}
    yield from topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            yield from docstrings(path)


def docstrings(path: Path) -> Iterator[str]:
    """Every docstring of a source file; none where the file does not parse (some are templates)."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def is_prose(sentence: str) -> bool:
    """Whether it reads as English: plain characters, mostly letters, closed quotes and brackets, some little words."""
    words = sentence.split()
    return (
        6 <= len(words) <= 40
        and PLAIN.fullmatch(sentence) is not None
        and sum(letter.isalpha() for letter in sentence) >= 0.72 * len(sentence)
        and max(map(len, words)) <= 24
        and " :" not in sentence  # field lists of reST
        and sentence.count('"') % 2 == 0
        and sentence.count("(") == sentence.count(")")
        and len(LITTLE.findall(sentence)) * 6 >= len(words)
    )
