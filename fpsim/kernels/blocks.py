"""Blocks: the loops that find the scale of each block and round its elements at that scale.

A tensor is seen as (outer, R, middle, C, inner), contiguous, in blocks of `r` by `c` along R and C. Where `inner` is 1 a
block's elements lie side by side ("along" the memory); otherwise neighbours in memory belong to neighbouring blocks
("across"). A block whose scales are powers of two is rounded by integers alone, see rounding.at_scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from fpsim.kernels.compile import compiled_loop, pointer
from fpsim.kernels.round import exchange_halves, fill_noise, noise_words
from fpsim.rounding import NOISE_BLOCK, NOISE_LANES, STOCHASTIC, make_at_scale, make_round

cuda: Any = None  # numba-cuda's module once it is needed; a global, because the simulator swaps it in those

# How a scale follows from amax. It selects the code that is compiled.
POWER = 0  # a power of two, see SCALE_RULES in fpsim.blocks
GAINED = 1  # a power of two, and elements are rounded at a multiple of their size
DIVIDED = 2  # largest / amax in float32, by which elements are multiplied
NARROW = 3  # amax / largest in a format of its own, beneath a float32 for the tensor

FLOOR, CEIL, EVEN, NEAREST = range(4)


class BlockPlan(NamedTuple):
    """A block format and a rounding of its elements as what a kernel takes."""

    rule: int
    shape: int
    scale_shape: int
    kind: int
    parameters: tuple[int, ...]


# Where things are in the parameters of a BlockPlan.
NARROW_PLAN = 0  # of the elements in 32 bits, 8 integers
WIDE_PLAN = 8  # of the elements in 64 bits, for scales at which float32's own subnormals would be in the way
SCALE_PLAN = 16  # of the scale's format, 8 integers
SCALE_RULE = 24
EMAX = 25  # the exponent of the largest element
LARGEST_MANTISSA = 26  # its float32 mantissa field
HALF_ULP = 27  # of an element's significand, in units of a float32's last place
LEAST_EXPONENT, MOST_EXPONENT = 28, 29  # of a scale
LEAST_SHIFT, MOST_SHIFT = 30, 31  # of log2 of what elements are multiplied by, in 32 bits
LARGEST, GAIN, SCALE_LARGEST = 32, 33, 34  # as float32 patterns
PARAMETERS = 35

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
MANTISSA = np.uint32(0x007FFFFF)
IMPLICIT = np.uint32(0x00800000)
SQRT2_MANTISSA = np.uint32(3474675)  # floor(2**23 * (sqrt(2) - 1)): no float32 is sqrt(2)
FLOAT32_LARGEST = np.float32(np.finfo(np.float32).max)


def _bitcast(source: Any, target: Any, kind: Any) -> Any:
    def bitcast(typingctx: Any, x: Any) -> Any:
        if x != source:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kind)

        return target(source), generate

    return intrinsic(bitcast)


_to_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))
_to_float = _bitcast(types.uint32, types.float32, ir.FloatType())


@njit(inline="always")
def bits_of(x):  # type: ignore[no-untyped-def]
    return _to_bits(np.float32(x))


@njit(inline="always")
def float_of(bits):  # type: ignore[no-untyped-def]
    return _to_float(np.uint32(bits))


@njit(inline="always")
def finite_magnitude(word):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(word & MAGNITUDE)
    return magnitude if magnitude < INFINITY else np.uint32(0)


@njit(inline="always")
def exponent_of_scale(amax, scale_rule, emax, largest_mantissa, half_ulp, least, most):  # type: ignore[no-untyped-def]
    """log2 of the scale of a block whose largest finite magnitude has the pattern `amax`; `least` for zero."""
    mantissa = np.uint32(amax & MANTISSA)
    exponent = np.int32(amax >> np.uint32(23))
    if exponent == np.int32(0):
        exponent = np.int32(1)
        while np.uint32(0) < mantissa < IMPLICIT:  # a subnormal: 23 steps at most
            mantissa = np.uint32(mantissa << np.uint32(1))
            exponent = np.int32(exponent - np.int32(1))
        mantissa = np.uint32(mantissa & MANTISSA)
    up = np.int32(0)
    if scale_rule == CEIL:
        up = np.int32(mantissa > np.uint32(largest_mantissa))
    elif scale_rule == EVEN:
        up = np.int32(np.uint32(mantissa + np.uint32(half_ulp)) >= IMPLICIT)
    elif scale_rule == NEAREST:
        up = np.int32(mantissa > SQRT2_MANTISSA)
    found = np.int32(exponent - np.int32(127) - np.int32(emax) + up)
    found = np.int32(max(np.int32(least), min(np.int32(most), found)))
    return found if amax != np.uint32(0) else np.int32(least)


@njit(inline="always")
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2**exponent as a float32 pattern, for exponents from -149 to 127."""
    if exponent >= np.int32(-126):
        return np.uint32(np.uint32(exponent + np.int32(127)) << np.uint32(23))
    return np.uint32(np.uint32(1) << np.uint32(exponent + np.int32(149)))


