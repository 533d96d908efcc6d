"""Reads the parameters of a model from the safetensors files of its checkpoint, part by part (`CheckpointFiles`), and
builds the model on the meta device (`open_model`) with Transformers' own loading.

Which part of a parameter a rank reads is decided by its engine (`weight_source.fill`). Models that are loaded whole are
in `engines/models`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils

from ...common.notices import notice
from ...realloc.layout import Box, whole
from .weight_source import Read, set_source


_SAMPLES, _SAMPLE_BYTES = 4, 4096  # of each tensor in `CheckpointFiles.fingerprint`


class CannotReadParts(Exception):
    """A checkpoint whose parameters can only be read all at once. The message says why."""


@dataclass(frozen=True)
class _Conversion:
    """Parameters that Transformers computes from several tensors of a checkpoint, such as the fused experts of a
    mixture.

    Args:
        converter: Transformers' `WeightConverter`, without tensors.
        first: the name in the model that Transformers passes to it.
        sources: pattern of the converter and name in the checkpoint of each tensor, in order.
        dtype: in which they are computed.
    """

    converter: Any
    first: str
    sources: tuple[tuple[str, str], ...]
    dtype: torch.dtype

    def compute(self, tensors: Callable[[str], Tensor], structure: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters by name in the model.

        Args:
            tensors: gives the checkpoint's tensor of a name.
            structure: the model on the meta device, not split.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.sources:
            converter.add_tensor(self.first, key, pattern, tensors(key).to(self.dtype))
        computed = converter.convert(self.first, model=structure, config=structure.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in computed.items()}


class CheckpointFiles:
    """The safetensors files of one checkpoint, as the source of a model's parameters.

    Args:
        files: their paths.
        keys: name in the model -> name in the checkpoint, of the parameters that are read as they are.
        aliases: the other names of tied parameters -> name in `keys` or `conversions`. A pipeline stage may have a
            tied parameter under the name that the checkpoint lacks.
        conversions: name in the model -> how the parameter is computed.
        structure: the model on the meta device, not split; needed for conversions.
    """

    def __init__(
        self,
        files: Sequence[str],
        keys: Mapping[str, str],
        aliases: Mapping[str, str],
        conversions: Mapping[str, _Conversion],
        structure: PreTrainedModel | None,
    ) -> None:
        self.files, self._structure = tuple(files), structure
        self._keys, self._aliases, self._conversions = keys, aliases, conversions
        self.fingerprint = _fingerprint(self.files)

    def __deepcopy__(self, memo: Any) -> CheckpointFiles:
        return self  # a copy of a model reads the same files

    def names(self) -> Sequence[str]:
        return [*self._keys, *self._aliases, *self._conversions]

    @contextlib.contextmanager
    def reading(self) -> Iterator[Read]:
        computed: dict[str, Tensor] = {}  # of the latest conversion, which may have made several parameters
        with _opened(self.files) as handles:

            def read(name: str, box: Box, target: Tensor) -> None:
                index = tuple(slice(start, stop) for start, stop in box) or ...
                name = self._aliases.get(name, name)
                if (key := self._keys.get(name)) is not None:
                    target.copy_(handles[key].get_slice(key)[index])
                    return
                if name not in computed:
                    assert self._structure is not None, "a model with conversions keeps its structure"
                    computed.clear()
                    whole_tensor = lambda key: handles[key].get_tensor(key)  # noqa: E731
                    computed.update(self._conversions[name].compute(whole_tensor, self._structure))
                target.copy_(computed[name][index])

            yield read


@contextlib.contextmanager
def _opened(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The open file of each tensor of a checkpoint, by the tensor's name in the checkpoint."""
    with contextlib.ExitStack() as stack:
        handles: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(file, framework="pt"))
            handles |= dict.fromkeys(handle.keys(), handle)
        yield handles


