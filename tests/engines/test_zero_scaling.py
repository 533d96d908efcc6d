"""The loss scale of DeepSpeed's float16 goes on where it was, in an engine of another kind too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trl_realloc.engines.training.zero_gradients import check_gradients, loss_scale, set_loss_scale


pytestmark = pytest.mark.deepspeed


def optimizer(scale: float) -> SimpleNamespace:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    settings = {"min_scale": 1.0, "delayed_shift": 1, "consecutive_hysteresis": False, "dtype": torch.half}
    return SimpleNamespace(loss_scaler=DynamicLossScaler(init_scale=scale, scale_window=4, **settings))


def test_a_resumed_run_has_the_scale_that_it_had_and_raises_it_after_as_many_steps() -> None:
    first, second = optimizer(2.0**16), optimizer(2.0**16)
    first.loss_scaler.cur_scale, first.loss_scaler.cur_iter, first.loss_scaler.last_overflow_iter = 2.0**10, 7, 4
    state = loss_scale(first)
    assert (state["scale"], state["_growth_tracker"]) == (2.0**10, 2)
    torch.amp.GradScaler("cpu").load_state_dict(state)
    set_loss_scale(second, state)
    for _ in range(6):
        assert second.loss_scaler.cur_scale == first.loss_scaler.cur_scale
        for made in (first, second):
            made.loss_scaler.update_scale(False)
    assert first.loss_scaler.cur_scale > state["scale"]


def test_an_optimizer_without_a_scaler_has_no_state_and_is_checked_all_the_same() -> None:
    made = SimpleNamespace(check_grad_overflow=False, loss_scaler=SimpleNamespace(dynamic=False, cur_scale=1.0))
    assert loss_scale(made) == {}
    set_loss_scale(made, {"scale": 3.0, "_growth_tracker": 1})
    check_gradients(made)
    assert made.loss_scaler.cur_scale == 1.0 and made.check_grad_overflow
    check_gradients(SimpleNamespace())
