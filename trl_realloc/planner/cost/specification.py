"""The unit costs of a machine: fitted to its measurements or, if it was not measured, from its specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...plan.assignment import Assignment
from ...plan.model_spec import ModelSpec
from .analytic_rates import AnalyticRates
from .hardware import DEVICES, Device, Link, Rates
from .measured_rates import MeasuredRates
from .pricing import Pricing
from .profile import DecodeHost, Profile


# Relative error of estimates by specification. A preset is preferred to a plan that is faster by less than this.
ERROR = 0.3

# Devices without a specification of their own. The numbers are assumptions: what a run shows corrects them within some
# updates, and until then only their ratios matter. `CPU` is one rank on a core or two that sends by gloo. In both, the
# devices of a node share one network adapter.
CPU = Device(
    "CPU",
    flops=60e9,
    memory=0.0,
    memory_bandwidth=10e9,
    inside=Link(1e9, 100e-6, 200e-6, 0.5),
    between=Link(1e8, 200e-6, 500e-6, 0.8),
    host_bandwidth=5e9,
    efficiency=0.5,
    passes=0.0,
    logit_bytes=0.0,
    sampled_bytes=0.0,
    launch=200e-6,
    decode_launch=100e-6,
    step=2e-3,
    call=5e-3,
    overlap=0.0,
    own_adapters=False,
)
GPU = Device("GPU", 150e12, 0.0, 1e12, Link(25e9), Link(10e9), 16e9, single_flops=20e12, own_adapters=False)


def rates_of(profile: Profile) -> Rates:
    """Unit costs fitted to a profile, or by specification if the profile has no observations."""
    if profile.observations:
        return MeasuredRates(profile)
    return AnalyticRates(specified_device(profile), profile.sharing, ERROR)


def specified_device(profile: Profile) -> Device:
    """The specification of a profile's devices, with the measured host time of decode steps and links between nodes."""
    if profile.is_accelerator:
        name = profile.hardware.lower().replace(" ", "")
        device = next((device for key, device in DEVICES.items() if key in name), GPU)
    else:
        device = CPU
    if profile.decode_host is not None:
        device = replace(device, step=profile.decode_host.step, sample=profile.decode_host.sample)
    far = [row for row in profile.links if row.far]
    return replace(device, between=MeasuredRates(profile).between, own_adapters=False) if far else device


def decode_host(
    pricing: Pricing, spec: ModelSpec, assignment: Assignment, steps: Sequence[tuple[float, float, float]]
) -> DecodeHost | None:
    """Host time of measured decode steps: measured seconds minus the estimated device seconds. If the largest step has
    less than twice the samples of the smallest, or takes no longer, all host time is per step and none per sample.

    Args:
        pricing: estimates by specification.
        assignment: assignment of the call that generates.
        steps: samples, cached tokens per sample and seconds of each decode step (`engines.base.DecodeStep`).

    Returns:
        `None` if there are no steps.
    """
    rest = list[tuple[float, float]]()
    for samples, cached, seconds in steps:
        parts = pricing.decode_step(spec, assignment, samples, cached)
        rest.append((samples, max(0.0, seconds - sum(parts.values()) + parts["launch"])))
    if not rest:
        return None
    (few, short), (many, long) = min(rest), max(rest)
    if many < 2 * few or long <= short:
        return DecodeHost(long, 0.0)
    sample = min((long - short) / (many - few), short / few)
    return DecodeHost(long - sample * many, sample)
