"""The dataflow graphs of known algorithms, with the columns that their calls read and write: PPO, GRPO."""

from __future__ import annotations

from .dataflow import Call, CallKind, DataflowGraph, Role


_SAMPLE = ("prompts", "responses")
_TRAINING = ("prompts", "responses", "logprobs", "ref_logprobs", "values", "scores")
PROXIMAL_LOGPROBS = "proximal_logprobs"
PROXIMAL_CALL = "actor.forward"
POLICY_LOGPROBS, ENTROPIES = "policy_logprobs", "entropies"
# Column that no graph declares, because only an engine with a mixture of experts adds it to its generation: the experts
# of the samples' tokens, which the other calls of the same role read (`engines.training.router_replay`).
ROUTES = "routes"


def ppo_graph(*, proximal: bool = False) -> DataflowGraph:
    """PPO's six calls.

    Args:
        proximal: add a seventh call, `actor.forward`, which computes the responses' log-probabilities under the policy
            before the iteration's training. The correction for old rollouts needs them (`algorithms.corrections`).
    """
    training = (*_TRAINING, PROXIMAL_LOGPROBS) if proximal else _TRAINING
    recomputed = (Call(Role.ACTOR, CallKind.FORWARD, _SAMPLE, (PROXIMAL_LOGPROBS,)),) if proximal else ()
    return DataflowGraph(
        (
            Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "logprobs")),
            Call(Role.REFERENCE, CallKind.FORWARD, _SAMPLE, ("ref_logprobs",)),
            Call(Role.REWARD, CallKind.FORWARD, _SAMPLE, ("scores",)),
            Call(Role.CRITIC, CallKind.FORWARD, _SAMPLE, ("values",)),
            *recomputed,
            Call(Role.ACTOR, CallKind.TRAIN, training),
            Call(Role.CRITIC, CallKind.TRAIN, training),
        )
    )


def grpo_graph(*, reference: bool = True, reward_models: bool = True) -> DataflowGraph:
    """GRPO (Shao et al. 2024) and RLOO (Ahmadian et al. 2024): several responses per prompt, each a sample, and no
    critic. `actor.forward` computes the log-probabilities and entropies for the host trainer's loss.

    Args:
        reference: add the reference's log-probabilities, for a KL penalty.
        reward_models: add the scores of reward models. Reward functions need no call.
    """
    frozen = [Call(Role.REFERENCE, CallKind.FORWARD, _SAMPLE, ("ref_logprobs",))] if reference else []
    frozen += [Call(Role.REWARD, CallKind.FORWARD, _SAMPLE, ("scores",))] if reward_models else []
    scored = (column for call in frozen for column in call.outputs)
    return DataflowGraph(
        (
            Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "logprobs")),
            *frozen,
            Call(Role.ACTOR, CallKind.FORWARD, _SAMPLE, (POLICY_LOGPROBS, ENTROPIES)),
            Call(Role.ACTOR, CallKind.TRAIN, (*_SAMPLE, "logprobs", POLICY_LOGPROBS, *scored)),
        )
    )


def columns_read_by(call: Call) -> tuple[str, ...]:
    """The columns that a call reads, with `ROUTES` if the samples have it."""
    return (*call.inputs, ROUTES) if call.role is Role.ACTOR and call.kind is not CallKind.GENERATE else call.inputs


def has_host_loop(graph: DataflowGraph) -> bool:
    """True if another library's loop asks for the calls, as TRL's does for GRPO and RLOO: one after the other, each on
    a whole batch. With streams or a staleness, calls run before the loop asks for them."""
    return any(ENTROPIES in call.outputs for call in graph.calls)
