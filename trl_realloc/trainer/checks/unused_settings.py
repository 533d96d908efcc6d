"""`unused_settings`: which settings have an effect in Transformers' or TRL's trainers and none where a plan's engines
train, so that the log names them.

They change how fast a run is or what it logs, not what it learns, or have no effect in TRL's PPO either. Other settings
that change what is learned are refused (`config_checks`) or leave the training to Accelerate (`trainable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig


_EVALUATION = "evaluations compute in the dtype of the training"
_NO_DDP = "no model is wrapped in DistributedDataParallel"
_OF_ALL: Mapping[str, str] = {
    "torch_compile": "ragged batches change the shape of every forward",
    "bf16_full_eval": _EVALUATION,
    "fp16_full_eval": _EVALUATION,
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "save_on_each_node": "each host writes files of a checkpoint where the hosts have separate disks",
    "cache_implementation": "the engines keep keys and values in their own way",
}
_LOADER = "prompts are tokenized before the training, and no process loads them"
_ORDER = "the order of the prompts is drawn from the seed"
_OF_PPO: Mapping[str, str] = {
    "auto_find_batch_size": "a batch that has run out of memory is not repeated with a smaller one; plan: auto fits",
    "neftune_noise_alpha": "no noise is added to embeddings, in TRL's PPO neither",
    "use_liger_kernel": "PPO's losses are computed outside of the models",
    "torch_empty_cache_steps": "memory is given back where another engine needs it",
    "include_num_input_tokens_seen": "episode and tokens/s are logged",
    "debug": "numbers that are not finite are refused with the sample's name",
    "accelerator_config": "every process reads the whole batch, and the plan distributes its samples",
    "dataloader_num_workers": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "train_sampling_strategy": _ORDER,
}


def unused_settings(args: Any) -> Iterator[str]:
    """A sentence for each setting of a run that a plan's engines train which is not at its default and has no effect.

    Args:
        args: a `PPOConfig`, `GRPOConfig` or `RLOOConfig`.
    """
    is_ppo = hasattr(args, "num_ppo_epochs")
    defaults = {field.name: field.default for field in fields(args)} | {"accelerator_config": AcceleratorConfig()}
    for name, reason in {**_OF_ALL, **(_OF_PPO if is_ppo else {})}.items():
        value = getattr(args, name, None)
        if value and value not in (defaults.get(name), "no"):
            yield f"{name} has no effect: {reason}."
