"""`trl-realloc plan --clusters`: the answer to which devices to rent."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_realloc.cli.main import main
from trl_realloc.cli.recipe_planning import IterationSize, cluster_space
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.planner.cost.hardware import DEVICES, parse_cluster
from trl_realloc.planner.recipe.recipe import read_recipe
from trl_realloc.planner.search import fastest
from trl_realloc.planner.search.clusters import colocated


RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = RECIPES / "llama-8b" / "ppo.yaml"
GPU = """
name: my-gpu
flops: 362e12
memory: 48e9
memory_bandwidth: 864e9
inside: {bandwidth: 32e9}
between: {bandwidth: 25e9}
host_bandwidth: 32e9
"""


def answer(capsys: pytest.CaptureFixture[str], picture: Path, *arguments: str) -> str:
    code = main(["plan", str(RECIPE), "-o", str(picture), "--time-limit", "0.5", *arguments])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def test_clusters_are_compared_by_equal_work_and_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture, own = tmp_path / "clusters.png", RECIPES / "llama-8b" / "plan.yaml"
    size = ExecutionPlan.load(own).cluster.size
    clusters = f"h100:{size},h100:2x{size},l40s:1"
    arguments = ["--clusters", clusters, "--episodes", "256", "--response-tokens", "200/512", "--plan", str(own)]
    found = json.loads(answer(capsys, picture, *arguments, "--price", "h100=2.5", "--json"))
    small, large, none = found["clusters"]
    assert set(small["plans"]) == {"best", "colocated", "own"}
    assert set(large["plans"]) == {"best", "colocated"}, "the user's plan is for another number of devices"
    assert "fit" in none["refusal"] and not none["plans"]
    assert large["plans"]["best"]["seconds"] < small["plans"]["best"]["seconds"]
    assert sum(row["knee"] for row in (small, large)) == 1
    for row, devices in ((small, size), (large, 2 * size)):
        for plan in row["plans"].values():
            hours = 1000 * plan["seconds"] * devices / 3600
            assert plan["device_hours_per_1000"] == pytest.approx(hours)
            assert plan["cost_per_1000"] == pytest.approx(2.5 * hours)
            ExecutionPlan.from_dict(plan["plan"])
    best, colocated = small["plans"]["best"], small["plans"]["colocated"]
    assert best["saves_over_colocated"] == pytest.approx(1 - best["seconds"] / colocated["seconds"])
    meshes = {assignment.mesh for assignment in ExecutionPlan.from_dict(colocated["plan"]).assignments.values()}
    assert meshes == {DeviceMesh(0, size)}, "every call on all devices"
    assert picture.stat().st_size > 5000


def test_the_table_says_what_fits_and_saves_and_the_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    said = answer(capsys, tmp_path / "c.png", "--clusters", "h100:8,h200:8,rtx4090:1", "--episodes", "256")
    words = " ".join(said.split())
    assert "256 episodes an iteration" in words
    assert "rtx4090:1: " in words and "does not fit" in words
    assert "colocated" in words and ("over colocated" in words or "as fast as the planned" in words)
    assert "The knee is h" in words and "--price" in words
    assert "waits of an iteration" not in words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clusters", "h100:8,h10:8"], "no specification of 'h10'; did you mean 'h100'"),
        (["--clusters", ","], "names clusters to compare"),
        (["--clusters", "h100:8", "--cluster", "h100:8"], "--cluster is for one cluster"),
        (["--clusters", "h100:8", "--price", "h100"], "--price is written as h100=2.5"),
        (["--clusters", "h100:8", "--price", "h200=2"], "no cluster has 'h200'; did you mean 'h100'"),
        (["--clusters", "h100:8", "--episodes", "0"], "--episodes is a number from 1"),
        (["--clusters", "h100:8", "--response-tokens", "many"], "a mean like 400"),
        (["--clusters", "h100:8", "--response-tokens", "400/100000"], "that a response may have"),
        (["--clusters", "h100:8", "--episodes", "3"], "num_mini_batches"),
        (["--cluster", "h100:8", "--price", "h100=2"], "--price is for --clusters"),
        (["--clusters", "absent.yaml:8"], "absent.yaml"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_before_the_first_search(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(RECIPE), "-o", str(tmp_path / "c.png"), *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_device_of_ones_own_is_described_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(GPU)
    cluster, device = parse_cluster(f"{file}:4x8")
    assert (cluster.nodes, cluster.devices_per_node, device.name) == (4, 8, "my-gpu")
    assert (device.flops, device.inside.bandwidth) == (362e12, 32e9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("flops: 362e12", ""), "flops is missing"),
        (("memory: 48e9", "memory: 0"), "memory is 0; it should be a number above 0"),
        (("memory: 48e9", "memory: much"), "memory is 'much'"),
        (("host_bandwidth", "host_bandwith"), "host_bandwith"),
        (("{bandwidth: 32e9}", "{bandwidth: -1}"), "inside.bandwidth is -1"),
    ],
)
def test_a_wrong_description_of_a_device_is_refused_by_key(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(GPU.replace(*change))
    with pytest.raises(PlanError, match=said):
        parse_cluster(f"{file}:8")


def test_every_known_device_has_numbers_of_the_right_size() -> None:
    for name, device in DEVICES.items():
        assert name == device.name
        assert 1e14 < device.flops < 1e16 and 1e10 < device.memory < 1e12
        assert device.inside.bandwidth >= device.between.bandwidth


def test_episodes_are_the_same_on_every_cluster_where_they_are_said() -> None:
    for recipe in ("llama-8b/ppo.yaml", "llama-8b/grpo.yaml"):
        read = read_recipe(RECIPES / recipe)
        works = [read.workload(parse_cluster(text)[0], 512) for text in ("h100:8", "h100:3x5", "h100:16x8")]
        assert {work.episodes for work in works} == {512}
        assert len({work.updates for work in works}) == 1


def test_clusters_are_compared_by_equal_iterations_if_unset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the recipe on the largest of them, in whatever order they are named."""
    pytest.importorskip("matplotlib")
    for clusters in ("h100:8,h100:2x8", "h100:2x8,h100:8"):
        found = json.loads(answer(capsys, tmp_path / "clusters.png", "--clusters", clusters, "--json"))
        plans = [plan for row in found["clusters"] for plan in row["plans"].values()]
        tokens = {round(plan["seconds"] * plan["tokens_per_second"]) for plan in plans}
        work = read_recipe(RECIPE).workload(parse_cluster("h100:2x8")[0])
        assert tokens == {round(work.tokens)}


def test_the_time_limit_is_that_of_the_colocated_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each look at it moves on by a hundredth of a second."""
    space = cluster_space(read_recipe(RECIPE), "h100:8", IterationSize())
    looks = []
    for limit in (0.1, 1.0):
        ticks = itertools.count()
        monkeypatch.setattr(fastest, "time", SimpleNamespace(perf_counter=lambda ticks=ticks: next(ticks) / 100))
        assert colocated(space, limit) is not None
        looks.append(next(ticks))
    assert 2 * looks[0] < looks[1]


def test_a_plan_for_lengths_with_a_tail_says_their_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cluster", "h100:8", "--response-tokens", "200/512"]
    words = " ".join(answer(capsys, tmp_path / "plan.yaml", *arguments).split())
    assert "in the mean and" in words and "as long as they may be" not in words
