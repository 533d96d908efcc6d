"""Training on several processes: what TRL's PPO cannot do there, and what must not depend on their number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launched_job import folder_of_run
from ranks import RankServers
from safetensors.torch import load_file
from test_plans import plan, split, whole
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import separate


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1800)]

RECIPES = Path(__file__).parents[2] / "recipes" / "accelerate_configs"
STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, servers: RankServers) -> Path:
    """The folder of a run of one process, which runs of two processes are compared with."""
    options = {**STEPS, "per_device_train_batch_size": 8}
    return folder_of_run(tmp_path_factory.mktemp("alone"), "train.py", 1, options, servers)


def log(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "log.json").read_text())


def check_saved(folder: Path) -> None:
    """What was saved is what the engines have."""
    kept = load_file(folder / "weights.safetensors")
    policy = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert all(torch.equal(p, kept[f"policy.{n}"]) for n, p in policy.named_parameters())
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "final" / "value_model")
    if any(name.startswith("critic.") for name in kept):  # rank 0, which kept them, may have no part of the critic
        assert all(torch.equal(p, kept[f"critic.{n}"]) for n, p in critic.named_parameters())


def close(first: list[dict[str, float]], second: list[dict[str, float]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)


def test_two_processes_train_save_and_resume_as_one_does(run: Callable[..., Path], alone: Path) -> None:
    """Samples are drawn by their place in the batch: the same batch on two processes gives the same run."""
    two = run("train.py", 2, STEPS, "two", launched=True)
    close(log(alone), log(two))
    check_saved(two)
    again = run("train.py", 2, {**STEPS, "output_dir": str(two), "resume": str(two / "checkpoint-2")}, "again")
    assert log(again) == log(two)
    assert_equal(again, two)


def assert_equal(first: Path, second: Path) -> None:
    one, other = load_file(first / "weights.safetensors"), load_file(second / "weights.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.deepspeed
def test_zero_2_saves_and_resumes(run: Callable[..., Path]) -> None:
    two = run("train.py", 2, {**STEPS, "plan": plan(2, stage=2)}, "two")
    check_saved(two)
    resume = {"output_dir": str(two), "resume": str(two / "checkpoint-2"), "plan": plan(2, stage=2)}
    again = run("train.py", 2, {**STEPS, **resume}, "again")
    assert log(again) == log(two)
    assert_equal(again, two)


@pytest.mark.deepspeed
def test_zero_3_without_a_reference_saves_and_resumes_under_another_plan(run: Callable[..., Path]) -> None:
    config = RECIPES / "deepspeed_zero3.yaml"
    options = {**STEPS, "use_cpu": False}
    two = run("train.py", 2, options, "two", config=config, cold=True)
    check_saved(two)
    settings = json.loads((two / "rank-0.json").read_text())["deepspeed"]
    assert settings == {"stage": 3, "clipping": 0.7, "offload": "none", "bf16": False}, "the launcher's config is kept"
    options = {**STEPS, "output_dir": str(two), "resume": str(two / "checkpoint-2"), "max_grad_norm": 0.7}
    alone = run("train.py", 1, {**options, "per_device_train_batch_size": 8}, "alone")
    close(log(alone), log(two))


OFFLOADED = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: cpu
  zero3_init_flag: false
  zero_stage: 2
mixed_precision: bf16
"""


@pytest.mark.deepspeed
def test_the_launchers_offload_and_precision_are_the_engines(run: Callable[..., Path], tmp_path: Path) -> None:
    config = tmp_path / "offload.yaml"
    config.write_text(OFFLOADED)
    # and those of copies that score elsewhere: parameters arrive there in the dtype they are trained in
    copies = {"critic.forward": whole("1"), "critic.train": {**whole("0"), "zero_stage": 2}}
    options = {**STEPS, "use_cpu": False, "save_strategy": "no", "max_steps": 2}
    options["plan"] = plan(2, stage=2, changed=copies)
    two = run("train.py", 2, options, "two", config=config)
    settings = json.loads((two / "rank-0.json").read_text())["deepspeed"]
    assert (settings["stage"], settings["bf16"]) == (2, True)
    assert "cpu" in settings["offload"]


ENGINES: dict[str, dict[str, Any]] = {
    "one on each rank": {"mesh": "0-1", "dp": 2},
    "one over both": {"mesh": "0-1", "tp": 2},
    "one on one": {"mesh": "1"},
}


