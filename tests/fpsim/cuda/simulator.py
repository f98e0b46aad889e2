"""The CUDA kernels in Numba's simulator, against the CPU loops. Run by test_cuda.py in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda
from numba.cuda.simulator.kernel import BlockThread

from ada_loss.layerwise import scale_kernels
from ada_loss.rules import LAYER_RULES, LayerRule
from fpsim import Accumulator, FloatFormat, as_accumulator, as_format
from fpsim.kernels import accumulate as products
from fpsim.kernels import block_teams, hadamard, moments, round
from fpsim.kernels.card import scalar_kernel
from fpsim.kernels.core import ROUNDINGS
from fpsim.kernels.round import NO_MASKS, Masks, cuda_loop
from fpsim.kernels.statistics import SMALLEST_SCALE
from fpsim.kernels.threefry import NOISE_BLOCK
from fpsim.tensors.block_tally import blocks_between, limits_of
from fpsim.tensors.gemm import accumulate, summation_of
from fpsim.tensors.hadamard import FIXED_SIGNS, Hadamard, transformed
from fpsim.tensors.launch import kernel_for, masks_of, rounded
from fpsim.tensors.moments import binades, moments_of, on_device
from fpsim.tensors.reference import noise_of, rounded_in_float64
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
from fpsim.tensors.spec import BlockSpec, any_spec, rounding_spec

FORMATS = {name: as_format(name) for name in ("bf16", "e4m3fn", "dlfloat16", "e8m0fnu", "e5m2fnuz")}
FORMATS["odd"] = FloatFormat(3, 0, 3, subnormals=False)


def simulated(
    x: torch.Tensor,
    fmt: FloatFormat,
    rounding: str,
    key: int,
    log2_scale: int = 0,
    extra: int = 3,
    masks: Masks = NO_MASKS,
    few: tuple[int | None, str] = (None, "A"),
) -> torch.Tensor:
    """Round through the kernel; `extra` guard elements behind the end must stay.

    Element by element and 16 bytes at once, with the key as a number and in memory: all the same.
    """
    width = 64 if x.dtype is torch.float64 else 32
    plan = kernel_for(rounding_spec(fmt, rounding, None, *few), width).plan
    integer = np.uint64 if width == 64 else np.uint32
    source = np.concatenate([x.numpy().view(integer), np.full(extra, 78, integer)])
    scale, address = (cuda.to_device(np.array([number])) for number in (log2_scale, key))
    results = []
    for flags, word in ((round.ALIGNED, key), (round.HAS_KEY, ~key)):
        device = cuda.to_device(np.full(len(source), 77, integer))
        flags |= round.HAS_SCALE if log2_scale else 0
        memory = cuda.to_device(source), device, scale, address
        blocks = -(-len(x) // round.elements_of_block(plan.rule, width))
        loop = cuda_loop(plan.rule, plan.shape, plan.width, masks)
        loop.threads = round.CUDA_THREADS
        loop(0, 0, blocks, (*memory, len(x), flags, word, *plan.parameters))
        results.append(device.copy_to_host())
    assert (results[0] == results[1]).all()
    assert (results[0][len(x) :] == 77).all()
    return torch.from_numpy(results[0][: len(x)].view(x.numpy().dtype))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int64 if a.dtype is torch.float64 else torch.int32
    return torch.equal(a.view(integer), b.view(integer))


def sample(n: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(n, dtype=torch.float64) * torch.exp2(torch.randint(-45, 36, (n,)))
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149], dtype=torch.float64)
    return x.to(dtype)


def borders(fmt: FloatFormat, dtype: torch.dtype) -> torch.Tensor:
    """Where a rounding of `fmt` changes its mind, each with its neighbours in the container; of both signs."""
    smallest, largest, ulp = fmt.smallest, fmt.largest, fmt.epsilon
    points = [0.0, smallest / 4, smallest / 2, smallest, 1.5 * smallest, 2.5 * smallest, fmt.smallest_normal]
    points += [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 3, largest, largest * (1 + ulp / 4), largest * 2, torch.inf]
    x = torch.tensor(points, dtype=torch.float64).to(dtype)
    infinity, zero = torch.tensor(torch.inf, dtype=dtype), torch.tensor(0.0, dtype=dtype)
    x = torch.cat([x, x.nextafter(infinity), x.nextafter(zero), torch.tensor([torch.nan], dtype=dtype)])
    return torch.cat([x, -x])


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the simulator's threads one after another, for kernels without a barrier.

    The simulator starts them all and polls them. What a thread compiles then waits for the interpreter's lock at each
    call of LLVM: 2.3 s for a rounding that compiles in 0.25 s.
    """

    def start(thread: threading.Thread) -> None:
        threading.Thread.start(thread)
        thread.join()

    monkeypatch.setattr(BlockThread, "start", start)


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_kernel_gives_what_verify_expects(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "CUDA_THREADS", 32)
    fmt, key = FORMATS["e5m2fnuz"], 0x12345678_9ABCDEF0
    x = torch.cat([borders(fmt, torch.float32), sample(NOISE_BLOCK + 21, torch.float32)])
    expected = rounded_in_float64(x.numpy(), fmt, rounding, noise_of(len(x), key))
    found = simulated(x, fmt, rounding, key).double().numpy()
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(found)
    assert np.array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


