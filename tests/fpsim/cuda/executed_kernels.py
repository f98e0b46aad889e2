"""Moments, histograms, blocks, transforms, products and decisions as compiled for a card, against the CPU's own.

The compiled code runs on the CPU. Run by test_executed_others.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from card_inputs import patterns
from emulated_card import EmulatedCard, backwards, load
from kernel_cases import (
    ACCUMULATORS,
    BLOCKS,
    CHOOSING,
    DENSE,
    INFINITIES,
    KEY,
    PREDICTING,
    SCALES_OF_LOSSES,
    SHARING,
    SIZES,
    TALLIED,
    TRANSFORMS,
    Array,
    beside_numbers,
    block_spec,
    chosen_by,
    counted_by,
    decisions_at,
    densely_rounded_by,
    factor_of,
    gathered_by,
    infinities,
    lost_by,
    operands_of_a_product,
    product_by,
    rounded_by,
    shared_by,
    tallied_by,
    tallied_elements,
    transformed_by,
)

from ada_loss.layerwise.scale_kernels import RECOMPUTE
from ada_loss.rules import LayerRule
from fpsim import Accumulator, as_format
from fpsim.compiling.card import CudaKernel, scalar_kernel
from fpsim.kernels import moments
from fpsim.kernels.statistics import (
    AMAX,
    LOG_MEAN,
    LOG_MEAN_SQUARE,
    MEAN,
    MEAN_SQUARE,
    TALLY_ALONG,
    TALLY_AMAX,
    TALLY_DEAD_ZONE,
    TALLY_NOISE,
    TALLY_SIGNAL,
)
from fpsim.tensors import tally
from fpsim.tensors.block_tally import blocks_between
from fpsim.tensors.cuts import Cut
from fpsim.tensors.gemm import accumulate
from fpsim.tensors.hadamard import Hadamard, transformed
from fpsim.tensors.launch import rounded
from fpsim.tensors.moments import binades, moments_of, on_device
from fpsim.tensors.shared_scales import amax_pattern, block_plan, block_scales, rounded_blocks, shared_numbers
from fpsim.tensors.spec import rounding_spec

CARD = EmulatedCard()


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaKernel, "load", load)
    monkeypatch.setattr(moments, "MOMENTS_BLOCKS", 7)  # so that a thread goes round its loops, which are unrolled


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; any NaN for any NaN, because the processors write them differently."""
    integer = torch.int64 if a.dtype is torch.float64 else torch.int32
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(integer) == b.view(integer))).all())


