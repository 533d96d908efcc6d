"""What a rank does around the computation of a call."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mailboxes import Mailboxes

from trl_realloc import Cluster
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.algorithms.trainer_loss import TrainerLoss
from trl_realloc.engines.requests import Completion, Sampling
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.calls.call_runner import CallRunner
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step, completed
from trl_realloc.runtime.failures.alarm import Alarm
from trl_realloc.runtime.messages import Channels
from trl_realloc.runtime.samples.routes import Share


GRAPH = grpo_graph(reference=False, reward_models=False)


def test_a_response_has_ended_by_the_engines_word_or_where_it_has_the_eos_token() -> None:
    """Without a stop token every response has its limit of tokens, and may have the eos token within."""
    eos, drawn = 1, [((5, 1), True), ((5, 6), True), ((1, 6), False), ((5, 6), False)]
    ended = [Completion(at, ids, (0.0, 0.0), stopped, (0, 0)) for at, (ids, stopped) in enumerate(drawn)]
    assert completed(ended, eos).tensor("has_eos").tolist() == [True, True, True, False]
    assert completed(ended, None).tensor("has_eos").tolist() == [True, True, False, False]


@pytest.mark.parametrize("has_collectives", [False, True])
def test_a_rank_meets_the_others_on_the_host_before_a_call_with_collectives(has_collectives: bool) -> None:
    """Another rank may still be in a call that takes longer than a collective may, such as a judge's."""
    plan, events = flatten(Cluster(1, 2), generation_engine="transformers", graph=GRAPH), list[str]()
    placement: Any = SimpleNamespace(
        plan=plan,
        rank=1,
        refresh=lambda call: events.append("refresh"),
        has_collectives=lambda call: has_collectives,
        check_fresh=lambda call: None,
        resident=lambda call: contextlib.nullcontext(),
        shares_tokens=lambda call: False,
        take_shared_tokens=lambda call: 0,
        group=lambda call: SimpleNamespace(host_barrier=lambda: events.append("barrier")),
    )

    class Computing(CallRunner):
        def compute(self, *args: Any) -> Rollouts:
            events.append("compute")
            return Rollouts(index=torch.zeros(1))

    runner = Computing(placement, TrainerLoss(GRAPH), CallSettings(Sampling(4, 1.0), 0, None, None, [], {}), Alarm())
    batch = runner.batch(Step(0, 4, {}), Channels(Mailboxes().of(1), plan.order, 1, 2), Rollouts())
    assert runner.run(batch, GRAPH.call("actor.forward"), Share(Rollouts(index=torch.zeros(1))))
    assert events == ["refresh", *["barrier"] * has_collectives, "compute"]
