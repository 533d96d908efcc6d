"""Uses of vLLM beyond its documented interface, and the differences between its releases; they are in this file alone.
Imported in vLLM's process only.

Run with vLLM 0.26.0 to 0.33.0 (docs/versions.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
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
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput


# each reload would warn once per layer that rotary embeddings, which have no parameters, were not loaded
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def register_transfer(name: str, engine: LLMEngine) -> None:
    """Register a weight-transfer engine under a name, once: registering a name twice raises."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)


def not_loaded(parameters: set[str], loaded: set[str]) -> set[str]:
    """The names of parameters that are not among those that `load_weights` says it has loaded. It leaves the inner
    module of a mixture's experts out of their names."""
    return {name for name in parameters - loaded if name.replace(".experts.routed_experts.", ".experts.") not in loaded}


def incomplete_layers(model: nn.Module) -> Iterator[str]:
    """During a reload, the names of fused layers of which only some parts were loaded. vLLM counts such a layer as
    loaded with its first part (q of q, k, v)."""
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if isinstance(layer, LinearBase) and info.can_load() and 0 < info.load_numel < info.load_numel_total:
            yield name


def unloaded_parameters(model: nn.Module, expected: Container[str]) -> Iterator[str]:
    """During a reload, the names of parameters of layers of which nothing has been loaded. Some models (the experts of
    gpt-oss) write weights into a parameter instead of calling its loader, and say that it is loaded. During a reload
    the parameter has no memory then, and vLLM goes on with the weights that it had.

    Args:
        expected: the names of the parameters that are loaded.
    """
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not info.load_numel:
            own = ((f"{prefix}.{name}".lstrip("."), p) for name, p in layer.named_parameters(recurse=False))
            yield from (name for name, parameter in own if parameter.is_meta and name in expected)


def copy_pending(model: nn.Module, memory: Tensor) -> None:
    """During a reload, copy what is in `memory` of the weights that vLLM keeps until it has all of a layer's. Those of
    whole layers it has copied from there, each worker its part of them."""
    storage = memory.untyped_storage().data_ptr()

    def own(value: Any) -> Any:
        lies_there = isinstance(value, Tensor) and value.untyped_storage().data_ptr() == storage
        return value.clone() if lies_there else value

    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            call.arguments.update({name: own(value) for name, value in call.arguments.items()})


def processed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """During a reload, the layers, with their names, whose parameters vLLM changes after it has loaded them: it packs
    or shuffles them for a kernel. On a CPU linear layers are then left without their weight."""
    for name, layer in model.named_modules():
        method, kept = getattr(layer, "quant_method", None), get_layerwise_info(layer).kernel_tensors
        if not isinstance(method, QuantizeMethodBase) or not kept:
            continue
        now = dict(layer.named_parameters(recurse=False))
        plain = isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        same = all(key in kept[0] and tensor.shape == kept[0][key].shape for key, tensor in now.items())
        if not (plain and same):
            yield name, layer


def packed_products(model: nn.Module) -> dict[str, Any]:
    """The products with packed copies of weights by which layers compute on a CPU, by the layers' names. Each time that
    a layer's weights are packed, it gets a new one."""
    return {name: layer.cpu_linear for name, layer in model.named_modules() if hasattr(layer, "cpu_linear")}


def meet_in(folder: str) -> None:
    """Let vLLM's processes meet by a file in `folder`. vLLM 0.33 makes one in the folder for temporary files, which
    stays there when a process is killed or ends at once; releases before it meet by a port."""
    for executor in (uniproc_executor, multiproc_executor):
        if hasattr(executor, "get_file_store_init_method"):
            executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_{uuid4().hex}"


def replace_draw(model_runner: Any, processor: type[Any], make: Callable[[Any], nn.Module]) -> None:
    """Replace the part of vLLM's sampler that draws tokens.

    Args:
        processor: the class of the logits processor that `make` gets an object of.

    Raises:
        RuntimeError: this release of vLLM has another sampler.
    """
    found = [p for p in model_runner.input_batch.logitsprocs.all if isinstance(p, processor)]
    sampler = model_runner.sampler
    if not found or not hasattr(sampler, "topk_topp_sampler"):
        raise RuntimeError(
            "the sampler of this vLLM release is not supported by trl_realloc; install vLLM 0.26.0 to 0.33.0."
        )
    sampler.topk_topp_sampler = make(found[0])


