"""Which models pack samples, and that packing changes neither their generation nor their file nor their mode."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from families import FAMILIES, causal
from transformers import AutoModelForCausalLM

from trl_realloc.engines.training import probe_model
from trl_realloc.engines.training.packed_attention import PACKED
from trl_realloc.engines.training.probe_model import packs
from trl_realloc.engines.transformers_compat import attention_name


@pytest.mark.parametrize("family", [name for name, (_, packed) in FAMILIES.items() if packed])
def test_a_model_that_packs_still_generates_as_before(family: str) -> None:
    model = causal(family)
    plain = copy.deepcopy(model)
    assert packs(model)
    prompts = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4], [0, 0, 0, 0, 0, 11]])  # left-padded
    options = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 9, "do_sample": False, "output_scores": True}
    ours, expected = (m.generate(prompts, **options, return_dict_in_generate=True) for m in (model, plain))
    assert ours.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(expected.scores), rtol=1e-5, atol=1e-5)


def test_a_model_that_packs_saves_as_before(tmp_path: Path) -> None:
    plain, model = causal("llama"), causal("llama")
    assert packs(model)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packs")
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "packs/config.json").read_text()
    assert attention_name(AutoModelForCausalLM.from_pretrained(tmp_path / "packs").config) == "sdpa"


def test_a_model_that_cannot_pack_keeps_its_attention() -> None:
    model = causal("bloom")
    before = attention_name(model.config)
    assert not packs(model) and attention_name(model.config) == before
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"][0]), attn_implementation="eager")
    assert not packs(eager) and attention_name(eager.config) == "eager"


@pytest.mark.parametrize("training", [True, False])
def test_trying_whether_a_model_packs_leaves_its_mode(training: bool) -> None:
    model = causal("llama").train(training)
    packs(model)
    assert all(module.training == training for module in model.modules())


def round_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits a GPU multiplies rows of another number of tokens by other kernels, whose results differ in the last
    bit."""
    linear = torch.nn.Linear.forward

    def rounded(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        out = linear(self, hidden)
        if out.dtype.itemsize > 2:
            return out
        draws = torch.Generator().manual_seed(hidden[..., 0].numel())
        return out * (1 + torch.finfo(out.dtype).eps * torch.randint(-1, 2, out.shape, generator=draws)).to(out.dtype)

    monkeypatch.setattr(torch.nn.Linear, "forward", rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_packs_whatever_is_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_a_gpu(monkeypatch)
    model = causal("llama").to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert packs(model) and attention_name(model.config) == PACKED
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loaded_model_in_16_bits_that_mixes_samples_does_not_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (name for name, (_, packed) in FAMILIES.items() if not packed):
        assert not packs(causal(family).bfloat16()), family


def test_a_loaded_model_of_which_no_copy_can_be_run_is_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized layers compute with their own weights alone; other models cannot be copied."""
    tried = []

    def fails(backbone: torch.nn.Module) -> torch.nn.Module:
        tried.append(backbone)
        raise TypeError("cannot pickle this")

    monkeypatch.setattr(probe_model, "probe_model", fails)
    assert packs(causal("llama").bfloat16()) and len(tried) == 1
    quantized = causal("llama").bfloat16()
    quantized.is_quantized = True
    quantized.model.codes = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert packs(quantized) and len(tried) == 1
