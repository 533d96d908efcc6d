"""Measured unit costs: what short runs took, as a table, and `Rates` fitted to it.

The table is a file that says on which machine, with which versions and models it was made. Each kind of work is a sum
of non-negative unit costs times counts (tokens, squared lengths, steps, bytes), fitted by least squares of the relative
error. Measures nothing itself; who fills the table is `profiling`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from pydantic import ConfigDict, PositiveInt

from ..common.errors import PlanError
from ..common.files import MOST_RECORD_BYTES, read_json_mapping
from ..common.schema import checked
from ..plan.cluster import MOST_DEVICES
from ..plan.model_spec import ModelSpec
from .hardware import Link, Sharing


# What a profile's file may hold.
_Count = Annotated[int, Ge(1), Le(MOST_DEVICES)]
_Amount = Annotated[float, Ge(0), Le(1e24)]
LEAST_SECONDS = 1e-12

FEWEST = 2  # observations of a kind of work, below which nothing is fitted


@dataclass(frozen=True)
class Observation:
    """One measured stretch of work.

    Args:
        work: `forward`, `train`, `generate`, `all_reduce`, `send`, `copy` (from host memory to the device), `iteration`
            (what an iteration of six calls took beside them), or `activations` (what a forward with gradients kept, in
            no time).
        model: whose, by `model_key`; empty for the links.
        seconds: it took, on the device that took longest.
        devices: that were at work at the same time.
        tp, pp: the split it ran under.
        tokens, squared: of one device's samples (of its replica), and the sum of their squared lengths. In generation
            `tokens` are those of the prompts.
        answered: of the tokens, those of responses.
        steps: decoded; or optimizer steps.
        grown: sum over decode steps of the samples under way.
        cached: sum over decode steps of all tokens in the caches.
        bytes: of a message, of a collective's tensor, or kept.
        micro: micro-batches that a pipeline was given.
        far: the message left its node.
        layers, elements: of the model, which may be shallower than the job's.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    work: str
    model: str
    seconds: Annotated[float, Ge(0), Le(1e9)]
    devices: _Count
    tp: _Count = 1
    pp: _Count = 1
    tokens: _Amount = 0.0
    squared: _Amount = 0.0
    answered: _Amount = 0.0
    steps: _Amount = 0.0
    grown: _Amount = 0.0
    cached: _Amount = 0.0
    bytes: _Amount = 0.0
    micro: _Amount = 0.0
    far: bool = False
    layers: Annotated[int, Ge(0), Le(100_000)] = 0
    elements: _Amount = 0.0


@dataclass(frozen=True)
class Profile:
    """A table of observations of one machine.

    Args:
        hardware: what a device is, in words; a profile is of use only where they agree.
        about: versions and settings it was made under.
        devices: of the job that made it.
        sharing: how devices slowed each other down, where several share processors.
        recompute: training computed its forwards again in its backwards.
        thorough: generation was measured under tensor degrees too.
        nodes: of the job that made it.
        links: messages and all-reduces on the network that is planned for; empty where that is the one on which the
            observations were made.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    hardware: str
    about: Mapping[str, str]
    devices: _Count
    sharing: Sharing | None
    recompute: bool
    observations: tuple[Observation, ...]
    thorough: bool = False
    nodes: _Count = 1
    links: tuple[Observation, ...] = ()

    def save(self, path: str | Path) -> None:
        """As JSON, a line for each observation; the file is whole or is not there, for other jobs may read it."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        head = {key: value for key, value in vars(self).items() if key not in ("observations", "links")}
        head["links"] = [asdict(each) for each in self.links]
        head["sharing"] = self.sharing and self.sharing.slower
        lines = ",\n".join(json.dumps(asdict(each)) for each in self.observations)
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            beside.write_text(f'{json.dumps(head)[:-1]},\n"observations": [\n{lines}\n]}}\n', encoding="utf-8")
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """The inverse of `save`. Raises `PlanError` where the file holds no profile."""
        try:
            saved = read_json_mapping(path, "the profile", MOST_RECORD_BYTES)
            slower = checked(_Slowdowns, saved.pop("sharing", None), str(path), key="sharing")
            profile: Profile = checked(Profile, {**saved, "sharing": {"slower": slower} if slower else None}, str(path))
            _check_observations(profile.observations, path)
            _check_observations(profile.links, path, "links")
        except PlanError as error:
            wrong = error.problems[0].removeprefix(f"{path}: ").removesuffix(".")
            raise PlanError(f"{path} is no profile ({wrong}); make one with trl-realloc profile.") from None
        return profile

    def check_hardware(self, hardware: str) -> None:
        """Raises:
        PlanError: it was made on other hardware than that.
        """
        if hardware != self.hardware:
            raise PlanError(
                f"the profile was made on {self.hardware!r}, but this job runs on {hardware!r}; make one here with "
                f"trl-realloc profile, or leave it out and it is made by itself."
            )


