"""What TRL's trainers get from the generation of a plan: log-probabilities from vLLM alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import recorded_rollouts
import torch

import trl_realloc
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.generation.vllm_support import is_vllm_available


def responses(prompts: Any, *_: Any) -> Rollouts:
    """Responses without an engine, as the calls of a plan give them."""
    ids, logprobs = recorded_rollouts.responses(0, prompts)
    rows = [[math.nan if value is None else value for value in row] for row in logprobs]
    columns = {"responses": Ragged.of(ids, torch.long), "logprobs": Ragged.of(rows, torch.float32)}
    return Rollouts(**columns, has_eos=torch.ones(len(ids), dtype=torch.bool))


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize(
    "engine",
    [
        "transformers",
        pytest.param("vllm", marks=pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")),
    ],
)
def test_losses_see_vllms_log_probabilities_also_uncorrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, corrects: bool
) -> None:
    """TRL masks samples far from the policy by them (`off_policy_mask_threshold`) without a correction too."""
    made = recorded_rollouts.make(
        trl_realloc,
        tmp_path,
        base=lambda trainer: trainer,
        use_vllm=engine == "vllm",
        vllm_importance_sampling_correction=corrects,
    )
    monkeypatch.setattr(made.calls, "generate", responses)
    made._get_per_token_logps_and_entropies = lambda _, ids, mask, width, **__: (torch.zeros(len(ids), width), None, 0)
    batch = made._generate_and_score_completions([{"prompt": "w2 w3 w4"}] * 4)
    expected = responses(made.processing_class(["w2 w3 w4"] * 4)["input_ids"])
    for ids, row in zip(batch["completion_ids"], expected.ragged("responses").rows(), strict=True):
        assert ids[: len(row)].tolist() == row.tolist()
    assert ("sampling_per_token_logps" in batch) == (engine == "vllm")
    if engine == "vllm":
        for sampled, row in zip(batch["sampling_per_token_logps"], expected.ragged("logprobs").rows(), strict=True):
            torch.testing.assert_close(sampled[: len(row)], row, equal_nan=True)
    assert made.vllm_importance_sampling_correction == (corrects and engine == "vllm")
    made.close()
