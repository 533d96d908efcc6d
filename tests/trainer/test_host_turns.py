"""What TRL's trainers get from the generation of a plan: log-probabilities from vLLM alone."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import recorded_rollouts
import trl

import trl_realloc
from trl_realloc.engines.generation.vllm_support import is_vllm_available


ASKED = signature(trl.GRPOTrainer._generate_single_turn).parameters
COUNT = {"num_generations": 1} if "num_generations" in ASKED else {}  # TRL 1.12 knows it itself


class Engine:
    """Responses without an engine, as `vllm_generation` gives them."""

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: Any, **_: Any) -> Any:
        ids, logprobs = recorded_rollouts.responses(0, prompts)
        return prompts, ids, [[[value] for value in row] for row in logprobs], None


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize(
    "engine",
    [
        "transformers",
        pytest.param("vllm", marks=pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")),
    ],
)
def test_losses_see_vllms_log_probabilities_also_uncorrected(tmp_path: Path, engine: str, corrects: bool) -> None:
    """TRL masks samples far from the policy by them (`off_policy_mask_threshold`) without a correction too."""
    made = recorded_rollouts.make(
        trl_realloc,
        tmp_path,
        base=lambda trainer: trainer,
        use_vllm=engine == "vllm",
        vllm_importance_sampling_correction=corrects,
    )
    made.vllm_generation = Engine()
    prompts = [[2, 3, 4], [5, 6]]
    ids, logprobs = made._generate_single_turn(prompts, None, {}, **COUNT)
    expected = recorded_rollouts.responses(0, prompts)
    assert ids == expected[0] and logprobs == (expected[1] if engine == "vllm" else None)
    assert made.vllm_importance_sampling_correction == (corrects and engine == "vllm")
