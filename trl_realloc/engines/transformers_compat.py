"""All uses of undocumented Transformers interfaces, and the differences between Transformers' releases.

Run with Transformers 5.19 to 5.23 (docs/versions.md). A release that lacks one of these names raises `UnknownRelease`;
the caller reports its message as an error or uses a slower method.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.integrations import deepspeed as deepspeed_integration


class UnknownRelease(Exception):
    """The installed release of Transformers lacks a name that is used here. The message says what needs it."""


# --- parameters that have values --------------------------------------------------------------------------------------


def has_values(tensor: Tensor) -> bool:
    """True if Transformers counts a parameter or buffer as loaded or initialized."""
    return bool(getattr(tensor, "_is_hf_initialized", False))


def keep_values(tensor: Tensor) -> None:
    """Make `initialize_weights` leave a parameter or buffer as it is."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def draw_again(module: nn.Module) -> None:
    """Make `initialize_weights` initialize a module's parameters again, unless they are marked by `keep_values`."""
    vars(module).pop("_is_hf_initialized", None)


# --- the names of a checkpoint's tensors ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """Parameters that Transformers computes from several tensors of a checkpoint, such as the fused experts of a
    mixture.

    Args:
        converter: Transformers' `WeightConverter`, without tensors.
        first: name in the model that Transformers passes to it.
        sources: (pattern of the converter, name in the checkpoint) of each tensor, in order.
        dtype: dtype of the computation.
    """

    converter: Any
    first: str
    sources: tuple[tuple[str, str], ...]
    dtype: torch.dtype

    def compute(self, tensors: Callable[[str], Tensor], structure: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters by name in the model.

        Args:
            tensors: returns the checkpoint's tensor of a name.
            structure: the unsplit model on the meta device.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.sources:
            converter.add_tensor(self.first, key, pattern, tensors(key).to(self.dtype))
        computed = converter.convert(self.first, model=structure, config=structure.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in computed.items()}

    def of_rows(self, low: int, high: int) -> tuple[Conversion, int]:
        """The computation of the indices `low` to `high - 1` of the first dimension from the tensors of these indices
        alone, and the first index that it computes. All indices, unless each tensor becomes one of them, as the
        matrices of experts do."""
        stack, *others = getattr(self.converter, "operations", None) or [None]
        is_stack = type(stack).__name__ == "MergeModulelist" and stack.dim == 0
        if not is_stack or any(type(op).__name__ != "Concatenate" or op.dim == 0 for op in others):
            return self, 0
        of_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, key in self.sources:
            of_pattern.setdefault(pattern, []).append((pattern, key))
        sources = tuple(source for rows in of_pattern.values() for source in rows[low:high])
        return replace(self, sources=sources), low


@dataclass
class TensorNames:
    """Names of a model's parameters in a checkpoint.

    Args:
        keys: name in the model -> name in the checkpoint, for parameters that are stored unchanged.
        conversions: computations of all other parameters.
    """

    keys: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)


def names_in_checkpoint(model: PreTrainedModel, stored: Iterable[str]) -> TensorNames:
    """The names under which Transformers finds a model's parameters in a checkpoint.

    Args:
        stored: names of the checkpoint's tensors.

    Raises:
        UnknownRelease: this release does not have the function that computes them.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        raise UnknownRelease(
            "this release of Transformers names a checkpoint's tensors in a way that this package does not support"
        ) from None
    expected, prefix = model.state_dict(), model.base_model_prefix
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names, grouped = TensorNames(), dict[str, list[tuple[str, str]]]()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            continue
        if pattern is None:
            names.keys.setdefault(name, key)
        else:
            grouped.setdefault(name, []).append((pattern, key))
    for name, sources in grouped.items():
        converter = by_pattern[sources[0][0]]
        names.conversions.append(Conversion(converter, name, tuple(sources), expected[name].dtype))
    return names


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """The names of tied parameters, each with the name of the parameter that it is tied to. Live: edits take effect."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})  # a user's own class has none
    return tied


def form_in_checkpoint(model: PreTrainedModel, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """A model's tensors under the names and in the form of `save_pretrained`."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    return list(revert_weight_conversion(model, dict(tensors)).items())


def names_not_saved(model: PreTrainedModel) -> Collection[str]:
    """The names of parameters and buffers that `save_pretrained` leaves out."""
    return model._keys_to_ignore_on_save or ()


def loaded_adapters(model: PreTrainedModel) -> bool:
    """True if `from_pretrained` found adapters beside the checkpoint and loaded them."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


# --- building a model without reading weights -------------------------------------------------------------------------


class Header:
    """A tensor in a safetensors file, of which only shape and dtype are read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        shape = self.get_shape()
        nothing = self._tensor[:0] if shape else self._tensor[...]
        return torch.empty(shape, dtype=nothing.dtype, device="meta")


