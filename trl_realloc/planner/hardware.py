"""Devices and links: public specifications, the protocol of unit costs (`Rates`), and `AnalyticRates`, which computes
them from a specification. `measured_rates.MeasuredRates` has them from measurements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ..common.errors import PlanError, nearest, shown
from ..plan.cluster import Cluster
from ..plan.model_spec import ModelSpec


MOST_PLANNED = 8192  # devices; choosing for 4,096 takes a minute


@dataclass(frozen=True)
class Link:
    """A link between two devices.

    Args:
        bandwidth: bytes/s of one device, one way.
        latency: seconds of a message.
        collective_latency: seconds of a collective without its bytes.
        efficiency: share of the bandwidth that a collective of large messages reaches.
    """

    bandwidth: float
    latency: float = 5e-6
    collective_latency: float = 20e-6
    efficiency: float = 0.8

    def send(self, size: float) -> float:
        """Seconds to send so many bytes."""
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce(self, size: float, n: int) -> float:
        """A ring's 2 (n - 1) / n times the bytes, over the efficient bandwidth."""
        return 2 * self.gather(size, n) if n > 1 else 0.0

    def gather(self, size: float, n: int) -> float:
        """All-gather to `size` bytes in all, or a reduce-scatter of them: (n - 1) / n of the bytes."""
        if n == 1:
            return 0.0
        return self.collective_latency / 2 + (n - 1) / n * size / (self.bandwidth * self.efficiency)


@dataclass(frozen=True)
class Sharing:
    """Devices that share processors, or a way to memory, as CPU ranks do.

    Args:
        slower: (devices at work at once, by how much each is slower than one alone), by number of devices; one alone
            is not in it.
    """

    slower: tuple[tuple[int, float], ...]

    @staticmethod
    def of(processors: float) -> Sharing:
        """Devices that take turns on so many processors, and do not disturb each other otherwise."""
        at = max(1, math.ceil(processors))
        return Sharing(((at, max(1.0, at / processors)),))

    def slowdown(self, devices: float) -> float:
        """What each of so many devices takes over what one alone would: by the line through what was measured; beyond,
        in proportion, for there are no more processors."""
        before, above = 1.0, 1.0
        for at, slower in self.slower:
            if devices <= at:
                share = (devices - before) / (at - before) if at > before else 1.0
                return above + max(0.0, share) * (slower - above)
            before, above = at, slower
        return above * devices / before


@dataclass(frozen=True)
class Device:
    """A kind of accelerator in its usual node.

    Args:
        flops: peak dense FLOP/s of bf16 matrix products.
        memory: bytes.
        memory_bandwidth: bytes/s.
        inside, between: links inside a node and between nodes.
        host_bandwidth: bytes/s to host memory.
        efficiency: share of `flops` that large matrix products reach.
        memory_efficiency: share of `memory_bandwidth` that reading weights and caches reaches.
        launch: seconds at least of one layer's forward, for the host launches its kernels one by one.
        decode_launch: the same in decoding, where an engine replays a captured graph.
        step: seconds of a decode step outside the layers: scheduling and sampling.
        call: seconds that a call takes to receive and send samples.
        overlap: share of ZeRO's traffic that overlaps with arithmetic.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link
    host_bandwidth: float
    efficiency: float = 0.5
    memory_efficiency: float = 0.7
    launch: float = 150e-6
    decode_launch: float = 15e-6
    step: float = 2e-3
    call: float = 20e-3
    overlap: float = 0.8


# Peak dense bf16, memory and NVLink (half of the quoted sum of both ways) by NVIDIA's data sheets of the A100 80GB SXM,
# H100 SXM and H200 SXM; one NIC for each GPU, HDR InfiniBand (200 Gb/s) with A100s and NDR (400 Gb/s) with the others,
# as in NVIDIA's DGX A100 and DGX H100; PCIe 4 and 5 with 16 lanes.
DEVICES: Mapping[str, Device] = {
    "a100": Device("a100", 312e12, 80e9, 2.039e12, Link(300e9), Link(25e9), 32e9),
    "h100": Device("h100", 989e12, 80e9, 3.35e12, Link(450e9), Link(50e9), 64e9),
    "h200": Device("h200", 989e12, 141e9, 4.8e12, Link(450e9), Link(50e9), 64e9),
}


def parse_cluster(text: str) -> tuple[Cluster, Device]:
    """The cluster and its device that a person wrote as `h100:16x8`: 16 nodes of 8 H100s; `h100:8` is one node.

    Raises:
        PlanError: text of another form, or a device that no specification is here for.
    """
    match = re.fullmatch(r"([a-z0-9-]+):(?:([0-9]{1,9})x)?([0-9]{1,9})", text.strip().lower())
    if match is None:
        raise PlanError(f"a cluster is written as h100:16x8 (16 nodes of 8 H100s) or h100:8, not {shown(text)}.")
    name, nodes, per_node = match.groups()
    if name not in DEVICES:
        near = nearest(name, DEVICES)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(DEVICES)}."
        raise PlanError(f"there is no specification of {shown(name)}; {hint}")
    device = DEVICES[name]
    cluster = Cluster(int(nodes or 1), int(per_node), device.memory / 1e9)
    if cluster.size > MOST_PLANNED:
        raise PlanError(
            f"{text.strip()} is {cluster.size:,} devices, and the planner chooses for {MOST_PLANNED:,} at most."
        )
    return cluster, device


class Rates(Protocol):
    """Unit costs of one kind of device, in seconds of one device; collectives are priced by the links."""

    @property
    def name(self) -> str: ...
    @property
    def inside(self) -> Link: ...
    @property
    def between(self) -> Link: ...
    @property
    def host_bandwidth(self) -> float: ...
    @property
    def step(self) -> float: ...
    @property
    def call(self) -> float: ...
    @property
    def overlap(self) -> float: ...
    @property
    def sharing(self) -> Sharing | None:
        """Where several devices share processors: how they slow each other down; `None`: each has its own."""

    @property
    def error(self) -> float:
        """Share by which estimates err on the mean: a plan is not preferred to a simpler one for less."""

    @property
    def hop(self) -> float:
        """Seconds of a pipeline stage for each micro-batch, without its arithmetic and its message."""

    def measured(self, spec: ModelSpec, tp: int, pp: int, generates: bool) -> bool:
        """Whether these rates know the model under those degrees."""

    def layer(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        """One layer's forward of so many tokens, whose samples' squared lengths sum to `squared`."""

    def layer_backward(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        """One layer's backward."""

    def head(self, spec: ModelSpec, tokens: float, tp: int, *, backward: bool = False) -> float:
        """What is outside the layers: the language head and the loss, forward or backward."""

    def decode(self, spec: ModelSpec, samples: float, cached: float, tp: int) -> tuple[float, float]:
        """(compute, memory) seconds of one layer in one decode step; the longer of the two passes."""

    @property
    def decodes_whole(self) -> bool:
        """Whether `decode` has the layer's tensor-parallel collectives in it."""

    def decode_head(self, spec: ModelSpec, samples: float, tp: int) -> float:
        """The head's part of a decode step."""

    def optimizer(self, elements: float, element_bytes: int) -> float:
        """An optimizer step on so many parameters."""

    def kept(self, spec: ModelSpec, tokens: float, squared: float) -> float | None:
        """Bytes that one layer's forward of so many tokens keeps for its backward; `None`: not measured."""


