"""A second scale for each row, or for so many numbers: what each of them gives as a tensor of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_oracle import nvfp4
from tiers import parametrize
from torch import Tensor, nn

import fpsim
from fpsim import BlockFormat, as_format, round_to, scales_of, tally
from fpsim.tensors.block_autograd import passes
from fpsim.tensors.spec import any_spec

ROW, OF_64 = "nvfp4_row", "e2m1fn per 16 e4m3fn fp32 per 64"


def numbers(columns: int = 200) -> Tensor:
    """(12, columns) whose rows, and whose numbers in a row, are of many sizes; one row is zero."""
    torch.manual_seed(2)
    x = torch.randn(12, columns) * torch.exp2(torch.randint(-30, 20, (12, 1)) + torch.randint(-6, 6, (12, columns)))
    x[3] = 0.0
    return x


def pieces(x: Tensor, fmt: str) -> list[Tensor]:
    """The parts of (rows, columns) that have a second scale each, (1, length)."""
    length = x.shape[1] if fmt == ROW else 64
    return [part for row in x for part in row[None].split(length, 1)]


def joined(parts: list[Tensor], x: Tensor) -> Tensor:
    return torch.cat(parts, 1).view(x.shape)


@parametrize("columns", [200, 64, 16, 5], keep={200})
@pytest.mark.parametrize("fmt", [ROW, OF_64])
def test_each_part_has_the_bits_of_nvfp4(fmt: str, columns: int) -> None:
    x = numbers(columns)
    expected = joined([torch.from_numpy(nvfp4(part.numpy())) for part in pieces(x, fmt)], x)
    assert torch.equal(round_to(x, fmt), expected)
    assert torch.equal(round_to(x.T, fmt, axis=0), expected.T)
    stacked = torch.stack([x, x.flip(0)], 1)
    assert torch.equal(round_to(stacked, fmt), torch.stack([expected, expected.flip(0)], 1))
    assert torch.equal(round_to(stacked.movedim(2, 1), fmt, axis=1).movedim(1, 2), round_to(stacked, fmt))
    assert not torch.equal(expected, round_to(x, "nvfp4"))


@pytest.mark.parametrize("fmt", [ROW, OF_64])
def test_tallies_scales_and_clipping_are_those_of_the_parts(fmt: str) -> None:
    x = numbers()
    alone, found = [tally(part, "nvfp4") for part in pieces(x, fmt)], tally(x, fmt)
    for name in ("count", "underflow", "subnormal", "overflow", "exact", "blocks", "zero_blocks", "scale_underflow"):
        assert getattr(found, name) == sum(getattr(one, name) for one in alone), name
    assert found.noise == pytest.approx(sum(one.noise for one in alone))
    assert tally(x.T.contiguous(), fmt, axis=0).exponents == found.exponents
    scales = torch.cat([scales_of(part, "nvfp4") for part in pieces(x, fmt)], 1).view(12, -1)
    assert torch.equal(scales_of(x, fmt), scales)
    assert torch.equal(scales_of(x.T, fmt, axis=0), scales.T)
    specs = any_spec("nvfp4"), any_spec(fmt)
    clipped = joined([passes(part, specs[0], -1, None) for part in pieces(x, fmt)], x)
    assert torch.equal(passes(x, specs[1], -1, None), clipped)
    assert torch.equal(passes(x.T, specs[1], 0, None), clipped.T)


def test_blocks_of_a_row_choose_as_they_do_alone() -> None:
    x = numbers()
    expected = joined([round_to(part, "nvfp4_4over6") for part in pieces(x, ROW)], x)
    assert torch.equal(round_to(x, "e2m1fn per 16 e4m3fn fp32 per row mse(amax/6,amax/4)"), expected)


@pytest.mark.parametrize("fmt", [ROW, OF_64])
def test_an_infinity_reaches_the_numbers_of_its_second_scale_alone(fmt: str) -> None:
    x = numbers(128)
    x[1, 70], x[5, 3], x[7, 9] = torch.inf, torch.nan, torch.finfo(torch.float32).max  # a mask
    y = round_to(x, fmt)
    reached = torch.zeros_like(x, dtype=torch.bool)
    reached[1, 0 if fmt == ROW else 64 :] = reached[5, : 128 if fmt == ROW else 64] = True
    assert torch.equal(y.isnan(), reached)
    assert y[7, 9] == x[7, 9]
    row = x[7].clone()
    row[9] = 0.0
    expected = torch.from_numpy(np.concatenate([nvfp4(part.numpy()) for part in pieces(row[None], fmt)], 1))[0]
    expected[9] = x[7, 9]
    assert torch.equal(y[7], expected)


def test_stochastic_rounding_reaches_both_neighbours_of_the_parts_grid() -> None:
    x = numbers(64)
    torch.manual_seed(0)
    drawn = torch.stack([round_to(x, ROW, "stochastic") for _ in range(400)])
    low, high = (joined([round_to(p, "nvfp4", r) for p in pieces(x, ROW)], x) for r in ("down", "up"))
    assert ((drawn == low) | (drawn == high)).all()
    inside = (low < x) & (x < high)
    error = ((drawn.mean(0) - x) / (high - low))[inside]
    assert error.abs().max() < 5 * 0.5 / 400**0.5


def test_a_token_in_a_product_has_its_own_scale() -> None:
    layer = nn.Linear(64, 8)
    x = numbers(64)
    model = fpsim.quantize(layer, fpsim.Policy(products=fpsim.Products.all(ROW)))
    expected = nn.functional.linear(round_to(x, ROW), round_to(layer.weight, ROW), layer.bias)
    assert torch.allclose(model(x), expected, rtol=1e-5, atol=0)
    alone = torch.cat([model(row[None]) for row in x])
    assert torch.allclose(model(x), alone, rtol=1e-5, atol=0)  # a batch changes no token: with one scale it would


@pytest.mark.parametrize(
    "words",
    [
        "e2m1fn per 16x16 e4m3fn fp32 per row",
        "e2m1fn per 16 e4m3fn fp32 per 24",
        "e2m1fn per 16 e4m3fn fp32 per 16",
        "e2m1fn per 16 e4m3fn fp32 per tensor",
        "e2m1fn per 16 e4m3fn fp32 per",
        "e2m1fn per row e4m3fn fp32 per row",
    ],
)
def test_a_second_scale_of_other_parts_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"tensor_scale=.* is invalid"):
        as_format(words)


def test_names_and_reprs_of_second_scales_are_read() -> None:
    for words in (OF_64, "e2m1fn per 16 e4m3fn fp32 per row amax/4", "int4 per 16 e4m3fn fp32 per 128 saturate"):
        assert str(as_format(words)) == words
        assert as_format(repr(as_format(words))) == as_format(words)
    assert str(as_format("e2m1fn per 16 e4m3fn fp32 per row")) == ROW
    with pytest.raises(ValueError, match="needs no second scale"):
        BlockFormat("e2m1fn", 32, tensor_scale="row")


@pytest.mark.parametrize("fmt", [ROW, OF_64])
def test_numbers_without_an_axis_and_axes_that_are_none(fmt: str) -> None:
    one = torch.tensor(1.3)
    assert torch.equal(round_to(one, fmt), round_to(one, "nvfp4"))
    assert torch.equal(scales_of(one, fmt), scales_of(one, "nvfp4"))
    assert passes(one, any_spec(fmt), -1, None)
    assert torch.equal(torch.func.vmap(lambda z: round_to(z, fmt))(torch.ones(3)), torch.ones(3))
    for axis in (2, 5, -3):
        for f in (round_to, tally, scales_of):
            with pytest.raises(ValueError, match=f"axis={axis} is not an axis"):
                f(numbers(), fmt, axis=axis)  # type: ignore[operator]
