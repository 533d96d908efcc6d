"""The unit costs of a machine: fitted to its measurements or, where it was not measured, by its specification."""

from __future__ import annotations

from dataclasses import replace

from .analytic_rates import AnalyticRates
from .hardware import DEVICES, Device, Link, Rates
from .measured_rates import MeasuredRates
from .profile import Profile


# Of a plan that is chosen by specification. A preset is preferred to a plan that is faster by less than this.
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
    launch=200e-6,
    decode_launch=100e-6,
    call=5e-3,
    overlap=0.0,
    own_adapters=False,
)
GPU = Device("GPU", 150e12, 0.0, 1e12, Link(25e9), Link(10e9), 16e9, single_flops=20e12, own_adapters=False)


def rates_of(profile: Profile) -> Rates:
    """Unit costs fitted to a profile, or by specification where the profile has no observations."""
    if profile.observations:
        return MeasuredRates(profile)
    return AnalyticRates(specified_device(profile), profile.sharing, ERROR)


def specified_device(profile: Profile) -> Device:
    """The specification of a profile's devices, with the links between nodes as they were measured."""
    if profile.is_accelerator:
        name = profile.hardware.lower()
        device = next((device for key, device in DEVICES.items() if key in name), GPU)
    else:
        device = CPU
    far = [row for row in profile.links if row.far]
    return replace(device, between=MeasuredRates(profile).between, own_adapters=False) if far else device
