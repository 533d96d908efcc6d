"""Runs at the start of every Python process whose path has this folder first: of the vLLM engines of `proof.py` and
their workers. Seeds the fault that the file `PROOF_FAULT` names into what a worker loads, or into where it lies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


FILE = Path(os.environ.get("PROOF_FAULT", os.devnull))


def fault() -> str:
    return FILE.read_text() if FILE.is_file() else ""


def seed_faults() -> None:
    import torch
    from vllm import LLM
    from vllm.model_executor import parameter as parameters
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from trl_realloc.engines.generation import weight_proof, weight_receiver

    transfer = weight_receiver.SharedMemoryWeightTransfer
    old: dict[str, torch.Tensor] = {}  # what lay in the model before the update
    tied: list[torch.Tensor] = []  # a head before it got a weight of its own

    # --- where weights lie, after vLLM has loaded them ------------------------------------------------------------

    def restore(live: dict[str, Any], names: Callable[[str], bool]) -> None:
        for name, tensor in live.items():
            if names(name) and tensor.numel():
                tensor.data.copy_(old[name])

    def bits(tensor: Any) -> Any:
        return tensor.data.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)

    def own_old_head(model: Any) -> None:
        tied.append(model.lm_head.weight)
        model.lm_head.weight = torch.nn.Parameter(old["model.embed_tokens.weight"].clone(), requires_grad=False)

    def roll(tensor: Any) -> None:
        tensor.data.copy_(tensor.data.roll(1, 0))

    def rounded(tensor: Any) -> None:
        tensor.data.copy_(tensor.data.to(torch.bfloat16))

    def after(name: str, model: Any) -> None:  # of a Llama or a Qwen
        live = dict(model.named_parameters())
        if not name:
            return
        norm, embedding = live["model.norm.weight"], live["model.embed_tokens.weight"]
        is_first = torch.distributed.get_rank() == 0
        if name == "a norm keeps its old values":
            restore(live, lambda n: n == "model.layers.1.input_layernorm.weight")
        elif name == "the embedding keeps its old values":
            restore(live, lambda n: n == "model.embed_tokens.weight")
        elif name == "everything keeps its old values" or name == "an update is lost between two samples":
            restore(live, lambda n: True)
        elif name == "half of the layers keep their old values":
            restore(live, lambda n: "layers.1." in n)
        elif name == "a bias keeps its old values":
            restore(live, lambda n: n == "model.layers.0.self_attn.qkv_proj.bias")
        elif name == "one bit where a norm lies":
            bits(norm)[torch.randint(len(bits(norm)), ())] ^= 1
        elif name == "the top bit where the embedding lies":
            bits(embedding)[torch.randint(embedding.shape[1], ())] ^= -1 << 8 * embedding.element_size() - 1
        elif name == "rows of the embedding lie one further":
            roll(embedding)
        elif name == "a norm is rounded to bfloat16 where it lies":
            rounded(norm)
        elif name == "the norms of two layers lie exchanged":
            one, other = (live[f"model.layers.{n}.input_layernorm.weight"].data for n in (0, 1))
            one.copy_(other.clone()), other.copy_(old["model.layers.0.input_layernorm.weight"])
        elif name == "a tied head has old values of its own":
            own_old_head(model)
        elif name == "one worker's norm keeps its old values" and is_first:
            restore(live, lambda n: n == "model.norm.weight")

    begin, finish = transfer.start_weight_update, transfer.finish_weight_update
    tied_layers = weight_receiver._tied_layers

    def begun(self: Any) -> None:
        old.update({name: tensor.detach().clone() for name, tensor in self.model.named_parameters()})
        if tied:  # again, after a fault
            self.model.lm_head.weight = tied[0]
        begin(self)

    def finished(self: Any) -> None:
        followed = fault() != "a tied head computes with its old packed copy"
        weight_receiver._tied_layers = tied_layers if followed else lambda model: []
        finish(self)
        after(fault(), self.model)

    transfer.start_weight_update, transfer.finish_weight_update = begun, finished  # type: ignore[method-assign]

    # --- what the loaders of layers copy into memory; the first pass, without memory, only counts --------------------

    def seeded(owner: Any, method: str, names: dict[str, Callable[..., Any]]) -> None:
        original = getattr(owner, method)

        def loader(self: Any, loaded_weight: Any, **settings: Any) -> Any:
            seed = names.get(fault())
            if seed is None or self.data.is_meta:
                return original(self, loaded_weight, **settings)
            return seed(original, self, loaded_weight, **settings)

        setattr(owner, method, loader)

    def of_another_worker(load: Any, self: Any, weight: Any, **settings: Any) -> None:
        own, self.tp_rank = self.tp_rank, 1 - self.tp_rank if self.tp_rank else 0  # both hold the first part
        load(self, weight, **settings)
        self.tp_rank = own

    def transposed(load: Any, self: Any, weight: Any, **settings: Any) -> None:
        load(self, weight.t() if weight.shape[0] == weight.shape[1] else weight, **settings)

    def exchanged(load: Any, self: Any, weight: Any, **settings: Any) -> None:
        settings["shard_offset"] = settings["shard_size"] - settings["shard_offset"]
        load(self, weight, **settings)

    def skipped(load: Any, self: Any, weight: Any, **settings: Any) -> None:
        if settings["shard_id"] != "k":
            load(self, weight, **settings)

    weight = parameters.ModelWeightParameter
    seeded(weight, "load_qkv_weight", {"a part of q, k, v is not copied": skipped})
    seeded(weight, "load_merged_column_weight", {"gate and up are loaded exchanged": exchanged})
    rows = {"a worker loads the other's columns": of_another_worker, "a square matrix is loaded transposed": transposed}
    seeded(weight, "load_row_parallel_weight", rows)

    load_vocabulary = VocabParallelEmbedding.weight_loader

    def vocabulary(self: Any, param: Any, loaded_weight: Any) -> None:
        if fault() == "a worker loads the other's rows of the vocabulary" and not param.is_meta:
            loaded_weight = loaded_weight.roll(len(loaded_weight) // 2, 0)
        load_vocabulary(self, param, loaded_weight)

    VocabParallelEmbedding.weight_loader = vocabulary

    # --- engines that sleep, and the share of the proof -------------------------------------------------------------

    def without_digests(names: dict[str, Any]) -> None:
        zero = torch.zeros((), dtype=torch.int64)
        if fault() == "no proof":
            weight_proof.digest, weight_proof.strided_digest = (lambda *given: zero,) * 2
        else:
            weight_proof.digest, weight_proof.strided_digest = names["digest"], names["strided_digest"]

    original = {name: getattr(weight_proof, name) for name in ("digest", "strided_digest")}
    began = transfer.start_weight_update

    def measured(self: Any) -> None:
        without_digests(original)
        began(self)

    transfer.start_weight_update = measured  # type: ignore[method-assign]

    def woken(self: Any) -> None:  # called in the worker when an engine wakes
        live = dict(self.model_runner.model.named_parameters())
        if fault() == "an engine wakes without its weights":
            live["model.embed_tokens.weight"].data.zero_()
        elif fault() == "an engine wakes with the weights of an earlier update":
            restore(live, lambda n: True)

    weight_receiver.RolloutWorker.seed_on_waking = woken  # type: ignore[attr-defined]
    wake = LLM.wake_up

    def waking(self: Any, *given: Any, **named: Any) -> None:
        wake(self, *given, **named)
        self.collective_rpc("seed_on_waking")

    LLM.wake_up = waking


if "PROOF_FAULT" in os.environ and any("vllm_host" in part or "multiprocessing" in part for part in sys.orig_argv):
    seed_faults()
