"""Unit costs of a machine that was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llamas import specs, work
from test_profile import _over, made_up

from trl_realloc.plan.assignment import Assignment
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Call
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.presets import flatten
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.cost.estimate_factors import CalibrationFactors
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.measured_rates import ACCELERATOR_ERROR, CPU_ERROR, MeasuredRates
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.profile import DecodeHost, Profile
from trl_realloc.planner.cost.specification import CPU, GPU, decode_host, rates_of, specified_device
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.space import Space


def unmeasured(hardware: str, **changes: object) -> Profile:
    return replace(Profile(hardware, {}, 8, None, False, ()), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hardware", "is_accelerator", "device"),
    [
        ("NVIDIA H100 80GB HBM3", True, DEVICES["h100"]),
        ("NVIDIA A100-SXM4-80GB", True, DEVICES["a100"]),
        ("NVIDIA H200", True, DEVICES["h200"]),
        ("NVIDIA L40S", True, DEVICES["l40s"]),
        ("NVIDIA GeForce RTX 4090", True, DEVICES["rtx4090"]),
        ("NVIDIA L4", True, GPU),
        ("AMD EPYC 9V74 h100, 2 cores, 1 thread a device", False, CPU),
    ],
)
def test_a_device_has_the_specification_of_its_name(hardware: str, is_accelerator: bool, device: object) -> None:
    assert specified_device(unmeasured(hardware, is_accelerator=is_accelerator)) == device


def test_a_machine_with_measurements_has_these() -> None:
    assert isinstance(rates_of(made_up()), MeasuredRates)


def test_links_between_hosts_which_every_start_measures_are_used_without_other_measurements() -> None:
    rates = rates_of(unmeasured("a CPU", nodes=2, links=tuple(_over(1e-7))))
    assert rates.between.bandwidth == pytest.approx(1e7)
    assert rates.inside == CPU.inside


def test_a_plan_by_specification_is_a_preset_unless_another_is_much_faster() -> None:
    rates = rates_of(unmeasured("NVIDIA H100 80GB HBM3", is_accelerator=True))
    pricing = Pricing(Cluster(1, 8, 80.0), work(), rates, memory=gpu_memory(80e9))
    decision = choose(Space.of_run(specs(), pricing), time_limit_s=1.0)
    fastest = min(plan.plan.seconds for plan in decision.alternatives if plan.plan is not None)
    assert decision.best.name == "searched" or decision.best.seconds <= 1.3 * fastest


def test_float32_is_not_computed_at_the_rate_of_bfloat16() -> None:
    rates = rates_of(unmeasured("NVIDIA H100 80GB HBM3", is_accelerator=True))
    (spec,) = specs()["actor.train"]
    single = replace(spec, activation_bytes=4)
    assert isinstance(rates, AnalyticRates)
    products = rates.changed(passes=0.0)  # what is no matrix product takes as long as its bytes
    assert products.layer(single, 1e5, 1e7, 1) == pytest.approx(989 / 67 * products.layer(spec, 1e5, 1e7, 1))
    assert rates.layer(single, 1e5, 1e7, 1) > products.layer(single, 1e5, 1e7, 1)


def test_what_was_measured_on_cpus_is_not_assumed_of_an_accelerator() -> None:
    assert MeasuredRates(made_up()).error == CPU_ERROR
    assert MeasuredRates(made_up(is_accelerator=True)).error == ACCELERATOR_ERROR


def test_corrections_turn_a_specification_into_the_machine_at_hand() -> None:
    pricing = Pricing(Cluster(1, 8), work(), rates_of(unmeasured("a CPU")))
    slow = replace(pricing, calibration=CalibrationFactors(dict.fromkeys(specs(), 40.0), dispatch=0.0))
    one, other = (choose(Space.of_run(specs(), each), time_limit_s=1.0).best for each in (pricing, slow))
    assert other.calls["actor.train"].cost.seconds > 20 * one.calls["actor.train"].cost.seconds


def generation(
    profile: Profile, length: int = 512, vocabulary: int = 128_256
) -> tuple[Pricing, Call, ModelSpec, Assignment]:
    """64 samples of 128 and `length` tokens by an engine that sleeps, with a policy of 1.2 billion parameters."""
    policy = {"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
    policy |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": vocabulary}
    spec = ModelSpec.from_config({**policy, "tie_word_embeddings": True}, "lm", bytes_per_element=4)
    plan = flatten(Cluster(1, 1), generation_engine="vllm")
    pricing = Pricing(plan.cluster, Workload(64, 128, (length,), epochs=1), rates_of(profile))
    call = plan.graph.call("actor.generate")
    return pricing, call, replace(spec, activation_bytes=2), replace(plan[call.name], drop=True)


@pytest.mark.parametrize(
    ("hardware", "step_s", "update_s"),
    [("NVIDIA H200", 2.94e-3, 2.12), ("NVIDIA H100 80GB HBM3", 5.75e-3, 3.57)],  # docs/hardware.md
)
def test_generation_is_estimated_by_the_machines_decode_steps(hardware: str, step_s: float, update_s: float) -> None:
    profile = unmeasured(hardware, is_accelerator=True)
    pricing, call, spec, assignment = generation(profile)
    host = decode_host(pricing, spec, assignment, [(64, 128 + 256, step_s)])
    pricing = replace(pricing, rates=rates_of(replace(profile, decode_host=host)))
    assert sum(pricing.decode_step(spec, assignment, 64, 128 + 256).values()) == pytest.approx(step_s)
    assert pricing.price(call, [spec], assignment).seconds == pytest.approx(update_s, rel=0.1)


@pytest.mark.parametrize(
    ("hardware", "samples", "vocabulary", "step_s"),
    [("NVIDIA H100", 64, 128_256, 5.9e-3), ("NVIDIA H100", 128, 32_000, 4.5e-3), ("NVIDIA H200", 64, 128_256, 2.94e-3)],
)
def test_a_decode_step_by_data_sheet_lies_between_those_of_the_machines_that_have_run(
    hardware: str, samples: int, vocabulary: int, step_s: float
) -> None:
    pricing, _, spec, assignment = generation(unmeasured(hardware, is_accelerator=True), vocabulary=vocabulary)
    assert sum(pricing.decode_step(spec, assignment, samples, 384).values()) == pytest.approx(step_s, rel=0.35)


def test_the_sampler_passes_over_the_logits_of_each_sample() -> None:
    """12 times, in float32: 256 x 128,256 numbers of 4 bytes at 70 % of 3.35e12 B/s."""
    profile = unmeasured("NVIDIA H100", is_accelerator=True)
    few, many = (generation(profile, vocabulary=size) for size in (256, 128_256))
    steps = [sum(pricing.decode_step(spec, to, 256, 384).values()) for pricing, _, spec, to in (few, many)]
    head = 2 * 2048 * 128_000 / (0.7 * 3.35e12)  # its weights are read
    expected = 12 * 4 * 256 * 128_000 / (0.7 * 3.35e12)
    assert steps[1] - steps[0] - head == pytest.approx(expected, rel=0.1)


@given(step=st.floats(1e-4, 1e-2), sample=st.floats(0, 1e-4), few=st.integers(1, 8), times=st.integers(2, 64))
def test_decode_steps_of_two_sizes_show_the_hosts_part(step: float, sample: float, few: int, times: int) -> None:
    profile = unmeasured("NVIDIA H100 80GB HBM3", is_accelerator=True)
    pricing, _, spec, assignment = generation(profile)
    true = replace(pricing, rates=rates_of(replace(profile, decode_host=DecodeHost(step, sample))))
    sizes = [(float(n), 300.0) for n in (few, few * times)]
    steps = [(n, cached, sum(true.decode_step(spec, assignment, n, cached).values())) for n, cached in sizes]
    found = decode_host(pricing, spec, assignment, steps)
    assert found is not None
    assert found.step == pytest.approx(step, rel=1e-6)
    assert found.sample == pytest.approx(sample, rel=1e-6, abs=1e-9)


def test_without_decode_steps_nothing_is_known_of_the_host() -> None:
    pricing, _, spec, assignment = generation(unmeasured("NVIDIA H100", is_accelerator=True))
    assert decode_host(pricing, spec, assignment, []) is None


def test_a_changed_device_keeps_the_error_of_its_estimates() -> None:
    rates = rates_of(unmeasured("NVIDIA H100", is_accelerator=True))
    assert rates.changed(call=1.0).error == rates.error  # type: ignore[attr-defined]