_Slowdowns = list[tuple[PositiveInt, Annotated[float, Ge(1), Le(1e6)]]] | None


def _check_observations(rows: Sequence[Observation], path: str | Path, name: str = "observations") -> None:
    """Raises `PlanError` for the first observation that nothing can be fitted to."""
    for at, row in enumerate(rows):
        kept = row.work == "activations"
        wrong = None
        if kept and not row.bytes:
            wrong = "bytes is 0, but it says what was kept"
        elif not kept and row.seconds < LEAST_SECONDS:
            wrong = f"seconds is {row.seconds:g}, but work takes some time"
        elif row.work in ("forward", "train", "activations") and not row.tokens:
            wrong = "tokens is 0, but it says how much work it was"
        elif row.pp > 1 and row.micro < 1:
            wrong = f"micro is {row.micro:g}, but a pipeline is given one micro-batch or more"
        elif row.devices % (row.tp * row.pp):
            wrong = f"devices is {row.devices}, which tp {row.tp} x pp {row.pp} does not divide"
        if wrong:
            raise PlanError(f"{path}: {name}[{at}].{wrong}.")


def model_key(spec: ModelSpec) -> str:
    """What a layer's costs depend on, in words: models of one width and different depth have one key."""
    if not spec.layers:
        return f"model of {spec.elements}"
    return f"{spec.family} of {spec.layer_elements:.0f} a layer, {spec.hidden} wide, {spec.head_elements} after them"


@dataclass(frozen=True)
class _Passes:
    """Seconds of a forward and of a training of the model that was measured, so many layers deep: by token and by
    squared length; and by optimizer step."""

    layers: int
    forward: tuple[float, float]
    train: tuple[float, float]
    step: float
    answered: float  # share of the tokens


