"""The folder that a vLLM engine reads its model's config from."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trl_realloc.runtime.vllm_start import kept_model


def made(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_equal_models_have_one_path_in_every_run_and_others_have_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_ranks_that_keep_a_model_at_the_same_time_get_the_same_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    folders = [made(tmp_path / f"rank{rank}", **{f"f{n}": str(n) for n in range(50)}) for rank in range(8)]
    with ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(kept_model, folders))
    assert sorted(file.name for file in path.iterdir()) == sorted(f"f{n}" for n in range(50))
    assert [*path.parent.iterdir()] == [path]


def test_where_nothing_can_be_kept_the_engine_reads_the_ranks_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TRL_REALLOC_CACHE", os.fspath(tmp_path / "a file" / "cache"))
    folder = made(tmp_path / "model", config="1")
    assert kept_model(folder) == folder
