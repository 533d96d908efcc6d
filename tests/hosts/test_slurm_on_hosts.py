"""Jobs under Slurm itself, its own `srun` and `sbatch`, on two hosts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ROOT
from namespaces import Hosts
from slurm_cluster import Slurm, missing


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]
SCRIPT = ROOT / "tests" / "multiprocess" / "cluster_rank.py"


@pytest.fixture(scope="module")
def slurm(can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    own = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with Hosts(tmp_path_factory.mktemp("slurm") / "hosts", rate=None) as hosts:
        try:
            cluster = Slurm(hosts, own)
            tried = cluster.run(["srun", "--nodes=2", "--ntasks-per-node=1", "true"], 60)
        except RuntimeError as error:
            pytest.skip(f"Slurm's daemons do not work on this system: {error}")
        if tried.returncode:
            pytest.skip(f"Slurm starts no process on this system: {tried.stdout[-1000:]}")
        yield cluster


def check(slurm: Slurm, name: str, per_host: int, log: str) -> None:
    """Two hosts of so many processes, numbered host by host, as every rank sees them."""
    size, local = 2 * per_host, list(range(per_host))
    for rank in range(size):
        found = slurm.hosts[rank // per_host].out / name / f"{rank}.json"
        assert found.exists(), log[-4000:]
        ranks = [rank, rank, rank % per_host]
        expected = {"cluster": [2, per_host], "local_ranks": local * 2, "rank": ranks, "size": [size, size]}
        assert json.loads(found.read_text()) == expected


def folder(slurm: Slurm, name: str) -> Path:
    """A folder that each host has for itself."""
    for host in slurm.hosts:
        (host.out / name).mkdir()
    return slurm.hosts.folder / "out" / name


def test_srun_alone_gives_the_cluster(slurm: Slurm) -> None:
    out = folder(slurm, "srun")
    options = ["--nodes=2", "--ntasks-per-node=2", "--distribution=block", "--kill-on-bad-exit=1"]
    ran = slurm.run(["srun", *options, sys.executable, str(SCRIPT), str(out)], 120)
    assert ran.returncode == 0, ran.stdout[-4000:]
    check(slurm, "srun", 2, ran.stdout)


def of_the_docs() -> str:
    text = (ROOT / "docs" / "several_machines.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", text, re.S)
    return str(script)


@pytest.mark.parametrize("name", ["recipe", "docs"])
def test_the_batch_scripts_that_are_given_start_a_launcher_on_each_host(slurm: Slurm, name: str) -> None:
    """As they are but for the script that they start, with one process on each of two hosts."""
    recipe = ROOT / "recipes" / "llama-70b" / "launch.slurm"
    text = of_the_docs() if name == "docs" else recipe.read_text()
    trained = "train.py" if name == "docs" else "-m trl_realloc.cli.train ppo --config recipes/llama-70b/ppo.yaml"
    out = folder(slurm, name)
    for given, here in (("$((8 *", "$((1 *"), (trained, f"{SCRIPT} {out}")):
        assert text.count(given) == 1
        text = text.replace(given, here)
    state, written = slurm.batch(text, slurm.hosts.folder / f"{name}.log", 180)
    assert state == "COMPLETED", (state, written[-4000:])
    check(slurm, name, 1, written)
