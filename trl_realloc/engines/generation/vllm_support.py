"""Abilities of the installed vLLM: whether it is installed, the models it serves, and the engine arguments that a user
may set. Does not import vLLM.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import shown, unknown_keys
from ...plan.assignment import MAX_SLOTS
from ...plan.model_spec import FAMILIES, ModelSpec


if TYPE_CHECKING:
    from transformers import PretrainedConfig


# families for which vLLM 0.26 and 0.27 use the embedding as the head, whatever their config says
_TIED = ("cohere", "cohere2", "cohere2_moe", "gemma", "gemma2", "gemma3n_text", "mpt")
_CPU_BLOCK = 128  # tokens per block of keys and values on the CPU, in vLLM 0.26 to 0.33
MAX_CPU_CACHE = 2**30  # bytes


def is_vllm_available() -> bool:
    """True if vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def why_not_served(config: PretrainedConfig, on_cpu: bool) -> str | None:
    """The reason why vLLM cannot generate with a model of this Transformers config; `None` if none is known."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if on_cpu and getattr(text, "model_type", None) == "nemotron_h" and "moe" in getattr(text, "layers_block_type", ()):
        return "on a CPU vLLM has experts with a gate alone, and nemotron_h's have none"
    if getattr(text, "model_type", None) == "gpt_oss":  # it writes into parameters (`vllm_compat.unloaded_parameters`)
        return "vLLM can load the experts of gpt_oss when it starts, but not the new weights of each update"
    if getattr(text, "model_type", None) in _TIED and not getattr(text, "tie_word_embeddings", True):
        return f"in vLLM the head of {text.model_type} is its embedding, and this policy's head is another one"
    heads = getattr(text, "num_attention_heads", None)
    if not on_cpu or not heads or getattr(text, "kv_lora_rank", None) is not None:
        return None
    size, sizes = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads, cpu_head_sizes()
    if not size or not sizes or size in sizes:
        return None
    return f"on a CPU vLLM has attention for heads of {', '.join(map(str, sizes))}, not for this model's {size}"


@functools.cache
def cpu_head_sizes() -> tuple[int, ...]:
    """The head sizes that the installed vLLM's CPU attention supports, from its source; empty if it cannot be read, so
    that vLLM itself refuses one."""
    backend = _class("v1/attention/backends/cpu_attn.py", "CPUAttentionBackend")
    for function in [] if backend is None else backend.body:
        if isinstance(function, ast.FunctionDef) and function.name == "get_supported_head_sizes":
            for statement in function.body:
                if isinstance(statement, ast.Return) and isinstance(statement.value, ast.List):
                    return tuple(map(ast.literal_eval, statement.value.elts))
    return ()


def engine_slots(samples: int, settings: Mapping[str, Any]) -> int:
    """Number of samples that an engine decodes at once; the others wait.

    Args:
        settings: the engine's settings, with the user's `engine_kwargs`. vLLM decodes at most as many samples as a
            forward has tokens.
    """
    tokens = (settings.get("engine_kwargs") or {}).get("max_num_batched_tokens")
    return min(samples, MAX_SLOTS, tokens if isinstance(tokens, int) and tokens > 0 else MAX_SLOTS)


def cpu_cache_bytes(
    config: Mapping[str, object],
    dtype: str,
    *,
    samples: int,
    tokens: int,
    tp: int = 1,
    engine_kwargs: Mapping[str, object] | None = None,
) -> int:
    """Bytes for keys and values that a CPU engine takes in each process: the need of all of its samples at their
    greatest length, at most 1 GiB, at least the need of one sample. vLLM cycles through its blocks, so all memory is in
    use after some batches.

    Args:
        config: the model's config. 1 GiB for a family that is not in `model_spec.FAMILIES`, whose layers may store
            something else.
        dtype: dtype of the keys and values, such as "float32".
        samples: most samples that are generated at the same time.
        tokens: most tokens of a prompt and its response.
        engine_kwargs: the user's arguments of vLLM's engine. 1 GiB if there are any, as they may change the cache.
    """
    if config.get("model_type") not in FAMILIES or engine_kwargs:
        return MAX_CPU_CACHE
    spec = ModelSpec.from_config(config, bytes_per_element=2 if "16" in dtype else 4)
    of_token = spec.kv_bytes_per_token // spec.kv_heads * math.ceil(spec.kv_heads / tp)
    of_sample, of_block = math.ceil(tokens / _CPU_BLOCK), _CPU_BLOCK * of_token
    most = max(MAX_CPU_CACHE // of_block, of_sample + 1)  # blocks, one of which vLLM reserves
    return min(samples * of_sample + 1, most) * of_block


# --- arguments of vLLM's engine --------------------------------------------------------------------------------------

_POLICY = "the engine serves the policy that is trained; give the trainer another model"
_WEIGHTS = "training sends the weights to the engine, which reads no checkpoint; leave it out"
_TOKENS = "the engine takes and gives token ids, and has no tokenizer; give the trainer another processing_class"
_DP = "the plan's dp is the number of engines; set dp of the call that generates"
_ONE_HOST = "an engine is one process with its workers on one host; leave it out"
_SAMPLING = "the trainer's settings decide the sampling, and training needs each token's probability as sampled"
_ADAPTERS = "adapters are merged into the weights that the engine gets; leave it out"
_DTYPE = "the engine gets the weights in the training's dtype, and vLLM checks that all its own have come"
_DRAFT = "an engine gets the weights of the policy alone, and a draft model would have none"
_OFFLOAD = "vLLM would keep using the copy of the weights that it made at its start; leave it out"
_EXPERTS = "vLLM would load the experts of the next weights where they were before it moved them; leave it out"
_OWN = "this package uses it to load weights and to draw tokens; leave it out"

# Arguments that the user cannot set: the reason, and what to set instead.
RESERVED_ENGINE_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "served_model_name", "hf_config_path", "hf_overrides"), _POLICY),
    **dict.fromkeys(("runner", "convert", "config_format", "model_class_overrides", "pooler_config"), _POLICY),
    **dict.fromkeys(
        ("load_format", "download_dir", "revision", "code_revision", "model_loader_extra_config"), _WEIGHTS
    ),
    **dict.fromkeys(("safetensors_load_strategy", "ignore_patterns", "hf_token"), _WEIGHTS),
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _TOKENS),
    "trust_remote_code": "no other engine can load a model with custom code; use one whose family Transformers has",
    "dtype": "the engine computes in the dtype of the training; set bf16, fp16 or neither",
    "seed": "every sample has a separate seed; set the run's seed",
    "max_model_len": "it is the longest prompt with the longest response; set response_length (of GRPO and RLOO, "
    "vllm_max_model_length)",
    "tensor_parallel_size": "it is the plan's tp; set tp of the call that generates, in the plan",
    "pipeline_parallel_size": "engine vllm has no pipeline stages; set tp of the call that generates, in the plan",
    "prefill_context_parallel_size": "a plan has no context parallelism; set tp of the call that generates",
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank", "data_parallel_size_local"), _DP),
    **dict.fromkeys(("data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"), _DP),
    **dict.fromkeys(("data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"), _DP),
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"), _ONE_HOST),
    "device_ids": "an engine runs on the devices of its mesh; set the mesh of the call that generates, in the plan",
    "gpu_memory_utilization": "it has a separate setting; set vllm_gpu_memory_utilization",
    **dict.fromkeys(("enable_sleep_mode", "enable_cumem_allocator"), "set vllm_enable_sleep_mode"),
    **dict.fromkeys(("quantization", "quantization_config"), _DTYPE),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFT),
    **dict.fromkeys(("offload_backend", "offload_group_size", "offload_num_in_group"), _OFFLOAD),
    **dict.fromkeys(("offload_prefetch_step", "offload_params"), _OFFLOAD),
    **dict.fromkeys(("enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size"), _EXPERTS),
    **dict.fromkeys(("logprobs_mode", "logits_processors", "generation_config"), _SAMPLING),
    **dict.fromkeys(("override_generation_config", "diffusion_config", "watermark_config"), _SAMPLING),
    **dict.fromkeys(("enable_lora", "default_mm_loras"), _ADAPTERS),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "weight_transfer_config", "scheduler_cls"), _OWN),
    **dict.fromkeys(("enable_prompt_embeds", "tokens_only"), _OWN),
}
_CACHE_BYTES = "on a GPU it is what vllm_gpu_memory_utilization leaves, which the planner counts; set that"


def engine_argument_problems(arguments: object, on_cpu: bool, setting: str = "vllm_engine_kwargs") -> list[str]:
    """A sentence for each of the user's arguments of vLLM's engine that cannot be passed on.

    Args:
        on_cpu: whether engines run on the CPU.
        setting: name of the user's setting.
    """
    if not isinstance(arguments, Mapping):
        return [f"{setting} is a mapping like {{max_num_seqs: 128}}, or None, not {shown(arguments)}."]
    reserved = (
        RESERVED_ENGINE_ARGUMENTS if on_cpu else {**RESERVED_ENGINE_ARGUMENTS, "kv_cache_memory_bytes": _CACHE_BYTES}
    )
    problems = [f"{setting} cannot set {name}: {reserved[name]}." for name in arguments if name in reserved]
    names = engine_argument_names()
    if names:
        unknown = [name for name in arguments if name not in reserved]
        problems += unknown_keys(unknown, sorted({*names} - {*reserved}), f"{setting}: vLLM's engine has no argument")
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            problems.append(f"{setting}: {name} goes to another process as JSON, which has no {shown(value)}.")
    return problems


@functools.cache
def engine_argument_names() -> tuple[str, ...]:
    """The names of the arguments of vLLM's engine, from the source of the installed release; empty if it cannot be
    read, so that the engine itself refuses a wrong one."""
    return annotated_fields("engine/arg_utils.py", "EngineArgs")


def annotated_fields(file: str, name: str) -> tuple[str, ...]:
    """The public fields of a class of the installed vLLM, from its source; empty if it cannot be read.

    Args:
        file: path in the package.
        name: name of the class.
    """
    definition = _class(file, name)
    names = [
        field.target.id
        for field in ([] if definition is None else definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return tuple(name for name in names if not name.startswith("_"))


def _class(file: str, name: str) -> ast.ClassDef | None:
    """A class of the installed vLLM, from its source; `None` if it cannot be read. `file` is a path in the package."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    try:
        module = ast.parse(Path(spec.origin).parent.joinpath(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name), None)
