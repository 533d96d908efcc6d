"""All uses of undocumented vLLM interfaces, and the differences between vLLM's releases. Imported in vLLM's process
only.

Run with vLLM 0.26.0 to 0.33.0 (docs/versions.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import Tensor, nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import utils as vllm_utils
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput


def register_transfer(name: str, engine: LLMEngine) -> None:
    """Register a weight-transfer engine under a name, once: registering a name twice raises."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)


def finalize_reload(model: nn.Module, config: Any) -> None:
    """End a reload. Layers without new weights keep theirs, of which vLLM would warn."""
    # here, because vLLM's configuration of its loggers resets their levels
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    finalize_layerwise_reload(model, config)


def not_loaded(parameters: set[str], loaded: set[str]) -> set[str]:
    """The names of parameters that `load_weights` does not report as loaded. Its names omit the inner module of a
    mixture's experts."""
    return {name for name in parameters - loaded if name.replace(".experts.routed_experts.", ".experts.") not in loaded}


def incomplete_layers(model: nn.Module) -> Iterator[str]:
    """During a reload, the names of fused layers of which only some parts were loaded. vLLM counts such a layer as
    loaded with its first part (q of q, k, v)."""
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if isinstance(layer, LinearBase) and info.can_load() and 0 < info.load_numel < info.load_numel_total:
            yield name


def unloaded_parameters(model: nn.Module, expected: Container[str]) -> Iterator[str]:
    """During a reload, the names of parameters of layers without any loaded weight. Some models (the experts of
    gpt-oss) write weights into a parameter instead of calling its loader, and report it as loaded. But the parameter
    has no memory during a reload, and vLLM continues with the old weights.

    Args:
        expected: names of the loaded parameters.
    """
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not info.load_numel:
            parameters = ((f"{prefix}.{name}".lstrip("."), p) for name, p in layer.named_parameters(recurse=False))
            yield from (name for name, parameter in parameters if parameter.is_meta and name in expected)


def copy_pending(model: nn.Module, memory: Tensor) -> None:
    """During a reload, copy the weights in `memory` that vLLM holds until a layer is complete. For complete layers each
    worker has already copied its part."""
    storage = memory.untyped_storage().data_ptr()

    def copied(value: Any) -> Any:
        lies_there = isinstance(value, Tensor) and value.untyped_storage().data_ptr() == storage
        return value.clone() if lies_there else value

    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            call.arguments.update({name: copied(value) for name, value in call.arguments.items()})


def processed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """During a reload, the layers, with their names, whose parameters vLLM changes after loading: it packs or shuffles
    them for a kernel. On a CPU this removes the weight of linear layers."""
    for name, layer in model.named_modules():
        method, kernel = getattr(layer, "quant_method", None), get_layerwise_info(layer).kernel_tensors
        if not isinstance(method, QuantizeMethodBase) or not kernel:
            continue
        now = dict(layer.named_parameters(recurse=False))
        plain = isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        same = all(key in kernel[0] and tensor.shape == kernel[0][key].shape for key, tensor in now.items())
        if not (plain and same):
            yield name, layer


