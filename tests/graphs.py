"""The dataflow graphs of several algorithms, for the tests of everything that must not know only PPO's."""

from __future__ import annotations

from trl_realloc.dataflow import Call, CallKind, DataflowGraph, Role, ppo_graph


SAMPLE = ("prompts", "responses")
GENERATE, FORWARD, TRAIN = CallKind

GRPO = DataflowGraph(
    (
        Call(Role.ACTOR, GENERATE, ("prompts",), ("responses", "logprobs")),
        Call(Role.REFERENCE, FORWARD, SAMPLE, ("ref_logprobs",)),
        Call(Role.REWARD, FORWARD, SAMPLE, ("scores",)),
        Call(Role.ACTOR, TRAIN, (*SAMPLE, "logprobs", "ref_logprobs", "scores")),
    )
)
REMAX = DataflowGraph(
    (
        Call(Role.ACTOR, GENERATE, ("prompts",), ("responses", "logprobs", "greedy_responses")),
        Call(Role.REWARD, FORWARD, (*SAMPLE, "greedy_responses"), ("scores", "baselines")),
        Call(Role.ACTOR, TRAIN, (*SAMPLE, "logprobs", "scores", "baselines")),
    )
)
DPO = DataflowGraph(
    (
        Call(Role.REFERENCE, FORWARD, ("chosen", "rejected"), ("ref_chosen", "ref_rejected")),
        Call(Role.ACTOR, TRAIN, ("chosen", "rejected", "ref_chosen", "ref_rejected")),
    ),
    sources=("chosen", "rejected"),
)
GRAPHS = {"ppo": ppo_graph(), "grpo": GRPO, "remax": REMAX, "dpo": DPO}
