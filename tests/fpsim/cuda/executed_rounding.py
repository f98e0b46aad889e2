"""The rounding kernels as compiled for a card, run on the CPU against its own, and all in integers.

Run by test_executed.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from card_inputs import borders, everywhere, patterns, words_of
from emulated_card import DEVICE, STREAM, backwards, load_of_integers, memory
from format_cases import ALL

from fpsim import FloatFormat, as_format
from fpsim.compiling.card import CudaKernel
from fpsim.kernels.codebooks import table_address, table_at
from fpsim.kernels.core import BOOK, ROUNDINGS, STOCHASTIC
from fpsim.kernels.round import (
    ALIGNED,
    HAS_KEY,
    HAS_SCALE,
    NO_MASKS,
    Masks,
    cuda_loop,
    elements_of_block,
)
from fpsim.tensors.launch import kernel_for, masks_of, rounded
from fpsim.tensors.spec import RoundingSpec, container_width, rounding_spec

gc.set_threshold(50_000, 50, 50)  # Numba makes millions of small objects: an eighth of the time went to looking at them

CONTAINERS = {32: torch.float32, 64: torch.float64}
KEY = 0x0123_4567_89AB_CDEF
SHAPES = ("flat", "grid", "gap", "scale", "unsigned_zero")
SHORT = 111
# for each format, rule and container; what is slow takes as many as make 10**9 in all
PATTERNS, MANY = 10**5, 1_700_000
# float64 has more exponents than any format: none is flat there
KERNELS = [
    (rule, shape, width) for rule in range(7) for shape in range(5) for width in (32, 64) if shape or width == 32
]
# Compiling is what takes the time: each rule and each shape meets both containers; the other kernels are slow.
SOME = [(rule, rule % 5, 32) for rule in range(7)] + [(rule, 1 + rule % 4, 64) for rule in range(7)]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CudaKernel, "load", load_of_integers)
    yield
    if cuda_loop.cache_info().currsize > 4:  # what LLVM compiled goes with its kernel
        cuda_loop.cache_clear()


def on_card(
    x: np.ndarray, spec: RoundingSpec, log2_scale: int = 0, masks: Masks = NO_MASKS, flags: int = ALIGNED
) -> np.ndarray:
    """What the kernel makes of patterns. It may read and write nothing else."""
    plan = kernel_for(spec, 8 * x.itemsize).plan
    y, scale, key = np.full(len(x), 77, x.dtype), np.array([log2_scale]), np.array([KEY])
    assert x.ctypes.data % 16 == y.ctypes.data % 16 == 0 or not flags & ALIGNED
    flags |= HAS_SCALE if log2_scale else 0
    blocks = -(-len(x) // elements_of_block(plan.rule, plan.width))
    tables = [table_at(table_address(plan.numbers))] if plan.shape >= BOOK else []
    with memory(y, reads=(x, scale, key, *tables)) as (target, *sources):
        source, scale_address, key_address = sources[:3]
        addresses = source, target, scale_address if log2_scale else 0, key_address if flags & HAS_KEY else 0
        word = ~KEY if flags & HAS_KEY else KEY
        loop = cuda_loop(plan.rule, plan.shape, plan.width, masks)
        loop(DEVICE, STREAM, blocks, (*addresses, len(x), flags, word, *plan.numbers))
    return y


def on_cpu(x: np.ndarray, spec: RoundingSpec, log2_scale: int = 0, masked: bool = False) -> np.ndarray:
    scale = torch.tensor(log2_scale) if log2_scale else None
    numbers = torch.from_numpy(x.view(f"f{x.itemsize}").copy())
    return rounded(numbers, spec, torch.tensor(KEY), scale, masked).numpy().view(x.dtype)


def specs_of(rule: int, shape: int, width: int) -> list[RoundingSpec]:
    """Those of all formats that this kernel rounds to."""
    specs = [rounding_spec(fmt, ROUNDINGS[rule]) for fmt in ALL]
    return [
        spec
        for spec in specs
        if container_width(spec, CONTAINERS[width]) == width and kernel_for(spec, width).plan.shape == shape
    ]


def check(got: np.ndarray, wanted: np.ndarray, x: np.ndarray, spec: RoundingSpec) -> None:
    different = np.flatnonzero(got != wanted)
    i = different[0] if len(different) else 0
    assert len(different) == 0, (
        f"{spec}: {x[i]:#x} becomes {got[i]:#x}, and {wanted[i]:#x} on the CPU; {len(different)}"
    )


def ends(x: np.ndarray) -> list[np.ndarray]:
    """Short arrays, which are all end: no thread has all that it rounds at once."""
    return [x[first : first + SHORT].copy() for first in range(0, 24 * SHORT, SHORT)]


def of_kernel(value: tuple[int, int, int]) -> str:
    return f"{ROUNDINGS[value[0]]}-{SHAPES[value[1]]}-{value[2]}"


@pytest.mark.parametrize(
    "kernel", [k if k in SOME else pytest.param(k, marks=pytest.mark.slow) for k in KERNELS], ids=of_kernel
)
def test_every_format_and_rule_has_the_bits_of_the_cpu(kernel: tuple[int, int, int]) -> None:
    random, specs = np.random.default_rng(kernel), specs_of(*kernel)
    assert specs
    for spec in specs:
        assert isinstance(spec.fmt, FloatFormat)
        edges = everywhere(borders(spec.fmt, kernel[2]))
        x = np.concatenate([edges, patterns(spec.fmt, kernel[2], PATTERNS, random)])
        check(on_card(x, spec), on_cpu(x, spec), x, spec)
        check(on_card(edges, spec, flags=HAS_KEY), on_cpu(edges, spec), edges, spec)
        for part in ends(edges):
            check(on_card(part, spec, flags=HAS_KEY), on_cpu(part, spec), part, spec)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(("name", "rounding"), [("nf4", "nearest_even"), ("dynamic8", "stochastic"), ("hif8", "up")])
def test_code_books_have_the_bits_of_the_cpu(name: str, rounding: str, width: int) -> None:
    book, spec = as_format(name), rounding_spec(name, rounding)
    edges = np.array([*book.finite, *book.midpoints], f"f{width // 8}").view(f"u{width // 8}")
    edges = np.concatenate([edges, edges - 1, edges + 1, edges[:1] * 0])
    x = np.concatenate([edges, patterns(as_format("fp16"), width, PATTERNS // 10, np.random.default_rng(width))])
    check(on_card(x, spec), on_cpu(x, spec), x, spec)
    for part in ends(x)[:3]:
        check(on_card(part, spec, flags=HAS_KEY), on_cpu(part, spec), part, spec)


@pytest.mark.parametrize(
    ("variant", "name", "width"),
    [
        ("B", "bf16", 32), ("B", "e8m0fnu", 64), ("C", "fp16", 32), ("C", "dlfloat16", 32), ("C", "e4m3fnuz", 64),
        ("C_ties_to_odd", "bf16", 32), ("C_ties_to_odd", "dlfloat16", 64), ("C_to_odd", "fp16", 32),
        ("C_to_odd", "e8m0fnu", 32), ("C_to_odd", "dlfloat16", 32),
    ],
)  # fmt: skip
def test_every_variant_has_the_bits_of_the_cpu(variant: str, name: str, width: int) -> None:
    random = np.random.default_rng(len(name))
    for r in (1, 4, 30):
        spec = rounding_spec(name, "stochastic", None, r, variant)
        assert isinstance(spec.fmt, FloatFormat)
        edges = everywhere(borders(spec.fmt, width))
        x = np.concatenate([edges, patterns(spec.fmt, width, PATTERNS // 10, random)])
        check(on_card(x, spec), on_cpu(x, spec), x, spec)
        for part in ends(edges)[:3]:
            check(on_card(part, spec, flags=HAS_KEY), on_cpu(part, spec), part, spec)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=of_kernel)
def test_a_thousand_million_patterns_have_the_bits_of_the_cpu(kernel: tuple[int, int, int]) -> None:
    random = np.random.default_rng((1, *kernel))
    for spec in specs_of(*kernel):
        assert isinstance(spec.fmt, FloatFormat)
        x = patterns(spec.fmt, kernel[2], MANY, random)
        check(on_card(x, spec), on_cpu(x, spec), x, spec)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_every_length_is_covered_and_nothing_beyond(rounding: str, width: int) -> None:
    spec = rounding_spec("e4m3fn", rounding)
    for n in (*range(1, 20), 31, 33, *range(111, 132), 255, 256, 257, 1023, 1025, 2047, 2049, 4097):
        x = patterns(as_format("e4m3fn"), width, n, np.random.default_rng(n))
        for flags in (ALIGNED, HAS_KEY):
            check(on_card(x, spec, flags=flags), on_cpu(x, spec), x, spec)


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_memory_that_is_not_aligned_is_rounded_one_by_one(rounding: str) -> None:
    spec, whole = rounding_spec("e4m3fn", rounding), patterns(as_format("e4m3fn"), 32, 5000, np.random.default_rng(0))
    for first in (1, 2, 3):
        x = whole[first:]
        check(on_card(x, spec, flags=0), on_cpu(x, spec), x, spec)


@pytest.mark.parametrize("log2_scale", [-60, -3, 7, 60])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", ["e4m3fn", "dlfloat16", "e5m2fnuz"])
def test_a_scale_has_the_bits_of_the_cpu(name: str, width: int, log2_scale: int) -> None:
    for rounding in ("nearest_even", "stochastic"):
        spec = rounding_spec(name, rounding)
        x = patterns(as_format(name), width, 10_000, np.random.default_rng(5))
        check(on_card(x, spec, log2_scale), on_cpu(x, spec, log2_scale), x, spec)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["fp16", "e4m3fn"])
def test_masks_pass_as_on_the_cpu(name: str, rounding: str, width: int) -> None:
    spec = rounding_spec(name, rounding)
    greatest = np.array(torch.finfo(CONTAINERS[width]).max).astype(f"f{width // 8}").view(words_of(width))
    sign, one = words_of(width)(1 << (width - 1)), words_of(width)(1)
    x = patterns(as_format(name), width, 10_000, np.random.default_rng(5))
    x[:4] = greatest, greatest | sign, greatest + one, (greatest + one) | sign
    masks = masks_of(spec, CONTAINERS[width], width)
    check(on_card(x, spec, masks=masks), on_cpu(x, spec, masked=True), x, spec)


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_the_order_of_the_threads_changes_nothing(rounding: str) -> None:
    spec, x = rounding_spec("e4m3fn", rounding), patterns(as_format("e4m3fn"), 32, 3000, np.random.default_rng(5))
    with backwards():
        check(on_card(x, spec), on_cpu(x, spec), x, spec)


def test_the_rules_are_those_of_the_kernels() -> None:
    assert len(ROUNDINGS) == 7
    assert STOCHASTIC == 6