# each format and each rule in both widths, but few of the pairs: all of them are in executed_rounding.py
ROUNDED = [
    ([*FORMATS][(j + first) % len(FORMATS)], rounding, dtype)
    for first, dtype in ((0, torch.float32), (3, torch.float64))
    for j, rounding in enumerate(ROUNDINGS)
]


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(
    ("name", "rounding", "dtype"),
    [("nf4", "nearest_even", torch.float32), ("dynamic8", "stochastic", torch.float32), ("hif8", "up", torch.float64)],
    ids=str,
)
def test_code_books_have_the_bits_of_the_cpu(
    name: str, rounding: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round, "CUDA_THREADS", 32)
    book = as_format(name)
    x = torch.cat([torch.tensor([*book.finite, *book.midpoints], dtype=dtype)[::5], sample(NOISE_BLOCK, dtype)])
    spec, key = rounding_spec(book, rounding), 0x123456789ABCDEF
    assert same(simulated(x, book, rounding, key), rounded(x, spec, torch.tensor(key)))


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(("name", "rounding", "dtype"), ROUNDED, ids=str)
def test_the_kernel_gives_the_bits_of_the_cpu(
    name: str, rounding: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round, "CUDA_THREADS", 32)  # a thread of the simulator is one of Python's, idle or not
    x = torch.cat([borders(FORMATS[name], dtype), sample(NOISE_BLOCK + 21, dtype)])
    assert NOISE_BLOCK < len(x) < 2 * NOISE_BLOCK  # more than one block of noise, and a tail
    spec, key = rounding_spec(FORMATS[name], rounding), 0x123456789ABCDEF
    expected = rounded(x, spec, torch.tensor(key))
    assert same(simulated(x, FORMATS[name], rounding, key), expected)


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(
    ("variant", "name", "dtype"),
    [("B", "e4m3fn", torch.float32), ("C", "odd", torch.float32), ("C_to_odd", "e5m2fnuz", torch.float64)],
    ids=str,
)
def test_the_kernel_of_a_variant_gives_what_verify_expects(
    variant: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round, "CUDA_THREADS", 32)
    fmt, key = FORMATS[name], 0x12345678_9ABCDEF0
    x = torch.cat([borders(fmt, torch.float32), sample(NOISE_BLOCK + 21, torch.float32)])
    expected = rounded_in_float64(x.numpy(), fmt, "stochastic", noise_of(len(x), key), 3, variant)
    found = simulated(x.to(dtype), fmt, "stochastic", key, few=(3, variant)).double().numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("n", [1, 15, 16, 17, 127, 128, 129, 256, 257, 2049])
