"""TRL's example script runs with one import changed: here the same file both ways."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from datasets import DatasetDict
from transformers import AutoModelForCausalLM

from trl_realloc.trainer.trl_compat import HAS_TRL_PPO


OURS = "from trl_realloc import PPOConfig, PPOTrainer"
THEIRS = "from trl.experimental.ppo import PPOConfig, PPOTrainer"


@pytest.mark.oldest
@pytest.mark.parametrize("line", [OURS, *([THEIRS] if HAS_TRL_PPO else [])])
def test_the_example_script_runs_with_either_import(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours in a process that a shell starts; TRL's in this one."""
    tiny.policy().save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    tiny.classifier().save_pretrained(tmp_path / "reward")
    DatasetDict(train=tiny.prompts(32), test=tiny.prompts(8)).save_to_disk(tmp_path / "data")
    text = (Path(__file__).parents[2] / "examples" / "ppo.py").read_text()
    assert OURS in text
    script = tmp_path / "script.py"
    script.write_text(text.replace(OURS, line))
    folders = {"dataset_name": "data", "sft_model_path": "policy", "reward_model_path": "reward", "output_dir": "out"}
    options: dict[str, object] = {name: tmp_path / folder for name, folder in folders.items()}
    options |= {"total_episodes": 16, "per_device_train_batch_size": 8, "response_length": 12, "stop_token": "eos"}
    options |= {"missing_eos_penalty": 1.0, "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    if line == OURS:
        command = [sys.executable, str(script), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
    else:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        tiny.forget_accelerate()
        runpy.run_path(str(script), run_name="__main__")
        tiny.forget_accelerate()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
