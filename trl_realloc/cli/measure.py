"""The script that `trl-realloc profile` launches to measure the models of a recipe.

It runs with as many processes as the training run will have. The measurements are in `profiling`.

accelerate launch --num_processes N -m trl_realloc.cli.measure RECIPE OUTPUT PROMPT_TOKENS [thorough]
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import AutoConfig, PretrainedConfig

from ..engines.device import is_accelerator
from ..engines.generation.vllm_support import why_not_served
from ..plan.dataflow import Role
from ..planner.recipe.defaults import trained_dtype
from ..planner.recipe.recipe import read_recipe, read_recipe_settings
from ..profiling.job_models import JobModels
from ..profiling.profile_cache import cached_profile
from ..runtime.launch.hosts import all_processes, cluster_of
from ..trainer.accelerate_plugin import ReallocationPlugin
from ..trainer.checks.config_checks import by_transformers
from ..trainer.grpo_config import PolicyConfig
from ..trainer.plan_settings import use_one_device
from ..trainer.ppo_config import PPOConfig
from ..trainer.run.job_builder import compute_dtype, engine_options, make_job
from .recipe_parser import CONFIGS, SENTENCES, RecipeError, adapters_of, run


def main(path: str, output: str, prompt_tokens: float, thorough: bool) -> None:
    recipe = read_recipe(path, prompt_tokens)
    settings = read_recipe_settings(recipe.path)
    kind = CONFIGS[recipe.algorithm]
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    arguments = {key: value for key, value in settings.items() if key in names}
    with tempfile.TemporaryDirectory() as folder:
        args = trainer_config(kind, {**arguments, "output_dir": folder, "report_to": "none"}, path)
    use_one_device(args)
    world = PartialState()
    configs: dict[Role, list[PretrainedConfig]]
    configs = {role: [AutoConfig.from_pretrained(path)] for role, path in recipe.folders.items()}
    for role in configs.keys() & {Role.CRITIC, Role.REWARD}:
        configs[role][0].num_labels = 1
    if (dtype := trained_dtype(recipe.settings)) is not None:
        for role in configs.keys() & {Role.ACTOR, Role.CRITIC}:
            configs[role][0].dtype = getattr(torch, dtype)
    problem = why_not_served(configs[Role.ACTOR][0], on_cpu=not is_accelerator(args.device))
    if recipe.engine == "vllm" and problem is not None:
        raise RecipeError(f"{path} cannot be measured on this machine: {problem}; {by_transformers(args)}.")
    cluster, mixed = cluster_of(all_processes()), compute_dtype(args)
    pad = configs[Role.ACTOR][0].pad_token_id
    response = args.response_length if isinstance(args, PPOConfig) else args.max_completion_length
    context = round(recipe.prompt_tokens + response)
    options = engine_options(args, ReallocationPlugin(), context_length=context, pad_token_id=0 if pad is None else pad)
    # `output_dir` is deleted, and nothing would remove its logs
    options = dataclasses.replace(options, log_folder=None)
    models = JobModels.of_run(
        configs,
        recipe.graph,
        str(recipe.folders[Role.ACTOR]),
        peft_config=adapters_of(settings),
        processing_class=None,
        mixed=mixed,
        generation_engine=recipe.engine,
    )
    work = recipe.workload(cluster)
    job = make_job(args, cluster, world.process_index, recipe.engine, models, recipe.graph, work, options)
    profile, _ = cached_profile(job, thorough=thorough)
    if job.rank == 0:
        profile.save(output)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def trainer_config(
    kind: Callable[..., PPOConfig | PolicyConfig], arguments: dict[str, Any], path: str
) -> PPOConfig | PolicyConfig:
    """The recipe's settings for a run on this machine.

    Raises:
        RecipeError: Transformers refuses them on this machine, such as bf16 without a GPU.
    """
    try:
        return kind(**arguments)
    except SENTENCES:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise RecipeError(
            f"{path} cannot be run on this machine, so it cannot be measured here: {error} To plan it for other "
            f"devices by their specification, name them: --cluster h100:8 or --cluster h100:16x8 (16 hosts of 8)."
        ) from error


if __name__ == "__main__":
    run(lambda: main(sys.argv[1], sys.argv[2], float(sys.argv[3]), thorough="thorough" in sys.argv[4:]))
