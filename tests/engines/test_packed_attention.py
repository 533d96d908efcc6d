"""Packed rows by kernels that run on a GPU alone: what they are given, with a stand-in for the kernels themselves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from test_sliced_head import rollouts
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen2Config, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_realloc.engines.training import packed_attention
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.packed_attention import PACKED, has_varlen, is_flash, sample_bounds
from trl_realloc.engines.training.packed_row import PackedRow, Segment
from trl_realloc.engines.transformers_compat import attention_name


FLASH = "tests_flash_attention"
calls: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers looks for the kernels of every implementation with flash in its name."""
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_, **__: None)


def windowed(size: int, window: int | None) -> Tensor | None:
    if window is None:
        return None
    at = torch.arange(size)
    distance = at[:, None] - at[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def kernel(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """What Transformers' flash attention does with these arguments: causal attention between the bounds."""
    calls.append(kwargs)
    bounds = kwargs["cu_seq_lens_q"]
    assert mask is None and bounds.dtype is torch.int32 and torch.equal(bounds, kwargs["cu_seq_lens_k"])
    lengths = bounds.diff().tolist()
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(lengths)
    parts = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        seen = windowed(q.shape[2], kwargs.get("sliding_window"))
        options = {"scaling": kwargs["scaling"], "is_causal": seen is None}
        parts.append(sdpa_attention_forward(module, q, k, v, seen, **options)[0])
    return torch.cat(parts, dim=1), None


AttentionInterface.register(FLASH, kernel)
AttentionMaskInterface.register(FLASH, flash_attention_mask)


def padded(model: Any) -> Tensor:
    head = PolicyHead(model, 0.7)
    head.packed = False
    return head(rollouts())["logprobs"].values


def test_a_model_with_flash_attention_keeps_it_and_gets_the_bounds_of_the_samples() -> None:
    calls.clear()
    model = tiny.policy()
    model.set_attn_implementation(FLASH)
    head = PolicyHead(model, 0.7)
    assert head.packed and not calls, "the probe needs no GPU"
    assert attention_name(model.config) == FLASH
    found = head(rollouts())["logprobs"].values
    assert len(calls) == 2 and calls[0]["cu_seq_lens_q"] is calls[1]["cu_seq_lens_q"], "one tensor for all layers"
    torch.testing.assert_close(found, padded(tiny.policy()), rtol=1e-5, atol=1e-5)


def test_windows_reach_the_flash_kernel() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    config = Qwen2Config(vocab_size=tiny.VOCABULARY, num_key_value_heads=1, **sizes, **window)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    expected = padded(model)
    calls.clear()
    model.set_attn_implementation(FLASH)
    del model.packs_rows
    head = PolicyHead(model, 0.7)
    assert head.packed
    torch.testing.assert_close(head(rollouts())["logprobs"].values, expected, rtol=1e-5, atol=1e-5)
    assert [call["sliding_window"] for call in calls] == [None, 3]


def test_which_implementations_are_flash_attention() -> None:
    flash = ("flash_attention_2", "flash_attention_3", "kernels-community/vllm-flash-attn3")
    assert all(map(is_flash, flash))
    assert not any(map(is_flash, (None, "sdpa", "eager", "flex_attention", PACKED)))


def each_sample_alone(q: Tensor, k: Tensor, v: Tensor, *bounds: Any, **options: Any) -> Tensor:
    """What torch's attention for samples of different lengths computes, by sdpa."""
    of_queries, of_keys, *longest = bounds
    assert longest == [int(each.diff().max()) for each in (of_queries, of_keys)]
    left, right = options["window_size"]
    assert right == 0, "causal"
    parts = []
    for queries, keys in zip(*(pairwise(each.tolist()) for each in (of_queries, of_keys)), strict=True):
        one = [part[slice(*of)].transpose(0, 1)[None] for part, of in ((q, queries), (k, keys), (v, keys))]
        tokens, size = keys[1] - keys[0], queries[1] - queries[0]
        seen = windowed(tokens, None if left < 0 else left + 1)
        if size < tokens:  # the last query is that of the last key
            seen = (torch.ones(1, 1, tokens, tokens).tril().bool() if seen is None else seen)[:, :, -size:]
        out = nn.functional.scaled_dot_product_attention(
            *one,
            attn_mask=seen,
            is_causal=seen is None,
            scale=options["scale"],
            enable_gqa=options.get("enable_gqa", False),
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def of_torch_2_13(*tensors: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
    return each_sample_alone(*tensors, scale=scale, window_size=window_size, enable_gqa=enable_gqa)


def of_torch_2_11(*tensors: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    return each_sample_alone(*tensors, scale=scale, window_size=window_size)


SHARED = PackedRow((4, 5, 6), (0, 1, 2), (Segment(0, 4), Segment(4, 6, ((0, 3),)), Segment(6, 9, ((0, 3),))))


@pytest.mark.parametrize("row", [PackedRow.plain([4, 2, 3]), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("varlen_attn", [of_torch_2_13, of_torch_2_11])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_torchs_attention_for_different_lengths_gets_the_samples_and_the_window(
    row: PackedRow, varlen_attn: Callable[..., Tensor], window: int | None, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples in one call, also where keys and values have fewer heads, which torch 2.11 cannot be told."""
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 4 // heads  # type: ignore[assignment]
    inputs = [torch.randn(1, number, 9, 8, requires_grad=True) for number in (4, heads, heads)]
    arguments = {"packed_row": row, "scaling": 0.3, "sliding_window": window}
    weights = torch.randn(1, 9, 4, 8)

    def computed() -> list[Tensor]:
        result = ALL_ATTENTION_FUNCTIONS[PACKED](module, *inputs, None, **arguments)[0]  # type: ignore[arg-type]
        return [result, *torch.autograd.grad((result * weights).sum(), inputs)]

    expected = computed()
    monkeypatch.setattr(packed_attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(packed_attention, "has_varlen", lambda *_: True)
    monkeypatch.delattr(packed_attention, "sdpa_attention_forward")  # called for each sample
    torch.testing.assert_close(computed(), expected)


def test_torchs_attention_is_used_on_a_gpu_in_16_bits_with_plain_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "has_kernel", lambda *_: True)
    on_gpu = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 4, 9, 128), "device": torch.device("cuda")}
    like = type("Like", (), on_gpu)
    assert has_varlen(like(), like(), {"scaling": 0.1, "dropout": 0.0})  # type: ignore[arg-type]
    for changes in ({"is_cuda": False}, {"dtype": torch.float32}, {"shape": (1, 4, 9, 512)}, {"shape": (1, 4, 9, 100)}):
        other: Any = type("Other", (), {**on_gpu, **changes})()
        assert not has_varlen(other, other, {})
    for changed in ({"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}):
        assert not has_varlen(like(), like(), changed)  # type: ignore[arg-type]


def test_torchs_attention_is_used_under_autocast_where_the_rotary_embedding_of_a_float32_model_makes_queries_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_attention, "has_kernel", lambda device, dtype, size: dtype is torch.bfloat16)
    on_gpu = {"is_cuda": True, "dtype": torch.float32, "shape": (1, 4, 9, 128), "device": torch.device("cuda")}
    like: Any = type("Like", (), on_gpu)()
    assert not has_varlen(like, like, {})
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert has_varlen(like, like, {})
    monkeypatch.undo()

    given: list[Tensor] = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, *bounds: Any, **options: Any) -> Tensor:
        given.extend([q, k, v])
        return q

    monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
    query, value = torch.randn(1, 4, 9, 8, requires_grad=True), torch.randn(1, 4, 9, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = packed_attention.varlen_attention(query, query, value, PackedRow.plain([4, 5]), None, None)
    assert {part.dtype for part in (found, *given)} == {torch.bfloat16}
    found.float().sum().backward()
    assert query.grad is not None and query.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("capability", "fails", "used"), [((7, 5), False, False), ((8, 0), True, False), ((9, 0), False, True)]
)
def test_torchs_attention_is_used_on_gpus_that_have_its_kernel_alone(
    capability: tuple[int, int],
    fails: bool,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[torch.Size] = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, *bounds: Any, **options: Any) -> Tensor:
        tried.append(q.shape)
        if fails:
            raise RuntimeError("no kernel image is available for execution on the device")
        assert bounds[0].tolist() == [0, 2, 3] and bounds[1].tolist() == [0, 2, 4]
        return q + torch.tensor([v[0, 0, 0], v[:2, 0, 0].mean(), v[2:, 0, 0].mean()], dtype=q.dtype)[:, None, None]

    monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    packed_attention.has_kernel.cache_clear()
    cpu = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 4, 9, 128), "device": torch.device("cpu")}
    query: Any = type("Query", (), cpu)()
    saved: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert [has_varlen(query, query, {}) for _ in range(2)] == [used, used]
    packed_attention.has_kernel.cache_clear()
    assert len(tried) == (capability >= (8, 0)), "tried once, and not on a GPU that is too old"
    assert not saved, "gradient checkpointing counts what a forward saves"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == fails, "a trial that fails is logged, once"
    assert all("heads of 128 in torch.bfloat16" in text and "no kernel image" in text for text in warnings)


def test_the_bounds_of_the_samples() -> None:
    assert sample_bounds([4, 2, 3], torch.device("cpu")).tolist() == [0, 4, 6, 9]
