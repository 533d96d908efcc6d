"""Plans with a staleness and streams: samples of iterations ahead are scored as they end, in virtual time."""

from __future__ import annotations

import pytest
import torch
from ahead_job import PLANS, SAMPLES, SCORING, STREAMS, Job, check, stale
from test_streams import batch_of

from trl_realloc.algorithms.rollout import Ragged
from trl_realloc.plan.streams import Streams
from trl_realloc.runtime.calls import EVALUATION_STEP
from trl_realloc.runtime.drawn_samples import DrawnSamples
from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.runtime.results import POLICY_VERSIONS, Iteration


LENGTHS = [[7, 45, 9, 3, 50, 2, 8, 30, 5, 5, 41, 6]] * 5
OF_THE_CLOCK = ("staleness/", "time/", POLICY_VERSIONS, "generated_at", "in_flight_s")


def without_times(iteration: Iteration) -> dict[str, object]:
    """The columns and metrics of an iteration that no clock decides."""
    samples = {n: c.values if isinstance(c, Ragged) else c for n, c in iteration.samples.items()}
    made = {**samples, **iteration.metrics, **iteration.observed}
    return {name: value for name, value in made.items() if not name.startswith(OF_THE_CLOCK)}


@pytest.mark.parametrize("streams", [s for s in STREAMS.values() if s], ids=[n for n, s in STREAMS.items() if s])
@pytest.mark.parametrize("name", PLANS)
def test_samples_that_are_scored_as_they_end_get_the_same_numbers(name: str, streams: Streams) -> None:
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    whole, errors = Job(stale(PLANS[name], 2), LENGTHS, step_s=1e-3).train(batches)
    streamed, more = Job(stale(PLANS[name], 2, streams), LENGTHS, step_s=1e-3).train(batches)
    assert not errors and not more and len(whole) == len(streamed) == 5
    for one, other in zip(whole, streamed, strict=True):
        expected, made = without_times(one), without_times(other)
        assert {"ref_logprobs", "scores", "values"} <= expected.keys() == made.keys()
        for column, value in expected.items():
            close = torch.equal if isinstance(value, torch.Tensor) and not value.is_floating_point() else torch.allclose
            assert close(torch.as_tensor(value), torch.as_tensor(made[column])), column


@pytest.mark.parametrize(("streams", "begins_before"), [(Streams(), True), (None, False)])
def test_samples_are_scored_while_others_of_their_batch_are_generated(
    streams: Streams | None, begins_before: bool
) -> None:
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    made, errors = Job(stale(PLANS["halves"], 2, streams), LENGTHS, step_s=1e-2).train(batches)
    assert not errors
    for one in made:
        generated = max(span.end for span in one.spans if span.call == "actor.generate")
        forwards = [span for span in one.spans if span.call == "reference.forward"]
        assert (min(span.start for span in forwards) < generated) == begins_before
        assert sum(span.samples for span in forwards) == SAMPLES
        ends = [span.end for span in forwards]
        critic = min(span.start for span in one.spans if span.call == "critic.forward")
        assert max(ends) > generated and critic >= generated, "the critic waits for the iteration that trains"


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_an_evaluation_between_two_iterations_leaves_out_no_sample(streams: Streams | None) -> None:
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 1, streams), LENGTHS, step_s=1e-2, train_s=0.0)
    first, errors = job.train(batches, last=2)
    evaluated, more = job.together(lambda e: e.run(batch_of(5, 9), EVALUATION_STEP, {}, only=SCORING))
    assert not errors and not more and POLICY_VERSIONS not in evaluated[0].samples
    rest, errors = job.train(batches, first=2)
    assert not errors
    for step, one in enumerate([*first, *rest]):
        check(step, one.samples, LENGTHS[step])


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_run_scores_what_had_been_drawn(name: str) -> None:
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    job = Job(stale(PLANS["halves"], 2, Streams()), LENGTHS, step_s=1e-2, train_s=0.0)
    job.train(batches, last=2)
    drawn = DrawnSamples.from_tensors(job.together(lambda e: e.samples_under_way(2))[0][0].to_tensors())
    assert any(d.stopped is not None for of_batch in drawn.samples.values() for d in of_batch.values())
    resumed = Job(stale(PLANS[name], 2, Streams()), LENGTHS, step_s=1e-3, train_s=0.0)
    for executor in resumed.executors:
        executor.placement.trainings = 2
    resumed.together(lambda e: e.go_on_with(drawn if e.rank == 0 else None))
    rest, errors = resumed.train(batches, first=2)
    assert not errors
    for step, again in enumerate(rest, 2):
        check(step, again.samples, LENGTHS[step])
        versions = again.samples.ragged(POLICY_VERSIONS).rows()
        for index, of_sample in drawn.samples.get(step, {}).items():
            before = [drawn.update_of[version] for version in of_sample.versions]
            assert versions[index].tolist()[: len(before)] == before, "a token was drawn again"


@pytest.mark.parametrize("name", ["halves", "apart"])
def test_a_dead_engine_ends_the_job_on_every_rank(name: str) -> None:
    plan = stale(PLANS[name], 2, Streams())
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    lengths = [[3, 3, 40, 40] * (SAMPLES // 4)] * 4  # of each engine some end before it dies
    made, errors = Job(plan, lengths, dies=plan.mesh("actor.generate").leader).train(batches)
    assert not made and len(errors) == 4
    assert all(isinstance(error, JobFailed) and "SIGKILL" in str(error) for error in errors)


@pytest.mark.parametrize("name", PLANS)
def test_a_reward_that_fails_ends_the_iteration_that_would_train_on_it(name: str) -> None:
    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        if any(len(completion.split()) == 59 for completion in completions):
            raise ValueError("no such judge")
        return [0.0] * len(completions)

    lengths = [[3] * SAMPLES, [3] * SAMPLES, [59] + [3] * (SAMPLES - 1), [3] * SAMPLES]
    job = Job(stale(PLANS[name], 3, Streams()), lengths, reward=reward)
    made, errors = job.train([batch_of(SAMPLES, seed) for seed in range(4)])
    assert len(made) == 2, "what was scored before is trained"
    assert len(errors) == job.plan.cluster.size
    assert all(isinstance(error, JobFailed) and error.is_unharmed for error in errors)
    assert all("no such judge" in str(error) for error in errors)


def test_another_batch_than_expected_is_drawn_and_scored_anew() -> None:
    job = Job(stale(PLANS["halves"], 1, Streams()), [[20] * SAMPLES] * 3)
    job.train([batch_of(SAMPLES, seed) for seed in range(3)], last=1)
    second = [batch_of(SAMPLES, seed) for seed in range(5, 8)]
    made, errors = job.train(second)
    assert not errors
    for step, (batch, one) in enumerate(zip(second, made, strict=True)):
        assert one.samples.ragged("prompts").values.tolist() == batch.prompts.ragged("prompts").values.tolist()
        check(step, one.samples, [20] * SAMPLES)
