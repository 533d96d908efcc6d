"""No rank reads or holds what its layout does not give it when a model is given by path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(600)]

POLICY: dict[str, Any] = {"head": "policy", "model": "policy", "file_bytes": 2}
CRITIC: dict[str, Any] = {"head": "value", "model": "policy", "file_bytes": 2}
CASES = {
    **{f"policy, {layout}": {**POLICY, "layout": layout} for layout in ("replicated", "zero 2", "zero 3", "tp", "pp")},
    **{f"critic, {layout}": {**CRITIC, "layout": layout} for layout in ("zero 3", "tp", "pp")},
    **{f"reference, {layout}": {**POLICY, "layout": layout, "frozen": True} for layout in ("zero 3", "tp", "pp")},
    "policy in 16 bits, zero 3": {**POLICY, "layout": "zero 3", "bf16": True},
    "mixture, zero 3": {"head": "policy", "model": "mixture", "layout": "zero 3", "file_bytes": 4},
}


def test_every_rank_reads_its_own_boxes_of_the_loaded_model(run: Callable[..., Path], tmp_path: Path) -> None:
    size = {"vocab_size": 101, "num_hidden_layers": 4, "num_key_value_heads": 4}
    tiny.policy(**size, tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "policy")
    for rank in range(2):
        tiny.policy(seed=rank).save_pretrained(tmp_path / f"host-{rank}")
    torch.manual_seed(0)
    mixture = Qwen2MoeConfig(
        **{**tiny.config().to_dict(), "model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 16},
        shared_expert_intermediate_size=16,
    )
    AutoModelForCausalLM.from_config(mixture).save_pretrained(tmp_path / "mixture")
    folder = run("parts.py", 2, {**CASES}, "read")
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for name, case in CASES.items():
        results = [rank["cases"][name] for rank in ranks]
        assert [result["wrong"] for result in results] == [[], []], name
        for result in results:
            if case["model"] == "mixture":  # fused experts are computed of all experts of a layer
                assert result["read"] <= result["whole"]
            else:
                assert result["read"] <= result["share"] + result["largest"], name
                assert case["layout"] in ("replicated", "zero 2") or result["read"] < 0.8 * result["whole"], name
            if result["copies"] is not None:
                assert result["copies"]["gradients"] == 0, "between the steps"
                assert bool(result["copies"]["second"]) == case.get("bf16", False), "only 16 bits need float32 masters"
        assert set(results[0]["held"]) | set(results[1]["held"]) >= {"model.layers.0.mlp.down_proj.weight"} or (
            case["model"] == "mixture"
        )
    for rank in ranks:
        assert len(rank["refused"]) == 2
        assert all("put the same checkpoint on every host" in message for message in rank["refused"])
