"""Runs TRL's own PPO tests with this package's classes in place of TRL's.

    python tests/trainer/run_trl_tests.py path/to/test_ppo_trainer.py [--theirs] [options of pytest]

The file is `tests/experimental/test_ppo_trainer.py` of TRL's repository at v1.12.0. Its models and its dataset, which
it names by their place on the Hub, are made here, tiny and random, in a folder that is removed at the end; nothing is
downloaded. `--theirs` leaves TRL's classes where they are, to compare with.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import trl_stand_ins
from trl_stand_ins import write_repository
from trl_test_run import HELPERS, run_pytest


SMALL: dict[str, Any] = {
    **trl_stand_ins.SMALL,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
}
VOCABULARY = 512
QWEN_VOCABULARY = 151_665  # TRL's tests count the parameters of this one
# model type, and what it calls the sizes where that is not what the others do
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-BloomForCausalLM": ("bloom", {"n_layer": 2, "n_head": 4}),
    "tiny-CohereForCausalLM": ("cohere", {}),
    "tiny-Gemma2ForCausalLM": ("gemma2", {"head_dim": 2}),
    "tiny-GemmaForCausalLM": ("gemma", {"head_dim": 2}),
    "tiny-GPT2LMHeadModel": ("gpt2", {"n_embd": 8, "n_layer": 2, "n_head": 4}),
    "tiny-GPTNeoXForCausalLM": ("gpt_neox", {}),
    **{f"tiny-LlamaForCausalLM-{version}": ("llama", {}) for version in ("3.1", "3.2", "3")},
    **{f"tiny-MistralForCausalLM-{version}": ("mistral", {}) for version in ("0.1", "0.2")},
    "tiny-OPTForCausalLM": ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 8}),
    **{f"tiny-Phi3ForCausalLM-{version}": ("phi3", {}) for version in ("3", "3.5")},
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {"vocab_size": QWEN_VOCABULARY}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", {"vocab_size": QWEN_VOCABULARY}),
    "tiny-T5ForConditionalGeneration": (
        "t5",
        {"d_model": 8, "d_kv": 2, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
    ),
    "tiny-BartModel": (
        "bart",
        {
            "d_model": 8,
            **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 32))},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        },
    ),
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def make_tokenizer(vocabulary: int) -> Any:
    """A token for each byte, and others up to the size of the model's vocabulary: a token that is added is outside."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [*letters, *(f"<unused{i}>" for i in range(vocabulary - len(letters)))]
    bpe = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


def make_models(hub: Path) -> None:
    """The models as a cache of the Hub has them."""
    import torch
    import transformers
    from transformers import AutoConfig

    for name, (kind, changes) in FAMILIES.items():
        config = AutoConfig.for_model(kind, **{**SMALL, "vocab_size": VOCABULARY, **changes})
        task = "Seq2SeqLM" if kind in ("t5", "bart") else "CausalLM"
        if "SequenceClassification" in name:
            task, config.num_labels = "SequenceClassification", 1
        torch.manual_seed(0)
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
        write_repository(hub, name, model, make_tokenizer(config.vocab_size))


def main() -> int:
    given = Path(sys.argv[1])
    options = [word for word in sys.argv[2:] if word != "--theirs"]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        package = root / "tests" / "experimental"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        (package.parent / "testing_utils.py").write_text(HELPERS.replace("BASE", "object"))
        shutil.copy(given, package)
        (root / "pytest.ini").write_text("[pytest]\n")
        make_models(root / "hub")
        classes = None if "--theirs" in sys.argv else "trl_realloc"
        return run_pytest(root, [str(package / given.name), *options], classes=classes)


if __name__ == "__main__":
    sys.exit(main())
