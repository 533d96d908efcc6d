"""The orders in which two roles that train together run their micro-batches, and the times that they are found from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups
from trl_realloc.engines.training.stage_figures import FusedShape, StageFigures
from trl_realloc.engines.training.stage_messages import StageTask
from trl_realloc.engines.training.stage_times import StageTimes, TokenFit
from trl_realloc.planner.fused.check import check, serial_time
from trl_realloc.runtime.fused import orders as fused_orders
from trl_realloc.runtime.fused.orders import FusedOrders


FIGURE = StageFigures((0.1, 1e-3), (0.2, 2e-3), 5.0)
lengths = some.lists(some.integers(1, 900), max_size=5).map(tuple)


def shape(*tokens: tuple[tuple[int, ...], ...], stages: int = 4, figure: StageFigures = FIGURE) -> FusedShape:
    figures = (figure,) * stages
    return FusedShape((tokens[0], tokens[1]), (figures, figures), True)


@settings(max_examples=15, deadline=None)
@given(some.tuples(lengths), some.tuples(lengths, lengths), some.booleans())
def test_every_stage_runs_every_micro_batch_of_its_pipelines_forward_and_then_backward(
    one: tuple[tuple[int, ...], ...], two: tuple[tuple[int, ...], ...], swapped: bool
) -> None:
    """Also where two copies of a pipeline have different numbers of micro-batches, or one has none."""
    asked = shape(*((two, one) if swapped else (one, two)))
    orders = FusedOrders()(asked)
    assert len(orders) == 4
    for stage, tasks in enumerate(orders):
        expected = Counter[StageTask]()
        for model, copies in enumerate(asked.tokens):
            count = len(copies[stage * len(copies) // 4])
            expected += Counter(StageTask(model, n, back) for n in range(count) for back in (False, True))
        assert Counter(tasks) == expected
        assert all(tasks.index(StageTask(task.model, task.micro_batch, False)) <= at for at, task in enumerate(tasks))


def test_an_order_is_faster_than_one_model_after_the_other_and_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = FusedOrders()
    asked = shape(((400,) * 6,), ((300,) * 6,))
    first = orders(asked)
    assert orders.latest is not None
    pipelines, schedule = orders.latest
    assert check(pipelines, schedule).makespan < 0.8 * serial_time(pipelines)
    assert orders(shape(((402,) * 6,), ((301,) * 6,))) == first, "the times differ by less than they are rounded by"
    assert orders.latest[1] is schedule
    monkeypatch.setattr(fused_orders, "MAX_KEPT", 1)
    orders(shape(((400,),), ((300,),)))
    orders(asked)
    assert orders.latest[1] is not schedule, "the oldest are forgotten"


def test_models_without_measured_times_are_ordered_by_estimates_of_any_unit() -> None:
    orders = [
        FusedOrders()(
            replace(
                shape(((400,) * 3,), ((300,) * 3,), figure=StageFigures((0.0, unit), (0.0, 2 * unit), 3 * unit)),
                is_measured=False,
            )
        )
        for unit in (1.0, 1024.0**4)
    ]
    assert orders[0] == orders[1]


@pytest.mark.parametrize(("base", "slope"), [(0.0, 2e-3), (0.3, 1e-3), (0.5, 0.0)])
def test_times_are_fitted_by_a_line_over_tokens(base: float, slope: float) -> None:
    fit = TokenFit()
    assert all(map(math.isnan, fit.line()))
    for tokens in (100, 200, 400):
        fit.add(tokens, base + slope * tokens)
    assert fit.line() == pytest.approx((base, slope), abs=1e-9)
    equal = TokenFit()
    equal.add(100, 0.4)
    assert equal.line() == pytest.approx((0.0, 4e-3)), "of equal micro-batches seconds are proportional to tokens"


def test_later_mini_batches_count_for_more() -> None:
    times = StageTimes(torch.device("cpu"))
    fit = times.fits[0, False]
    fit.add(100, 1.0)
    for _ in range(8):
        times.begin_mini_batch()
        fit.add(100, 0.5)
    assert fit.line()[1] == pytest.approx(0.005, rel=0.01)
    with times.of(1, True, 10):
        pass
    assert 0 <= times.fits[1, True].line()[1] < 1


def test_the_stages_of_reversed_groups_lie_on_the_same_ranks_the_other_way_round() -> None:
    pp, ends = MeshGroup((0, 2, 4), 2), MeshGroup((0, 4), 2)
    alone = MeshGroup((2,), 2)
    groups = SplitGroups(MeshGroup(tuple(range(6)), 2), alone, alone, pp, ends).reversed()
    assert (groups.pp.ranks, groups.pp.index, groups.ends.ranks) == ((4, 2, 0), 1, (4, 0))
    assert groups.reversed().pp == pp
    assert MeshGroup((4, 2, 0), 4).index == 0 and MeshGroup((4, 2, 0), 4).is_leader
