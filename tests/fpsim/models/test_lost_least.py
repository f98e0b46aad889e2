"""`Update(lost="least")`: a lost update moves the weight to its neighbour, against NumPy's float16 and nextafter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fpsim
from fpsim import Update, quantize_optimizer

LARGEST = 65504.0
WEIGHTS = [1.0, -1.0, 1.0, 0.0, 0.0, -0.0, 2.0**-24, -(2.0**-24), 1000.0, LARGEST, -LARGEST, 1.0, 0.5, 3.0]
GRADIENTS = [1e-5, 1e-5, 0.0, 1e-9, -1e-9, 1e-9, 1e-12, 1e-12, -1e-3, -1.0, 1.0, 0.25, float("nan"), float("inf")]


def stepped(update: Update, weights: list[float], gradients: list[float], steps: int = 1) -> tuple[np.ndarray, Any]:
    weight = nn.Parameter(torch.tensor(weights))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    quantized = quantize_optimizer(optimizer, update)
    with fpsim.lost_updates(quantized) as lost:
        for _ in range(steps):
            weight.grad = torch.tensor(gradients)
            optimizer.step()
    return weight.detach().numpy(), lost


def by_numpy(weights: list[float], gradients: list[float]) -> np.ndarray:
    """Each number by itself: the float32 step, rounded; the neighbour where that is the old number."""
    result = []
    for w, g in zip(np.float16(weights), np.float32(gradients), strict=True):
        asked = np.float32(w) - g
        new = np.float16(asked)
        if new == w and asked != np.float32(w):
            neighbour = np.nextafter(w, np.float16(np.inf if asked > np.float32(w) else -np.inf))
            new = neighbour if np.isfinite(neighbour) else new
        result.append(np.float32(new))
    return np.array(result)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_lost_update_becomes_the_least_that_the_format_has_there() -> None:
    found, lost = stepped(Update(weight="fp16", lost="least"), WEIGHTS, GRADIENTS)
    np.testing.assert_array_equal(found, by_numpy(WEIGHTS, GRADIENTS))
    assert found[3] == -(2.0**-24)  # 0, with an update that fp16 does not have
    assert found[4] == 2.0**-24
    assert found[2] == 1.0  # no update
    assert found[9] == LARGEST  # it has no neighbour
    kept = stepped(Update(weight="fp16"), WEIGHTS, GRADIENTS)[0]
    assert (kept != found)[[0, 1, 3, 4, 5, 6, 7, 8]].all()
    assert lost.rows()[0]["lost"] == 2 / 13  # those of the largest numbers, of the updates that are not 0


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_many_steps_are_those_of_numpy(rounding: str, momentum: float) -> None:
    generator = np.random.default_rng(0)
    start = generator.normal(size=64).astype(np.float16)
    weight = nn.Parameter(torch.tensor(start.astype(np.float32)))
    optimizer = torch.optim.SGD([weight], lr=2.0**-14, momentum=momentum)
    quantize_optimizer(optimizer, Update(weight="fp16", rounding=rounding, lost="least"))
    mine, buffer = start.copy(), np.zeros(64, np.float32)
    moved = 0
    for _ in range(20):
        gradient = generator.normal(size=64).astype(np.float32)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        buffer = (np.float32(momentum) * buffer + gradient).astype(np.float32) if momentum else gradient
        asked = (mine.astype(np.float32) - np.float32(2.0**-14) * buffer).astype(np.float32)
        new = asked.astype(np.float16)
        is_lost = (new == mine) & (asked != mine.astype(np.float32))
        toward = np.where(asked > mine.astype(np.float32), np.float16(np.inf), np.float16(-np.inf))
        mine = np.where(is_lost, np.nextafter(mine, toward), new)
        moved += int(is_lost.sum())
    assert moved > 100
    np.testing.assert_array_equal(weight.detach().numpy(), mine.astype(np.float32))


def test_near_zero_it_is_the_rule_of_chainerlp() -> None:
    """p -= u with u = lr * g in float16, where a u of 0 becomes 6e-8: `LpMomentumSGD(rule="deterministic")`."""
    generator = np.random.default_rng(1)
    weights = (generator.integers(-1000, 1000, 256) * 2.0**-24).astype(np.float16)
    # large enough for the float32 step, which the rule follows
    gradients = (generator.choice([-1, 1], 256) * generator.uniform(2.0**-30, 2.0**-26, 256)).astype(np.float32)
    gradients[::7] = 0
    found, _ = stepped(Update(weight="fp16", lost="least"), weights.tolist(), gradients.tolist())
    u = gradients.astype(np.float16)
    u[(u == 0) & (gradients != 0)] = np.copysign(np.float16(6e-8), gradients)[(u == 0) & (gradients != 0)]
    np.testing.assert_array_equal(found, (weights - u).astype(np.float32))


def test_of_a_master_copy_it_is_the_copy_that_moves() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    quantized = quantize_optimizer(optimizer, Update(weight="e4m3fn", master="fp16", lost="least"))
    for step in range(1, 4):
        weight.grad = torch.tensor([-1e-6])
        optimizer.step()
        assert quantized.stores[0].value.item() == 1.0 + step * 2.0**-10
        assert weight.item() == 1.0


def test_a_step_that_is_skipped_or_raises_leaves_the_weight() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise MemoryError

    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Fails([weight], lr=1.0)
    quantize_optimizer(optimizer, Update(weight="bf16", lost="least"))
    weight.grad = torch.tensor([0.1])
    with pytest.raises(MemoryError):
        optimizer.step()
    assert weight.item() == 1.0


def test_it_is_said_and_the_state_of_another_update_is_refused() -> None:
    update = Update(weight="bf16", lost="least")
    assert str(update) == "weight=bf16 nearest_even, lost=least"
    optimizers = [torch.optim.SGD([nn.Parameter(torch.tensor([1.0]))], lr=1.0) for _ in range(2)]
    quantize_optimizer(optimizers[0], update)
    quantize_optimizer(optimizers[1], Update(weight="bf16"))
    with pytest.raises(ValueError, match="lost=least"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
