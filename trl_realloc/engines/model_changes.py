"""Finds what a user has added to a model object beyond its class and weights: methods, hooks, modules, parameters,
buffers. An engine that builds the model from its config, such as vLLM, lacks these changes.

PEFT adapters are not changes, nor are wrappers of libraries that leave the results the same. The code that gives a
model to an engine decides what follows from a change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from .torch_compat import forward_hooks, gradient_hooks
from .transformers_compat import created_whole


class Change(NamedTuple):
    """One change of a model object.

    Args:
        module: name of the changed module; empty for the model itself.
        what: description, such as "a forward hook".
        in_forward: whether it may change the model's outputs; otherwise it changes gradients alone.
        of_class: whether it is in the user's class, not on the object.
    """

    module: str
    what: str
    in_forward: bool = True
    of_class: bool = False

    def __str__(self) -> str:
        return f"{self.what} on {self.module or 'the model itself'}"


# Libraries whose functions on a model object compute what its class does: wrappers for mixed precision, hooks that
# gather weights, fused kernels, and the forward of TRL's trainers.
_LIBRARIES = ("accelerate", "deepspeed", "kernels", "liger_kernel", "peft", "torch", "trl", "trl_realloc")
_KEPT_METHODS = ("_old_forward", "_original_forward")  # where Accelerate keeps the forward that it wraps


def model_changes(model: Any) -> list[Change]:
    """The changes of a model, which may have adapters; empty for a model's name. Without weights, only hooks and
    methods can be found."""
    if not isinstance(model, nn.Module):
        return []
    base: Any = getattr(model, "get_base_model", lambda: model)()
    changes: list[Change] = []
    for wrapper in [model, getattr(model, "base_model", None)] if base is not model else []:
        changes += _on_object("", wrapper) if isinstance(wrapper, nn.Module) else ()
    twin = _twin(base)
    changes += _of_module("", base, twin)
    changes += [*_class_forward(base), *_patched_classes(base)]
    return list(dict.fromkeys(changes))


def _class_forward(model: PreTrainedModel) -> Iterator[Change]:
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    if not owner.__module__.startswith(("transformers.", "torch.")):
        yield Change("", f"the forward of the user's class {owner.__name__}", of_class=True)


def forward_changes(model: Any) -> list[Change]:
    """The changes of a model that may change its outputs."""
    return [change for change in model_changes(model) if change.in_forward]


def described(changes: Iterable[Change]) -> str:
    """The first change, and the number of the others."""
    first, *others = changes
    return f"{first}" + (f" and {len(others)} more such change{'s' if len(others) > 1 else ''}" if others else "")


# --- structure -------------------------------------------------------------------------------------------------------


def _twin(model: Any) -> Any:
    """A model of the same class and config with memory for buffers alone; `None` if it cannot be built."""
    is_loaded = isinstance(model, PreTrainedModel) and not any(parameter.is_meta for parameter in model.parameters())
    if not is_loaded or getattr(model, "is_quantized", False):
        return None
    try:
        with init_empty_weights(include_buffers=False), created_whole(), torch.random.fork_rng(devices=[]):
            return type(model)(copy.deepcopy(model.config))
    except Exception:  # a user's class may raise anything
        return None


def _of_module(name: str, module: nn.Module, twin: nn.Module | None) -> Iterator[Change]:
    """The changes of a module and its children. `twin` is the unchanged module of this name; `None` if unavailable."""
    yield from _on_object(name, module)
    if _root(type(module)) == "peft":
        for inner in ("base_layer", "original_module"):
            if isinstance(adapted := getattr(module, inner, None), nn.Module):
                yield from _of_module(name, adapted, twin)
        return
    if hasattr(module, "parametrizations") and not hasattr(twin, "parametrizations"):
        yield Change(name, "a parametrization")
        return
    if twin is not None and not _is_of_class(module, type(twin)):
        yield Change(name, f"a {type(module).__name__} in place of {type(twin).__name__}")
        return
    if twin is not None:
        yield from (Change(name, what) for what in _beside(module, twin))
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if twin is None:
            yield from _of_module(full, child, None)
        elif isinstance(other := getattr(twin, child_name, None), nn.Module):
            yield from _of_module(full, child, other)
        else:
            yield Change(full, f"a {type(child).__name__} that the class does not have")


def _is_of_class(module: nn.Module, kind: type) -> bool:
    """True if a module is of this class, or of a library's replacement (fused kernels, FSDP)."""
    root = _root(type(module))
    return type(module) is kind or root in ("kernels", "liger_kernel") or (root == "torch" and isinstance(module, kind))


