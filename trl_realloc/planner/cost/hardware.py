"""Devices and links: public specifications, and the protocol of unit costs (`Rates`).

Unit costs computed from a specification are in `analytic_rates`, those fitted to measurements in `measured_rates`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ConfigDict

from ...common.errors import PlanError, Problems, nearest, shown
from ...common.files import read_yaml_mapping
from ...common.schema import checked
from ...common.settings import number_of_text
from ...plan.cluster import Cluster
from ...plan.model_spec import ModelSpec


MAX_PLANNED = 8192  # devices. Choosing a plan for 4,096 takes some seconds, and the time grows with the number
# Seconds of a decode step on the host, fitted to the three machines and models that have run (docs/studies/gpu_runs.md)
# by least squares of the logarithms of their steps, with `Device.sampled_bytes` for the sampler:
#   5.9 ms: an H100, 1.2 billion parameters, 64 samples, vocabulary 128,256; estimated 4.4
#   4.5 ms: the same machine, 1.07 billion, 128 samples, vocabulary 32,000; estimated 4.3
#   2.9 ms: an H200, the model and the samples of the first (4.1 ms with waking and weights); estimated 3.9
# The host alone took 4.3, 3.0 and 1.8 ms in these steps.
DECODE_STEP = 2.8e-3


@dataclass(frozen=True)
class Link:
    """A link between two devices.

    Args:
        bandwidth: bytes/s that one device sends, or receives.
        latency: seconds that a message takes in addition to the transfer of its bytes.
        collective_latency: seconds that a collective takes in addition to the transfer of its bytes.
        efficiency: fraction of the bandwidth that a collective of large messages reaches.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    bandwidth: float
    latency: float = 5e-6
    collective_latency: float = 20e-6
    efficiency: float = 0.8

    def send(self, size: float) -> float:
        """Seconds to send `size` bytes."""
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce(self, size: float, n: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes over `n` devices.

        Each device sends 2 (n - 1) / n of the bytes.
        """
        return 2 * self.gather(size, n) if n > 1 else 0.0

    def gather(self, size: float, n: int) -> float:
        """Seconds of an all-gather that results in `size` bytes, or of a reduce-scatter of `size` bytes.

        Each of the `n` devices sends (n - 1) / n of the bytes.
        """
        if n == 1:
            return 0.0
        return self.collective_latency / 2 + (n - 1) / n * size / (self.bandwidth * self.efficiency)


@dataclass(frozen=True)
class Sharing:
    """Slowdown of devices that share processors or memory bandwidth, as CPU ranks do.

    Args:
        slower: pairs (number of devices that compute at the same time, factor by which each is slower than a single
            device), in order of the number of devices. The pair of a single device, (1, 1.0), is left out.
    """

    slower: tuple[tuple[int, float], ...]

    @staticmethod
    def of(processors: float) -> Sharing:
        """The `Sharing` of devices that take turns on `processors` processors and do not slow each other down
        otherwise."""
        devices = max(1, math.ceil(processors))
        return Sharing(((devices, max(1.0, devices / processors)),))

    def slowdown(self, devices: float) -> float:
        """The factor by which each of `devices` devices is slower than a single device.

        It is interpolated linearly between the pairs of `slower`. Beyond the last pair it grows in proportion to the
        number of devices, because no processors are left.
        """
        before, above = 1.0, 1.0
        for count, slower in self.slower:
            if devices <= count:
                share = (devices - before) / (count - before) if count > before else 1.0
                return above + max(0.0, share) * (slower - above)
            before, above = count, slower
        return above * devices / before


@dataclass(frozen=True)
class Device:
    """A kind of accelerator in its usual node.

    Args:
        flops: peak dense FLOP/s of bf16 matrix products.
        memory: bytes of device memory.
        memory_bandwidth: bytes/s of device memory.
        inside, between: link of one device to another in its node, and to one in another node. `between` is the network
            adapter that the device sends by, not the sum of a node's adapters.
        host_bandwidth: bytes/s between device and host memory.
        efficiency: fraction of `flops` that a model's matrix products reach.
        memory_efficiency: fraction of `memory_bandwidth` that reading weights and caches reaches.
        launch: least seconds of one layer's forward. The host launches the kernels of a layer one by one.
        decode_launch: least seconds of one layer in a decode step, where an engine replays a captured graph.
        step: host seconds of a decode step: scheduling, launches and Python. They depend on the host's processors, not
            on the device. The default is used until a run has measured them (`profile.DecodeHost`).
        sample: host seconds per sample of a decode step.
        call: seconds that a call takes to receive and send samples.
        overlap: fraction of ZeRO stage 3's communication that overlaps with arithmetic.
        single_flops: peak FLOP/s of float32 matrix products without tensor cores; 0: the same as `flops`.
        passes: number of reads and writes of a layer's saved activations in its forward by all kernels that are no
            matrix products. A backward moves twice as many bytes.
        logit_bytes: bytes that the forward moves for each logit, without the head's matrix product.
        sampled_bytes: bytes that an engine's sampler moves for each logit of a decode step: some 12 reads and writes of
            float32 (the cast, temperature, softmax, sampling, the rank of the sampled token).
        own_adapters: whether each device of a node has a network adapter, so that a collective over several devices of
            each node has the bandwidth of all their adapters. False if the devices of a node share one adapter, or if
            `between` was fitted to collectives of whole nodes and so is the bandwidth of all adapters.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link
    host_bandwidth: float
    efficiency: float = 0.7
    memory_efficiency: float = 0.7
    launch: float = 400e-6
    decode_launch: float = 15e-6
    step: float = DECODE_STEP
    sample: float = 0.0
    call: float = 20e-3
    overlap: float = 0.8
    single_flops: float = 0.0
    passes: float = 3.5
    logit_bytes: float = 49.0
    sampled_bytes: float = 48.0
    own_adapters: bool = True


# Peak dense bf16 and float32 FLOP/s, memory and NVLink bandwidth are from NVIDIA's data sheets of the A100 80GB SXM,
# H100 SXM, H200 SXM, HGX B200, L40S and GeForce RTX 4090. The data sheets quote NVLink as the sum of both directions,
# and half of that sum is used here. Each GPU with NVLink has one NIC, as in NVIDIA's DGX A100, DGX H100 and DGX B200:
# HDR InfiniBand (200 Gb/s) with A100s and NDR (400 Gb/s) in the other nodes. Host bandwidth is PCIe 4 (A100, L40S,
# RTX 4090) and PCIe 5 (the other GPUs) with 16 lanes. L40S and RTX 4090 have no NVLink: L40S send to each other by
# PCIe, RTX 4090 through host memory, which takes two copies. Their nodes are assumed to have one adapter, of 200 Gb/s
# and of 25 Gb/s. `efficiency`, `passes` and `logit_bytes` were fitted to one run on an H200 (docs/hardware.md).
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 312e12, 80e9, 2.039e12, Link(300e9), Link(25e9), 32e9, single_flops=19.5e12),
        Device("h100", 989e12, 80e9, 3.35e12, Link(450e9), Link(50e9), 64e9, single_flops=67e12),
        Device("h200", 989e12, 141e9, 4.8e12, Link(450e9), Link(50e9), 64e9, single_flops=67e12),
        Device("b200", 2250e12, 180e9, 8e12, Link(900e9), Link(50e9), 64e9, single_flops=75e12),
        Device("l40s", 362e12, 48e9, 864e9, Link(32e9), Link(25e9), 32e9, single_flops=91.6e12, own_adapters=False),
        Device(
            "rtx4090", 165e12, 24e9, 1.008e12, Link(16e9), Link(3.125e9), 32e9, single_flops=82.6e12, own_adapters=False
        ),
    )
}


