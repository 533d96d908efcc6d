"""Unit costs of a machine that was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import specs, work
from test_profile import _over, made_up

from trl_realloc.plan.cluster import Cluster
from trl_realloc.planner.analytic_rates import AnalyticRates
from trl_realloc.planner.choose import choose
from trl_realloc.planner.corrections import Corrections
from trl_realloc.planner.cost import Pricing
from trl_realloc.planner.device_memory import gpu_memory
from trl_realloc.planner.hardware import DEVICES
from trl_realloc.planner.measured_rates import ACCELERATOR_ERROR, CPU_ERROR, MeasuredRates
from trl_realloc.planner.profile import Profile
from trl_realloc.planner.specification import CPU, GPU, rates_of, specified_device


def unmeasured(hardware: str, **changes: object) -> Profile:
    return replace(Profile(hardware, {}, 8, None, False, ()), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hardware", "is_accelerator", "device"),
    [
        ("NVIDIA H100 80GB HBM3", True, DEVICES["h100"]),
        ("NVIDIA A100-SXM4-80GB", True, DEVICES["a100"]),
        ("NVIDIA H200", True, DEVICES["h200"]),
        ("NVIDIA L40S", True, GPU),
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
    decision = choose(specs(), pricing, time_limit_s=1.0)
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
    slow = replace(pricing, corrections=Corrections(dict.fromkeys(specs(), 40.0), handover=0.0))
    one, other = (choose(specs(), each, time_limit_s=1.0).best for each in (pricing, slow))
    assert other.calls["actor.train"].cost.seconds > 20 * one.calls["actor.train"].cost.seconds


def test_a_changed_device_keeps_the_error_of_its_estimates() -> None:
    rates = rates_of(unmeasured("NVIDIA H100", is_accelerator=True))
    assert rates.changed(call=1.0).error == rates.error  # type: ignore[attr-defined]