class Measured:
    """`Rates` of a profile. What devices that share processors took at the same time is brought down to what one takes
    alone."""

    error = 0.08  # as benchmarks/planner.py found it
    overlap = 0.0  # gloo's collectives run when their tensors are whole
    decodes_whole = True

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.sharing = profile.sharing

    @property
    def name(self) -> str:
        return self.profile.hardware

    @cached_property
    def inside(self) -> Link:
        return self._link(False, self._links) or Link(1e9, 50e-6, 100e-6, 1.0)  # a job of one device sends nothing

    @cached_property
    def between(self) -> Link:
        return self._link(True, self._links) or self.inside  # a job of one node

    @property
    def _links(self) -> tuple[Observation, ...]:
        return self.profile.links or self.profile.observations

    def _link_then(self, devices: int) -> Link:
        """Of a group of the runs that were observed, on the network of that time."""
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
        latency, each = _line([(o.bytes, seconds) for o, seconds in sends])
        bandwidth = 1 / each
        parts = [(2 * (o.devices - 1) / o.devices * o.bytes / bandwidth, seconds) for o, seconds in rings]
        collective, slower = _line(parts)
        return Link(bandwidth, latency, collective, 1 / slower)

    @cached_property
    def host_bandwidth(self) -> float:
        """Of copies to the device; a vLLM engine's weights go through host memory too."""
        rows = self._alone("copy")
        _, each = _fit([(1.0, o.bytes) for o, _ in rows], [seconds for _, seconds in rows]) if rows else (0.0, 0.0)
        return 1 / each if each else 5e9

    @cached_property
    def call(self) -> float:
        rows = [seconds for _, seconds in self._alone("iteration")]
        return float(np.median(rows)) / 6 if rows else 0.0

    def measured(self, spec: ModelSpec, tp: int, pp: int, generates: bool) -> bool:
        """Whether there is anything to say about the model under those degrees: of a tensor degree it has to have been
        measured itself, of pipelines any."""
        work = "generate" if generates else "forward"
        deep = pp == 1 or bool(self._of(spec, "forward", 1, 2))
        reads = bool(self._of(spec, "forward", tp))  # a generation reads its prompts in a forward
        return deep and reads and len(self._of(spec, work, tp)) >= FEWEST

    @cached_property
    def hop(self) -> float:
        """What measured pipelines took beyond (micro + pp - 1) / micro of their share of the arithmetic."""
        found = []
        for each in self.profile.observations:
            if each.pp > 1 and each.work == "forward":
                passes = self._passes_of(each.model, each.layers, each.tp)
                whole = _dot(passes.forward, (each.tokens, each.squared))
                deep = each.micro + each.pp - 1
                expected = whole / each.pp * deep / each.micro
                found.append(max(0.0, each.seconds / self._crowd(each) - expected) / deep)
        return float(np.median(found)) if found else 0.0

    def layer(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        passes = self._passes(spec, tp)
        return self._of_layer(spec, passes, tp, tokens, _dot(passes.forward, (tokens, squared)))

    def layer_backward(self, spec: ModelSpec, tokens: float, squared: float, tp: int) -> float:
        passes = self._passes(spec, tp)
        again = 1 + self.profile.recompute
        whole = _dot(passes.train, (tokens, squared)) - again * _dot(passes.forward, (tokens, squared))
        return self._of_layer(spec, passes, tp, tokens, max(whole, 0.0))

    def head(self, spec: ModelSpec, tokens: float, tp: int, *, backward: bool = False) -> float:
        passes = self._passes(spec, tp)
        everywhere = tokens / passes.answered
        forward = passes.forward[0] * everywhere
        again = 1 + self.profile.recompute
        whole = max(passes.train[0] * everywhere - again * forward, 0.0) if backward else forward
        return whole * _head_share(spec, passes.layers)

    def decode(self, spec: ModelSpec, samples: float, cached: float, tp: int) -> tuple[float, float]:
        layers, (_, step, each, kept) = self._fitted_decoding(model_key(spec), spec.layers, tp)
        own = each * (1 - _head_share(spec, layers)) + kept * cached
        more = max(0.0, step - self.step) if tp > 1 else 0.0  # what a step of several devices takes beyond one's
        return (own * samples + more) / layers, 0.0

    def decode_head(self, spec: ModelSpec, samples: float, tp: int) -> float:
        layers, (_, _, each, _) = self._fitted_decoding(model_key(spec), spec.layers, tp)
        return each * _head_share(spec, layers) * samples

    @property
    def step(self) -> float:
        """Of the only model that generates."""
        keys = {(o.model, o.layers) for o in self.profile.observations if o.work == "generate" and o.tp == 1}
        return max((self._fitted_decoding(key, layers, 1)[1][1] for key, layers in keys), default=0.0)

    def kept(self, spec: ModelSpec, tokens: float, squared: float) -> float | None:
        rows = [row for row, _ in self._of(spec, "activations")]
        if len(rows) < FEWEST:
            return None
        at = ("activations", model_key(spec), spec.layers)
        if at not in self._fits:
            self._fits[at] = _fit([(o.tokens, o.squared) for o in rows], [o.bytes for o in rows])
        return _dot(self._fits[at], (tokens, squared)) / max(rows[0].layers, 1)

    def optimizer(self, elements: float, element_bytes: int) -> float:
        sizes = {(o.model, o.layers): o.elements for o in self.profile.observations if o.work == "train" and o.tp == 1}
        known = [self._passes_of(*key, 1).step / size for key, size in sizes.items() if size]
        return elements * float(np.median(known)) if known else 0.0

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
        """Observations with the seconds that each would have taken had no other device wanted its processor; of equal
        ones the fastest, for what disturbs a run only makes it longer. Of the depth next to `layers`."""
        wanted = (work, model, tp, pp)
        every = self.profile.observations if among is None else among
        rows = [o for o in every if (o.work, o.model, o.tp, o.pp) == wanted]
        depth = min((o.layers for o in rows), key=lambda each: abs(each - layers), default=0)
        rows = [o for o in rows if o.layers == depth]
        fastest: dict[Observation, Observation] = {}
        for each in rows:
            equal = replace(each, seconds=0.0)
            if equal not in fastest or each.seconds < fastest[equal].seconds:
                fastest[equal] = each
        return [(each, each.seconds / self._crowd(each)) for each in fastest.values()]

    def _crowd(self, each: Observation) -> float:
        return self.sharing.slowdown(min(each.devices, self._per_node)) if self.sharing else 1.0

    def _passes(self, spec: ModelSpec, tp: int) -> _Passes:
        return self._passes_of(model_key(spec), spec.layers, tp)

    def _passes_of(self, key: str, layers: int, tp: int) -> _Passes:
        at = (key, layers, tp)
        if at not in self._fits:
            self._fits[at] = self._fit_passes(*at)
        passes: _Passes = self._fits[at]
        return passes

    def _fit_passes(self, key: str, layers: int, tp: int) -> _Passes:
        scoring, training = (self._alone(work, key, tp, layers=layers) for work in ("forward", "train"))
        rows = scoring or training
        if not rows:
            raise PlanError(f"the profile has no model like {key} under tp {tp}; make one with trl-realloc profile.")
        forward = _fit([(o.tokens, o.squared) for o, _ in rows], [seconds for _, seconds in rows])
        if not scoring:
            forward = tuple(each / 3 for each in forward)
        train: tuple[float, ...] = tuple(3 * each for each in forward)
        step = 0.0
        if training:
            counts = [(o.tokens, o.squared, o.steps) for o, _ in training]
            *train_, step = _fit(counts, [seconds for _, seconds in training])
            train = tuple(train_)
            size = training[0][0].elements * 4 / tp
            shared = max(o.devices for o, _ in training) // tp
            step = max(0.0, step - self._link_then(shared * tp).all_reduce(size, shared))
        answered = sum(o.answered for o, _ in rows) / sum(o.tokens for o, _ in rows)
        depth = max(rows[0][0].layers, 1)
        return _Passes(depth, (forward[0], forward[1]), (train[0], train[1]), step, max(answered, 1e-6))

    def _of_layer(self, spec: ModelSpec, passes: _Passes, tp: int, tokens: float, whole: float) -> float:
        """A layer's share of a whole pass; the collectives of tensor parallelism are in it, and are priced apart."""
        each = whole * (1 - _head_share(spec, passes.layers)) / passes.layers
        if tp == 1:
            return each
        collectives = 2 * self._link_then(tp).all_reduce(tokens * spec.hidden * spec.activation_bytes, tp)
        return max(each - collectives, 0.2 * each)

    def _fitted_decoding(self, key: str, layers: int, tp: int) -> tuple[int, tuple[float, float, float, float]]:
        """Layers of the model that was measured; its seconds by prompt token, step, sample and step, cached token and
        step."""
        at = ("decode", key, layers, tp)
        if at not in self._fits:
            rows = self._alone("generate", key, tp, layers=layers)
            counts = [(o.tokens, o.steps, o.grown, o.cached) for o, _ in rows]
            depth = max([1, *(o.layers for o, _ in rows)])
            self._fits[at] = depth, _fit(counts, [seconds for _, seconds in rows])
        fitted: tuple[int, tuple[float, float, float, float]] = self._fits[at]
        return fitted


def _head_share(spec: ModelSpec, layers: int) -> float:
    """Of a pass through so many of its layers."""
    return spec.head_elements / (spec.head_elements + layers * spec.layer_elements)


def _dot(rates: Sequence[float], counts: Sequence[float]) -> float:
    return sum(rate * count for rate, count in zip(rates, counts, strict=True))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of nothing, and of each unit, by the smallest and the largest of (units, seconds). Not by those between:
    a network that lets bursts pass takes some hundred KB faster than its rate, and what is planned for is large."""
    (few, short), (many, long) = min(points), max(points)
    each = (long - short) / (many - few) if many > few and long > short else long / many
    return max(0.0, short - each * few), each


def _fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative unit costs that explain the seconds, by least squares of the relative error: what comes out negative
    is noise, and left out."""
    target = np.asarray(seconds, float)
    table = np.asarray(counts, float) / target[:, None]
    scale = np.abs(table).max(axis=0)
    used = [at for at in range(table.shape[1]) if scale[at] > 0]
    found = np.zeros(table.shape[1])
    while used:
        part, *_ = np.linalg.lstsq(table[:, used] / scale[used], np.ones(len(target)), rcond=1e-6)
        if (part >= 0).all():
            found[used] = part / scale[used]
            break
        used.pop(int(np.argmin(part)))
    return tuple(float(each) for each in found)
