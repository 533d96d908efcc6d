"""What `accelerate launch` can say about placement through the environment."""

from __future__ import annotations

import pytest

from trl_realloc import ReallocationPlugin


def test_the_environment_gives_the_defaults_and_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ReallocationPlugin() == ReallocationPlugin(plan="auto", generation_engine=None)
    monkeypatch.setenv("TRL_REALLOC_PLAN", "interleave")
    monkeypatch.setenv("TRL_REALLOC_GENERATION_ENGINE", "transformers")
    assert ReallocationPlugin().plan == "interleave"
    assert ReallocationPlugin().generation_engine == "transformers"
    assert ReallocationPlugin(plan="plan.yaml", generation_engine="vllm").plan == "plan.yaml"


def test_an_engine_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_REALLOC_GENERATION_ENGINE", "sglang")
    with pytest.raises(ValueError, match="must be 'vllm' or 'transformers', not 'sglang'"):
        ReallocationPlugin()


def test_reallocations_are_set_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ReallocationPlugin()
    assert (plain.bucket_mb, plain.transfer_timeout, plain.checksums) == (256, None, False)
    assert plain.heartbeat_timeout == 30.0
    environment = {"BUCKET_MB": "64", "TRANSFER_TIMEOUT": "7.5", "CHECKSUMS": "true", "HEARTBEAT_TIMEOUT": "60"}
    for name, value in environment.items():
        monkeypatch.setenv(f"TRL_REALLOC_{name}", value)
    told = ReallocationPlugin()
    assert (told.bucket_mb, told.transfer_timeout, told.checksums) == (64, 7.5, True)
    assert told.heartbeat_timeout == 60.0
    assert ReallocationPlugin(bucket_mb=8).bucket_mb == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [("BUCKET_MB", "big"), ("BUCKET_MB", "0"), ("TRANSFER_TIMEOUT", "-1"), ("REPLAN", "nan"), ("BUCKET_MB", "inf")]
    + [("HEARTBEAT_TIMEOUT", "1"), ("HEARTBEAT_TIMEOUT", "nan")],
)
def test_a_setting_that_is_no_number_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TRL_REALLOC_{name}", value)
    with pytest.raises(
        ValueError,
        match="must be a finite number, not '(big|nan|inf)'|is 1 or more and transfer_timeout above 0|is 5 s or more",
    ):
        ReallocationPlugin()
