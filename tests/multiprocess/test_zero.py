"""ZeRO-3 on every mesh: parts of the job, one process, models that arrive partitioned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_plans import ZERO3, plan
from transformers import AutoModelForCausalLM, Qwen2MoeConfig


pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed, pytest.mark.timeout(1800)]


def test_zero_3_on_a_part_of_the_job_trains_saves_resumes_and_is_moved_to(run: Callable[..., Path]) -> None:
    """The actor trains and generates on the last two of four ranks: every run is that of replicas on all four."""
    folder = run("zero.py", 4, {}, "four")
    found = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    expected = found.pop("replicas")
    assert len(expected["evals"]) == 3 and found.keys() == {"apart", "separate", "resumed", "moved"}
    for name, run_of in found.items():
        assert run_of["best"] == expected["best"], name
        for mine, other in zip(run_of["updates"], expected["updates"], strict=True):
            learned = {key: value for key, value in mine.items() if not key.startswith("realloc/")}
            assert learned == pytest.approx(other, rel=1e-4, abs=1e-4), name
        assert run_of["evals"] == pytest.approx(expected["evals"], rel=1e-4, abs=1e-4), name
        for parameter, sums in expected["weights"].items():
            assert run_of["weights"][parameter] == pytest.approx(sums, rel=1e-3, abs=1e-3), (name, parameter)


# TRL's own accelerate config of this name, but for the number of processes
LAUNCHED = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
rdzv_backend: static
"""


def test_models_that_transformers_partitions_train_as_the_same_models_by_path_do(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched with ZeRO-3, a model that a script makes after PPOConfig arrives partitioned. Nothing is compiled: a job
    that was killed while DeepSpeed's op for CPUs was compiled has left its lock behind."""
    (tmp_path / "extensions" / "deepspeed_shm_comm").mkdir(parents=True)
    (tmp_path / "extensions" / "deepspeed_shm_comm" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    (tmp_path / "zero3.yaml").write_text(LAUNCHED)
    models = {"model": tiny.policy(), "value_model": tiny.classifier(1), "reward_model": tiny.classifier(3)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    paths = {name: str(tmp_path / name) for name in models}
    folder = run("zero_init.py", 2, paths, "two", config=tmp_path / "zero3.yaml", launched=True)
    partitioned, by_path = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("partitioned", "by path"))
    if partitioned["arrived_in"] == ["torch.float32"]:
        assert partitioned == by_path
    else:  # Transformers 5.19 rounds them to the launch's dtype, which by path masters in float32 are not
        first, other = partitioned["updates"][0], by_path["updates"][0]
        assert {key: first[key] for key in other} == pytest.approx(other, rel=0.02, abs=1e-3)
    assert all(partitioned["packed"]) and len(partitioned["packed"]) == 4, "no role fell back to padded rows"
    assert partitioned["updates"][0]["objective/kl"] == pytest.approx(0.0, abs=1e-3), "the reference is the policy"


def test_one_process_without_a_launcher_trains_under_zero(run: Callable[..., Path], tmp_path: Path) -> None:
    alone = {"mesh": "0", "dp": 1}
    sharded = plan(1, changed={"actor.train": {**alone, **ZERO3}, "critic.train": {**alone, **ZERO3, "zero_stage": 2}})
    folder = run("train.py", 1, {"plan": sharded}, "sharded")
    whole = tiny.trained(tmp_path, plan=plan(1))
    for mine, other in zip(json.loads((folder / "log.json").read_text()), tiny.updates(whole), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of all shards."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_save_makes_no_parameter_whole_that_is_larger_than_a_bucket(run: Callable[..., Path], tmp_path: Path) -> None:
    """Two ranks' partitions have padding at the end of some parameters. The experts of a mixture are stored one by one,
    so they are put together on the first rank."""
    torch.manual_seed(0)
    mixture = Qwen2MoeConfig(
        **{**tiny.config().to_dict(), "model_type": "qwen2_moe", "num_experts": 3, "moe_intermediate_size": 16},
        shared_expert_intermediate_size=16,
    )
    odd = {"vocab_size": 1001, "hidden_size": 36, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = {"policy": tiny.policy(**odd), "mixture": AutoModelForCausalLM.from_config(mixture)}
    for name, model in made.items():
        model.save_pretrained(tmp_path / name, max_shard_size="60KB")
    limits = {"policy": 20_000, "mixture": 1 << 20}
    folder = run("zero_pieces.py", 2, limits, "saved")
    for name in made:
        expected, saved = stored(tmp_path / name), stored(folder / name)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key], tensor) for key, tensor in expected.items()), name
    for rank in range(2):
        result = json.loads((folder / f"{rank}.json").read_text())["policy"]
        assert max(result["parameters"]) > 5 * limits["policy"]
        assert result["largest"] <= limits["policy"], rank
