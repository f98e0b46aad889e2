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
from emulated_card import DEVICE, STREAM, backwards, load, memory
from ptx_machine import numba_arguments

from ada_loss.layerwise import scale_kernels
from ada_loss.rules import LAYER_RULES, LayerRule
from fpsim import Accumulator, as_accumulator, as_format
from fpsim.kernels import accumulate as products
from fpsim.kernels import block_teams, hadamard, moments
from fpsim.kernels.blocks import WIDE_PLAN
from fpsim.kernels.card import CudaKernel, scalar_kernel
from fpsim.kernels.codebook_tables import table_address, table_at
from fpsim.kernels.core import BOOK
from fpsim.kernels.statistics import AMAX, LOG_MEAN, LOG_MEAN_SQUARE, MEAN, MEAN_SQUARE, SMALLEST_SCALE
from fpsim.tensors.block_tally import blocks_between, limits_of
from fpsim.tensors.gemm import accumulate, summation_of
from fpsim.tensors.hadamard import FIXED_SIGNS, Hadamard, transformed
from fpsim.tensors.moments import binades, moments_of, on_device
from fpsim.tensors.shared_scales import (
    Cut,
    block_axes,
    block_plan,
    block_scales,
    finite_amax,
    in_parts,
    rounded_blocks,
    shared_numbers,
)
from fpsim.tensors.spec import BlockSpec, any_spec

KEY = 0x0123_4567_89AB_CDEF


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
    n, size = x.numel(), x.element_size()
    blocks, integers, floats = moments.partial_words(n, size)
    rows, sums, out = (
        torch.zeros(integers, dtype=torch.int64),
        torch.full((floats,), torch.nan).double(),
        torch.zeros(10),
    )
    out = out.double()
    words, _ = numba_arguments([rows.numpy()])
    with memory(rows, sums, out, reads=(x,)) as (_, sum_address, target, source):
        loop = moments.cuda_moments(size, only_amax, logs)
        arguments = source, n, int(source % 16 == 0), *words, sum_address, target
        loop(DEVICE, STREAM, blocks, arguments)
    return out


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
    bins = torch.zeros(256 if words.itemsize == 4 else 2048, dtype=torch.int64)
    described, _ = numba_arguments([bins.numpy()])
    with memory(bins, reads=(words,)) as (_, source):
        loop = moments.cuda_exponents(words.itemsize, power_begins)
        blocks = moments.partial_words(len(words), words.itemsize)[0]
        loop(DEVICE, STREAM, blocks, (source, len(words), int(source % 16 == 0), *described))
    return bins