@njit(inline="always")
def widened(word):  # type: ignore[no-untyped-def]
    """The float64 pattern of a float32's, by integers."""
    sign = np.uint64(np.uint64(word >> np.uint32(31)) << np.uint64(63))
    field, mantissa = np.int64((word & MAGNITUDE) >> np.uint32(23)), np.uint32(word & MANTISSA)
    if field == np.int64(0):
        if mantissa == np.uint32(0):
            return sign
        field = np.int64(1)
        while mantissa < IMPLICIT:
            mantissa = np.uint32(mantissa << np.uint32(1))
            field = np.int64(field - np.int64(1))
        mantissa = np.uint32(mantissa & MANTISSA)
    field = np.int64(2047) if field == np.int64(255) else np.int64(field + np.int64(1023 - 127))
    return np.uint64(
        sign | np.uint64(np.uint64(field) << np.uint64(52)) | np.uint64(np.uint64(mantissa) << np.uint64(29))
    )


@njit(inline="always")
def narrowed(bits):  # type: ignore[no-untyped-def]
    """The float32 pattern of a float64's whose value a float32 holds."""
    sign = np.uint32(np.uint32(bits >> np.uint64(63)) << np.uint32(31))
    field = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    mantissa = np.uint64(bits & np.uint64((1 << 52) - 1))
    if field == np.int64(2047):
        return np.uint32(sign | INFINITY | np.uint32(mantissa >> np.uint64(29)))
    exponent = np.int64(field - np.int64(1023))
    if exponent >= np.int64(-126):
        return np.uint32(
            sign
            | np.uint32(np.uint32(exponent + np.int64(127)) << np.uint32(23))
            | np.uint32(mantissa >> np.uint64(29))
        )
    if field == np.int64(0):
        return sign
    significand = np.uint64(mantissa | np.uint64(1 << 52))
    return np.uint32(sign | np.uint32(significand >> np.uint64(np.int64(29 - 126) - exponent)))


class Functions(NamedTuple):
    """The scalar functions of one BlockPlan, for the CPU's loops and the CUDA kernels alike."""

    tensor_scale: Callable[..., Any]
    numbers: Callable[..., Any]
    apply: Callable[..., Any]
    apply_wide: Callable[..., Any]