def _fingerprint(files: Sequence[str]) -> int:
    """Of the names, sizes and headers of files and of samples of every tensor, a positive int64. It does not read the
    files whole, and ranks whose folders differ still agree if they have copies of the same files."""
    digest = 0
    for file in sorted(files, key=os.path.basename):
        with open(file, "rb") as content:
            header = content.read(int.from_bytes(content.read(8), "little"))
            name = f"{os.path.basename(file)} {os.path.getsize(file)} "
            digest = zlib.crc32(name.encode() + header, digest)
            first = content.tell()
            for tensor, described in json.loads(header).items():
                if tensor == "__metadata__":
                    continue
                begin, end = described["data_offsets"]
                for at in range(_SAMPLES):  # the last one ends with the tensor
                    place = begin + max(0, end - begin - _SAMPLE_BYTES) * at // max(1, _SAMPLES - 1)
                    content.seek(first + place)
                    digest = zlib.crc32(content.read(min(_SAMPLE_BYTES, end - place)), digest)
    return 1 + digest


# --- building a model on the meta device ------------------------------------------------------------------------------


def open_model(kind: Any, name: str, **kwargs: Any) -> PreTrainedModel:
    """A checkpoint's model on the meta device, with the files that `fill` reads. Parameters that the checkpoint lacks
    (the score layer of a new critic) are in memory, drawn by the module's own initialization from torch's generator as
    `from_pretrained` draws them; buffers are in memory too.

    Args:
        kind: a Transformers `AutoModelFor…`.
        name: of the model, or its path.
        kwargs: of `from_pretrained`.

    Raises:
        CannotReadParts: `from_pretrained` may be able to load the checkpoint whole; if not, it says why. Torch's
            generator is then as it was.
    """
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise CannotReadParts("its checkpoint has no safetensors files")
    if (folder / "adapter_config.json").exists():
        raise CannotReadParts("its checkpoint has adapters")
    random_state = torch.get_rng_state()
    try:
        with _headers_only() as headers:
            model: PreTrainedModel = kind.from_pretrained(name, device_map={"": "meta"}, **kwargs)
        source = _checkpoint_files(model, headers)
        _untie_different(model, source)
        _complete(model, source)
    except Exception as error:  # loading whole raises it too, or works
        torch.set_rng_state(random_state)
        if isinstance(error, CannotReadParts):
            raise
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise CannotReadParts(f"building it without weights failed ({message})") from error
    set_source(model, source)
    return model


class _Header:
    """A tensor in a safetensors file, of which only shape and dtype are read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        shape = self.get_shape()
        nothing = self._tensor[:0] if shape else self._tensor[...]
        return torch.empty(shape, dtype=nothing.dtype, device="meta")


class _Headers:
    """A safetensors file, of which only the header is read. Has the methods of `safe_open` that Transformers calls."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.keys, self.metadata = file.keys, file.metadata

    def get_slice(self, name: str) -> _Header:
        return _Header(self._file.get_slice(name))

    def __enter__(self) -> _Headers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


@contextlib.contextmanager
def _headers_only() -> Iterator[dict[str, _Headers]]:
    """Inside, Transformers reads only the headers of safetensors files and gets tensors on the meta device. Yields the
    files that it opened, by path."""
    opened: dict[str, _Headers] = {}

    def open_header(filename: Any, *args: Any, **kwargs: Any) -> _Headers:
        opened[os.fspath(filename)] = headers = _Headers(safe_open(filename, framework="pt"))
        return headers

    opens = modeling_utils.safe_open
    modeling_utils.safe_open = open_header
    try:
        yield opened
    finally:
        modeling_utils.safe_open = opens


