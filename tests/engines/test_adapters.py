"""Every kind of LoRA that PEFT makes: an engine's weights compute what the trainer's adapters compute, over plain and
over quantized weights, whether head and embedding are tied or not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config

from trl_realloc.engines.model_configs import ModelError
from trl_realloc.engines.models import adapted_policy, generated_config, load_policy
from trl_realloc.engines.quantized import compute_as_in_training, dequantized, is_quantized, without_quantization
from trl_realloc.engines.training.weight_export import buckets, source_digests
from trl_realloc.trainer.run.role_models import keep_adapter


SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1, "pad_token_id": 0}
LORA: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "all-linear": {},
    "rslora": {"use_rslora": True, "r": 4},
    "dora": {"use_dora": True},
    "a rank of its own": {"rank_pattern": {"v_proj": 2}},
    "a scale of its own": {"alpha_pattern": {"v_proj": 64}},
    "all biases": {"bias": "all"},
    "biases of adapted layers": {"bias": "lora_only"},
    "biases in the adapter": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "regular expression": {"target_modules": r".*layers\.1\.(mlp|self_attn)\.(q|up)_proj"},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
    "parameters": {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}
NOT_QUANTIZED = (
    "orthogonal",
    "parameters",
    "pissa",
    "olora",
    "loftq",
)  # refused: tests/trainer/test_unusable_models.py
BITS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, scales quantized": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
KINDS = [(name, "plain") for name in LORA]
KINDS += [(name, "nf4") for name in LORA if name not in NOT_QUANTIZED] + [("all-linear", bits) for bits in BITS][1:]
TOKENS = torch.arange(48).view(2, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, tie_word_embeddings=tied))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1 * name.endswith("bias"))
        model.save_pretrained(at / str(tied))
    return at


def loaded(folder: Path, tied: bool, bits: str) -> Any:
    quantization = None if bits == "plain" else BitsAndBytesConfig(**BITS[bits])
    return load_policy(str(folder / str(tied)), True, in_parts=False, quantization_config=quantization)


def adapted(model: Any, settings: dict[str, Any]) -> Any:
    """The model with an adapter that is not at its neutral start."""
    torch.manual_seed(1)
    made = get_peft_model(model, LoraConfig(**copy.deepcopy({"target_modules": "all-linear", **settings})))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    return torch.cat([model.eval()(TOKENS).logits, model.train()(TOKENS).logits]).log_softmax(-1)


def exported(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in buckets(model) for name, tensor in bucket}


def engines(policy: Any) -> Any:
    """The model that an engine has of a policy."""
    config = without_quantization(policy.get_base_model().config)
    model = AutoModelForCausalLM.from_config(generated_config(config, adapted_policy(policy, config, None)))
    missing, unexpected = model.load_state_dict(exported(policy), strict=False)
    assert not unexpected and not {name for name, _ in model.named_parameters()} & {*missing}
    return model


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_an_engine_computes_as_the_trainer_whatever_the_adapter(folder: Path, kind: str, bits: str, tied: bool) -> None:
    plain = loaded(folder, tied, bits)
    before = logprobs(plain)
    policy = adapted(plain, LORA[kind])
    assert difference(logprobs(policy), before) > 0.1, "the adapter does something"
    assert difference(logprobs(engines(policy)), logprobs(policy)) < 1e-5


def test_of_several_adapters_the_active_one_is_in_the_engine(folder: Path) -> None:
    for bits in ("plain", "nf4"):
        policy = adapted(loaded(folder, False, bits), LORA["lora"])
        policy.add_adapter("other", LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
        for adapter in ("default", "other"):
            policy.set_adapter(adapter)
            assert difference(logprobs(engines(policy)), logprobs(policy)) < 1e-5


def test_exporting_leaves_quantized_layers_as_they_were(folder: Path) -> None:
    policy = adapted(loaded(folder, False, "nf4"), LORA["biases in the adapter"])
    layers = {name: layer for name, layer in policy.named_modules() if is_quantized(layer)}
    weights = {name: (layer.weight, layer.weight.data.clone()) for name, layer in layers.items()}
    digests, expected = source_digests(policy), logprobs(policy)
    exported(policy)
    assert {name for name, layer in policy.named_modules() if is_quantized(layer)} == layers.keys()
    for name, (parameter, data) in weights.items():
        assert layers[name].weight is parameter and torch.equal(parameter.data, data)
    assert source_digests(policy) == digests and torch.equal(logprobs(policy), expected)


def test_a_weight_without_an_adapter_has_the_digests_of_its_quantized_form(folder: Path) -> None:
    policy = adapted(loaded(folder, False, "nf4, scales quantized"), {"target_modules": ["q_proj"]})
    before = source_digests(policy)
    assert "model.layers.0.self_attn.q_proj.weight" not in before and "model.norm.weight" in before
    state = policy.get_base_model().model.layers[0].mlp.up_proj.weight.quant_state
    state.absmax[3] += 1
    after = source_digests(policy)
    assert [name for name in after if after[name] != before[name]] == ["model.layers.0.mlp.up_proj.weight"]


def test_a_bucket_has_the_size_of_the_dequantized_weights(folder: Path) -> None:
    policy = adapted(loaded(folder, False, "nf4"), LORA["lora"])
    for bucket in buckets(policy, bucket_bytes=40_000):
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 40_000


@pytest.mark.parametrize("bits", BITS)
def test_quantized_layers_compute_in_evaluation_as_in_training(folder: Path, bits: str) -> None:
    model = loaded(folder, False, bits)
    evaluated, trained = logprobs(model).chunk(2)
    assert torch.equal(evaluated, trained)


class Other(nn.Linear):
    """In place of a layer that computes with other weights than it stores: its outputs are as after packing."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.flip(-1))


