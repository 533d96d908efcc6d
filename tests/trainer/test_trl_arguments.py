"""The arguments of TRL's constructors and the settings that they are not shown, in `grpo_trainer`."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import trl
from transformers import Trainer

from trl_realloc import GRPOConfig, GRPOTrainer, PPOTrainer, RLOOConfig, RLOOTrainer
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.grpo_trainer import _hidden, _named
from trl_realloc.trainer.trl_policy_trainers import TRLGRPOTrainer, TRLRLOOTrainer


def test_arguments_by_position_and_by_name_are_those_of_the_installed_trl(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True)
    named = _named(TRLGRPOTrainer, GRPOConfig, ("model", len, args), {"callbacks": [1]})
    assert named == {"model": "model", "reward_funcs": len, "args": args, "callbacks": [1]}


@pytest.mark.parametrize(
    ("trl_class", "config", "name"),
    [(TRLGRPOTrainer, GRPOConfig, "policy-GRPO"), (TRLRLOOTrainer, RLOOConfig, "policy-RLOO")],
)
def test_without_a_configuration_the_default_is_named_as_by_trl(trl_class: type, config: type, name: str) -> None:
    model = tiny.policy()
    model.config.name_or_path = "somebody/policy"
    for given in ("somebody/policy", Path("somebody/policy"), model):
        args = _named(trl_class, config, (given, len), {"args": None})["args"]
        assert type(args) is config and args.output_dir == name


def test_a_configuration_of_trls_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trl_realloc.GRPOConfig, not a trl\.\S+\.GRPOConfig; import GRPOConfig"):
        _named(TRLGRPOTrainer, GRPOConfig, ("model", len, trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)), {})


def test_an_argument_that_the_installed_trl_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match=r"GRPOTrainer: .*mistake"):
        _named(TRLGRPOTrainer, GRPOConfig, ("model", len), {"mistake": 1})


@pytest.mark.parametrize("kind", [PPOTrainer, GRPOTrainer, RLOOTrainer])
def test_training_takes_the_arguments_of_trainer_and_no_other(kind: type) -> None:
    """A misspelt `resume_from_checkpoint` must not begin a new run."""
    ours, theirs = (list(inspect.signature(trainer.train).parameters) for trainer in (kind, Trainer))
    assert ours == theirs


def test_settings_are_hidden_for_a_while_and_unknown_ones_left_alone() -> None:
    args = SimpleNamespace(beta=0.1, use_vllm=None)
    with pytest.raises(RuntimeError), _hidden(args, beta=0.0, use_vllm=False, sync_ref_model=False):
        assert vars(args) == {"beta": 0.0, "use_vllm": False}
        raise RuntimeError
    assert vars(args) == {"beta": 0.1, "use_vllm": None}
