"""From the same rollouts, GRPOTrainer logs and learns under a plan what the installed TRL's does, for every loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded_rollouts import compare


pytestmark = pytest.mark.oldest  # the losses of the oldest TRL too


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# three optimizer steps on one generation: after the first, ratios are not 1 and some are clipped
MOVED: dict[str, Any] = {"steps_per_generation": 6, "max_steps": 3, "epsilon": 0.01}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradient_are_trls(tmp_path: Path, loss: str, level: str, beta: float) -> None:
    made = compare(tmp_path, loss_type=loss, importance_sampling_level=level, beta=beta, **MOVED)
    *rows, _ = made.logs
    if loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        assert max(row["clip_ratio/region_mean"] for row in rows) > 0, "the case clips"
    assert all(row["grad_norm"] > 0 and ("kl" in row) == (beta != 0) for row in rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"delta": 1.005},
        {"epsilon_high": 0.1},
        {"off_policy_mask_threshold": 0.001},
        {"beta": 0.04, "use_bias_correction_kl": False},
        {"top_entropy_quantile": 0.2},
        {"entropy_coef": 0.3},
        {"entropy_coef": 0.3, "top_entropy_quantile": 0.5, "loss_type": "grpo"},
        {"sapo_temperature_neg": 2.0, "loss_type": "sapo"},
        {"temperature": 0.7, "beta": 0.1},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()),
)
def test_a_setting_of_the_loss_does_what_it_does_in_trl(tmp_path: Path, settings: dict[str, Any]) -> None:
    compare(tmp_path, **{**MOVED, **settings})


@pytest.mark.parametrize("target", [3.0, 4.46, 6.0])
def test_the_entropy_controller_sees_one_boundary_per_optimizer_step(tmp_path: Path, target: float) -> None:
    controller = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.02}
    made = compare(tmp_path, **controller, entropy_target=target, gradient_accumulation_steps=3, max_steps=4)
    coefficients = [row["entropy_coef"] for row in made.logs if "entropy_coef" in row]
    assert len(coefficients) == 4 and len(set(coefficients)) > 1


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss", ["dapo", "vespo"])
def test_the_correction_for_another_engines_log_probabilities_is_trls(tmp_path: Path, mode: str, loss: str) -> None:
    """The log-probabilities of some tokens are missing."""
    how = {"mode": mode, "clip_max": 1.5, "clip_min": 0.5}
    correction = {f"vllm_importance_sampling_{name}": value for name, value in how.items()}
    made = compare(tmp_path, corrects=True, loss_type=loss, **correction, **MOVED)
    ratio = "sampling/importance_sampling_ratio"
    assert made.logs[0][f"{ratio}/min"] < 1 and made.logs[0]["sampling/sampling_logp_difference/max"] > 0.5


def test_samples_far_from_the_engines_policy_are_masked_as_in_trl(tmp_path: Path) -> None:
    compare(tmp_path, corrects=True, off_policy_mask_threshold=0.1, **MOVED)
