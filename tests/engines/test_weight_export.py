"""A model's parameters leave it under the names and with the values that its checkpoint would have."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import (
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    TinyLoraConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    ApertusConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from trl_realloc.engines.models import adapted_policy, frozen_copy, generated_config
from trl_realloc.engines.training.adapter_weights import why_not_merged
from trl_realloc.engines.training.weight_export import buckets


SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "tied llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "tied gemma3": Gemma3TextConfig(**SMALL, head_dim=8),
    "apertus, whose activations have buffers": ApertusConfig(**SMALL),
    "gemma4, whose layers have scales": Gemma4TextConfig(
        **SMALL, head_dim=8, global_head_dim=8, num_global_key_value_heads=1
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1, "head_dim": 8}
WITH_EXPERTS = {"qwen3 moe": Qwen3MoeConfig(**SMALL, **MOE)}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, tuple[str, PeftConfig]] = {
    "lora": ("llama", LoraConfig(target_modules="all-linear")),
    "scaled lora": ("llama", LoraConfig(target_modules=["q_proj", "down_proj"], lora_alpha=64, use_rslora=True)),
    "lora on layers with biases": ("qwen2", LoraConfig(target_modules=["q_proj", "v_proj"])),
    "lora with biases": ("qwen2", LoraConfig(target_modules=["q_proj", "v_proj"], lora_bias=True)),
    "lora on transposed weights": ("gpt2", LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "lora on embeddings": ("llama", LoraConfig(target_modules=["embed_tokens", "q_proj"])),
    "dora": ("llama", LoraConfig(target_modules="all-linear", use_dora=True)),
    "ia3": ("qwen2", IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "lora on a parameter of experts": ("qwen3 moe", LoraConfig(target_modules=[], target_parameters=EXPERTS[:1])),
    "lora on two parameters of experts": ("qwen3 moe", LoraConfig(target_modules=[], target_parameters=EXPERTS)),
    "lora beside whole modules": ("llama", LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "lora in whole modules": ("llama", LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=["mlp"])),
    "lora with trained biases": ("qwen2", LoraConfig(target_modules=["q_proj"], bias="all")),
    "lora of several ranks": ("llama", LoraConfig(target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2})),
    "lora and tokens": ("llama", LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 5])),
    "tokens": ("tied llama", TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"])),
    "vera": ("llama", VeraConfig(r=4, target_modules=["q_proj", "v_proj"])),
    "vb-lora": ("llama", VBLoRAConfig(vector_length=8, num_vectors=9, target_modules=["q_proj", "v_proj"])),
    "tinylora": ("llama", TinyLoraConfig(r=2, target_modules=["q_proj", "v_proj"])),
    "loha": ("llama", LoHaConfig(target_modules=["q_proj"])),
    "oft": ("llama", OFTConfig(oft_block_size=4, target_modules=["q_proj"])),
}
GENERATED: dict[str, tuple[str, PeftConfig]] = {
    **{name: (base, config) for name, (base, config) in ADAPTERS.items() if base not in WITH_EXPERTS},
    "layers that share weights": ("llama", LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)])),
    "a whole layer with a buffer": (
        "gemma4, whose layers have scales",
        LoraConfig(target_modules=["q_proj"], modules_to_save=["layers.0"]),
    ),
}
# on a policy whose head and embedding are tied: the adapters, and whether the two differ with them
ON_TIED_ENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "neither": ({}, False),
    "whole head": ({"modules_to_save": ["lm_head"]}, True),
    "whole embedding": ({"modules_to_save": ["embed_tokens"]}, True),
    "whole head and embedding": ({"modules_to_save": ["lm_head", "embed_tokens"]}, True),
    "one for both": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False),
    "lora on the head": ({"target_modules": ["q_proj", "lm_head"]}, True),
    "lora on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, True),
    "lora on both": ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, True),
    "dora on the head": ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, True),
    "tokens": ({"trainable_token_indices": [3, 5]}, False),
    "tokens of the head": ({"trainable_token_indices": {"lm_head": [3, 5]}}, True),
    "other tokens of each": ({"trainable_token_indices": {"lm_head": [3], "embed_tokens": [5]}}, True),
}


def causal(name: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy({**CONFIGS, **WITH_EXPERTS}[name])  # PEFT may change it
    return AutoModelForCausalLM.from_config(config)


def shaken(model: Any) -> Any:
    """Every parameter moved, so that no adapter is at its neutral start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def exported(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    named = [(name, tensor.clone()) for bucket in buckets(model, **options) for name, tensor in bucket]
    assert len(dict(named)) == len(named), "a name came twice"
    return dict(named)


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: Any) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, msg=f"{name}: {{}}".format, **tolerance)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without the second names of tied tensors."""
    names = {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_tensors_are_those_of_the_saved_checkpoint(name: str, tmp_path: Path) -> None:
    model = causal(name)
    model.save_pretrained(tmp_path)
    assert_same(exported(model), load_file(tmp_path / "model.safetensors"), rtol=0, atol=0)


def test_a_tied_tensor_comes_once_under_its_first_name() -> None:
    names = exported(causal("tied llama")).keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_merged_as_peft_merges_them(name: str) -> None:
    base, config = ADAPTERS[name]
    model = shaken(get_peft_model(causal(base), config))
    merged = copy.deepcopy(model).merge_and_unload()
    # experts are one tensor in the module, and several in a checkpoint
    expected = exported(merged) if base in WITH_EXPERTS else own_tensors(merged)
    assert_same(exported(model), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ADAPTERS)
def test_exporting_leaves_the_model_as_it_was(name: str) -> None:
    base, config = ADAPTERS[name]
    model = shaken(get_peft_model(causal(base), config))
    parameters = {n: (p, p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    exported(model)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    for n, parameter in model.named_parameters():
        before, address, value = parameters[n]
        assert parameter is before and parameter.data_ptr() == address and torch.equal(parameter, value)
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_only_the_active_adapter_is_merged() -> None:
    model = get_peft_model(causal("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
    shaken(model)
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        merged = copy.deepcopy(model)
        merged.delete_adapter("other" if adapter == "default" else "default")
        assert_same(exported(model), own_tensors(merged.merge_and_unload()), rtol=1e-6, atol=1e-6)


def test_a_module_that_the_active_adapter_does_not_train_comes_as_it_was() -> None:
    model = get_peft_model(causal("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    shaken(model).set_adapter("other")
    assert_generates_as(model, exported(model), model.config)


def assert_generates_as(policy: Any, tensors: dict[str, Tensor], config: Any) -> None:
    """A plain model of the config, with these parameters, has the policy's logits."""
    plain = AutoModelForCausalLM.from_config(config)
    missing, unexpected = plain.load_state_dict(tensors, strict=False)
    assert not unexpected and not {name for name, _ in plain.named_parameters()} & {*missing}
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(tokens).logits, policy.eval()(tokens).logits)


