"""Makes the roles' models: from a loaded model, a name or a path; without weights, with adapters, or frozen.

A model given by name or path is on the meta device until its engine reads the weights (`training/weight_source`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from ..common.notices import notice
from .model_changes import described, forward_changes
from .model_configs import ModelError, untied
from .quantized import compute_as_in_training
from .training.meta_model import CannotReadParts, open_model
from .training.weight_export import adapters_untie
from .training.weight_source import Uninitialized, forget_stand_ins, set_source, stand_in
from .transformers_compat import created_whole


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's generators inside the context, so that parameters that a checkpoint lacks and new adapters are the
    same in every process and run. Restores the generators' states at the end."""
    accelerator, devices = torch.accelerator.current_accelerator(), list[int]()
    if accelerator is not None and torch.get_device_module(accelerator).is_available():
        is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)
        devices = [torch.accelerator.current_device_index()] if is_initialized() else []
    with torch.random.fork_rng(devices=devices, device_type=accelerator.type if accelerator else "cuda"):
        torch.manual_seed(seed)
        yield


def load_policy(
    model: PreTrainedModel | str,
    trained: bool,
    *,
    in_parts: bool = True,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    quantization_config: object = None,
) -> PreTrainedModel:
    """A causal language model. If given by name or path, it is in `dtype` if it is trained (mixed precision with
    float32 uses autocast), otherwise in the checkpoint's dtype.

    Args:
        in_parts: whether a model given by name or path stays on the meta device until its engine reads the parts that
            its rank needs. A checkpoint that cannot be read in parts is loaded whole.
        attention: `attn_implementation` of `from_pretrained`; `None` for the checkpoint's.
        quantization_config: setting of `from_pretrained` for a model given by name; `None` for the checkpoint's. The
            quantized layers of a loaded model too are set to compute in evaluation as in training.
    """
    settings = {} if quantization_config is None else {"quantization_config": quantization_config}
    in_parts = in_parts and not settings  # bitsandbytes quantizes whole weights
    loaded = _load(AutoModelForCausalLM, model, in_parts, attention, dtype=dtype if trained else "auto", **settings)
    if (problem := compute_as_in_training(loaded)) is not None:
        raise ModelError(f"model: {problem}")
    return loaded


def load_classifier(
    model: PreTrainedModel | str,
    trained: bool,
    *,
    in_parts: bool = True,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
) -> PreTrainedModel:
    """A sequence classifier with one output, loaded like `load_policy`.

    Args:
        dtype: dtype of a model given by name; `None` for float32 or the checkpoint's.
    """
    of_parameters = dtype or (torch.float32 if trained else "auto")
    return _load(AutoModelForSequenceClassification, model, in_parts, attention, num_labels=1, dtype=of_parameters)


def _load(
    kind: Any, model: PreTrainedModel | str, in_parts: bool, attention: str | None, **kwargs: Any
) -> PreTrainedModel:
    if not isinstance(model, str):
        return model
    if attention is not None:
        kwargs["attn_implementation"] = attention
    with created_whole():
        reason = None
        if in_parts:
            try:
                return open_model(kind, model, **kwargs)
            except CannotReadParts as error:
                reason = error
        loaded: PreTrainedModel = kind.from_pretrained(model, **kwargs)
    if reason is not None:
        notice(f"{model}: every rank loads the whole model, because {reason}.")
    return loaded


def shell(config: PretrainedConfig, is_policy: bool = True) -> PreTrainedModel:
    """The model's modules on the meta device, for a `Trainer` on a rank without a part of the role."""
    if not is_policy:
        config = copy.copy(config)
        config.num_labels = 1
    with torch.device("meta"), created_whole():
        kind = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
        return kind.from_config(config)


def blank(config: PretrainedConfig, is_policy: bool, dtypes: Mapping[str, torch.dtype]) -> PreTrainedModel:
    """A model with initialized buffers, whose parameters get uninitialized memory from their engine.

    Args:
        dtypes: dtypes of the parameters by name; parameters without an entry get the first one.
    """
    kind = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    with init_empty_weights(include_buffers=False), created_whole():
        model = kind.from_config(config)
    usual = next(iter(dtypes.values()))
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty_like(parameter, dtype=dtypes.get(name, usual))
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty, parameter.requires_grad))
    model.tie_weights()
    names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    set_source(model, Uninitialized(names))
    return model


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's persistent buffers by name, on the CPU."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: tensor.cpu()
        for name, tensor in model.state_dict(keep_vars=False).items()
        if name not in parameters and torch.is_tensor(tensor)
    }


