"""The models of a job as Transformers configs and parameter specs, and shallower models of the same width."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ..engines.model_configs import untied
from ..engines.models import adapted_policy, adapted_shell, adapts_head, generated_config, has_adapters, shell
from ..engines.training.sliced_head import logits_are_of_head
from ..engines.transformers_compat import attention_name
from ..plan.algorithm_graphs import ppo_graph
from ..plan.dataflow import CallKind, DataflowGraph, Role
from ..plan.model_spec import FAMILIES, ModelSpec
from ..plan.parameter_spec import CHOSEN_COUNTS
from ..plan.quantization import Quantization


if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


POLICIES = (Role.ACTOR, Role.REFERENCE)


@dataclass(frozen=True)
class JobModels:
    """The Transformers config and the parameter spec of every model of a job.

    Args:
        configs: Transformers configs of each role's models.
        specs: parameter specs of each call's models, by the call's name.
        peft_config: PEFT config of a new adapter like the one that the actor trains, if any.
        processing_class: tokenizer, for engines that need one.
        mixed: dtype of mixed precision, if any.
        adapts_head: whether the actor trains an adapter that changes the language head.
        trained_share: share of the actor's elements that are trained; below 1 with adapters.
        own_reference: whether the reference is a separate model even if the actor trains adapters.
        generation_engine: "vllm" or "transformers".
        own_head: whether the actor has an untied head in a generation engine although its config ties it
            (`engines.models.generated_config`).
        quantization: format of the actor's weights under its adapters, and of the reference's if it has no own model;
            `None` if they are not quantized. A vLLM engine has dequantized weights.

    Attributes:
        attentions: attention implementations of the models, without duplicates.
    """

    configs: Mapping[Role, Sequence[PretrainedConfig]]
    specs: Mapping[str, Sequence[ModelSpec]]
    peft_config: PeftConfig | None = None
    processing_class: PreTrainedTokenizerBase = None
    mixed: torch.dtype | None = None
    adapts_head: bool = False
    generation_engine: str = "vllm"
    trained_share: float = 1.0
    own_reference: bool = False
    own_head: bool = False
    quantization: Quantization | None = None
    attentions: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        # read now, because loading a model sets the attention implementation in its config
        names = {attention_name(config) or "sdpa" for configs in self.configs.values() for config in configs}
        object.__setattr__(self, "attentions", tuple(sorted(names)))

    @staticmethod
    def of_run(
        configs: Mapping[Role, Sequence[PretrainedConfig]],
        graph: DataflowGraph,
        policy: PreTrainedModel | str,
        *,
        peft_config: PeftConfig | None,
        processing_class: PreTrainedTokenizerBase,
        mixed: torch.dtype | None,
        generation_engine: str,
        own_reference: bool = False,
        quantization: Quantization | None = None,
    ) -> JobModels:
        """The models of a run, before they are loaded.

        Args:
            policy: the user's model, with or without adapters, or its name.
            peft_config: PEFT config of the adapter that is added to it, if any.
            own_reference, quantization: fields of `JobModels`.
        """
        config = configs[Role.ACTOR][0]
        in_head = adapts_head(policy, config, peft_config)
        share = trained_share(policy, config, peft_config, quantization)
        own_head = generated_config(config, adapted_policy(policy, config, peft_config)) is not config
        specs = specs_of(
            configs,
            graph,
            mixed,
            adapts_head=in_head,
            trained_share=share,
            own_reference=own_reference,
            generation_engine=generation_engine,
            own_head=own_head,
            quantization=quantization,
        )
        if has_adapters(policy):
            peft_config = policy.peft_config[policy.active_adapters[0]]
        like = None if peft_config is None else _as_new(peft_config)
        return JobModels(
            configs,
            specs,
            like,
            processing_class,
            mixed,
            in_head,
            generation_engine,
            share,
            own_reference,
            own_head,
            quantization,
        )

    def attention_at(self, graph: DataflowGraph) -> dict[Role, float]:
        """`ModelSpec.attention_at` of each role's first model."""
        return {graph.call(name).role: specs[0].attention_at for name, specs in self.specs.items() if specs}

    def shallow(self, most: int, graph: DataflowGraph | None = None) -> JobModels:
        """The same models with fewer layers, but at least two, so that each has at most `most` elements if possible.

        Args:
            graph: graph whose calls get specs; *optional*, defaults to PPO's.
        """
        configs = {
            role: [_shallow(config, spec_of(config, role in POLICIES), most) for config in role_configs]
            for role, role_configs in self.configs.items()
        }
        specs = specs_of(
            configs,
            graph,
            self.mixed,
            adapts_head=self.adapts_head,
            trained_share=self.trained_share,
            own_reference=self.own_reference,
            generation_engine=self.generation_engine,
            own_head=self.own_head,
            quantization=self.quantization,
        )
        return replace(self, configs=configs, specs=specs)