@dataclass(frozen=True)
class AnalyticRates:
    """`Rates` from a device's specification: the longer of arithmetic and memory traffic (a roofline), and no less than
    the host needs to launch the kernels."""

    device: Device
    sharing: Sharing | None = None

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def inside(self) -> Link:
        return self.device.inside

    @property
    def between(self) -> Link:
        return self.device.between

    @property
    def host_bandwidth(self) -> float:
        return self.device.host_bandwidth

    @property
    def step(self) -> float:
        return self.device.step

    @property
    def call(self) -> float:
        return self.device.call

    @property
    def overlap(self) -> float:
        return self.device.overlap

    @property
    def hop(self) -> float:
        return 0.0

    @property
    def error(self) -> float:
        return 0.02

    def measured(self, spec: ModelSpec, tp: int, pp: int, generates: bool) -> bool:
        return True

    def layer(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        flops = (
            2 * tokens * spec.layer_elements + 4 * spec.heads * spec.head_dim * squared / 2
        )  # causal: half the pairs
        read = spec.layer_elements * spec.bytes_per_element / self._read
        return max(flops / self._flops / tp, read / tp, self.device.launch)

    def layer_backward(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        return 2 * self.layer(spec, tokens, squared, tp)

    def head(self, spec: ModelSpec, tokens: float, tp: int, *, backward: bool = False) -> float:
        flops = 2 * tokens * spec.head_elements / self._flops
        return max(flops, spec.head_elements * spec.bytes_per_element / self._read) / tp * (2 if backward else 1)

    @property
    def decodes_whole(self) -> bool:
        return False

    def decode(self, spec: ModelSpec, samples: float, cached: float, tp: int) -> tuple[float, float]:
        pairs = 4 * spec.heads * spec.head_dim * samples * cached
        compute = max((2 * samples * spec.layer_elements + pairs) / self._flops / tp, self.device.decode_launch)
        cache = samples * cached * spec.kv_bytes_per_token / max(spec.layers, 1) / min(tp, max(spec.kv_heads, 1))
        return compute, (spec.layer_elements * spec.bytes_per_element / tp + cache) / self._read

    def decode_head(self, spec: ModelSpec, samples: float, tp: int) -> float:
        return self.head(spec, samples, tp)

    def optimizer(self, elements: float, element_bytes: int) -> float:
        # gradient read, float32 weight and two moments read and written, the weight written once more
        return elements * (2 * element_bytes + 24) / self._read

    @property
    def _flops(self) -> float:
        return self.device.flops * self.device.efficiency

    @property
    def _read(self) -> float:
        return self.device.memory_bandwidth * self.device.memory_efficiency

    def kept(self, spec: ModelSpec, tokens: float, squared: float) -> float | None:
        return None

    def changed(self, **values: float) -> AnalyticRates:
        """The same with other numbers of the device."""
        return AnalyticRates(replace(self.device, **values), self.sharing)  # type: ignore[arg-type]
