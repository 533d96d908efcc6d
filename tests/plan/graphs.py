"""The dataflow graphs of several algorithms, for the tests of everything that must not know only PPO's."""

from __future__ import annotations

from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
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
GRPO = grpo_graph()
# ReMax (Li et al. 2023) for the planner: the greedy response's reward is the baseline. One call generates both
# responses, because one batch takes fewer decoding steps than two. The executor runs it as two calls with labels
# (docs/algorithms.md).
REMAX = DataflowGraph(
    (
        Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "logprobs", "greedy_responses"), passes=2),
        Call(Role.REFERENCE, CallKind.FORWARD, SAMPLE, ("ref_logprobs",)),
        Call(Role.REWARD, CallKind.FORWARD, (*SAMPLE, "greedy_responses"), ("scores", "baselines"), passes=2),
        Call(Role.ACTOR, CallKind.TRAIN, (*SAMPLE, "logprobs", "ref_logprobs", "scores", "baselines")),
    )
)
GRAPHS = {"ppo": ppo_graph(), "grpo": GRPO, "remax": REMAX, "dpo": DPO}
