"""Whether an engine that holds other weights than it was sent is found, each time, and never without a fault.

    python benchmarks/proof.py --json benchmarks/results/proof.json [--parts faults loads share] [--loads 1000]

- `faults`: seeded into the memory that weights go through, into what vLLM's workers load, into where it lies, into
  engines that wake or generate, and into reallocated copies. Each kind `TIMES` times, with other values. Before and
  after each, a load without a fault must be taken.
- `loads`: without faults, of families and dtypes, each with new values.
- `share`: how much longer loads take than without digests (medians of alternating loads of a Llama of 135 million
  parameters), as a share of the load. It is timed: run it alone.

Engines are vLLM's, on the CPU, in processes that are forked from one that has imported vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import result_file
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "multiprocess")]

from engine_forks import EngineForks  # noqa: E402

from trl_realloc.engines.base import EngineError, Updates  # noqa: E402
from trl_realloc.engines.generation import engine_process, weight_sender  # noqa: E402
from trl_realloc.engines.generation.vllm import VLLMEngine  # noqa: E402
from trl_realloc.engines.requests import GenerationRequest, Sampling  # noqa: E402
from trl_realloc.engines.training.weight_export import buckets  # noqa: E402
from trl_realloc.plan.cluster import Cluster, DeviceMesh  # noqa: E402, F401
from trl_realloc.plan.model_spec import ModelSpec  # noqa: E402
from trl_realloc.realloc.layout import Layout, whole  # noqa: E402
from trl_realloc.runtime.parameters.copy_digests import CopyDigests, DigestSums  # noqa: E402


TIMES = 3
LENGTH = 64
COMMON: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": LENGTH}
SHAPE: dict[str, Any] = {
    **COMMON,
    "vocab_size": 130,  # which vLLM pads
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
}
GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 1}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**GROUPED, head_dim=32),
    "llama, tied": lambda: LlamaConfig(**GROUPED, head_dim=32, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=32),
    "gemma": lambda: GemmaConfig(**GROUPED, head_dim=32),
    "mistral": lambda: MistralConfig(**GROUPED, head_dim=32),
    "phi": lambda: PhiConfig(**{**SHAPE, "intermediate_size": 256}),
    "phi3": lambda: Phi3Config(**GROUPED),
    "gpt2": lambda: GPT2Config(**COMMON, vocab_size=130, n_embd=64, n_layer=2, n_head=2, n_positions=LENGTH),
    "gpt-neox": lambda: GPTNeoXConfig(**SHAPE),
    "opt": lambda: OPTConfig(**{**SHAPE, "word_embed_proj_dim": 64, "ffn_dim": 96}),
    "qwen2-moe": lambda: Qwen2MoeConfig(**GROUPED, **EXPERTS, num_experts_per_tok=2),
}
DTYPES = ("float32", "bfloat16", "float16")
# a family, dtype and tensor-parallel size each
LOADED = [
    *(("llama", dtype, 1) for dtype in DTYPES),
    *((name, DTYPES[at % 3], 1) for at, name in enumerate(CONFIGS) if name != "llama"),
    ("llama", "bfloat16", 2),
    ("gpt2", "float32", 2),
]
SHARE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SHARE |= {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True}


class Running:
    """A model, and an engine that it is loaded into."""

    def __init__(self, config: Any, dtype: str, tp: int, folder: Path, *, sleep_level: int = 0) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config)
        self.old: dict[str, Tensor] = {}
        self.version, self.fault = -1, folder / "fault"
        self.draw = torch.Generator().manual_seed(0)
        self.model.config.save_pretrained(folder)
        path = os.pathsep.join([str(ROOT / "benchmarks" / "in_proof"), str(ROOT)])
        cores = sorted(os.sched_getaffinity(0))
        with mock.patch.dict(os.environ, PYTHONPATH=path, PROOF_FAULT=str(self.fault)):
            self.engine = VLLMEngine(
                folder,
                max_model_len=LENGTH,
                max_num_seqs=8,
                kv_cache_gib=0.05,
                dtype=dtype,
                tensor_parallel_size=tp,
                cpu_cores=[cores[at % len(cores)] for at in range(tp)] if tp > 1 else None,
                sleep_level=sleep_level,
                log_path=folder / "log",
            )

    def change(self) -> None:
        """New values, as after an optimizer step."""
        self.old = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=self.draw))
            next(self.model.parameters()).view(-1)[:8] = 0.0  # for the fault of a zero's sign

    def load(self, bucket_bytes: int = 1 << 30) -> None:
        self.version += 1
        self.engine.load(buckets(self.model, bucket_bytes=bucket_bytes), self.version)

    @contextmanager
    def seeded(self, fault: str) -> Iterator[None]:
        """A fault in the engine's process and its workers."""
        self.fault.write_text(fault)
        try:
            yield
        finally:
            self.fault.unlink()


