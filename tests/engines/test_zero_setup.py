"""The DeepSpeed config of an engine, from that of the launcher."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trl_realloc.engines.training.zero_setup import cast_parameters, deepspeed_config


LAUNCHED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}


def test_what_scores_under_zero_3_has_no_optimizer_to_offload_and_keeps_no_parameter_whole() -> None:
    zero = deepspeed_config(3, LAUNCHED, 1.0, trains=False)["zero_optimization"]
    assert zero["stage"] == 3 and "offload_optimizer" not in zero
    assert zero["stage3_param_persistence_threshold"] == 0


def test_what_trains_keeps_the_launchers_offload_and_precision() -> None:
    config = deepspeed_config(2, LAUNCHED, 1.0, trains=True)
    assert config["zero_optimization"] == LAUNCHED["zero_optimization"]
    assert config["bf16"] == {"enabled": True}


def test_a_copy_is_cast_as_deepspeed_casts_what_it_trains_not_the_frequencies_of_its_rotary_embedding(
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=2048, **sizes))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # keeps them in float32
    cast_parameters(model, torch.bfloat16)
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    ids = torch.arange(1200)[None] % 100
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)
