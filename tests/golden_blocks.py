"""The golden vectors of blocks: what hardware stores, by hand. Scales that are powers of two follow in fractions; the
others in float32 of NumPy, each operation rounded by itself, in the order of TransformerEngine."""

from __future__ import annotations

import bisect
import json
import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import block_oracle
import ml_dtypes
import numpy as np

import fpsim
from fpsim import BlockFormat, FixedPoint
from fpsim.tensors.golden import BLOCKS_VERSION

F32, MAX = np.float32, np.finfo(np.float32).max
ABOUT = (
    "What is stored of a tensor whose blocks share scales, along the last axis. `inputs` has the bits of float32 "
    "numbers, row by row, in hexadecimal. Of a case: `codes`, the bytes of the elements, row by row; those of 4 bits "
    "two in a byte, the first one in the low nibble. `scales`, the bytes of the scales in E8M0 or E4M3; with "
    "`scale_bits` of 32 the bits of each float32. `tensor_scale`, the bits of a float32, or null. `outputs`, element * "
    "scale / tensor_scale, the product and the quotient rounded to float32 each; a NaN stands for any NaN. Elements "
    "are rounded to nearest even, and saturate. What is not finite makes the scale NaN, and with a tensor_scale every "
    "scale of the tensor; the codes of such elements are 0, or NaN where they have one. Under `saturate` it saturates "
    "at the largest scale, in float32 at 1."
)
COLUMNS = 64
FORMATS = {
    **dict.fromkeys(("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"), ("wide", "infinite", "nan")),
    "mxint8": ("wide", "infinite", "nan"),
    "e2m1fn per 32 ceil": ("wide",),
    "e2m1fn per 32 even": ("wide",),
    "e4m3fn per 32 ceil": ("wide",),
    "e4m3fn per 32 ceil saturate": ("infinite", "nan"),
    "e2m1fn per 32 saturate": ("infinite",),
    "nvfp4": ("narrow", "infinite", "nan"),
    "e2m1fn per 16 e4m3fn": ("narrow", "infinite"),
    "e4m3fn per tensor fp32": ("narrow", "infinite", "nan"),
    "e4m3fn per row fp32": ("wide", "infinite", "nan"),
    "e4m3fn per row fp32 saturate": ("infinite", "nan"),
}


def float32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def inputs() -> dict[str, list[list[float]]]:
    """Rows of numbers: random, at the ties of each element at several scales, zeros, and the ends of float32."""
    numbers = random.Random(0)
    normal = [float32(numbers.gauss(0, 1)) for _ in range(COLUMNS)]
    ties_of_e2m1 = [math.copysign(k / 4, -1 if k % 3 else 1) * 2.0**-3 for k in range(32)]
    ties_of_e4m3 = [(1 + (2 * k + 1) / 16) * 2.0**e for e in (-5, 0, 3, 8) for k in range(8)]
    above = [float32(math.nextafter(float32(x), 9) + 2.0**-24 * abs(x)) for x in ties_of_e2m1]
    borders = [1.0, 1.5, 1.75, 1.7499999, 1.875, 1.9375, 1.4142135, 1.4142137]  # amaxes at which rules part
    amaxes = [float32(x) * 2.0 ** (k - 4) if k % 8 == 0 else 0.1 for k, x in enumerate(borders * 8)]
    signs = [0.0, -0.0] * 16 + [-0.0] * 31 + [-(2.0**-9)]
    narrow = [normal, [x * 2.0**6 for x in normal[::-1]], ties_of_e2m1 + above, ties_of_e4m3 * 2, amaxes, signs]
    spread = [float32(numbers.gauss(0, 1) * 2.0 ** numbers.randint(-30, 30)) for _ in range(COLUMNS)]
    small = [math.ldexp(numbers.randint(-9, 9), -149) for _ in range(32)] + [
        float32(numbers.gauss(0, 1) * 2.0**-126) for _ in range(32)
    ]
    large = [float32(numbers.uniform(-1, 1) * 2.0**127) for _ in range(COLUMNS)]
    infinite = [[math.inf, *normal[1:]], [*normal[:-1], -math.inf], [math.inf, -math.inf] * 16 + normal[32:]]
    return {
        "wide": [*narrow, spread, small, large],
        "narrow": narrow,
        "infinite": infinite,
        "nan": [[*normal[:40], math.nan, *normal[41:]]],
    }


