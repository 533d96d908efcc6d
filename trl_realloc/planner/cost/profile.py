"""Measurements of one machine as a table of observations, with its file format.

The file says on which machine and with which versions and models the table was made. `profiling` makes the
observations; `measured_rates` fits unit costs to them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import AliasChoices, ConfigDict, Field, PositiveInt

from ...common.errors import PlanError
from ...common.files import MAX_RECORD_BYTES, read_json_mapping
from ...common.schema import checked
from ...plan.cluster import MAX_DEVICES
from ...plan.model_spec import ModelSpec
from .estimate_factors import CalibrationFactors
from .hardware import Sharing


# Limits of the numbers in a profile's file.
_Count = Annotated[int, Ge(1), Le(MAX_DEVICES)]
_Amount = Annotated[float, Ge(0), Le(1e24)]
# version 0.2 wrote `corrections`
_Calibration = Annotated[CalibrationFactors, Field(validation_alias=AliasChoices("calibration", "corrections"))]
MIN_SECONDS = 1e-12


@dataclass(frozen=True)
class Observation:
    """One measured piece of work.

    Args:
        work: `forward`, `train`, `generate`, `all_reduce`, `send`, `copy` (from host memory to the device), `iteration`
            (an iteration of six calls without the calls' own seconds), `move` (a reallocation), or `activations` (bytes
            that a forward saves for its backward; no seconds).
        model: the model's `model_key`; empty for links.
        seconds: seconds of the slowest device.
        devices: number of devices that worked at the same time.
        tp, pp: tensor-parallel and pipeline-parallel degrees.
        tokens, squared: tokens of one replica's samples, and the sum of their squared lengths. For `generate` the
            tokens of the prompts.
        answered: number of response tokens.
        steps: decode steps, or optimizer steps.
        grown: sum over decode steps of the samples that are decoded.
        cached: sum over decode steps of all tokens in the caches.
        bytes: size of the message, of a collective's tensor, of saved activations, of the data that a device receives
            in a move, or of the parameters under a ZeRO stage.
        micro: number of micro-batches in a pipeline or under a ZeRO stage.
        zero_stage: ZeRO stage of the model; 0 for replicas.
        far: whether the message went to another node.
        layers, elements: size of the model, which may have fewer layers than the job's.
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
    zero_stage: Annotated[int, Ge(0), Le(3)] = 0


@dataclass(frozen=True)
class DecodeHost:
    """Host time of an engine's decode steps, in addition to device time: scheduling, launching, sampling and Python.

    Args:
        step: seconds per step.
        sample: seconds per sample of a step.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Annotated[float, Ge(0), Le(1e9)]
    sample: Annotated[float, Ge(0), Le(1e9)]


@dataclass(frozen=True)
class Profile:
    """A table of observations of one machine. Without observations the machine is known by its specification alone.

    Args:
        hardware: name of the devices; a profile is used only on devices of this name.
        about: versions and settings of the measurement.
        devices: number of devices of the job that measured it.
        sharing: measured slowdown of devices that share processors; `None` if they share none.
        recompute: whether training used activation checkpointing.
        thorough: whether generation was measured under several tensor-parallel degrees.
        nodes: number of nodes of the job that measured it.
        links: messages and all-reduces on the planned network; empty if the observations were made on this network.
        calibration: calibration factors of estimates from these observations, learned from later runs.
        is_accelerator: whether the devices are accelerators such as GPUs, not CPU ranks.
        memory: bytes of a device; `None` if unknown.
        complete: whether all short runs have been done. Measuring between two updates may end before.
        decode_host: host time of decode steps in a run; `None` if not measured. Not used with observations, which
            contain it.
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
    calibration: _Calibration = field(default_factory=CalibrationFactors)
    is_accelerator: bool = False
    memory: Annotated[float, Gt(0), Le(1e15)] | None = None
    complete: bool = True
    decode_host: DecodeHost | None = None

    def save(self, path: str | Path) -> None:
        """Writes JSON with a line for each observation. The file is replaced atomically: other jobs may read it."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        head = {key: value for key, value in vars(self).items() if key not in ("observations", "links")}
        head["links"] = [asdict(row) for row in self.links]
        head["calibration"] = asdict(self.calibration)
        head["decode_host"] = self.decode_host and asdict(self.decode_host)
        head["sharing"] = self.sharing and self.sharing.slower
        lines = ",\n".join(json.dumps(asdict(row)) for row in self.observations)
        # containers on several hosts that share a home may have the same process number
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        temporary = Path(name)
        try:
            with open(handle, "w", encoding="utf-8") as writer:
                writer.write(f'{json.dumps(head)[:-1]},\n"observations": [\n{lines}\n]}}\n')
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """The inverse of `save`. Raises `PlanError` if the file is no profile."""
        try:
            saved = read_json_mapping(path, "the profile", MAX_RECORD_BYTES)
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
        PlanError: the profile was made on other hardware.
        """
        if hardware != self.hardware:
            raise PlanError(
                f"the profile was made on {self.hardware!r}, but this job runs on {hardware!r}; make one here with "
                f"trl-realloc profile, or leave it out and one is made automatically."
            )


_Slowdowns = list[tuple[PositiveInt, Annotated[float, Ge(1), Le(1e6)]]] | None


def _check_observations(rows: Sequence[Observation], path: str | Path, name: str = "observations") -> None:
    """Raises `PlanError` for the first observation to which no unit costs can be fitted."""
    for index, row in enumerate(rows):
        is_size = row.work == "activations"
        wrong = None
        if is_size and not row.bytes:
            wrong = "bytes is 0, but activations need the saved bytes"
        elif not is_size and row.seconds < MIN_SECONDS:
            wrong = f"seconds is {row.seconds:g}, below the minimum of {MIN_SECONDS:g}"
        elif row.work in ("forward", "train", "activations") and not row.tokens:
            wrong = f"tokens is 0, but {row.work} needs the number of tokens"
        elif row.work in ("send", "all_reduce") and not row.bytes:
            wrong = f"bytes is 0, but {row.work} needs the sent bytes"
        elif row.work == "all_reduce" and row.devices == 1:
            wrong = "devices is 1, but an all-reduce needs 2 or more"
        elif row.pp > 1 and row.micro < 1:
            wrong = f"micro is {row.micro:g}, but a pipeline needs 1 or more"
        elif row.zero_stage and (row.micro < 1 or not row.bytes):
            wrong = f"micro is {row.micro:g} and bytes {row.bytes:g}, but ZeRO moves parameters for each micro-batch"
        elif row.devices % (row.tp * row.pp):
            wrong = f"devices is {row.devices}, which tp {row.tp} x pp {row.pp} does not divide"
        if wrong:
            raise PlanError(f"{path}: {name}[{index}].{wrong}.")


def model_key(spec: ModelSpec) -> str:
    """Text of the properties on which a layer's costs depend. Models that differ in depth alone have the same key."""
    if not spec.layers:
        return f"model of {spec.elements}"
    experts = f", {spec.experts_per_token} of {spec.experts} experts" if spec.experts else ""
    layer = f"{spec.family} of {spec.layer_elements:.0f} a layer{experts}"
    return f"{layer}, {spec.hidden} wide, {spec.head_elements} after them"
