"""The same mistakes as torch's class refuses, with the same messages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from grad_scaler_cases import REFUSED, Make, model_and_optimizer, ours, ready
from torch import nn

from ada_loss import GradScaler


def test_stepping_twice_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    scaler.step(optimizer)
    with pytest.raises(REFUSED, match=r"step\(\) has already been called since the last update\(\)"):
        scaler.step(optimizer)


def test_unscaling_twice_is_refused(make: Make) -> None:
    scaler, weight, optimizer = ready(make)
    scaler.unscale_(optimizer)
    message = r"unscale_\(\) has already been called on this optimizer since the last update\(\)"
    with pytest.raises(REFUSED, match=message):
        scaler.unscale_(optimizer)
    assert torch.equal(weight.grad, torch.ones(2))


def test_unscaling_after_the_step_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    scaler.step(optimizer)
    with pytest.raises(REFUSED, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("verb", ["step", "unscale_", "update"])
def test_a_verb_before_any_scale_is_refused(make: Make, verb: str) -> None:
    _, optimizer = model_and_optimizer()
    scaler = make()
    fix = r"This may indicate your script did not use scaler\.scale\(loss or outputs\) earlier"
    with pytest.raises(REFUSED, match=rf"Attempted {verb} but .*{fix}"):
        getattr(scaler, verb)(*([] if verb == "update" else [optimizer]))


def test_update_before_any_step_is_refused(make: Make) -> None:
    scaler, _, _ = ready(make)
    with pytest.raises(REFUSED, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_a_step_without_any_gradient_is_refused(make: Make) -> None:
    scaler, weight, optimizer = ready(make)
    weight.grad = None
    with pytest.raises(REFUSED, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_gradients_that_came_after_unscaling_are_not_stepped_with(fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = ours(init_scale=8.0)
    loss = scaler.scale(weight.sum())
    scaler.unscale_(optimizer)
    loss.backward()
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        scaler.clip_(optimizer, 1.0)
    assert weight.item() == 0.0


def test_a_fused_step_without_any_gradient_does_nothing(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = make()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_a_closure_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    message = "Closure use is not currently supported if GradScaler is enabled"
    with pytest.raises(REFUSED, match=message):
        scaler.step(optimizer, closure=lambda: torch.zeros(()))


def test_a_closure_by_position_is_refused_too() -> None:
    scaler, weight, optimizer = ready(ours)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: torch.zeros(()))
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_float16_gradients_are_refused(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)
    assert torch.equal(weight.grad, torch.full((2,), 4.0, dtype=torch.float16))


@pytest.mark.parametrize("outputs", [3.0, None, [3.0]], ids=str)
def test_scaling_what_is_no_tensor_is_refused(make: Make, outputs: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        make().scale(outputs)


def test_pickling_in_the_middle_of_an_iteration_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    scaler.step(optimizer)
    with pytest.raises(REFUSED, match=r"pickled at the beginning of an iteration, or at the end after"):
        pickle.dumps(scaler)


def test_an_empty_state_is_refused(make: Make) -> None:
    with pytest.raises(RuntimeError, match="The source state dict is empty, possibly because it was saved"):
        make().load_state_dict({})


@pytest.mark.parametrize("new", [torch.ones(2), torch.ones(1, requires_grad=True)], ids=["two", "grad"])
def test_a_new_scale_that_is_no_number_is_refused(make: Make, new: torch.Tensor) -> None:
    scaler, _, _ = ready(make)
    message = r"new_scale should be a float or a 1-element torch\.(cuda\.)?FloatTensor"
    with pytest.raises(REFUSED, match=message):
        scaler.update(new)


@pytest.mark.parametrize("params", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_factors_of_one_are_refused(make: Make, params: dict[str, float]) -> None:
    with pytest.raises(REFUSED, match=r"growth.?factor.* 1|backoff.?factor.* 1"):
        make(**params)


@pytest.mark.parametrize("device", [0, 1.5, ["cuda"]], ids=str)
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(TypeError, match=r"device=.* is not a device\. Expected: one as in torch"):
        GradScaler("torch", device=device)
