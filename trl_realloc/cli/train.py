"""Trains from a recipe, in each process of a job. The recipe names models, data set, rewards and tools.

`trl-realloc ppo | grpo | rloo` starts it. With another launcher:
accelerate launch -m trl_realloc.cli.train grpo --config recipe.yaml
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trl.rewards
from datasets import load_dataset, load_from_disk
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from ..common.errors import shown, suggest
from ..planner.recipe.defaults import init_kwargs, quantization_of
from ..trainer.grpo_trainer import GRPOTrainer, RLOOTrainer
from ..trainer.ppo_config import PPOConfig
from ..trainer.ppo_trainer import PPOTrainer
from .recipe_parser import CONFIGS, RecipeError, parse_recipe, run


# Keys of `model_init_kwargs`, and the fields of `ModelConfig` that set them when a policy is loaded by name.
_LOADING = {"revision": "model_revision", "attn_implementation": "attn_implementation", "dtype": "dtype"}
OVERLONG = "get_soft_overlong_punishment"  # a factory of a reward in TRL; the lengths are those of TRL's script


@dataclass
class RunArguments(ScriptArguments):
    """
    Keys of a recipe besides the algorithm's configuration and TRL's `ModelConfig`. TRL's scripts have the first two. An
    import path is searched in the working folder, in the recipe's folder and in its parent.

    Parameters:
        reward_model_name_or_path (`str`, *optional*):
            A reward model. Same as PPO's `reward_model_path`.
        reward_funcs (`list[str]`, *optional*):
            Reward functions: import paths like `rewards.brief`, or names of `trl.rewards`.
        value_model_path (`str`, *optional*):
            PPO's critic. Default: the reward model.
        dataset_function (`str`, *optional*):
            Import path of a function that returns the data set, in place of `dataset_name`.
        tools (`list[str]`, *optional*):
            Import paths of functions that GRPO's policy may call.
    """

    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "A reward model."})
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Import paths of reward functions."})
    value_model_path: str | None = field(default=None, metadata={"help": "PPO's critic; by default the reward model."})
    dataset_function: str | None = field(default=None, metadata={"help": "Import path of a function for the data set."})
    tools: list[str] | None = field(default=None, metadata={"help": "Import paths of functions the policy may call."})


def main(arguments: Sequence[str]) -> None:
    """Train, and save the models to `output_dir`.

    Args:
        arguments: the algorithm, `--config` with the recipe, and settings that take precedence over it.

    Raises:
        RecipeError: the recipe cannot be read, or does not name what a run needs.
        PlanError: see `quantization_of`.
    """
    algorithm, *words = arguments
    script, args, model = parse_recipe((RunArguments, CONFIGS[algorithm], ModelConfig), words)
    folder = Path(words[words.index("--config") + 1]).resolve().parent
    sys.path += [str(folder), str(folder.parent)]
    quantization_of({**vars(model), "model_init_kwargs": getattr(args, "model_init_kwargs", None)})  # or refuses
    rewards = [_reward(name) for name in script.reward_funcs or ()]
    train_dataset, eval_dataset = _data(script)
    common: dict[str, Any] = {"args": args, "train_dataset": train_dataset, "peft_config": get_peft_config(model)}
    common["quantization_config"] = get_quantization_config(model)
    trainer: Any
    if algorithm == "ppo":
        trainer = _ppo_trainer(script, model, rewards, eval_dataset=eval_dataset, **common)
    else:
        models = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
        if not (rewards := [*models, *rewards]):
            raise RecipeError("the recipe names no reward: set reward_funcs or reward_model_name_or_path.")
        args.model_init_kwargs = {**_loading(model), **init_kwargs(args.model_init_kwargs)}
        if script.tools and algorithm == "rloo":
            raise RecipeError("tools are for GRPO; TRL's RLOO has none.")
        if script.tools:
            common["tools"] = [imported("tools", name) for name in script.tools]
        trainer = (GRPOTrainer if algorithm == "grpo" else RLOOTrainer)(
            model=model.model_name_or_path,
            reward_funcs=rewards,
            eval_dataset=eval_dataset if args.eval_strategy != "no" else None,
            **common,
        )
    trainer.train()
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)


def _ppo_trainer(script: RunArguments, model: ModelConfig, rewards: list[Any], *, args: PPOConfig, **rest: Any) -> Any:
    if further := sorted(_loading(model)):
        raise RecipeError(f"{' and '.join(further)}: PPO loads models by their own settings; load them in a script.")
    policy = model.model_name_or_path or args.sft_model_path
    path = script.reward_model_name_or_path or args.reward_model_path
    is_given = path != next(field.default for field in dataclasses.fields(args) if field.name == "reward_model_path")
    if is_given or not rewards:
        rewards = [path, *rewards]
    if not is_given and script.value_model_path is None:
        raise RecipeError("the recipe names no critic: set value_model_path, or reward_model_path for both.")
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,  # the policy before training
        reward_model=rewards if len(rewards) > 1 else rewards[0],
        value_model=script.value_model_path or path,
        **rest,
    )


def _loading(model: ModelConfig) -> dict[str, Any]:
    """The entries of `model_init_kwargs` that a recipe sets through `ModelConfig`."""
    defaults = {field.name: field.default for field in dataclasses.fields(model)}
    values = {key: getattr(model, name) for key, name in _LOADING.items()}
    return {key: value for key, value in values.items() if value != defaults[_LOADING[key]]}


def _data(script: RunArguments) -> tuple[Any, Any]:
    """The training rows and, if the data set has that split, the evaluation rows."""
    if script.dataset_function is not None:
        dataset = imported("dataset_function", script.dataset_function)()
    elif script.dataset_name is None:
        raise RecipeError("the recipe names no data set: set dataset_name, or dataset_function.")
    elif any(Path(script.dataset_name, name).is_file() for name in ("dataset_dict.json", "state.json")):
        dataset = load_from_disk(script.dataset_name)  # saved by `save_to_disk`
    else:
        dataset = load_dataset(script.dataset_name, script.dataset_config, streaming=script.dataset_streaming)
    if not isinstance(dataset, Mapping):
        return dataset, None
    if (split := script.dataset_train_split) not in dataset:
        raise RecipeError(f"the data set has no split {shown(split)} (dataset_train_split); {suggest(split, dataset)}")
    return dataset[split], dataset.get(script.dataset_test_split)


def _reward(name: str) -> Callable[..., Any]:
    if name == OVERLONG:
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    return imported("reward_funcs", name if "." in name else f"trl.rewards.{name}")


def imported(key: str, path: str) -> Any:
    """The object at an import path, such as `rewards.brief`.

    Args:
        key: setting that names it, for messages.

    Raises:
        RecipeError: there is no such module, or it has nothing of that name.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a missing import of the user's module
        raise RecipeError(f"{key}: there is no module {shown(error.name)} for {shown(path)}.") from None
    except (AttributeError, ValueError):
        raise RecipeError(f"{key}: there is no {shown(path)}; an import path is like rewards.brief.") from None


if __name__ == "__main__":
    run(partial(main, sys.argv[1:]))
