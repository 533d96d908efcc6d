"""Contract 1 on a few random plans; `python tests/multiprocess/random_plans.py` runs hundreds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from typing import Any

import pytest
from drawn import case_of
from random_plans import check, too_far
from ranks import RankServers


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(600)]


# a critic under stage 2 on four ranks, of which two have a reference under stage 3 too: DeepSpeed added up gradients of
# different parameters
STAGES_2_AND_3 = 74
# adapters under stage 3 on two ranks, and a reference on others, in the copies that the adapters are merged in for vLLM
SHARED_BASE = 926
# a mixture under tp 2 with recomputed activations and micro-batches of 8 tokens: a rank without tokens for its experts
# summed gradients in another order than the others
FEW_TOKENS = 1_000_011


def test_random_plans_learn_what_one_process_learns(start: Callable[..., Any], servers: RankServers) -> None:
    drawn = islice((seed for seed in count() if case_of(seed)["devices"] == 4), 5)
    seeds = [*drawn, STAGES_2_AND_3, SHARED_BASE, FEW_TOKENS]
    flow = Counter[str]()
    found = check(seeds, 250, partial(start, servers=servers), flow)
    failures = {seed: failed for seed in seeds if (failed := too_far(found[seed]))}
    said = [f"seed {seed}: {json.dumps(case_of(seed))}\n  " + "\n  ".join(failures[seed]) for seed in failures]
    assert not failures, "\n".join(said)
    assert min(flow["forwards"], flow["moved"], flow["early"]) > 0, flow
