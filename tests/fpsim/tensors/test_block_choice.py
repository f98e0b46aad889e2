"""Blocks that take the best of several scales, beside a formula in NumPy and beside each candidate alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from block_oracle import e4m3fn
from tiers import parametrize
from torch import Tensor

from fpsim import BLOCKS, BlockFormat, Choose, as_format, round_to, scales_of, tally
from fpsim.tensors.block_tally import blocks_between
from fpsim.tensors.cuts import Cut
from fpsim.tensors.spec import any_spec

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
ERRORS = {
    "mse": lambda d: np.square(d.astype(np.float64)).sum(),
    "mae": lambda d: np.abs(d.astype(np.float64)).sum(),
    "max": lambda d: np.abs(d).max(),
}


def four_over_six(x: np.ndarray, error: str, tile: tuple[int, int], top: float = 256.0) -> np.ndarray:
    """The formulas of fouroversix 1.0.5 (quantize/pytorch/reference.py, quantize_to_nvfp4 and select_fouroversix).

    But for the order of what is dequantised, which is TransformerEngine's: element * scale / the tensor's scale.
    """
    whole = F32(F32(6 * top) / np.abs(x).max())
    halves, out = (E2M1[1:] + E2M1[:-1]) / 2, np.empty_like(x)
    for i, j in itertools.product(range(0, x.shape[0], tile[0]), range(0, x.shape[1], tile[1])):
        block, best = x[i : i + tile[0], j : j + tile[1]], np.inf
        for expansion in (F32(1), F32(1.5)):
            scale = e4m3fn(min(F32(F32(F32(np.abs(block).max() / F32(6)) * whole) * expansion), F32(448)))
            by = F32(1) / F32(scale * F32(F32(1) / whole)) if scale else F32(0)
            scaled = np.clip((block * by).astype(F32), -6, 6)
            index = np.searchsorted(halves, np.abs(scaled))
            at_tie = (index < 7) & (np.abs(scaled) == halves[np.minimum(index, 6)]) & (index % 2 == 1)
            value = ((np.copysign(E2M1[index + at_tie], scaled) * scale).astype(F32) / whole).astype(F32)
            if (found := ERRORS[error]((value - block).astype(F32))) < best:
                best, out[i : i + tile[0], j : j + tile[1]] = found, value
    return out


def numbers() -> Tensor:
    """(48, 64): usual and heavy-tailed rows, numbers of bfloat16, a block of zeros, and sizes beyond squares."""
    torch.manual_seed(3)
    x = torch.randn(48, 64) * torch.exp2(torch.randint(-9, 5, (48, 64)).float())
    x[:16], x[16:24] = torch.randn(16, 64), torch.randn(8, 64).bfloat16().float()
    x[24, :16] = 0
    return x


@pytest.mark.parametrize("error", ERRORS)
@parametrize("tile", [(1, 16), (16, 16), (1, 7)], keep={(1, 16)})
def test_four_over_six_has_the_bits_of_its_formula(tile: tuple[int, int], error: str) -> None:
    size = f"{tile[0]}x{tile[1]}" if tile[0] > 1 else tile[1]
    x = numbers()
    got = round_to(x, f"e2m1fn per {size} e4m3fn fp32 {error}(amax/6,amax/4)")
    assert torch.equal(got, torch.from_numpy(four_over_six(x.numpy(), error, tile)))
    if error == "mse" and tile == (1, 16):
        assert torch.equal(got, round_to(x, "nvfp4_4over6"))
        assert torch.equal(round_to(x.T, "nvfp4_4over6", axis=0).T, got)
        with_te = BlockFormat("e2m1fn", 16, "e4m3fn", Choose(("amax/6", "amax/4"), top=448), tensor_scale=True)
        assert torch.equal(round_to(x, with_te), torch.from_numpy(four_over_six(x.numpy(), error, tile, 448.0)))


CHOICES = (
    "e2m1fn per 32 mse(floor,ceil)",
    "e4m3fn per 32 mae(uos(1),even,floor_plus1)",
    "e2m3fn per 8x4 max(floor,nearest)",
    "int4 per row fp32 mse(amax,amax/8,amax/10)",
    "nf4 per 64 mse(ceil,floor)",
)


def in_blocks(x: Tensor, f: BlockFormat, axis: int) -> Tensor:
    """(blocks, elements) of a matrix whose axes are multiples of the tile, which lies as it does in memory."""
    r, c = f.tile
    if r > 1:
        return x.unfold(0, r, r).unfold(1, c, c).reshape(-1, r * c)
    rows = x if axis == 1 else x.T
    return rows.reshape(-1, c or rows.shape[1])


@parametrize("axis", [1, 0], keep={1})
@pytest.mark.parametrize("name", CHOICES)
@parametrize("size", [1.0, 1e-25], keep={1e-25})
def test_each_block_is_the_nearest_of_its_candidates(size: float, name: str, axis: int) -> None:
    f = as_format(name)
    assert isinstance(f, BlockFormat)
    assert str(f) == name
    assert as_format(repr(f)) == f
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * size
    along = None if f.tile[0] > 1 else axis
    results = torch.stack([in_blocks(round_to(x, c, axis=along), f, axis) for c in f.candidates])
    difference = (results - in_blocks(x, f, axis)).double()
    error = {"mse": difference.square().sum(-1), "mae": difference.abs().sum(-1), "max": difference.abs().amax(-1)}
    best = error[f.scale_rule.error].argmin(0)  # type: ignore[union-attr]  # the first one of equals
    expected = results[best, torch.arange(len(best))]
    assert torch.equal(in_blocks(round_to(x, f, axis=along), f, axis), expected)
    assert len(best.unique()) > 1
    scales = torch.stack([scales_of(x, c, axis=along) for c in f.candidates])
    found = scales_of(x, f, axis=along)
    chosen = scales.flatten(1) if axis == 1 or along is None else scales.transpose(1, 2).flatten(1)
    own = found.flatten() if axis == 1 or along is None else found.T.flatten()
    assert torch.equal(own, chosen[best, torch.arange(len(best))])


def test_of_equals_the_first_or_the_last_is_kept() -> None:
    """Powers of two are elements of both candidates."""
    x = torch.tensor([[1.0, 0.5, 2.0, 4.0]])
    for ties, expected in (("first", 1.0), ("last", 2.0)):
        f = BlockFormat("e2m3fn", 4, scale_rule=Choose(("floor", "floor_plus1"), ties=ties))
        assert scales_of(x, f).item() == expected
        assert torch.equal(round_to(x, f), x)


def test_noise_has_no_say_in_the_choice() -> None:
    """So the mean of many roundings is the number; beneath scales that see the noise it would not be."""
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(5))
    name = "e2m1fn per 16 e4m3fn fp32 mse(amax/6,amax/4)"
    rows = round_to(x.expand(4000, 16).clone().mul_(1.0), name, "stochastic")
    error = (rows.double().mean(0) - x[0].double()).abs()
    assert bool((error <= 5 * rows.double().std(0) / 4000**0.5 + 1e-6).all())
    assert len(rows.unique(dim=0)) > 100


@pytest.mark.filterwarnings("ignore")
def test_infinities_nan_and_masks_are_those_of_the_format_without_a_choice() -> None:
    x = torch.randn(6, 32)
    mask = torch.finfo(torch.float32).max
    x[0, 0], x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, mask, 0.0
    for word in ("", " saturate"):
        got, floor = (round_to(x, f"e2m1fn per 32{rule}{word}") for rule in (" mse(floor,ceil)", ""))
        assert torch.equal(got.isnan(), floor.isnan())
        assert got[2, 5] == mask
        assert not got[3].any()


@pytest.mark.parametrize("name", ["nvfp4_4over6", "e2m1fn per 8 mse(floor,ceil)"])
def test_a_tally_counts_blocks_at_the_scales_that_they_took(name: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -6, 8)[:, None]
    x[2, :16], f = 0, as_format(name)
    after, scales = round_to(x, f), scales_of(x, f).double()
    row = blocks_between(x, after, any_spec(f), Cut(-1)).tolist()  # type: ignore[arg-type]
    assert row[:2] == [scales.numel(), int((x.unflatten(1, (-1, f.tile[1])).abs().amax(-1) == 0).sum())]  # type: ignore[union-attr]
    ends = torch.tensor(row[-2:]).view(torch.float64).tolist()
    live = scales[x.unflatten(1, (-1, f.tile[1])).abs().amax(-1) > 0]  # type: ignore[union-attr]
    assert ends == [live[live > 0].min().item(), live.max().item()]
    assert tally(x, f).count == x.numel()


def test_programs_and_gradients() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    program = torch.compile(lambda x: round_to(x, "nvfp4_4over6"), fullgraph=True, backend="aot_eager")
    out = program(x)
    assert torch.equal(out, round_to(x, "nvfp4_4over6"))
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]
    assert "nvfp4_4over6" in BLOCKS
    assert round_to(torch.empty(0, 16), "nvfp4_4over6").shape == (0, 16)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Choose(("floor",)), "is no choice. Expected: two to 8 different scale rules"),
        (lambda: Choose(("floor", "floor")), "different scale rules"),
        (lambda: Choose(("floor", "ceil"), error="mean"), "Unknown error 'mean'"),
        (lambda: Choose(("floor", "ceil"), ties="any"), "Unknown ties 'any'"),
        (lambda: Choose(("floor", "ceil"), top=-1), "top=-1 is no scale"),
        (lambda: BlockFormat("e2m1fn", 32, scale_rule=Choose(("floor", "amax/4"))), "scale_rule='amax/4' is invalid"),
        (lambda: as_format("e2m1fn per tensor mse(floor,ceil)"), "Expected: blocks, tiles or rows"),
        (lambda: as_format("e2m1fn per 16 e4m3fn mse(amax/6,amax/13)"), "d is from 0 to 12"),
        (
            lambda: BlockFormat("e2m1fn", 32, scale_rule=Choose(("floor", "ceil"), top=2)),
            "top=None, or beneath a tensor_",
        ),
    ],
)
def test_a_choice_that_is_none_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
