"""A model that is read from its checkpoint's files part by part is the model that `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import counted_reads
import pytest
import tiny
import torch
from families import FAMILIES, causal
from hypothesis import given
from hypothesis import strategies as some
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    MixtralConfig,
    PreTrainedModel,
)

from trl_realloc.engines import transformers_compat
from trl_realloc.engines.model_configs import read_config
from trl_realloc.engines.models import adapts_unread, blank, load_classifier, load_policy, seeded, with_adapters
from trl_realloc.engines.training import checkpoint_files
from trl_realloc.engines.training.checkpoint_files import CheckpointFiles
from trl_realloc.engines.training.pipeline import keep_stage
from trl_realloc.engines.training.probe_model import packs
from trl_realloc.engines.training.replica_sync import fingerprint
from trl_realloc.engines.training.split_masters import NamedOptimizer
from trl_realloc.engines.training.weight_source import fill, source_of, unread


CPU = torch.device("cpu")
Loader = Callable[..., Any]


def in_parts(load: Loader, path: Path, *, trained: bool = True) -> Any:
    """On the meta device, in a run with seed 5."""
    with seeded(5):
        model = load(str(path), trained=trained)
    assert source_of(model) is not None, "it is read in parts"
    return model


def at_once(load: Loader, path: Path, *, trained: bool = True) -> Any:
    with seeded(5):
        model = load(str(path), trained=trained, in_parts=False)
    assert source_of(model) is None and not any(p.is_meta for p in model.parameters())
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters under all of their names, and all buffers."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    made, right = tensors(model), tensors(expected)
    assert made.keys() == right.keys()
    for name, tensor in right.items():
        assert made[name].dtype is tensor.dtype and made[name].device == tensor.device, name
        assert made[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(made[name], tensor), name
    shared = {name: sorted(n for n, t in right.items() if t is tensor) for name, tensor in right.items()}
    assert shared == {name: sorted(n for n, t in made.items() if t is tensor) for name, tensor in made.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_it_is_loaded(family: str, tmp_path: Path) -> None:
    causal(family).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    for load in (load_policy, load_classifier) if family != "mamba" else (load_policy,):
        for trained in (True, False):
            model, expected = (how(load, tmp_path, trained=trained) for how in (in_parts, at_once))
            assert packs(model) == FAMILIES[family][1]
            assert any(p.is_meta for p in model.parameters())
            fill(model, CPU)
            assert source_of(model) is None
            assert_equal(model, expected)
            assert model.generation_config == expected.generation_config if load is load_policy else True
            assert not model.training


def test_without_a_dtype_in_the_config_it_is_that_of_the_files(tmp_path: Path) -> None:
    tiny.policy().bfloat16().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: v for key, v in config.items() if "dtype" not in key}))
    model, expected = (how(load_policy, tmp_path, trained=False) for how in (in_parts, at_once))
    assert model.dtype is torch.bfloat16
    fill(model, CPU)
    assert_equal(model, expected)


def test_a_new_score_layer_is_the_one_that_loading_draws_and_the_generator_stays(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path)
    before = torch.get_rng_state()
    critic, expected = in_parts(load_classifier, tmp_path), at_once(load_classifier, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not critic.score.weight.is_meta and torch.equal(critic.score.weight, expected.score.weight)
    assert {name for name, p in critic.named_parameters() if not p.is_meta} == {"score.weight"}


@pytest.mark.parametrize("saved", ["embedding", "head", "both", "both, different"])
def test_tied_weights_are_tied_as_loading_ties_them(saved: str, tmp_path: Path) -> None:
    tiny.policy(tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if saved == "both, different":
        head[-1, -1] += 1
    if not saved.startswith("both"):
        del weights["lm_head.weight" if saved == "embedding" else "model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = at_once(load_policy, tmp_path)
    for stage in (None, 0, 1):
        model = in_parts(load_policy, tmp_path)
        if stage is not None:
            keep_stage(model, stage, 2)
        fill(model, CPU)
        kept = tensors(model)
        assert all(torch.equal(tensor, tensors(expected)[name]) for name, tensor in kept.items())
        if stage is None:
            assert_equal(model, expected)
        else:
            assert ("model.embed_tokens.weight" in kept) == (stage == 0 or saved != "both, different")


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every piece that is read from a safetensors file."""
    monkeypatch.setattr(checkpoint_files, "safe_open", counted_reads.CountedFile)
    counted_reads.PIECES.clear()
    return counted_reads.PIECES


