"""A recipe as the planner reads it, without torch: the models' configs on disk and the size of an iteration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...common.errors import MAX_LISTED, PlanError, Problems, nearest, shown
from ...common.files import exists, read_json_mapping, read_yaml_mapping, shortened
from ...common.settings import MIN_TEMPERATURE, SETTINGS, no_room, number_of_text, read_settings
from ...plan.algorithm_graphs import grpo_graph, ppo_graph
from ...plan.cluster import Cluster
from ...plan.dataflow import CallKind, DataflowGraph, Role
from ...plan.model_spec import FAMILIES, ModelSpec
from ...plan.parameter_spec import Head, ParameterSpec
from ...plan.staleness import uncorrected
from ..cost.workload import Workload
from ..search.space import TrainingSplits
from .defaults import (
    DEFAULTS_OF,
    LOADING,
    algorithm_of,
    group_workload,
    quantization_of,
    read_booleans,
    recomputes,
    trained_dtype,
    training_splits,
)


POLICY = ("sft_model_path", "model_name_or_path")
REWARD_PATHS = ("reward_model_path", "reward_model_name_or_path")
LIKE = 0.8  # smallest similarity with which a key counts as a misspelt setting
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
PROMPT_TOKENS = 64.0  # default mean length of a prompt
MAX_TOKENS = 10_000_000  # largest number of tokens of a prompt or a response, and of samples of a batch

# the settings of adapters that the planner reads, with the defaults of TRL's `ModelConfig`
ADAPTER_DEFAULTS: Mapping[str, Any] = {
    "use_peft": False,
    "lora_r": 16,
    "lora_target_modules": None,
    "lora_modules_to_save": None,
}
ALL_LINEAR = "all-linear"
# PEFT's default targets by model family
_TARGETS_OF_FAMILY = {"gpt_neox": ("query_key_value",)}
_USUAL_TARGETS = ("q_proj", "v_proj")
_ENDS = ("lm_head", "embed_tokens", "embed_in", "embed_out")


@dataclass(frozen=True)
class Recipe:
    """A recipe as the planner reads it.

    Args:
        path: path of the recipe's file.
        folders: folder with each role's config.json.
        settings: settings that the planner reads, with their defaults (`DEFAULTS_OF`).
        prompt_tokens: mean length of a prompt.
        algorithm: `ppo`, `grpo` or `rloo`.
    """

    path: Path
    folders: Mapping[Role, Path]
    settings: Mapping[str, Any]
    prompt_tokens: float
    algorithm: str = "ppo"

    @property
    def engine(self) -> str:
        if self.algorithm == "ppo":
            return str(self.settings["generation_engine"] or "vllm")
        return "transformers" if self.settings["use_vllm"] is False else "vllm"

    @property
    def trainers(self) -> tuple[str, ...]:
        """The engines that may score and train. Megatron has no loss scaling, which fp16 needs."""
        return ("zero",) if self.settings["fp16"] else ("zero", "megatron")

    @property
    def splits(self) -> TrainingSplits:
        """Splits of a training call that the recipe's optimizer allows."""
        return training_splits(str(self.settings["optim"]))

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest request that an engine may get; `None` if the recipe does not set it."""
        tokens: int | None = self.settings.get("vllm_max_model_length")
        return tokens

    @property
    def deterministic(self) -> bool:
        """True if two runs must give the same results bit for bit."""
        return bool(self.settings["full_determinism"])

    @property
    def max_staleness(self) -> int:
        return int(self.settings.get("max_staleness", 0))

    @property
    def fused_training(self) -> bool | None:
        """True if two calls may train in fused pipelines. `None` if that depends on the devices."""
        setting = self.settings.get("fused_training")
        return None if setting is None else bool(setting)

    @property
    def graph(self) -> DataflowGraph:
        """The graph of the run. With a staleness, a recipe that does not set `vllm_importance_sampling_correction`
        counts as true."""
        if self.max_staleness or self.algorithm != "ppo":
            return self.stale_graph
        return ppo_graph(proximal=bool(self._corrects))

    @property
    def stale_graph(self) -> DataflowGraph:
        """The graph that the run would have with a staleness."""
        if self.algorithm != "ppo":
            reference = bool(self.settings["beta"])
            return grpo_graph(reference=reference, reward_models=Role.REWARD in self.folders)
        return ppo_graph(proximal=self._corrects is None or bool(self._corrects))

    @property
    def _corrects(self) -> bool | None:
        corrects: bool | None = self.settings["vllm_importance_sampling_correction"]
        return corrects

    def specs(self, graph: DataflowGraph | None = None) -> dict[str, Sequence[ModelSpec]]:
        """The parameter specs of each call's models, by the call's name, in the dtypes of a run: trained models in
        float32 or the recipe's dtype, frozen models in their checkpoint's, vLLM's in that of mixed precision. With
        `use_peft` a part of the actor is trained, and the reference is the actor with the adapters disabled. Both are
        quantized if the recipe says so; a vLLM engine has dequantized weights.

        Args:
            graph: *optional*, defaults to the run's graph.

        Raises:
            PlanError: a config cannot be read, a model's family has no table, or the policy has too few positions for
                PPO's responses.
        """
        bf16, fp16 = self.settings["bf16"], self.settings["fp16"]
        mixed = 2 if bf16 is None or bf16 or fp16 else 0  # `bf16: null` is TRL's default, true unless fp16 is
        quantization = quantization_of(self.settings)
        specs: dict[str, Sequence[ModelSpec]] = {}
        for call in (graph or self.graph).calls:
            path = self.folders[call.role] / "config.json"
            config = read_json_mapping(path, "the model's config")
            if (family := str(config.get("model_type", ""))) not in FAMILIES:
                raise PlanError(
                    f"{path}: planning a recipe needs a table of the model family; {shown(family)} has none (known: "
                    f"{', '.join(sorted(FAMILIES))}). A run with plan: auto does not need it."
                )
            positions = config.get("max_position_embeddings")
            is_ppos = self.algorithm == "ppo" and call.role is Role.ACTOR  # GRPO and RLOO shorten responses
            if is_ppos and isinstance(positions, int) and (problem := no_room(self.longest_response, positions)):
                raise PlanError(f"{self.path}: {problem}.")
            head: Head = "lm" if call.role in (Role.ACTOR, Role.REFERENCE) else "score"
            size = config_bytes(config)
            if call.role in (Role.ACTOR, Role.CRITIC):
                size = dtype_bytes(trained_dtype(self.settings), size)
            by_vllm = call.kind is CallKind.GENERATE and self.engine == "vllm"
            if by_vllm:
                size = mixed or size
                config = {**config, "tie_word_embeddings": False} if unties(self.settings) else config
            try:
                spec = ModelSpec.from_config(config, head, bytes_per_element=size)
                spec = replace(spec, activation_bytes=mixed or size)
                if head == "lm" and not by_vllm:
                    spec = replace(spec, quantization=quantization)
                if call.role is Role.ACTOR and call.trains:
                    spec = replace(spec, trained_share=trained_share(self.settings, spec))
                if call.role is Role.REFERENCE and self.settings.get("use_peft"):
                    spec = replace(spec, is_base=True)
                specs[call.name] = (spec,)
            except PlanError as error:
                raise PlanError(*(f"{path}: {problem}" for problem in error.problems)) from None
        return specs

    @property
    def longest_response(self) -> int:
        """Largest number of tokens of a response."""
        return int(self.settings["response_length" if self.algorithm == "ppo" else "max_completion_length"])

    def workload(self, cluster: Cluster, episodes: int | None = None) -> Workload:
        """One iteration on the cluster's devices, in which every response has the largest number of tokens.

        Args:
            episodes: number of episodes of an iteration; *optional*, defaults to the recipe's number for each device.

        Raises:
            PlanError: the batches cannot be divided by the recipe's settings.
        """
        if self.algorithm != "ppo":
            return group_workload(self.settings, self.prompt_tokens, cluster, episodes)
        settings = self.settings
        longest = round(self.prompt_tokens + settings["response_length"])
        batch_size, accumulated = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
        share, parts = batch_size * accumulated, settings["num_mini_batches"]
        if episodes is not None and episodes % parts:
            raise PlanError(f"{episodes} episodes do not divide into num_mini_batches {parts} equal parts.")
        if episodes is None and share % parts:
            raise PlanError(
                f"{self.path}: per_device_train_batch_size {batch_size} x gradient_accumulation_steps {accumulated} = "
                f"{share} episodes do not divide into num_mini_batches {parts} equal parts; change one of the three."
            )
        return Workload(
            episodes=episodes or share * cluster.size,
            prompt_tokens=self.prompt_tokens,
            response_tokens=(settings["response_length"],),
            mini_batches=parts,
            epochs=settings["num_ppo_epochs"],
            recompute=recomputes(settings),
            forward_tokens=settings["local_rollout_forward_batch_size"] * longest,
            train_tokens=batch_size * longest,
        )


def config_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of one parameter element in a checkpoint, by its config; float32 if the config has no dtype."""
    return dtype_bytes(config.get("dtype") or config.get("torch_dtype"), 4)


