"""The CUDA kernels in Numba's simulator, against the CPU loops. Run by test_cuda.py in a process of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import same as alike
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
    Memory,
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
from numba import cuda
from numba.cuda.simulator.kernel import BlockThread

from ada_loss.rules import LayerRule
from fpsim import Accumulator, FloatFormat, as_format
from fpsim.compiling.card import CudaKernel, scalar_kernel
from fpsim.kernels import hadamard, moments, round
from fpsim.kernels import tally as tally_kernels
from fpsim.kernels.core import ROUNDINGS
from fpsim.kernels.round import NO_MASKS, Masks, cuda_loop
from fpsim.kernels.statistics import TALLY_ALONG, TALLY_AMAX, TALLY_DEAD_ZONE, TALLY_NOISE, TALLY_SIGNAL
from fpsim.kernels.threefry import NOISE_BLOCK
from fpsim.tensors import tally
from fpsim.tensors.block_tally import blocks_between
from fpsim.tensors.cuts import Cut
from fpsim.tensors.gemm import accumulate
from fpsim.tensors.hadamard import Hadamard, transformed
from fpsim.tensors.launch import kernel_for, masks_of, rounded
from fpsim.tensors.moments import binades, moments_of, on_device
from fpsim.tensors.reference import noise_of, rounded_in_float64
from fpsim.tensors.shared_scales import amax_pattern, block_plan, block_scales, rounded_blocks, shared_numbers
from fpsim.tensors.spec import rounding_spec

GUARDS = 5
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
        loop(0, 0, blocks, (*memory, len(x), flags, word, *plan.numbers))
        results.append(device.copy_to_host())
    assert (results[0] == results[1]).all()
    assert (results[0][len(x) :] == 77).all()
    return torch.from_numpy(results[0][: len(x)].view(x.numpy().dtype))


class Simulator:
    """The machine that runs the kernels so; see `kernel_cases.Machine`. Guards behind what is written must stay."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads

    def __call__(self, kernel: CudaKernel, blocks: int, *arguments: Any, reads: tuple[Any, ...] = ()) -> None:
        sent: list[Any] = []
        for a in arguments:
            if not isinstance(a, Memory | Array):
                sent.append(cuda.to_device(np.zeros(1, np.int64)) if a is None else a)
                continue
            numbers = a.x.contiguous().numpy()
            if isinstance(a, Memory):
                has_patterns = a.x.is_floating_point() and not a.has_numbers
                numbers = numbers.view(f"u{numbers.itemsize}").ravel() if has_patterns else numbers.ravel()
                numbers = np.concatenate([numbers, np.full(GUARDS, 77, numbers.dtype)])
            sent.append(cuda.to_device(numbers))
        kernel(0, 0, blocks, tuple(sent))
        for a, memory in zip(arguments, sent, strict=True):
            if isinstance(a, Array):
                a.x.copy_(torch.from_numpy(memory.copy_to_host()))
            elif isinstance(a, Memory) and a.is_written:
                numbers = memory.copy_to_host()
                assert (numbers[-GUARDS:] == 77).all()
                a.x.copy_(torch.from_numpy(numbers[:-GUARDS].view(a.x.numpy().dtype)).view(a.x.shape))


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
    [(name, rounding, axis) for name, rounding, shape, axis, _ in BLOCKS if len(shape) == 3],
)
def test_blocks_have_the_bits_of_the_cpu(name: str, rounding: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 34, 3) * torch.exp2(torch.tensor([-149.0, -100, 3, 120])).view(4, 1, 1)
    spec = block_spec(name, rounding)
    x[0, 0], x[2, 3, 0] = beside_numbers(spec), 0.0
    result = rounded_by(Simulator(16), x, spec, axis, has_key=False)
    assert same(result.y, rounded_blocks(x, spec, axis, None, torch.tensor(KEY)))
    assert same(result.scales, block_scales(x, spec, axis).flatten())


