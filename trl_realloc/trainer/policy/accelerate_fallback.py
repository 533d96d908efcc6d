"""Support for GRPO and RLOO runs that the plan's engines cannot train: TRL trains and generates with its own settings.

Which runs these are is in `trainable`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ...engines.model_configs import CustomCodeError, read_config
from ...plan.presets import AUTO
from ..accelerate_plugin import ReallocationPlugin
from ..checkpoint import STATE_FOLDER, CheckpointError
from ..checkpoint.resuming import ResumeSetting, read_resume_setting
from ..grpo_config import PolicyConfig, RLOOConfig
from ..trl_compat import TRLGRPOConfig, TRLRLOOConfig


logger = logging.get_logger(__name__)


def follow_trl(args: PolicyConfig, plugin: ReallocationPlugin) -> None:
    """Reset settings whose default differs from TRL's to TRL's default, and log the settings without effect that TRL
    does not have.

    Args:
        plugin: settings of the configuration.
    """
    of_trl = {
        field.name: field.default for field in fields(TRLRLOOConfig if isinstance(args, RLOOConfig) else TRLGRPOConfig)
    }
    for name in ("use_vllm", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"):
        if getattr(args, name) is None:
            setattr(args, name, of_trl[name])
    added_fields = [field for field in fields(args) if field.name not in of_trl]
    unused = [field.name for field in added_fields if getattr(args, field.name) != field.default]
    if plugin.plan != AUTO and "plan" not in unused:
        unused = ["plan", *unused]
    if unused and PartialState().is_main_process:
        logger.warning(
            f"{', '.join(sorted(unused))} {'has' if len(unused) == 1 else 'have'} no effect where Accelerate trains."
        )


def checkpoint_of_trainer(setting: ResumeSetting, output_dir: str) -> str | bool | None:
    """The value of `resume_from_checkpoint` for the `train` method of Transformers' Trainer.

    Args:
        setting: the argument of `PlannedPolicyTrainer.train`, or the setting of a configuration.
    """
    request = read_resume_setting(setting)
    if request == "auto":
        return get_last_checkpoint(output_dir)
    return request if isinstance(request, bool | None) else str(request)


def check_resumable(folder: str | bool | None, output_dir: str) -> None:
    """Refuse a checkpoint whose optimizer Accelerate cannot read: Accelerate would silently start with a new optimizer.

    Args:
        folder: result of `checkpoint_of_trainer`.

    Raises:
        CheckpointError: the plan's engines have written it.
    """
    newest = get_last_checkpoint(output_dir) if folder is True else folder
    if not newest or not isinstance(newest, str):
        return
    if (Path(newest) / STATE_FOLDER).exists() and not (Path(newest) / "optimizer.pt").exists():
        raise CheckpointError(
            f"cannot resume from {newest}: the plan's engines have trained its run, and in this run Accelerate trains, "
            f"which does not read {STATE_FOLDER}. Resume it with the settings that it was run with; or begin a run "
            f"with its policy, model={newest!r}, in another output_dir."
        )


def config_or_model(args: TrainingArguments, model: PreTrainedModel) -> Any:
    """A loaded model, or the config of a model name, including one with custom code if the user trusts it.

    Raises:
        ModelError: there is no such model, or it has code of its own and the user has not said that it may run.
    """
    if not isinstance(model, str):
        return model
    if args.trust_remote_code:
        return AutoConfig.from_pretrained(model, trust_remote_code=True)
    try:
        return read_config(model, "model")
    except CustomCodeError:
        raise CustomCodeError(
            f"model: {model!r} has custom code in its repository, which does not run unless trust_remote_code is set; "
            f"set it if you trust that code. Accelerate then trains the model, as in TRL."
        ) from None
