"""The policies of docs/recipes.md beside their sources, written here with torch's and ml_dtypes' own casts.

Stochastic operands are compared as rounded to nearest: the noise of another library is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from readme_blocks import examples
from torch import Tensor, nn

from fpsim import Policy, quantize

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
TOKENS, INPUTS, OUTPUTS = 128, 256, 128
Quantiser = Callable[[Tensor, int], Tensor]  # of a matrix, along an axis


def of_the_page() -> dict[str, Policy]:
    (block,) = (code for code, _ in examples(PAGE) if "tetrajet = " in code)
    names: dict[str, Any] = {}
    exec(block, names)
    return {name: value for name, value in names.items() if isinstance(value, Policy)}


def e2m1(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def along(block: int) -> Callable[[Callable[[Tensor], Tensor]], Quantiser]:
    """A quantiser of matrices from one of (blocks, elements)."""

    def lift(f: Callable[[Tensor], Tensor]) -> Quantiser:
        def quantised(x: Tensor, axis: int) -> Tensor:
            rows = x if axis == 1 else x.T
            found = f(rows.reshape(-1, block)).view(rows.shape)
            return found if axis == 1 else found.T

        return quantised

    return lift


def in_tiles(side: int) -> Callable[[Callable[[Tensor], Tensor]], Quantiser]:
    def lift(f: Callable[[Tensor], Tensor]) -> Quantiser:
        def quantised(x: Tensor, _: int) -> Tensor:
            tiles = x.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2)
            return f(tiles.reshape(-1, side * side)).view(tiles.shape).transpose(1, 2).reshape(x.shape)

        return quantised

    return lift


@along(32)
def truncation_free(blocks: Tensor) -> Tensor:
    """TetraJet, section 3.2: S = 2 ** ceil(log2(2 M / (Qp - Qn))), Qp = 6 and Qn = -6."""
    scale = torch.exp2((blocks.abs().amax(1, keepdim=True).double() * 2 / 12).log2().ceil()).float()
    return e2m1(blocks / scale) * scale


def four_over_six(x: Tensor) -> Callable[[Tensor], Tensor]:
    """fouroversix 1.0.5, quantize/pytorch/reference.py: quantize_to_nvfp4 and select_fouroversix, by mse."""
    encode = torch.tensor(6 * 256.0) / x.abs().max()

    def quantised(blocks: Tensor) -> Tensor:
        found = []
        for expansion in (1.0, 1.5):
            scale = e4m3(blocks.abs().amax(1, keepdim=True) / 6 * encode * expansion)
            found.append(e2m1((blocks * (1 / (1 / encode * scale))).clamp(-6, 6)) * scale / encode)
        six, four = (((one - blocks) ** 2).sum(1, keepdim=True) for one in found)
        return torch.where(four < six, found[1], found[0])

    return quantised


def act_quant(blocks: Tensor) -> Tensor:
    """DeepSeek-V3, inference/kernel.py, act_quant_kernel: s = max(abs(x)) / 448, and x / s in float8_e4m3fn."""
    s = blocks.abs().amax(1, keepdim=True) / 448.0
    return e4m3(blocks / s) * s


def products(
    x: Tensor, w: Tensor, dy: Tensor, of: Callable[[str, Tensor], Quantiser], is_twice: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a linear layer. of: what quantises x, w or dy. is_twice: the backward starts from what y used."""
    x1, w1 = of("x", x)(x, 1), of("w", w)(w, 1)
    x2, w2 = (x1, w1) if is_twice else (x, w)
    by_dx, by_dw = of("dy", dy)(dy, 1) @ of("w", w2)(w2, 0), of("dy", dy)(dy, 0).T @ of("x", x2)(x2, 0)
    return x1 @ w1.T, by_dx, by_dw


SOURCES: dict[str, tuple[Callable[[str, Tensor], Quantiser], bool]] = {
    "tetrajet": (lambda role, x: truncation_free, True),
    "four_over_six": (lambda role, x: (in_tiles(16) if role == "w" else along(16))(four_over_six(x)), False),
    "deepseek": (lambda role, x: (in_tiles(128) if role == "w" else along(128))(act_quant), False),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SOURCES)
def test_a_policy_computes_what_its_source_does(name: str, seed: int) -> None:
    policy = of_the_page()[name]
    assert policy.products is not None
    operands = policy.products.with_rounding("nearest_even")
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(TOKENS, n, generator=generator) for n in (INPUTS, OUTPUTS))
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.1)
    q = quantize(layer, Policy(products=replace(operands, output=None, accumulator=None)))
    y = q(x.requires_grad_())
    y.backward(dy)
    assert x.grad is not None
    of, is_twice = SOURCES[name]
    expected = products(x.detach(), layer.weight.detach(), dy, of, is_twice)
    for got, wanted in zip((y.detach(), x.grad, q.weight.grad), expected, strict=True):
        # sums of 256 terms in the order of a BLAS, in units of the largest; an operand in another place is off by 2**-5
        assert torch.allclose(got, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))  # type: ignore[arg-type]


def test_the_page_names_each_policy_and_none_takes_more_than_six_lines() -> None:
    (block,) = (code for code, _ in examples(PAGE) if "tetrajet = " in code)
    assert {*of_the_page()} == {*SOURCES, "mxfp4_qat", "bitnet"}
    assert all(len(part.splitlines()) <= 6 for part in block.split("\n\n"))