@pytest.mark.parametrize(("name", "rounding", "shape", "size"), DENSE[1::3])  # all of them in executed_kernels.py
def test_dense_blocks_have_the_bits_of_the_cpu(name: str, rounding: str, shape: tuple[int, ...], size: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape[0], math.prod(shape[1:])) * torch.exp2(torch.linspace(-148, 120, shape[0]))[:, None]).view(
        shape
    )
    spec = block_spec(name, rounding)
    x.view(-1)[:3], x.view(-1)[-9:] = beside_numbers(spec), 0.0
    result = densely_rounded_by(Simulator(32), x, spec, has_key=False)
    assert result.team == size
    assert same(result.y, rounded_blocks(x, spec, -1, None, torch.tensor(KEY)))
    assert same(result.scales, block_scales(x, spec, -1).flatten())


@pytest.mark.parametrize("name", INFINITIES[1::4])  # all of them in executed_kernels.py
def test_infinities_and_masks_in_blocks_are_those_of_the_cpu(name: str) -> None:
    spec = block_spec(name)
    scale = torch.tensor(0.5) if spec.fmt.is_delayed else None
    for x in infinities():
        expected = rounded_blocks(x, spec, scale=scale)
        assert alike(densely_rounded_by(Simulator(32), x, spec, False, scale).y, expected)
        if spec.fmt.block != "tensor":
            assert alike(rounded_by(Simulator(32), x, spec, -1, False).y, expected)
            found = tallied_by(Simulator(32), x, expected, spec, -1)
            assert torch.equal(found, blocks_between(x, expected, spec, Cut(-1)))


@pytest.mark.parametrize("name", SHARING)
def test_what_blocks_share_is_found_as_on_the_cpu(name: str) -> None:
    spec = block_spec(name)
    plan = block_plan(spec)
    for n, offset in ((1, 0), (299, 1)):
        x = torch.randn(n + offset)[offset:]
        if n > 3:
            x[:3], x[-1] = beside_numbers(spec), -float(x.nan_to_num(0, 0, 0).abs().max()) * 0.99
        *shared, amax = shared_by(Simulator(16), x, spec)
        assert shared == shared_numbers(x, spec.fmt, plan, None)[:2].tolist()
        assert amax == amax_pattern(x, plan)


@pytest.mark.parametrize(("name", "axis"), CHOOSING)
def test_blocks_take_the_nearest_candidate_as_on_the_cpu(name: str, axis: int) -> None:
    x = torch.randn(3, 34, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1.0, 1e20]).view(
        3, 1, 1
    )
    x[1, 3:] = 0.0
    spec = block_spec(name)
    assert torch.equal(chosen_by(Simulator(16), x, spec, axis), rounded_blocks(x, spec, axis))


