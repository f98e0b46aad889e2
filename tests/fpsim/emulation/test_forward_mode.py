"""Forward mode: tangents are in the format, as the numbers that they belong to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fpsim import quantize


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("way", ["func.jvp", "dual numbers", "jacfwd"])
def test_tangents_are_numbers_of_the_format_and_as_far_from_float32_as_native_ones(way: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16)).bfloat16().float()
    x, v = (randn(8, 32, seed=seed).bfloat16().float() for seed in (1, 2))

    def tangent(model: Any, x: Tensor, v: Tensor) -> Tensor:
        if way == "func.jvp":
            return torch.func.jvp(model, (x,), (v,))[1]  # type: ignore[no-any-return]
        if way == "jacfwd":
            return torch.func.jacfwd(lambda t: model(x + t * v))(torch.zeros((), dtype=x.dtype))  # type: ignore[no-any-return]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, v)
            return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent  # type: ignore[return-value]

    exact, ours = tangent(model, x, v), tangent(quantize(model, "bf16"), x, v)
    native = tangent(model.bfloat16(), x.bfloat16(), v.bfloat16()).float()
    assert torch.equal(ours, ours.bfloat16().float())
    assert 0.5 * (native - exact).norm() < (ours - exact).norm() < 1.25 * (native - exact).norm()
