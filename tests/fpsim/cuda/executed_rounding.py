"""The rounding kernels as compiled for a card, run on the CPU against its own. Run by test_executed.py."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from card_inputs import borders, patterns, words_of
from emulated_card import round_words, rounding_program
from format_cases import ALL
from ptx_machine import Program

from fpsim import FloatFormat, as_format
from fpsim.launch import kernel_for, masks_of, rounded
from fpsim.rounding import ROUNDINGS
from fpsim.spec import RoundingSpec, container_width, rounding_spec

gc.set_threshold(50_000, 50, 50)  # Numba makes millions of small objects: an eighth of the time went to looking at them

CONTAINERS = {32: torch.float32, 64: torch.float64}
KEY = 0x0123_4567_89AB_CDEF
SHAPES = ("flat", "grid", "gap", "scale", "unsigned_zero")
# of 10**6 patterns for each format and rule; what is slow takes as many as make 10**9 in all
PATTERNS, MANY = 10**6, 1_700_000


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


def check(program: Program, spec: RoundingSpec, x: np.ndarray, log2_scale: int = 0, masked: bool = False) -> None:
    plan = kernel_for(spec, 8 * x.itemsize).plan
    got, wanted = round_words(program, x, plan, KEY, log2_scale), on_cpu(x, spec, log2_scale, masked)
    different = np.flatnonzero(got != wanted)
    i = different[0] if len(different) else 0
    assert len(different) == 0, (
        f"{spec}: {x[i]:#x} becomes {got[i]:#x}, and {wanted[i]:#x} on the CPU; {len(different)}"
    )


# float64 has more exponents than any format: none is flat there
KERNELS = [
    (rule, shape, width) for rule in range(7) for shape in range(5) for width in (32, 64) if shape or width == 32
]


def of_kernel(value: tuple[int, int, int]) -> str:
    return f"{ROUNDINGS[value[0]]}-{SHAPES[value[1]]}-{value[2]}"


@pytest.mark.parametrize("kernel", KERNELS, ids=of_kernel)
def test_every_format_and_rule_has_the_bits_of_the_cpu(kernel: tuple[int, int, int]) -> None:
    program, random = rounding_program(*kernel), np.random.default_rng(kernel)
    specs = specs_of(*kernel)
    assert specs
    for spec in specs:
        assert isinstance(spec.fmt, FloatFormat)
        check(
            program,
            spec,
            np.concatenate([borders(spec.fmt, kernel[2]), patterns(spec.fmt, kernel[2], PATTERNS, random)]),
        )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=of_kernel)
def test_a_thousand_million_patterns_have_the_bits_of_the_cpu(kernel: tuple[int, int, int]) -> None:
    program, random = rounding_program(*kernel), np.random.default_rng((1, *kernel))
    for spec in specs_of(*kernel):
        assert isinstance(spec.fmt, FloatFormat)
        check(program, spec, patterns(spec.fmt, kernel[2], MANY, random))


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2047, 2049, 4097])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_every_length_is_covered_and_nothing_beyond(rounding: str, width: int, n: int) -> None:
    spec = rounding_spec("e4m3fn", rounding)
    plan = kernel_for(spec, width).plan
    x = patterns(as_format("e4m3fn"), width, n, np.random.default_rng(n))
    check(rounding_program(plan.rule, plan.shape, width), spec, x)


@pytest.mark.parametrize("log2_scale", [-60, -3, 7, 60])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", ["e4m3fn", "dlfloat16", "e5m2fnuz"])
def test_a_scale_has_the_bits_of_the_cpu(name: str, width: int, log2_scale: int) -> None:
    for rounding in ("nearest_even", "stochastic"):
        spec = rounding_spec(name, rounding)
        plan = kernel_for(spec, width).plan
        x = patterns(as_format(name), width, 10_000, np.random.default_rng(5))
        check(rounding_program(plan.rule, plan.shape, width), spec, x, log2_scale)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", ["fp16", "e4m3fn"])
def test_masks_pass_as_on_the_cpu(name: str, rounding: str, width: int) -> None:
    spec = rounding_spec(name, rounding)
    plan, masks = kernel_for(spec, width).plan, masks_of(spec, CONTAINERS[width], width)
    greatest = np.array(torch.finfo(CONTAINERS[width]).max).astype(f"f{width // 8}").view(words_of(width))
    sign = words_of(width)(1 << (width - 1))
    x = patterns(as_format(name), width, 10_000, np.random.default_rng(5))
    x[:4] = greatest, greatest | sign, greatest + words_of(width)(1), (greatest + words_of(width)(1)) | sign
    check(rounding_program(plan.rule, plan.shape, width, masks), spec, x, masked=True)


def test_the_order_of_the_threads_changes_nothing() -> None:
    for rounding in ("nearest_even", "stochastic"):
        plan = kernel_for(rounding_spec("e4m3fn", rounding), 32).plan
        program = rounding_program(plan.rule, plan.shape, 32)
        x = patterns(as_format("e4m3fn"), 32, 3000, np.random.default_rng(5))
        forwards, backwards = (round_words(program, x, plan, KEY, backwards=b) for b in (False, True))
        assert np.array_equal(forwards, backwards)