def _checkpoint_files(model: PreTrainedModel, files: Sequence[str] | Mapping[str, Any]) -> CheckpointFiles:
    """The files of a model that Transformers has loaded on the meta device, with the names of the tensors from which
    Transformers makes each parameter.

    Raises:
        CannotReadParts: the names that are found are not those that Transformers has loaded.
    """
    if not files:
        raise CannotReadParts("its checkpoint has no safetensors files")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CannotReadParts("its checkpoint has adapters")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        raise CannotReadParts("this release of Transformers does not say how it names a checkpoint's tensors") from None
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, keys, grouped = model.base_model_prefix, dict[str, str](), dict[str, list[tuple[str, str]]]()
    with _opened(list(files)) as handles:
        for key in sorted(handles, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if name not in expected:
                continue
            if pattern is None:
                keys.setdefault(name, key)
            else:
                grouped.setdefault(name, []).append((pattern, key))
        structure = copy.deepcopy(model) if grouped else None
        conversions: dict[str, _Conversion] = {}
        for name, sources in grouped.items():
            conversion = _Conversion(by_pattern[sources[0][0]], name, tuple(sources), expected[name].dtype)
            header = lambda key: _Headers(handles[key]).get_slice(key)[...]  # noqa: E731
            assert structure is not None
            computed = conversion.compute(header, structure)
            if any(value.shape != expected[target].shape for target, value in computed.items() if target in expected):
                raise CannotReadParts(f"{name} is computed in a way that is not known here")
            conversions |= {target: conversion for target in computed if target in expected}
    found = keys.keys() | conversions.keys()
    named = dict(model.named_parameters(remove_duplicate=False))
    loaded = {name for name, parameter in named.items() if getattr(parameter, "_is_hf_initialized", False)}
    tied = model.all_tied_weights_keys
    if lost := sorted(loaded - found - tied.keys() - set(tied.values())):
        raise CannotReadParts(f"Transformers reads {lost[0]} in a way that is not known here")
    read_as = {parameter: name for name, parameter in named.items() if name in found}
    aliases = {name: read_as[p] for name, p in named.items() if name not in found and p in read_as}
    return CheckpointFiles(list(files), keys, aliases, conversions, structure)


def _untie_different(model: PreTrainedModel, source: CheckpointFiles) -> None:
    """Tie parameters that the checkpoint has both of if they are equal, as `from_pretrained` does, which cannot compare
    them on the meta device."""
    known = frozenset(source.names())
    named = dict(model.named_parameters(remove_duplicate=False))
    for target, other in list(model.all_tied_weights_keys.items()):
        if not {target, other} <= known or named[target] is named[other]:
            continue
        if _equal(source, target, other, named[other]):
            owner, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(owner), leaf, named[other])
        else:
            notice(f"{target} and {other} differ in the checkpoint, so they are not tied, against its config.")
            model.all_tied_weights_keys.pop(target)


def _equal(source: CheckpointFiles, first: str, second: str, parameter: Tensor) -> bool:
    """Whether two parameters of one shape are equal. Reads slices of rows."""
    rows = max(1, (16 << 20) // max(1, parameter[:1].numel() * parameter.element_size()))
    with source.reading() as read:
        for start in range(0, parameter.shape[0], rows):
            box = ((start, min(start + rows, parameter.shape[0])), *whole(parameter.shape[1:]))
            parts = [torch.empty([high - low for low, high in box], dtype=parameter.dtype) for _ in range(2)]
            read(first, box, parts[0])
            read(second, box, parts[1])
            if not torch.equal(*parts):
                return False
    return True


@torch.no_grad()
def _complete(model: PreTrainedModel, source: CheckpointFiles) -> None:
    """Give memory and values to what is no parameter of the checkpoint: parameters that it lacks, and buffers."""
    known = frozenset(source.names())
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    drawn: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, all_names in names.items():
        if known.isdisjoint(all_names):
            drawn[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        else:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)  # set when Transformers initialized it on the meta device
        for leaf, held in module._parameters.items():
            if held in drawn:
                module._parameters[leaf] = drawn[held]
    with source.reading() as read:
        for prefix, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                name = f"{prefix}.{leaf}" if prefix else leaf
                module._buffers[leaf] = memory = torch.empty_like(buffer, device="cpu")
                if name in known:
                    read(name, whole(memory.shape), memory)
                    memory._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()
