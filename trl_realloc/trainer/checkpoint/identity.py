"""Compares a run with a checkpoint that it is to resume from: algorithm, models, adapters, optimizer, data, batch size.

Pure functions. Checkpoints are read in `resuming`.
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
    """The optimizer, batch size, data and order of the data of a run.

    Args:
        optimizer: name of the optimizers' class.
        batch_size: episodes of one update.
        rows: number of prompts; `None` if the data set does not tell.
        data: checksum of up to 1,000 prompts, spread evenly; `None` if they cannot be read twice.
        order: the settings by which the prompts are ordered and repeated, by name.
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
    for ids in [dataset[at]["input_ids"] for at in _sampled_rows(dataset)]:
        crc = zlib.crc32(np.asarray(ids, dtype=np.int64).tobytes(), crc)
    return crc


def prompts_checksum(dataset: Dataset) -> int:
    """CRC-32 of the column `prompt` of up to `SAMPLED_ROWS` rows of a dataset: texts or conversations."""
    crc = 0
    for prompt in [dataset[at]["prompt"] for at in _sampled_rows(dataset)]:
        crc = zlib.crc32(json.dumps(prompt, sort_keys=True, default=str).encode(), crc)
    return crc


def _sampled_rows(dataset: Dataset) -> list[int]:
    return sorted(set(np.linspace(0, len(dataset) - 1, min(SAMPLED_ROWS, len(dataset)), dtype=int).tolist()))


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters by name. The shapes are those of whole parameters under ZeRO-3 too."""
    return {name: full_shape(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


def algorithm_difference(saved: Collection[str], current: Collection[str]) -> str | None:
    """Describe the difference between the trained roles of a checkpoint and those of this run; `None` if they are the
    same. Only PPO trains a critic."""
    if set(saved) == set(current):
        return None
    known = {
        ("critic", "policy"): "policy and critic, as PPOTrainer does",
        ("policy",): "the policy alone, as GRPOTrainer and RLOOTrainer do",
    }
    of_saved, of_current = (known.get(tuple(sorted(roles)), " and ".join(roles)) for roles in (saved, current))
    return f"it is of a run that trains {of_saved}; this run trains {of_current}"


def optimizer_differences(saved: Mapping[str, object], current: Identity) -> list[str]:
    """Compare the optimizer of a checkpoint's run with this run's. Returns the differences as phrases for a message.

    Args:
        saved: an `Identity` as a dict. Unknown values may be missing.
    """
    problems = []
    if saved.get("optimizer", current.optimizer) != current.optimizer:
        problems.append(f"its optimizer is {saved['optimizer']}, this run's is {current.optimizer}")
    return problems


def data_differences(saved: Mapping[str, Any], current: Identity) -> list[str]:
    """Compare the data, their order and the batch size of a checkpoint's run with this run's. Returns the differences
    as phrases for a message. With any of them the saved position in the data is not valid for this run: prompts would
    be trained on twice or never.

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
    """Describe the difference between a role's trained parameters in a checkpoint and in this run; `None` if their
    names and shapes are the same."""
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
