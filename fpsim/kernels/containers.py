"""Bit patterns: the integers that hold them, shifts as instructions, and conversion between float32 and float64.

Conversions use integers: a processor that flushes subnormals to zero flushes none of them. Under
`torch.set_flush_denormal(True)`, a thread's own conversions between float32 and float64 turn a float32 subnormal into
zero. Two operations are not affected: multiplying two normal numbers to a normal number, and converting an integer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fpsim.compiling.compile import float64_bits, float64_of_bits, pointer
from fpsim.compiling.deferred import carray, intrinsic, njit
from fpsim.compiling.native import Loop, compiled_loop


def integers(width: int) -> tuple[Any, Any]:
    """Return the types of unsigned and signed integers of `width` bits."""
    return (np.uint32, np.int32) if width == 32 else (np.uint64, np.int64)


# The shifts are intrinsics, because Numba's operators widen a shift to 64 bits: 2.7 ms instead of 0.9 ms for 4M floats.
def _shift(direction: str) -> Callable[..., Any]:
    def shift(typingctx: Any, value: Any, amount: Any) -> Any:
        """Shift an unsigned integer; the result is 0 for amounts from the width on, and for amounts below 0."""
        from llvmlite import ir
        from numba import types

        if not isinstance(value, types.Integer) or value != amount:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v, n = arguments
            in_range = builder.icmp_unsigned("<", n, ir.Constant(n.type, value.bitwidth))
            return builder.select(in_range, getattr(builder, direction)(v, n), ir.Constant(v.type, 0))

        return value(value, value), generate

    return intrinsic(shift)  # type: ignore[no-any-return]


shift_left, shift_right = _shift("shl"), _shift("lshr")


@intrinsic
def leading_zeros(typingctx: Any, value: Any) -> Any:
    """Count the leading zero bits of a uint32."""
    from llvmlite import ir
    from numba import types

    if value != types.uint32:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint32(value), generate


@intrinsic
def rotate_left(typingctx: Any, value: Any, amount: Any) -> Any:
    """Rotate a uint32 by 1 to 31 bits."""
    from llvmlite import ir
    from numba import types

    if value != types.uint32 or not isinstance(amount, types.Integer):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, n = arguments
        n = context.cast(builder, n, signature.args[1], types.uint32)
        high = builder.shl(v, n)
        return builder.or_(high, builder.lshr(v, builder.sub(ir.Constant(n.type, 32), n)))

    return types.uint32(types.uint32, amount), generate


_SIGN32, _SIGN64 = np.uint32(1 << 31), np.uint64(1 << 63)
_INFINITY32, _INFINITY64 = np.uint32(0xFF << 23), np.uint64(0x7FF << 52)
_NORMAL32 = np.uint32(1 << 23)  # the smallest normal number
_NORMAL32_IN_64 = np.uint64((1023 - 126) << 52)  # the same number in float64
_REBIAS, _REBIAS_SPECIAL = 1023 - 127, 2047 - 255  # between exponent fields: of normal numbers, of inf and NaN
UNIT = 2.0**-149  # float32's smallest subnormal
_IMPLICIT = np.uint64(1 << 52)


@njit(forceinline=True)
def widened(u):
    """Return the float64 pattern of a float32 pattern."""
    a = np.uint32(u & np.uint32(_SIGN32 - np.uint32(1)))
    special = np.uint64(_REBIAS_SPECIAL << 52) if a >= _INFINITY32 else np.uint64(_REBIAS << 52)
    normal = np.uint64(np.uint64(np.uint64(a) << np.uint64(29)) + special)
    # A subnormal is an integer times a power of two, all of which are normal in float64, so that nothing is flushed.
    subnormal = np.uint64(float64_bits(np.float64(np.int32(a)) * UNIT))
    magnitude = subnormal if a < _NORMAL32 else normal
    return np.uint64(magnitude | np.uint64(np.uint64(u & _SIGN32) << np.uint64(32)))


@njit(forceinline=True)
def narrowed(u):
    """Return the float32 pattern of a float64 pattern, rounded towards zero if float32 does not hold the number.

    Beyond float32's largest number the result has no meaning.
    """
    a = np.uint64(u & np.uint64(_SIGN64 - np.uint64(1)))
    special = np.uint64(_REBIAS_SPECIAL << 23) if a >= _INFINITY64 else np.uint64(_REBIAS << 23)
    normal = np.uint64(np.uint64(a >> np.uint64(29)) - special)
    significand = np.uint64(np.uint64(a & np.uint64(_IMPLICIT - np.uint64(1))) | _IMPLICIT)
    # The number is counted in units of the smallest subnormal; a shift by 64 or more returns 0.
    subnormal = shift_right(significand, np.uint64(np.uint64(1023 - 149 + 52) - np.uint64(a >> np.uint64(52))))
    magnitude = np.uint32(subnormal if a < _NORMAL32_IN_64 else normal)
    return np.uint32(magnitude | np.uint32(np.uint64(u & _SIGN64) >> np.uint64(32)))


@cache
def make_value(width: int) -> Callable[..., Any]:
    """Return a compiled function that returns the number of a pattern of `width` bits, as float64."""

    @njit(forceinline=True)
    def value(u):
        return float64_of_bits(widened(np.uint32(u)) if width == 32 else np.uint64(u))

    return value  # type: ignore[no-any-return]


@cache
def make_limit(width: int) -> Callable[..., Any]:
    """Return a compiled function of x >= 0: the pattern, of `width` bits, of the largest finite number up to x."""

    @njit(forceinline=True)
    def limit(x):
        bits = np.uint64(float64_bits(np.float64(x)))
        if width == 64:
            return min(bits, np.uint64(_INFINITY64 - np.uint64(1)))
        beyond = bits >= np.uint64((1023 + 128) << 52)
        return np.uint32(_INFINITY32 - np.uint32(1)) if beyond else narrowed(bits)

    return limit  # type: ignore[no-any-return]


@njit(forceinline=True)
def times_power(u, log2_scale):
    """Return the pattern of a float64 times 2**log2_scale, rounded to nearest even where it becomes subnormal."""
    a = np.uint64(u & np.uint64(_SIGN64 - np.uint64(1)))
    sign = np.uint64(u & _SIGN64)
    scale = np.int64(log2_scale)
    if a == np.uint64(0) or a >= _INFINITY64:
        return np.uint64(u)
    # A subnormal is a number of units of 2**-1074: it is converted as an integer, which no processor flushes.
    if a < _IMPLICIT:
        a = np.uint64(float64_bits(np.float64(np.int64(a))))
        scale = np.int64(scale - 1074)
    field = np.int64(np.int64(a >> np.uint64(52)) + scale)
    if field >= 2047:
        return np.uint64(sign | _INFINITY64)
    if field > 0:
        rest = np.uint64(a & np.uint64(_IMPLICIT - np.uint64(1)))
        return np.uint64(sign | np.uint64(rest | np.uint64(np.uint64(field) << np.uint64(52))))
    # A smaller number rounds to zero, and the shifts below must stay under the width of a word.
    if field < -53:
        return sign
    cut = np.uint64(1 - field)  # bits below the smallest subnormal: 1 to 54
    significand = np.uint64(np.uint64(a & np.uint64(_IMPLICIT - np.uint64(1))) | _IMPLICIT)
    kept = np.uint64(significand >> cut)
    half = np.uint64(np.uint64(1) << np.uint64(cut - np.uint64(1)))
    low = np.uint64(significand & np.uint64(np.uint64(half << np.uint64(1)) - np.uint64(1)))
    up = low > half or (low == half and np.uint64(kept & np.uint64(1)) != np.uint64(0))
    return np.uint64(sign | np.uint64(kept + (np.uint64(1) if up else np.uint64(0))))


@cache
def widen_loop() -> Loop:
    """Return a loop that converts `n` float32 at address `src` to float64 at `dst`."""

    @compiled_loop()
    def loop(src, dst, n):
        x = carray(pointer(src), (n,), np.uint32)
        y = carray(pointer(dst), (n,), np.uint64)
        for i in range(n):
            y[i] = widened(x[i])

    return loop


@cache
def narrow_loop() -> Loop:
    """Return a loop that converts `n` float64 at address `src`, which float32 holds exactly, to float32 at `dst`."""

    @compiled_loop()
    def loop(src, dst, n):
        x = carray(pointer(src), (n,), np.uint64)
        y = carray(pointer(dst), (n,), np.uint32)
        for i in range(n):
            y[i] = narrowed(x[i])

    return loop


@cache
def power_loop() -> Loop:
    """Return a loop that multiplies `n` float64 at address `src` by 2**log2_scale, in place."""

    @compiled_loop()
    def loop(src, n, log2_scale):
        x = carray(pointer(src), (n,), np.uint64)
        for i in range(n):
            x[i] = times_power(x[i], log2_scale)

    return loop
