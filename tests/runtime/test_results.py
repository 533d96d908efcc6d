"""What an iteration's spans say about its calls."""

from __future__ import annotations

from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.plan.spans import Span
from trl_realloc.runtime.calls.results import observed


def test_tokens_that_samples_share_are_added_over_the_replicas() -> None:
    spans = [Span("actor.train", rank, 0.0, 1.0, 0, shared_tokens=100 * rank) for rank in range(3)]
    assert observed(Rollouts(), spans) == {"time/actor.train": 1.0, "shared_tokens/actor.train": 300.0}


def test_the_forwards_of_a_streamed_call_are_added_on_each_device() -> None:
    spans = [
        Span("critic.forward", 0, 1.0, 1.5, 0),
        Span("critic.forward", 0, 3.0, 3.25, 0),
        Span("critic.forward", 1, 1.0, 1.5, 0),
        Span("critic.train -> critic.forward", 1, 0.0, 0.5, 0, bytes=7),
    ]
    assert observed(Rollouts(), spans) == {
        "time/critic.forward": 0.75,
        "realloc/bytes/critic.forward": 7.0,
        "realloc/seconds/critic.forward": 0.5,
    }
