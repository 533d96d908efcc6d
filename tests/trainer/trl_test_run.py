"""A run of files of TRL's tests in a process of its own, and the table of its outcomes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_data import ROWS, TRAIN_ROWS
from trl_plugin import CLASSES, OUTCOMES, SETTING
from trl_sources import LAST_SDIST_WITH_TESTS, TestFiles, qwen_ranks
from trl_stand_in_images import write_image_models
from trl_stand_ins import qwen_tokenizer, write_remote_model, write_text_models, write_vllm_model


KINDS = ("passed", "skipped", "xfailed", "xpassed", "failed")
# group, and what is in the name of its tests; the first that is found decides
GROUPS = (
    ("needs a GPU", r"Slow::"),
    ("vLLM", r"vllm"),
    ("images", r"VLM|vlm|multimodal"),
    ("Liger", r"liger"),
    ("PEFT", r"peft"),
    ("tools, environments", r"tool|environment|rollout_func|RolloutDispatch|no_reward_source"),
    ("training on text", r"test_train|test_evaluate|entropy_bonus|reward_metric|multiple_iterations"),
    ("parts and refusals", r""),
)
# In place of TRL's own helpers for its tests, where those do not fit the installed TRL. BASE: what a test case is.
HELPERS = """
import unittest

import pytest
import torch
from transformers import is_bitsandbytes_available
from transformers.utils import is_peft_available
from trl.import_utils import is_vllm_available


class TrlTestCase(BASE):
    @pytest.fixture(autouse=True)
    def _make_tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)


require_peft = pytest.mark.skipif(not is_peft_available(), reason="needs peft")
require_vllm = pytest.mark.skipif(not is_vllm_available(), reason="needs vllm")
require_bitsandbytes = pytest.mark.skipif(not is_bitsandbytes_available(), reason="needs bitsandbytes")
require_torch_gpu_if_bnb_not_multi_backend_enabled = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"
)
"""


def lay_out(files: TestFiles, names: Sequence[str], root: Path) -> list[str]:
    """Copies test files and their helpers to `root/tests`; returns the paths of the files, relative to `root`."""
    tests = root / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: runs long\n    low_priority: seldom run\n")
    for name in names:
        shutil.copy(files.folder / name, tests)
    if files.release == LAST_SDIST_WITH_TESTS:
        (tests / "testing_utils.py").write_text(HELPERS.replace("BASE", "unittest.TestCase"))
    else:
        for helper in ("testing_utils.py", "conftest.py"):
            shutil.copy(files.folder / helper, tests)
    return [f"tests/{name}" for name in names]


def run_pytest(
    root: Path,
    arguments: Sequence[str],
    *,
    classes: str | None = None,
    rows: int = TRAIN_ROWS,
    setting: str = "",
    modules: Sequence[Path] = (),
    outcomes: Path | None = None,
) -> int:
    """Runs pytest with the plugin in `root`, whose folder `hub` is the Hub's cache; returns its exit status.

    `classes` is the module whose classes take the place of TRL's; None leaves TRL's. `modules` are folders and wheels
    to import from.
    """
    here = Path(__file__).resolve()
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "HF_HOME": str(root),
        "HF_HUB_CACHE": str(root / "hub"),
        "HF_MODULES_CACHE": str(root / "modules"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        CLASSES: classes or "",
        ROWS: str(rows),
        OUTCOMES: str(outcomes or ""),
        SETTING: setting,
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[2]), *map(str, modules)]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "trl_plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """The outcome, the reason and the seconds of every test, under its pytest id, as the plugin has written them."""
    if not path.exists():
        raise RuntimeError("pytest ended before its first test did; what it has printed says why")
    return json.loads(path.read_text())


def run_files(
    files: TestFiles,
    names: Sequence[str],
    *,
    classes: str | None = None,
    rows: int = TRAIN_ROWS,
    setting: str = "",
    options: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Outcome, reason and seconds of every test of some files, under its pytest id.

    `rows` is how many rows the data sets have to train on; with fewer than 12, TRL's tests of the batches fail.
    Raises `Unreachable` if the tokenizer cannot be downloaded.
    """
    tokenizer = qwen_tokenizer(qwen_ranks())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_text_models(root / "hub", tokenizer)
        write_remote_model(root / "hub", tokenizer)
        write_vllm_model(root / "hub", tokenizer)
        write_image_models(root / "hub", tokenizer)
        paths = lay_out(files, names, root)
        outcomes = root / "outcomes.json"
        run_pytest(
            root,
            [*paths, *options],
            classes=classes,
            rows=rows,
            setting=setting,
            modules=files.wheels,
            outcomes=outcomes,
        )
        return read_outcomes(outcomes)


def group_of(test: str) -> str:
    return next(group for group, pattern in GROUPS if re.search(pattern, test))


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """Counts by file and group, then each test that did not pass, by reason."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for test, told in outcomes.items():
        file = Path(test.split("::")[0]).name
        for row in (group_of(test), "all"):
            counts[file, row, told["outcome"]] += 1
    lines = [f"{'':50}" + "".join(f"{kind:>9}" for kind in KINDS)]
    for file in sorted({file for file, _, _ in counts}):
        for row in [*(group for group, _ in GROUPS), "all"]:
            numbers = [counts[file, row, kind] for kind in KINDS]
            if any(numbers):
                lines.append(f"{file:26}{row:24}" + "".join(f"{number:9}" for number in numbers))
    for kind in KINDS[1:]:
        reasons: dict[str, list[str]] = {}
        for test, told in outcomes.items():
            if told["outcome"] == kind:
                reasons.setdefault(told["reason"], []).append(test.split("/")[-1])
        for reason, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines += ["", f"{kind}, {len(tests)}: {reason}", *(f"    {test}" for test in tests)]
    return "\n".join(lines)
