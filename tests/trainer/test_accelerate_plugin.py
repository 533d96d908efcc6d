"""What `accelerate launch` can say about placement through the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from trl_realloc import GRPOConfig, GRPOTrainer, ReallocationPlugin


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
    assert (plain.bucket_mb, plain.transfer_timeout) == (256, None)
    assert plain.heartbeat_timeout == 30.0
    environment = {"BUCKET_MB": "64", "TRANSFER_TIMEOUT": "7.5", "HEARTBEAT_TIMEOUT": "60"}
    for name, value in environment.items():
        monkeypatch.setenv(f"TRL_REALLOC_{name}", value)
    told = ReallocationPlugin()
    assert (told.bucket_mb, told.transfer_timeout) == (64, 7.5)
    assert told.heartbeat_timeout == 60.0
    assert ReallocationPlugin(bucket_mb=8).bucket_mb == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BUCKET_MB", "big"),
        ("BUCKET_MB", "0"),
        ("TRANSFER_TIMEOUT", "-1"),
        ("REPLAN", "nan"),
        ("BUCKET_MB", "inf"),
        ("HEARTBEAT_TIMEOUT", "1"),
        ("HEARTBEAT_TIMEOUT", "nan"),
    ],
)
def test_a_setting_that_is_no_number_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TRL_REALLOC_{name}", value)
    told = "must be a finite number, not '(big|nan|inf)'|is 1 or more and transfer_timeout above 0|is 5 s or more"
    with pytest.raises(ValueError, match=told):
        ReallocationPlugin()


def test_a_trainer_takes_a_plugin_below_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_REALLOC_HEARTBEAT_TIMEOUT", "60")
    given = ReallocationPlugin(plan="separate", bucket_mb=3, measure="never")
    made = tiny.trainer(tmp_path / "ppo", given={"reallocation_plugin": given}, plan="flatten")
    assert (made.plugin.plan, made.plugin.bucket_mb, made.plugin.measure) == ("flatten", 3, "never")
    assert made.plugin.heartbeat_timeout == 60.0
    assert made.placement.options.bucket_bytes == 3 << 20
    args = GRPOConfig(str(tmp_path / "grpo"), **tiny.BARE, max_completion_length=4, num_generations=2, use_vllm=False)
    grpo = GRPOTrainer(
        tiny.policy(), tiny.short, args, tiny.prompts(8), processing_class=tiny.tokenizer(), reallocation_plugin=given
    )
    assert (grpo.plugin.bucket_mb, grpo.plugin.generation_engine) == (3, "transformers")
