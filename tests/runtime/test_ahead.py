"""Plans with a staleness, by the executors of all ranks of a job, in threads, with engines whose times are known.

Everything here happens in virtual time, so that no test depends on how busy the machine is.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ahead_job import LIMIT, PLANS, SAMPLES, SCORING, Job, check, lengths_of, stale
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_streams import batch_of

from trl_realloc.algorithms.corrections import IN_FLIGHT_S, POLICY_VERSIONS
from trl_realloc.engines.requests import Sampling
from trl_realloc.runtime.calls.generate_and_score import EVALUATION_STEP
from trl_realloc.runtime.failures.alarm import JobFailed
from trl_realloc.runtime.samples.partial_rollouts import PartialRollouts


@pytest.mark.parametrize("name", PLANS)
@given(draw=st.randoms(use_true_random=False), versions=st.integers(1, 3), train_s=st.sampled_from([0.0, 0.004]))
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
def test_every_sample_is_trained_once_and_none_is_too_old(name: str, draw: Any, versions: int, train_s: float) -> None:
    lengths = lengths_of(draw, 5)
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    job = Job(stale(PLANS[name], versions), lengths, train_s=train_s)
    made, errors = job.train(batches)
    assert not errors
    assert len(made) == len(batches)
    for step, other in enumerate(made):
        check(step, other.samples, lengths[step])
        drawn_by = other.samples.ragged(POLICY_VERSIONS)
        assert drawn_by.lengths.tolist() == lengths[step]
        assert step - versions <= int(drawn_by.values.min()) and int(drawn_by.values.max()) <= step
        assert other.observed["staleness/oldest"] <= versions
        assert float(other.samples.tensor(IN_FLIGHT_S).min()) >= 0
    assert not job.executors[-1].ahead.batches.in_flight.keys() - {4}, "nothing is under way at the end"


def test_samples_of_later_batches_are_generated_while_one_trains() -> None:
    lengths = [[20] * SAMPLES] * 6
    batches = [batch_of(SAMPLES, seed) for seed in range(6)]
    made, errors = Job(stale(PLANS["halves"], 1), lengths, step_s=1e-3, train_s=0.1).train(batches)
    assert not errors
    ages = [one.observed["staleness/mean"] for one in made]
    assert ages[0] == 0 and all(0 < age <= 1 for age in ages[1:])
    for one, following in itertools.pairwise(made):
        trained = min(span.start for span in one.spans if span.call == "critic.train")
        generated = max(span.end for span in following.spans if span.call == "actor.generate")
        assert generated < trained + 0.2, "the next batch is there when this one has been trained"


def test_a_straggler_makes_the_trainer_wait_and_breaks_no_bound() -> None:
    lengths = [[3] * SAMPLES, [3] * (SAMPLES - 1) + [60], [3] * SAMPLES, [3] * SAMPLES]
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    made, errors = Job(stale(PLANS["halves"], 2), lengths, step_s=3e-3, train_s=0.0).train(batches)
    assert not errors
    assert [len(one.samples) for one in made] == [SAMPLES] * 4
    assert all(one.observed["staleness/oldest"] <= 2 for one in made)
    for step, one in enumerate(made):
        check(step, one.samples, lengths[step])


def test_a_second_training_of_a_process_may_begin_at_another_update() -> None:
    lengths = [[20] * SAMPLES] * 12
    batches = [batch_of(SAMPLES, seed) for seed in range(12)]
    job = Job(stale(PLANS["halves"], 1), lengths)
    _, errors = job.train(batches, 0, 3)
    assert not errors
    made, errors = job.train(batches, 8, 11)
    assert not errors
    for step, one in enumerate(made, 8):
        check(step, one.samples, lengths[step])


def test_an_evaluation_stops_the_engines_and_the_samples_go_on() -> None:
    lengths = [[40] * SAMPLES] * 4
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 1), lengths, step_s=1e-2, train_s=0.0)
    first, errors = job.train(batches, last=2)
    evaluated, more = job.together(lambda e: e.run(batch_of(5, 9), EVALUATION_STEP, {}, only=SCORING))
    assert not errors and not more
    assert POLICY_VERSIONS not in evaluated[0].samples
    stopped = {number for engine in job.engines.values() for number in engine.moved}
    assert stopped, "nothing was under way"
    rest, errors = job.train(batches, first=2)
    assert not errors
    for step, one in enumerate([*first, *rest]):
        check(step, one.samples, lengths[step])


@pytest.mark.parametrize("other", PLANS)
def test_a_resumed_run_draws_no_token_again(other: str) -> None:
    lengths = [[7, 45, 9, 3, 50, 2, 8, 30, 5, 5, 41, 6]] * 5
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    job = Job(stale(PLANS["halves"], 2), lengths, step_s=1e-2, train_s=0.0)
    job.train(batches, last=2)
    saved, _ = job.together(lambda e: e.samples_under_way(2))
    assert saved[1:] == [None] * 3
    drawn = PartialRollouts.from_tensors(saved[0].to_tensors())
    assert drawn == saved[0]
    unfinished = [d for of_batch in drawn.samples.values() for d in of_batch.values() if d.stopped is None]
    assert len(drawn) > len(unfinished) > 0

    resumed = Job(stale(PLANS[other], 2), lengths, step_s=1e-3, train_s=0.0)
    for executor in resumed.executors:
        executor.placement.trainings = 2
    resumed.together(lambda e: e.go_on_with(drawn if e.rank == 0 else None))
    rest, errors = resumed.train(batches, first=2)
    assert not errors
    for step, again in enumerate(rest, 2):
        check(step, again.samples, lengths[step])
        versions = again.samples.ragged(POLICY_VERSIONS).rows()
        for index, of_sample in drawn.samples.get(step, {}).items():
            before = [drawn.update_of[version] for version in of_sample.versions]
            assert versions[index].tolist()[: len(before)] == before, "a token was drawn again"


def test_samples_that_another_plan_would_train_too_late_are_drawn_anew() -> None:
    batch = batch_of(2, 0)
    made = Job(stale(PLANS["two"], 2), [[40, 40]] * 4, step_s=1e-3, train_s=0.0)
    batches = [batch_of(2, seed) for seed in range(4)]
    made.train(batches, last=1)
    drawn = made.together(lambda e: e.samples_under_way(1))[0][0]
    oldest = {n: {drawn.update_of[v] for d in of.values() for v in d.versions} for n, of in drawn.samples.items()}
    assert oldest[2] == {0}
    sampling = Sampling(LIMIT, 1.0)
    assert set(drawn.for_batch(2, batches[2], 2, sampling)) == {0, 1}
    assert not drawn.for_batch(2, batches[2], 1, sampling)
    assert not drawn.for_batch(2, batch, 2, sampling), "the prompts are others"
    assert not drawn.for_batch(2, batches[2], 2, Sampling(LIMIT // 2, 1.0)), "the limit is another"


def test_samples_that_end_between_two_iterations_are_kept() -> None:
    lengths = [[30, 40, 50, 58] * 3] * 4
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 2), lengths, step_s=1e-2, train_s=0.0)
    job.train(batches, last=1)
    at_once = job.together(lambda e: e.samples_under_way(1))[0][0]
    job.clock.sleep(0.3)  # the engines go on while a checkpoint is written
    later = job.together(lambda e: e.samples_under_way(1))[0][0]
    for number, drawn in at_once.samples.items():
        assert drawn.keys() <= later.samples[number].keys()
        for index, of_sample in drawn.items():
            assert later.samples[number][index].token_ids[: len(of_sample.token_ids)] == of_sample.token_ids
    ended = [d for of_batch in later.samples.values() for d in of_batch.values() if d.stopped is not None]
    assert len(ended) > sum(d.stopped is not None for of in at_once.samples.values() for d in of.values())


def test_an_engine_that_dies_between_two_iterations_fails_where_its_samples_are_needed() -> None:
    lengths = [[40] * SAMPLES] * 4
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 1), lengths, step_s=1e-2, train_s=0.0)
    job.train(batches, last=1)
    for engine in job.engines.values():
        engine.dies_at = 0
    _, errors = job.together(lambda e: e.cancel_early())
    assert not errors
    made, errors = job.train(batches, first=1)
    assert len(made) < 3 and len(errors) == 4  # of what had been generated something may be trained
    assert all(isinstance(error, JobFailed) and "SIGKILL" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["halves", "apart"])
def test_a_dead_engine_ends_the_job_on_every_rank(name: str) -> None:
    plan = stale(PLANS[name], 2)
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    made, errors = Job(plan, [[40] * SAMPLES] * 4, dies=plan.mesh("actor.generate").leader).train(batches)
    assert not made
    assert len(errors) == 4
    assert all(isinstance(error, JobFailed) and "SIGKILL" in str(error) for error in errors)


def test_a_reward_that_fails_ends_the_iteration_that_would_train_on_it() -> None:
    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        if any(len(completion.split()) == 59 for completion in completions):
            raise ValueError("no such judge")
        return [0.0] * len(completions)

    lengths = [[3] * SAMPLES, [3] * SAMPLES, [59] + [3] * (SAMPLES - 1), [3] * SAMPLES]
    job = Job(stale(PLANS["halves"], 3), lengths, reward=reward)
    made, errors = job.train([batch_of(SAMPLES, seed) for seed in range(4)])
    assert len(made) == 2, "what was scored before is trained"
    assert len(errors) == 4
    assert all(isinstance(error, JobFailed) and error.is_recoverable for error in errors)
    assert "no such judge" in str(errors[0])
    causes = [error.__cause__ for error in errors if error.__cause__ is not None]
    assert causes and all("no such judge" in str(cause) for cause in causes)


def test_another_batch_than_expected_is_drawn_anew() -> None:
    lengths = [[20] * SAMPLES] * 3
    job = Job(stale(PLANS["halves"], 1), lengths)
    first = [batch_of(SAMPLES, seed) for seed in range(3)]
    second = [batch_of(SAMPLES, seed) for seed in range(5, 8)]
    job.train(first, last=1)
    made, errors = job.train(second)
    assert not errors
    for batch, one in zip(second, made, strict=True):
        assert one.samples.ragged("prompts").values.tolist() == batch.prompts.ragged("prompts").values.tolist()
