"""Samples that are told to the rank whose they are, between ranks in threads."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from mailboxes import Mailboxes

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.runtime.samples.finished_samples import FinishedSamples


def sample(index: int) -> Rollouts:
    return Rollouts(index=torch.tensor([index]), responses=Ragged.of([[index, 2 * index]], torch.long))


@pytest.mark.parametrize("sizes", [[5], [2, 3], [3, 0, 4, 1]])
def test_every_rank_learns_of_its_samples_once_wherever_they_end(sizes: list[int]) -> None:
    boxes, draw = Mailboxes(), random.Random(0)
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    found: list[list[tuple[int, list[int]]]] = [[] for _ in sizes]
    generations = [[draw.randrange(len(sizes)) for _ in range(sum(sizes))] for _ in range(5)]
    barrier = threading.Barrier(len(sizes))

    def work(rank: int) -> None:
        finished = FinishedSamples(boxes.of(rank), len(sizes), rank, 7)
        finished.add(sample(0))  # of a generation that nobody follows
        for generated_by in generations:
            barrier.wait(60)  # all ranks have ended the generation before
            finished.begin(sizes, lambda at, of: found[rank].append((at, of.ragged("responses").values.tolist())))
            for index, by in enumerate(generated_by):
                if by == rank:
                    finished.add(sample(index))
            barrier.wait(60)  # the outputs of the generation have come
            finished.end()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for start, size, of_rank in zip(starts, sizes, found, strict=True):
        expected = [(at, [start + at, 2 * (start + at)]) for at in range(size)]
        assert sorted(of_rank) == sorted(expected * len(generations))


def test_what_is_raised_for_a_sample_of_another_rank_is_raised_at_the_end() -> None:
    boxes, errors = Mailboxes(), list[str]()

    def refuse(at: int, of: Rollouts) -> None:
        raise ValueError(f"no sample {at}")

    def work(rank: int) -> None:
        finished = FinishedSamples(boxes.of(rank), 2, rank, 7)
        finished.begin([0, 1], refuse)
        if rank == 0:
            finished.add(sample(0))
        try:
            finished.end()
        except ValueError as error:
            errors.append(f"{rank}: {error}")

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == ["1: no sample 0"]
