"""Makes the trainers of these tests start and end faster."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def frozen_modules() -> Iterator[None]:
    """Each training ends with a garbage collection, which takes over a second if it looks through all modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