def loaded_in_place(model: nn.Module) -> set[str]:
    """During a reload, the names of tensors that vLLM loads at once and keeps in their memory, such as the correction
    bias of a router, which the routing has a reference to. The others have no memory until their layer is complete."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in model.named_modules()
        for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        if not tensor.is_meta
        and getattr(getattr(tensor, "weight_loader", None), "__name__", "") != "online_process_loader"
    }


def packed_products(model: nn.Module) -> dict[str, Any]:
    """The products with packed weights by which layers compute on a CPU, by the layers' names. Packing a layer's
    weights creates a new one."""
    return {name: layer.cpu_linear for name, layer in model.named_modules() if hasattr(layer, "cpu_linear")}


def meet_in(folder: str) -> None:
    """Make vLLM's processes meet by a file in `folder`. vLLM 0.33 makes it in the folder for temporary files, where it
    remains when a process is killed; earlier releases meet by a port."""
    for executor in (uniproc_executor, multiproc_executor):
        if hasattr(executor, "get_file_store_init_method"):
            executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_{uuid4().hex}"


def replace_draw(model_runner: Any, processor: type[Any], make: Callable[[Any], nn.Module]) -> None:
    """Replace the part of vLLM's sampler that samples tokens.

    Args:
        processor: class of the logits processor whose instance `make` gets.

    Raises:
        RuntimeError: this release of vLLM has another sampler.
    """
    processors = [p for p in model_runner.input_batch.logitsprocs.all if isinstance(p, processor)]
    sampler = model_runner.sampler
    if not processors or not hasattr(sampler, "topk_topp_sampler"):
        raise RuntimeError(
            "the sampler of this vLLM release is not supported by trl_realloc; install vLLM 0.26.0 to 0.33.0."
        )
    sampler.topk_topp_sampler = make(processors[0])


def drawn_so_far(engine: LLMEngine, request_id: str) -> tuple[list[int], list[float]]:
    """The tokens that vLLM has returned for an unfinished request, and their log-probabilities. vLLM returns those of
    an aborted request only in its asynchronous engine.

    `RequestOutputKind.DELTA` would need no private name, but makes Python objects for each token.

    Args:
        request_id: request id of `add_request`.

    Raises:
        RuntimeError: this release of vLLM stores them elsewhere.
    """
    try:
        state = _state(engine, request_id)
        tokens, logprobs = list(state.detokenizer.output_token_ids), list(state.logprobs_processor.logprobs.logprobs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{_NO_STATE}: {type(error).__name__}: {error}") from error
    if len(tokens) != len(logprobs):
        raise RuntimeError(f"{_NO_STATE}: {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    return tokens, logprobs


def count_drawn(engine: LLMEngine, request_id: str) -> int:
    """The number of tokens of `drawn_so_far`, in less time."""
    try:
        return len(_state(engine, request_id).detokenizer.output_token_ids)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{_NO_STATE}: {type(error).__name__}: {error}") from error


def _state(engine: LLMEngine, request_id: str) -> Any:
    processor = engine.output_processor
    (internal_id,) = processor.external_req_ids[request_id]
    return processor.request_states[internal_id]


_NO_STATE = (
    "trl_realloc cannot read the tokens of an unfinished request from this vLLM release, and so cannot move samples "
    "between engines; install vLLM 0.26.0 to 0.33.0, or choose a plan without migration"
)


def abort(engine: LLMEngine, request_ids: Sequence[str]) -> None:
    """Abort requests between two steps. vLLM then drops their tokens of a step in progress."""
    if request_ids:
        engine.abort_request(list(request_ids))


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """Wait for the steps in progress without starting another. With asynchronous scheduling, vLLM's default on a GPU,
    there are some even when all requests have finished. They must not read weights that are being loaded, or freed
    memory. Returns the outputs of the requests that these steps have finished."""
    core = engine.engine_core.engine_core  # the engine core runs in this process
    finished = []
    if core.batch_queue:
        core.pause_scheduler(mode="keep", clear_cache=False)  # otherwise `step` launches another step each time
        try:
            while core.batch_queue:
                finished += engine.step()
        finally:
            core.resume_scheduler()
    return finished


def wait_without_yielding() -> None:
    """Make this process poll for other processes of vLLM without yielding its core between two polls (`sched_yield`).

    For processes that share cores with others. Linux 6.18 favors processes that yield: with four busy processes beside
    the two workers of an engine on two cores, the engine's owner, in the session of the busy ones, had no core for 3 to
    7 s, and for 0.8 s without yielding. The engine generates as many tokens in both cases.
    """
    vllm_utils.USE_SCHED_YIELD = False


def end_grammars_by_eos(engine: LLMEngine) -> None:
    """Make a grammar end only with the tokenizer's eos token and a request's own stop tokens.

    vLLM 0.32 and 0.33 let it end with the eos tokens of the model's config too. They do not stop a request with
    `ignore_eos`, so tokens that no grammar allows would follow. Such a request does not use them otherwise.
    """
    engine.input_processor.generation_config_fields.pop("eos_token_id", None)


def start_workers_in_turn() -> None:
    """Make the thread that builds an engine start vLLM's workers, one after the other.

    On GPUs vLLM 0.33 starts them at the same time, from threads that end once all have started. But a worker first ties
    itself to its parent (`child_process.die_with_parent`), and the kernel kills such a process when the thread that
    started it ends. That thread waits for a worker only if its configuration does not fit into a pipe (64 KiB; a small
    Llama's has 14 KiB), and for the start of the others.
    """
    MultiprocExecutor._can_start_workers_concurrently = lambda self, inherited_fds: False


# --- mixtures of experts -------------------------------------------------------------------------------


def pack_experts_again() -> None:
    """Make new weights of experts on a CPU be packed for their kernel, as those of the engine's start are. vLLM 0.32
    packs only the latter, so after an update its experts compute with weights in the wrong order."""
    try:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    except ImportError:  # a release that computes experts on a CPU in another way
        return
    setup = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if setup is None:
        return

    def set_up(method: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        is_update = method.moe_kernel is not None
        setup(method, layer, *args, **kwargs)
        pack = getattr(getattr(method.moe_kernel, "fused_experts", None), "process_weights_after_loading", None)
        if is_update and pack is not None:
            pack(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up


class NoRoutes(Exception):
    """The experts that this engine chooses cannot be told by token. The message says why."""


def watch_routers(model: nn.Module, see: Callable[[int, Tensor], None]) -> int:
    """Make the routers of a mixture call `see` with their number and the chosen experts, (tokens, k), in each forward.
    Returns the number of routers.

    Raises:
        NoRoutes: a router has no such callback.
    """
    runners: list[Any] = [
        module for module in model.modules() if hasattr(module, "router") and hasattr(module, "layer_id")
    ]
    if not runners:
        raise NoRoutes("vLLM's model has no routers")
    for number, runner in enumerate(runners):
        if not hasattr(runner.router, "set_capture_fn") or runner._quant_method.is_monolithic:
            raise NoRoutes(f"in this vLLM release {type(runner).__name__} does not tell the experts it chooses")
        runner.router.set_capture_fn(partial(see, number))
    return len(runners)


def full_attention_group(kv_cache_config: Any) -> tuple[int, str]:
    """The number of a group of layers whose keys and values stay in the cache to a request's end, and one of its
    layers.

    Raises:
        NoRoutes: there is none.
    """
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec) and group.layer_names:
            return number, group.layer_names[0]
    raise NoRoutes("no layer keeps all of a request's keys and values")


def slots_of_forward(layer: str) -> Tensor | None:
    """(tokens,) the places in the cache of the keys and values of the tokens of the current forward, -1 for padding;
    `None` in a forward without a cache."""
    slots = getattr(get_forward_context(), "slot_mapping", None)
    found: Tensor | None = slots.get(layer) if isinstance(slots, dict) else None
    return found


class BlocksOfRequests:
    """The blocks of the cache in which requests have their keys and values, also right after a request's end, when
    vLLM has freed them and no later forward has run.

    Args:
        group: number of the group of layers (`full_attention_group`).
    """

    def __init__(self, engine: LLMEngine, group: int) -> None:
        self._processor, self._group = engine.output_processor, group
        self._manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        self.block_size: int = self._manager.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        self._freed: dict[str, list[int]] = {}
        free = self._manager.free

        def note_and_free(request: Any) -> None:
            self._freed[request.request_id] = self._blocks(request.request_id)
            free(request)

        self._manager.free = note_and_free

    def name(self, request_id: str) -> str:
        """vLLM's own name of an unfinished request."""
        (internal_id,) = self._processor.external_req_ids[request_id]
        return str(internal_id)

    def take(self, name: str, *, ended: bool) -> list[int]:
        """The blocks of a request, by vLLM's own name. Those of a request that has `ended` are forgotten then."""
        return self._freed.pop(name) if ended else self._blocks(name)

    def forget(self) -> None:
        """Forget the blocks of requests that have ended."""
        self._freed.clear()

    def _blocks(self, name: str) -> list[int]:
        return list(self._manager.get_block_ids(name)[self._group])


def draws_by_position(engine: LLMEngine) -> bool:
    """True if vLLM's own sampler chooses a token by the request's seed and the token's position in the text. Its newest
    model runner does (`tl.randint(seed, pos)` in v1/worker/gpu/sample/gumbel.py of 0.27.1; read, not run), so a
    response that another engine has begun gets the same random numbers as there. The older runner has a new generator
    for each request."""
    return bool(getattr(engine.vllm_config, "use_v2_model_runner", False))


__all__ = [
    "BatchUpdate",
    "BlocksOfRequests",
    "LogitsProcessor",
    "NoRoutes",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "abort",
    "copy_pending",
    "count_drawn",
    "drain",
    "drawn_so_far",
    "draws_by_position",
    "end_grammars_by_eos",
    "finalize_reload",
    "full_attention_group",
    "incomplete_layers",
    "initialize_layerwise_reload",
    "loaded_in_place",
    "meet_in",
    "pack_experts_again",
    "packed_products",
    "process_dict_updates",
    "processed_layers",
    "register_transfer",
    "replace_draw",
    "slots_of_forward",
    "start_workers_in_turn",
    "unloaded_parameters",
    "wait_without_yielding",
    "watch_routers",
]