def with_adapters(model: PreTrainedModel, peft_config: PeftConfig, adapter: str | None) -> PreTrainedModel:
    """The policy with a new adapter, if `peft_config` asks for one.

    Args:
        adapter: name of the adapter to train, if there are several.

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
                "model is a PeftModel and a peft_config is set too; merge and unload its adapter first, or leave "
                "peft_config out to train the adapter it has."
            )
        stand_in(model)
        model = get_peft_model(model, peft_config)
        forget_stand_ins(model)
    if adapter is not None:
        model.set_adapter(adapter)
    return model


# Settings of a `LoraConfig` with which adapters are created without reading the adapted weights.
_WITHOUT_WEIGHTS = frozenset(
    {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out"}
    | {"inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"}
    | {"modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type"}
    | {"use_rslora"}
)


def adapts_unread(peft_config: PeftConfig | None) -> bool:
    """True if the adapters can be created before the adapted weights are read: LoRA whose matrices are not computed
    from the weights, with settings of `_WITHOUT_WEIGHTS` alone."""
    is_lora = str(getattr(peft_config, "peft_type", "")).rpartition(".")[2] == "LORA"
    if not is_lora or not dataclasses.is_dataclass(peft_config):
        return False
    make_default: Any = type(peft_config)
    default, settings = make_default(), [setting.name for setting in dataclasses.fields(peft_config)]
    changed = {name for name in settings if getattr(peft_config, name) != getattr(default, name)}
    return changed <= _WITHOUT_WEIGHTS and getattr(peft_config, "init_lora_weights", None) in (True, False, "gaussian")


def changes_base(peft_config: PeftConfig | None) -> bool:
    """True if a new adapter takes a part out of the adapted weights, as PiSSA does. Without the adapter the model then
    is not the original one."""
    init = getattr(peft_config, "init_lora_weights", True)
    return isinstance(init, str) and init not in ("gaussian", "eva", "orthogonal")


def adapted_shell(config: PretrainedConfig, peft_config: PeftConfig) -> PreTrainedModel:
    """The policy with new adapters, without memory. Initial values that depend on the weights are left out.

    Raises:
        NotImplementedError, RuntimeError: adapters of this kind are computed from the weights.
    """
    peft_config = copy.deepcopy(peft_config)  # PEFT writes into it, and into the model's config
    if hasattr(peft_config, "init_lora_weights"):
        peft_config.init_lora_weights = True
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return with_adapters(shell(copy.deepcopy(config)), peft_config, None)


def adapted_policy(
    model: PreTrainedModel | str, config: PretrainedConfig, peft_config: PeftConfig | None
) -> PreTrainedModel | None:
    """The policy with its adapters, perhaps without memory; `None` if it has no adapters.

    Args:
        model: the policy as the user gave it, with or without adapters, or its name.
        peft_config: config of the adapter to add; `None` for none.
    """
    if has_adapters(model):
        return model
    if peft_config is None:
        return None
    try:
        return adapted_shell(config, peft_config)
    except (NotImplementedError, RuntimeError):
        from peft import LoraConfig

        settings = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
        same_modules = LoraConfig(**{name: getattr(peft_config, name, None) for name in settings})
        return adapted_shell(config, same_modules)


def generated_config(config: PretrainedConfig, adapted: PreTrainedModel) -> PretrainedConfig:
    """The Transformers config of the merged policy in a separate generation engine. If an adapter changes the head or
    the embedding alone, they are not tied there, unlike in the policy.

    Args:
        adapted: the model of `adapted_policy`.
    """
    return untied(config) if adapted is not None and adapters_untie(adapted) else config


def adapts_head(model: PreTrainedModel | str, config: PretrainedConfig, peft_config: PeftConfig | None) -> bool:
    """True if an adapter changes the language head of a policy. The head is then no plain linear layer.

    Args:
        model: the policy as the user gave it, with or without adapters, or its name.
        peft_config: config of the adapter to add; `None` for none.
    """
    if has_adapters(model):
        return type(model.get_base_model().get_output_embeddings()) is not nn.Linear
    if peft_config is None:
        return False
    policy = shell(config)
    head = policy.get_output_embeddings()
    name = next((name for name, module in policy.named_modules() if module is head), "")
    targets = getattr(peft_config, "target_modules", None) or ()
    trained = getattr(peft_config, "modules_to_save", None) or ()
    if isinstance(targets, str):  # PEFT excludes the head from "all-linear", and full-matches other patterns
        return re.fullmatch(targets, name) is not None or _is_named(name, trained)
    return _is_named(name, [*targets, *trained])


def _is_named(name: str, endings: Sequence[str]) -> bool:
    """True if a module's name is one of these endings, or ends with a dot and one of them."""
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def check_trains(model: nn.Module, argument: str) -> None:
    """Check that a role can be trained.

    Raises:
        ModelError: all parameters of the model are frozen, or a trainable parameter is float16.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        way_out = (
            "load its adapter with PeftModel.from_pretrained(..., is_trainable=True)"
            if has_adapters(model)
            else "call requires_grad_(True) on the parameters to train"
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


def has_adapters(model: object) -> TypeGuard[PeftModel]:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_configs(model: PreTrainedModel | str, peft_config: PeftConfig | None) -> dict[str, PeftConfig]:
    """The PEFT configs by adapter name of a trained model: its own adapters and the one of `peft_config`."""
    existing = dict(model.peft_config) if has_adapters(model) else {}
    return existing if peft_config is None else {**existing, "default": peft_config}


def adapters_off(ref_adapter: str | None, trained: str | None) -> Callable[[nn.Module], Any]:
    """The context in which the policy's module, or a copy of it, computes the reference: with its adapters disabled, or
    with the adapter `ref_adapter` active. Afterwards the same parameters are trainable as before; PEFT makes those of
    the active adapter trainable, also in a copy that does not train."""

    @contextlib.contextmanager
    def context(model: PeftModel) -> Iterator[None]:
        trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            if ref_adapter is None:
                with model.disable_adapter():
                    yield
            else:
                model.set_adapter(ref_adapter)
                yield
        finally:
            if ref_adapter is not None:
                model.set_adapter(trained or "default")
            for parameter, is_trainable in trainable:
                parameter.requires_grad_(is_trainable)

    return context


def own_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A deep copy of a model, without the wrappers of libraries around its forward.

    Raises:
        ModelError: the copy would use the original's parameters, because a user's forward or hook is a closure over
            the original model.
    """
    copied, changes = copy.deepcopy(model), forward_changes(model)
    base: Any = copied.get_base_model() if has_adapters(copied) else copied
    if "forward" in vars(base) and not any(not change.module for change in changes):
        del base.forward  # TRL's wrapper would run the original model
    if changes and _computes_with(copied, model):
        raise ModelError(
            f"the run needs a copy of the model, for the reference or for another layout, and the copy would compute "
            f"with the weights of the model: it has {described(changes)}, which calls the model that it was made for. "
            f"Make it a function of the module, as types.MethodType(function, module) or as a forward hook; for the "
            f"reference you can also give ref_model (PPO), or set beta to 0 (GRPO, RLOO)."
        )
    return copied


