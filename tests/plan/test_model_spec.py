"""What a config says of a model's parameters, held against the models that Transformers makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_realloc.plan.execution_plan import PlanError
from trl_realloc.plan.model_spec import FAMILIES, ModelSpec, stage_layers, stage_of_layer
from trl_realloc.plan.parameter_spec import MIXTURES


SIZES: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, "pad_token_id": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "a key for each head": {"num_key_value_heads": 4},
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 24}
MIXED: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"ordinary layers": {"mlp_only_layers": [0]}, "every second layer": {"decoder_sparse_step": 2}},
    "qwen2_moe": {"ordinary layers": {"mlp_only_layers": [2]}, "no bias": {"qkv_bias": False}},
    "glm4_moe": {
        "norms of heads": {"use_qk_norm": True, "first_k_dense_replace": 0},
        "two shared experts": {"n_shared_experts": 2, "first_k_dense_replace": 2},
    },
}


def config_of(family: str, **changes: Any) -> Any:
    experts = EXPERTS if family in MIXTURES else {}
    if name := {"glm4_moe": "n_routed_experts", "granitemoe": "num_local_experts"}.get(family):
        experts = {**experts, name: EXPERTS["num_experts"]}
    return AutoConfig.for_model(family, **{**SIZES, **experts, **changes})


WITHOUT_SCORE = ("glm4_moe", "granitemoe", "olmoe")  # of which Transformers has no sequence classifier


@pytest.mark.parametrize(
    ("family", "variant", "head"),
    [
        (family, variant, head)
        for family in sorted(FAMILIES)
        for variant in (*VARIANTS, *MIXED.get(family, ()))
        for head in (["lm"] if family in WITHOUT_SCORE else ["lm", "score"])
    ],
)
def test_names_shapes_and_bytes_are_the_models(family: str, variant: str, head: str) -> None:
    config = config_of(family, **{**VARIANTS, **MIXED.get(family, {})}[variant])
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = kind.from_config(config)
    real = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    for given_as in (config, config.to_dict()):
        spec = ModelSpec.from_config(given_as, head, bytes_per_element=2)  # type: ignore[arg-type]
        assert [(p.name, p.shape) for p in spec.parameters] == real
        assert spec.bytes == 2 * sum(p.numel() for p in model.parameters())


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_have_all_layers_in_order_and_differ_by_one_at_most(layers: int, pp: int) -> None:
    stages = stage_layers(layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == pp and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert all(stage_of_layer(layers, pp, layer) == stage for stage, of in enumerate(stages) for layer in of)


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage() -> None:
    spec = ModelSpec.from_config(config_of("llama", tie_word_embeddings=True), bytes_per_element=4)
    apart = ModelSpec.from_config(config_of("llama"), bytes_per_element=4)
    tied, untied = ({p.name: each.stages_of(p, 3) for p in each.parameters} for each in (spec, apart))
    assert tied["model.embed_tokens.weight"] == (0, 2) and tied["model.norm.weight"] == (2,)
    assert untied["model.embed_tokens.weight"] == (0,) and untied["lm_head.weight"] == (2,)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_config_file_does_not_say_of_its_embedding_is_the_familys_default(family: str) -> None:
    config = config_of(family)
    stored = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"}
    assert ModelSpec.from_config(stored, bytes_per_element=2).tied == config.tie_word_embeddings
    assert not ModelSpec.from_config({**stored, "tie_word_embeddings": False}, bytes_per_element=2).tied


@pytest.mark.parametrize(
    ("tp", "pp", "told"),
    [
        (4, 1, "tp 4 cannot share the 2 key/value heads of a llama model evenly; use tp 1 or 2"),
        (3, 1, "use tp 1 or 2"),
        (1, 4, "pp 4 is more than the model's 3 layers; use pp 3 or less"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_what_can(tp: int, pp: int, told: str) -> None:
    spec = ModelSpec.from_config(config_of("llama"), bytes_per_element=4)
    with pytest.raises(PlanError, match=told):
        spec.check_strategy(tp, pp)
    spec.check_strategy(2, 3)


NINE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 48}
NINE |= {"vocab_size": 190}


@pytest.mark.parametrize(
    ("changes", "tp", "told"),
    [
        ({}, 2, "share the 9 heads, 3 key/value heads of a llama model evenly, as vLLM does; use tp 1 or 3"),
        ({}, 6, "share the 9 heads of"),
        ({"num_key_value_heads": 9}, 2, "share the 9 heads, 9 key/value heads"),
        ({"intermediate_size": 52}, 3, r"share the 52 channels of the MLPs of .* use tp 1\."),
        (
            {"vocab_size": 131},
            9,
            r"share the 48 channels of the MLPs, 131 tokens \(padded to 192\) of .* use tp 1 or 3",
        ),
    ],
)
def test_a_split_that_vllm_cannot_make_is_refused_with_others(changes: dict[str, Any], tp: int, told: str) -> None:
    spec = ModelSpec.from_config(config_of("llama", **{**NINE, **changes}), bytes_per_element=4)
    with pytest.raises(PlanError, match=told):
        spec.check_generation(tp)
    assert not spec.generates_under(tp)


def test_vllm_repeats_key_value_heads_for_more_devices_and_pads_the_vocabulary() -> None:
    for tp, vocabulary in ((1, 131), (3, 131), (9, 9 * 64 - 1)):
        config = config_of("llama", **{**NINE, "intermediate_size": 36, "vocab_size": vocabulary})
        ModelSpec.from_config(config, bytes_per_element=4).check_generation(tp)


def test_a_family_that_no_table_describes_is_refused_with_those_that_are() -> None:
    with pytest.raises(PlanError, match=r"'opt' cannot be split .* gemma, glm4_moe, gpt_neox, granitemoe, llama"):
        ModelSpec.from_config({"model_type": "opt"}, bytes_per_element=4)
    with pytest.raises(PlanError, match="known by its shapes alone"):
        ModelSpec.of_shapes([("w", (4, 4))], bytes_per_element=4).check_strategy(2, 1)


def test_flops_of_a_forward_are_counted_as_published_for_llama_2_7b() -> None:
    """ReaL's formula, L(4sh² + 2s²h + 3shi) + 2svh multiply-adds for one sequence of length s with heads of its own
    keys; ours has both matrix products of attention at 2 FLOPs each."""
    layers, hidden, inner, vocabulary, length = 32, 4096, 11008, 32000, 1024
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    spec = ModelSpec.from_config(config_of("llama", **sizes, **heads), bytes_per_element=2)
    s, h = length, hidden
    published = 2 * layers * (4 * s * h**2 + 2 * s**2 * h + 3 * s * h * inner) + 2 * s * vocabulary * h
    assert spec.forward_flops(s, s**2) == pytest.approx(published, rel=1e-6)