def dtype_bytes(name: object, default: int) -> int:
    """Bytes of an element of the torch dtype with this name; `default` for another name."""
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    return sizes.get(str(name).removeprefix("torch."), default)


def read_recipe(recipe: str | Path, prompt_tokens: float | None = None) -> Recipe:
    """A recipe's models and settings. A model whose folder does not exist is searched in the recipe's folder, by the
    last part of its name.

    Raises:
        PlanError: there is no such recipe, a key is misspelt, a number is wrong, a model is missing, or a model has no
            config.
    """
    path = Path(recipe)
    if prompt_tokens is not None and not 1 <= prompt_tokens <= MAX_TOKENS:
        raise PlanError(f"--prompt-tokens is a number from 1 to {MAX_TOKENS:,}, not {prompt_tokens:g}.")
    settings = read_recipe_settings(path)
    algorithm = algorithm_of(settings, path)
    paths = [(key, settings[key]) for key in (*POLICY, *REWARD_PATHS, "value_model_path") if key in settings]
    Problems(
        f"{path}: {key} is a model's name or path, not {shown(value)}."
        for key, value in paths
        if not isinstance(value, str | None)
    ).refuse()
    policy = next((settings[key] for key in POLICY if settings.get(key)), None)  # null counts as missing
    reward = next((settings[key] for key in REWARD_PATHS if settings.get(key)), None)
    critic = settings.get("value_model_path") or reward
    needed = "sft_model_path and reward_model_path" if algorithm == "ppo" else "model_name_or_path"
    if policy is None or (critic is None and algorithm == "ppo"):
        raise PlanError(f"{path} names no models; it needs {needed}.")
    actor = _folder(policy, path)
    folders = {Role.ACTOR: actor, Role.REFERENCE: actor}
    if critic is not None and algorithm == "ppo":
        folders |= {Role.REWARD: _folder(reward or critic, path), Role.CRITIC: _folder(critic, path)}
    elif reward is not None:
        folders[Role.REWARD] = _folder(reward, path)
    defaults = {**DEFAULTS_OF[algorithm], **LOADING, **ADAPTER_DEFAULTS}
    planned = {key: settings.get(key, default) for key, default in defaults.items()}
    try:
        check_adapters(planned)
        trained_dtype(planned)
        quantization_of(planned)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    corrects = planned["vllm_importance_sampling_correction"]
    if algorithm != "ppo" and (problem := uncorrected(planned["max_staleness"], corrects)):
        raise PlanError(f"{path}: {problem}")
    read = Recipe(path, folders, planned, prompt_tokens or PROMPT_TOKENS, algorithm)
    temperature = settings.get("temperature")
    if read.engine == "vllm" and temperature is not None and temperature < MIN_TEMPERATURE:
        raise PlanError(
            f"{path}: temperature {temperature:g} is below the {MIN_TEMPERATURE:g} that vLLM samples with at least."
        )
    return read


