"""Compares a run with the checkpoint it is to resume from: algorithm, models, adapters, optimizer, data, batch size.

Pure functions. `resuming` reads checkpoints.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from ...engines.training.deepspeed_compat import full_shape


if TYPE_CHECKING:
    from datasets import Dataset


SAMPLED_ROWS = 1000

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Identity:
    """The optimizer, batch size, data and data order of a run.

    Args:
        optimizer: class name of the optimizers.
        batch_size: episodes of one update.
        rows: number of prompts; `None` if unknown.
        data: checksum of up to 1,000 prompts, spread evenly; `None` if they cannot be read twice.
        order: settings that order and repeat the prompts, by name.
    """

    optimizer: str
    batch_size: int
    rows: int | None
    data: int | None
    order: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def data_checksum(dataset: Dataset) -> int:
    """CRC-32 of the token ids of up to `SAMPLED_ROWS` rows of a tokenized dataset."""
    crc = 0
    for ids in [dataset[index]["input_ids"] for index in _sampled_rows(dataset)]:
        crc = zlib.crc32(np.asarray(ids, dtype=np.int64).tobytes(), crc)
    return crc


def prompts_checksum(dataset: Dataset) -> int:
    """CRC-32 of the column `prompt` of up to `SAMPLED_ROWS` rows of a dataset: texts or conversations."""
    crc = 0
    for prompt in [dataset[index]["prompt"] for index in _sampled_rows(dataset)]:
        crc = zlib.crc32(json.dumps(prompt, sort_keys=True, default=str).encode(), crc)
    return crc


def _sampled_rows(dataset: Dataset) -> list[int]:
    return sorted(set(np.linspace(0, len(dataset) - 1, min(SAMPLED_ROWS, len(dataset)), dtype=int).tolist()))


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters by name; whole shapes under ZeRO-3 too."""
    return {name: full_shape(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


def algorithm_difference(saved: Collection[str], current: Collection[str]) -> str | None:
    """The difference between the trained roles of a checkpoint and of this run, in words; `None` if they are the same.
    Only PPO trains a critic."""
    if set(saved) == set(current):
        return None
    algorithms = {
        ("critic", "policy"): "policy and critic, as PPOTrainer does",
        ("policy",): "the policy alone, as GRPOTrainer and RLOOTrainer do",
    }
    of_saved, of_current = (algorithms.get(tuple(sorted(roles)), " and ".join(roles)) for roles in (saved, current))
    return f"it is of a run that trains {of_saved}; this run trains {of_current}"


def optimizer_differences(saved: Mapping[str, object], current: Identity) -> list[str]:
    """The differences between the optimizers of a checkpoint's run and of this run, as phrases for a message.

    Args:
        saved: an `Identity` as a dict. Unknown values may be missing.
    """
    problems = []
    if saved.get("optimizer", current.optimizer) != current.optimizer:
        problems.append(f"its optimizer is {saved['optimizer']}, this run's is {current.optimizer}")
    return problems


def data_differences(saved: Mapping[str, Any], current: Identity) -> list[str]:
    """The differences in data, data order and batch size between a checkpoint's run and this run, as phrases for a
    message. With any of them the saved position in the data is not valid here: prompts would be trained on twice or
    never.

    Args:
        saved: an `Identity` as a dict. Unknown values may be missing.
    """
    problems = []
    if saved.get("batch_size", current.batch_size) != current.batch_size:
        problems.append(f"its updates have {saved['batch_size']} episodes, this run's {current.batch_size}")
    order = saved.get("order", {})
    problems += [
        f"its {name} is {order[name]}, this run's {value}"
        for name, value in current.order.items()
        if order.get(name, value) != value
    ]
    if None in (current.rows, current.data):
        return problems
    if saved.get("rows", current.rows) != current.rows:
        problems.append(f"its data set has {saved['rows']} prompts, this run's {current.rows}")
    elif saved.get("data", current.data) != current.data:
        problems.append(f"its data set has {current.rows} prompts as this run's, but others")
    return problems


def model_difference(role: str, saved: Shapes, current: Shapes) -> str | None:
    """The difference between a role's trained parameters in a checkpoint and in this run, in words; `None` if names and
    shapes are the same."""
    missing, surplus = sorted(set(current) - set(saved)), sorted(set(saved) - set(current))
    if missing or surplus:
        differences = [f"its {role} has {len(saved)} trained parameters, this run's {len(current)}"]
        differences += [f"it lacks {missing[0]}" + _more(missing)] if missing else []
        differences += [f"this run has no {surplus[0]}" + _more(surplus)] if surplus else []
        adapted = {"lora_" in "".join(names) for names in (saved, current)}
        if len(adapted) == 2:
            differences.append("one of them trains LoRA adapters, the other does not")
        return "; ".join(differences)
    for name, shape in current.items():
        if tuple(saved[name]) != tuple(shape):
            return f"its {role}'s {name} has the shape {tuple(saved[name])}, this run's {tuple(shape)}"
    return None


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} others" if len(names) > 1 else ""
