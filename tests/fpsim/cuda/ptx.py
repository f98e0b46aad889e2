"""The CUDA kernels compiled to PTX without a card. Run by test_cuda.py in a process of its own.

Compiling takes the time, so most of them are the kernels that executed_kernels.py runs, for the same card: a run
compiles them once. Of each kind one is compiled for the oldest card too, which knows the fewest instructions.
"""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from emulated_card import CAPABILITY, FLOATING, ptx_of
from kernel_cases import ACCUMULATORS, BLOCKS, DENSE, PREDICTING, TALLIED, block_spec, decisions_at, factor_of
from numba import types
from numba.cuda import compile_ptx

from fpsim import Accumulator
from fpsim.compiling.compile import for_device
from fpsim.kernels import accumulate, block_dense, block_teams, blocks, hadamard, moments, tally
from fpsim.kernels.block_choice import ERRORS
from fpsim.kernels.core import BOOK, NUMBERS, SEARCHED_BOOK
from fpsim.kernels.round import cuda_kernel, cuda_loop
from fpsim.tensors.gemm import summation_of
from fpsim.tensors.launch import masks_of
from fpsim.tensors.shared_scales import block_plan
from fpsim.tensors.spec import rounding_spec

gc.set_threshold(50_000, 50, 50)  # Numba makes millions of small objects: an eighth of the time went to looking at them

CAPABILITIES = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))
OLDEST = CAPABILITIES[0]


def arguments(width: int) -> tuple[Any, ...]:
    words, integers = types.CPointer(types.uint32 if width == 32 else types.uint64), types.CPointer(types.int64)
    return (words, words, integers, integers, *[types.int64] * 3, types.UniTuple(types.int64, NUMBERS))


@pytest.mark.parametrize(
    "capability",
    [c if c in (CAPABILITIES[0], CAPABILITIES[-1]) else pytest.param(c, marks=pytest.mark.slow) for c in CAPABILITIES],
    ids="cc{0[0]}.{0[1]}".format,
)
def test_the_public_compiler_gives_the_same_kind(capability: tuple[int, int]) -> None:
    text, _ = compile_ptx(cuda_kernel(0, 1, 32), arguments(32), cc=capability)  # a stochastic one takes thrice as long
    assert f".target sm_{capability[0]}{capability[1]}" in str(text)
    assert FLOATING.findall(str(text)) == []