def read_recipe_settings(path: Path) -> dict[str, Any]:
    """A recipe's settings. The settings of `common.settings` are checked and converted to numbers, and texts such as
    'no' are converted to booleans.

    A key that is similar to a setting's name is refused as misspelt. Any other unknown key is accepted here, because it
    may belong to the user's script; a run checks all keys.

    Raises:
        PlanError: there is no such file, it has no mapping, or keys or values are wrong; names all of them.
    """
    contents = read_yaml_mapping(path, "the recipe", "learning_rate: 3.0e-6")
    names = files(__package__).joinpath("settings.txt").read_text(encoding="utf-8").split()
    problems = Problems()
    for key in [key for key in contents if key not in names][:MAX_LISTED]:
        near = nearest(key, names, at_least=LIKE)
        if near:
            problems.append(f"{path}: no setting {shown(key)}; did you mean {near!r}?")
    read, wrong = read_settings({key: number_of_text(value) for key, value in contents.items() if key in SETTINGS})
    switches, unclear = read_booleans(contents)
    problems += [f"{path}: {problem}" for problem in (*wrong, *unclear)]
    numbers = {key for defaults in DEFAULTS_OF.values() for key, value in defaults.items() if isinstance(value, int)}
    for key in sorted(numbers | {"generation_batch_size", "steps_per_generation"}):
        if (read.get(key) or 1) > MAX_TOKENS:
            problems.append(f"{path}: {key} {read[key]:,} is more than the {MAX_TOKENS:,} that are planned for.")
    problems.refuse()
    return {**contents, **read, **switches}


