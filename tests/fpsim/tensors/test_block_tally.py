"""What a tally counts of blocks that share a scale, against counting block by block in fractions."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import tiers
import torch
from block_oracle import e4m3fn, floor_log2, nearest, wanted_exponent
from product_cases import gradients
from torch import Tensor, nn

import fpsim
from fpsim import BlockFormat, Operand, Policy, Products, quantize, round_to
from fpsim.tensors.block_tally import blocks_between, joined
from fpsim.tensors.cuts import Cut
from fpsim.tensors.launch import PARALLEL_FROM
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import any_spec

FORMATS = (
    *("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4", "mxint8", "e4m3fn per 32 ceil", "e2m1fn per 32 at 0.75"),
    *("nvfp4", "e2m1fn per 16x16 e4m3fn fp32", "e2m1fn per 16 e4m3fn"),
    *("e4m3fn per tensor fp32", "e5m2 per row fp32", "e4m3fn per tensor", "e4m3fn per 128x128 ceil"),
)
FEW = ("mxfp8_e4m3", "nvfp4", "e2m1fn per 16 e4m3fn", "e4m3fn per tensor fp32")  # each compiles loops
MASK = torch.finfo(torch.float32).max
COUNTS = ("blocks", "zero_blocks", "scale_underflow", "scale_overflow", "subnormal", "overflow")


def samples() -> Tensor:
    """(34, 50): usual blocks, blocks of zeros, of subnormals and of huge numbers, inf, NaN and masks."""
    torch.manual_seed(2)
    x = torch.randn(34, 50) * torch.exp2(torch.randint(-12, 13, (34, 50)).float())
    x[3], x[4, :32], x[5, 16:] = 0.0, 0.0, -0.0
    x[6] *= 2.0**-140
    x[7] = torch.randn(50) * 2.0**-60
    x[8, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 3.0])
    x[9], x[10, 20:22], x[11] = torch.inf, torch.tensor([-MASK, MASK]), MASK
    x[16:32, 16:32] = 0.0
    x[32] = 3.3e38
    return x


def scale_by_hand(values: list[float], everything: list[float], f: BlockFormat) -> tuple[float, Fraction, bool, bool]:
    """The scale of a block, the value of an element 1, whether the scale underflowed, and whether it overflowed."""
    amax, top = max(values), Fraction(f.element.largest)
    if f.has_power_scale:
        wanted = wanted_exponent(Fraction(amax), f)
        least, most = -127, 127 - floor_log2(top)
        scale = Fraction(2) ** max(least, min(most, wanted))
        return float(scale), scale / Fraction(f.gain), wanted < least, wanted > most
    f32 = np.float32
    with np.errstate(over="ignore"):
        if f.scale == fpsim.as_format("fp32"):
            by = f32(f.element.largest) / f32(amax)
            back = float(f32(1) / min(by, np.finfo(f32).max))
            return back, Fraction(back), bool(np.isinf(by)), False
        whole = (
            min(f32(448 * f.element.largest) / f32(max(everything)), np.finfo(f32).max) if f.tensor_scale else f32(1)
        )
        asked = f32(f32(amax) * f32(whole * (f32(1) / f32(f.element.largest))))
    scale = float(e4m3fn(min(asked, f32(448))))
    return scale, Fraction(scale) / Fraction(float(whole)), scale == 0, bool(asked >= 464)


def counted_by_hand(x: Tensor, rounded: Tensor, f: BlockFormat) -> tuple[dict[str, int], float]:
    """The counts of a tensor of two axes whose blocks run along the last, and log2 of the spread of its scales."""
    found = Counter(dict.fromkeys(COUNTS, 0))
    values = [Fraction(v) for v in f.element.values() if v >= 0]
    last_step = values[-1] - values[-2]
    smallest_normal = 0 if isinstance(f.element, fpsim.FixedPoint) else Fraction(f.element.smallest_normal)
    rows, columns = (side or size for side, size in zip(f.tile, x.shape, strict=True))
    everything = [abs(v) for v in x.flatten().tolist() if math.isfinite(v) and abs(v) != MASK]
    scales = []
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = (slice(i, i + rows), slice(j, j + columns))
            pairs = zip(x[part].flatten().tolist(), rounded[part].flatten().tolist(), strict=True)
            finite = [(abs(v), abs(r)) for v, r in pairs if math.isfinite(v) and abs(v) != MASK]
            found["blocks"] += 1
            if not x[part].isfinite().all():  # its scale is NaN
                found["overflow"] += int(x[part].isfinite().sum())
                continue
            if not any(v for v, _ in finite):
                found["zero_blocks"] += 1
                continue
            scale, unit, is_under, is_over = scale_by_hand([v for v, _ in finite], everything, f)
            found["scale_underflow"] += is_under
            found["scale_overflow"] += is_over
            if unit == 0:
                continue
            scales.append(scale)
            for v, r in finite:
                if math.isinf(r):  # 4/3 of an element at a scale of 2**126
                    found["overflow"] += 1
                    continue
                element = nearest(Fraction(r) / unit, tuple(map(float, values)))
                found["subnormal"] += 0 < element < smallest_normal
                found["overflow"] += Fraction(v) >= (values[-1] + last_step / 2) * unit
    return dict(found), math.log2(max(scales) / min(scales))


@pytest.mark.parametrize("axis", [1, 0])
@tiers.parametrize("name", FORMATS, keep=FEW)
def test_blocks_and_their_scales_are_counted_as_by_hand(name: str, axis: int) -> None:
    x, f = samples(), fpsim.as_format(name)
    assert isinstance(f, BlockFormat)
    if f.block in ("tensor", "row"):
        x = x[:32]  # otherwise one number decides
    if f.tensor_scale or f.block == "tensor" or f.tile == (128, 128):
        x = x.nan_to_num(0.5, MASK, -MASK)  # otherwise all is NaN
    tally = fpsim.tally(x if axis == 1 else x.T, f, axis=axis)
    expected, spread = counted_by_hand(x, round_to(x, f, axis=1), f)
    assert {name: getattr(tally, name) for name in COUNTS} == expected
    assert tally.log2_scale_spread == pytest.approx(spread, rel=2**-50)  # a division and a logarithm in float64
    assert tally.count == x.numel()
    assert tally.nonfinite == int((~x.isfinite()).sum())


def test_the_cases_have_everything_that_is_counted() -> None:
    found: Counter[str] = Counter()
    for name in FEW:
        tally = fpsim.tally(samples(), name)
        found.update({count: getattr(tally, count) for count in COUNTS})
    assert all(found[count] > 0 for count in COUNTS)


def test_the_rule_floor_saturates_and_ceil_does_not() -> None:
    x = torch.full((1, 32), 1.0)
    x[0, 0], x[0, 1] = 1.8125, -1.9  # of 448 / 256 = 1.75 the spacing is 1/8
    assert fpsim.tally(x, "mxfp8_e4m3").overflow == 2
    assert fpsim.tally(x, "e4m3fn per 32 ceil").overflow == 0


@pytest.mark.parametrize(("amax", "underflows"), [(2.0**-125, 0), (2.0**-126, 1)])
def test_the_smallest_scale_of_e8m0_is_no_underflow(amax: float, underflows: int) -> None:
    assert fpsim.tally(torch.tensor([amax]), "mxfp4").scale_underflow == underflows  # 2**2 is the largest exponent


def test_a_scale_of_nvfp4_that_becomes_zero_is_an_underflow() -> None:
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16] = 1.0, 2.0**-19  # a scale of 448, and one of 448 * 2**-19, below half of 2**-9
    tally = fpsim.tally(x, "nvfp4")
    assert (tally.blocks, tally.zero_blocks, tally.scale_underflow, tally.underflow) == (3, 1, 1, 1)
    assert tally.log2_scale_spread == 0.0


def test_empty_tensors_and_tensors_of_zeros_have_no_spread() -> None:
    for name in ("mxfp4", "nvfp4", "e4m3fn per tensor fp32"):
        assert fpsim.tally(torch.empty(0, 3), name).blocks == 0
        tally = fpsim.tally(torch.zeros(1, 3), name)
        assert (tally.blocks, tally.zero_blocks, tally.log2_scale_spread, tally.underflow) == (1, 1, 0.0, 0)
    assert fpsim.tally(torch.tensor(3.5), "mxfp4").blocks == 1


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3fn per tensor fp32"])
def test_threads_change_nothing(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(PARALLEL_FROM // 512, 513) * torch.exp2(torch.arange(513) / 64)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append([fpsim.tally(x, name, axis=axis) for axis in (0, 1)])
    torch.set_num_threads(before)
    assert found[0] == found[1]


def test_rows_of_counts_are_joined() -> None:
    a, b = torch.tensor([1, 0, 1, 0, 5, 6, 30, 40]), torch.tensor([2, 1, 0, 3, 1, 1, 20, 35])
    assert joined(torch.stack([a, b])).tolist() == [3, 1, 1, 3, 6, 7, 20, 40]


def test_a_tensor_at_the_scale_of_earlier_steps_saturates() -> None:
    x = torch.tensor([[1.0, 224.0, 232.0, 1e-3]])
    spec, cut = any_spec("e4m3fn per tensor fp32 delayed"), Cut(scale=torch.tensor(2.0))
    found = blocks_between(x, rounded_blocks(x, spec, scale=cut.scale), spec, cut)  # type: ignore[arg-type]
    assert found[:6].tolist() == [1, 0, 0, 0, 1, 1]  # 2e-3 is subnormal; 464 saturates by half an ulp


def test_operands_of_products_are_recorded_with_their_scales() -> None:
    products = Products.all("mxfp4", wgrad=(Operand("nvfp4", "stochastic"), None), fprop=("e4m3fn", None))
    model = quantize(nn.Linear(4, 40, bias=False), Policy(products=products))
    dy = torch.zeros(3, 40)
    dy[0, :32], dy[1, 32:], dy[2, 0] = 7.5, 1.0, 6.0
    with fpsim.record(model) as recording:
        gradients(model, torch.ones(3, 4), dy)
        gradients(model, torch.ones(3, 4), dy)
    rows = {row["role"]: row for row in recording.rows()}
    row = rows["dgrad.dy"]
    # 7.5 has a scale of 1 and saturates at 6, 1.0 one of 1/4; half of the blocks hold nothing
    assert [row[n] for n in ("blocks", "zero_blocks", "overflow_count", "log2_scale_spread")] == [12, 6, 64, 2.0]
    assert rows["fprop.x"]["blocks"] == rows["fprop.x"]["log2_scale_spread"] == 0
    assert rows["wgrad.dy"]["blocks"] == 2 * 40  # tokens are summed over
    again = fpsim.Recording()
    again.load_state_dict(recording.state_dict())
    assert again.rows() == recording.rows()


def test_delayed_scaling_shows_what_its_first_scale_loses() -> None:
    model = quantize(nn.Linear(2, 2, bias=False), fpsim.recipe("fp8_delayed"))
    with fpsim.record(model) as recording:
        for _ in range(2):  # a scale of 1 in the first step, of 448 / 1000 in the second
            model(torch.tensor([[1000.0, 1.0]])).sum().backward()
    (row,) = (row for row in recording.rows() if row["role"] == "fprop.x")
    assert (row["calls"], row["blocks"], row["overflow_count"]) == (2, 2, 1)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"log2_scale": 3}, ValueError, "computes its scales"),
        ({"axis": 2}, ValueError, "axis=2 is not an axis"),
        ({"fmt": "fp16", "axis": 0}, ValueError, "share no scale"),
        ({"x": torch.ones(3, dtype=torch.float64)}, TypeError, r"x\.float\(\)"),
        ({"fmt": "e4m3fn per tensor delayed"}, ValueError, "from earlier steps"),
    ],
    ids=str,
)
def test_what_cannot_be_tallied_is_refused(words: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fpsim.tally(**{"x": torch.ones(2, 2), "fmt": "mxfp4", **words})  # type: ignore[arg-type]