# --- faults in the memory that weights go through -----------------------------------------------------------------

MATRIX, SQUARE = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).view(-1)


def renamed(filled: Any, names: dict[str, str]) -> Any:
    return filled._replace(tensors=[(names.get(name, name), *rest) for name, *rest in filled.tensors])


def one_bit(slot: dict[str, Tensor], old: dict[str, Tensor], filled: Any) -> Any:
    values = bits(slot[MATRIX])
    values[torch.randint(len(values), ())] ^= 1


def exchange(one: str, other: str) -> Callable[..., Any]:
    return lambda slot, old, filled: renamed(filled, {one: other, other: one})


def elements(slot: dict[str, Tensor], old: dict[str, Tensor], filled: Any) -> None:
    values = slot[MATRIX].view(-1)
    values[:2] = values[:2].flip(0)


def set_(change: Callable[[dict[str, Tensor], dict[str, Tensor]], Any]) -> Callable[..., None]:
    def seed(slot: dict[str, Tensor], old: dict[str, Tensor], filled: Any) -> None:
        change(slot, old)

    return seed


def all_old(slot: dict[str, Tensor], old: dict[str, Tensor], names: Callable[[str], bool]) -> None:
    for name in filter(names, slot):
        slot[name].copy_(old[name])


def without(*names: str) -> Callable[..., Any]:
    return lambda slot, old, filled: filled._replace(tensors=[t for t in filled.tensors if t[0] not in names])


