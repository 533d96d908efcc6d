"""Which devices generate where Accelerate trains: the default, parts of a plan, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import separate
from trl_realloc.trainer.policy.generation_plan import GENERATE, generation_plan


FOUR = Cluster(1, 4)


def test_by_default_every_device_generates() -> None:
    generate = generation_plan(None, FOUR)[GENERATE]
    assert (str(generate.mesh), generate.strategy.dp, generate.strategy.tp) == ("0-3", 4, 1)


def test_vllm_tensor_parallel_size_divides_the_devices_among_fewer_engines() -> None:
    strategy = generation_plan(None, FOUR, tp=2)[GENERATE].strategy
    assert (strategy.dp, strategy.tp) == (2, 2)
    with pytest.raises(PlanError, match="tp 3 cannot use 4 devices evenly"):
        generation_plan(None, FOUR, tp=3)


@pytest.mark.parametrize("form", ["preset", "plan", "mapping", "file", "assignment"])
def test_a_plan_in_any_form_gives_its_generation(form: str, tmp_path: Path) -> None:
    plan = separate(FOUR)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    forms: dict[str, Any] = {
        "preset": "separate",
        "plan": plan,
        "mapping": plan.to_dict(),
        "file": tmp_path / "plan.yaml",
        "assignment": plan[GENERATE],
    }
    read = generation_plan(forms[form], FOUR)
    assert read[GENERATE] == plan[GENERATE]
    assert str(read.mesh("actor.train")) == "0-3"


def test_sleeping_engines_are_dropped_unless_the_plan_offloads_them() -> None:
    assert generation_plan(None, FOUR, sleeps=True)[GENERATE].drop
    offloaded = {"mesh": "0-3", "engine": "vllm", "dp": 4, "offload": True}
    assert not generation_plan(offloaded, FOUR, sleeps=True)[GENERATE].drop


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("auto", "plan auto is for runs in which every call is planned"),
        ("flaten", "did you mean 'flatten'"),
        ({"mesh": "0-3", "engine": "transformers", "dp": 4}, "joined to vLLM engines alone"),
        ({"mesh": "0-7", "engine": "vllm", "dp": 8}, "0-7"),
        ({"mesh": "0-3", "engine": "vllm", "dp": 3}, "dp: 4 would fit"),
        (separate(Cluster(1, 2)), "is for 2 devices"),
        ({**separate(FOUR).to_dict(), "streams": True}, "leave it out where Accelerate trains"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(plan: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        generation_plan(plan, FOUR)
