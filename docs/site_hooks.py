"""What `mkdocs build` does beyond its configuration: links that lead from docs/ into the repository work on the site.

A file that a page links to, and that is not below docs/, becomes a part of the site, below `repository/`: Markdown as a
page, other text as it is. The links are rewritten, so the same pages work where the repository is browsed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter


ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")  # the path in [text](path#anchor), not in [text](https://host)
PICTURES = {".png", ".svg"}
REFERENCE = re.compile(
    r"\[(<code>|`)~?(?:\w+\.)*(\w+)(</code>|`)\]"
)  # [`~package.Name`], as in docstrings of Transformers
TYPE = re.compile(r"(?<=\(<code>)[^<]*(?=</code>)")


def place(path: Path) -> str:
    """Where a file of the repository is on the site, as mkdocs writes it: with `/`, below docs/."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    text = "" if path.suffix == ".md" or path.suffix in PICTURES else ".txt"  # browsers show it, and do not store it
    return f"repository/{path.relative_to(ROOT).as_posix()}{text}"


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / link).resolve()
        if path.is_relative_to(ROOT) and path.is_file():
            yield path


def on_files(files: Files, config: Any) -> Files:
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    seen = set(pages)
    while pages:
        for path in linked(pages.pop()):
            if path in seen or path.is_relative_to(DOCS):
                continue
            seen.add(path)
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
            if path.suffix == ".md":
                pages.append(path)
    style = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    files.append(File.generated(config, "pygments.css", content=style))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source, folder = Path(page.file.abs_src_path), os.path.dirname(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        path = (source.parent / link[0]).resolve()
        if not path.is_relative_to(ROOT) or not path.is_file():
            return link[0]  # mkdocs says that it is missing
        return os.path.relpath(place(path), folder or ".")

    return LINK.sub(on_site, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings in the form of Transformers: no brackets around names, no marks within code."""
    if page.file.src_uri != "api.md":
        return html
    plain = REFERENCE.sub(r"\1\2\3", html)
    return TYPE.sub(lambda kind: re.sub(r", defaults to .*|[`*]", "", kind[0]), plain)
