"""The documentation's site: it builds without torch, every link leads somewhere, and every public name is described."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml

import trl_realloc


ROOT = Path(__file__).parent.parent

BUILD = """
import logging, sys
from mkdocs.commands.build import build
from mkdocs.config import load_config

logging.basicConfig(level=logging.WARNING)
build(load_config(sys.argv[1], site_dir=sys.argv[2], strict=True))
assert "torch" not in sys.modules
"""


def built(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUILD, str(config), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


class Page(HTMLParser):
    """The ids of a page, and the places that it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ended = built(ROOT / "mkdocs.yml", folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def test_every_link_of_every_page_leads_to_a_file_of_the_site_and_a_place_in_it(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name not in ("404.html", "search.html")}
    followed, astray = 0, []
    for path, page in pages.items():
        for target in page.targets:
            link, anchor = urldefrag(unquote(target))
            if ":" in link or link.startswith("//"):
                continue  # another host's
            found = (path.parent / link).resolve() if link else path
            followed += 1
            if not found.is_file() or (anchor and found in pages and anchor not in pages[found].ids):
                astray.append(f"{path.relative_to(site)}: {target}")
    assert followed > 500 and not astray, astray


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "<script" in line or "<link" in line or "<img" in line:
                assert "://" not in line, f"{path.name}: {line}"


def test_a_file_of_the_repository_that_a_page_links_to_is_on_the_site_as_it_is(site: Path) -> None:
    path = "trl_realloc/engines/base.py"
    assert (site / "repository" / f"{path}.txt").read_bytes() == (ROOT / path).read_bytes()


def test_the_api_page_has_every_name_of_the_package(site: Path) -> None:
    described = Page(site / "api.html").ids
    missing = {f"trl_realloc.{name}" for name in trl_realloc.__all__ if name != "__version__"} - described
    assert not missing


def test_the_api_page_lists_the_settings_of_the_trainers(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for setting in ("num_ppo_epochs", "max_staleness", "vllm_enable_sleep_mode", "heartbeat_timeout"):
        assert f"<code>{setting}</code>" in text
    assert "*optional*" not in text and "[`" not in text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[a page](nowhere.md)", "nowhere.md"),
        ("[a file](../trl_realloc/nowhere.py)", "nowhere.py"),
        ("[a place](#nowhere)", "#nowhere"),
        ("![a picture](nowhere.png)", "nowhere.png"),
    ],
)
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, text: str, named: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# A page\n\n{text}\n")
    changes = {
        "docs_dir": str(docs),
        "hooks": [str(ROOT / "docs" / "site_hooks.py")],
        "nav": ["index.md"],
        "plugins": [],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({"INHERIT": str(ROOT / "mkdocs.yml"), **changes}))
    ended = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert ended.returncode != 0
    assert named in ended.stderr
