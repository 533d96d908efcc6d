"""What a vLLM engine is started with: the folder of its model's config, and its share of the memory."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from trl_realloc.engines.generation import vllm
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.placement.engine_options import EngineOptions
from trl_realloc.runtime.placement.vllm_start import kept_model, start_vllm


def made(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_equal_models_have_one_path_in_all_runs_others_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    first = kept_model(made(tmp_path / "a", config="1", code__model="2"))
    assert kept_model(made(tmp_path / "b", config="1", code__model="2")) == first
    others = [
        {"config": "2", "code__model": "2"},
        {"config": "1", "code__mode": "2"},
        {"config": "12", "code__model": ""},
    ]
    paths = {kept_model(made(tmp_path / f"c{at}", **other)) for at, other in enumerate(others)}
    assert len({first, *paths}) == 4
    assert (first / "config").read_text() == "1" and (first / "code" / "model").read_text() == "2"
    assert len(list((tmp_path / "cache" / "vllm").iterdir())) == 4, "nothing unfinished stays"


def test_ranks_that_keep_a_model_at_once_get_one_whole_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    folders = [made(tmp_path / f"rank{rank}", **{f"f{n}": str(n) for n in range(50)}) for rank in range(8)]
    with ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(kept_model, folders))
    assert sorted(file.name for file in path.iterdir()) == sorted(f"f{n}" for n in range(50))
    assert [*path.parent.iterdir()] == [path]


def test_where_nothing_can_be_kept_the_ranks_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TRL_REALLOC_CACHE", os.fspath(tmp_path / "a file" / "cache"))
    folder = made(tmp_path / "model", config="1")
    assert kept_model(folder) == folder


@pytest.mark.parametrize(("share", "setting", "taken"), [(0.6, 0.2, 0.6), (0.6, None, 0.6), (None, 0.2, 0.2)])
def test_an_engine_takes_the_share_of_the_plan_before_that_of_the_settings(
    share: float | None, setting: float | None, taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, model: Any, **settings: Any) -> None:
            engines.append(settings)

        def close(self) -> None:
            pass

    monkeypatch.setattr(vllm, "VLLMEngine", Engine)
    plan = flatten(Cluster(1, 1))
    generate = replace(plan["actor.generate"], memory_share=share)
    plan = replace(plan, assignments={**plan.assignments, "actor.generate": generate})
    given = {} if setting is None else {"gpu_memory_utilization": setting}
    options = EngineOptions(torch.device("cpu"), 1.0, 1, 8, 1, 1, 0, torch.optim.Adam, vllm=given)
    with contextlib.ExitStack() as stack:
        start_vllm(plan, "actor.generate", 0, LlamaConfig(), options, stack)
    assert [settings["gpu_memory_utilization"] for settings in engines] == [taken]