@cache
def functions(rule: int, shape: int, scale_shape: int, kind: int) -> Functions:
    """What is computed once for a block, and what for each of its elements.

    numbers(amax, shared, parameters): (origin, largest, overflow, smallest, by, back, and log2 of the power of two or
    whether it is too far for 32 bits), where elements are multiplied `by` before and `back` after they are rounded.
    """
    round_bits, at_scale = make_round(rule, shape, 32), make_at_scale(32)
    round_wide, at_wide_scale = make_round(rule, shape, 64), make_at_scale(64)
    round_scale = make_round(0, scale_shape, 32)
    u32, i32, i64, f32 = np.uint32, np.int32, np.int64, np.float32

    @njit(inline="always")
    def tensor_scale(tensor_amax, p):  # type: ignore[no-untyped-def]
        if tensor_amax <= i64(0):
            return f32(1)
        top = f32(float_of(u32(p[SCALE_LARGEST])) * float_of(u32(p[LARGEST])))
        return min(f32(top / float_of(u32(tensor_amax))), FLOAT32_LARGEST)

    @njit(inline="always")
    def numbers(amax, shared, tensor_amax, p):  # type: ignore[no-untyped-def]
        """amax: of the block's finite elements. shared: what to take instead where it is not negative."""
        origin, largest, overflow, smallest = i32(p[1]), u32(p[2]), u32(p[3]), u32(p[4])
        by, back, exponent = f32(1), f32(1), i32(0)
        if kind == POWER or kind == GAINED:
            a = u32(shared) if shared >= i64(0) else u32(amax)
            exponent = exponent_of_scale(
                a, p[SCALE_RULE], p[EMAX], p[LARGEST_MANTISSA], p[HALF_ULP], p[LEAST_EXPONENT], p[MOST_EXPONENT]
            )
            shift = i64(max(p[LEAST_SHIFT], min(p[MOST_SHIFT], -i64(exponent))))
            origin, largest, overflow, smallest = at_scale(p[1], p[2], p[3], p[4], shift)
            back = float_of(power_of_two(exponent))  # the scale itself
            by = float_of(u32(p[GAIN]))
        elif kind == DIVIDED:
            if shared >= i64(0):
                by = float_of(u32(shared))
            elif amax != u32(0):
                by = min(f32(float_of(u32(p[LARGEST])) / float_of(amax)), FLOAT32_LARGEST)
            back = f32(f32(1) / by)
        else:
            a = u32(shared) if shared >= i64(0) else u32(amax)
            whole = tensor_scale(tensor_amax, p)
            wanted = f32(float_of(a) * f32(whole * f32(f32(1) / float_of(u32(p[LARGEST])))))
            rounded = round_scale(
                bits_of(wanted), u32(0), i32(p[16]), i32(p[17]), u32(p[18]), u32(p[19]), u32(p[20]), u32(p[21]),
                u32(p[22]), u32(p[23]),
            )  # fmt: skip
            back = float_of(rounded)
            divisor = f32(back * f32(f32(1) / whole))
            by = FLOAT32_LARGEST if divisor == f32(0) else min(f32(f32(1) / divisor), FLOAT32_LARGEST)
        return origin, largest, overflow, smallest, by, back, exponent

    @njit(inline="always")
    def apply(word, noise, shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole):  # type: ignore[no-untyped-def]
        """One element, in 32 bits."""
        if kind == POWER:
            return round_bits(word, noise, shift, origin, largest, overflow, smallest, zero_sign, used, odd)
        scaled = bits_of(float_of(word) * by)
        r = round_bits(scaled, noise, shift, origin, largest, overflow, smallest, zero_sign, used, odd)
        if kind == GAINED:
            return bits_of(float_of(r) / by)
        if kind == DIVIDED:
            return bits_of(float_of(r) * back)
        return bits_of(f32(float_of(r) * back) / whole)

    @njit(inline="always")
    def apply_wide(word, noise, exponent, p):  # type: ignore[no-untyped-def]
        """One element of a block whose scale is too far for 32 bits. Powers of two alone go so far."""
        by = float_of(u32(p[GAIN]))
        scaled = bits_of(float_of(word) * by) if kind == GAINED else u32(word)
        o, la, ov, s = at_wide_scale(p[9], p[10], p[11], p[12], -i64(exponent))
        bits = np.uint64(np.uint64(noise) << np.uint64(32))
        used = np.uint64(np.uint64(p[14]) << np.uint64(32))
        r = narrowed(
            round_wide(widened(scaled), bits, i64(p[8]), o, la, ov, s, np.uint64(p[13]), used, np.uint64(p[15]))
        )
        return bits_of(float_of(r) / by) if kind == GAINED else r

    return Functions(tensor_scale, numbers, apply, apply_wide)


