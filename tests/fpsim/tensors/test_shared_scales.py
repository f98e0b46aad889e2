"""Rounding to formats whose blocks share a scale, against fractions, gfloat and references in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable

import gfloat
import numpy as np
import pytest
import tiers
import torch
from block_oracle import nvfp4, round_block
from gfloat.block import compute_scale_amax, quantize_block
from gfloat.formats import all_block_formats
from torch import Tensor, nn

from fpsim import BLOCKS, BlockFormat, as_format, quantize, round_to, scales_of
from fpsim.formats.blocks import POWER_RULES
from fpsim.tensors import shared_scales
from fpsim.tensors.launch import rounded
from fpsim.tensors.noise import new_key
from fpsim.tensors.shared_scales import block_scales, rounded_blocks
from fpsim.tensors.spec import any_spec

OCP = [name for name in BLOCKS if name.startswith("mx")]


def block(name: str, **changes: object) -> BlockFormat:
    found = as_format(name)
    assert isinstance(found, BlockFormat)
    fields = {k: getattr(found, k) for k in ("element", "block", "scale", "scale_rule", "tensor_scale")}
    return BlockFormat(**{**fields, **changes})  # type: ignore[arg-type]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


RULES = (*POWER_RULES, "uos(0.375)", "uos(1)")


def cases() -> Tensor:
    """(rows, 70): usual numbers, far scales, subnormals, and amaxes at and just below powers of two."""
    torch.manual_seed(1)
    rows = [torch.randn(4, 70), torch.randn(4, 70) * torch.exp2(torch.randint(-40, 40, (4, 70)).float())]
    rows += [torch.randn(2, 70) * 2.0**e for e in (-149, -140, -126, -100, -80, 100, 118, 126)]
    for amax in (
        4.0,
        3.9999998,
        4.0000005,
        1.75 * 4,
        1.7500001 * 4,
        2**0.5,
        1.4142135,
        1.4142137,
        1.96875,
        2.0**-126,
    ) + (1.8125, 1.8124999, 1.875, 1.8750001, 1.9921875):
        line = torch.rand(1, 70) * amax
        line[0, ::32] = amax
        rows.append(line * torch.where(torch.rand(1, 70) < 0.5, -1, 1))
    rows.append(torch.zeros(1, 70))
    return torch.cat(rows)


@pytest.mark.parametrize("axis", [1, 0])
@tiers.parametrize("rule", RULES, keep={"floor", "ceil", "mid_max", "uos(0.375)"})
@tiers.parametrize("name", OCP, keep={"mxfp8_e4m3", "mxfp4", "mxint8"})
def test_each_block_has_its_scale_and_its_elements_to_the_bit(name: str, rule: str, axis: int) -> None:
    f, x = block(name, scale_rule=rule), cases()
    got = round_to(x if axis == 1 else x.T, f, axis=axis)
    if axis == 0:
        got = got.T
    for row, line in zip(x.tolist(), got.tolist(), strict=True):
        for start in range(0, 70, 32):  # the last block is a short one
            assert line[start : start + 32] == [float(v) for v in round_block(row[start : start + 32], f)]


@tiers.parametrize("rule", RULES, keep={"floor", "ceil"})
@tiers.parametrize("name", OCP, keep={"mxfp8_e4m3"})
def test_operands_of_a_float64_model_are_rounded_once(name: str, rule: str) -> None:
    """Numbers so near to a tie, or to where the scale changes, that float32 has them there."""
    f, generator = block(name, scale_rule=rule), torch.Generator().manual_seed(0)
    values = torch.tensor([v for v in f.element.values() if v > 0], dtype=torch.float64)
    ties = (values[1:] + values[:-1]) / 2
    x = ties[torch.randint(0, len(ties), (40, 32), generator=generator)]
    x[:, 0] = torch.tensor([f.element.largest, 2.0 * f.element.largest, 2.0, 2**0.5 * 4]).double().repeat(10)
    x *= 1 + torch.randint(-1, 2, x.shape, generator=generator).double() * 2.0**-40
    rounded = rounded_blocks(x, any_spec(f))  # type: ignore[arg-type]
    expected = [[float(v) for v in round_block(row, f)] for row in x.tolist()]
    assert rounded.tolist() == expected
    assert rounded_blocks(x.float(), any_spec(f)).tolist() != expected  # type: ignore[arg-type]


def test_a_float64_number_keeps_its_masks_and_leaves_the_range_of_float32() -> None:
    largest, mask = torch.finfo(torch.float64).max, torch.finfo(torch.float32).max
    x = torch.tensor([[-largest, 1.0, mask, 0.3]], dtype=torch.float64)
    for name in ("mxfp8_e4m3", "e4m3fn per row fp32"):
        rounded = rounded_blocks(x, any_spec(name))  # type: ignore[arg-type]
        assert rounded[0, [0, 2]].tolist() == [-largest, mask]
        assert rounded_blocks(x.clamp(-1e39, 1.0), any_spec(name)).isnan().all()  # type: ignore[arg-type]


@pytest.mark.parametrize("info", all_block_formats, ids=lambda info: info.name)
def test_blocks_equal_those_of_gfloat(info: gfloat.BlockFormatInfo) -> None:
    name = {"mxfp4_e2m1": "mxfp4"}.get(info.name, info.name)
    x = cases()[:, :64].double()
    x = x[(x.abs().amax(1) < 2.0**118) & (x.abs().amax(1) > 2.0**-110)]
    # its log2 in float64 is exact enough here; its elements do not saturate, and its int8 has a -128
    mask = torch.ones_like(x, dtype=torch.bool)
    expected = np.empty(x.shape)
    f = as_format(name)
    for i, row in enumerate(x.numpy()):
        for j in (0, 32):
            values = row[j : j + 32]
            scale = compute_scale_amax(info.etype.emax, values)
            mask[i, j : j + 32] = torch.from_numpy(np.abs(values) <= f.element.largest * scale)  # type: ignore[union-attr]
            clipped = np.clip(values, -f.element.largest * scale, f.element.largest * scale)  # type: ignore[union-attr]
            expected[i, j : j + 32] = quantize_block(info, clipped, lambda *_, s=scale: s)
    assert mask.double().mean() > 0.9
    assert torch.equal(round_to(x.float(), name).double(), torch.from_numpy(expected))


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=str)
def test_nvfp4_has_the_bits_of_the_reference_in_float32(tile: tuple[int, int]) -> None:
    torch.manual_seed(0)
    f = block("nvfp4", block=tile if tile[0] > 1 else 16)
    for size in (1.0, 1e-20, 3e30, 2.0**-140):
        x = torch.randn(37, 51) * torch.exp2(torch.randint(-12, 6, (37, 51)).float()) * size
        x[3, :16] = 0
        assert same(round_to(x, f), torch.from_numpy(nvfp4(x.numpy(), tile)))
    zeros = torch.zeros(2, 20)
    assert same(round_to(zeros, f), zeros)


def test_a_tensor_scale_brings_amax_to_the_largest_value() -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 21) * 1e-5
    by = np.float32(448) / np.float32(x.abs().max())
    expected = round_to(x * by, "e4m3fn") * np.float32(np.float32(1) / by)
    assert same(round_to(x, "e4m3fn per tensor fp32"), expected)
    rows = torch.stack([round_to(row, "e4m3fn per tensor fp32") for row in x])
    assert same(round_to(x, "e4m3fn per row fp32"), rows)
    assert same(round_to(torch.zeros(3), "e4m3fn per tensor fp32"), torch.zeros(3))


def test_a_power_of_two_for_a_tensor_is_that_of_one_block() -> None:
    x = torch.randn(5, 9) * 1e-3
    f, whole = BlockFormat(as_format("e5m2"), "tensor"), BlockFormat(as_format("e5m2"), 45)  # type: ignore[arg-type]
    assert same(round_to(x, f), round_to(x.reshape(1, 45), whole).reshape(5, 9))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "e4m3fn per 3 fp32", "msfp12"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_blocks_run_along_the_axis_that_is_named(name: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(34, 5, 40) * torch.exp2(torch.randint(-9, 9, (34, 5, 40)).float())
    expected = round_to(x.movedim(axis, -1).contiguous(), name).movedim(-1, axis)
    assert same(round_to(x, name, axis=axis), expected.contiguous())
    for strided in (x.permute(2, 0, 1).permute(1, 2, 0), x.expand(34, 5, 40), x.double().float()):
        assert same(round_to(strided, name, axis=axis), expected.contiguous())


def test_a_tile_has_the_scale_of_its_largest_element() -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 5, 21) * torch.exp2(torch.randint(-9, 9, (37, 5, 21)).float())
    f, line = block("mxfp4", block=(4, 8)), block("mxfp4", block=32)
    for across, axis in ((0, 2), (2, 0), (1, 2)):
        got = round_to(x, f, axis=(across, axis))
        moved = x.movedim((across, axis), (-2, -1))
        expected = torch.empty_like(moved)
        for i in range(moved.shape[0]):
            for r in range(0, moved.shape[1], 4):
                for c in range(0, moved.shape[2], 8):
                    tile = moved[i, r : r + 4, c : c + 8]
                    expected[i, r : r + 4, c : c + 8] = round_to(tile.reshape(-1), line).view(tile.shape)
        assert same(got, expected.movedim((-2, -1), (across, axis)).contiguous())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (0, 5)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3fn per tensor fp32", "e4m3fn per row fp32"])
def test_scalars_and_empty_tensors_round(name: str, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 3.5)
    got = round_to(x, name)
    assert got.shape == x.shape
    # 448 / 3.5 is a power of two, and so nothing is lost in e4m3fn; mxfp4 has a scale of 1/2 and saturates at 3
    assert torch.equal(got, torch.full(shape, 3.0) if name == "mxfp4" else x)


def test_minus_zero_keeps_its_sign_where_elements_have_one() -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, -1e-9])
    assert torch.signbit(round_to(x, "mxfp4")).tolist() == [True, False, False, True]
    assert torch.signbit(round_to(x, "mxint8")).tolist() == [False] * 4


def test_a_block_whose_amax_is_above_seven_quarters_of_a_power_saturates_under_floor_never_under_ceil() -> None:
    x = torch.tensor([1.80, 0.1])
    assert round_to(x, "mxfp8_e4m3")[0] == 1.75
    x = torch.tensor([1.95, 0.1])
    assert round_to(x, "mxfp8_e4m3")[0] == 1.75  # the largest element, 448 / 256
    assert round_to(x, block("mxfp8_e4m3", scale_rule="ceil"))[0] == 2.0  # the nearest of 1.875 and 2
    x = torch.rand(64, 32) + 2.0**-10
    scales = block_scales(x, any_spec(block("mxfp4", scale_rule="ceil")))  # type: ignore[arg-type]
    assert (x.abs().amax(1) <= 6 * scales.flatten()).all()
    scales = block_scales(x, any_spec("mxfp4"))  # type: ignore[arg-type]
    assert (x.abs().amax(1) > 6 * scales.flatten()).any()


def test_the_scales_of_blocks_can_be_asked_for() -> None:
    x = torch.tensor([[6.0, 0.5, 96.0, 1.0, -0.03], [0.0, 0.0, 3.9, -5.0, 7.0]], requires_grad=True)
    powers = [[2.0 ** (math.floor(math.log2(amax)) - 2) for amax in (6.0, 96.0, 0.03)], [2.0**-127, 1.0, 1.0]]
    assert torch.equal(scales_of(x, "e2m1fn per 2"), torch.tensor(powers))  # OCP MX v1.0, 6.3: 2 is e2m1's exponent
    assert torch.equal(scales_of(x.T, "e2m1fn per 2", axis=0), torch.tensor(powers).T)
    assert scales_of(x, "e4m3fn per tensor fp32").shape == ()
    assert scales_of(x, "e4m3fn per 2x2", axis=(0, 1)).shape == (1, 3)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: scales_of(torch.ones(2), "fp16"), ValueError, "The numbers of fmt='fp16' share no scale"),
        (lambda: scales_of(torch.ones(2).double(), "mxfp4"), TypeError, "x has dtype float64"),
        (lambda: scales_of(torch.ones(0), "mxfp4"), ValueError, r"x of shape \(0,\) has no elements"),
        (lambda: scales_of(torch.ones(2), "mxfp4", axis=1), ValueError, "axis=1 is not an axis"),
        (lambda: torch.func.vmap(lambda x: scales_of(x, "mxfp4"))(torch.ones(2, 2)), NotImplementedError, "torch.func"),
    ],
)
def test_scales_that_are_not_there_are_refused(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@tiers.parametrize("axis", [0, 1], keep={1})
@tiers.parametrize("name", ["mxfp4", "nvfp4", "mxfp8_e5m2"], keep={"mxfp4"})
def test_stochastic_rounding_is_unbiased_within_the_range(name: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.rand(48, 33) * 0.9 + 0.05
    x[::16], x[:, ::16] = 1.5, 1.5  # each block's amax is a value of the format, and the top of the range is not left
    draws = torch.stack([round_to(x, name, "stochastic", axis=axis) for _ in range(200)]).double()
    # the spacing is at most 0.5 up to 1.5, so a mean's standard deviation at most 0.25 / sqrt(200) = 0.018
    assert (draws.mean(0) - x).abs().max() < 6 * 0.25 / 200**0.5
    # there are two values, no others, and the nearest one is either of them
    below, above = draws.amin(0), draws.amax(0)
    assert ((draws == below) | (draws == above)).all()
    nearest = round_to(x, name, axis=axis)
    assert ((nearest == below) | (nearest == above)).all()


def test_noise_follows_an_elements_index_whatever_the_threads_and_the_axis() -> None:
    x, key = torch.randn(700, 700), new_key()
    spec = any_spec("mxfp4", "stochastic")
    before = torch.get_num_threads()
    got = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        got.append([rounded_blocks(x, spec, axis, None, key) for axis in (0, 1)])  # type: ignore[arg-type]
    torch.set_num_threads(before)
    for axis in (0, 1):
        assert same(got[0][axis], got[1][axis])
        assert same(got[0][axis], got[2][axis])
    # a block whose scale is 1 draws the noise of the same elements rounded one by one
    x[:, ::32] = 4.0
    x.clamp_(-4, 4)
    elements = rounded(x, any_spec("e2m1fn", "stochastic"), key)  # type: ignore[arg-type]
    assert same(rounded_blocks(x, spec, 1, None, key), elements)  # type: ignore[arg-type]


def test_random_bits_limit_the_choice() -> None:
    x = torch.full((1, 32), 1.0 + 1 / 64)
    x[0, 0] = 6.0
    assert set(round_to(x, "mxfp4", "stochastic", random_bits=2)[0, 1:].tolist()) == {1.0}  # 1/32 is below a quarter
    assert set(round_to(x.expand(999, 32), "mxfp4", "stochastic")[:, 1:].flatten().tolist()) == {1.0, 1.5}


def test_a_gain_of_three_quarters_lets_nothing_saturate() -> None:
    torch.manual_seed(0)
    f = BlockFormat(as_format("e2m1fn"), 32, gain=0.75)  # type: ignore[arg-type]
    x = torch.randn(64, 32)
    draws = torch.stack([round_to(x, f, "stochastic") for _ in range(500)]).double()
    scale = torch.exp2(torch.floor(torch.log2(x.abs().amax(1, keepdim=True))) - 2)
    # the largest spacing is 2 of 6, over 3/4; a mean's standard deviation at most half of it over sqrt(500)
    assert ((draws.mean(0) - x).abs() < 6 * (4 / 3) * scale / 500**0.5).all()


def test_the_gradient_passes_and_out_is_written() -> None:
    x = torch.randn(3, 40, requires_grad=True)
    g = torch.randn(3, 40)
    round_to(x, "nvfp4").backward(g)
    assert torch.equal(x.grad, g)  # type: ignore[arg-type]
    out = torch.empty(3, 40)
    assert round_to(x.detach(), "mxfp4", out=out) is out
    assert same(out, round_to(x.detach(), "mxfp4"))
    array = x.detach().numpy()
    assert np.array_equal(round_to(array, "mxfp4"), out.numpy())


def test_vmap_and_compile_see_the_same_bits() -> None:
    x = torch.randn(4, 6, 40)
    expected = torch.stack([round_to(s, "nvfp4", axis=0) for s in x])
    assert same(torch.func.vmap(lambda s: round_to(s, "nvfp4", axis=0))(x), expected)
    compiled = torch.compile(lambda t: round_to(t, "mxfp8_e4m3", axis=1) + 0, backend="eager", fullgraph=True)
    assert same(compiled(x), round_to(x, "mxfp8_e4m3", axis=1) + 0)


BAD = [
    ({"fmt": "mxfp4", "axis": 2}, ValueError, r"axis=2 is not an axis .* shape \(3, 4\). Expected: -2 to 1"),
    ({"fmt": "mxfp4", "axis": 1.0}, ValueError, "axis=1.0 is not an axis"),
    ({"fmt": "mxfp4", "axis": (1, 1)}, ValueError, "not an axis|both 1"),
    ({"fmt": "fp16", "axis": 1}, ValueError, "share no scale"),
    ({"fmt": "e4m3fn per tensor delayed"}, ValueError, "from earlier steps"),
    ({"fmt": "mxfp4", "overflow": "inf"}, ValueError, "has no inf"),
    ({"fmt": "mxfp4", "random_bits": 3}, ValueError, "only 'stochastic'"),
]


@pytest.mark.parametrize(("words", "error", "message"), BAD, ids=[str(b[0]) for b in BAD])
def test_what_cannot_be_is_refused(words: dict[str, object], error: type[Exception], message: str) -> None:
    if words.get("axis") == (1, 1):
        words = {**words, "fmt": "e4m3fn per 2x2"}
    with pytest.raises(error, match=message):
        round_to(torch.randn(3, 4), **words)  # type: ignore[call-overload]


def test_dtypes_that_do_not_hold_what_blocks_give_are_refused() -> None:
    dtypes = {"mxfp4": [torch.float16], "fp16 per 32": [torch.float16, torch.bfloat16]}
    for name in ("nvfp4", "e4m3fn per row fp32", "e2m1fn per 32 at 0.75"):
        dtypes[name] = [torch.float64, torch.float16, torch.bfloat16]
    for name, refused in dtypes.items():
        for dtype in refused:
            with pytest.raises(TypeError, match=r"are rounded in float32: round x\.float\(\)"):
                round_to(torch.ones(3, dtype=dtype), name)
    with pytest.raises(TypeError, match="has dtype float16"):
        round_to(np.ones(3, np.float16), "mxfp4")


@tiers.parametrize("rule", RULES, keep={"floor", "ceil", "mid_max", "uos(0.375)"})
@tiers.parametrize("name", OCP, keep={"mxfp8_e4m3", "mxfp4", "mxint8"})
def test_a_bfloat16_tensor_holds_what_blocks_of_powers_of_two_give(name: str, rule: str) -> None:
    f, patterns = block(name, scale_rule=rule), torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = patterns[patterns.isfinite()]
    for numbers in (x.sort().values, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(4))]):
        lines = numbers.view(-1, 64)[::16]
        got = round_to(lines.clone().requires_grad_(), f)
        got.backward(torch.ones_like(got))
        assert got.dtype is torch.bfloat16
        for line, result in zip(lines.double().tolist(), got.double().tolist(), strict=True):
            for start in (0, 32):
                assert result[start : start + 32] == round_block(line[start : start + 32], f)


def test_a_program_rounds_blocks_of_bfloat16_and_refuses_what_it_does_not_hold() -> None:
    x = torch.randn(4, 64).bfloat16()
    rounds = torch.compile(lambda x, name: round_to(x, name), backend="aot_eager")
    assert torch.equal(rounds(x, "mxfp4"), round_to(x, "mxfp4"))
    with pytest.raises(TypeError, match="has dtype bfloat16"):
        rounds(x, "nvfp4")


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4"])
def test_a_forward_rounds_bfloat16_in_blocks(fmt: str) -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.seen = h.detach(), round_to(h, "mxfp4")
            return self.last(self.seen[1])

    model, x = quantize(Rounds().bfloat16(), fmt), torch.randn(8, 64).bfloat16()
    model(x).sum().backward()
    before, after = model.seen
    assert after.dtype is model.first.weight.grad.dtype is torch.bfloat16
    for line, result in zip(before.tolist(), after.tolist(), strict=True):
        assert result[:32] == round_block(line[:32], block("mxfp4"))
    assert model.first.weight.grad.any()


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_float64_is_cut_along_its_axis_however_it_lies_in_memory(axis: int) -> None:
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    scale = torch.exp2(x.abs().amax(axis, keepdim=True).log2().floor() - 8)  # OCP MX v1.0, 6.3: one block an axis
    expected = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    assert torch.equal(round_to(x, "mxfp8_e4m3", axis=axis), expected)


def test_float64_is_rounded_once_in_blocks_of_powers_of_two() -> None:
    x = np.array([[-431.99999999999994, 448.0]])
    assert round_to(x, "mxfp8_e4m3").tolist() == round_to(torch.tensor(x), "mxfp8_e4m3").tolist() == [[-416.0, 448.0]]


@pytest.mark.parametrize("largest", [448.0, 57344.0, 6.0, 1.0, 2.0**-7, 65504.0])
def test_the_multiplier_of_a_tensor_is_float32s_quotient(largest: float) -> None:
    words = np.random.default_rng(0).integers(0, 0x7F800000, 5000)
    words[:6] = 0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF
    with np.errstate(divide="ignore", over="ignore"):
        quotients = np.float32(largest) / words.astype(np.uint32).view(np.float32)
    expected = np.where(words == 0, np.float32(1), np.minimum(quotients, np.finfo(np.float32).max)).view(np.int32)
    on_cpu = [shared_scales._multiplier_on_cpu(int(word), largest) for word in words]
    np.testing.assert_array_equal(on_cpu, expected)
