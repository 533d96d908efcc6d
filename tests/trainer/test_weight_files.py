"""The files of a saved model are those of `save_pretrained`, byte for byte, without the whole model in memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.parameter_pieces import Piece
from trl_realloc.engines.training.heads import PolicyHead, ValueHead
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.engines.training_state import TensorSpec
from trl_realloc.trainer.checkpoint.model_files import write_model
from trl_realloc.trainer.checkpoint.weight_files import WeightFiles
from trl_realloc.trainer.checkpoint.write_errors import WriteErrors


ALONE, CPU = MeshGroup((0,), 0), torch.device("cpu")
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8}
SIZES |= {"shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "tied llama": {**SIZES, "tie_word_embeddings": True},
    "gpt_neox": SIZES,
    "gpt2": GPT2,
    "qwen2_moe": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gemma3_text": {**SIZES, "head_dim": 8},
}


MIXTURES = ("qwen2_moe", "mixtral")  # `save_pretrained` counts the experts' tensors, which share memory, as one


def policy(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[-1], **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config)


def mixed(model: Any) -> Any:
    """In bfloat16 but for the norms."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "norm" in name else torch.bfloat16)
    return model


def write(model: Any, folder: Path, **options: Any) -> None:
    head = ValueHead(model) if model.get_output_embeddings() is None else PolicyHead(model, 1.0)
    engine: Any = ReplicatedEngine(head, ALONE, CPU)
    engine_export = engine.export
    engine.export = lambda size, **named: engine_export(1000, **named)  # many buckets
    problems = WriteErrors(0, None)
    write_model(engine, ALONE, folder, problems, **options)
    problems.settle("the model")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def stored(folder: Path) -> dict[str, bytes]:
    """Every tensor of all shards."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def check_filled(folder: Path, limit: int) -> None:
    """No file could have had the tensors of the next one too, and the index counts all of their bytes."""
    files = [load_file(file).values() for file in sorted(folder.glob("*.safetensors"))]
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in files]
    assert max(sizes) <= limit and all(sum(pair) > limit for pair in itertools.pairwise(sizes))
    assert json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("size", ["50GB", "9KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_is_that_of_save_pretrained(family: str, size: str, tmp_path: Path) -> None:
    policy(family).save_pretrained(tmp_path / "theirs", max_shard_size=size)
    write(policy(family), tmp_path / "ours", max_shard_size=size)
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    if size == "50GB" or family not in MIXTURES:
        assert ours == theirs
    else:
        check_filled(tmp_path / "ours", 9_000)
    assert stored(tmp_path / "ours") == stored(tmp_path / "theirs")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = policy(family).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_tensors_of_several_dtypes_and_a_critic_are_stored_alike(tmp_path: Path) -> None:
    mixed(policy("llama")).save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
    write(mixed(policy("llama")), tmp_path / "ours", max_shard_size="9KB")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    tiny.classifier().save_pretrained(tmp_path / "their critic")
    write(tiny.classifier(), tmp_path / "our critic")
    assert contents(tmp_path / "our critic") == contents(tmp_path / "their critic")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "our critic")
    assert torch.equal(again.score.weight, tiny.classifier().score.weight)


@pytest.mark.parametrize(
    "changes", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}, {"use_dora": True}]
)
def test_of_a_model_with_adapters_peft_saves_them_and_gathers_no_base(changes: dict[str, Any], tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(3)
        config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **changes})
        return get_peft_model(tiny.policy(), config)

    adapted().save_pretrained(tmp_path / "theirs")
    model = adapted()
    write(model, tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_a_second_save_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    for size in ("9KB", "50GB", "9KB"):
        write(policy("llama"), tmp_path / "ours", max_shard_size=size)
        policy("llama").save_pretrained(tmp_path / size, max_shard_size=size)
        assert contents(tmp_path / "ours").keys() == contents(tmp_path / size).keys()


def test_a_tensor_that_needs_others_of_its_layer_waits_for_them(tmp_path: Path) -> None:
    """Of a family whose checkpoints have in one tensor what the module has in several."""

    def fused(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        named, made = dict(tensors), {}
        for name, tensor in named.items():
            if name.endswith(".q"):
                if (k := named.get(name[:-1] + "k")) is not None:
                    made[name[:-1] + "qk"] = torch.cat([tensor, k])
            elif not name.endswith(".k"):
                made[name] = tensor
        return made

    tensors = {f"layers.{at}.{name}": torch.randn(2, 3) for at in range(2) for name in ("q", "v", "k")}
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    files = WeightFiles(tmp_path, specs, fused)
    for name, tensor in tensors.items():
        files.write({name: tensor})
    files.finish()
    kept = load_file(tmp_path / "model.safetensors")
    assert kept.keys() == {f"layers.{at}.{name}" for at in range(2) for name in ("qk", "v")}
    assert torch.equal(kept["layers.1.qk"], torch.cat([tensors["layers.1.q"], tensors["layers.1.k"]]))


def test_the_pieces_of_a_file_are_written_through_one_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    opens = Path.open

    def counted(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        opened.extend([self.name] * (mode == "r+b"))
        return opens(self, mode, *given, **named)

    monkeypatch.setattr(Path, "open", counted)
    tensors = {name: torch.randn(40) for name in "abc"}
    specs = {name: TensorSpec((40,), torch.float32) for name in tensors}
    files = WeightFiles(tmp_path, specs, list, max_shard_size=200)
    for name, tensor in tensors.items():
        for start in range(0, 40, 8):
            files.write_piece(Piece(name, start, tensor[start : start + 8]))
    files.finish()
    assert sorted(opened) == [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    kept = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, {"a": TensorSpec((2,), torch.float32)}, list)
    with pytest.raises(OSError, match="a and 0 more tensors did not arrive"):
        files.finish()
    assert json.loads((tmp_path / "model.safetensors").read_bytes()[8:])["a"]["data_offsets"] == [0, 8]
