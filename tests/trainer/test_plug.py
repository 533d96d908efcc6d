"""TRL's own GRPO and RLOO trainers generate with this package's vLLM engines, while Accelerate trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_realloc import plug
from trl_realloc.engines.generation.vllm_support import is_vllm_available


needs_vllm = pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
DIFFERENCE = "sampling/sampling_logp_difference/max"


def arguments(kind: Any, folder: Path, **changes: Any) -> Any:
    return kind(
        output_dir=str(folder),
        **{
            "report_to": [],
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "temperature": 0.9,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            **changes,
        },
    )


def trainer(folder: Path, kind: Any = GRPOTrainer, model: Any = None, **changes: Any) -> Any:
    config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[kind]
    return kind(
        model=model or tiny.policy(),
        reward_funcs=tiny.short,
        args=arguments(config, folder, **changes),
        train_dataset=tiny.prompts(32),
        processing_class=tiny.tokenizer(),
    )


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_grpo_trains_on_samples_of_the_policy_before_and_after_an_update(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    generation = plug(made)
    try:
        made.train()
        steps = [row for row in made.state.log_history if DIFFERENCE in row]
        # TRL scores the samples again with its own forward
        assert [row[DIFFERENCE] < 1e-4 for row in steps] == [True, True]
        assert any(not p.equal(before[name]) for name, p in made.model.named_parameters())
        # the engine has the weights of the second step, and those before are another policy
        assert generation.engine is not None and generation.engine.version == 2
    finally:
        generation.close()
    assert generation.engine.is_dead is False
