"""Loads and prepares the roles' models: from a loaded model or from a name or path, without weights, with adapters,
frozen.

Which rank loads which model is decided in `runtime/engine_builder`; making the ranks' copies equal is in
`training/replica_sync`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from .training.zero_init import created_whole


class ModelError(ValueError):
    """A model that cannot be used for its role. The message names the argument and the remedy."""


def read_config(model: PreTrainedModel | str, argument: str) -> Any:
    """A model's Transformers config, without loading weights. Its `dtype` is that of the parameters if the model is
    loaded, and the checkpoint's otherwise.

    Raises:
        ModelError: a name or path under which there is no model.
    """
    if not isinstance(model, str):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), model.config.dtype)
        return _in_dtype(model.config, dtype)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # a damaged config may make its class raise anything
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{argument}: {model!r} needs remote code (trust_remote_code), which the engines cannot load; use "
                f"a model whose family Transformers itself has."
            ) from None
        looks_local = os.sep in model and (model.startswith((".", os.sep, "~")) or model.count(os.sep) > 1)
        what = (
            "there is no such folder"
            if looks_local and not os.path.isdir(model)
            else (str(error) or type(error).__name__).splitlines()[0]
        )
        raise ModelError(f"{argument}: cannot read a model from {model!r}: {what}") from None


def trained_config(config: Any, model: PreTrainedModel | str) -> Any:
    """The config of a model that is trained, with the dtype of its parameters in this run. A model given by path is
    loaded in float32 (`load_policy`)."""
    return _in_dtype(config, torch.float32) if isinstance(model, str) else config


def _in_dtype(config: Any, dtype: torch.dtype) -> Any:
    if config.dtype == dtype:
        return config
    config = copy.copy(config)
    config.dtype = dtype
    return config


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's generators are seeded, so that parameters that a checkpoint lacks and the matrices of new
    adapters are the same in every process and every run. The generators' states are restored at the end."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def load_policy(model: PreTrainedModel | str, trained: bool) -> PreTrainedModel:
    """A causal language model. From a name or path it is loaded in float32 if it is trained (mixed precision uses
    autocast), and in the checkpoint's dtype otherwise."""
    if not isinstance(model, str):
        return model
    with created_whole():
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32 if trained else "auto")


def load_classifier(model: PreTrainedModel | str, trained: bool) -> PreTrainedModel:
    """A sequence classifier with one output, loaded as `load_policy` loads."""
    if not isinstance(model, str):
        return model
    dtype = torch.float32 if trained else "auto"
    with created_whole():
        return AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype)


def shell(config: Any, is_policy: bool = True) -> PreTrainedModel:
    """The model's modules on the meta device, for a `Trainer` on a rank that has no part of the role."""
    if not is_policy:
        config = copy.copy(config)
        config.num_labels = 1
    with torch.device("meta"), created_whole():
        kind = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
        return kind.from_config(config)


def blank(config: Any, is_policy: bool, dtypes: Mapping[str, torch.dtype]) -> PreTrainedModel:
    """A model with uninitialized parameters and initialized buffers.

    Args:
        dtypes: of the parameters by name; parameters without an entry get the first one.
    """
    kind = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    with init_empty_weights(include_buffers=False), created_whole():
        model = kind.from_config(config)
    usual = next(iter(dtypes.values()))
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        memory = torch.empty(parameter.shape, dtype=dtypes.get(name, usual))
        setattr(model.get_submodule(owner), leaf, nn.Parameter(memory, parameter.requires_grad))
    model.tie_weights()
    return model


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's persistent buffers by name, on the CPU: the part of a checkpoint that is not parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: tensor.cpu()
        for name, tensor in model.state_dict(keep_vars=False).items()
        if name not in parameters and torch.is_tensor(tensor)
    }


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Turn dropout off, in place. With dropout the ratio of new to old probabilities is not 1 before the first step."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def with_adapters(model: PreTrainedModel, peft_config: Any, adapter: str | None) -> PreTrainedModel:
    """The policy with a new adapter, if `peft_config` asks for one.

    Args:
        adapter: the name of the adapter to train, if there are several.

    Raises:
        ModelError: peft is missing, or the model has adapters already.
    """
    if peft_config is not None:
        try:
            from peft import PeftConfig, PeftModel, get_peft_model
        except ImportError:
            raise ModelError(
                "peft_config is set, but peft is not installed; pip install 'trl_realloc[peft]'."
            ) from None
        if not isinstance(peft_config, PeftConfig):
            raise ModelError(
                f"peft_config must be a peft.PeftConfig such as LoraConfig, not {type(peft_config).__name__}."
            )
        if isinstance(model, PeftModel):
            raise ModelError(
                "model is a PeftModel and a peft_config is given too; merge and unload its adapter first, or leave "
                "peft_config out to train the adapter it has."
            )
        model = get_peft_model(model, peft_config)
    if adapter is not None:
        model.set_adapter(adapter)
    return model


def check_trains(model: nn.Module, argument: str) -> None:
    """Raises:
    ModelError: all parameters of a role that is trained are frozen, or a parameter that is trained is float16.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        way_out = (
            "load its adapter with PeftModel.from_pretrained(..., is_trainable=True)"
            if has_adapters(model)
            else "call requires_grad_(True) on what is to be trained"
        )
        raise ModelError(
            f"every parameter of {argument} is frozen (requires_grad is False), so it cannot be trained; {way_out}."
        )
    low = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    if low:
        raise ModelError(
            f"{argument} is to be trained in float16 ({low[0]} and {len(low) - 1} more parameters), in which gradients "
            f"underflow; load it with dtype=torch.float32 (with fp16=True or bf16=True it computes in 16 bits all the "
            f"same), or with dtype=torch.bfloat16."
        )


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapters_off(ref_adapter: str | None, trained: str | None) -> Callable[[nn.Module], Any]:
    """The context in which the policy's module computes the reference: with its adapters disabled, or with the adapter
    `ref_adapter` active."""

    @contextlib.contextmanager
    def context(model: Any) -> Iterator[None]:
        if ref_adapter is None:
            with model.disable_adapter():
                yield
            return
        model.set_adapter(ref_adapter)
        try:
            yield
        finally:
            model.set_adapter(trained or "default")

    return context


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the model for the reference, without adapters."""
    copied: Any = copy.deepcopy(model)
    frozen: PreTrainedModel = (copied.unload() if has_adapters(copied) else copied).requires_grad_(False).eval()
    return frozen
