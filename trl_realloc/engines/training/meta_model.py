"""Builds a checkpoint's model on the meta device with Transformers' own loading (`open_model`), and notes the files
that its parameters are read from (`checkpoint_files`). `engines/models` loads models whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ...common.notices import notice
from ...realloc.layout import whole
from .. import transformers_compat as compat
from .checkpoint_files import CheckpointFiles, opened
from .weight_source import set_source


class CannotReadParts(Exception):
    """A checkpoint whose parameters can only be read all at once. The message says why."""


def open_model(kind: Any, name: str, **kwargs: object) -> PreTrainedModel:
    """A checkpoint's model on the meta device, with the files that `fill` reads. Parameters that the checkpoint lacks
    (the score layer of a new critic) are in memory, initialized by the module from torch's generator like in
    `from_pretrained`; buffers are in memory too.

    Args:
        kind: a Transformers `AutoModelFor…`.
        name: name or path of the model.
        kwargs: arguments of `from_pretrained`.

    Raises:
        CannotReadParts: `from_pretrained` can load the checkpoint, but only whole. Torch's generator is unchanged then.
        Exception: any error of `from_pretrained`, such as an `OSError` for a missing file or a `RuntimeError` for a
            tensor of another shape. Loading the checkpoint whole would raise it too.
    """
    if reason := _why_whole(name):
        raise CannotReadParts(reason)
    random_state = torch.get_rng_state()
    try:
        model, headers = _build(kind, name, kwargs)
        source = _checkpoint_files(model, headers)
        _untie_different(model, source)
        _complete(model, source)
    except CannotReadParts:
        torch.set_rng_state(random_state)
        raise
    except (compat.UnknownRelease, NotImplementedError) as error:
        torch.set_rng_state(random_state)
        raise CannotReadParts(_first_line(error)) from error
    set_source(model, source)
    return model


def _why_whole(name: str) -> str | None:
    """The reason why a checkpoint cannot be read in parts, if its files show one."""
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return "its checkpoint has no safetensors files"
    if (folder / "adapter_config.json").exists():
        return "its checkpoint has adapters"
    settings, _ = PretrainedConfig.get_config_dict(name)
    return "its checkpoint is quantized" if settings.get("quantization_config") else None


def _build(kind: Any, name: str, kwargs: Mapping[str, Any]) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model on the meta device, and the files that Transformers has opened.

    Raises:
        CannotReadParts: the model's constructor needs values that the meta device does not have.
    """
    try:
        with compat.headers_only() as headers:
            return kind.from_pretrained(name, device_map={"": "meta"}, **kwargs), headers
    except RuntimeError as error:
        # torch's messages: "Tensor.item() cannot be called on meta tensors", "Cannot copy out of meta tensor"
        if "meta tensor" not in str(error):
            raise
        raise CannotReadParts(f"it cannot be built without weights ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _checkpoint_files(model: PreTrainedModel, files: Sequence[str] | Mapping[str, object]) -> CheckpointFiles:
    """The files of a model that Transformers has loaded on the meta device, with the names of the tensors of each
    parameter.

    Raises:
        CannotReadParts: the names differ from those that Transformers has loaded.
    """
    if not files:
        raise CannotReadParts("its checkpoint has no safetensors files")
    if compat.loaded_adapters(model):
        raise CannotReadParts("its checkpoint has adapters")
    expected = model.state_dict()
    conversions: dict[str, compat.Conversion] = {}
    with opened(list(files)) as handles:
        names = compat.names_in_checkpoint(model, handles)
        structure = copy.deepcopy(model) if names.conversions else None
        for conversion in names.conversions:
            header = lambda key: compat.HeaderFile(handles[key]).get_slice(key)[...]  # noqa: E731
            assert structure is not None
            computed = conversion.compute(header, structure)
            if any(value.shape != expected[target].shape for target, value in computed.items() if target in expected):
                raise CannotReadParts(f"{conversion.first} is computed in a way that this package does not support")
            conversions |= {target: conversion for target in computed if target in expected}
    readable = names.keys.keys() | conversions.keys()
    named = dict(model.named_parameters(remove_duplicate=False))
    loaded = {name for name, parameter in named.items() if compat.has_values(parameter)}
    tied = compat.tied_names(model)
    if lost := sorted(loaded - readable - tied.keys() - set(tied.values())):
        raise CannotReadParts(f"Transformers reads {lost[0]} in a way that this package does not support")
    read_as = {parameter: name for name, parameter in named.items() if name in readable}
    aliases = {name: read_as[p] for name, p in named.items() if name not in readable and p in read_as}
    return CheckpointFiles(list(files), names.keys, aliases, conversions, structure)


# --- a checkpoint that contradicts its config -------------------------------------------------------------------------


def has_own_head(name: str, config: PretrainedConfig) -> bool:
    """True if a checkpoint has an output head that differs from the embedding that its config ties it to
    (`tie_word_embeddings`). Transformers then loads both, but code that has only the config, such as a vLLM engine or
    a new plan's empty model, would tie them.

    Looks only at files of a local folder: a model of the hub may not be downloaded yet.
    """
    text = config.get_text_config()
    files = sorted(map(str, Path(name).glob("*.safetensors")))
    if not files or not getattr(text, "tie_word_embeddings", False):
        return False
    shape = (getattr(text, "vocab_size", None), getattr(text, "hidden_size", None))
    with opened(files) as handles:
        outside_layers = [key for key in handles if not any(part.isdigit() for part in key.split("."))]
        keys = [key for key in outside_layers if tuple(handles[key].get_slice(key).get_shape()) == shape]
        if len(keys) != 2:
            return False
        first, second = (handles[key].get_slice(key) for key in keys)
        rows = _rows_at_once(first[:1])
        return any(
            not torch.equal(first[start : start + rows], second[start : start + rows])
            for start in range(0, int(first.get_shape()[0]), rows)
        )


def untie(config: PretrainedConfig) -> None:
    """Make a config say that head and embedding are two parameters, in place."""
    for part in (config, config.get_text_config()):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False


def is_untied(model: PreTrainedModel) -> bool:
    """True if a model in memory has a separate head although its config ties it to the embedding. Adapters are
    ignored."""
    ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    ends = map(_without_adapters, (model.get_input_embeddings(), model.get_output_embeddings()) if ties else ())
    weights = [end.weight for end in ends if isinstance(end, nn.Linear | nn.Embedding)]
    return len(weights) == 2 and weights[0] is not weights[1]


def _without_adapters(module: nn.Module) -> nn.Module:
    """The module inside PEFT's layers and wrappers."""
    for name in ("base_layer", "original_module"):
        if (inner := getattr(module, name, None)) is not None:
            return _without_adapters(inner)
    return module


def _untie_different(model: PreTrainedModel, source: CheckpointFiles) -> None:
    """Tie parameters that are both in the checkpoint if they are equal. `from_pretrained` does so, but cannot compare
    them on the meta device."""
    stored = frozenset(source.names())
    named = dict(model.named_parameters(remove_duplicate=False))
    tied = compat.tied_names(model)
    for target, other in list(tied.items()):
        if not {target, other} <= stored or named[target] is named[other]:
            continue
        if _equal(source, target, other, named[other]):
            owner, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(owner), leaf, named[other])
        else:
            notice(f"{target} and {other} differ in the checkpoint, so they are not tied, against its config.")
            tied.pop(target)