def drawn_so_far(engine: LLMEngine, request_id: str) -> tuple[list[int], list[float]]:
    """The tokens that vLLM has returned for a request and their log-probabilities. vLLM itself returns those of an
    aborted request in its asynchronous engine alone.

    With `RequestOutputKind.DELTA` they would need no private name, at the price of Python objects for each token.

    Args:
        engine: vLLM's `LLMEngine`.
        request_id: of an unfinished request, as given to `add_request`.

    Raises:
        RuntimeError: this release of vLLM keeps them elsewhere.
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
    "this vLLM release does not say where it keeps the tokens of an unfinished request, so trl_realloc cannot move "
    "samples between engines; install vLLM 0.26.0 to 0.33.0, or choose a plan without migration"
)


def count_outputs(engine: LLMEngine) -> Callable[[], int]:
    """Count, from now on, the tokens that vLLM's engine core gives out, also those of requests that are aborted later.

    Returns:
        A function that returns their number.
    """
    core, count = engine.engine_core, 0
    get_output = core.get_output

    def counted() -> Any:
        nonlocal count
        outputs = get_output()
        count += sum(len(output.new_token_ids) for output in outputs.outputs)
        return outputs

    core.get_output = counted
    return lambda: count


def abort(engine: LLMEngine, request_ids: Sequence[str]) -> None:
    """Abort requests between two steps. Of a step that is under way vLLM then drops these requests' tokens."""
    if request_ids:
        engine.abort_request(list(request_ids))


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """Wait for the steps that are under way, without beginning another. There are some with asynchronous scheduling,
    vLLM's default on a GPU, also when all requests have finished. They must not read weights that are being loaded, or
    memory that is given back.

    Returns:
        The outputs of the requests that these steps have finished.
    """
    core = engine.engine_core.engine_core  # the engine core runs in this process
    finished = []
    if core.batch_queue:
        core.pause_scheduler(mode="keep", clear_cache=False)  # otherwise `step` launches a step for each that it awaits
        try:
            while core.batch_queue:
                finished += engine.step()
        finally:
            core.resume_scheduler()
    return finished


def wait_without_yielding() -> None:
    """Let this process, where it waits for another of vLLM's, look again and again without giving up its core between
    two looks (`sched_yield`).

    For processes that share cores with others. Linux 6.18 lets those that give up their core so win: with four busy
    processes beside the two workers of an engine on two cores, the engine's owner, in the session of the busy ones, had
    no core for 3 to 7 s, and for 0.8 s without. The engine generates as many tokens in both cases.
    """
    vllm_utils.USE_SCHED_YIELD = False


def end_grammars_by_eos(engine: LLMEngine) -> None:
    """Let a grammar end with the tokenizer's eos token and a request's own stop tokens alone.

    vLLM 0.32 and 0.33 let it end with the eos tokens of the model's config too. They do not stop a request with
    `ignore_eos`, so tokens that no grammar allows would follow. Such a request makes no other use of them.

    Args:
        engine: vLLM's `LLMEngine`.
    """
    engine.input_processor.generation_config_fields.pop("eos_token_id", None)


def start_workers_in_turn() -> None:
    """Let the thread that builds an engine start vLLM's workers, one after the other.

    On GPUs vLLM 0.33 starts them at the same time, from threads that end once all have started. The kernel kills a
    process that has tied itself to its parent, as a worker does first (`child_process.die_with_parent`), when the
    thread that started it ends. That thread waits for a worker whose configuration does not fit into a pipe (64 KiB;
    that of a small Llama has 14 KiB), and for the start of the others.
    """
    MultiprocExecutor._can_start_workers_concurrently = lambda self, inherited_fds: False


def draws_by_position(engine: LLMEngine) -> bool:
    """True if vLLM's own sampler draws a token by the request's seed and the token's position in the text. Its newest
    model runner does (`tl.randint(seed, pos)` in v1/worker/gpu/sample/gumbel.py of 0.27.1; read, not run), so that a
    response that another engine has begun gets the random numbers that it would have got there. The older runner has a
    generator for each request, which begins anew."""
    return bool(getattr(engine.vllm_config, "use_v2_model_runner", False))


__all__ = [
    "BatchUpdate",
    "LogitsProcessor",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "abort",
    "copy_pending",
    "count_drawn",
    "count_outputs",
    "drain",
    "drawn_so_far",
    "draws_by_position",
    "end_grammars_by_eos",
    "finalize_layerwise_reload",
    "incomplete_layers",
    "initialize_layerwise_reload",
    "meet_in",
    "packed_products",
    "process_dict_updates",
    "processed_layers",
    "register_transfer",
    "replace_draw",
    "start_workers_in_turn",
    "unloaded_parameters",
    "wait_without_yielding",
]
