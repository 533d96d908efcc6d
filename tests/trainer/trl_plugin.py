"""The pytest plugin of a run of TRL's tests: other classes and data sets in TRL's places, and the outcomes in a file.

It is loaded before the tests are imported, in the process that `trl_test_run.py` starts. The environment tells it what
to do.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from trl_data import load_dataset

from trl_realloc.trainer.trl_compat import HAS_TRL_PPO


CLASSES = "TRL_TESTS_CLASSES"  # the module whose classes are tested
OUTCOMES = "TRL_TESTS_OUTCOMES"  # the file to write
SETTING = "TRL_TESTS_SETTING"  # of every config: NAME=VALUE, with VALUE in JSON
NAMES = {"trl": ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer")}
if HAS_TRL_PPO:
    NAMES["trl.experimental.ppo"] = ("PPOConfig", "PPOTrainer")
NO_SERVER = "We should add a mock for the vLLM server."
_outcomes: dict[str, dict[str, Any]] = {}


def _replace_classes(module: str) -> None:
    """Puts the classes that a module has in the places that the tests import them from."""
    given = importlib.import_module(module)
    # All are imported before the first is replaced: ours are made from TRL's.
    found = [
        (importlib.import_module(home), name, getattr(given, name))
        for home, names in NAMES.items()
        for name in names
        if hasattr(given, name)
    ]
    for home, name, class_ in found:
        setattr(home, name, class_)


def _train_on_cpu() -> None:
    """TRL's configs ask for bfloat16, which Transformers refuses without a GPU unless `use_cpu` is said.

    TRL's own conftest.py does the same since 1.0.
    """
    import torch
    import transformers

    if torch.accelerator.is_available():
        return
    check = transformers.TrainingArguments.__post_init__

    def on_cpu(self: Any) -> None:
        self.use_cpu = True
        check(self)

    transformers.TrainingArguments.__post_init__ = on_cpu


def pytest_configure() -> None:
    import datasets

    datasets.load_dataset = load_dataset
    _train_on_cpu()
    if module := os.environ.get(CLASSES):
        _replace_classes(module)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """TRL skips its tests of vLLM, for want of a server. This package's engines run on a CPU, so they are run with its
    classes, but for those of models that read images."""
    for item in items if os.environ.get(CLASSES) else ():
        if "vlm" not in item.name.replace("vllm", ""):
            item.own_markers = [mark for mark in item.own_markers if mark.kwargs.get("reason") != NO_SERVER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None]:
    """The configs of the tested classes have the given setting. A test that gives the model a `generate` of its own
    gets it called: a vLLM engine, which this package takes where nothing else is said, runs in a process of its own and
    knows nothing of it."""
    name, _, value = os.environ.get(SETTING, "").partition("=")
    settings = {name: json.loads(value)} if name else {}
    if 'patch.object(trainer.model, "generate"' in inspect.getsource(item.function):
        settings["use_vllm"] = False
    with contextlib.ExitStack() as patches:
        for config in NAMES["trl"] if os.environ.get(CLASSES) else ():
            kind = getattr(importlib.import_module(os.environ[CLASSES]), config, None)
            if hasattr(kind, "use_vllm"):
                patches.enter_context(patch.object(kind, "__post_init__", _with(settings, kind.__post_init__)))
        return (yield)


def _with(settings: dict[str, Any], check: Callable[[Any], None]) -> Callable[[Any], None]:
    def checked(self: Any) -> None:
        vars(self).update({name: value for name, value in settings.items() if hasattr(self, name)})
        check(self)

    return checked


def _reason(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    if "couldn't find them in the cached files" in text:
        return "asks for a model that is not made here"
    return " ".join(text.split())[:400] if report.failed else ""


def _write() -> None:
    """After each test, so that a run that is ended has the outcomes until then."""
    if path := os.environ.get(OUTCOMES):
        Path(path).write_text(json.dumps(_outcomes))


def pytest_runtest_logreport(report: Any) -> None:
    test = _outcomes.setdefault(report.nodeid, {"outcome": "passed", "reason": "", "seconds": 0.0})
    test["seconds"] = round(test["seconds"] + report.duration, 2)
    if hasattr(report, "wasxfail"):
        test["outcome"], test["reason"] = "xfailed" if report.skipped else "xpassed", _reason(report)
    elif report.failed or report.skipped:
        test["outcome"], test["reason"] = report.outcome, _reason(report)
    if report.when == "teardown":
        _write()


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        reason = " ".join(str(report.longrepr).split())[-400:]
        _outcomes[report.nodeid] = {"outcome": "failed", "reason": reason, "seconds": 0.0}
        _write()
