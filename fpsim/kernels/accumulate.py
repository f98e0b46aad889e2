"""Matrix products in an accumulator of any format: the CPU loop, and the CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpsim.compiling.compile import cuda, pointer, stack_array, uses_cuda
from fpsim.compiling.deferred import carray, njit
from fpsim.compiling.native import Loop, compiled_loop
from fpsim.kernels.core import NUMBERS, draws_noise, make_numbers_from
from fpsim.kernels.sums import (
    BIAS_NOISE,
    OUTER_NOISE,
    PRODUCT_NOISE,
    SUM_NOISE,
    cut_off,
    make_add,
    make_round_value,
    met_sum,
    narrow,
    product_field,
    sum_field,
    sum_noise,
    widen,
    with_overflow,
)
from fpsim.kernels.threefry import key_words

if TYPE_CHECKING:
    from fpsim.compiling.card import CudaKernel

# A tile of the result: its sums, the terms that are added to them, and the values by which these terms are multiplied
# fit into the first-level cache together, as float64.
ROWS, COLUMNS, DEPTH = 32, 64, 32


class Code(NamedTuple):
    """Compiled-in constants of an accumulator: rules and shapes of sums, products and outer sums, and kind of groups.

    grouped: 0 for no groups, 1 for groups that are aligned with the accumulator, 2 for groups whose products are
        aligned and added before their sum is added to the accumulator.
    """

    rule: int
    shape: int
    product_rule: int
    product_shape: int
    outer_rule: int
    outer_shape: int
    grouped: int


class Sizes(NamedTuple):
    """Sizes and strides, in elements, of the operands a (batch, rows, terms) and b (batch, terms, columns), the bias
    and the result; and the numbers of an accumulator.

    An element's noise depends on its index in the result, which is its offset in memory.
    """

    batches: int
    rows: int
    columns: int
    terms: int
    a_batch: int
    a_row: int
    a_term: int
    b_batch: int
    b_term: int
    b_column: int
    bias_batch: int
    bias_row: int
    bias_column: int
    out_batch: int
    out_row: int
    out_column: int
    has_bias: int
    chunk: int  # number of terms; 0 for a single accumulator
    group: int  # number of products; 0 for no groups
    group_bits: int
    sum_bits: int
    least_a: int  # least exponents of operands, sums and zeros in a group, as fields of a float64; 0 for none
    least_b: int
    least_sum: int
    zero: int
    limit: int  # the magnitude from which on the sum of a group overflows, as the pattern of a float64


def tiles(sizes: Sizes) -> int:
    """Return the number of tiles of the result, which are the units that threads share."""
    return sizes.batches * -(-sizes.rows // ROWS) * -(-sizes.columns // COLUMNS)


SIZES = len(Sizes._fields)


@njit(inline="always")
def _depth(group):
    """Return how many terms are loaded at once: a number of whole groups."""
    return DEPTH if group == 0 else max(DEPTH // group, 1) * group


def memory_of(sizes: Sizes) -> int:
    """Return the bytes of memory that a thread of `cpu_loop` needs, in addition to a few tiles on its stack."""
    return int(8 * (ROWS + COLUMNS) * _depth.py_func(sizes.group))


@njit
def _fill(noise, width, element, step, kind, number, key):
    """Fill in the noise of four roundings, which begin at number 4 * (number // 4), for `width` elements."""
    quad = number // 4
    for j in range(width):
        w0, w1, w2, w3 = sum_noise(element + j * step, kind, quad, key[0], key[1])
        noise[0, j], noise[1, j], noise[2, j], noise[3, j] = w0, w1, w2, w3


@njit
def _load(target, source, first, rows, columns, row_step, column_step, width):
    """Load a block of patterns as float64. Columns beyond the existing ones, up to `width`, become zeros."""
    for i in range(rows):
        for j in range(columns):
            target[i, j] = widen(source[first + i * row_step + j * column_step])
        for j in range(columns, width):
            target[i, j] = 0.0


# `cpu_loop` gives both functions the same arguments: the function for terms ignores `g` and `work`, the function for
# groups ignores `q`.


def _make_block(code: Code) -> Callable[..., Any]:
    """Return a function that adds a block of terms to a tile: sums[r, j] += values[r, t] * terms[t, j], t ascending.

    number: the number of the block's first rounding, for the noise.
    element, row_step, step: the index of the tile's first element in the result, and the strides of rows and columns.
    """
    add, round_product = make_add(code.rule, code.shape), make_round_value(code.product_rule, code.product_shape)
    is_stochastic, is_product_stochastic = draws_noise(code.rule), draws_noise(code.product_rule)

    @njit
    def add_terms(sums, values, terms, rows, count, width, number, element, row_step, step, g, p, q, noise, key, work):
        for r in range(rows):
            for t in range(count):
                # A counter yields four words of noise: noise is drawn at every fourth term, and at the first term of a
                # block.
                lane, value = (number + t) % 4, values[r, t]
                if is_stochastic and (lane == 0 or t == 0):
                    _fill(noise[:4], width, element + r * row_step, step, SUM_NOISE, number + t, key)
                if is_product_stochastic and (lane == 0 or t == 0):
                    _fill(noise[4:], width, element + r * row_step, step, PRODUCT_NOISE, number + t, key)
                for j in range(width):
                    product_word = noise[4 + lane, j] if is_product_stochastic else np.uint32(0)
                    word = noise[lane, j] if is_stochastic else np.uint32(0)
                    sums[r, j] = add(sums[r, j], round_product(value * terms[t, j], product_word, q), word, p)
        return count

    return add_terms  # type: ignore[no-any-return]


def _make_grouped_block(code: Code) -> Callable[..., Any]:
    """Return a function that adds a block group by group, aligned as Accumulator says, and returns how many groups."""
    round_value, is_stochastic = make_round_value(code.rule, code.shape), draws_noise(code.rule)
    meets_later = code.grouped == 2

    @njit
    def add_groups(sums, values, terms, rows, count, width, number, element, row_step, step, g, p, q, noise, key, work):
        group, bits, sum_bits, least_a, least_b, least_sum, zero, limit = g
        tops = work.view(np.int64)
        groups = -(-count // group)
        for r in range(rows):
            for i in range(groups):
                lane, start, end = (number + i) % 4, i * group, min((i + 1) * group, count)
                if is_stochastic and (lane == 0 or i == 0):
                    _fill(noise[:4], width, element + r * row_step, step, SUM_NOISE, number + i, key)
                for j in range(width):
                    # There are two passes over a group: all exponents have to be known before the first bit is cut off.
                    tops[0, j] = 0 if meets_later else sum_field(sums[r, j], least_sum, zero)
                for t in range(start, end):
                    for j in range(width):
                        field = product_field(values[r, t], terms[t, j], least_a, least_b, zero)
                        tops[0, j] = max(tops[0, j], field)
                for j in range(width):
                    work[1, j] = 0.0 if meets_later else cut_off(sums[r, j], tops[0, j], bits)
                for t in range(start, end):
                    for j in range(width):
                        product = values[r, t] * terms[t, j]
                        if meets_later:
                            product = with_overflow(product, product, limit, p.overflow)
                        work[1, j] += cut_off(product, tops[0, j], bits)
                for j in range(width):
                    word = noise[lane, j] if is_stochastic else np.uint32(0)
                    total = work[1, j]
                    if meets_later:
                        total = met_sum(total, tops[0, j], sums[r, j], bits, sum_bits, least_sum)
                    sums[r, j] = with_overflow(round_value(total, word, p), total, limit, p.overflow)
        return groups

    return add_groups  # type: ignore[no-any-return]


@cache
def _make_fold(rule: int, shape: int) -> Callable[..., Any]:
    """Return a function that adds one tile to another with one rounding.

    number: the number of this rounding among the roundings with noise of the same kind.
    """
    add, is_stochastic = make_add(rule, shape), draws_noise(rule)

    @njit
    def fold(outer, inner, rows, width, kind, number, element, row_step, step, p, noise, key):
        for r in range(rows):
            if is_stochastic:
                _fill(noise[:4], width, element + r * row_step, step, kind, number, key)
            for j in range(width):
                word = noise[number % 4, j] if is_stochastic else np.uint32(0)
                outer[r, j] = add(outer[r, j], inner[r, j], word, p)

    return fold  # type: ignore[no-any-return]


@cache
def cpu_loop(code: Code) -> Loop:
    """Return a loop that computes the tiles `first` to `last` of a product, each from +0.

    a_source, b_source, bias_source, out_target: addresses of patterns of float32.
    numbers: the address of Sizes and of the Numbers of sums, products and the outer sum, as int64.
    key_source: the address of two uint32.
    memory: the address of `memory_of` bytes, which only this thread uses.
    The loop runs without the GIL.
    """
    add_block = _make_grouped_block(code) if code.grouped else _make_block(code)
    fold = _make_fold(code.outer_rule, code.outer_shape)
    new_tile, new_noise = stack_array((ROWS, COLUMNS), np.float64), stack_array((8, COLUMNS), np.uint32)
    new_work = stack_array((2, COLUMNS), np.float64)
    of_sums, of_products, of_outer = (make_numbers_from(64, SIZES + i * NUMBERS) for i in range(3))

    @compiled_loop(*code)
    def loop(a_source, b_source, bias_source, out_target, first, last, numbers, key_source, memory):
        s = carray(pointer(numbers), (SIZES + 3 * NUMBERS,), np.int64)
        m, n, k = s[1], s[2], s[3]
        a_batch, a_row, a_term, b_batch, b_term, b_column = s[4], s[5], s[6], s[7], s[8], s[9]
        c_batch, c_row, c_column, out_batch, row_step, step = s[10], s[11], s[12], s[13], s[14], s[15]
        has_bias, chunk, group = s[16], s[17], s[18]
        g = group, s[19], s[20], s[21], s[22], s[23], s[24], s[25]
        p, q, o = of_sums(s), of_products(s), of_outer(s)
        a, b = carray(pointer(a_source), (1,), np.uint32), carray(pointer(b_source), (1,), np.uint32)
        bias, out = carray(pointer(bias_source), (1,), np.uint32), carray(pointer(out_target), (1,), np.uint32)
        key = carray(pointer(key_source), (2,), np.uint32)
        depth = _depth(group)
        values = carray(pointer(memory), (ROWS, depth), np.float64)
        terms = carray(pointer(memory + 8 * ROWS * depth), (depth, COLUMNS), np.float64)
        inner, outer, noise, work = new_tile(), new_tile(), new_noise(), new_work()
        down, across = -(-m // ROWS), -(-n // COLUMNS)
        for tile in range(first, last):
            batch, row, column = tile // (down * across), tile % down * ROWS, tile // down % across * COLUMNS
            rows, columns = min(ROWS, m - row), min(COLUMNS, n - column)
            # Whole vectors are computed, without a remainder loop: elements beyond the columns are dropped.
            width = (columns + 7) // 8 * 8
            element = batch * out_batch + row * row_step + column * step
            inner[:], outer[:] = 0.0, 0.0
            begin, number, folds = 0, 0, 0
            while begin < k:
                # A block of terms ends where its chunk does, so that a fold falls between two blocks.
                border = min(begin - begin % chunk + chunk, k) if chunk > 0 else k
                count = min(depth, border - begin)
                _load(values, a, batch * a_batch + row * a_row + begin * a_term, rows, count, a_row, a_term, count)
                b_first = batch * b_batch + begin * b_term + column * b_column
                _load(terms, b, b_first, count, columns, b_term, b_column, width)
                number += add_block(
                    inner, values, terms, rows, count, width, number, element, row_step, step, g, p, q, noise, key, work
                )
                begin += count
                if chunk > 0 and begin == border:
                    fold(outer, inner, rows, width, OUTER_NOISE, folds, element, row_step, step, o, noise, key)
                    folds += 1
                    inner[:] = 0.0
            sums, spare = (outer, inner) if chunk > 0 else (inner, outer)
            # The bias is added last, as in an epilogue. It is loaded into the tile that is no longer needed.
            if has_bias:
                c_first = batch * c_batch + row * c_row + column * c_column
                _load(spare, bias, c_first, rows, columns, c_row, c_column, width)
                fold(sums, spare, rows, width, BIAS_NOISE, 0, element, row_step, step, o, noise, key)
            for r in range(rows):
                for j in range(columns):
                    out[element + r * row_step + j * step] = narrow(sums[r, j])

    return loop


@njit(forceinline=True)
def _noise_of(element, kind, number, key0, key1):
    return sum_noise(element, kind, number // 4, key0, key1)[number % 4]


@uses_cuda
def cuda_kernel(code: Code) -> Callable[..., None]:
    """Return the body of the CUDA kernel as a Python function: a thread computes one element, in the order of the CPU.

    a, b, bias and out are flat memory of uint32; sizes, sums, products and outer_sums are tuples of int64 as in
    `cpu_loop`. The key is an int64 in memory if `has_key`, else `key_word`.
    """
    add, round_value = make_add(code.rule, code.shape), make_round_value(code.rule, code.shape)
    fold, round_product = make_add(code.outer_rule, code.outer_shape), make_round_value(*code[2:4])
    is_stochastic, is_product_stochastic = draws_noise(code.rule), draws_noise(code.product_rule)
    is_outer_stochastic, is_grouped = draws_noise(code.outer_rule), code.grouped > 0
    meets_later = code.grouped == 2
    none, numbers_from = np.uint32(0), make_numbers_from(64)

    def kernel(a, b, bias, out, sizes, sums, products, outer_sums, key, has_key, key_word):
        batches, m, n, k, a_batch, a_row, a_term, b_batch, b_term, b_column, c_batch, c_row, c_column = sizes[:13]
        out_batch, out_row, out_column, has_bias, chunk, group, bits = sizes[13:20]
        sum_bits, least_a, least_b, least_sum, zero, limit = sizes[20:]
        thread = cuda.grid(1)
        p, q, o = numbers_from(sums), numbers_from(products), numbers_from(outer_sums)
        key0, key1 = key_words(key[0] if has_key else key_word)
        if thread < batches * m * n:
            batch, row, column = thread // (m * n), thread // n % m, thread % n
            element = batch * out_batch + row * out_row + column * out_column
            x, y = batch * a_batch + row * a_row, batch * b_batch + column * b_column
            inner, outer, word = 0.0, 0.0, none
            begin, number, folds = 0, 0, 0
            while begin < k:
                end = min(begin + chunk, k) if chunk > 0 else k
                if is_grouped:
                    for start in range(begin, end, group):
                        stop, top = min(start + group, end), 0 if meets_later else sum_field(inner, least_sum, zero)
                        for t in range(start, stop):
                            value, term = widen(a[x + t * a_term]), widen(b[y + t * b_term])
                            top = max(top, product_field(value, term, least_a, least_b, zero))
                        total = 0.0 if meets_later else cut_off(inner, top, bits)
                        # The products are read and multiplied again: a group may have more products than a thread has
                        # registers.
                        for t in range(start, stop):
                            term = widen(a[x + t * a_term]) * widen(b[y + t * b_term])
                            if meets_later:
                                term = with_overflow(term, term, limit, p.overflow)
                            total += cut_off(term, top, bits)
                        if meets_later:
                            total = met_sum(total, top, inner, bits, sum_bits, least_sum)
                        if is_stochastic:
                            word = _noise_of(element, SUM_NOISE, number, key0, key1)
                        inner = with_overflow(round_value(total, word, p), total, limit, p.overflow)
                        number += 1
                else:
                    for t in range(begin, end):
                        if is_product_stochastic:
                            word = _noise_of(element, PRODUCT_NOISE, t, key0, key1)
                        term = round_product(widen(a[x + t * a_term]) * widen(b[y + t * b_term]), word, q)
                        if is_stochastic:
                            word = _noise_of(element, SUM_NOISE, t, key0, key1)
                        inner = add(inner, term, word, p)
                if chunk > 0:
                    if is_outer_stochastic:
                        word = _noise_of(element, OUTER_NOISE, folds, key0, key1)
                    outer = fold(outer, inner, word, o)
                    folds += 1
                    inner = 0.0
                begin = end
            result = outer if chunk > 0 else inner
            if has_bias:
                if is_outer_stochastic:
                    word = _noise_of(element, BIAS_NOISE, 0, key0, key1)
                result = fold(result, widen(bias[batch * c_batch + row * c_row + column * c_column]), word, o)
            out[element] = narrow(result)

    return kernel


@cache
def cuda_loop(code: Code) -> CudaKernel:
    """Return the kernel with its launch, with a thread for each element of the result."""
    from numba import types

    from fpsim.compiling.card import INTEGER, INTEGERS, WORDS32, CudaKernel, for_card

    numbers, sizes = types.UniTuple(types.int64, NUMBERS), types.UniTuple(types.int64, SIZES)
    signature = *[WORDS32] * 4, sizes, numbers, numbers, numbers, INTEGERS, INTEGER, INTEGER
    # Numba inlines the body: any function that is not inlined would be compiled for each card.
    return CudaKernel(lambda: for_card(cuda_kernel(code)), signature, "accumulate", *code)