@pytest.mark.parametrize("power_begins", [False, True], ids=["ends", "begins"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_binades_are_counted_as_on_the_cpu(power_begins: bool, dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    for n, offset in ((0, 0), (1, 0), (257, 1), (4097, 0), (200_000, 0)):
        words = patterns(as_format("fp16"), width, n + offset, np.random.default_rng(n))[offset:]
        x = torch.from_numpy(words.view(f"f{width // 8}"))  # with NaN, inf and zeros
        assert torch.equal(counted(words, power_begins), binades(x, power_begins)[0])


@pytest.mark.parametrize(
    ("name", "rounding", "shape", "axis", "team"),
    [
        ("mxfp8_e4m3", "nearest_even", (20, 134, 37), 1, 8),
        ("mxfp8_e4m3", "stochastic", (20, 134, 37), -1, 8),
        ("e2m1fn per 4x8 even", "nearest_even", (20, 134, 37), 0, 8),
        ("nvfp4", "nearest_even", (20, 134, 37), -1, 8),
        ("nvfp4", "stochastic", (20, 134, 37), 1, 4),
        ("mxfp4", "nearest_even", (20, 4958), -1, 8),
        ("e4m3fn per 3 fp32", "nearest_even", (20, 4958), -1, 1),
        ("e4m3fn per row fp32", "nearest_even", (20, 134, 37), 1, 32),
        ("e4m3fn per row fp32", "nearest_even", (20, 4958), -1, 256),
        ("e4m3fn per row fp32", "nearest_even", (4958, 20), 0, 32),
        ("e4m3fn per 128x128 fp32", "nearest_even", (370, 268), -1, 256),
        ("e4m3fn per 128x1 fp32", "nearest_even", (370, 268), -1, 32),
        ("nf4 per 32", "nearest_even", (20, 134, 37), 1, 8),
        ("dynamic8 per 32 fp32", "stochastic", (20, 134, 37), -1, 8),
    ],
)
def test_blocks_have_the_bits_of_the_cpu(
    name: str, rounding: str, shape: tuple[int, ...], axis: int, team: int
) -> None:
    x = numbers(math.prod(shape), torch.float32).view(shape)
    x[0, :3].view(3, -1)[:, 0], x[2, 3] = torch.tensor([torch.nan, torch.inf, -0.0]), 0.0
    spec = any_spec(name, rounding)
    assert isinstance(spec, BlockSpec)
    plan, axes = block_plan(spec), block_axes(x.shape, spec.fmt.tile, axis, None)
    largest = int(x.nan_to_num(0, 0, 0).abs().max().view(torch.int32)) if spec.fmt.tensor_scale else -1
    count = int(np.prod(axes.blocks))
    y, scales = torch.full_like(x, 77.0), torch.zeros(count)
    common, key = torch.tensor([-1, largest]), torch.tensor([KEY])
    loop = block_teams.cuda_rounding(plan.rule, plan.shape, plan.scale_shape, plan.kind)
    grid, chosen = block_teams.grid_of(axes, loop.threads)
    assert chosen == team
    tables = [table_at(table_address(plan.parameters[i:])) for i in (0, WIDE_PLAN) if plan.shape >= BOOK]
    with memory(y, scales, reads=(x, common, key, *tables)) as (target, found, source, shared, address, *_):
        arguments = source, target, *axes, *plan.parameters, shared, found, 1, address, 1, 0, team
        loop(DEVICE, STREAM, grid, arguments)
    assert same(y, rounded_blocks(x, spec, axis, None, torch.tensor(KEY)))
    assert same(scales, block_scales(x, spec, axis).flatten())


@pytest.mark.parametrize(
    ("name", "axis"), [("mxfp4", 1), ("e2m1fn per 32 at 0.75", -1), ("nvfp4", 1), ("e4m3fn per tensor fp32", 0)]
)
def test_blocks_are_tallied_as_on_the_cpu(name: str, axis: int) -> None:
    x = torch.randn(30, 134, 9) * torch.exp2(torch.tensor([-130.0, -40, 3])).repeat(10).view(30, 1, 1)
    x[0, 0], x[1, 3:], x[2, 5, 0] = torch.tensor([torch.nan, torch.inf, -0.0] * 3), 0.0, 1e6
    spec = any_spec(name)
    assert isinstance(spec, BlockSpec)
    plan, axes = block_plan(spec), block_axes(x.shape, spec.fmt.tile, axis, None)
    after = rounded_blocks(x, spec, axis)
    whole = finite_amax(x) if spec.fmt.block == "tensor" else torch.tensor(-1)
    shared = torch.cat([shared_numbers(x, spec.fmt, plan, None), whole.reshape(1)])
    if spec.fmt.block == "tensor":
        axes = in_parts(axes, True)
    out = torch.tensor([0] * SMALLEST_SCALE + [2**63 - 1, 0])
    described, _ = numba_arguments([out.numpy()])
    loop = block_teams.cuda_tally(plan.scale_shape, plan.kind)
    grid, team = block_teams.grid_of(axes, loop.threads)
    with memory(out, reads=(x, after, shared)) as (_, source, result, common):
        arguments = source, result, *axes, *plan.parameters, common, *described, *limits_of(spec), team
        loop(DEVICE, STREAM, grid, arguments)
    assert torch.equal(out, blocks_between(x, after, spec, Cut(axis)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 32, 1024])
def test_hadamard_transforms_have_the_bits_of_the_cpu(size: int, dtype: torch.dtype) -> None:
    for groups, inner, signs, is_inverse in (
        (6, 1, None, 0),
        (3, 5, "fixed", 0),
        (3, 5, "random", 1),
        (1, 9, "random", 0),
    ):
        x = numbers(groups * size * inner, dtype).view(groups, size, inner)
        x[0, 0, 0], x[-1, 1, -1] = torch.finfo(dtype).max, 2.0**-149
        y, words = (
            torch.full_like(x, 77.0),
            (FIXED_SIGNS if signs == "fixed" else 0, int(signs == "random"), is_inverse),
        )
        with memory(y, reads=(x,)) as (target, source):
            loop = hadamard.cuda_loop(size, 8 * x.element_size())
            arguments = source, target, groups * inner, inner, *words, 0, 0, KEY
            loop(DEVICE, STREAM, -(-x.numel() // loop.threads), arguments)
        assert same(y, transformed(x, Hadamard(size, signs), 1, torch.tensor(KEY), bool(is_inverse)))


ACCUMULATED = [
    as_accumulator("fp16"),
    as_accumulator("hopper_fp8"),
    Accumulator("e5m2", "stochastic", product="e5m2", product_rounding="stochastic", chunk=4),
    Accumulator("dlfloat16", "up", "saturate", chunk=3, outer="bf16", outer_rounding="stochastic"),
    Accumulator("e4m3fn", "stochastic", group=3, group_bits=9, chunk=8, outer="fp32", outer_rounding="to_odd"),
]


@pytest.mark.parametrize("accumulator", ACCUMULATED, ids=repr)
def test_products_have_the_bits_of_the_cpu(accumulator: Accumulator) -> None:
    batches, m, k, n = 2, 37, 131, 29
    a = (torch.randn(batches, k, m) * torch.exp2(torch.randint(-7, 8, (batches, 1, m)))).mT
    b, bias = torch.randn(k, n).expand(batches, k, n), torch.randn(n).expand(batches, m, n)
    a[0, 0, :3] = torch.tensor([torch.inf, 2.0**-149, -0.0])
    summation = summation_of(accumulator)
    for c in (bias, None):
        y = torch.full((batches, m, n), 77.0)
        of_bias = (0, 0, 0) if c is None else c.stride()
        strides = (*a.stride(), *b.stride(), *of_bias, *y.stride())
        sizes = products.Sizes(batches, m, n, k, *strides, int(c is not None), *summation.ends)
        with memory(y, reads=(a.mT, b[0], bias[0, 0])) as (target, *sources):
            loop = products.cuda_loop(summation.code)
            plans = (integer for plan in summation.plans for integer in plan)
            arguments = *sources, target, *sizes, *plans, 0, 0, KEY
            loop(DEVICE, STREAM, -(-y.numel() // loop.threads), arguments)
        assert same(y, accumulate(a, b, accumulator, c, torch.tensor(KEY)))


def decided(function: Any, *arrays: torch.Tensor) -> list[torch.Tensor]:
    sent = [a.clone() for a in arrays]
    kernel = scalar_kernel(function, tuple((str(a.dtype).removeprefix("torch."), a.dim()) for a in sent))
    words, _ = numba_arguments([a.numpy() for a in sent])
    with memory(*sent):
        kernel(DEVICE, STREAM, 1, tuple(words))
    return sent


def check_decision(function: Callable[..., None], *arrays: torch.Tensor) -> None:
    got = decided(function, *arrays)
    on_device(function, *arrays)
    assert all(same(a, b) if a.is_floating_point() else torch.equal(a, b) for a, b in zip(got, arrays, strict=True))


SIZES = [2.0**-30, 1.0, 2.0**20, 0.0, torch.inf]


@pytest.mark.parametrize("rule", [rule for rule in LAYER_RULES.values() if rule.predicts], ids=lambda rule: rule.name)
def test_factors_are_chosen_as_on_the_cpu(rule: type[LayerRule]) -> None:
    of_format = scale_kernels.Limits(2.0**-24, 65504.0, -112, 70, 16.0, 2.0**20, lost_exponent=-25)
    limits, own = (torch.tensor(values, dtype=torch.float64) for values in (of_format, rule().parameters()))
    kernel = scale_kernels.factor_kernel(rule.core())
    for size in SIZES:
        g, w = moments_of(torch.randn(40) * size), moments_of(torch.randn(30))
        for recompute in (0, scale_kernels.RECOMPUTE):
            head = torch.tensor([3]), g, w, torch.tensor([12]), limits.clone(), own.clone(), torch.tensor([recompute])
            chosen = torch.zeros(len(scale_kernels.CHOSEN)).double()
            check_decision(kernel, *head, torch.ones(1).double(), torch.zeros(1, dtype=torch.int64), chosen)


def test_scales_are_chosen_as_on_the_cpu() -> None:
    of_format = scale_kernels.Limits(2.0**-9, 448.0, -119, 85, torch.inf, torch.inf, lost_exponent=-10)
    limits = torch.tensor(of_format, dtype=torch.float64)
    for size in SIZES:
        x = torch.randn(50) * size
        bins, first = binades(x)
        history = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        head = torch.tensor([5]), moments_of(x), limits
        sufficient = bins, torch.tensor([first]), torch.tensor([0.01], dtype=torch.float64)
        for function, own in (
            (scale_kernels.pass_scale_on, ()),
            (scale_kernels.scale_to_max, (torch.tensor([1]),)),
            (scale_kernels.delayed_scaling, (torch.tensor([0]), history)),
            (scale_kernels.smallest_sufficient_scale, sufficient),
        ):
            ends = torch.zeros(1, dtype=torch.int64), torch.zeros(5).double()
            check_decision(function, *[a.clone() for a in (*head, *own, *ends)])
        scales = torch.tensor([5]), torch.tensor([7]), moments_of(x), torch.zeros(1, dtype=torch.int64)
        check_decision(scale_kernels.retain_last_informative, *scales)
