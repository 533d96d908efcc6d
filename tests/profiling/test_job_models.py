"""What the planner is told of a model's head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from trl_realloc.engines.models import adapts_head, with_adapters
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.quantization import Quantization
from trl_realloc.profiling.job_models import JobModels, spec_of, specs_of, trained_share
from trl_realloc.profiling.short_runs import Runs, _saved_bytes


def config(family: str, **changes: Any) -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 60, "head_dim": 16}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 48}
    return AutoConfig.for_model(family, **{**sizes, **changes})


@pytest.mark.parametrize(("family", "whole"), [("llama", False), ("olmo2", False), ("gemma2", True), ("cohere", True)])
def test_the_spec_says_whether_the_logits_are_in_memory_whole(family: str, whole: bool) -> None:
    policy, critic = spec_of(config(family), is_policy=True), spec_of(config("qwen2"), is_policy=False)
    assert (policy.outputs, policy.whole_logits) == (60, whole)
    assert (critic.outputs, critic.whole_logits) == (1, False)


OTHER_MIXTURES: dict[str, dict[str, Any]] = {  # families without a table of parameters
    "gemma4_text": {"num_experts": 4, "top_k_experts": 2, "enable_moe_block": True, "moe_intermediate_size": 16},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}


@pytest.mark.parametrize("family", OTHER_MIXTURES)
def test_a_token_computes_the_experts_of_its_configs_setting(family: str) -> None:
    changes = {"first_k_dense_replace": 0, "moe_layer_start_index": 0, **OTHER_MIXTURES[family]}
    assert spec_of(config(family, **changes), is_policy=True).experts_per_token == 2


@pytest.mark.parametrize(
    ("settings", "adapted"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, False),
        ({"target_modules": "all-linear"}, False),
        ({"target_modules": ["q_proj", "lm_head"]}, True),
        ({"target_modules": r"model\..*q_proj"}, False),
        ({"target_modules": r".*(q_proj|lm_head)"}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    ],
)
def test_whether_an_adapter_changes_the_head_is_known_before_it_exists(settings: dict[str, Any], adapted: bool) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    assert adapts_head("a name", tiny.config(), lora) is adapted
    model = with_adapters(tiny.policy(), lora, None)
    assert adapts_head(model, tiny.config(), None) is adapted
    assert (type(model.get_base_model().get_output_embeddings()) is not nn.Linear) is adapted
    specs = specs_of({role: [tiny.config()] for role in Role}, adapts_head=adapted)
    assert specs["actor.train"][0].whole_logits is specs["reference.forward"][0].whole_logits is adapted
    assert not specs["critic.train"][0].whole_logits


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 4},
        {"target_modules": "all-linear", "init_lora_weights": "pissa"},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_the_share_that_adapters_are_of_a_policy_is_known_before_they_are_created(settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    before = torch.random.get_rng_state()
    share = trained_share("a name", tiny.config(), lora)
    assert torch.equal(torch.random.get_rng_state(), before)
    model = with_adapters(tiny.policy(), lora, None)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < share == trained / sum(p.numel() for p in model.parameters()) < 1
    assert trained_share(model, tiny.config(), None) == share
    assert trained_share(tiny.policy(), tiny.config(), None) == 1.0
    specs = specs_of({role: [tiny.config()] for role in Role}, trained_share=share)
    shares = {name: of_call[0].trained_share for name, of_call in specs.items()}
    assert shares.pop("actor.train") == share and set(shares.values()) == {1.0}


def test_a_run_that_trains_adapters_is_priced_by_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = tiny.trainer(tmp_path, given={"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=2)})
    models = made.setup.job.models
    assert models.trained_share < 0.1
    for found in (models, models.shallow(1)):
        assert found.specs["actor.train"][0].trained_share == models.trained_share
        assert found.specs["critic.train"][0].trained_share == 1.0


def test_a_policy_that_has_adapters_is_measured_with_such_adapters(tmp_path: Path) -> None:
    """Training all of its parameters would take other times, and memory that the run never needs."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny.policy(), peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    path = tmp_path / "adapted"
    adapted.save_pretrained(path)
    loaded = peft.PeftModel.from_pretrained(tiny.policy(), path, is_trainable=True)
    made = tiny.trainer(tmp_path, given={"model": loaded})
    actor = Runs(made.setup.job).roles()[Role.ACTOR]
    (measured,) = [load() for load in actor.load]
    assert actor.adapted
    sizes = [(p.numel(), p.requires_grad) for p in measured.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    assert trained / sum(size for size, _ in sizes) == made.setup.job.models.trained_share < 0.1


def test_short_runs_of_fewer_layers_have_adapters_that_belong_to_some_layers_of_the_run(tmp_path: Path) -> None:
    """Such as the last one, which shallower models do not have; and initial values that would be computed for long."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, layers_to_transform=[3], layers_pattern="layers", init_lora_weights="pissa"
    )
    deep = LlamaForCausalLM(tiny.config(num_hidden_layers=4))
    made = tiny.trainer(tmp_path, given={"model": deep, "peft_config": config})
    models = made.setup.job.models
    shallow = replace(made.setup.job, models=models.shallow(1))
    (measured,) = [load() for load in Runs(shallow).roles()[Role.ACTOR].load]
    assert measured.config.num_hidden_layers == 2
    assert any(p.requires_grad for p in measured.parameters())


def test_a_vllm_engine_holds_its_weights_in_the_dtype_of_mixed_precision() -> None:
    models = {role: [tiny.config()] for role in Role}
    sizes = {
        engine: {
            name: of_call[0].bytes_per_element
            for name, of_call in specs_of(models, mixed=torch.bfloat16, generation_engine=engine).items()
        }
        for engine in ("vllm", "transformers")
    }
    assert set(sizes["transformers"].values()) == {4}
    assert sizes["vllm"] == {**sizes["transformers"], "actor.generate": 2}
    job = JobModels(models, {}, mixed=torch.bfloat16)
    assert job.shallow(1).specs["actor.generate"][0].bytes_per_element == 2


def test_a_run_with_an_adapted_head_is_priced_with_whole_logits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    made = tiny.trainer(tmp_path, given={"peft_config": lora})
    models = made.setup.job.models
    assert models.specs["actor.train"][0].whole_logits
    assert models.shallow(1).specs["actor.train"][0].whole_logits


def test_activations_of_16_bits_are_measured_without_the_cast_weights(tmp_path: Path) -> None:
    """They grow with the tokens alone, so that those of no token are few."""
    model = LlamaForCausalLM(tiny.config(hidden_size=64, intermediate_size=96, vocab_size=50))
    options = tiny.trainer(tmp_path).setup.engine_options
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) * 2
    short, long = (_saved_bytes(model, n, replace(options, compute_dtype=torch.bfloat16)) for n in (10, 20))
    assert abs(2 * short - long) < 0.1 * matrices


@pytest.mark.parametrize("kind", [{"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}])
def test_a_policy_in_4_bits_is_priced_by_what_it_stores(tmp_path: Path, kind: dict[str, bool]) -> None:
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    tiny.policy().save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(**kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32)
    stored = 0
    for parameter in loaded.parameters():
        state = getattr(parameter, "quant_state", None)
        scales = 0 if state is None else state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        stored += parameter.nbytes + scales
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    how = {"peft_config": None, "processing_class": None, "mixed": None, "generation_engine": "vllm"}
    quantization = Quantization.of(loaded.config.quantization_config)
    adapted = peft.get_peft_model(loaded, lora)
    configs = {role: [tiny.config()] for role in (Role.ACTOR, Role.REFERENCE)}
    graph = grpo_graph(reference=True)
    job = JobModels.of_run(configs, graph, adapted, quantization=quantization, **how)
    for specs in (job.specs, job.shallow(1 << 30, graph).specs):
        assert {name: of_call[0].bytes for name, of_call in specs.items() if of_call} == {
            "actor.generate": 4 * specs["actor.generate"][0].elements,
            **dict.fromkeys(("actor.forward", "reference.forward", "actor.train"), stored),
        }
    assert job.trained_share == pytest.approx(trained_share("a name", tiny.config(), lora))