@pytest.mark.deepspeed
@pytest.mark.parametrize("engines", ["none", *(pytest.param(name, marks=pytest.mark.vllm) for name in ENGINES)])
def test_an_adapter_trains_and_is_saved(run: Callable[..., Path], tmp_path: Path, engines: str) -> None:
    """With vLLM under ZeRO-3. The engines get the layers with adapters alone after their first load, and no rank has a
    whole copy of the policy."""
    options: dict[str, Any] = {**STEPS, "lora": True, "plan": plan(2, stage=0 if engines == "none" else 3)}
    if engines != "none":
        options |= {"generation_engine": "vllm", "num_ppo_epochs": 1}
        options["plan"]["calls"]["actor.generate"] = {"engine": "vllm", **ENGINES[engines]}
    two = run("train.py", 2, options, "two")
    if engines != "none":
        assert [row["val/ratio"] for row in log(two)] == pytest.approx([1.0] * 4, abs=1e-4)
        fused = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        adapted = sum(p.nbytes for name, p in tiny.policy().named_parameters() if name.endswith(fused))
        told = [json.loads((two / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        has_engine = [engines != "one on one", engines != "one over both"]
        assert [rank["sent"] for rank in told] == [{"actor.generate": adapted} if has else {} for has in has_engine]
        assert all(rank["held"] < sum(p.nbytes for p in tiny.policy().parameters()) for rank in told)
    assert abs(log(two)[-1]["objective/kl"]) > 1e-4
    saved = load_file(two / "final" / "adapter_model.safetensors")
    kept = load_file(two / "weights.safetensors")
    assert saved and all(
        torch.equal(tensor, kept["policy." + name.replace(".weight", ".default.weight")])
        for name, tensor in saved.items()
    )


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BASE_APART = plan(2, actor="0", critic="0", reference="1", reward="1")
BASE_APART["calls"]["actor.generate"]["mesh"] = "1"


def test_qlora_on_two_processes_trains_as_on_one(run: Callable[..., Path], tmp_path: Path) -> None:
    """As replicas, and with the generation and the reference, of one base, on the process that does not train."""
    options = {**STEPS, "lora": True, "quantized": NF4, "save_strategy": "no", "max_steps": 3}
    alone = run("train.py", 1, {**options, "per_device_train_batch_size": 8}, "alone")
    assert abs(log(alone)[-1]["objective/kl"]) > 1e-4
    for name, how in (("replicas", plan(2)), ("apart", BASE_APART)):
        two = run("train.py", 2, {**options, "plan": how}, name)
        close(log(alone), [{k: v for k, v in row.items() if not k.startswith("realloc/")} for row in log(two)])
        assert_equal_adapters(two, alone)
    base = sum(parameter.nbytes for parameter in tiny.quantized(tmp_path, **NF4).parameters())
    adapters = sum(tensor.nbytes for tensor in load_file(alone / "final" / "adapter_model.safetensors").values())
    held = json.loads((two / "rank-1.json").read_text())["held"]
    assert base <= held <= base + adapters, "the reference and the generation have one base"


def assert_equal_adapters(first: Path, second: Path) -> None:
    one, other = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (first, second))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


def test_a_rank_loads_only_the_models_that_its_calls_use(run: Callable[..., Path], tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    tiny.classifier(3).save_pretrained(tmp_path / "reward")
    apart = plan(2, actor="0", critic="1", reference="1", reward="0")
    folder = run("train.py", 2, {**STEPS, "by_path": True, "plan": apart, "save_strategy": "no"}, "apart")
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text())["here"] for rank in (0, 1))
    assert first == {"actor": True, "critic": False, "reference": False, "generator": True, "reward": True}
    assert second == {"actor": False, "critic": True, "reference": True, "generator": False, "reward": False}
    AutoModelForCausalLM.from_pretrained(folder / "final")
    AutoModelForSequenceClassification.from_pretrained(folder / "final" / "value_model")


def options_for_vllm(**more: Any) -> dict[str, Any]:
    return {"generation_engine": "vllm", "per_device_train_batch_size": 4, "max_steps": 2, **more}


@pytest.mark.vllm
def test_vllm_engines_on_two_ranks_generate_with_the_current_weights(run: Callable[..., Path]) -> None:
    """The first pass's ratio is 1 in the second update too: the engines had the first update's weights."""
    options = options_for_vllm(plan="interleave", num_ppo_epochs=1, vllm_enable_sleep_mode=True)
    folder = run("train.py", 2, options, "two")
    assert [row["val/ratio"] for row in log(folder)] == pytest.approx([1.0, 1.0], abs=1e-4)
    check_saved(folder)


@pytest.mark.vllm
def test_one_vllm_engine_over_two_devices_generates_for_training_on_both(run: Callable[..., Path]) -> None:
    tensor_parallel = plan(2)
    tensor_parallel["calls"]["actor.generate"] = {"mesh": "0-1", "engine": "vllm", "dp": 1, "tp": 2, "drop": True}
    folder = run("train.py", 2, options_for_vllm(plan=tensor_parallel, num_ppo_epochs=1), "two")
    (kept,) = (folder / "logs").iterdir()
    assert kept.read_text().startswith("--- actor.generate engine 0 (rank 0), started"), "a run's whole log is kept"
    assert [row["val/ratio"] for row in log(folder)] == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.vllm
def test_nine_heads_are_trained_and_generate_over_three_devices(run: Callable[..., Path], tmp_path: Path) -> None:
    """The heads of SmolLM2-135M, and a vocabulary that three does not divide."""
    sizes = {"hidden_size": 36, "intermediate_size": 48, "vocab_size": 190}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3}
    tiny.policy(**sizes).save_pretrained(tmp_path / "policy")
    for name, seed in (("critic", 1), ("reward", 3)):
        tiny.classifier(seed, **sizes).save_pretrained(tmp_path / name)
    thirds = {name: split("0-2", tp=3) for name in ("reference.forward", "reward.forward", "actor.train")}
    thirds |= {name: split("0-2", tp=3) for name in ("critic.forward", "critic.train")}
    generate = {"mesh": "0-2", "engine": "vllm", "dp": 1, "tp": 3}
    options = options_for_vllm(by_path=True)
    changed = {**thirds, "actor.generate": generate}
    three = run("train.py", 3, {**options, "plan": plan(3, changed=changed), "per_device_train_batch_size": 4}, "three")
    alone = run("train.py", 1, {**options, "per_device_train_batch_size": 12}, "alone")
    close(log(alone), [{k: v for k, v in row.items() if not k.startswith("realloc/")} for row in log(three)])
    check_saved(three)