@pytest.mark.parametrize(("name", "axis"), TALLIED)
def test_blocks_are_tallied_as_on_the_cpu(name: str, axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 34, 3) * torch.exp2(torch.tensor([-130.0, -40, 3])).view(3, 1, 1)
    spec = block_spec(name)
    x[0, 0], x[1, 3:], x[2, 5, 0] = beside_numbers(spec), 0.0, 1e6
    after = rounded_blocks(x, spec, axis)
    assert torch.equal(tallied_by(Simulator(16), x, after, spec, axis), blocks_between(x, after, spec, Cut(axis)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(("groups", "inner", "signs", "is_inverse"), TRANSFORMS)
def test_hadamard_transforms_give_the_bits_of_the_cpu(
    groups: int, inner: int, signs: str | None, is_inverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hadamard, "CUDA_THREADS", 16)
    hadamard.cuda_loop.cache_clear()
    for size, dtype in ((2, torch.float32), (4, torch.float64), (8, torch.float32), (32, torch.float32)):
        x = torch.randn(groups, size, inner, dtype=dtype) * 2.0 ** torch.randint(-9, 9, (groups, size, inner))
        x[0, 0, 0], x[-1, 1, -1] = torch.finfo(dtype).max, 2.0**-149
        expected = transformed(x, Hadamard(size, signs), 1, torch.tensor(KEY), is_inverse)
        assert same(transformed_by(Simulator(None), x, signs, is_inverse, has_key=True), expected)
    hadamard.cuda_loop.cache_clear()


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=repr)
def test_products_have_the_bits_of_the_cpu(accumulator: Accumulator) -> None:
    torch.manual_seed(0)
    a, b, bias = operands_of_a_product(2, 3, 11, 5)
    for has_bias in (True, False):
        expected = accumulate(a, b, accumulator, bias if has_bias else None, torch.tensor(KEY))
        result = product_by(Simulator(16), a, b, bias, has_bias, accumulator)
        assert same(result.nan_to_num(9.0), expected.nan_to_num(9.0))
        assert torch.equal(result.isnan(), expected.isnan())


def gathered(x: torch.Tensor, only_amax: bool = False) -> list[float]:
    results = [gathered_by(Simulator(None), x, only_amax, True, aligned).numpy() for aligned in (False, True)]
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
        assert gathered(x) == pytest.approx(expected, rel=1e-14, abs=0)
        assert gathered(x, only_amax=True)[6] == expected[6]
    for value in (torch.nan, -torch.inf):
        x = torch.tensor([1.0, value, 2.0], dtype=dtype)
        assert gathered(x)[6] == gathered(x, only_amax=True)[6] == np.inf
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
    for aligned in (False, True):
        assert torch.equal(counted_by(Simulator(None), x, power_begins, aligned), expected)


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tally_kernels, "CUDA_THREADS", 4)
    monkeypatch.setattr(moments, "MOMENTS_BLOCKS", 2)
    tally_kernels.cuda_tally.cache_clear()
    yield
    tally_kernels.cuda_tally.cache_clear()


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_elements_are_tallied_as_on_the_cpu(dtype: torch.dtype) -> None:
    x, spec = sample(60, dtype), rounding_spec("fp16")
    after, expected = rounded(x, spec), tally.Accumulator(spec, x.device)
    expected.add(x, after)
    found = tallied_elements(Simulator(4), x, after, expected.limits)
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.exponents, expected.exponents)
    assert found.sums[0] == expected.sums[TALLY_AMAX]
    sums = [float(expected.sums[field]) for field in (TALLY_SIGNAL, TALLY_NOISE, TALLY_DEAD_ZONE, TALLY_ALONG)]
    assert found.sums[1:-1] == pytest.approx(sums[:-1], rel=1e-13, abs=0)
    along = 1e-13 * math.sqrt(sums[0] * sums[1])  # the sum of numbers of both signs
    assert found.sums[-1] == pytest.approx(sums[-1], abs=along)


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log2_scale", SCALES_OF_LOSSES)
def test_losses_are_counted_as_on_the_cpu(log2_scale: int, dtype: torch.dtype) -> None:
    x, scale = sample(60, dtype), torch.tensor([log2_scale])
    after = rounded(x, rounding_spec("e4m3fn", overflow="saturate"), None, scale[0])
    found = lost_by(Simulator(4), x, after, 448.0, log2_scale)
    assert torch.equal(found, tally.lost_between(x, after, 448.0, scale))
    assert (found > 0).all()


def on_the_card(function: Any, *arrays: torch.Tensor) -> list[torch.Tensor]:
    sent = [a.clone() for a in arrays]
    kernel = scalar_kernel(function, tuple((str(a.dtype).removeprefix("torch."), a.dim()) for a in arrays))
    Simulator(None)(kernel, 1, *map(Array, sent))
    return sent


def check_decision(function: Any, *arrays: torch.Tensor) -> None:
    got = on_the_card(function, *arrays)
    on_device(function, *arrays)
    for a, b in zip(got, arrays, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", PREDICTING, ids=lambda rule: rule.name)
def test_factors_are_chosen_as_on_the_cpu(rule: type[LayerRule], size: float) -> None:
    torch.manual_seed(0)
    function, arrays = factor_of(rule, size)
    check_decision(function, *arrays)


def test_scales_are_chosen_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    for size in (*SIZES, torch.nan):
        for function, arrays in decisions_at(size):
            check_decision(function, *arrays)


def test_the_formats_cover_every_shape() -> None:
    shapes = {kernel_for(rounding_spec(fmt), 32).plan.shape for fmt in FORMATS.values()}
    assert shapes == {0, 1, 2, 3, 4}
