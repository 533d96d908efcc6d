"""Saving and resuming over two hosts that each have a disk of their own."""

from __future__ import annotations

import pytest
from two_starts import CRITIC, TwoStarts

from trl_realloc.trainer.checkpoint.manifest import damage, read_manifest


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]


def test_hosts_with_a_disk_each_resume_from_the_newest_whole_checkpoint_among_them(two_starts: TwoStarts) -> None:
    first, second = two_starts.hosts
    assert (first.out / "stopped/checkpoint-1/training_state/__0_0.distcp").is_file()
    assert not (first.out / "stopped/checkpoint-1" / CRITIC).exists(), "it has no part in the critic"
    again = second.out / "stopped/checkpoint-3"
    assert CRITIC not in damage(again, read_manifest(again) or pytest.fail()), "written again"
    assert two_starts.trained("stopped") == two_starts.unstopped, "as if it had not been stopped"
    assert not (first.out / "stopped/checkpoint-2" / CRITIC).exists(), "not read there, and so not handed over"
    assert "resuming from" in two_starts.logs[1] and "checkpoint-2; passed over" in two_starts.logs[1]


def test_a_damaged_checkpoint_that_is_named_and_a_lost_disk_are_refused_on_every_host(two_starts: TwoStarts) -> None:
    named = two_starts.out / "damaged" / "checkpoint-3"
    for outcomes in two_starts.second:
        refused = {name: outcome["refused"] for name, outcome in outcomes.items() if outcome["refused"]}
        assert set(refused) == {"lost", "damaged"}
        assert "no checkpoint in" in refused["lost"] and f"{CRITIC} is missing" in refused["lost"]
        assert f"cannot resume from {named} ({CRITIC} has " in refused["damaged"]