def test_a_layer_that_computes_with_other_weights_than_the_stored_ones_is_refused(folder: Path) -> None:
    model = loaded(folder, False, "nf4")
    layer = model.model.layers[0].self_attn.q_proj
    other = Other(64, 64, bias=False)
    other.weight.data = dequantized(layer, torch.float32)
    layer.forward = other.forward
    assert "does not compute with its dequantized weights (the outputs of model.layers.0" in str(
        compute_as_in_training(model)
    )


def test_weights_that_were_packed_for_a_cpu_are_refused(folder: Path) -> None:
    quantization = BitsAndBytesConfig(**BITS["nf4"])
    model = AutoModelForCausalLM.from_pretrained(folder / "False", quantization_config=quantization)
    layer = model.model.layers[0].self_attn.q_proj
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16, by which bitsandbytes packs weights")
    with torch.no_grad():
        model.eval()(TOKENS)
    with pytest.raises(ModelError, match=r"has packed the 4-bit weights of .*q_proj for this CPU"):
        load_policy(model, True)


@pytest.mark.parametrize("kind", ["pissa", "olora", "lora"])
def test_the_reference_of_a_new_adapter_is_the_model_before_it(folder: Path, kind: str) -> None:
    """PiSSA and OLoRA take a part out of the base, so that the base alone is another model."""
    model = loaded(folder, False, "plain")
    expected = logprobs(model)
    lora = LoraConfig(**{**LORA[kind], "target_modules": ["q_proj", "up_proj"]})
    policy: Any = get_peft_model(model, lora)
    name = keep_adapter(policy)
    assert difference(logprobs(policy), expected) < 1e-4, "a second adapter changes nothing"
    policy.set_adapter(name)
    assert difference(logprobs(policy), expected) < 1e-4


@pytest.mark.parametrize(("kind", "bits"), [("pissa", "plain"), ("dora", "nf4")])
def test_a_saved_adapter_is_the_policy_on_a_new_base(folder: Path, kind: str, bits: str, tmp_path: Path) -> None:
    policy = adapted(loaded(folder, False, bits), LORA[kind])
    policy.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(loaded(folder, False, bits), tmp_path)
    assert difference(logprobs(again), logprobs(policy)) < 1e-4
