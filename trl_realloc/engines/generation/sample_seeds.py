"""The random numbers of a sample's draws in a vLLM engine, and the arguments that carry their seed. `vllm_sampler` uses
them. This file does not import vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


SEED, OFFSET = "trl_realloc_seed", "trl_realloc_offset"  # keys in vLLM's SamplingParams.extra_args


def seed_arguments(seed: int, offset: int, by_seed: bool, by_position: bool) -> dict[str, Any]:
    """The arguments of vLLM's `SamplingParams` that give a request its seed.

    Args:
        offset: number of the response's tokens that were sampled before, perhaps by another engine.
        by_seed: result of `vllm_host.draws_by_seed`.
        by_position: result of `vllm_compat.draws_by_position`. If false, a continued response gets another seed,
            because the same seed would repeat the random numbers of the response's first tokens.
    """
    if by_seed:
        return {"extra_args": {SEED: seed, OFFSET: offset}}
    if by_position or not offset:
        return {"seed": seed}
    return {"seed": int(np.random.SeedSequence((seed, offset)).generate_state(1, np.uint64)[0] >> 1)}


def uniforms(arguments: Mapping[str, Any], count: int) -> np.ndarray[Any, Any]:
    """Numbers in [0, 1) for the next `count` tokens of a response: (count,) float64. The numbers of earlier tokens are
    skipped.

    Args:
        arguments: the `extra_args` of `seed_arguments`.
    """
    offset = arguments[OFFSET]
    return np.random.default_rng(arguments[SEED]).random(offset + count)[offset:]