def numbers(count: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Finite numbers of all sizes, zeros and subnormals among them, that begin `offset` elements after an alignment."""
    width = 8 * dtype.itemsize
    words = patterns(as_format("fp16"), width, count + offset, np.random.default_rng(count))
    x = torch.from_numpy(words.view(f"f{width // 8}"))[offset:]
    x[x.isnan() | x.isinf()] = 0.0
    return x


def gathered(x: torch.Tensor, only_amax: bool = False, logs: bool = False) -> torch.Tensor:
    return gathered_by(CARD, x, only_amax, logs)


SUMS = (MEAN, MEAN_SQUARE, LOG_MEAN, LOG_MEAN_SQUARE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    for n, offset in ((0, 0), (1, 0), (255, 1), (257, 0), (4097, 0), (70_001, 3), (200_000, 0)):
        x = numbers(n, dtype, offset).clamp(-(2.0**120), 2.0**120)  # squares that float64 holds
        expected, got = moments_of(x, logs=True), gathered(x, logs=True)
        for field in range(10):
            if field not in SUMS:
                assert got[field] == expected[field], field
        # n terms in another order, each addition within 2**-53 of the sum of magnitudes
        scale = x.double().abs().mean() if n else torch.tensor(0.0)
        assert abs(got[MEAN] - expected[MEAN]) <= max(n, 1) * 2.0**-53 * 2 * scale
        assert got[MEAN_SQUARE] == pytest.approx(float(expected[MEAN_SQUARE]), rel=max(n, 1) * 2.0**-52)
        for field in (LOG_MEAN, LOG_MEAN_SQUARE):  # the logarithms of two libraries, within two units in the last place
            assert got[field] == pytest.approx(float(expected[field]), rel=1e-9, abs=1e-9)
        assert gathered(x, only_amax=True)[AMAX] == expected[AMAX]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_not_finite_has_no_largest_magnitude(dtype: torch.dtype) -> None:
    for value in (torch.nan, -torch.inf, torch.inf):
        x = numbers(3001, dtype)
        x[2500] = value
        assert gathered(x)[AMAX] == gathered(x, only_amax=True)[AMAX] == torch.inf


def test_moments_of_more_blocks_than_a_block_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "MOMENTS_BLOCKS", 300)
    x = numbers(400_000, torch.float32)
    expected, got = moments_of(x), gathered(x)
    for field in range(10):
        if field not in SUMS:
            assert got[field] == expected[field], field


def test_moments_do_not_depend_on_the_order_of_blocks_and_threads() -> None:
    x = numbers(40_003, torch.float32)
    expected = gathered(x)
    with backwards():
        assert torch.equal(gathered(x), expected)


def counted(words: np.ndarray, power_begins: bool) -> torch.Tensor:
    return counted_by(CARD, torch.from_numpy(words.view(f"f{words.itemsize}")), power_begins)


@pytest.mark.parametrize("power_begins", [False, True], ids=["ends", "begins"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_binades_are_counted_as_on_the_cpu(power_begins: bool, dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    for n, offset in ((0, 0), (1, 0), (257, 1), (4097, 0), (200_000, 0)):
        words = patterns(as_format("fp16"), width, n + offset, np.random.default_rng(n))[offset:]
        x = torch.from_numpy(words.view(f"f{width // 8}"))  # with NaN, inf and zeros
        assert torch.equal(counted(words, power_begins), binades(x, power_begins)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["e4m3fn", "fp16", "e5m2fnuz"])
def test_elements_are_tallied_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    spec, width = rounding_spec(name), 8 * dtype.itemsize
    for n in (1, 257, 20_001):
        x = torch.from_numpy(patterns(as_format(name), width, n, np.random.default_rng(n)).view(f"f{width // 8}"))
        after, expected = rounded(x, spec), tally.Accumulator(spec, x.device)
        expected.add(x, after)
        found = tallied_elements(CARD, x, after, expected.limits)
        assert torch.equal(found.counts, expected.counts)
        assert torch.equal(found.exponents, expected.exponents)
        assert found.sums[0] == expected.sums[TALLY_AMAX]
        sums = [float(expected.sums[field]) for field in (TALLY_SIGNAL, TALLY_NOISE, TALLY_DEAD_ZONE, TALLY_ALONG)]
        assert found.sums[1:-1] == pytest.approx(sums[:-1], rel=1e-11, abs=0, nan_ok=True)
        along = 1e-11 * math.sqrt(sums[0] * sums[1])  # the sum of numbers of both signs
        assert found.sums[-1] == pytest.approx(sums[-1], abs=along, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log2_scale", SCALES_OF_LOSSES)
def test_losses_are_counted_as_on_the_cpu(log2_scale: int, dtype: torch.dtype) -> None:
    largest, width, scale = as_format("e4m3fn").largest, 8 * dtype.itemsize, torch.tensor([log2_scale])
    for n in (1, 257, 20_001):
        x = torch.from_numpy(patterns(as_format("e4m3fn"), width, n, np.random.default_rng(n)).view(f"f{width // 8}"))
        x[n // 2] = 0.0
        after = rounded(x, rounding_spec("e4m3fn", overflow="saturate"), None, scale[0])
        found = lost_by(CARD, x, after, largest, log2_scale)
        assert torch.equal(found, tally.lost_between(x, after, largest, scale))
        assert n == 1 or (found > 0).all()


@pytest.mark.parametrize(("name", "rounding", "shape", "axis", "team"), BLOCKS)
def test_blocks_have_the_bits_of_the_cpu(
    name: str, rounding: str, shape: tuple[int, ...], axis: int, team: int
) -> None:
    x = numbers(math.prod(shape), torch.float32).view(shape)
    spec = block_spec(name, rounding)
    x[0, :3].view(3, -1)[:, 0], x[2, 3] = beside_numbers(spec), 0.0
    rounded = rounded_by(CARD, x, spec, axis, has_key=True)
    assert rounded.team == team
    assert same(rounded.y, rounded_blocks(x, spec, axis, None, torch.tensor(KEY)))
    assert same(rounded.scales, block_scales(x, spec, axis).flatten())


@pytest.mark.parametrize(("name", "rounding", "shape", "axis", "team"), [BLOCKS[0], BLOCKS[4], BLOCKS[10]])
def test_places_in_64_bits_give_the_same(
    name: str, rounding: str, shape: tuple[int, ...], axis: int, team: int
) -> None:
    x, spec = numbers(math.prod(shape), torch.float32).view(shape), block_spec(name, rounding)
    rounded = rounded_by(CARD, x, spec, axis, has_key=True, small=False)
    assert same(rounded.y, rounded_blocks(x, spec, axis, None, torch.tensor(KEY)))


@pytest.mark.parametrize(("name", "rounding", "shape", "size"), DENSE)
def test_dense_blocks_have_the_bits_of_the_cpu(name: str, rounding: str, shape: tuple[int, ...], size: int) -> None:
    times = 20 if size else 400  # several blocks of threads, of which the last is not full
    for offset in (0, 1):
        x = numbers(times * math.prod(shape), torch.float32, offset).view(times * shape[0], *shape[1:])
        x *= torch.exp2(-torch.linspace(0, 250, len(x))).view(
            -1, *[1] * (len(shape) - 1)
        )  # scales that take 64 bits too
        spec = block_spec(name, rounding)
        x.view(-1)[:3], x.view(-1)[-size - 9 :] = beside_numbers(spec), 0.0
        rounded = densely_rounded_by(CARD, x, spec, has_key=True)
        assert rounded.team == size
        assert same(rounded.y, rounded_blocks(x, spec, -1, None, torch.tensor(KEY)))
        assert same(rounded.scales, block_scales(x, spec, -1).flatten())


@pytest.mark.parametrize("name", INFINITIES)
def test_infinities_and_masks_in_blocks_are_those_of_the_cpu(name: str) -> None:
    spec = block_spec(name)
    scale = torch.tensor(0.5) if spec.fmt.is_delayed else None
    for x in infinities():
        expected = rounded_blocks(x, spec, scale=scale)
        assert same(densely_rounded_by(CARD, x, spec, True, scale).y, expected)
        if scale is None:
            *shared, amax = shared_by(CARD, x, spec)
            assert shared == shared_numbers(x, spec.fmt, block_plan(spec), None)[:2].tolist()
            assert amax == amax_pattern(x, block_plan(spec))
            found = tallied_by(CARD, x, expected, spec, -1)
            assert torch.equal(found, blocks_between(x, expected, spec, Cut(-1)))
        if spec.fmt.block != "tensor":
            assert same(rounded_by(CARD, x, spec, -1, True).y, expected)


@pytest.mark.parametrize("name", SHARING)
def test_what_blocks_share_is_found_as_on_the_cpu(name: str) -> None:
    spec = block_spec(name)
    plan = block_plan(spec)
    for n, offset in ((1, 0), (3, 1), (257, 0), (4097, 1), (40_003, 0)):
        x = numbers(n + offset, torch.float32)[offset:]
        if n > 3:
            x[:3], x[-1] = beside_numbers(spec), -float(x.nan_to_num(0, 0, 0).abs().max()) * 0.99
        *shared, amax = shared_by(CARD, x, spec)
        assert shared == shared_numbers(x, spec.fmt, plan, None)[:2].tolist()
        assert amax == amax_pattern(x, plan)


@pytest.mark.parametrize("name", ["e4m3fn per tensor fp32", "e5m2 per tensor fp32"])
def test_the_multiplier_of_a_tensor_is_float32s_quotient(name: str) -> None:
    spec = block_spec(name)
    for word in (0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x3F800001, 0x43E00000, 0x7F800000, 0x7FC00000):
        x = torch.tensor([word], dtype=torch.int32).view(torch.float32)
        assert shared_by(CARD, x, spec)[:2].tolist() == shared_numbers(x, spec.fmt, block_plan(spec), None)[:2].tolist()


@pytest.mark.parametrize(("name", "axis"), CHOOSING)
def test_blocks_take_the_nearest_candidate_as_on_the_cpu(name: str, axis: int) -> None:
    x = torch.randn(3, 34, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1.0, 1e20]).view(
        3, 1, 1
    )
    x[1, 3:] = 0.0
    spec = block_spec(name)
    assert torch.equal(chosen_by(CARD, x, spec, axis), rounded_blocks(x, spec, axis))


@pytest.mark.parametrize(("name", "axis"), TALLIED)
def test_blocks_are_tallied_as_on_the_cpu(name: str, axis: int) -> None:
    x = torch.randn(30, 134, 9) * torch.exp2(torch.tensor([-130.0, -40, 3])).repeat(10).view(30, 1, 1)
    spec = block_spec(name)
    x[0, 0], x[1, 3:], x[2, 5, 0] = beside_numbers(spec).repeat(3), 0.0, 1e6
    after = rounded_blocks(x, spec, axis)
    assert torch.equal(tallied_by(CARD, x, after, spec, axis), blocks_between(x, after, spec, Cut(axis)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 32, 1024])
def test_hadamard_transforms_have_the_bits_of_the_cpu(size: int, dtype: torch.dtype) -> None:
    for groups, inner, signs, is_inverse in TRANSFORMS:
        x = numbers(groups * size * inner, dtype).view(groups, size, inner)
        x[0, 0, 0], x[-1, 1, -1] = torch.finfo(dtype).max, 2.0**-149
        expected = transformed(x, Hadamard(size, signs), 1, torch.tensor(KEY), is_inverse)
        assert same(transformed_by(CARD, x, signs, is_inverse, has_key=False), expected)


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=repr)
def test_products_have_the_bits_of_the_cpu(accumulator: Accumulator) -> None:
    a, b, bias = operands_of_a_product(2, 37, 131, 29)
    for has_bias in (True, False):
        expected = accumulate(a, b, accumulator, bias if has_bias else None, torch.tensor(KEY))
        assert same(product_by(CARD, a, b, bias, has_bias, accumulator), expected)


def decided(function: Any, *arrays: torch.Tensor) -> list[torch.Tensor]:
    sent = [a.clone() for a in arrays]
    kernel = scalar_kernel(function, tuple((str(a.dtype).removeprefix("torch."), a.dim()) for a in sent))
    CARD(kernel, 1, *map(Array, sent))
    return sent


def check_decision(function: Callable[..., None], *arrays: torch.Tensor) -> None:
    got = decided(function, *arrays)
    on_device(function, *arrays)
    assert all(same(a, b) if a.is_floating_point() else torch.equal(a, b) for a, b in zip(got, arrays, strict=True))


@pytest.mark.parametrize("rule", PREDICTING, ids=lambda rule: rule.name)
def test_factors_are_chosen_as_on_the_cpu(rule: type[LayerRule]) -> None:
    for size in SIZES:
        for recompute in (0, RECOMPUTE):
            function, arrays = factor_of(rule, size, recompute)
            check_decision(function, *arrays)


def test_scales_are_chosen_as_on_the_cpu() -> None:
    for size in SIZES:
        for function, arrays in decisions_at(size):
            check_decision(function, *arrays)
