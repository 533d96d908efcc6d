"""`MeasuredRates`: unit costs of a measured machine, fitted to its profile.

Each kind of work is a sum of non-negative unit costs times counts (tokens, squared lengths, steps, bytes), fitted by
least squares of the relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...common.errors import PlanError
from ...plan.model_spec import ModelSpec
from .hardware import Link
from .profile import Observation, Profile, model_key
from .zero_costs import DataParallelGroup


CPU_ERROR = 0.08  # measured by benchmarks/planner.py
LAYOUT_ERROR = 0.12  # error of a call in a layout that was not measured: all presets but `flatten` in that benchmark
MIN_ZERO = 0.1  # smallest factor of ZeRO's formula; a smaller measurement is taken for noise
ACCELERATOR_ERROR = 0.1  # assumed: no estimate from measured rates has been compared with an accelerator
FEWEST = 2  # smallest number of observations of a kind of work to which unit costs are fitted


@dataclass(frozen=True)
class _Passes:
    """Unit costs of the measured model's forwards and training.

    Args:
        layers: number of layers of the measured model.
        forward, train: seconds of a token, and of a unit of squared length.
        step: seconds of an optimizer step.
        answered: share of the tokens that are response tokens.
    """

    layers: int
    forward: tuple[float, float]
    train: tuple[float, float]
    step: float
    answered: float


class MeasuredRates:
    """`Rates` fitted to a profile.

    Where devices share processors, measured seconds are divided by the measured slowdown: all rates are those of one
    device working alone.
    """

    # Replicas reduce their gradients after the backward. Overlap under ZeRO is part of the measured factors.
    overlap = 0.0
    decodes_whole = True
    sample = 0.0  # the cost of a sample is in `decode` and `decode_head`

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.sharing = profile.sharing

    @property
    def name(self) -> str:
        return self.profile.hardware

    @property
    def error(self) -> float:
        return ACCELERATOR_ERROR if self.profile.is_accelerator else CPU_ERROR

    @property
    def layout_error(self) -> float:
        return 0.0 if self.profile.is_accelerator else LAYOUT_ERROR  # on accelerators no estimate has been compared

    @cached_property
    def inside(self) -> Link:
        return self._link(False, self._links) or Link(1e9, 50e-6, 100e-6, 1.0)  # a job of one device sends nothing

    @cached_property
    def between(self) -> Link:
        return self._link(True, self._links) or self.inside  # a job of one node

    def across(self, members: int) -> Link:
        return self.between  # fitted to all-reduces over all devices, which use all adapters of the nodes

    @property
    def _links(self) -> tuple[Observation, ...]:
        return self.profile.links or self.profile.observations

    def _link_then(self, devices: int) -> Link:
        """The link between `devices` devices on the network of the observations, which may not be the planned one."""
        rows = self.profile.observations
        far = self._link(True, rows) if devices > self._per_node else None
        return far or self._link(False, rows) or self.inside

    @property
    def _per_node(self) -> int:
        return max(1, self.profile.devices // self.profile.nodes)

    def _link(self, far: bool, among: Sequence[Observation]) -> Link | None:
        measured = (self._alone(work, among=among) for work in ("all_reduce", "send"))
        rings, sends = ([row for row in rows if row[0].far == far] for rows in measured)
        if not rings or not sends:
            return None
        latency, byte_seconds = line_through([(o.bytes, seconds) for o, seconds in sends])
        bandwidth = 1 / byte_seconds
        parts = [(2 * (o.devices - 1) / o.devices * o.bytes / bandwidth, seconds) for o, seconds in rings]
        collective, slower = line_through(parts)
        return Link(bandwidth, latency, collective, 1 / slower)

    @cached_property
    def host_bandwidth(self) -> float:
        """Bytes/s of copies to the device."""
        rows = self._alone("copy")
        if not rows:
            return 5e9
        _, byte_seconds = fit_unit_costs([(1.0, o.bytes) for o, _ in rows], [seconds for _, seconds in rows])
        return 1 / byte_seconds if byte_seconds else 5e9

    @cached_property
    def call(self) -> float:
        rows = [seconds for _, seconds in self._alone("iteration")]
        return float(np.median(rows)) / 6 if rows else 0.0

    def measured(self, spec: ModelSpec, tp: int, pp: int, generates: bool) -> bool:
        """True if the profile has observations with this tensor-parallel degree and, for a pipeline, of a forward with
        tp 1 and pp 2."""
        work = "generate" if generates else "forward"
        deep = pp == 1 or bool(self._of(spec, "forward", 1, 2))
        forwards = bool(self._of(spec, "forward", tp))  # a prefill is estimated from them
        return deep and forwards and len(self._of(spec, work, tp)) >= FEWEST

    @cached_property
    def hop(self) -> float:
        """Seconds per micro-batch and stage beyond the arithmetic: the median over the measured pipelines. The
        arithmetic is expected to take (micro + pp - 1) / micro times one stage's share."""
        overheads = []
        for row in self.profile.observations:
            if row.pp > 1 and row.work == "forward":
                passes = self._passes_of(row.model, row.layers, row.tp)
                whole = dot(passes.forward, (row.tokens, row.squared))
                steps = row.micro + row.pp - 1
                expected = whole / row.pp * steps / row.micro
                overheads.append(max(0.0, row.seconds / self._slowdown(row) - expected) / steps)
        return float(np.median(overheads)) if overheads else 0.0

    def reallocation(self, size: float) -> float:
        return self._agreement + 2 * size / self._packing

    @cached_property
    def _packing(self) -> float:
        """Bytes/s of copying parts into a message and out of it: the bandwidth of host memory on CPU ranks (devices
        that share processors). On other devices the copies overlap with the messages."""
        return self.host_bandwidth if self.sharing else np.inf

    @cached_property
    def _agreement(self) -> float:
        """Seconds of a reallocation that do not depend on its size: the median over the measurements."""
        per_byte = 1 / self._link_then(self._per_node).bandwidth + 2 / self._packing
        rows = [row for row in self.profile.observations if row.work == "move"]
        return float(np.median([max(0.0, row.seconds - row.bytes * per_byte) for row in rows])) if rows else 0.0

    def layer(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        return self._of_layer(spec, tp, tokens, squared, backward=False)

    def layer_backward(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        return self._of_layer(spec, tp, tokens, squared, backward=True)

    def head(self, spec: ModelSpec, tokens: float, tp: int, *, backward: bool = False) -> float:
        passes = self._passes(spec, tp)
        sample_tokens = tokens / passes.answered
        forward = passes.forward[0] * sample_tokens
        again = 1 + self.profile.recompute
        whole = max(passes.train[0] * sample_tokens - again * forward, 0.0) if backward else forward
        return whole * _head_share(spec, passes.layers)

    def decode(self, spec: ModelSpec, samples: float, cached: float, tp: int) -> tuple[float, float]:
        layers, (_, step, sample, cached_token) = self._fitted_decoding(model_key(spec), spec.layers, tp)
        in_layers = sample * (1 - _head_share(spec, layers)) + cached_token * cached
        collectives = max(0.0, step - self.step) if tp > 1 else 0.0  # beyond a step of one device
        return (in_layers * samples + collectives) / layers, 0.0

    def decode_head(self, spec: ModelSpec, samples: float, tp: int) -> float:
        layers, (_, _, sample, _) = self._fitted_decoding(model_key(spec), spec.layers, tp)
        return sample * _head_share(spec, layers) * samples

    @property
    def step(self) -> float:
        """Seconds of a decode step of the generating model, without the cost of its samples."""
        keys = {(o.model, o.layers) for o in self.profile.observations if o.work == "generate" and o.tp == 1}
        return max((self._fitted_decoding(key, layers, 1)[1][1] for key, layers in keys), default=0.0)

    def kept(self, spec: ModelSpec, tokens: float, squared: float) -> float | None:
        rows = [row for row, _ in self._of(spec, "activations")]
        if len(rows) < FEWEST:
            return None
        key = ("activations", model_key(spec), spec.layers)
        if key not in self._fits:
            self._fits[key] = fit_unit_costs([(o.tokens, o.squared) for o in rows], [o.bytes for o in rows])
        return dot(self._fits[key], (tokens, squared)) / max(rows[0].layers, 1)

    def optimizer(self, elements: float, element_bytes: int) -> float:
        sizes = {(o.model, o.layers): o.elements for o in self.profile.observations if o.work == "train" and o.tp == 1}
        per_element = [self._passes_of(*key, 1).step / size for key, size in sizes.items() if size]
        return elements * float(np.median(per_element)) if per_element else 0.0

    def zero(self, stage: int, *, trains: bool) -> float:
        """The median over the measured models of (seconds that the ZeRO stage adds) / (seconds by the formula)."""
        key = ("zero", stage, trains)
        if key not in self._fits:
            work = "train" if trains else "forward"
            rows = [row for row in self.profile.observations if row.work == work and row.zero_stage == stage]
            factors = [self._zero_factor(row) for row in rows]
            self._fits[key] = max(MIN_ZERO, float(np.median(factors))) if factors else 1.0
        factor: float = self._fits[key]
        return factor

    def _zero_factor(self, row: Observation) -> float:
        passes, micro = self._passes_of(row.model, row.layers, 1), int(row.micro)
        unit_costs = passes.train if row.work == "train" else passes.forward
        compute = dot(unit_costs, (row.tokens, row.squared))
        group = DataParallelGroup(self._link_then(row.devices), row.devices, self.overlap, max(row.layers, 1))
        if row.work == "train":
            formula = group.optimizer_step(row.zero_stage, row.bytes, row.bytes, row.bytes, micro, compute / micro)
            compute += passes.step / row.devices
        else:
            formula = micro * group.gather_parameters(row.bytes, compute / micro)
        return (row.seconds / self._slowdown(row) - compute) / formula

    # --- fits --------------------------------------------------------------------------------------------------------

    @cached_property
    def _fits(self) -> dict[Any, Any]:
        return {}

    def _of(self, spec: ModelSpec, work: str, tp: int = 1, pp: int = 1) -> list[tuple[Observation, float]]:
        return self._alone(work, model_key(spec), tp, pp, spec.layers)

    def _alone(
        self,
        work: str,
        model: str = "",
        tp: int = 1,
        pp: int = 1,
        layers: int = 0,
        among: Sequence[Observation] | None = None,
    ) -> list[tuple[Observation, float]]:
        """Observations of one kind of work, each with the seconds that a device working alone would have taken.

        Repeated observations count once, with the shortest time. Of models that differ in depth alone, the one whose
        depth is nearest to `layers` is used. `among` replaces the profile's observations.
        """
        kind = (work, model, tp, pp, 0)
        observations = self.profile.observations if among is None else among
        rows = [o for o in observations if (o.work, o.model, o.tp, o.pp, o.zero_stage) == kind]
        depth = min((o.layers for o in rows), key=lambda count: abs(count - layers), default=0)
        fastest: dict[Observation, Observation] = {}
        for row in sorted((o for o in rows if o.layers == depth), key=lambda row: -row.seconds):
            fastest[replace(row, seconds=0.0)] = row
        return [(row, row.seconds / self._slowdown(row)) for row in fastest.values()]

    def _slowdown(self, row: Observation) -> float:
        """Factor by which an observation took longer because other devices of the node worked at the same time."""
        return self.sharing.slowdown(min(row.devices, self._per_node)) if self.sharing else 1.0

    def _passes(self, spec: ModelSpec, tp: int) -> _Passes:
        return self._passes_of(model_key(spec), spec.layers, tp)

    def _passes_of(self, key: str, layers: int, tp: int) -> _Passes:
        cache_key = (key, layers, tp)
        if cache_key not in self._fits:
            self._fits[cache_key] = self._fit_passes(*cache_key)
        passes: _Passes = self._fits[cache_key]
        return passes

    def _fit_passes(self, key: str, layers: int, tp: int) -> _Passes:
        scoring, training = (self._alone(work, key, tp, layers=layers) for work in ("forward", "train"))
        rows = scoring or training
        if not rows:
            raise PlanError(f"the profile has no model like {key} under tp {tp}; make one with trl-realloc profile.")
        forward = fit_unit_costs([(o.tokens, o.squared) for o, _ in rows], [seconds for _, seconds in rows])
        if not scoring:
            forward = tuple(cost / 3 for cost in forward)  # a backward takes twice a forward
        train: tuple[float, ...] = tuple(3 * cost for cost in forward)
        step = 0.0
        if training:
            counts = [(o.tokens, o.squared, o.steps) for o, _ in training]
            *train_costs, step = fit_unit_costs(counts, [seconds for _, seconds in training])
            train = tuple(train_costs)
            size = training[0][0].elements * 4 / tp
            shared = max(o.devices for o, _ in training) // tp
            step = max(0.0, step - self._link_then(shared * tp).all_reduce(size, shared))
        answered = sum(o.answered for o, _ in rows) / sum(o.tokens for o, _ in rows)
        depth = max(rows[0][0].layers, 1)
        return _Passes(depth, (forward[0], forward[1]), (train[0], train[1]), step, max(answered, 1e-6))

    def _of_layer(self, spec: ModelSpec, tp: int, tokens: float, squared: float, *, backward: bool) -> float:
        """One layer's share of a whole pass without the tensor-parallel collectives, which the measurement contains and
        the cost model adds separately.

        The result is at least the part's share of the whole layer's arithmetic. The difference can be smaller: where
        ranks share processors, one computes while another waits for a message.
        """
        layer, share = (self._layer_under(spec, degree, tokens, squared, backward=backward) for degree in (tp, 1))
        if tp == 1:
            return layer
        collectives = spec.sums * self._link_then(tp).all_reduce(tokens * spec.hidden * spec.activation_bytes, tp)
        return max(layer - collectives, share / tp)

    def _layer_under(self, spec: ModelSpec, tp: int, tokens: float, squared: float, *, backward: bool) -> float:
        passes = self._passes(spec, tp)
        whole = dot(passes.forward, (tokens, squared))
        if backward:
            whole = max(0.0, dot(passes.train, (tokens, squared)) - (1 + self.profile.recompute) * whole)
        return whole * (1 - _head_share(spec, passes.layers)) / passes.layers

    def _fitted_decoding(self, key: str, layers: int, tp: int) -> tuple[int, tuple[float, float, float, float]]:
        """The number of layers of the measured model, and its seconds per prompt token, per step, per sample of a step
        and per cached token of a step."""
        cache_key = ("decode", key, layers, tp)
        if cache_key not in self._fits:
            rows = self._alone("generate", key, tp, layers=layers)
            counts = [(o.tokens, o.steps, o.grown, o.cached) for o, _ in rows]
            depth = max([1, *(o.layers for o, _ in rows)])
            self._fits[cache_key] = depth, fit_unit_costs(counts, [seconds for _, seconds in rows])
        fitted: tuple[int, tuple[float, float, float, float]] = self._fits[cache_key]
        return fitted


def _head_share(spec: ModelSpec, layers: int) -> float:
    """The share of the arithmetic outside the layers in a pass through `layers` layers."""
    return spec.head_elements / (spec.head_elements + layers * spec.active_layer_elements)


def dot(rates: Sequence[float], counts: Sequence[float]) -> float:
    return sum(rate * count for rate, count in zip(rates, counts, strict=True))


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) in seconds of the line through the smallest and the largest of the points (units, seconds).

    The points between are not used: a network that allows bursts sends some hundred KB faster than its rate, and plans
    send large messages.
    """
    (few, short), (many, long) = min(points), max(points)
    slope = (long - short) / (many - few) if many > few and long > short else long / many
    return max(0.0, short - slope * few), slope


def fit_unit_costs(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative unit costs that explain the seconds, by least squares of the relative error.

    Args:
        counts: one row per observation with a count for each unit cost.
        seconds: seconds of each observation, above 0.
    """
    relative = np.asarray(counts, float) / np.asarray(seconds, float)[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0  # what was never counted costs nothing
    from scipy.optimize import nnls  # imported here: it takes half of the time of `trl-realloc --help`

    costs, _ = nnls(relative / scale, np.ones(len(seconds)))
    return tuple(float(cost) for cost in costs / scale)
