"""Gradients are scaled in whatever tensor they travel, or the scaling says that they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from layerwise_cases import RULES, seeded
from tiers import parametrize
from torch import Tensor, nn

import fpsim
from ada_loss import AdaLossScaled, Recorder

WIDTH, DEPTH = 64, 9
Way = Callable[[torch.dtype], tuple[nn.Module, Any]]


class Deep(nn.Sequential):
    """Its loss is so small that unscaled gradients in 8 bits are all lost."""

    def __init__(self, inner: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
        super().__init__(*[layer for pair in layers for layer in pair][:-1])
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.inner is None else super().forward(x.to(self.inner))


def weights(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    return Deep().to(dtype), nullcontext()


def autocast(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    return Deep(), torch.autocast("cpu", dtype)


def checkpoint(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model = Deep()
    model.load_state_dict({name: x.to(dtype) for name, x in model.state_dict().items()}, assign=True)
    return model, nullcontext()


def cast_in_the_forward(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    return Deep(dtype).to(dtype), nullcontext()


WAYS = (weights, autocast, checkpoint, cast_in_the_forward)


def outcome(
    make: Way, dtype: torch.dtype, **options: Any
) -> tuple[list[float], dict[str, int], dict[tuple[str, str], float]]:
    """Of the second step: the share of zeros in each weight's gradient, the scales, the underflow that is recorded."""
    model, block = make(dtype)
    model = fpsim.quantize(model, fpsim.Policy(error="e5m2", weight_grad="e5m2"))
    x = torch.randn(128, WIDTH, generator=seeded())
    with AdaLossScaled(model, **options) as handle, block:
        handle.observer = recorder = Recorder()
        for _ in range(2):
            model.zero_grad()
            out = model(x if make is cast_in_the_forward else x.to(next(model.parameters()).dtype))
            ((out.float() - 1).square().mean() * 1e-2).backward()
        scales = handle.log2_scales()
    zeros = [(p.grad == 0).float().mean().item() for p in model.parameters() if p.dim() == 2 and p.grad is not None]
    recorded = {(row["site"], row["role"]): row["underflow"] for row in recorder.rows() if row["step"] == 2}
    return zeros, scales, recorded


@parametrize("rule", RULES, keep={"approx_range", "current"})
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_gradients_in_bfloat16_are_scaled_as_those_in_float32(make: Way, rule: str) -> None:
    unscaled, _, _ = outcome(make, torch.bfloat16, rule="fixed", init_scale=1.0)
    assert min(unscaled) > 0.9
    expected, scales, underflow = outcome(weights, torch.float32, rule=rule)
    zeros, found, recorded = outcome(make, torch.bfloat16, rule=rule)
    # one number of bfloat16 in 2**8 lies so near a tie that it is rounded the other way than float32's
    assert zeros == pytest.approx(expected, abs=2**-8)
    assert recorded == pytest.approx(underflow, abs=2**-8)
    assert found.keys() == scales.keys()
    if rule not in ("abs_range", "element_wise_range", "exact"):  # of a mean, or of what lies near a border
        assert found == scales


@pytest.mark.parametrize("rule", ["fixed", "approx_range", "current"])
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_gradients_in_float16_are_refused_at_the_first_site(make: Way, rule: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=r"The gradient at 0:\w+ is to be scaled, and is float16"):
        outcome(make, torch.float16, rule=rule)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_quantised_model_in_half_without_scaling_trains(dtype: torch.dtype) -> None:
    model = fpsim.quantize(Deep().to(dtype), "e5m2")
    model(torch.randn(4, WIDTH, generator=seeded()).to(dtype)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is dtype for p in model.parameters())


def test_a_model_in_half_that_is_not_quantised_is_refused_for_what_it_is() -> None:
    with pytest.raises(ValueError, match=r"Deep is not quantised: nothing rounds its gradients"):
        AdaLossScaled(Deep().half())
