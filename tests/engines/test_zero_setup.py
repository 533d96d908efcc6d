"""The DeepSpeed config of an engine, from that of the launcher."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from replay import rollouts
from test_engine_protocol import adamw, assembled, assert_same, build, mean_logprob, process_group  # noqa: F401
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training.deepspeed_compat import initializing
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.zero import ZeroEngine
from trl_realloc.engines.training.zero_setup import cast_parameters, deepspeed_config
from trl_realloc.plan.assignment import REDUCE_BUCKET


LAUNCHED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}


def test_what_scores_under_zero_3_has_no_optimizer_to_offload_and_keeps_no_parameter_whole() -> None:
    zero = deepspeed_config(3, LAUNCHED, 1.0, trained=0)["zero_optimization"]
    assert zero["stage"] == 3 and "offload_optimizer" not in zero
    assert zero["stage3_param_persistence_threshold"] == 0


def test_what_trains_keeps_the_launchers_offload_and_precision() -> None:
    config = deepspeed_config(2, LAUNCHED, 1.0, trained=100)
    assert config["zero_optimization"] == {**LAUNCHED["zero_optimization"], "reduce_bucket_size": 100}
    assert config["bf16"] == {"enabled": True, "immediate_grad_update": True}


def test_buckets_of_gradients_are_smaller_than_deepspeeds_own_where_the_user_names_no_size() -> None:
    def size(user: Any, trained: int = 7_000_000_000) -> int:
        number: int = deepspeed_config(3, user, 1.0, trained=trained)["zero_optimization"]["reduce_bucket_size"]
        return number

    assert size(None) == size({"zero_optimization": {"reduce_bucket_size": "auto"}}) == REDUCE_BUCKET < 500_000_000
    assert size({"zero_optimization": {"reduce_bucket_size": 1000}}) == 1000
    assert size(None, 1234) == 1234


def test_a_copy_is_cast_as_deepspeed_casts_but_not_the_frequencies_of_its_rotary_embedding(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=2048, **sizes))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # keeps them in float32
    cast_parameters(model, torch.bfloat16)
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    ids = torch.arange(1200)[None] % 100
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)


@pytest.mark.deepspeed
@pytest.mark.parametrize("launched", [{"LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, {"LOCAL_RANK": "3"}, {}])
def test_deepspeed_takes_the_engines_device_also_where_each_process_sees_one_device(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with initializing(MeshGroup((3,), 3), torch.device("cuda", 0)):
        assert {name: os.environ[name] for name in names if name in os.environ} == dict.fromkeys(
            launched or ["LOCAL_RANK"], "0"
        )
    assert {name: os.environ[name] for name in names if name in os.environ} == launched
    with initializing(MeshGroup((3,), 3), torch.device("cpu")):
        assert os.environ["LOCAL_RANK"] == launched.get("LOCAL_RANK", "0")


@pytest.mark.deepspeed
def test_an_engine_starts_without_gathering_a_parameter_or_writing_to_the_memory_of_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.zero.partition_parameters import Init

    gathered: list[int] = []
    zeros: list[int] = []
    gather = Init._all_gather

    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.zeros and len(args) == 1 and isinstance(args[0], int):
                zeros.append(args[0])
            return func(*args, **(kwargs or {}))

    def counted(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        gathered.extend(parameter.ds_numel for parameter in parameters)
        return gather(self, parameters, *args, **kwargs)

    monkeypatch.setattr(Init, "_all_gather", counted)
    with Zeros():
        made = build("zero 3", optimizer=adamw)
    size = sum(parameter.numel() for parameter in tiny.policy().parameters())
    assert not gathered
    assert zeros and max(zeros) < size, "DeepSpeed's other zeros are of single numbers"
    before = {name: part.clone() for name, parts in made.parts().items() for _, part in parts}
    statistics = made.train(rollouts(4), mean_logprob, 64, 1e-3)
    assert gathered and math.isfinite(float(statistics["tokens"].sum()))
    after = {name: part for name, parts in made.parts().items() for _, part in parts}
    assert all(not torch.equal(before[name], after[name]) for name in before), "every parameter has its gradient"
    assert all(parameter.numel() == 0 for parameter in made.head.model.parameters())
    made.close()


@pytest.mark.deepspeed
def test_a_model_in_memory_is_partitioned_one_parameter_at_a_time_before_deepspeed_moves_it_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import deepspeed

    given: list[bool] = []
    shapes: list[torch.Size] = []
    initialize = deepspeed.initialize

    def noted(**arguments: Any) -> Any:
        given.extend(parameter.numel() == 0 for parameter in arguments["model"].parameters())
        return initialize(**arguments)

    def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
        shapes.extend(parameter.shape for parameter in module.parameters())
        return adamw(module)

    monkeypatch.setattr(deepspeed, "initialize", noted)
    model = tiny.policy()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    made = build("zero 3", PolicyHead(model, 1.0), optimizer=optimizer)
    assert given and all(given), "the device never has the whole model"
    assert shapes == [parameter.shape for parameter in before.values()]
    assert_same(assembled(made.parts(), before), before)
    made.close()


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_does_not_turn_the_engines_autocast_off(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for autocast without a device, which is that of CUDA; here the answer is that of the CPU."""
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": is_enabled(kind))
    head, seen = PolicyHead(tiny.policy(), 1.0), set[torch.dtype]()
    layer = head.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    mesh = MeshGroup((0,), 0, dist.group.WORLD)
    how = {"stage": stage, "alone": mesh.group, "compute_dtype": torch.bfloat16, "make_optimizer": adamw}
    made = ZeroEngine(head, mesh, torch.device("cpu"), **how)
    made.train(rollouts(4), mean_logprob, 64, 1e-3)
    made.forward(rollouts(4), 64)
    assert seen == {torch.bfloat16}
    made.close()
