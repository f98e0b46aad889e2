"""Code books by name, each built as its source describes it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from fpsim.formats.codebook import NAMES, Codebook, nearest_float32

__all__ = ["CODEBOOKS"]

# QLoRA (Dettmers et al. 2023, appendix E): quantiles of the normal distribution, with a zero, scaled to -1 and 1
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _linspace(count: int) -> list[float]:
    """Compute torch.linspace(0.1, 1, count) as torch does: each half from its own end, each step rounded to float32."""
    f = nearest_float32
    start, end = f(0.1), 1.0
    step = f(f(end - start) / f(count - 1)) if count > 1 else 0.0
    # start + i * step is one multiply-add there; with 24 bits times 10 the product is exact in float64
    return [f(start + step * i) if i < count // 2 else f(end - step * (count - i - 1)) for i in range(count)]


def dynamic_map(signed: bool, most_exponents: int, bits: int) -> tuple[float, ...]:
    """Return the values of bitsandbytes' `create_dynamic_map(signed, most_exponents, bits)`, ascending.

    Decades, from the top one downwards with half as many fractions each, which are the means of a linear scale from
    0.1 to 1; with 0 and 1 (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2).
    """
    f, values = nearest_float32, [0.0, 1.0]
    for i in range(most_exponents):
        fractions = 2 ** (i + bits - 1 - most_exponents + (0 if signed else 1))
        borders = _linspace(fractions + 1)
        power = f(10.0 ** (i - most_exponents + 1))
        for low, high in pairwise(borders):
            value = f(power * f(f(low + high) / 2))
            values += [value, -value] if signed else [value]
    return tuple(sorted(values))


def _hif8() -> Codebook:
    """Build HiFloat8 (Luo et al. 2024, arXiv 2409.16626, tables 1 to 4), where a prefix gives the width of the
    exponent.
    """
    magnitudes = []
    for code in range(128):
        if code >> 5:  # a prefix of two bits: 11, 10, 01 for exponents of 4, 3, 2 bits
            exponent_bits, rest = (code >> 5) + 1, 5
        elif code >> 4:  # 001: one bit
            exponent_bits, rest = 1, 4
        else:  # 0001: none; 0000: powers of two alone
            exponent_bits, rest = 0, 3
        if code < 8:
            magnitudes.append(math.ldexp(1.0, code - 23) if code else 0.0)
            continue
        mantissa_bits = rest - exponent_bits
        field, mantissa = divmod(code & (2**rest - 1), 2**mantissa_bits)
        exponent = 0
        if exponent_bits:  # a sign, and a magnitude without its leading one
            size = 2 ** (exponent_bits - 1)
            exponent = (size + field % size) * (-1 if field & size else 1)
        magnitudes.append(math.ldexp(2**mantissa_bits + mantissa, exponent - mantissa_bits))
    beyond = magnitudes[0x6F]  # 1.5 * 2**15, whose code is that of inf
    magnitudes[0x6F] = math.inf
    book = Codebook((*magnitudes, math.nan, *(-v for v in magnitudes[1:])), ties="away")
    # Not the default border before inf: the spacing doubles at the largest value, 2**15, so the last spacing is too
    # small.
    end = (book.largest + beyond) / 2
    return replace(book, borders=(-end, *book.midpoints[1:-1], end))


def posit_value(code: int, bits: int) -> float:
    """Return the value of a posit (Standard for Posit Arithmetic 2022, section 3: es = 2); NaN for NaR."""
    if code == 0:
        return 0.0
    if code == 1 << (bits - 1):
        return math.nan
    if code >> (bits - 1):
        return -posit_value((1 << bits) - code, bits)
    text = f"{code:0{bits}b}"[1:]
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    rest = text[run + 1 :]
    exponent = int(rest[:2].ljust(2, "0"), 2)
    fraction = rest[2:]
    significand = 1 + (int(fraction, 2) / 2 ** len(fraction) if fraction else 0.0)
    return math.ldexp(significand, 4 * regime + exponent)


def _posit(bits: int) -> Codebook:
    """Build a posit format. Its borders are the posits of one more bit, with ties to the even code (section 4.1); only
    zero becomes zero, and no number becomes NaR.
    """
    half = 1 << (bits - 1)
    ascending = [*range(half + 1, 2 * half), *range(half)]
    borders = [posit_value(2 * code + 1, bits + 1) for code in ascending[:-1]]
    zero = ascending.index(0)
    # Both borders around zero are zero itself, so that every other number, however small, stays above or below it.
    borders[zero - 1] = borders[zero] = 0.0
    return Codebook(tuple(posit_value(code, bits) for code in range(2 * half)), "even", tuple(borders))


CODEBOOKS: dict[str, Codebook] = {
    "nf4": Codebook(NF4, ties="up"),
    "dynamic8": Codebook(dynamic_map(True, 7, 8), ties="up"),  # of first moments in 8-bit optimizers
    "udynamic8": Codebook(dynamic_map(False, 7, 8), ties="up"),  # of second moments
    "dynamic4": Codebook(dynamic_map(True, 3, 4), ties="up"),
    "ulinear4": Codebook(tuple(i / 16 for i in range(1, 17)), ties="up"),  # torchao's OptimState4bit: no zero
    "hif8": _hif8(),
    "ternary": Codebook((-1.0, 0.0, 1.0), ties="zero"),
    "posit8": _posit(8),
}

NAMES.update((book, name) for name, book in CODEBOOKS.items())