@pytest.mark.parametrize("name", GENERATED)
def test_an_engine_generates_as_the_policy_with_its_adapters(name: str) -> None:
    base, config = GENERATED[name]
    policy = shaken(get_peft_model(causal(base), copy.deepcopy(config)))
    assert_generates_as(policy, exported(policy), policy.get_base_model().config)


@pytest.mark.parametrize("base", ["tied llama", "tied gemma3", "gpt2"])
@pytest.mark.parametrize("kind", ON_TIED_ENDS)
def test_an_engine_generates_as_the_policy_whichever_of_its_tied_ends_an_adapter_changes(base: str, kind: str) -> None:
    if (base, kind) == ("gpt2", "one for both"):
        pytest.skip("PEFT ties modules of other names alone")
    settings, differ = ON_TIED_ENDS[kind]
    config, lora = causal(base).config, LoraConfig(**{"target_modules": ["q_proj"], **settings})
    if base == "gpt2":
        rename = {"q_proj": "c_attn", "embed_tokens": "wte"}
        lora = LoraConfig(**renamed({"target_modules": ["q_proj"], **settings}, rename), fan_in_fan_out=True)
    for policy in (shaken(get_peft_model(shaken(causal(base)), copy.deepcopy(lora))), "by its name"):
        generated = generated_config(config, adapted_policy(policy, config, lora))
        assert generated.tie_word_embeddings is not differ
        if not isinstance(policy, str):
            assert_generates_as(policy, exported(policy), generated)
            assert "lm_head.weight" not in exported(frozen_copy(policy)), "the reference has no adapters"
    assert config.tie_word_embeddings


def renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): renamed(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, names) for each in value]
    return names.get(value, value)


@pytest.mark.parametrize("ends", [["lm_head"], []])
def test_adapters_that_are_made_from_the_weights_are_known_before_these_are_read(ends: list[str]) -> None:
    config = causal("tied llama").config
    boft = BOFTConfig(boft_block_size=4, target_modules=["q_proj", *ends])
    generated = generated_config(config, adapted_policy("a name", config, boft))
    assert generated.tie_word_embeddings is not bool(ends)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_bias": True}, "q_proj has no bias"),
        ({"trainable_token_indices": [3], "target_modules": ["lm_head"]}, "lm_head has two adapters"),
        ({"trainable_token_indices": [3], "modules_to_save": ["lm_head"]}, "lm_head.token_adapter has two adapters"),
    ],
)
def test_adapters_that_peft_cannot_merge_are_known_before_weights_are_read(settings: Any, told: str) -> None:
    lora = LoraConfig(**{"target_modules": ["q_proj"], **settings})
    assert told in str(why_not_merged(adapted_policy("a name", causal("tied llama").config, lora)))
    assert (
        why_not_merged(get_peft_model(causal("qwen2"), LoraConfig(target_modules=["q_proj"], lora_bias=True))) is None
    )


def test_a_classifier_with_adapters_brings_its_trained_head() -> None:
    config = LlamaConfig(**SMALL, num_labels=1)
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    model = shaken(get_peft_model(AutoModelForSequenceClassification.from_config(config), lora))
    ours = exported(model)
    assert torch.equal(ours["score.weight"], model.get_base_model().score.modules_to_save["default"].weight)
    assert_same(ours, own_tensors(copy.deepcopy(model).merge_and_unload()), rtol=1e-6, atol=1e-6)


def test_unmerged_names_are_the_modules_own() -> None:
    model = shaken(get_peft_model(causal("llama"), LoraConfig(target_modules=["q_proj"])))
    assert_same(exported(model, merged=False), {n: p.detach() for n, p in model.named_parameters()}, rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(bucket_bytes=st.integers(1, 40_000), lora=st.booleans())
def test_a_bucket_keeps_its_size_unless_one_tensor_is_larger(bucket_bytes: int, lora: bool) -> None:
    model = LORA if lora else PLAIN
    seen = []
    for bucket in buckets(model, bucket_bytes=bucket_bytes):
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes
        seen += [name for name, _ in bucket]
    assert seen == (WHOLE_LORA if lora else WHOLE_PLAIN)


def test_what_makes_a_bucket_is_gathered_once_and_only_while_it_is_out() -> None:
    model = get_peft_model(causal("qwen2"), LoraConfig(target_modules=["q_proj"], lora_bias=True))
    out: list[nn.Parameter] = []
    gathered: list[nn.Parameter] = []

    @contextlib.contextmanager
    def gather(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        assert not out, "two buckets were gathered at a time"
        assert len({id(p) for p in parameters}) == len(parameters)
        out.extend(parameters)
        gathered.extend(parameters)
        yield
        out.clear()

    for bucket in buckets(model, gather, bucket_bytes=3_000):
        assert out and len(bucket) <= len(out)
    assert not out
    assert {id(p) for p in gathered} == {id(p) for p in model.parameters()}


PLAIN = causal("llama")
LORA = get_peft_model(causal("llama"), LoraConfig(target_modules=["q_proj", "down_proj"]))
WHOLE_PLAIN = list(exported(PLAIN))
WHOLE_LORA = list(exported(LORA))


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "llama"])
def test_the_names_are_those_of_a_saved_checkpoint(kind: str, tmp_path: Path) -> None:
    """What vLLM's loader knows: `embed_out` for GPT-NeoX, each expert by itself for a mixture."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model(kind, num_attention_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    made = {name: tensor for bucket in buckets(model, bucket_bytes=4000) for name, tensor in bucket}
    assert made.keys() == saved.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in saved.items())