def is_plan(path: Path) -> bool:
    """True if a YAML file is an execution plan and not a recipe. Raises `PlanError` if it cannot be read."""
    return "calls" in read_yaml_mapping(path, "the recipe", "learning_rate: 3.0e-6")


def _folder(model: str, recipe: Path) -> Path:
    for folder in (Path(model), recipe.parent / model, recipe.parent / Path(model).name):
        if exists(folder / "config.json"):
            return folder
    sibling = shortened(recipe.parent / Path(model).name)
    remedy = "give a model's folder on disk"
    if _HUB_NAME.fullmatch(model):
        remedy += (
            f", or, if it is a name of the Hub, which planning does not ask, put its config.json beside the recipe "
            f"(hf download {model} config.json --local-dir {sibling})"
        )
    raise PlanError(f"{recipe}: there is no config.json in {shown(model)}, nor in {sibling}; {remedy}.")


def check_adapters(settings: Mapping[str, Any]) -> None:
    """Raises `PlanError` if modules are not names. The rank is checked by `common.settings`."""
    for name in ("lora_target_modules", "lora_modules_to_save"):
        value = settings[name]
        texts = value is None or isinstance(value, str)
        if not texts and not (isinstance(value, list) and all(isinstance(module, str) for module in value)):
            raise PlanError(f"{name} is a list of names of modules, not {shown(value)}.")


def trained_share(settings: Mapping[str, Any], spec: ModelSpec) -> float:
    """The share of a policy's elements that a recipe trains: 1 without `use_peft`. LoRA of rank r adds r (m + n)
    elements to a matrix of m x n; `lora_modules_to_save` are trained in full. Missing settings have their
    `ADAPTER_DEFAULTS`."""
    settings = {**ADAPTER_DEFAULTS, **settings}
    if not settings["use_peft"]:
        return 1.0
    targets = _names(settings["lora_target_modules"]) or _TARGETS_OF_FAMILY.get(spec.family, _USUAL_TARGETS)
    saved = _names(settings["lora_modules_to_save"])
    rows_and_columns = sum(sum(p.shape) for p in spec.parameters if _is_target(p, targets, spec))
    adapted = settings["lora_r"] * rows_and_columns
    copied = sum(parameter.elements for parameter in spec.parameters if _module(parameter) in saved)
    return float((adapted + copied) / (spec.elements + adapted + copied))


def unties(settings: Mapping[str, Any]) -> bool:
    """True if the adapters of a recipe change the language head or the embedding. If a policy ties the two, its engine
    then holds both."""
    settings = {**ADAPTER_DEFAULTS, **settings}
    modules = {*_names(settings["lora_target_modules"]), *_names(settings["lora_modules_to_save"])}
    return bool(settings["use_peft"]) and not modules.isdisjoint(_ENDS)


def _names(value: str | Sequence[str] | None) -> Sequence[str]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _is_target(parameter: ParameterSpec, targets: Sequence[str], spec: ModelSpec) -> bool:
    if len(parameter.shape) != 2 or parameter.is_router:  # PEFT adapts linear layers
        return False
    return 0 <= parameter.layer < spec.layers if ALL_LINEAR in targets else _module(parameter) in targets


def _module(parameter: ParameterSpec) -> str:
    """The last part of the name of a parameter's module."""
    return parameter.name.rpartition(".")[0].rpartition(".")[2]
