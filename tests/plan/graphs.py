"""The dataflow graphs of several algorithms, for the tests of everything that must not know only PPO's."""

from __future__ import annotations

from trl_realloc.plan import algorithm_graphs
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role


SAMPLE = ("prompts", "responses")
_PAIR, _SCORES = ("prompts", "chosen", "rejected"), ("ref_chosen_logprobs", "ref_rejected_logprobs")
# DPO (Rafailov et al. 2023), a graph that generates nothing: two given responses of each prompt, scored by the
# reference and trained on. Nothing here runs it.
DPO = DataflowGraph(
    (
        Call(Role.REFERENCE, CallKind.FORWARD, _PAIR, _SCORES, passes=2),
        Call(Role.ACTOR, CallKind.TRAIN, (*_PAIR, *_SCORES), passes=2),
    ),
    sources=_PAIR,
)
GRAPHS = {name: make() for name, make in algorithm_graphs.GRAPHS.items()} | {"dpo": DPO}
GRPO, REMAX = GRAPHS["grpo"], GRAPHS["remax"]
