"""Which arguments of vLLM's engine a user may pass, against the installed vLLM's own list."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

from trl_realloc.engines.base import EngineError
from trl_realloc.engines.generation import vllm, vllm_support
from trl_realloc.engines.generation.vllm_support import (
    MAX_CPU_CACHE,
    RESERVED_ENGINE_ARGUMENTS,
    cpu_cache_bytes,
    cpu_head_sizes,
    engine_argument_names,
    engine_argument_problems,
    engine_slots,
    is_vllm_available,
    why_not_served,
)


needs_vllm = pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")


@needs_vllm
def test_the_installed_vllm_has_every_argument_that_is_decided_here() -> None:
    assert len(engine_argument_names()) > 100
    newer = {"elastic_ep_max_dp_size", "watermark_config"}  # of releases after the oldest that is supported
    assert set(RESERVED_ENGINE_ARGUMENTS) - newer <= set(engine_argument_names())


@needs_vllm
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_num_batched_token": 512}, "no argument 'max_num_batched_token'; did you mean 'max_num_batched_tokens'?"),
        ({"tensor_parallel_sizes": 2}, "no argument 'tensor_parallel_sizes'; did you mean"),
        ({7: 1}, "no argument 7; none of the"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_one(arguments: dict[str, object], told: str) -> None:
    (problem,) = engine_argument_problems(arguments, on_cpu=True)
    assert told in problem


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tensor_parallel_size", "set tp of the call"),
        ("model", "give the trainer another model"),
        ("seed", "set the run's seed"),
        ("speculative_config", "a draft model would have none"),
        ("quantization", "the weights in the training's dtype"),
        ("data_parallel_size", "set dp of the call"),
        ("gpu_memory_utilization", "set vllm_gpu_memory_utilization"),
        ("trust_remote_code", "whose family Transformers has"),
        ("logprobs_mode", "training needs each token's probability as sampled"),
    ],
)
def test_an_argument_that_is_decided_elsewhere_is_refused_with_what_to_set(name: str, remedy: str) -> None:
    (problem,) = engine_argument_problems({name: 1}, on_cpu=False)
    assert problem.startswith(f"vllm_engine_kwargs cannot set {name}: ")
    assert remedy in problem


def test_the_cache_is_given_in_bytes_on_a_cpu_alone_because_the_planner_counts_a_gpus() -> None:
    assert engine_argument_problems({"kv_cache_memory_bytes": 1 << 20}, on_cpu=True) == []
    assert "vllm_gpu_memory_utilization" in engine_argument_problems({"kv_cache_memory_bytes": 1}, on_cpu=False)[0]


def test_values_that_cannot_reach_the_engines_process_are_refused() -> None:
    (problem,) = engine_argument_problems({"max_num_seqs": object}, on_cpu=True)
    assert problem.startswith("vllm_engine_kwargs: max_num_seqs goes to another process as JSON")


def test_names_are_not_checked_where_vllms_source_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_support, "engine_argument_names", tuple)
    assert engine_argument_problems({"a_new_one": 1}, on_cpu=True) == []


def test_experts_without_a_gate_are_not_served_on_a_cpu() -> None:
    config = AutoConfig.for_model("nemotron_h", num_hidden_layers=None, layers_block_type=["mamba", "attention", "moe"])
    assert "experts" in str(why_not_served(config, on_cpu=True))
    assert why_not_served(config, on_cpu=False) is None
    dense = AutoConfig.for_model("nemotron_h", num_hidden_layers=None, layers_block_type=["mamba", "attention"])
    assert why_not_served(dense, on_cpu=True) is None


@needs_vllm
@pytest.mark.multiprocess
@pytest.mark.vllm
def test_the_sizes_of_heads_on_a_cpu_are_those_that_vllm_names(run_with_vllm: Callable[..., str]) -> None:
    """Asked in another process, because vLLM changes the one that imports it."""
    backend = "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as backend"
    code = f"{backend}; print(*backend.get_supported_head_sizes())"
    assert cpu_head_sizes() == tuple(map(int, run_with_vllm(code).splitlines()[-1].split()))


@needs_vllm
@pytest.mark.parametrize(
    ("head_dim", "devices", "is_refused"), [(16, None, True), (None, None, True), (16, [0], False), (32, None, False)]
)
def test_an_engine_on_a_cpu_refuses_heads_of_another_size_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int | None, devices: list[int] | None, is_refused: bool
) -> None:
    monkeypatch.setattr(vllm, "EngineProcess", lambda *_: None)
    LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=head_dim).save_pretrained(tmp_path)
    refusal = pytest.raises(EngineError, match="actor.generate: on a CPU vLLM has attention for heads of 32, .*s 16; ")
    with refusal if is_refused else contextlib.nullcontext():
        vllm.VLLMEngine(tmp_path, max_model_len=8, cuda_devices=devices)


def test_heads_are_not_checked_where_vllms_source_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_support, "cpu_head_sizes", tuple)
    assert why_not_served(LlamaConfig(head_dim=16), on_cpu=True) is None


def config(**values: object) -> dict[str, object]:
    """Of a model whose token has 2 x 2 layers x 2 heads x 32 channels of keys and values."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return {"model_type": "llama", "vocab_size": 100, "intermediate_size": 64, **sizes, **values}


@pytest.mark.parametrize(
    ("dtype", "tp", "samples", "tokens", "blocks", "of_token"),
    [
        ("float32", 1, 64, 256, 64 * 2 + 1, 1024),
        ("float32", 1, 64, 257, 64 * 3 + 1, 1024),
        ("bfloat16", 1, 64, 256, 64 * 2 + 1, 512),
        ("float32", 2, 1, 1, 2, 512),
        ("float32", 4, 1, 1, 2, 512),  # two heads on four processes: each holds one
    ],
)
def test_an_engine_on_the_cpu_takes_the_cache_that_its_samples_fill(
    dtype: str, tp: int, samples: int, tokens: int, blocks: int, of_token: int
) -> None:
    assert cpu_cache_bytes(config(), dtype, samples=samples, tokens=tokens, tp=tp) == blocks * 128 * of_token


def test_an_engine_on_the_cpu_takes_a_gibibyte_of_cache_and_more_only_for_a_single_sample() -> None:
    block = 128 * 1024
    assert cpu_cache_bytes(config(), "float32", samples=4096, tokens=1024) <= MAX_CPU_CACHE
    assert cpu_cache_bytes(config(), "float32", samples=4096, tokens=1024) + block > MAX_CPU_CACHE
    assert cpu_cache_bytes(config(), "float32", samples=2, tokens=2**21) == (2**14 + 1) * block  # 2 GiB and a block


def test_a_cache_of_unknown_size_has_a_gibibyte() -> None:
    assert cpu_cache_bytes(config(model_type="gemma3"), "float32", samples=1, tokens=1) == MAX_CPU_CACHE
    kwargs = {"block_size": 256}
    assert cpu_cache_bytes(config(), "float32", samples=1, tokens=1, engine_kwargs=kwargs) == MAX_CPU_CACHE


def test_an_engine_decodes_no_more_samples_at_once_than_vllm_takes() -> None:
    assert [engine_slots(samples, {}) for samples in (1, 1000, 10_000)] == [1, 1000, 1024]
    assert engine_slots(10_000, {"engine_kwargs": {"max_num_batched_tokens": 256}}) == 256
    assert engine_slots(10_000, {"engine_kwargs": None}) == 1024
