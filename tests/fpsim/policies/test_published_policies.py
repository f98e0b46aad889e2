"""The policies of docs/recipes.md beside their sources, written here with torch's and ml_dtypes' own casts.

Stochastic operands are compared as rounded to nearest: the noise of another library is another one.
"""

from __future__ import annotations

import re
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

from fpsim import Hadamard, Policy, Products, hadamard, quantize

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


def quest_mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Quartet, quantizers/mxfp4_triton.py, mxfp4_forward_kernel where `quest`; and its clip_mask."""
    variance = (blocks * blocks).sum(1, keepdim=True) / 32 - (blocks.sum(1, keepdim=True) / 32) ** 2
    exponents = (2.92247856 / 6.0 * variance.sqrt() + 1e-8).log2().floor().exp2()
    scaled = blocks / exponents
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return values[torch.bucketize(scaled.abs(), steps)] * scaled.sign() * exponents, scaled.abs() < 6


def three_quarters(blocks: Tensor) -> Tensor:
    """The same without quest, to nearest: numbers are scaled by 2 ** (floor(log2(amax)) - 2) / (3 / 4)."""
    exponents = torch.exp2(blocks.abs().amax(1, keepdim=True).log2().floor() - 2) / 0.75
    return e2m1(blocks / exponents) * exponents


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


def test_quartet_takes_the_steps_of_its_source() -> None:
    """Three steps of descent; transforms of the backward pass without signs, for those that are drawn are others."""
    policy = of_the_page()["quartet"]
    assert policy.products is not None
    fprop, dgrad, wgrad = policy.products.with_rounding("nearest_even").specs[:3]
    plain = [tuple(replace(o, hadamard=Hadamard(32)) for o in pair if o is not None) for pair in (dgrad, wgrad)]
    operands = Products(fprop=fprop, dgrad=plain[0], wgrad=plain[1])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    q = quantize(nn.Linear(INPUTS, OUTPUTS, bias=False), Policy(products=operands))
    with torch.no_grad():
        q.weight.copy_(torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.1)
    w, matrix = q.weight.detach().clone(), hadamard(torch.eye(32), Hadamard(32), axis=1)

    def turned(x: Tensor) -> Tensor:
        return (x.reshape(-1, 32) @ matrix).view(x.shape)

    def product(a: Tensor, b: Tensor) -> Tensor:
        """Of the rows of two matrices, transformed and quantised along them."""
        a, b = (along(32)(three_quarters)(turned(t.contiguous()), 1) for t in (a, b))
        return a @ b.T

    for _ in range(3):
        x, dy = (torch.randn(TOKENS, n, generator=generator) for n in (INPUTS, OUTPUTS))
        (xq, x_mask), (wq, w_mask) = (quest_mxfp4(turned(t).view(-1, 32)) for t in (x, w))
        xq, x_mask, wq, w_mask = xq.view(x.shape), x_mask.view(x.shape), wq.view(w.shape), w_mask.view(w.shape)
        dx, dw = (turned(product(a, b) * mask) for a, b, mask in ((dy, wq.T, x_mask), (dy.T, xq.T, w_mask)))
        leaf = x.clone().requires_grad_()
        y = q(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        assert 0.001 < float((~x_mask).float().mean()) < 0.2
        for got, wanted in ((y.detach(), xq @ wq.T), (leaf.grad, dx), (q.weight.grad, dw)):
            # a deviation whose last bit differs may have another power of two: one row of a product then
            differ = (got - wanted).abs() > 4e-6 * float(wanted.abs().max())  # type: ignore[operator]
            assert differ.float().mean() <= 1 / TOKENS
        with torch.no_grad():
            w -= 0.01 * dw
            q.weight.copy_(w)
        q.weight.grad = None


def test_the_page_names_each_policy_and_none_takes_more_than_six_lines() -> None:
    (block,) = (code for code, _ in examples(PAGE) if "tetrajet = " in code)
    assert {*of_the_page()} == {*SOURCES, "quartet", "mxfp4_qat", "bitnet"}
    assert all(len(part.splitlines()) <= 6 for part in re.split("\n\n+", block))