MIXTURES: dict[str, PreTrainedModel] = {
    "qwen2-moe, window 7": FAMILIES["qwen2-moe, window 7"][0],
    "mixtral": MixtralConfig(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_of_a_mixture_no_expert_of_another_layer_is_read(family: str, tmp_path: Path, read_bytes: list[int]) -> None:
    """Transformers fuses the experts; a checkpoint has them one by one."""
    AutoModelForCausalLM.from_config(copy.deepcopy(MIXTURES[family])).save_pretrained(tmp_path)
    expected = at_once(load_policy, tmp_path)
    model = in_parts(load_policy, tmp_path)
    assert packs(copy.deepcopy(model)) == packs(copy.deepcopy(expected)) == (family != "qwen2-moe, window 7")
    assert sum(read_bytes) == 0, "nothing is read before the engine has split the model"
    layers = model.model.layers
    for at in range(1, len(layers)):
        layers[at] = nn.Identity()
    fill(model, CPU)
    kept = dict(model.named_parameters())
    assert all(torch.equal(p, expected.get_parameter(name)) for name, p in kept.items())
    assert sum(read_bytes) == sum(p.nbytes for p in kept.values())


@pytest.mark.parametrize("family", MIXTURES)
def test_a_rank_reads_the_matrices_of_its_own_experts(family: str, tmp_path: Path, read_bytes: list[int]) -> None:
    AutoModelForCausalLM.from_config(copy.deepcopy(MIXTURES[family])).save_pretrained(tmp_path)
    expected, model = at_once(load_policy, tmp_path), in_parts(load_policy, tmp_path)
    source = source_of(model)
    assert source is not None
    with source.reading() as read:
        for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
            whole = expected.get_parameter(name).detach()
            for low, high in ((0, 1), (1, 3), (3, 3), (0, 4)):
                read_bytes.clear()
                target = torch.empty_like(whole[low:high])
                read(name, ((low, high), *((0, size) for size in whole.shape[1:])), target)
                assert torch.equal(target, whole[low:high]) and sum(read_bytes) == target.nbytes


def test_every_stage_reads_its_own_parameters_and_no_other(tmp_path: Path, read_bytes: list[int]) -> None:
    """GPT-NeoX's head has another name in its checkpoints."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    expected, seen = at_once(load_policy, tmp_path), set[str]()
    for stage in range(4):
        model = in_parts(load_policy, tmp_path)
        keep_stage(model, stage, 4)
        read_bytes.clear()
        fill(model, CPU)
        kept = dict(model.named_parameters())
        assert all(torch.equal(p, expected.get_parameter(name)) for name, p in kept.items())
        assert sum(read_bytes) == sum(p.nbytes for p in kept.values())
        seen |= kept.keys()
    assert seen == dict(expected.named_parameters()).keys()


@given(some.data())
def test_any_box_of_any_tensor_is_read_in_any_dtype(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    shape = data.draw(some.lists(some.integers(1, 7), max_size=4))
    bounds = [sorted(data.draw(some.tuples(some.integers(0, size), some.integers(0, size)))) for size in shape]
    kinds = some.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    tensor = torch.randn(shape).to(data.draw(kinds))
    file = tmp_path_factory.mktemp("box") / "model.safetensors"
    save_file({"other": torch.zeros(3), "saved": tensor}, file)
    target = torch.empty([stop - start for start, stop in bounds], dtype=data.draw(kinds))
    with CheckpointFiles([str(file)], {"weight": "saved"}, {"tied": "weight"}, {}, None).reading() as read:
        read(data.draw(some.sampled_from(["weight", "tied"])), tuple((low, high) for low, high in bounds), target)
    assert torch.equal(target, tensor[tuple(slice(*bound) for bound in bounds)].to(target.dtype))


@pytest.mark.parametrize("extra", [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapters_are_drawn_as_over_a_loaded_model_and_their_base_is_read(extra: Any, tmp_path: Path) -> None:
    tiny.policy(tie_word_embeddings="modules_to_save" not in extra).save_pretrained(tmp_path)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian", **extra})
    assert adapts_unread(config)
    made = []
    for how in (in_parts, at_once):
        model = how(load_policy, tmp_path)
        with seeded(7):
            made.append(with_adapters(model, copy.deepcopy(config), None))
    model, expected = made
    read = {item.name for item in unread(model, source_of(model) or pytest.fail())}
    assert read == set(dict(tiny.policy(tie_word_embeddings="modules_to_save" not in extra).named_parameters()))
    fill(model, CPU)
    assert_equal(model, expected)


def test_adapters_that_are_made_from_the_weights_need_them_first() -> None:
    plain = {"target_modules": ["q_proj"]}
    for changes in ({"init_lora_weights": "pissa"}, {"use_dora": True}, {"trainable_token_indices": [1]}):
        assert not adapts_unread(LoraConfig(**plain, **changes))
    assert not adapts_unread(IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    assert adapts_unread(LoraConfig(**plain, r=3, lora_alpha=7, task_type="CAUSAL_LM"))


def test_checkpoints_without_safetensors_and_with_adapters_are_loaded_whole(tmp_path: Path) -> None:
    model = tiny.policy()
    model.save_pretrained(tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    loaded = load_policy(str(tmp_path / "bin"), trained=True)
    assert source_of(loaded) is None
    assert_equal(loaded, model)
    tiny.policy().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert source_of(load_policy(str(tmp_path / "adapter"), trained=True)) is None


def test_a_wrong_checkpoint_gets_the_error_of_loading(tmp_path: Path) -> None:
    tiny.policy(hidden_size=64).save_pretrained(tmp_path)
    tiny.config().save_pretrained(tmp_path)  # says 32
    with pytest.raises(RuntimeError, match="size mismatch|mismatch"):
        load_policy(str(tmp_path), trained=True)


def test_a_copy_of_the_files_is_the_same_checkpoint_and_another_weight_is_not(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> int:
        source = source_of(in_parts(load_policy, folder))
        assert source is not None and source.fingerprint > 0
        return source.fingerprint

    tiny.policy().save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copied")
    tiny.policy(seed=1).save_pretrained(tmp_path / "other")
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "copied") != fingerprint(tmp_path / "other")


def test_a_copy_of_a_model_that_is_not_read_yet_is_read_from_the_same_files(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path)
    model = in_parts(load_policy, tmp_path)
    copied = copy.deepcopy(model)
    fill(model, CPU)
    fill(copied, CPU)
    assert_equal(copied, model)


def test_an_optimizer_of_a_model_that_is_not_read_makes_the_state_of_a_loaded_one(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path)

    def adagrad(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.3)

    made, expected = (NamedOptimizer.of(adagrad, how(load_policy, tmp_path)) for how in (in_parts, at_once))
    assert made.groups == expected.groups and made.state.keys() == expected.state.keys()
    for name, state in expected.state.items():
        assert {key: torch.equal(value, made.state[name][key]) for key, value in state.items()} == {
            "sum": True,
            "step": True,
        }


def test_a_model_that_is_filled_later_has_no_memory_before_its_engine(tmp_path: Path) -> None:
    config = tiny.config(tie_word_embeddings=True)
    model = blank(config, True, {"model.embed_tokens.weight": torch.bfloat16, "model.norm.weight": torch.float32})
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    fill(model, CPU)
    expected = AutoModelForCausalLM.from_config(config)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in expected.named_parameters()}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_classifier_of_another_head_is_read_from_its_own_files(tmp_path: Path) -> None:
    tiny.classifier().save_pretrained(tmp_path)
    critic = in_parts(load_classifier, tmp_path)
    assert all(p.is_meta for p in critic.parameters())
    fill(critic, CPU)
    assert_equal(critic, AutoModelForSequenceClassification.from_pretrained(tmp_path))


def test_two_checkpoints_that_differ_in_one_small_tensor_have_other_fingerprints(tmp_path: Path) -> None:
    """A classifier of which the head alone was trained again."""
    prints = []
    for name in ("first", "second"):
        model = tiny.classifier(1)
        with torch.no_grad():
            if name == "second":
                model.score.weight[0, 7] += 1e-3
        model.save_pretrained(tmp_path / name)
        prints.append(fingerprint(load_classifier(str(tmp_path / name), trained=False)))
    assert prints[0] != prints[1] and min(prints) > 0


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_unlike_the_embedding_is_kept_by_whoever_has_the_config_alone(differs: bool, tmp_path: Path) -> None:
    """vLLM, and the empty model of a new plan, would tie it by `tie_word_embeddings`."""
    tiny.policy(tie_word_embeddings=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    head[-1, -1] += differs
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings, "the checkpoint's config is wrong"
    for model in (str(tmp_path), loaded):
        config = read_config(model, "model")
        assert config.tie_word_embeddings != differs
        empty = blank(config, True, {"": torch.float32})
        assert (empty.lm_head.weight is not empty.model.embed_tokens.weight) == differs
    assert loaded.config.tie_word_embeddings, "the user's own config is left as it is"


def test_an_error_of_ours_makes_no_rank_load_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.policy().save_pretrained(tmp_path)

    def broken(*given: Any) -> Any:
        raise KeyError("a name that nobody has")

    monkeypatch.setattr(transformers_compat, "names_in_checkpoint", broken)
    with pytest.raises(KeyError, match="nobody"):
        load_policy(str(tmp_path), trained=True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (transformers_compat.UnknownRelease("this release names tensors otherwise"), "names tensors otherwise"),
        (RuntimeError("Tensor.item() cannot be called on meta tensors"), "cannot be built without weights"),
        (NotImplementedError("aten::odd is not implemented for Meta"), "aten::odd"),
    ],
)
def test_a_model_that_cannot_be_built_without_weights_is_loaded_whole_and_the_reason_is_printed(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.policy().save_pretrained(tmp_path)
    build, before = AutoModelForCausalLM.from_pretrained, torch.get_rng_state()

    def from_pretrained(*given: Any, **options: Any) -> Any:
        if "device_map" in options:
            torch.rand(3)
            raise error
        return build(*given, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    model = load_policy(str(tmp_path), trained=True)
    assert source_of(model) is None and torch.equal(torch.get_rng_state(), before)
    assert "every rank loads the whole model" in (printed := capsys.readouterr().err) and reason in printed
