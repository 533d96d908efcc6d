"""The DeepSpeed config of an engine, from that of the launcher."""

from __future__ import annotations

from trl_realloc.engines.zero_setup import deepspeed_config


LAUNCHED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}


def test_what_scores_under_zero_3_has_no_optimizer_to_offload_and_keeps_no_parameter_whole() -> None:
    zero = deepspeed_config(3, LAUNCHED, 1.0, trains=False)["zero_optimization"]
    assert zero["stage"] == 3 and "offload_optimizer" not in zero
    assert zero["stage3_param_persistence_threshold"] == 0


def test_what_trains_keeps_the_launchers_offload_and_precision() -> None:
    config = deepspeed_config(2, LAUNCHED, 1.0, trains=True)
    assert config["zero_optimization"] == LAUNCHED["zero_optimization"]
    assert config["bf16"] == {"enabled": True}