def test_every_length_is_covered_and_nothing_beyond(n: int) -> None:
    x = sample(2049, torch.float32)[:n].clone()
    for rounding in ("nearest_even", "stochastic"):
        if rounding == "stochastic" or n < 500:  # 16 threads for 128 numbers: more than one block from 2049 on
            expected = rounded(x, rounding_spec("fp16", rounding), torch.tensor(99))
            got = simulated(x, as_format("fp16"), rounding, 99)
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(
    ("fmt", "rounding", "dtype"),
    [
        ("fp16", "nearest_even", torch.float32),
        ("fp16", "stochastic", torch.float64),
        ("e4m3fn", "nearest_even", torch.float64),
        ("e4m3fn", "stochastic", torch.float32),
    ],
)
def test_masks_pass_as_on_the_cpu(fmt: str, rounding: str, dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).min
    x = torch.tensor([least, -least, -torch.inf, 1.3, -0.7, least / 2, 1e30, torch.inf, torch.nan], dtype=dtype)
    spec = rounding_spec(fmt, rounding)
    expected = rounded(x, spec, torch.tensor(99), None, True)
    assert expected[:3].tolist() == [least, -least, -torch.inf]
    masks = masks_of(spec, dtype, 32 if dtype is torch.float32 else 64)
    assert same(simulated(x, as_format(fmt), rounding, 99, masks=masks), expected)