def parse_cluster(text: str) -> tuple[Cluster, Device]:
    """Parses a cluster and its device from text such as `h100:16x8` (16 nodes of 8 H100s), `h100:8` (one node) or
    `gpu.yaml:2x8`, where a file describes the device (`read_device`).

    Raises:
        PlanError: the text has another form, there is no such device, or the cluster has more than `MAX_PLANNED`
            devices.
    """
    match = re.fullmatch(r"(.+):(?:([0-9]{1,9})x)?([0-9]{1,9})", text.strip())
    if match is None:
        raise PlanError(
            f"a cluster is written as h100:16x8 (16 nodes of 8 H100s), h100:8 or gpu.yaml:16x8, not {shown(text)}."
        )
    name, nodes, per_node = match.groups()
    device = read_device(Path(name)) if name.endswith((".yaml", ".yml")) else _known_device(name.lower())
    cluster = Cluster(int(nodes or 1), int(per_node), device.memory / 1e9)
    if cluster.size > MAX_PLANNED:
        raise PlanError(
            f"{text.strip()} is {cluster.size:,} devices, and the planner chooses for {MAX_PLANNED:,} at most."
        )
    return cluster, device


def _known_device(name: str) -> Device:
    if name in DEVICES:
        return DEVICES[name]
    near = nearest(name, DEVICES)
    hint = f"did you mean {near!r}? There" if near else "there"
    raise PlanError(
        f"there is no specification of {shown(name)}; {hint} are {', '.join(DEVICES)}; for another device, name "
        f"a YAML file with its specification, like gpu.yaml:2x8."
    )