class Parts(NamedTuple):
    """What is stored of a tensor. elements: a code for each; scales: their codes, or float32 numbers."""

    elements: list[list[int]]
    scales: list[list[Any]]
    tensor_scale: np.float32 | None
    outputs: list[list[float]]


@cache
def magnitudes(f: BlockFormat) -> list[Fraction]:
    """The numbers of an element from 0 on: the place of each is its code without the sign."""
    return [Fraction(v) for v in f.element.values() if v >= 0]


def code_of(value: Fraction | float, f: BlockFormat, is_negative: bool) -> tuple[int, Fraction]:
    """The code of the element that is nearest to a finite number, ties to even codes, and its value."""
    known, magnitude = magnitudes(f), abs(Fraction(value))
    index = bisect.bisect_left(known, magnitude)
    if index == len(known):
        index -= 1
    elif known[index] != magnitude:
        low, high = magnitude - known[index - 1], known[index] - magnitude
        index -= low < high or (low == high and index % 2)
    found = -known[index] if is_negative else known[index]
    if isinstance(f.element, FixedPoint):
        return (-index if is_negative else index) % (1 << f.element.word_length), found
    return index | int(is_negative) << (f.element.bits - 1), found


def special_code(x: float, f: BlockFormat) -> int:
    """The code of an element that is no number: the largest of its sign, or the first NaN."""
    sign = int(math.copysign(1, x) < 0) << (f.element.bits - 1)
    if math.isnan(x):
        return {"e4m3fn": 0x7F, "e5m2": 0x7E}.get(str(f.element), 0)
    return sign | (len(magnitudes(f)) - 1)


def of_block(block: list[float], f: BlockFormat) -> tuple[list[int], int, list[float]]:
    """The codes, the code of the scale, and the numbers of a block whose scale is a power of two."""
    saturates = f.nonfinite == "saturate"
    if any(math.isinf(x) or (math.isnan(x) and not saturates) for x in block) and not saturates:
        return [special_code(math.nan, f)] * len(block), 255, [math.nan] * len(block)
    exponent = block_oracle.scale_exponent(max(abs(Fraction(x)) for x in [0.0, *block] if math.isfinite(x)), f)
    exponent = 127 if any(map(math.isinf, block)) else exponent
    codes, outputs = [], []
    for x in block:
        if not math.isfinite(x):
            codes.append(special_code(x, f))
            beyond = f.element.largest * 2.0**exponent
            outputs.append(
                math.nan if math.isnan(x) else math.copysign(beyond if beyond <= float(MAX) else math.inf, x)
            )
            continue
        code, found = code_of(Fraction(x) / Fraction(2) ** exponent, f, math.copysign(1, x) < 0)
        codes.append(code)
        is_float = not isinstance(f.element, FixedPoint)
        outputs.append(math.copysign(float(abs(found * Fraction(2) ** exponent)), x if is_float or found else 1))
    return codes, exponent + 127, outputs


def of_powers(rows: list[list[float]], f: BlockFormat) -> Parts:
    assert isinstance(f.block, int)
    found = [[of_block(row[i : i + f.block], f) for i in range(0, len(row), f.block)] for row in rows]
    return Parts(
        [[code for codes, _, _ in row for code in codes] for row in found],
        [[scale for _, scale, _ in row] for row in found],
        None,
        [[x for _, _, outputs in row for x in outputs] for row in found],
    )


def quotients(block: np.ndarray, by: np.floating, f: BlockFormat) -> tuple[list[int], np.ndarray]:
    """The codes and the elements of numbers times `by` in float32; both NaN where that is."""
    codes, elements = [], []
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (block * by).astype(F32)
    for x, before in zip(scaled.tolist(), block.tolist(), strict=True):
        if math.isnan(x):
            codes.append(special_code(x, f))
            elements.append(math.nan)
            continue
        finite = max(-f.element.largest, min(f.element.largest, x))
        code, found = code_of(finite, f, math.copysign(1, before) < 0)
        codes.append(code)
        elements.append(math.copysign(float(abs(found)), before))
    return codes, np.array(elements, F32)


def amax_of(x: np.ndarray, f: BlockFormat) -> np.floating:
    """Infinities count, and NaN where it makes a scale NaN."""
    magnitudes = np.abs(x.astype(F32)).ravel()
    return np.nanmax(magnitudes, initial=0) if f.nonfinite == "saturate" else magnitudes.max(initial=0)


