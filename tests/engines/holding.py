"""Engines that decode no further than a test allows: what it does in the middle of a generation does not depend on when
it gets a core. Their weights can be spoiled."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock
from weakref import WeakKeyDictionary

from trl_realloc.engines.generation.vllm import VLLMEngine


_FOLDER = str(Path(__file__).with_name("in_the_engine"))
_numbers = itertools.count()
_files: WeakKeyDictionary[VLLMEngine, Path] = WeakKeyDictionary()


def holdable(start: Callable[[], VLLMEngine | None], folder: Path) -> VLLMEngine:
    """An engine whose decoding can be held."""
    file = folder / f"hold{next(_numbers)}"
    path = os.pathsep.join(filter(None, (_FOLDER, os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=path, HOLD_THE_DECODING=str(file)):
        engine = start()
    assert engine is not None
    _files[engine] = file
    return engine


@contextlib.contextmanager
def held(engine: VLLMEngine, tokens: int) -> Iterator[Callable[[int], None]]:
    """Until the end of the context a request draws at most so many tokens. The function sets another number."""

    def hold(tokens: int) -> None:
        new = _files[engine].with_suffix(".new")  # so that the engine never reads a part of it
        new.write_text(str(tokens))
        new.rename(_files[engine])

    hold(tokens)
    try:
        yield hold
    finally:
        _files[engine].unlink()


@contextlib.contextmanager
def spoiled(engine: VLLMEngine, parameter: str) -> Iterator[None]:
    """Until the end of the context one bit of a parameter, by its name in vLLM, is another one after each load."""
    file = _files[engine].with_suffix(".spoil")
    file.write_text(parameter)
    try:
        yield
    finally:
        file.unlink()