def test_a_floating_point_instruction_would_be_found() -> None:
    def kernel(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[0] * x[1] + x[2]

    for floating in (types.float32, types.float64):
        array = types.Array(floating, 1, "C")
        text, _ = compile_ptx(kernel, (array, array), cc=(9, 0))
        assert FLOATING.findall(str(text)) != []


BLOCK_PLANS = [block_plan(block_spec(name, rounding)) for name, rounding, *_ in BLOCKS]
TEAMS = dict.fromkeys((plan.rule, plan.shape, plan.scale_shape, plan.kind) for plan in BLOCK_PLANS)
# each kind with each of the two rules, of which the table has the others
TEAMS |= dict.fromkeys([(0, 1, 3, 1), (6, 1, 3, 1), (6, 1, 0, 2), (0, 1, 0, 4), (6, 1, 0, 4)])
KINDS = ["power", "gained", "divided", "narrow", "quotient"]


@pytest.mark.parametrize(("rule", "shape", "scale_shape", "kind"), TEAMS)
def test_the_kernels_of_blocks_compile(rule: int, shape: int, scale_shape: int, kind: int) -> None:
    capability = OLDEST if kind == blocks.GAINED else CAPABILITY
    text = ptx_of(block_teams.cuda_rounding(rule, shape, scale_shape, kind), capability)
    assert ".entry" in text
    arithmetic = FLOATING.findall(text)
    if kind == blocks.POWER:  # float32 is moved, never computed with; in float64 a subnormal is made normal, exactly
        assert set(re.findall(r"\s(add|sub|mul|fma|div|max|min|cvt)\.\S*f32", text)) == set()
        assert set(re.findall(r"\s(add|sub|mul|fma|div|max|min|cvt)\.\S*f64", text)) <= {"cvt", "mul"}
    else:
        assert arithmetic != []
        assert "fma" not in text  # each operation is rounded by itself


def test_the_kernels_of_blocks_have_each_kind_with_each_rule() -> None:
    assert {(rule, kind) for rule, _, _, kind in TEAMS} == {(rule, kind) for rule in (0, 6) for kind in range(5)}


DENSE_PLANS = [(block_plan(block_spec(name, rounding)), size) for name, rounding, _, size in DENSE]
DENSE_KERNELS = dict.fromkeys((plan.rule, plan.shape, plan.scale_shape, plan.kind, size) for plan, size in DENSE_PLANS)


DENSE_CASES = [*((kernel, CAPABILITY) for kernel in DENSE_KERNELS), ((0, 1, 1, blocks.POWER, 4), OLDEST)]


@pytest.mark.parametrize(("kernel", "capability"), DENSE_CASES)
def test_the_kernels_of_dense_blocks_divide_no_integer_and_load_16_bytes_at_once(
    kernel: tuple[int, ...], capability: tuple[int, int]
) -> None:
    rule, *_, size = kernel
    text = ptx_of(block_dense.cuda_rounding(*kernel), capability)
    assert re.findall(r"\b(?:div|rem)\.[us]\d+", text) == []
    assert "ld.global.v4.u32" in text
    assert "st.global.v4.u32" in text
    assert ("bar.sync" in text) is (size > 4 or rule == 6)  # where threads have something to tell each other


@pytest.mark.parametrize("kind", range(5), ids=KINDS)
def test_the_kernels_that_tally_blocks_compile(kind: int) -> None:
    plans = [block_plan(block_spec(name)) for name, _ in TALLIED]
    scale_shape = next((plan.scale_shape for plan in plans if plan.kind == kind), 1)
    text = ptx_of(block_teams.cuda_tally(scale_shape, kind), OLDEST if kind == blocks.QUOTIENT else CAPABILITY)
    assert len(re.findall(r"\b(?:atom|red)\.global\.(?:add|min|max)\.\S*64", text)) >= 6


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("error", range(len(ERRORS)), ids=ERRORS)
def test_the_kernels_that_choose_among_candidates_compile(error: int, small: bool) -> None:
    text = ptx_of(block_teams.cuda_choice(error, small), CAPABILITY if small else OLDEST)
    assert "st.global.f64" in text
    assert ("mul.rn.f64" in text or "fma.rn.f64" in text) is (ERRORS[error] == "mse")


@pytest.mark.parametrize(("rule", "shape", "width"), [(0, BOOK, 32), (0, SEARCHED_BOOK, 64), (6, BOOK, 64)])
def test_the_kernels_of_code_books_compile_to_integers(rule: int, shape: int, width: int) -> None:
    text = ptx_of(cuda_loop(rule, shape, width), OLDEST if shape == SEARCHED_BOOK else CAPABILITY)
    assert ".entry" in text
    assert FLOATING.findall(text) == []


# float32 for the oldest card, float64 for the one that runs it
@pytest.mark.parametrize(("size", "capability"), [(4, OLDEST), (8, CAPABILITY)], ids=["float32", "float64"])
def test_the_kernels_of_moments_compile(size: int, capability: tuple[int, int]) -> None:
    for kernel in (
        moments.cuda_moments(size, False, True),
        moments.cuda_moments(size, False, False),
        moments.cuda_moments(size, True, False),
        moments.cuda_exponents(size),
        moments.cuda_exponents(size, True),
    ):
        text = ptx_of(kernel, capability)
        assert ".entry kernel(" in text
        assert f"ld.global.{'v4.u32' if size == 4 else 'v2.u64'}" in text


@pytest.mark.parametrize("width", [32, 64])
def test_the_kernels_that_let_masks_pass_load_no_vectors(width: int) -> None:
    dtype, spec = {32: torch.float32, 64: torch.float64}[width], rounding_spec("e4m3fn", "stochastic")
    text = ptx_of(cuda_loop(6, 1, width, masks_of(spec, dtype, width)))
    assert ".entry kernel(" in text
    assert f"ld.global.{'v4.u32' if width == 32 else 'v2.u64'}" not in text


@pytest.mark.parametrize(("size", "capability"), [(4, OLDEST), (8, CAPABILITY)], ids=["float32", "float64"])
def test_the_kernels_of_tallies_compile(size: int, capability: tuple[int, int]) -> None:
    for kernel, counts in ((tally.cuda_tally(size), 7 + 1), (tally.cuda_lost(size), 3)):
        text = ptx_of(kernel, capability)
        assert ".entry kernel(" in text
        assert len(re.findall(r"\b(?:atom|red)\.shared\.add\.\S*64", text)) >= min(counts, 7)


@pytest.mark.parametrize(("width", "capability"), [(32, OLDEST), (64, CAPABILITY)], ids=["float32", "float64"])
@pytest.mark.parametrize("size", [2, 32, 1024])
def test_the_kernels_of_hadamard_transforms_compile(size: int, width: int, capability: tuple[int, int]) -> None:
    text = ptx_of(hadamard.cuda_loop(size, width), capability)
    assert ".entry" in text
    assert "bar.sync" in text
    # a fused multiply-add or a flush of subnormals would give other bits than the CPU
    assert re.findall(r"\b(?:fma|mad)\.\S*f\d+|\.ftz", text) == []


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=repr)
def test_the_kernel_of_products_compiles_and_computes_in_float64_alone(accumulator: Accumulator) -> None:
    text = ptx_of(accumulate.cuda_loop(summation_of(accumulator).code))
    assert ".entry" in text
    found = {line.group().split()[0] for line in FLOATING.finditer(str(text))}
    # a float32 would have subnormals that a mode flushes; an approximation would differ from the CPU
    allowed = r"(@%p\d+)?(add|sub|mul|fma|neg|abs|setp\.\w+|selp|mov|cvt|ld|st|max|min)\b.*f64.*"
    assert found
    assert [operation for operation in found if not re.match(allowed, operation)] == []
    assert not re.search(r"\.(ftz|approx|f32)\b", str(text))


DECISIONS = [*decisions_at(1.0), *(factor_of(rule, 1.0) for rule in PREDICTING)]


@pytest.mark.parametrize(("function", "arrays"), DECISIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_scale_kernels_compile_for_a_card(function: Any, arrays: tuple[torch.Tensor, ...]) -> None:
    signature = tuple(types.Array(types.float64 if a.is_floating_point() else types.int64, 1, "C") for a in arrays)
    text, _ = compile_ptx(for_device(function), signature, cc=(7, 5))
    assert ".entry" in text