def read_device(path: Path) -> Device:
    """The device that a YAML file describes, with `Device`'s arguments as keys.

    ```yaml
    name: my-gpu
    flops: 362e12
    memory: 48e9
    memory_bandwidth: 864e9
    inside: {bandwidth: 32e9}
    between: {bandwidth: 25e9}
    host_bandwidth: 32e9
    ```

    Raises:
        PlanError: no such file, a key that is missing or unknown, or a value that is no positive number.
    """
    contents = read_yaml_mapping(path, "the device", "flops: 362e12")
    device: Device = checked(Device, _numbers(contents), str(path))
    positive = ("flops", "memory", "memory_bandwidth", "host_bandwidth", "efficiency", "memory_efficiency")
    values = {name: getattr(device, name) for name in positive}
    values |= {f"{name}.bandwidth": getattr(device, name).bandwidth for name in ("inside", "between")}
    Problems(
        f"{path}: {name} is {value:g}; it should be a number above 0."
        for name, value in values.items()
        if not 0 < value < math.inf
    ).refuse()
    return device


def _numbers(value: object) -> object:
    """Texts such as `362e12`, which YAML does not read as numbers, as numbers."""
    if isinstance(value, Mapping):
        return {key: _numbers(part) for key, part in value.items()}
    return number_of_text(value)


class Rates(Protocol):
    """Unit costs of one kind of device, in seconds of one device. Collectives are priced by the links."""

    @property
    def name(self) -> str: ...
    @property
    def inside(self) -> Link: ...
    @property
    def between(self) -> Link: ...
    def across(self, members: int) -> Link:
        """The link of a collective over a group with devices in several nodes.

        Args:
            members: number of the group's devices in a node, 1 or more. If nodes differ, the smallest of these numbers.
        """

    @property
    def host_bandwidth(self) -> float: ...
    @property
    def step(self) -> float:
        """Seconds of a decode step in addition to its samples and layers."""

    @property
    def sample(self) -> float:
        """Seconds per sample of a decode step in addition to `decode` and `decode_head`."""

    @property
    def call(self) -> float: ...
    @property
    def overlap(self) -> float: ...
    @property
    def sharing(self) -> Sharing | None:
        """Slowdown of devices that share processors. `None` if each device has its own processors."""

    @property
    def error(self) -> float:
        """Mean relative error of the estimates.

        A plan is not preferred to a simpler plan if its estimated gain is smaller than this error.
        """

    @property
    def layout_error(self) -> float:
        """Relative standard deviation of the estimates of one call under several layouts. 0 for rates by specification,
        whose error is the same for all layouts."""

    @property
    def hop(self) -> float:
        """Seconds that a pipeline stage takes for each micro-batch in addition to the arithmetic and the message."""

    def reallocation(self, size: float) -> float:
        """Seconds of a reallocation in addition to its messages: agreeing on it, packing and unpacking.

        Args:
            size: largest number of bytes that a device sends or receives.
        """

    def measured(self, spec: ModelSpec, tp: int, pp: int, generates: bool) -> bool:
        """True if these rates cover the model under these tensor-parallel and pipeline-parallel degrees."""

    def layer(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        """Seconds of one layer's forward of `tokens` tokens. `squared` is the sum of the samples' squared lengths."""

    def layer_backward(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        """Seconds of one layer's backward, with the arguments of `layer`."""

    def head(self, spec: ModelSpec, tokens: float, tp: int, *, backward: bool = False) -> float:
        """Seconds outside the layers, for the language head and the loss, in the forward or the backward."""

    def decode(self, spec: ModelSpec, samples: float, cached: float, tp: int) -> tuple[float, float]:
        """(compute, memory) seconds of one layer in one decode step. The step takes the longer of the two.

        Args:
            samples: number of samples in the batch.
            cached: mean number of cached tokens of a sample.
        """

    @property
    def decodes_whole(self) -> bool:
        """True if the seconds of `decode` include the layer's tensor-parallel collectives."""

    def decode_head(self, spec: ModelSpec, samples: float, tp: int) -> float:
        """Seconds of the language head and the sampler in one decode step."""

    def optimizer(self, elements: float, element_bytes: int) -> float:
        """Seconds of one optimizer step on `elements` parameters."""

    def zero(self, stage: int, *, trains: bool) -> float:
        """Factor of the formulas of ZeRO's communication (`zero_costs`) under a stage from 1 to 3. 1 if not
        measured."""

    def kept(self, spec: ModelSpec, tokens: float, squared: float) -> float | None:
        """Bytes that one layer's forward of `tokens` tokens keeps for its backward. `None` if not measured."""
