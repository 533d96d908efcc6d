"""What a layer keeps for its backward, as PyTorch saves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.activation_memory import layer_activations


TOKENS = 200  # no dimension of a weight
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "pad_token_id": 0}
SIZES |= {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96}


def spec_of(family: str, kind: str) -> ModelSpec:
    parameter, activation = {"float32": (4, 4), "autocast": (4, 2), "bfloat16": (2, 2)}[kind]
    config = AutoConfig.for_model(family, num_hidden_layers=2, **SIZES)
    return replace(ModelSpec.from_config(config, bytes_per_element=parameter), activation_bytes=activation)


def saved_bytes(family: str, kind: str, layers: int) -> int:
    """Bytes of the storages that a forward of `TOKENS` tokens saves, but those of parameters and of their casts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, num_hidden_layers=layers, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    shapes = [tuple(p.shape) for p in model.parameters()]
    weights = {*shapes, *((*shape[:-2], *shape[:-3:-1]) for shape in shapes)}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
    ):
        hidden = model.model(input_ids=torch.ones((1, TOKENS), dtype=torch.long), use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"])
def test_a_layers_activations_are_those_that_pytorch_saves(family: str, kind: str) -> None:
    of_layer = saved_bytes(family, kind, 2) - saved_bytes(family, kind, 1)
    assert layer_activations(spec_of(family, kind)).of(1) * TOKENS == pytest.approx(of_layer, rel=0.02)


def test_a_model_known_by_its_shapes_keeps_nothing_that_is_known() -> None:
    spec = ModelSpec.of_shapes([("weight", (8, 8))], bytes_per_element=2)
    assert layer_activations(spec).of(1) == 0