def of_fp8(rows: list[list[float]], f: BlockFormat) -> Parts:
    """Scales in float32: largest / amax, and its inverse is stored."""
    x = np.array(rows, F32)
    parts: list[tuple[list[int], np.float32, list[float]]] = []
    for row in x:
        amax = amax_of(x if f.block == "tensor" else row, f)
        with np.errstate(over="ignore"):
            by = F32(1) if amax == 0 else min(F32(f.element.largest) / amax, MAX)
        by = F32(1 if f.nonfinite == "saturate" else math.nan) if not np.isfinite(amax) else by
        codes, elements = quotients(row, by, f)
        back = F32(1) / by
        parts.append((codes, back, (elements * back).tolist()))
    scales = [[parts[0][1]]] if f.block == "tensor" else [[back] for _, back, _ in parts]
    return Parts([codes for codes, _, _ in parts], scales, None, [outputs for _, _, outputs in parts])


def of_nvfp4(rows: list[list[float]], f: BlockFormat) -> Parts:
    """NVFP4 as tests/block_oracle.py has it, with its codes; without a second scale that is 1."""
    x = np.array(rows, F32)
    amax, whole = amax_of(x, f), F32(1)
    if f.tensor_scale:
        whole = F32(2688) / amax if np.isfinite(amax) else F32(math.nan)
    elements: list[list[int]] = []
    scales: list[list[int]] = []
    outputs: list[list[float]] = []
    for row in x:
        for part in (elements, scales, outputs):
            part.append([])
        for block in np.split(row, range(16, COLUMNS, 16)):
            wanted = amax_of(block, f) * (whole * (F32(1) / F32(6)))
            scale = min(wanted, F32(448)).astype(ml_dtypes.float8_e4m3fn) if np.isfinite(wanted) else None
            if scale is None:
                by, back = F32(math.nan), F32(math.nan)
            else:
                back = scale.astype(F32)
                divisor = back * (F32(1) / whole)
                with np.errstate(over="ignore"):
                    by = MAX if divisor == 0 else min(F32(1) / divisor, MAX)
            codes, found = quotients(block, by, f)
            elements[-1] += codes
            scales[-1].append(0x7F if scale is None else int(scale.view(np.uint8)))
            outputs[-1] += ((found * back).astype(F32) / whole).tolist()
    return Parts(elements, scales, whole if f.tensor_scale else None, outputs)


def parts_of(rows: list[list[float]], f: BlockFormat) -> Parts:
    of: Callable[[list[list[float]], BlockFormat], Parts] = of_nvfp4
    if f.has_power_scale:
        of = of_powers
    elif f.scale == fpsim.CATALOGUE["fp32"]:
        of = of_fp8
    return of(rows, f)


def word(x: float) -> str:
    return "7fc00000" if math.isnan(x) else f"{struct.unpack('<I', struct.pack('<f', x))[0]:08x}"


def words(rows: list[list[float]]) -> str:
    return " ".join(word(x) for row in rows for x in row)


def case_of(name: str, given: str, rows: list[list[float]]) -> dict[str, Any]:
    f = fpsim.as_format(name)
    assert isinstance(f, BlockFormat)
    parts = parts_of(rows, f)
    codes = [code for row in parts.elements for code in row]
    if f.element.bits == 4:
        codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    is_wide = f.scale == fpsim.CATALOGUE["fp32"]
    flat = [scale for row in parts.scales for scale in row]
    return {
        "format": name,
        "input": given,
        "codes": bytes(codes).hex(),
        "scale_bits": 32 if is_wide else 8,
        "scales": " ".join(map(word, flat)) if is_wide else bytes(flat).hex(),
        "tensor_scale": None if parts.tensor_scale is None else word(float(parts.tensor_scale)),
        "outputs": words(parts.outputs),
    }


def section() -> str:
    """The section of the file, a line for each input and each case."""
    given = inputs()
    head = json.dumps({"about": ABOUT, "version": BLOCKS_VERSION, "columns": COLUMNS})[1:-1]
    first = ",\n".join(f"  {json.dumps(name)}: {json.dumps(words(rows))}" for name, rows in given.items())
    cases = [case_of(name, which, given[which]) for name, of in FORMATS.items() for which in of]
    rest = ",\n".join(f"  {json.dumps(case)}" for case in cases)
    return f'"blocks": {{{head},\n"inputs": {{\n{first}\n}},\n"cases": [\n{rest}\n]}}'