def _computes_with(copied: PreTrainedModel, model: PreTrainedModel) -> bool:
    """True if a forward of a copy uses a parameter of the original model."""
    theirs, was_training = _Uses(map(id, model.parameters())), copied.training
    device = next(copied.parameters()).device
    with torch.no_grad(), theirs, contextlib.suppress(RuntimeError, TypeError, ValueError):
        copied.eval()(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device))
    copied.train(was_training)
    return theirs.found


class _Uses(TorchFunctionMode):
    """Sets `found` if a torch function inside gets a tensor with one of these `id`s."""

    def __init__(self, tensors: Iterable[int]) -> None:
        super().__init__()
        self.tensors, self.found = frozenset(tensors), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = [*args, *(kwargs or {}).values()]
        while waiting:
            value = waiting.pop()
            self.found |= id(value) in self.tensors
            waiting += value if isinstance(value, list | tuple) else ()
        return func(*args, **(kwargs or {}))


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the model for the reference, without adapters."""
    copied: Any = own_copy(model)
    if has_adapters(copied):
        from peft.utils.other import ModulesToSaveWrapper

        for module in copied.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.set_adapter([])  # otherwise `unload` leaves the trained module
    frozen: PreTrainedModel = (copied.unload() if has_adapters(copied) else copied).requires_grad_(False).eval()
    return frozen
