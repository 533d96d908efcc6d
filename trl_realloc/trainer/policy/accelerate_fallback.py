"""A trainer of GRPO or RLOO whose training the plan's engines cannot do: Accelerate trains as in TRL, and only the
generation is planned.

Which runs these are is in `trainable`, the generation in `planned_generation`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ...engines.generation.vllm_support import is_vllm_available
from ...engines.model_configs import CustomCodeError, ModelError, read_config
from ..accelerate_plugin import ReallocationPlugin
from ..checkpoint import STATE_FOLDER, CheckpointError
from ..checkpoint.resuming import ResumeSetting, read_resume_setting
from ..checks.config_checks import ConfigError
from ..grpo_config import RLOOConfig
from .plug import plug


logger = logging.get_logger(__name__)


def plan_generation(trainer: Trainer, plugin: ReallocationPlugin) -> None:
    """Generate by the plan while Accelerate trains, if vLLM is there and can serve the model. Otherwise TRL's
    generation by Transformers is used, unless vLLM was asked for.

    Args:
        plugin: with what the trainer's configuration sets.
    """
    args = trainer.args
    if args.score_groups_early and trainer.accelerator.is_main_process:
        logger.warning("score_groups_early: where Accelerate trains, reward functions are called on the whole batch.")
    for name in ("async_save", "skip_nonfinite_updates"):
        if getattr(args, name) and trainer.accelerator.is_main_process:
            logger.warning(f"{name} has no effect where Accelerate trains.")
    if (
        isinstance(args, RLOOConfig)
        and args.vllm_importance_sampling_correction
        and trainer.accelerator.is_main_process
    ):
        logger.warning(
            "vllm_importance_sampling_correction: where Accelerate trains, RLOO's loss is TRL's, without it."
        )
    plan = None if plugin.plan == "auto" else plugin.plan
    wants = None if plugin.generation_engine is None else plugin.generation_engine == "vllm"
    unplanned = "" if plan is None else "plan: it is not used, for "
    unplanned += "the model generates by Transformers, as TRL's does"
    if wants is False or not (wants or is_vllm_available()):
        if plan is not None and trainer.accelerator.is_main_process:
            asked = "use_vllm is false" if args.use_vllm is False else "the plugin's generation_engine says so"
            reason = "vLLM is not installed" if wants is None else asked
            logger.warning(f"{unplanned}: {reason}.")
        return
    try:
        plug(trainer, plan=plan, heartbeat_timeout=plugin.heartbeat_timeout)
        if trainer.accelerator.is_main_process:
            logger.warning("The plan is that of the generation alone.")
    except (ConfigError, ModelError) as error:
        if wants:  # which has called `plug`, not the user
            raise type(error)(str(error).replace("leave plug out", "leave use_vllm out")) from None
        if trainer.accelerator.is_main_process:
            logger.warning(f"{unplanned}: {str(error).partition('; ')[0].removesuffix('.')}.")


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
    """Refuse a checkpoint whose optimizer Accelerate cannot read. It would silently begin with a new optimizer.

    Args:
        folder: as `checkpoint_of_trainer` returns it.

    Raises:
        CheckpointError: the plan's engines have written it.
    """
    found = get_last_checkpoint(output_dir) if folder is True else folder
    if not found or not isinstance(found, str):
        return
    if (Path(found) / STATE_FOLDER).exists() and not (Path(found) / "optimizer.pt").exists():
        raise CheckpointError(
            f"cannot resume from {found}: the plan's engines have trained its run, and in this run Accelerate trains, "
            f"which does not read {STATE_FOLDER}. Resume it with the settings that it was run with; or begin a run "
            f"with its policy, model={found!r}, in another output_dir."
        )


def config_or_model(args: TrainingArguments, model: PreTrainedModel) -> Any:
    """A loaded model, or the config of one by name, also of one with code of its own if the user trusts it.

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
