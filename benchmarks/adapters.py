"""What an update of a vLLM engine costs, by what is trained: seconds, bytes, memory, and how far the engine's
log-probabilities then are from the trainer's.

    python benchmarks/adapters.py --json benchmarks/results/adapters.json [--model toy] [--updates 3]

A row for each kind of training: of all parameters, of LoRA on all linear layers and on those of every other layer, of
DoRA, and of LoRA over weights of 4 and of 8 bits. Each trained parameter is changed at random before each update. The
engine computes in float32.

- `first_bytes`, `update_bytes`: sent by the first update, and by a later one.
- `update_s`: median seconds of the later updates, with the digests on both sides.
- `logp_difference`: largest difference of a drawn token's log-probability, after the last update.
- `peak_mb`: memory of the trainer's process during an update, above that before it.

SmolLM2-135M comes from `examples/smollm2/prepare.py` (`make setup-evidence`); `--model toy` is a Llama of some 3
million random parameters. Seconds are worth something only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import result_file
import torch
from memory import MB, Memory
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "smollm2")]

from trl_realloc.engines.generation.vllm import VLLMEngine  # noqa: E402
from trl_realloc.engines.models import load_policy  # noqa: E402
from trl_realloc.engines.requests import GenerationRequest, Sampling  # noqa: E402
from trl_realloc.engines.training.weight_export import buckets, source_digests  # noqa: E402


TOY = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
TOY |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.1}
PROMPTS, TOKENS, LENGTH = 8, 24, 64
LINEAR = {"target_modules": "all-linear"}
HALF = {"target_modules": r".*layers\.\d*[02468]\.(self_attn|mlp)\.\w+_proj"}  # every other layer
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# kind -> settings of LoRA, `None` for training all parameters; settings of bitsandbytes
KINDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "all parameters": (None, None),
    "LoRA": (LINEAR, None),
    "LoRA on every other layer": (HALF, None),
    "DoRA": ({**LINEAR, "use_dora": True}, None),
    "nf4": (LINEAR, NF4),
    "nf4 on every other layer": (HALF, NF4),
    "fp4": (LINEAR, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    "int8": (LINEAR, {"load_in_8bit": True}),
}


def model_of(folder: Path, kind: str) -> Any:
    """The policy of a kind, in float32 where it is not quantized."""
    lora, bits = KINDS[kind]
    quantization = None if bits is None else BitsAndBytesConfig(**bits)
    torch.manual_seed(0)
    model = load_policy(str(folder), True, in_parts=False, quantization_config=quantization)
    return model if lora is None else get_peft_model(model, LoraConfig(r=16, **copy.deepcopy(lora)))


@torch.no_grad()
def change(model: Any) -> None:
    """Move every trained parameter a little, as an optimizer step does."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def update(engine: VLLMEngine, model: Any, version: int) -> tuple[float, float]:
    """Load the model into the engine. Returns the seconds, and the peak of this process's memory in MB."""
    memory = Memory()
    with memory.phase("update"):
        frozen = source_digests(model)
        engine.load(buckets(model, without=engine.kept(frozen)), version, frozen)
    return memory.seconds["update"], memory.peaks["update"] / MB


@torch.no_grad()
def logp_difference(engine: VLLMEngine, model: Any, vocabulary: int) -> float:
    asked = [
        GenerationRequest(index, tuple((31 * index + 7 * at + 2) % vocabulary for at in range(12)), seed=index)
        for index in range(PROMPTS)
    ]
    worst = 0.0
    for drawn in engine.generate(asked, Sampling(max_tokens=TOKENS, temperature=1.0)):
        prompt = asked[drawn.index].prompt_ids
        logprobs = model.eval()(torch.tensor([prompt + drawn.token_ids])).logits[0].log_softmax(-1)
        own = logprobs[len(prompt) - 1 : -1].gather(-1, torch.tensor(drawn.token_ids)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(drawn.logprobs)).abs().max()))
    return worst


def row(engine: VLLMEngine, folder: Path, kind: str, updates: int, first_version: int) -> dict[str, Any]:
    model = model_of(folder, kind)
    engine.version = -1  # nothing is kept of the kind before
    _, peak = update(engine, model, first_version)
    # later updates may use memory again that the first has left to the process
    first_bytes, times, peaks = engine.sent_bytes, [], [peak]
    for version in range(first_version + 1, first_version + 1 + updates):
        change(model)
        seconds, peak = update(engine, model, version)
        times.append(seconds)
        peaks.append(peak)
    return {
        "kind": kind,
        "update_s": round(statistics.median(times), 3),
        "first_bytes": first_bytes,
        "update_bytes": engine.sent_bytes,
        "logp_difference": logp_difference(engine, model, model.config.vocab_size),
        "peak_mb": round(max(peaks)),
    }


def model_folder(name: str, scratch: Path) -> Path:
    if name != "toy":
        from prepare import prepare

        return prepare(Path(name))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**TOY, max_position_embeddings=256)).save_pretrained(scratch / "toy")
    return scratch / "toy"


def merge(path: Path, model: str, row: dict[str, Any]) -> None:
    """Put a row in the file, in place of that of the same kind."""
    known = json.loads(path.read_text())["rows"] if path.is_file() else []
    of = {each["kind"]: each for each in [*known, {**row, "commit": result_file.commit()}]}
    about = {"hardware": result_file.about()["hardware"], "model": model}
    result_file.write(path, {**about, "rows": [of[kind] for kind in KINDS if kind in of]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="put each row in this file, in place of that of the same kind")
    parser.add_argument("--model", default="runs/smollm2/model", help="folder of SmolLM2, which is made; or toy")
    parser.add_argument("--updates", type=int, default=3, help="timed updates of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    asked = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(asked.model, Path(scratch))
        engine = VLLMEngine(folder, max_model_len=LENGTH, max_num_seqs=PROMPTS, kv_cache_gib=0.2)
        try:
            for number, kind in enumerate(asked.kinds):
                rows.append(row(engine, folder, kind, asked.updates, 100 * number))
                print(rows[-1], flush=True)
                if asked.json is not None:
                    merge(asked.json, asked.model, rows[-1])
        finally:
            engine.close()
    table = Table("kind", "update s", "MB first", "MB update", "largest logp difference", "peak MB")
    for one in rows:
        sizes = [f"{one[name] / MB:.1f}" for name in ("first_bytes", "update_bytes")]
        table.add_row(one["kind"], str(one["update_s"]), *sizes, f"{one['logp_difference']:.1e}", str(one["peak_mb"]))
    Console().print(table)


if __name__ == "__main__":
    main()
