"""What a run has to have in common with the checkpoint that it goes on from: models, adapters, optimizer, data, batch.

Pure: decides, and reads no checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn


SAMPLED_ROWS = 1000

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Identity:
    """Args:
    optimizer: the class of the optimizers.
    batch_size: episodes of an update.
    rows, data: how many prompts there are, and a checksum of up to 1,000 of them, spread evenly.
    """

    optimizer: str
    batch_size: int
    rows: int
    data: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def data_checksum(dataset: Any) -> int:
    """CRC-32 of the token ids of up to `SAMPLED_ROWS` rows of a tokenized dataset."""
    rows = sorted(set(np.linspace(0, len(dataset) - 1, min(SAMPLED_ROWS, len(dataset)), dtype=int).tolist()))
    crc = 0
    for ids in [dataset[at]["input_ids"] for at in rows]:
        crc = zlib.crc32(np.asarray(ids, dtype=np.int64).tobytes(), crc)
    return crc


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters that are trained, by the module's names; whole, where ZeRO-3 has partitioned them."""
    return {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def other_run(saved: Mapping[str, Any], here: Identity) -> list[str]:
    """What a checkpoint's run has other than this one, a sentence each.

    Args:
        saved: an `Identity` as a dict, or what is known of it.
    """
    problems = []
    if saved.get("optimizer", here.optimizer) != here.optimizer:
        problems.append(f"its optimizer is {saved['optimizer']}, this run's is {here.optimizer}")
    return problems


def other_data(saved: Mapping[str, Any], here: Identity) -> list[str]:
    """What a checkpoint's run has other data for than this one: then the place in the data means something else."""
    problems = []
    if saved.get("batch_size", here.batch_size) != here.batch_size:
        problems.append(f"its updates have {saved['batch_size']} episodes, this run's {here.batch_size}")
    if saved.get("rows", here.rows) != here.rows:
        problems.append(f"its data set has {saved['rows']} prompts, this run's {here.rows}")
    elif saved.get("data", here.data) != here.data:
        problems.append(f"its data set has {here.rows} prompts as this run's, but others")
    return problems


def other_model(role: str, saved: Shapes, here: Shapes) -> str | None:
    """How a role's trained parameters in a checkpoint differ from those that are to be trained, or `None`."""
    missing, surplus = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or surplus:
        said = [f"its {role} has {len(saved)} trained parameters, this run's {len(here)}"]
        said += [f"it lacks {missing[0]}" + _more(missing)] if missing else []
        said += [f"this run has no {surplus[0]}" + _more(surplus)] if surplus else []
        adapted = {"lora_" in "".join(names) for names in (saved, here)}
        if len(adapted) == 2:
            said.append("one of them trains LoRA adapters, the other does not")
        return "; ".join(said)
    for name, shape in here.items():
        if tuple(saved[name]) != tuple(shape):
            return f"its {role}'s {name} has the shape {tuple(saved[name])}, this run's {tuple(shape)}"
    return None


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} others" if len(names) > 1 else ""
