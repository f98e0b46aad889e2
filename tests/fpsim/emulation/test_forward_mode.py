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


class Own(torch.autograd.Function):
    """Of several operations, with a rule for tangents of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) * x * 1.001

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        x, w = ctx.saved_tensors
        return (tangent @ w) * x * 1.001 + (x @ w) * tangent * 1.001  # type: ignore[no-any-return]


class OfOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(randn(8, 8, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(x * 1.0, self.w)  # type: ignore[no-any-return]


WAYS_OF_OWN: dict[str, Any] = {
    "func.jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "jvp of vmap": lambda f, x, v: torch.func.jvp(torch.vmap(f), (x,), (v,))[1],
    "vmap of jvp": lambda f, x, v: torch.vmap(lambda x, v: torch.func.jvp(f, (x,), (v,))[1])(x, v),
}


@pytest.mark.parametrize("way", WAYS_OF_OWN)
@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_jvp_of_a_models_own_function_has_the_tangents_of_native_code(
    fmt: str, dtype: torch.dtype, way: str
) -> None:
    x, v = randn(16, 8, seed=1), randn(16, 8, seed=2)
    native = WAYS_OF_OWN[way](OfOwn().to(dtype), x.to(dtype), v.to(dtype)).float()
    assert torch.equal(WAYS_OF_OWN[way](quantize(OfOwn(), fmt), x, v), native)