def _beside(module: nn.Module, twin: nn.Module) -> Iterator[str]:
    """Differences of parameters, buffers, modules and numbers from an unchanged module of the same class and config."""
    actual, expected = _leaves(module._parameters), _leaves(twin._parameters)
    yield from (f"a parameter {leaf!r} that the class does not have" for leaf in actual.keys() - expected.keys())
    yield from (f"no parameter {leaf!r}" for leaf in expected.keys() - actual.keys())
    actual, expected = _leaves(module._buffers), _leaves(twin._buffers)
    yield from (f"a buffer {leaf!r} that the class does not have" for leaf in actual.keys() - expected.keys())
    for leaf in actual.keys() & expected.keys() & twin._non_persistent_buffers_set:
        if not _alike(actual[leaf], expected[leaf]):
            yield f"another value of the buffer {leaf!r}"
    yield from (f"no module {leaf!r}" for leaf in twin._modules.keys() - module._modules.keys())
    of_twin = vars(twin)
    for attribute, value in vars(module).items():
        is_number = isinstance(value, float) and isinstance(of_twin.get(attribute), float)
        if is_number and value != of_twin[attribute] and attribute != "p" and "drop" not in attribute:
            yield f"another {attribute!r}"


def _leaves(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _alike(first: Tensor, second: Tensor) -> bool:
    """True if two buffers have the same values up to rounding to 16 bits."""
    if first.shape != second.shape or first.is_meta or second.is_meta or not first.is_floating_point():
        return first.shape == second.shape
    return torch.allclose(first.detach().cpu().float(), second.float(), rtol=1e-2, atol=1e-3, equal_nan=True)


# --- functions -------------------------------------------------------------------------------------------------------


def _on_object(name: str, module: nn.Module) -> Iterator[Change]:
    """Hooks, parameter hooks and methods that a user has set on the object."""
    for in_forward, hooks in ((True, forward_hooks(module)), (False, gradient_hooks(module))):
        yield from (Change(name, what, in_forward) for what, hook in hooks if _is_users(hook, ("transformers",)))
    for attribute, value in vars(module).items():
        of_class = getattr(type(module), attribute, None)
        is_method = callable(value) and (callable(of_class) or attribute in _KEPT_METHODS)
        if is_method and not isinstance(value, nn.Module) and _is_users(value, (), type(module)):
            yield Change(name, f"a replaced {attribute.removeprefix('_old_').removeprefix('_original_')}")


def _patched_classes(model: nn.Module) -> Iterator[Change]:
    """For each Transformers class with a replaced forward: its first module."""
    first = {type(module): name for name, module in reversed([*model.named_modules()])}
    for kind, name in first.items():
        owner = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
        is_transformers = owner is not None and owner.__module__.startswith("transformers.")
        if owner is not None and is_transformers and _is_users(vars(owner)["forward"], ("transformers",)):
            yield Change(name, f"a replaced {owner.__name__}.forward")


def _root(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _is_users(function: Any, others: tuple[str, ...], kind: type | None = None) -> bool:
    """True if a callable runs code of neither the libraries (`_LIBRARIES` and `others`) nor the class `kind`."""
    class_members = {id(value) for base in (kind.__mro__ if kind else ()) for value in vars(base).values()}
    if isinstance(function, nn.Module):
        return _root(type(function)) not in (*_LIBRARIES, *others)
    seen, waiting = set[int](), [function]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type | nn.Module):
            continue
        seen.add(id(item))
        if isinstance(item, MethodType):
            waiting.append(item.__func__)
        elif isinstance(item, functools.partial):
            waiting += [item.func, *filter(callable, item.args), *filter(callable, item.keywords.values())]
        elif isinstance(item, FunctionType):
            if id(item) in class_members:
                continue
            if item.__globals__.get("__name__", "").partition(".")[0] not in (*_LIBRARIES, *others):
                return True
            waiting += [getattr(item, "__wrapped__", None)]
            waiting += [cell.cell_contents for cell in item.__closure__ or () if _has_contents(cell)]
        elif hasattr(item, "__dict__") and callable(item):
            if _root(type(item)) not in (*_LIBRARIES, *others):
                return True
            waiting += [value for value in vars(item).values() if isinstance(value, FunctionType | MethodType)]
    return False


def _has_contents(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False
