"""The dataflow graphs of several algorithms, for the tests of everything that must not know only PPO's."""

from __future__ import annotations

from trl_realloc.plan import algorithm_graphs


SAMPLE = ("prompts", "responses")
GRAPHS = {name: make() for name, make in algorithm_graphs.GRAPHS.items()}
GRPO, REMAX, DPO = GRAPHS["grpo"], GRAPHS["remax"], GRAPHS["dpo"]