def _equal(source: CheckpointFiles, first: str, second: str, parameter: Tensor) -> bool:
    """True if two parameters of the same shape are equal. Reads slices of rows."""
    rows = _rows_at_once(parameter[:1])
    with source.reading() as read:
        for start in range(0, parameter.shape[0], rows):
            box = ((start, min(start + rows, parameter.shape[0])), *whole(parameter.shape[1:]))
            parts = [torch.empty([high - low for low, high in box], dtype=parameter.dtype) for _ in range(2)]
            read(first, box, parts[0])
            read(second, box, parts[1])
            if not torch.equal(*parts):
                return False
    return True


def _rows_at_once(row: Tensor) -> int:
    return max(1, (16 << 20) // max(1, row.numel() * row.element_size()))


@torch.no_grad()
def _complete(model: PreTrainedModel, source: CheckpointFiles) -> None:
    """Give memory and values to parameters that the checkpoint lacks, and to buffers."""
    stored = frozenset(source.names())
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    created: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, all_names in names.items():
        if stored.isdisjoint(all_names):
            created[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        else:
            compat.keep_values(parameter)
    for module in model.modules():
        compat.draw_again(module)  # Transformers has initialized it on the meta device
        for leaf, held in module._parameters.items():
            if held in created:
                module._parameters[leaf] = created[held]
    with source.reading() as read:
        for prefix, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                name = f"{prefix}.{leaf}" if prefix else leaf
                module._buffers[leaf] = memory = torch.empty_like(buffer, device="cpu")
                if name in stored:
                    read(name, whole(memory.shape), memory)
                    compat.keep_values(memory)
    model.initialize_weights()
