"""The dataflow graphs of several algorithms, for the tests of everything that must not know only PPO's."""

from __future__ import annotations

from trl_realloc.plan import dataflow


SAMPLE = ("prompts", "responses")
GRAPHS = {name: make() for name, make in dataflow.GRAPHS.items()}
GRPO, REMAX, DPO = GRAPHS["grpo"], GRAPHS["remax"], GRAPHS["dpo"]