ON_THE_WAY: dict[str, Callable[..., Any]] = {
    "a tensor is left out": without("model.embed_tokens.weight"),
    "a part of q, k, v is left out": without("model.layers.1.self_attn.k_proj.weight"),
    "one bit of a matrix": one_bit,
    "an old version of a matrix": set_(lambda slot, old: slot[MATRIX].copy_(old[MATRIX])),
    "old rows in half of a matrix": set_(lambda slot, old: slot[MATRIX][:32].copy_(old[MATRIX][:32])),
    "an old version of everything": set_(lambda slot, old: all_old(slot, old, lambda name: True)),
    "half of the update is old": set_(lambda slot, old: all_old(slot, old, lambda name: "layers.1." in name)),
    "two layers are exchanged": exchange("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    "gate and up are exchanged": exchange("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    "a square matrix is transposed": set_(lambda slot, old: slot[SQUARE].copy_(slot[SQUARE].t().clone())),
    "rows are one further": set_(lambda slot, old: slot[MATRIX].copy_(slot[MATRIX].roll(1, 0))),
    "columns are one further": set_(lambda slot, old: slot[MATRIX].copy_(slot[MATRIX].roll(1, 1))),
    "two elements are exchanged": elements,
    "values are rounded to bfloat16": set_(lambda slot, old: slot[MATRIX].copy_(slot[MATRIX].bfloat16())),
    "the sign of a zero": set_(lambda slot, old: slot["model.embed_tokens.weight"].view(-1)[3].neg_()),
    "a number is not finite": set_(lambda slot, old: slot[MATRIX].view(-1)[5].fill_(float("nan"))),
    "a slot is filled again too early": set_(lambda slot, old: slot["lm_head.weight"].zero_()),
}


@contextmanager
def on_the_way(running: Running, seed: Callable[..., Any]) -> Iterator[None]:
    """A fault in the bucket, behind the sender's digests and before the engine reads it."""
    made = running.engine._buffers
    fill = made.fill

    def filled(slot: int, bucket: Any) -> Any:
        whole_ = fill(slot, bucket)
        memory, views = made._mapped[slot], {}
        for name, dtype, shape, offset in whole_.tensors:
            kind: torch.dtype = getattr(torch, dtype)
            views[name] = memory[offset : offset + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)
        changed = seed(views, running.old, whole_)
        if changed is None:
            return whole_
        left = {name: number for (name, *_), number in zip(whole_.tensors, whole_.digests, strict=True)}
        kept = tuple(left.pop(name) for name, *_ in changed.tensors)
        lost.update(left)
        return changed._replace(digests=kept)

    lost: dict[str, int] = {}
    send = running.engine._process.send

    def sent(word: str, *arguments: Any) -> None:  # the sender knows of what the bucket has lost
        send(word, arguments[0], {**arguments[1], **lost}) if word == "done" else send(word, *arguments)

    with mock.patch.object(made, "fill", filled), mock.patch.object(running.engine._process, "send", sent):
        yield


# --- faults in the engine ------------------------------------------------------------------------------------------

WHERE_IT_LIES = (
    "a norm keeps its old values",
    "the embedding keeps its old values",
    "everything keeps its old values",
    "half of the layers keep their old values",
    "one bit where a norm lies",
    "the top bit where the embedding lies",
    "rows of the embedding lie one further",
    "a norm is rounded to bfloat16 where it lies",
    "the norms of two layers lie exchanged",
    "a part of q, k, v is not copied",
    "gate and up are loaded exchanged",
    "a square matrix is loaded transposed",
)
OF_TIED = ("a tied head has old values of its own", "a tied head computes with its old packed copy")
OF_TWO = (
    "a worker loads the other's columns",
    "a worker loads the other's rows of the vocabulary",
    "one worker's norm keeps its old values",
)
LOST = "an update is lost between two samples"
ON_WAKING = ("an engine wakes without its weights", "an engine wakes with the weights of an earlier update")
REQUESTS = [GenerationRequest(at, (3, 4, 5), at) for at in range(8)]


def refusal(act: Callable[[], object]) -> str | None:
    """The message with which something is refused; `None` if it is not."""
    try:
        act()
    except EngineError as error:
        return " ".join(str(error).split())
    return None


def row(kind: str, where: str, said: str | None) -> dict[str, Any]:
    marks = ("as it was sent", "did not arrive", "no bucket held", "than were copied", "earlier weights", "woke with")
    found = said is not None and any(mark in said for mark in marks)
    at = 0 if said is None else max(0, said.find("version"))
    return {"kind": kind, "where": where, "caught": found, "said": said and said[at : at + 260]}


def of_loads(running: Running, where: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    for kind in (kind for kind in kinds for _ in range(TIMES)):
        running.load()
        running.change()
        seed = ON_THE_WAY.get(kind)
        with running.seeded(kind) if seed is None else on_the_way(running, seed):
            said = refusal(running.load)
        running.load()
        yield row(kind, where, said)


def of_generations(running: Running) -> Iterator[dict[str, Any]]:
    sampling = Sampling(max_tokens=48, temperature=1.0)
    for _ in range(TIMES):
        running.load()
        generation = running.engine.start(REQUESTS, sampling, Updates.KEEP)
        generation.poll(0.05)
        running.change()
        with running.seeded(LOST):
            said = refusal(running.load)
        yield row(LOST, "vLLM, while it generates", said)
    running.load()
    generation = running.engine.start(REQUESTS, sampling, Updates.KEEP)  # and without a fault
    generation.poll(0.05)
    running.change()
    running.load()
    generation.close()


def of_wakings(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """An engine each, because the fault ends it."""
    for at in range(TIMES):
        running = Running(CONFIGS["llama"](), "float32", 1, folder / str(at), sleep_level=1)
        sampling = Sampling(max_tokens=2, temperature=1.0)
        try:
            for _ in range(2):
                running.change()
                running.load()
                running.engine.sleep()
                list(running.engine.generate(REQUESTS, sampling))
            running.engine.sleep()
            with running.seeded(kind):
                said = refusal(lambda: list(running.engine.generate(REQUESTS, sampling)))  # noqa: B023
        finally:
            running.engine.close()
        yield row(kind, "vLLM, asleep before", said)


# --- reallocated copies ----------------------------------------------------------------------------------------------


def of_copies() -> Iterator[dict[str, Any]]:
    """Columns and rows on two ranks, from two halves of the rows on two others; in one process."""
    shapes = {"norm": (64,), "up": (96, 64), "down": (64, 96)}
    spec = ModelSpec.of_shapes(list(shapes.items()), bytes_per_element=4)
    source = {
        r: {n: [((s[0] // 2 * r, s[0] // 2 * (r + 1)), *whole(s)[1:])] for n, s in shapes.items()} for r in (0, 1)
    }
    columns = {r: [((0, 64), (48 * r, 48 * (r + 1)))] for r in (0, 1)}
    target = {2 + r: {"norm": [whole((64,))], "up": source[r]["up"], "down": columns[r]} for r in (0, 1)}
    layouts = Layout.of_parts(spec, source), Layout.of_parts(spec, target)

    def held(boxes: Any, values: dict[str, Tensor]) -> Any:
        return {n: [(box, values[n][tuple(slice(*i) for i in box)].clone()) for box in of] for n, of in boxes.items()}

    def one_bit_of(copies: Any, old: Any) -> None:
        bits(copies[3]["down"][0][1])[torch.randint(64 * 48, ())] ^= 1

    def old_part(copies: Any, old: Any) -> None:
        copies[2]["up"][0][1].copy_(old["up"][:48])

    def other_part(copies: Any, old: Any) -> None:
        copies[2]["down"][0][1].copy_(copies[3]["down"][0][1])

    kinds = {
        "one bit of a reallocated part": one_bit_of,
        "a reallocated part is old": old_part,
        "a rank has another's part": other_part,
    }
    for kind, seed in [(None, None), *((kind, seed) for kind, seed in kinds.items() for _ in range(TIMES))]:
        values, old = ({n: torch.randn(shape) for n, shape in shapes.items()} for _ in range(2))
        copies = {rank: held(boxes, values) for rank, boxes in target.items()}
        if seed is not None:
            seed(copies, old)
        sums = DigestSums()
        for rank in range(4):
            proof = CopyDigests(*layouts, rank, dict.fromkeys(shapes, torch.float32))
            sums = sums.plus(proof.of_source(held(source.get(rank, {}), values)))
            proof.add_target(copies.get(rank, {}))
            sums = sums.plus(proof.of_target())
        said = proof.difference(sums)
        if kind is None:
            assert said is None, said
        else:
            yield row(kind, "reallocated copy", said)


# --- the parts of the benchmark --------------------------------------------------------------------------------------


def seeded_faults(folder: Path) -> list[dict[str, Any]]:
    rows = list(of_copies())
    engines = (("llama", 1, "memory of the way", tuple(ON_THE_WAY)), ("llama", 1, "vLLM", WHERE_IT_LIES))
    engines += (("llama, tied", 1, "vLLM", OF_TIED), ("llama", 2, "vLLM, two workers", OF_TWO))
    engines += (("qwen2", 1, "vLLM", ("a bias keeps its old values",)),)
    for at, (name, tp, where, kinds) in enumerate(engines):
        running = Running(CONFIGS[name](), "float32", tp, folder / str(at))
        try:
            rows += of_loads(running, where, kinds)
            if kinds is WHERE_IT_LIES:
                rows += of_generations(running)
        finally:
            running.engine.close()
    for kind in ON_WAKING:
        rows += of_wakings(kind, folder / kind.replace(" ", "_"))
    return rows


def clean_loads(count: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for at, (name, dtype, tp) in enumerate(LOADED):
        running = Running(CONFIGS[name](), dtype, tp, folder / str(at))
        loads = count // len(LOADED) + (at < count % len(LOADED))
        try:
            alarms = []
            for number in range(loads):
                running.change()
                alarms += filter(None, [refusal(lambda: running.load((1 << 30, 40_000)[number % 2]))])  # noqa: B023
        finally:
            running.engine.close()
        rows.append({"family": name, "dtype": dtype, "tp": tp, "loads": loads, "alarms": alarms})
        print(rows[-1], flush=True)
    return rows


def timed_loads(folder: Path, pairs: int) -> list[dict[str, Any]]:
    """Seconds of loads with and without digests on both sides, alternating."""
    rows = []
    zero = torch.zeros((), dtype=torch.int64)
    for dtype in ("float32", "bfloat16"):
        config = LlamaConfig(**{**COMMON, **SHARE})
        running = Running(config, dtype, 1, folder / dtype)
        running.model.to(getattr(torch, dtype))
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        try:
            for number in range(2 * (pairs + 1)):
                which = ("with", "without")[number % 2]
                running.fault.write_text("no proof" if which == "without" else "")
                digest = weight_sender.digest if which == "with" else lambda tensor: zero
                with mock.patch.object(weight_sender, "digest", digest):
                    start = time.perf_counter()
                    running.load(1 << 28)
                    if number > 1:
                        seconds[which].append(time.perf_counter() - start)
        finally:
            running.engine.close()
        with_, without_ = (statistics.median(seconds[which]) for which in ("with", "without"))
        bytes_ = sum(p.nbytes for p in running.model.parameters())
        share = round(1 - without_ / with_, 4)
        rows.append({"dtype": dtype, "bytes": bytes_, "seconds": with_, "without": without_, "share": share} | seconds)
        print(rows[-1], flush=True)
    return rows


def summary(known: dict[str, Any]) -> dict[str, Any]:
    faults, loads = known.get("faults", []), known.get("loads", [])
    return {
        "seeded": len({row["kind"] for row in faults}),
        "caught": len({row["kind"] for row in faults} - {row["kind"] for row in faults if not row["caught"]}),
        "times_each": TIMES,
        "loads": sum(row["loads"] for row in loads),
        "false_alarms": sum(len(row["alarms"]) for row in loads),
        "share_of_load": max((row["share"] for row in known.get("share", [])), default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="replace the parts in this file")
    parser.add_argument(
        "--parts", nargs="+", choices=("faults", "loads", "share"), default=["faults", "loads", "share"]
    )
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=15, help="of timed loads")
    asked = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(engine_process, "spawn", EngineForks.started().spawn),
    ):
        for part in asked.parts:
            place = Path(folder, part)
            if part == "faults":
                found[part] = seeded_faults(place)
            elif part == "loads":
                found[part] = clean_loads(asked.loads, place)
            else:
                found[part] = timed_loads(place, asked.pairs)
    known = json.loads(asked.json.read_text()) if asked.json is not None and asked.json.is_file() else {}
    found["summary"] = summary({**known, **found})
    table = Table("fault", "where", "caught", "what is said")
    for one in found.get("faults", [])[::TIMES]:
        table.add_row(one["kind"], one["where"], str(one["caught"]), one["said"])
    Console().print(table, found["summary"])
    if asked.json is not None:
        result_file.merge(asked.json, found)


if __name__ == "__main__":
    main()