@pytest.mark.parametrize("log2_scale", [-3, 7, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["e4m3fn", "dlfloat16", "e5m2fnuz"])
def test_the_kernel_rounds_at_a_scale_as_the_cpu_does(name: str, dtype: torch.dtype, log2_scale: int) -> None:
    x = sample(100, dtype) * 2.0**-log2_scale
    expected = rounded(x, rounding_spec(name), None, torch.tensor(log2_scale))
    assert same(simulated(x, as_format(name), "nearest_even", 0, log2_scale), expected)


@pytest.mark.parametrize(
    ("name", "rounding", "axis"),
    [
        ("mxfp8_e4m3", "nearest_even", 1),
        ("mxfp8_e4m3", "stochastic", -1),
        ("e2m1fn per 4x8 even", "nearest_even", 0),
        ("nvfp4", "nearest_even", -1),
        ("nvfp4", "stochastic", 1),
        ("e4m3fn per row fp32", "nearest_even", -1),
    ],
)
def test_blocks_have_the_bits_of_the_cpu(name: str, rounding: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 34, 3) * torch.exp2(torch.tensor([-149.0, -100, 3, 120])).view(4, 1, 1)
    x[0, 0], x[2, 3, 0] = torch.tensor([torch.nan, torch.inf, -0.0]), 0.0
    spec = any_spec(name, rounding)
    assert isinstance(spec, BlockSpec)
    plan, key = block_plan(spec), 0x123456789ABCDEF
    axes = block_axes(x.shape, spec.fmt.tile, axis, None)
    shared = np.array([-1, int(x.nan_to_num(0, 0, 0).abs().max().view(torch.int32)) if spec.fmt.tensor_scale else -1])
    target, scales = cuda.to_device(np.full(x.numel(), 77, np.uint32)), cuda.to_device(np.zeros(2000, np.float32))
    words = plan.rule, plan.shape, plan.scale_shape, plan.kind
    count = int(np.prod(axes.blocks))
    source, common = map(cuda.to_device, (x.numpy().view(np.uint32).flatten(), shared))
    launch = block_teams.cuda_rounding(*words)
    launch.threads = 16
    grid, team = block_teams.grid_of(axes, 16)
    launch(0, 0, grid, (source, target, *axes, *plan.parameters, common, scales, 1, common, 0, key, team))
    got = torch.from_numpy(target.copy_to_host().view(np.float32)).view(x.shape)
    assert same(got, rounded_blocks(x, spec, axis, None, torch.tensor(key)))
    assert same(torch.from_numpy(scales.copy_to_host()[:count]), block_scales(x, spec, axis).flatten())


@pytest.mark.parametrize(
    ("name", "axis"), [("mxfp4", 1), ("e2m1fn per 32 at 0.75", -1), ("nvfp4", 1), ("e4m3fn per tensor fp32", 0)]
)
def test_blocks_are_tallied_as_on_the_cpu(name: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 34, 3) * torch.exp2(torch.tensor([-130.0, -40, 3])).view(3, 1, 1)
    x[0, 0], x[1, 3:], x[2, 5, 0] = torch.tensor([torch.nan, torch.inf, -0.0]), 0.0, 1e6
    spec = any_spec(name)
    assert isinstance(spec, BlockSpec)
    plan, axes = block_plan(spec), block_axes(x.shape, spec.fmt.tile, axis, None)
    after = rounded_blocks(x, spec, axis)
    whole = finite_amax(x) if spec.fmt.block == "tensor" else torch.tensor(-1)
    shared = torch.cat([shared_numbers(x, spec.fmt, plan, None), whole.reshape(1)])
    if spec.fmt.block == "tensor":
        axes = in_parts(axes, True)
    out = cuda.to_device(np.array([0] * SMALLEST_SCALE + [2**63 - 1, 0]))
    patterns = [cuda.to_device(t.numpy().view(np.uint32).flatten()) for t in (x, after)]
    loop = block_teams.cuda_tally(plan.scale_shape, plan.kind)
    loop.threads = 16
    grid, team = block_teams.grid_of(axes, 16)
    loop(0, 0, grid, (*patterns, *axes, *plan.parameters, cuda.to_device(shared.numpy()), out, *limits_of(spec), team))
    assert out.copy_to_host().tolist() == blocks_between(x, after, spec, Cut(axis)).tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(
    ("shape", "signs", "is_inverse"),  # shape: groups, and what lies behind the axis
    [((6, 1), None, False), ((3, 5), "fixed", False), ((3, 5), "random", True), ((1, 9), "random", False)],
    ids=str,
)
def test_hadamard_transforms_give_the_bits_of_the_cpu(
    shape: tuple[int, int], signs: str | None, is_inverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hadamard, "CUDA_THREADS", 16)
    hadamard.cuda_loop.cache_clear()
    key = 0x123456789ABCDEF
    for size, dtype in ((2, torch.float32), (4, torch.float64), (8, torch.float32), (32, torch.float32)):
        groups, inner = shape
        x = torch.randn(groups, size, inner, dtype=dtype) * 2.0 ** torch.randint(-9, 9, (groups, size, inner))
        x[0, 0, 0], x[-1, 1, -1] = torch.finfo(dtype).max, 2.0**-149
        expected = transformed(x, Hadamard(size, signs), 1, torch.tensor(key), is_inverse)
        words = FIXED_SIGNS if signs == "fixed" else 0, int(signs == "random"), int(is_inverse)
        address = cuda.to_device(np.array([key]))
        guarded = cuda.to_device(np.full(x.numel() + 5, 77, x.numpy().dtype))
        source, loop = cuda.to_device(x.numpy().reshape(-1)), hadamard.cuda_loop(size, 8 * x.element_size())
        arguments = source, guarded, groups * inner, inner, *words, address, 1, 0
        loop(0, 0, -(-x.numel() // loop.threads), arguments)
        result = torch.from_numpy(guarded.copy_to_host())
        assert same(result[: x.numel()].view(x.shape), expected)
        assert (result[x.numel() :] == 77).all()
    hadamard.cuda_loop.cache_clear()


ACCUMULATED = [
    as_accumulator("fp16"),
    as_accumulator("hopper_fp8"),
    Accumulator("fp32"),
    Accumulator("e5m2", "stochastic", product="e5m2", product_rounding="stochastic", chunk=4),
    Accumulator("dlfloat16", "up", "saturate", chunk=3, outer="bf16", outer_rounding="stochastic"),
    Accumulator("e4m3fn", "stochastic", group=3, group_bits=9, chunk=8, outer="fp32", outer_rounding="to_odd"),
]


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("accumulator", ACCUMULATED, ids=repr)
def test_products_have_the_bits_of_the_cpu(accumulator: Accumulator) -> None:
    key, (batches, m, k, n) = 0x123456789ABCDEF, (2, 3, 11, 5)
    torch.manual_seed(0)
    a = torch.randn(batches, k, m).mT * torch.exp2(torch.randint(-7, 8, (batches, m, 1)))
    b, bias = torch.randn(k, n).expand(batches, k, n), torch.randn(n).expand(batches, m, n)
    a[0, 0, :3] = torch.tensor([torch.inf, 2.0**-149, -0.0])
    summation = summation_of(accumulator)
    for c in (bias, None):
        target = np.full(batches * m * n + 3, 77, np.uint32)  # guards behind the end must stay
        of_bias = (0, 0, 0) if c is None else c.stride()
        strides = (*a.stride(), *b.stride(), *of_bias, m * n, n, 1)
        sizes = products.Sizes(batches, m, n, k, *strides, int(c is not None), *summation.ends)
        flat = [a.mT, b[0], bias[0, 0]]
        sources = [cuda.to_device(x.contiguous().numpy().view(np.uint32).ravel()) for x in flat]
        plans = (integer for plan in summation.plans for integer in plan)
        device = cuda.to_device(target)
        arguments = *sources, device, *sizes, *plans, sources[0], 0, key
        loop = products.cuda_loop(summation.code)
        loop.threads = 16
        loop(0, 0, -(-batches * m * n // 16), arguments)
        got = device.copy_to_host()
        assert (got[-3:] == 77).all()
        wanted = accumulate(a, b, accumulator, c, torch.tensor(key))
        result = torch.from_numpy(got[:-3].view(np.float32)).reshape(batches, m, n)
        assert same(result.nan_to_num(9.0), wanted.nan_to_num(9.0))
        assert torch.equal(result.isnan(), wanted.isnan())


def gathered(x: np.ndarray, only_amax: bool = False) -> list[float]:
    results = []
    for is_aligned in (0, 1):
        blocks, integers, floats = moments.partial_words(len(x), x.itemsize)
        rows, sums, out = (cuda.to_device(np.zeros(*a)) for a in ((integers, np.int64), (floats,), (10,)))
        words = cuda.to_device(x.view(f"u{x.itemsize}"))
        loop, arguments = (
            moments.cuda_moments(x.itemsize, only_amax, True),
            (words, len(x), is_aligned, rows, sums, out),
        )
        loop.threads = moments.CUDA_THREADS
        loop(0, 0, blocks, arguments)
        results.append(out.copy_to_host())
    # the sums have another order
    np.testing.assert_allclose(*results, rtol=1e-13)
    return list(results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_moments_are_those_of_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CUDA_THREADS", 8)  # one for each field of a row, at least
    monkeypatch.setattr(moments, "MOMENTS_BLOCKS", 3)
    moments.cuda_moments.cache_clear()
    for n in (0, 1, 37):
        x = torch.rand(n).to(dtype) * 2.0**-100  # of one sign: no sum is smaller than its terms
        x[: n // 4] = 0
        x[n // 2 : n // 2 + 1] = -1.0 * 2.0**-110
        expected = moments_of(x, logs=True).tolist()
        assert gathered(x.numpy()) == pytest.approx(expected, rel=1e-14, abs=0)
        assert gathered(x.numpy(), only_amax=True)[6] == expected[6]
    for value in (torch.nan, -torch.inf):
        x = torch.tensor([1.0, value, 2.0], dtype=dtype)
        assert gathered(x.numpy())[6] == gathered(x.numpy(), only_amax=True)[6] == np.inf
    moments.cuda_moments.cache_clear()


@pytest.mark.parametrize("power_begins", [False, True], ids=["ends", "begins"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_binades_are_counted_as_on_the_cpu(
    power_begins: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "CUDA_THREADS", 4)
    monkeypatch.setattr(moments, "MOMENTS_BLOCKS", 2)
    x = sample(60, dtype)
    expected, _ = binades(x, power_begins)
    size = x.element_size()
    for is_aligned in (0, 1):
        bins = cuda.to_device(np.zeros(len(expected), np.int64))
        words = cuda.to_device(x.numpy().view(f"u{size}"))
        loop = moments.cuda_exponents(size, power_begins)
        loop.threads = 4
        loop(0, 0, 2, (words, len(x), is_aligned, bins))
        assert bins.copy_to_host().tolist() == expected.tolist()


def on_the_card(function: Any, *arrays: torch.Tensor) -> list[torch.Tensor]:
    sent = [cuda.to_device(a.numpy().copy()) for a in arrays]
    kinds = tuple((str(a.dtype).removeprefix("torch."), a.dim()) for a in arrays)
    scalar_kernel(function, kinds)(0, 0, 1, tuple(sent))
    return [torch.from_numpy(a.copy_to_host()) for a in sent]


@pytest.mark.parametrize("size", [2.0**-30, 1.0, 2.0**20, 0.0, torch.inf])
@pytest.mark.parametrize("rule", [rule for rule in LAYER_RULES.values() if rule.predicts], ids=lambda rule: rule.name)
def test_factors_are_chosen_as_on_the_cpu(rule: type[LayerRule], size: float) -> None:
    torch.manual_seed(0)
    g, w = moments_of(torch.randn(40) * size), moments_of(torch.randn(30))
    limits = torch.tensor(
        scale_kernels.Limits(2.0**-24, 65504.0, -112, 70, 16.0, 2.0**20, lost_exponent=-25), dtype=torch.float64
    )
    arrays = [
        torch.tensor([3]),
        g,
        w,
        torch.tensor([12]),
        limits,
        torch.tensor(rule().parameters(), dtype=torch.float64),
    ]
    arrays += [torch.tensor([scale_kernels.RECOMPUTE]), torch.ones(1).double()]
    arrays += [torch.zeros(1, dtype=torch.int64), torch.zeros(len(scale_kernels.CHOSEN)).double()]
    got = on_the_card(scale_kernels.factor_kernel(rule.core()), *arrays)
    on_device(scale_kernels.factor_kernel(rule.core()), *arrays)
    for a, b in zip(got, arrays, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_scales_are_chosen_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    limits = torch.tensor(
        scale_kernels.Limits(2.0**-9, 448.0, -119, 85, torch.inf, torch.inf, lost_exponent=-10), dtype=torch.float64
    )
    for size in (2.0**-30, 2.0**12, 0.0, torch.nan):
        x = torch.randn(50) * size
        bins, first = binades(x)
        history = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        head = torch.tensor([5]), moments_of(x), limits
        for function, own in (
            (scale_kernels.pass_scale_on, ()),
            (scale_kernels.scale_to_max, (torch.tensor([1]),)),
            (scale_kernels.delayed_scaling, (torch.tensor([0]), history)),
            (
                scale_kernels.smallest_sufficient_scale,
                (bins, torch.tensor([first]), torch.tensor([0.01], dtype=torch.float64)),
            ),
        ):
            arrays = [a.clone() for a in (*head, *own, torch.zeros(1, dtype=torch.int64), torch.zeros(5).double())]
            got = on_the_card(function, *arrays)
            on_device(function, *arrays)
            for a, b in zip(got, arrays, strict=True):
                assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
        scales = torch.tensor([5]), torch.tensor([7]), head[1], torch.zeros(1, dtype=torch.int64)
        assert int(on_the_card(scale_kernels.retain_last_informative, *scales)[3]) == (5 if 0 < size < torch.inf else 7)


def test_the_formats_cover_every_shape() -> None:
    shapes = {kernel_for(rounding_spec(fmt), 32).plan.shape for fmt in FORMATS.values()}
    assert shapes == {0, 1, 2, 3, 4}
