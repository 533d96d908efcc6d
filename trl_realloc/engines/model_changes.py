"""What a user has put on a model object beside its class's architecture and its weights: methods and hooks, modules,
parameters and buffers. An engine that makes the model anew from its config, such as vLLM, does not have it.

Adapters of PEFT are no changes, nor is what libraries put on a model that then computes the same. What follows from a
change is decided where a model is given to an engine.
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
    """Args:
    module: the name of the module that has it; empty for the model itself.
    what: such as "a forward hook".
    in_forward: it may change what the model computes; otherwise gradients alone.
    of_class: it is in the user's class, not on the object.
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
    """The changes of a model, which may have adapters; none of a model's name. Of one without weights hooks and methods
    alone are known."""
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
    """The forward of a user's class."""
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    if not owner.__module__.startswith(("transformers.", "torch.")):
        yield Change("", f"the forward of the user's class {owner.__name__}", of_class=True)


def forward_changes(model: Any) -> list[Change]:
    """The changes of a model by which it may compute something else than its class."""
    return [change for change in model_changes(model) if change.in_forward]


def described(changes: Iterable[Change]) -> str:
    """The first of some changes, and how many others there are."""
    first, *others = changes
    return f"{first}" + (f" and {len(others)} more such change{'s' if len(others) > 1 else ''}" if others else "")


# --- structure -------------------------------------------------------------------------------------------------------


def _twin(model: Any) -> Any:
    """A model of the same class and config without memory, but for its buffers; `None` if there cannot be one."""
    is_loaded = isinstance(model, PreTrainedModel) and not any(parameter.is_meta for parameter in model.parameters())
    if not is_loaded or getattr(model, "is_quantized", False):
        return None
    try:
        with init_empty_weights(include_buffers=False), created_whole(), torch.random.fork_rng(devices=[]):
            return type(model)(copy.deepcopy(model.config))
    except Exception:  # a user's class may raise anything
        return None


def _of_module(name: str, module: nn.Module, twin: nn.Module | None) -> Iterator[Change]:
    """The changes of a module and of those in it.

    Args:
        twin: the module of the same name of a model that has no changes; `None` if it is not known.
    """
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
    """True if a module's class is this one, or a library's in its place: of fused kernels, or of FSDP."""
    root = _root(type(module))
    return type(module) is kind or root in ("kernels", "liger_kernel") or (root == "torch" and isinstance(module, kind))


def _beside(module: nn.Module, twin: nn.Module) -> Iterator[str]:
    """What a module has in another way than one of the same class and config: parameters, buffers, modules, numbers."""
    mine, others = _leaves(module._parameters), _leaves(twin._parameters)
    yield from (f"a parameter {leaf!r} that the class does not have" for leaf in mine.keys() - others.keys())
    yield from (f"no parameter {leaf!r}" for leaf in others.keys() - mine.keys())
    mine, others = _leaves(module._buffers), _leaves(twin._buffers)
    yield from (f"a buffer {leaf!r} that the class does not have" for leaf in mine.keys() - others.keys())
    for leaf in mine.keys() & others.keys() & twin._non_persistent_buffers_set:
        if not _alike(mine[leaf], others[leaf]):
            yield f"another value of the buffer {leaf!r}"
    yield from (f"no module {leaf!r}" for leaf in twin._modules.keys() - module._modules.keys())
    of_twin = vars(twin)
    for attribute, value in vars(module).items():
        is_number = isinstance(value, float) and isinstance(of_twin.get(attribute), float)
        if is_number and value != of_twin[attribute] and attribute != "p" and "drop" not in attribute:
            yield f"another {attribute!r}"


def _leaves(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _alike(one: Tensor, other: Tensor) -> bool:
    """True if two buffers have the same values, one of them perhaps rounded to 16 bits."""
    if one.shape != other.shape or one.is_meta or other.is_meta or not one.is_floating_point():
        return one.shape == other.shape
    return torch.allclose(one.detach().cpu().float(), other.float(), rtol=1e-2, atol=1e-3, equal_nan=True)


# --- functions -------------------------------------------------------------------------------------------------------


def _on_object(name: str, module: nn.Module) -> Iterator[Change]:
    """Hooks and methods of a module that a user has put on the object, and hooks on its parameters."""
    for in_forward, hooks in ((True, forward_hooks(module)), (False, gradient_hooks(module))):
        yield from (Change(name, what, in_forward) for what, hook in hooks if _is_users(hook, ("transformers",)))
    for attribute, value in vars(module).items():
        of_class = getattr(type(module), attribute, None)
        is_method = callable(value) and (callable(of_class) or attribute in _KEPT_METHODS)
        if is_method and not isinstance(value, nn.Module) and _is_users(value, (), type(module)):
            yield Change(name, f"a {attribute.removeprefix('_old_').removeprefix('_original_')} of its own")


def _patched_classes(model: nn.Module) -> Iterator[Change]:
    """The first module of each class of Transformers whose forward a user has replaced."""
    first = {type(module): name for name, module in reversed([*model.named_modules()])}
    for kind, name in first.items():
        owner = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
        is_transformers = owner is not None and owner.__module__.startswith("transformers.")
        if owner is not None and is_transformers and _is_users(vars(owner)["forward"], ("transformers",)):
            yield Change(name, f"a replaced {owner.__name__}.forward")


def _root(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _is_users(function: Any, others: tuple[str, ...], kind: type | None = None) -> bool:
    """True if a callable runs code that is neither of a library nor of a class.

    Args:
        others: further libraries.
        kind: the class.
    """
    own = {id(value) for base in (kind.__mro__ if kind else ()) for value in vars(base).values()}
    if isinstance(function, nn.Module):
        return _root(type(function)) not in (*_LIBRARIES, *others)
    seen, waiting = set[int](), [function]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | nn.Module):
            continue
        seen.add(id(each))
        if isinstance(each, MethodType):
            waiting.append(each.__func__)
        elif isinstance(each, functools.partial):
            waiting += [each.func, *filter(callable, each.args), *filter(callable, each.keywords.values())]
        elif isinstance(each, FunctionType):
            if id(each) in own:
                continue
            if each.__globals__.get("__name__", "").partition(".")[0] not in (*_LIBRARIES, *others):
                return True
            waiting += [getattr(each, "__wrapped__", None)]
            waiting += [cell.cell_contents for cell in each.__closure__ or () if _has_contents(cell)]
        elif hasattr(each, "__dict__") and callable(each):
            if _root(type(each)) not in (*_LIBRARIES, *others):
                return True
            waiting += [value for value in vars(each).values() if isinstance(value, FunctionType | MethodType)]
    return False


def _has_contents(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False
