"""Replicas are one model: whatever each process was given or has drawn, all train what the first rank has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from test_plans import CALLS, plan, split, whole


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(600)]

CASES = {
    "replicas with adapters": {"plan": plan(2), "lora": True, "parts_on": 1},
    "replicas of quantized weights": {
        "plan": plan(2, changed={"actor.generate": {"mesh": "1", "engine": "transformers", "dp": 1}}),
        "lora": True,
        "quantized": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    },
    "zero 2": {"plan": plan(2, stage=2)},
    "zero 3": {"plan": plan(2, stage=3)},
    "tensor parallel": {"plan": plan(2, changed={n: split("0-1", tp=2) for n in CALLS}), "lora": True, "parts_on": 1},
    "in two stages": {"plan": plan(2, changed={name: split("0-1", pp=2) for name in CALLS})},
    "a head is missing, and the critic scores in a copy": {
        "plan": plan(2, changed={"critic.forward": split("0-1", tp=2)}),
        "critic_by_path": True,
    },
    "adapters that need the weights, by path, and the reference on the other rank": {
        "plan": plan(2, actor="0", reference="1", critic="0"),
        "lora": True,
        "dora": True,
        "policy_by_path": True,
    },
    "copies on the other rank": {
        "plan": plan(
            2,
            actor="0",
            reference="1",
            critic="0",
            changed={
                "critic.forward": whole("1"),
                "actor.generate": {"mesh": "0-1", "engine": "transformers", "dp": 2},
            },
        ),
        "critic_by_path": True,
        "lora": True,
    },
}


def test_each_rank_and_copy_begins_with_the_first_ranks_parameters(run: Callable[..., Path], tmp_path: Path) -> None:
    """Every rank is given another policy and another critic, or draws another head and other adapters."""
    tiny.policy(seed=3).save_pretrained(tmp_path / "policy")
    folder = run("replicas.py", 2, {"cases": CASES}, "started", limit_s=400)
    results = json.loads((folder / "results.json").read_text())
    assert results.keys() == CASES.keys()
    for name, roles in results.items():
        assert roles == dict.fromkeys(roles, 0.0), name
    assert results["copies on the other rank"].keys() == {"actor", "critic", "critic.forward", "actor.generate"}, (
        "the reference scores in the copy that generates"
    )
    assert "reference" in results["adapters that need the weights, by path, and the reference on the other rank"]
    changed = [name for name, case in CASES.items() if "parts_on" in case]  # one number on rank 1, after the start
    assert {path.name for path in folder.glob("*-[01].txt")} == {f"{n}-{rank}.txt" for n in changed for rank in (0, 1)}
    for path in folder.glob("*-[01].txt"):
        said = path.read_text()
        assert "replicas of the actor" in said and "lora_A" in said and "on rank 1 differs from that on rank 0" in said