def specs_of(
    configs: Mapping[Role, Sequence[PretrainedConfig]],
    graph: DataflowGraph | None = None,
    mixed: torch.dtype | None = None,
    *,
    adapts_head: bool = False,
    trained_share: float = 1.0,
    own_reference: bool = False,
    generation_engine: str = "vllm",
    own_head: bool = False,
    quantization: Quantization | None = None,
) -> dict[str, list[ModelSpec]]:
    """The parameter specs of the models that each call runs, by the call's name. A vLLM engine holds its weights in the
    dtype of mixed precision. The other arguments are the fields of `JobModels`; `graph` defaults to PPO's."""
    graph = graph or ppo_graph()
    of_role = {role: [spec_of(config, role in POLICIES) for config in configs.get(role, ())] for role in graph.roles}
    if mixed is not None:
        of_role = {
            role: [replace(s, activation_bytes=mixed.itemsize) for s in specs] for role, specs in of_role.items()
        }
    if adapts_head:
        for role in of_role.keys() & set(POLICIES):
            of_role[role] = [replace(spec, whole_logits=True) for spec in of_role[role]]
    if quantization is not None:
        for role in of_role.keys() & {Role.ACTOR, *(() if own_reference else (Role.REFERENCE,))}:
            of_role[role] = [replace(spec, quantization=quantization) for spec in of_role[role]]
    specs = {call.name: of_role[call.role] for call in graph.calls}
    if (train := graph.train_call(Role.ACTOR)) is not None and trained_share != 1.0:
        specs[train] = [replace(spec, trained_share=trained_share) for spec in specs[train]]
        for scoring in graph.calls:
            if scoring.role is Role.REFERENCE and not own_reference:
                specs[scoring.name] = [replace(spec, is_base=True) for spec in specs[scoring.name]]
    for call in graph.calls_of(CallKind.GENERATE) if generation_engine == "vllm" else ():
        specs[call] = [replace(spec, quantization=None) for spec in specs[call]]
        if own_head:
            with_head = [spec_of(untied(config), True) for config in configs[graph.call(call).role]]
            specs[call] = [
                replace(spec, tied=False, parameters=other.parameters)
                for spec, other in zip(specs[call], with_head, strict=True)
            ]
        if mixed is not None:
            specs[call] = [replace(spec, bytes_per_element=mixed.itemsize) for spec in specs[call]]
    return specs


def trained_share(
    model: PreTrainedModel | str,
    config: PretrainedConfig,
    peft_config: PeftConfig | None,
    quantization: Quantization | None = None,
) -> float:
    """The share of a policy's elements that are trained: 1 without adapters.

    Args:
        model: the user's policy, with or without adapters, or its name.
        config: Transformers config of the policy.
        peft_config: PEFT config of the adapter that is added to it, if any.
        quantization: format of its weights.
    """
    if has_adapters(model) and quantization is not None:  # packed weights have fewer elements than they stand for
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return trained / (trained + spec_of(config, True).elements)
    if has_adapters(model):
        adapted = model
    elif peft_config is None:
        return 1.0
    else:
        try:
            adapted = adapted_shell(config, peft_config)
        except (NotImplementedError, RuntimeError):  # adapters that read the weights: assume that all are trained
            return 1.0
    sizes = [(p.numel(), p.requires_grad) for p in adapted.parameters()]
    return sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)


def _as_new(peft_config: PeftConfig) -> PeftConfig:
    """The config of a new trainable adapter for models of any depth, without an initialization that depends on the
    weights, which may take long."""
    return _changed(
        peft_config, inference_mode=False, init_lora_weights=True, layers_to_transform=None, layers_pattern=None
    )


def _changed(peft_config: PeftConfig, **changes: object) -> PeftConfig:
    """A copy of a PEFT config with these changes, except for settings that it does not have."""
    peft_config = copy.copy(peft_config)
    for name, value in changes.items():
        if hasattr(peft_config, name):
            setattr(peft_config, name, value)
    return peft_config


def element_bytes(config: PretrainedConfig) -> int:
    """Bytes of one parameter element in the config's dtype; float32 if the config has none."""
    dtype = getattr(config, "dtype", None) or torch.float32
    return int((getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize)


def spec_of(config: PretrainedConfig, is_policy: bool) -> ModelSpec:
    """A model's parameter spec; for a family without a table, from the parameters' names and shapes alone."""
    size = element_bytes(config)
    if config.model_type in FAMILIES:
        return ModelSpec.from_config(config, "lm" if is_policy else "score", bytes_per_element=size)
    model = shell(config, is_policy)
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    text = config.get_text_config()
    vocabulary = text.vocab_size if is_policy else 0
    chosen = (getattr(text, name, None) for name in CHOSEN_COUNTS)
    experts = next((count for count in chosen if isinstance(count, int)), 0)
    spec = ModelSpec.of_shapes(shapes, bytes_per_element=size, vocabulary=vocabulary, experts_per_token=experts)
    return replace(spec, whole_logits=is_policy and not logits_are_of_head(model))


def _shallow(config: PretrainedConfig, spec: ModelSpec, most: int) -> PretrainedConfig:
    if not spec.layers or spec.elements <= most:
        return config
    outside_layers = spec.elements - spec.layers * spec.layer_elements
    layers = min(spec.layers, max(2, int((most - outside_layers) / spec.layer_elements)))
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config
