"""The data sets that TRL's tests name: prompts from the Zen of Python, 17 rows to train on and 2 to test on."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
from typing import Any


ROWS = "TRL_TESTS_ROWS"  # how many rows to train on, where a run must be shorter
TRAIN_ROWS, TEST_ROWS = 17, 2
# How many words of each line a prompt has. TRL's tests compare the first twelve prompts with texts of their own.
WORDS = (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 5, 9, 2, 4, 7, 5, 3)


def _prompts() -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        import this

    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    return [" ".join(line.split()[:words]) for line, words in zip(lines, WORDS, strict=True)]


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What comes after: {text}?"}]


def _image(at: int, width: int, height: int) -> Any:
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(at).integers(0, 256, (height, width, 3), dtype=numpy.uint8))


def _columns(path: str, name: str) -> dict[str, list[Any]]:
    data_set = path.rsplit("/", 1)[-1]
    texts = _prompts()
    if data_set == "zen" and name == "standard_prompt_only":
        return {"prompt": texts}
    if name == "conversational_prompt_only":
        columns: dict[str, list[Any]] = {"prompt": [_asked(text) for text in texts]}
        if data_set == "zen-image":
            columns["image"] = [_image(at, 32 + at, 60 - at) for at in range(len(texts))]
        if data_set == "zen-multi-image":
            columns["images"] = [[_image(at, 32 + at, 40)] * (at % 3) for at in range(len(texts))]
        return columns
    if data_set == "zen" and name == "conversational_language_modeling":
        return {"messages": [[*_asked(text), {"role": "assistant", "content": "I cannot say."}] for text in texts]}
    raise ValueError(f"TRL's tests ask for data set {path!r}, {name!r}, which trl_data.py does not have")


def load_dataset(
    path: str, name: str = "standard_prompt_only", *, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    """Stands for `datasets.load_dataset` of the data sets that the tests name."""
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    whole = Dataset.from_dict(_columns(path, name))
    train = range(int(os.environ.get(ROWS, TRAIN_ROWS)))
    parts: Any = DatasetDict(train=whole.select(train), test=whole.select(range(TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS)))
    if streaming:
        parts = IterableDatasetDict({key: part.to_iterable_dataset() for key, part in parts.items()})
    return parts if split is None else parts[split]
