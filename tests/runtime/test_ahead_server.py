"""Generation ahead for the loop of another library, on all ranks of a job in threads, with engines whose times are
known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ahead_job import SAMPLES, Job, lengths_of, stale
from fake_engines import logprob, token
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_streams import batch_of

from trl_realloc.algorithms.corrections import POLICY_VERSIONS
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import separate
from trl_realloc.runtime.calls.results import ages
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.overlap.ahead_server import AheadServer
from trl_realloc.runtime.overlap.in_flight import request_number
from trl_realloc.runtime.samples.partial_rollouts import PartialRollouts


GRAPH = grpo_graph(reference=False, reward_models=False)
PLAN = separate(Cluster(1, 4), graph=GRAPH)
BATCHES = [batch_of(SAMPLES, seed).prompts for seed in range(6)]


class Loop:
    """The loops of all ranks: a generation, and then a training for some time.

    Args:
        plan: with a staleness.
        lengths: of the responses, by generation.
    """

    def __init__(self, plan: ExecutionPlan, lengths: Sequence[Sequence[int]], **times: float) -> None:
        self.job = Job(plan, lengths, **times)
        self.plan, self.lengths = plan, lengths
        self.ahead = {e.rank: self._host(e) for e in self.job.executors}

    @staticmethod
    def _host(executor: Executor) -> AheadServer:
        assert executor.ahead is None, "whose iterations are not the executor's"
        return AheadServer(executor.placement, executor.alarm, executor.runner, executor.channels)

    def _generate(self, executor: Executor, number: int, prompts: Sequence[Rollouts]) -> Rollouts:
        output = self.ahead[executor.rank].generate(number, prompts)
        assert (executor.rank == 0) or output.samples.ragged("responses")
        return output.samples

    def run(self, first: int, last: int, prompts: Sequence[Rollouts] = BATCHES) -> list[list[Rollouts]]:
        """The samples of each generation on each rank."""

        def work(executor: Executor) -> list[Rollouts]:
            made = []
            for number in range(first, last):
                upcoming = prompts[number : number + 1 + self.plan.staleness.versions]
                made.append(self._generate(executor, number, upcoming))
                if executor.rank in self.plan.mesh("actor.train"):
                    self.job.clock.sleep(self.job.train_s)
                    executor.placement.trainings += 1
            return made

        results, errors = self.job.together(work)
        if errors:
            raise ExceptionGroup("the ranks", errors)
        return results

    def each(self, work: Callable[[AheadServer], Any]) -> list[Any]:
        results, errors = self.job.together(lambda executor: work(self.ahead[executor.rank]))
        assert not errors
        return results


def check(number: int, samples: Rollouts, lengths: Sequence[int], versions: int) -> None:
    """Every sample of a generation is there with its own tokens, none of which is too old."""
    responses = samples.ragged("responses")
    assert samples.tensor("index").tolist() == list(range(SAMPLES))
    assert responses.lengths.tolist() == list(lengths)
    places = [(request_number(number, index), at) for index, length in enumerate(lengths) for at in range(length)]
    assert responses.values.tolist() == [token(*place) for place in places]
    assert samples.ragged("logprobs").values.tolist() == pytest.approx([logprob(*place) for place in places])
    drawn_by = samples.ragged(POLICY_VERSIONS).values
    assert number - versions <= int(drawn_by.min()) and int(drawn_by.max()) <= number
    assert ages(samples, number)["staleness/oldest"] <= versions


@given(draw=st.randoms(use_true_random=False), versions=st.integers(1, 3), train_s=st.sampled_from([0.0, 0.004]))
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
def test_every_rank_gets_each_generations_samples_and_none_too_old(draw: Any, versions: int, train_s: float) -> None:
    lengths = lengths_of(draw, 6)
    for rank_values in Loop(stale(PLAN, versions), lengths, train_s=train_s).run(0, 6):
        for number, samples in enumerate(rank_values):
            check(number, samples, lengths[number], versions)


def test_the_next_generation_goes_on_while_one_is_trained() -> None:
    loop = Loop(stale(PLAN, 1), [[20] * SAMPLES] * 6, step_s=1e-3, train_s=0.1)
    means = [ages(samples, number)["staleness/mean"] for number, samples in enumerate(loop.run(0, 6)[0])]
    assert means[0] == 0 and all(0 < mean <= 1 for mean in means[1:])


def test_other_prompts_than_were_announced_are_generated_anew() -> None:
    loop = Loop(stale(PLAN, 2), [[30] * SAMPLES] * 6, step_s=1e-3)
    loop.run(0, 2)
    others = [*BATCHES[:2], BATCHES[4], BATCHES[3]]
    for number, samples in enumerate(loop.run(2, 4, others)[0], 2):
        check(number, samples, [30] * SAMPLES, 2)
        assert ages(samples, number)["staleness/oldest"] == 0 or number > 2, "drawn from the announced prompts"


def test_samples_go_on_after_the_engines_were_used_for_something_else() -> None:
    loop = Loop(stale(PLAN, 1), [[40] * SAMPLES] * 6, step_s=1e-2, train_s=0.0)
    made = loop.run(0, 2)[0]
    loop.each(lambda server: server.batches.stop())
    assert {number for engine in loop.job.engines.values() for number in engine.moved}, "nothing was under way"
    for number, samples in enumerate([*made, *loop.run(2, 4)[0]]):
        check(number, samples, [40] * SAMPLES, 1)


def test_a_resumed_run_draws_no_token_again() -> None:
    lengths = [[7, 45, 9, 3, 50, 2, 8, 30, 5, 5, 41, 6]] * 6
    loop = Loop(stale(PLAN, 2), lengths, step_s=1e-2, train_s=0.0)
    loop.run(0, 2)
    saved = loop.each(lambda host: host.batches.drawn(2))
    assert saved[1:] == [None] * 3
    drawn = PartialRollouts.from_tensors(replace(saved[0], next=2).to_tensors())
    assert drawn.next == 2
    assert len(drawn) > sum(d.stopped is None for of in drawn.samples.values() for d in of.values()) > 0

    resumed = Loop(stale(PLAN, 2), lengths, step_s=1e-3, train_s=0.0)
    for executor in resumed.job.executors:
        executor.placement.trainings = 2
    resumed.each(lambda host: host.batches.restore(drawn))
    for number, samples in enumerate(resumed.run(2, 5)[0], 2):
        check(number, samples, lengths[number], 2)
        versions = samples.ragged(POLICY_VERSIONS).rows()
        for index, of_sample in drawn.samples.get(number, {}).items():
            before = [drawn.update_of[version] for version in of_sample.versions]
            assert versions[index].tolist()[: len(before)] == before, "a token was drawn again"


def test_an_engine_that_dies_between_two_generations_is_found_at_the_next_call() -> None:
    loop = Loop(stale(PLAN, 1), [[50] * SAMPLES] * 6, step_s=1e-3, dies=2)
    with pytest.raises(ExceptionGroup):
        loop.run(0, 1)
    _, errors = loop.job.together(lambda executor: loop.ahead[executor.rank].check())
    assert [str(error) for error in errors] == ["the engine's process was ended by SIGKILL"]


def test_a_dead_engine_ends_the_generation_on_every_rank() -> None:
    loop = Loop(stale(PLAN, 1), [[50] * SAMPLES] * 6, step_s=1e-3, dies=2)
    with pytest.raises(ExceptionGroup) as caught:
        loop.run(0, 2)
    assert len(caught.value.exceptions) == PLAN.cluster.size
    assert all("SIGKILL" in str(error) for error in caught.value.exceptions)