class HeaderFile:
    """A safetensors file of which only the header is read, with the methods of `safe_open` that Transformers calls."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.keys, self.metadata = file.keys, file.metadata

    def get_slice(self, name: str) -> Header:
        return Header(self._file.get_slice(name))

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


@contextlib.contextmanager
def headers_only() -> Iterator[dict[str, HeaderFile]]:
    """Makes Transformers read only the headers of safetensors files inside the context; tensors are on the meta device.
    Yields the opened files by path.

    Raises:
        UnknownRelease: Transformers opens files by another function.
    """
    opened: dict[str, HeaderFile] = {}

    def open_header(filename: Any, *args: Any, **kwargs: Any) -> HeaderFile:
        opened[os.fspath(filename)] = headers = HeaderFile(safe_open(filename, framework="pt"))
        return headers

    opens = getattr(modeling_utils, "safe_open", None)
    if opens is None:
        raise UnknownRelease(
            "this release of Transformers opens safetensors files in a way that this package does not support"
        )
    modeling_utils.safe_open = open_header
    try:
        yield opened
    finally:
        modeling_utils.safe_open = opens


@contextlib.contextmanager
def created_whole() -> Iterator[None]:
    """Makes Transformers create and load models as without ZeRO-3 inside the context. Partitioning is a collective over
    the whole job, but only the ranks of a role's meshes create its model."""
    config = deepspeed_integration._hf_deepspeed_config_weak_ref
    deepspeed_integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed_integration._hf_deepspeed_config_weak_ref = config


# --- attention and tensor parallelism ---------------------------------------------------------------------------------


def attention_name(config: PretrainedConfig) -> str | None:
    """The attention implementation that a model was loaded with, such as "sdpa"."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def tensor_parallel_styles(model: PreTrainedModel) -> Mapping[str, str]:
    """Transformers' tensor-parallel style of each module outside the backbone, by pattern of module names."""
    return model._tp_plan or {}


# --- activation checkpointing -----------------------------------------------------------------------------------------


def recompute_activations(model: PreTrainedModel, settings: Mapping[str, object] | None = None) -> None:
    """Turn on activation checkpointing of a model's layers.

    Args:
        settings: TRL's `activation_checkpointing_kwargs`, also under its older name.
    """
    kwargs = dict(settings or {"use_reentrant": False})
    if not hasattr(model, "activation_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return
    of_model = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs or None, **of_model)


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The routers of a mixture's layers, in the order of the layers, each with the index of its logits in its outputs;
    empty for a model without routers, or whose routers Transformers does not name."""
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        target = getattr(recorder, "target_class", None)
        if recorder is not None and target is not None and getattr(recorder, "layer_name", None) is None:
            return [(part, recorder.index) for part in module.modules() if isinstance(part, target)]
    return []


# --- checkpoints at SIGTERM -------------------------------------------------------------------------------------------


class AgreedRequest:
    """The manager of a `JITCheckpointCallback` (`enable_jit_checkpoint`) in a job whose ranks save together.

    Transformers' manager requests a checkpoint 3 s after its rank got SIGTERM. The ranks get the signal at different
    times, perhaps only one rank gets it, but all have to save at the same step.

    Args:
        manager: Transformers' manager, which handles the signal.
        is_requested: collective; takes whether this rank has a request, returns True if any rank has one.
        save: collective; writes the checkpoint.
    """

    def __init__(self, manager: Any, is_requested: Callable[[bool], bool], save: Callable[[], None]) -> None:
        self._manager, self._is_requested, self._save = manager, is_requested, save
        self._is_saved = False

    @property
    def is_checkpoint_requested(self) -> bool:
        """True at the callback's first event at which a rank has a request. If a process gets the signal from both the
        cluster and the launcher, only one checkpoint is saved."""
        return not self._is_saved and self._is_requested(self._manager.is_checkpoint_requested)

    def execute_jit_checkpoint(self) -> None:
        self._is_saved = True
        self._save()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def agree_on_jit_checkpoint(
    callbacks: Iterable[Any], is_requested: Callable[[bool], bool], save: Callable[[], None]
) -> None:
    """Make the ranks of a job save together if one of them gets SIGTERM (`AgreedRequest`)."""
    for callback in callbacks:
        if type(callback).__name__ == "JITCheckpointCallback" and callback.jit_manager is not None:
            callback.jit_manager = AgreedRequest(callback.jit_manager, is_requested, save)
