"""On the newest TRL, which has no PPO any more, the same class does the same work."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
import trl
from transformers import AutoModelForCausalLM, Trainer

from trl_realloc.trainer.trl_compat import HAS_TRL_PPO


pytestmark = pytest.mark.newest


def test_only_trl_up_to_1_12_has_a_ppo_to_stand_on() -> None:
    major, minor = (int(part) for part in trl.__version__.split(".")[:2])
    has_ppo = (major, minor) <= (1, 12)
    assert has_ppo == HAS_TRL_PPO


def test_it_trains_saves_resumes_and_evaluates(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    given = {"eval_dataset": tiny.prompts(4)}
    whole = tiny.trainer(tmp_path, given=given, **options)
    assert isinstance(whole, Trainer)
    whole.train()
    whole.save_model()
    assert "eval_objective/scores" in whole.evaluate()
    assert len(whole.generate_completions()) == 4
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, whole.policy_model.get_parameter(n)) for n, p in saved.named_parameters())
    resumed = tiny.trainer(tmp_path, given=given, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert tiny.updates(resumed) == tiny.updates(whole)
    assert (tmp_path / "README.md").is_file()


def test_its_config_has_trl_1_12s_fields_and_defaults(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path)
    defaults = {"num_ppo_epochs": 4, "kl_coef": 0.05, "cliprange": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95}
    fields = type(args).__dataclass_fields__
    assert {name: fields[name].default for name in defaults} == defaults
    assert fields["learning_rate"].default == 3e-6 and fields["logging_steps"].default == 10
