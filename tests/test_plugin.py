"""What `accelerate launch` can say about placement through the environment."""

from __future__ import annotations

import pytest

from trl_realloc import ReallocationPlugin


def test_the_environment_gives_the_defaults_and_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReallocationPlugin() == ReallocationPlugin(plan="flatten", generation_engine=None)
    monkeypatch.setenv("TRL_REALLOC_PLAN", "interleave")
    monkeypatch.setenv("TRL_REALLOC_GENERATION_ENGINE", "transformers")
    assert ReallocationPlugin().plan == "interleave"
    assert ReallocationPlugin().generation_engine == "transformers"
    assert ReallocationPlugin(plan="plan.yaml", generation_engine="vllm").plan == "plan.yaml"


def test_an_engine_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_REALLOC_GENERATION_ENGINE", "sglang")
    with pytest.raises(ValueError, match="must be 'vllm' or 'transformers', not 'sglang'"):
        ReallocationPlugin()
