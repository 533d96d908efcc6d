"""Which version drew which token of a sample."""

from __future__ import annotations

import random

from trl_realloc.engines.generation.sample_versions import VersionMarks, versions_of


def test_each_token_has_the_version_that_was_there_when_it_was_drawn() -> None:
    chance = random.Random(3)
    for _ in range(300):
        version, drawn = 4, list[int]()
        marks = VersionMarks(version)
        for _ in range(chance.randrange(12)):
            if chance.random() < 0.5:
                version += chance.randrange(3)  # 0: the same version again
                marks.change(len(drawn), version)
            drawn += [version] * chance.randrange(3)
            assert versions_of(marks.runs(len(drawn))) == tuple(drawn)


def test_updates_without_a_token_between_them_leave_one_mark() -> None:
    marks = VersionMarks(0)
    for version in range(1, 1000):
        marks.change(5, version)
    assert marks.runs(7) == [(0, 5), (999, 2)]
