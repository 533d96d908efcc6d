"""`trainer.model` on ranks with the whole, a part and nothing of a role; reward functions on ranks without samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from test_plans import plan, split


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def test_trainer_model_has_its_ranks_part_and_rewards_are_asked_once(run: Callable[..., Path], tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    tiny.classifier().save_pretrained(tmp_path / "critic")
    parts = plan(2, critic="1", changed={"reward.forward": split("0-1", tp=2)})
    folder = run("wrapped.py", 2, {"whole": "flatten", "parts": parts}, "job")
    found = {(n, r): json.loads((folder / f"{n}-{r}.json").read_text()) for n in ("whole", "parts") for r in (0, 1)}
    policy = [f"policy.{name}" for name, _ in tiny.policy().named_parameters()]
    critic = [f"value_model.{name}" for name, _ in tiny.classifier().named_parameters()]
    for (name, rank), told in found.items():
        assert told["names"] == policy + critic, "also where there is the structure alone"
        assert {key.split(".")[0] for key in told["state"]} == {"policy", "value_model", "critic_backbone"}
        without_critic = name == "parts" and rank == 0
        assert told["meta"] == {"policy": False, "value_model": without_critic}
        assert told["engines"] == [True, not without_critic]
        assert told["score"] == found["whole", 0]["score"], "one prompt on two ranks, whatever the plan"
    assert found["whole", 0]["meta before"] == {"policy": False, "value_model": False}
    assert found["parts", 1]["meta before"] == {"policy": True, "value_model": True}, "read when training starts"
    assert [sum(found[name, 0]["asked"]) + sum(found[name, 1]["asked"]) for name in ("whole", "parts")] == [8, 8]
    for name in ("whole", "parts"):
        assert sorted([found[name, 0]["asked of one"], found[name, 1]["asked of one"]]) == [[], [1]]
    assert found["parts", 1]["asked"] == [], "the replica's first rank asks"