@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", ["tensor-pipeline-4", "apart-4"])
def test_engines_on_some_devices_get_the_weights_that_other_groups_train(run: Callable[..., Path], name: str) -> None:
    """The ratio is 1 in every first pass: what generated is, bit for bit but for rounding, what trains."""
    path = str(RECIPES.parent / "plans" / f"{name}.yaml")
    options = options_for_vllm(plan=path, num_ppo_epochs=1, per_device_train_batch_size=2, max_steps=3)
    folder = run("train.py", 4, options, "four")
    assert [row["val/ratio"] for row in log(folder)] == pytest.approx([1.0] * 3, abs=1e-4)
    assert all(row["realloc/bytes/actor.generate"] > 0 for row in log(folder))
    assert all(row["realloc/bytes/critic.forward"] > 0 for row in log(folder))
    check_saved(folder)


@pytest.mark.parametrize("dropped", [False, True])
def test_generating_and_scoring_elsewhere_changes_no_run(run: Callable[..., Path], alone: Path, dropped: bool) -> None:
    """The copies on the second process are refreshed before each call, or freed after it and made again: the run is the
    one of a process alone."""
    apart = separate(Cluster(1, 2), generation_engine="transformers").to_dict()
    for call in ("actor.generate", "critic.forward") if dropped else ():
        apart["calls"][call]["drop"] = True
    two = run("train.py", 2, {**STEPS, "plan": apart}, "two")
    moved = ("realloc/bytes/actor.generate", "realloc/bytes/critic.forward")
    assert all(row.pop(name) > 0 for row in log(two)[1:] for name in moved)
    rows = [{key: value for key, value in row.items() if not key.startswith("realloc/")} for row in log(two)]
    close(log(alone), rows)
    check_saved(two)


def test_a_tensor_and_pipeline_run_resumes_as_if_never_stopped(run: Callable[..., Path]) -> None:
    halves = {name: split("0-1", tp=2) for name in ("reference.forward", "actor.train")}
    stages = {name: split("0-1", pp=2) for name in ("critic.forward", "critic.train")}
    options = {**STEPS, "plan": plan(2, changed={**halves, **stages})}
    two = run("train.py", 2, options, "two")
    check_saved(two)
    again = run("train.py", 2, {**options, "output_dir": str(two), "resume": str(two / "checkpoint-2")}, "again")
    keep = [{key: v for key, v in row.items() if not key.startswith("realloc/s")} for row in log(two)]
    assert [{key: v for key, v in row.items() if not key.startswith("realloc/s")} for row in log(again)] == keep
    assert_equal(again, two)


@pytest.mark.vllm
def test_of_an_adapted_policy_only_the_adapters_move_to_engines_elsewhere(run: Callable[..., Path]) -> None:
    """The reference scores beside the engine, by the base that the adapters are merged in."""
    apart = plan(2, actor="0", critic="0", reference="1", reward="1")
    apart["calls"]["actor.generate"] = {"mesh": "1", "engine": "vllm", "drop": True}
    options = options_for_vllm(plan=apart, num_ppo_epochs=1, lora=True, max_steps=3)
    two = run("train.py", 2, options, "two")
    assert [row["val/ratio"] for row in log(two)] == pytest.approx([1.0] * 3, abs=1e-4)
    assert abs(log(two)[-1]["objective/kl"]) > 1e-4
    adapters = sum(t.numel() for n, t in load_file(two / "weights.safetensors").items() if "lora_" in n)
    assert all(row["realloc/bytes/actor.generate"] == 4 * adapters for row in log(two))
    told = json.loads((two / "rank-1.json").read_text())
    assert [name for name, is_here in told["here"].items() if is_here] == ["generator"]
    base = sum(p.numel() for p in tiny.policy().parameters())
    assert 4 * base <= told["held"] <= 4 * (base + adapters), "no second base for the reference"
