"""Finished and partial samples in a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from trl_realloc.runtime.samples.partial_rollouts import Drawn, PartialRollouts


@pytest.mark.parametrize("recorded", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_samples_have_their_routes_after_a_checkpoint_and_others_none(recorded: tuple[int, ...], dtype: type) -> None:
    """Of finished and of partial samples, and beside samples without routes."""
    routes = {index: np.arange(4 * (index + 2), dtype=dtype).reshape(-1, 4) for index in recorded}
    drawn = {
        index: Drawn((7,) * (index + 1), (-1.0,) * (index + 1), (0,) * (index + 1), ended, routes=routes.get(index))
        for index, ended in enumerate((None, True, None))
    }
    content = PartialRollouts({3: drawn}).to_tensors()
    restored = PartialRollouts.from_tensors(content).samples[3]
    assert restored == drawn
    for index, sample in restored.items():
        if index in routes:
            assert sample.routes is not None and sample.routes.dtype == dtype
            assert np.array_equal(sample.routes, routes[index])
        else:
            assert sample.routes is None