@njit(inline="always")
def element_noise(index, key0, key1):  # type: ignore[no-untyped-def]
    """The noise word of one element, see rounding.NOISE_BLOCK."""
    block, place = index // NOISE_BLOCK, index % NOISE_BLOCK
    part, lane = place // NOISE_LANES, place % NOISE_LANES
    w0, w1, w2, w3 = noise_words(block * NOISE_LANES + lane, key0, key1)
    word = w0 if part < 2 else (w1 if part < 4 else (w2 if part < 6 else w3))
    return exchange_halves(word) if part % 2 else word


@njit(inline="always")
def is_near(exponent, p):  # type: ignore[no-untyped-def]
    """Whether elements can be rounded at this scale in 32 bits."""
    return p[LEAST_SHIFT] <= -np.int64(exponent) <= p[MOST_SHIFT]


@cache
def cpu_amax() -> Callable[..., int]:
    """The pattern of the largest finite magnitude of `n` float32 at address `src`."""

    @compiled_loop()
    def loop(src, n):  # type: ignore[no-untyped-def]
        x = carray(pointer(src), (n,), np.uint32)
        amax = np.uint32(0)
        for i in range(n):
            amax = max(amax, finite_magnitude(x[i]))
        return np.int64(amax)

    return loop


@cache
def cpu_along(rule: int, shape: int, scale_shape: int, kind: int, size: int) -> Callable[..., None]:
    """Round blocks whose elements lie side by side: `inner` is 1.

    size: the length of a block along C where it is compiled in; 0 for any.
    Addresses: src, dst; parameters (of a BlockPlan); key (two uint32); shared (two int64: a pattern to take instead of
    every block's own number, or -1, and the pattern of the tensor's amax); scales (float32, one for a block; 0 for
    nowhere). Blocks `first` to `last` are rounded, counted by outer, R, middle and C.
    """
    tensor_scale, numbers, apply, apply_wide = functions(rule, shape, scale_shape, kind)
    u32, i32 = np.uint32, np.int32

    @njit(inline="always")
    def run(xs, ys, count, start, noise, have, k, p, origin, largest, overflow, smallest, by, back, whole):  # type: ignore[no-untyped-def]
        shift, zero_sign, used, odd = i32(p[0]), u32(p[5]), u32(p[6]), u32(p[7])
        if rule != STOCHASTIC:
            for i in range(count):
                ys[i] = apply(
                    xs[i], u32(0), shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole
                )
            return have
        done = 0
        while done < count:
            block, place = (start + done) // NOISE_BLOCK, (start + done) % NOISE_BLOCK
            if block != have:
                fill_noise(noise, block, k[0], k[1])
                have = block
            length = min(NOISE_BLOCK - place, count - done)
            xp, yp, np_ = xs[done : done + length], ys[done : done + length], noise[place : place + length]
            for i in range(length):
                yp[i] = apply(
                    xp[i], np_[i], shift, zero_sign, used, odd, origin, largest, overflow, smallest, by, back, whole
                )
            done += length
        return have

    @njit(inline="always")
    def run_far(xs, ys, count, start, k, p, exponent, at_zero):  # type: ignore[no-untyped-def]
        for i in range(count):
            if u32(xs[i] & MAGNITUDE) == u32(0):
                ys[i] = u32(xs[i] & at_zero)
            else:
                bits = element_noise(start + i, k[0], k[1]) if rule == STOCHASTIC else u32(0)
                ys[i] = apply_wide(xs[i], bits, exponent, p)

    @compiled_loop(rule, shape, scale_shape, kind, size, error_model="numpy")
    def loop(src, dst, dims, parameters, key, shared, scales, first, last):  # type: ignore[no-untyped-def]
        d = carray(pointer(dims), (7,), np.int64)
        outer, rows_all, middle, columns_all, inner, r, c = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
        p = carray(pointer(parameters), (PARAMETERS,), np.int64)
        k = carray(pointer(key), (2,), np.uint32)
        common = carray(pointer(shared), (2,), np.int64)
        n = outer * rows_all * middle * columns_all
        x, y = carray(pointer(src), (n,), np.uint32), carray(pointer(dst), (n,), np.uint32)
        row_blocks, column_blocks = -(-rows_all // r), -(-columns_all // c)
        found = carray(pointer(scales), (outer * row_blocks * middle * column_blocks,), np.float32)
        noise, have = np.empty(NOISE_BLOCK, np.uint32), -1
        whole = tensor_scale(common[1], p)
        column, rest = first % column_blocks, first // column_blocks
        m, rest = rest % middle, rest // middle
        row, o = rest % row_blocks, rest // row_blocks
        for unit in range(first, last):
            begin, width = column * c, min(c, columns_all - column * c)
            height = min(r, rows_all - row * r)
            base = ((o * rows_all + row * r) * middle + m) * columns_all + begin
            step = middle * columns_all
            amax = u32(0)
            if common[0] < 0:
                for i in range(height):
                    xs = x[base + i * step : base + i * step + width]
                    if size and width == size:
                        for j in range(size):
                            amax = max(amax, finite_magnitude(xs[j]))
                    else:
                        for j in range(width):
                            amax = max(amax, finite_magnitude(xs[j]))
            origin, largest, overflow, smallest, by, back, exponent = numbers(amax, common[0], common[1], p)
            if scales != 0:
                found[unit] = back
            near = kind > GAINED or is_near(exponent, p)
            for i in range(height):
                start = base + i * step
                xs, ys = x[start : start + width], y[start : start + width]
                if not near:
                    run_far(xs, ys, width, start, k, p, exponent, u32(p[5]))
                elif size and width == size:
                    have = run(
                        xs, ys, size, start, noise, have, k, p, origin, largest, overflow, smallest, by, back, whole
                    )
                else:
                    have = run(
                        xs, ys, width, start, noise, have, k, p, origin, largest, overflow, smallest, by, back, whole
                    )
            column += 1
            if column == column_blocks:
                column = 0
                m += 1
                if m == middle:
                    m = 0
                    row += 1
                    if row == row_blocks:
                        row = 0
                        o += 1

    return loop


LANES = 256  # neighbours in memory that are rounded side by side; fewer where a block is long, to stay in the cache
LONG_BLOCK, LANES_OF_LONG = 128, 64


def lanes_of(r: int, c: int) -> int:
    """How many lanes a unit of work of `cpu_across` has."""
    return LANES if r * c <= LONG_BLOCK else LANES_OF_LONG


@cache
def cpu_across(rule: int, shape: int, scale_shape: int, kind: int) -> Callable[..., None]:
    """Round blocks whose neighbours in memory belong to other blocks: `inner` is above 1.

    As cpu_along, but a unit of work is `lanes_of` blocks side by side; units are counted by outer, R, middle, C, lanes.
    """
    tensor_scale, numbers, apply, apply_wide = functions(rule, shape, scale_shape, kind)
    u32, i32 = np.uint32, np.int32

    @njit(inline="always")
    def round_run(xs, ys, start, count, noise, have, k, p, numbers_of, by, back, whole):  # type: ignore[no-untyped-def]
        shift, zero_sign, used, odd = i32(p[0]), u32(p[5]), u32(p[6]), u32(p[7])
        origins, largests, overflows, smallests = numbers_of
        done = 0
        while done < count:
            length = count - done
            if rule == STOCHASTIC:
                block, place = (start + done) // NOISE_BLOCK, (start + done) % NOISE_BLOCK
                if block != have:
                    fill_noise(noise, block, k[0], k[1])
                    have = block
                length = min(NOISE_BLOCK - place, length)
                words = noise[place : place + length]
            else:
                words = noise
            xp, yp = xs[done : done + length], ys[done : done + length]
            os, ls = origins[done : done + length], largests[done : done + length]
            vs, ss = overflows[done : done + length], smallests[done : done + length]
            bs, ks = by[done : done + length], back[done : done + length]
            for i in range(length):
                word = words[i] if rule == STOCHASTIC else u32(0)
                yp[i] = apply(xp[i], word, shift, zero_sign, used, odd, os[i], ls[i], vs[i], ss[i], bs[i], ks[i], whole)
            done += length
        return have

    @compiled_loop(rule, shape, scale_shape, kind, error_model="numpy")
    def loop(src, dst, dims, parameters, key, shared, scales, first, last):  # type: ignore[no-untyped-def]
        d = carray(pointer(dims), (7,), np.int64)
        outer, rows_all, middle, columns_all, inner, r, c = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
        p = carray(pointer(parameters), (PARAMETERS,), np.int64)
        k = carray(pointer(key), (2,), np.uint32)
        common = carray(pointer(shared), (2,), np.int64)
        n = outer * rows_all * middle * columns_all * inner
        x, y = carray(pointer(src), (n,), np.uint32), carray(pointer(dst), (n,), np.uint32)
        row_blocks, column_blocks = -(-rows_all // r), -(-columns_all // c)
        found = carray(pointer(scales), (outer * row_blocks * middle * column_blocks * inner,), np.float32)
        lanes = LANES if r * c <= LONG_BLOCK else LANES_OF_LONG
        lane_blocks = -(-inner // lanes)
        noise, have = np.empty(NOISE_BLOCK, np.uint32), -1
        amaxes, largests = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
        overflows, smallests = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
        origins, exponents = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
        by, back = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        numbers_of = (origins, largests, overflows, smallests)
        whole = tensor_scale(common[1], p)
        for unit in range(first, last):
            rest, lane_block = unit // lane_blocks, unit % lane_blocks
            block = rest
            rest, column = rest // column_blocks, rest % column_blocks
            rest, m = rest // middle, rest % middle
            o, row = rest // row_blocks, rest % row_blocks
            lane = lane_block * lanes
            width = min(lanes, inner - lane)
            columns, height = min(c, columns_all - column * c), min(r, rows_all - row * r)
            base = (((o * rows_all + row * r) * middle + m) * columns_all + column * c) * inner + lane
            step = middle * columns_all * inner
            amaxes[:] = u32(0)
            for i in range(height):
                for j in range(columns):
                    start = base + i * step + j * inner
                    xs = x[start : start + width]
                    for lane in range(width):
                        amaxes[lane] = max(amaxes[lane], finite_magnitude(xs[lane]))
            far = False
            for lane in range(width):
                origin, largest, overflow, smallest, b, s, e = numbers(amaxes[lane], common[0], common[1], p)
                origins[lane], largests[lane], overflows[lane], smallests[lane] = origin, largest, overflow, smallest
                by[lane], back[lane], exponents[lane] = b, s, e
                if kind <= GAINED and not is_near(e, p):
                    far = True
            if scales != 0:
                start = block * inner + lane_block * lanes
                for lane in range(width):
                    found[start + lane] = back[lane]
            for i in range(height):
                for j in range(columns):
                    start = base + i * step + j * inner
                    xs, ys = x[start : start + width], y[start : start + width]
                    have = round_run(xs, ys, start, width, noise, have, k, p, numbers_of, by, back, whole)
            if not far:
                continue
            for i in range(height):
                for j in range(columns):
                    start = base + i * step + j * inner
                    for lane in range(width):
                        word = x[start + lane]
                        if u32(word & MAGNITUDE) != u32(0) and not is_near(exponents[lane], p):
                            bits = element_noise(start + lane, k[0], k[1]) if rule == STOCHASTIC else u32(0)
                            y[start + lane] = apply_wide(word, bits, exponents[lane], p)

    return loop
