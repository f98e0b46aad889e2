"""What libraries make of an infinity in a block, in words of our own: `python tests/infinities.py` prints a table.

Each function takes float32 of one axis, as long as its blocks divide, and gives the numbers that a product would see:
elements times scales. The libraries compute in float32, and so does this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

import fpsim

Array = np.ndarray
INF, NAN, MASK = np.float32(np.inf), np.float32(np.nan), np.finfo(np.float32).max
ELEMENTS = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}


def blocks_of(values: list[float], length: int = 64) -> Array:
    return np.array([*values, *[0.0] * (length - len(values))], np.float32)


INPUTS: dict[str, Array] = {
    "inf first": blocks_of([np.inf, 1.0, -2.0]),
    "inf alone": blocks_of([np.inf]),
    "all inf": np.full(64, INF),
    "NaN": blocks_of([np.nan, 1.0, -2.0]),
    "-inf": blocks_of([1.0, -np.inf, -2.0]),
    "inf beside a mask": blocks_of([np.inf, -MASK, 1.0]),
}


def saturated(x: Array, element: str) -> Array:
    """To nearest, what is beyond the largest number becomes that, and NaN stays: `cvt.satfinite`, and clamps."""
    largest = float(fpsim.CATALOGUE[element].largest)
    rounded = np.clip(x, -largest, largest).astype(ELEMENTS[element]).astype(np.float32)
    return np.where(np.isnan(x), NAN, rounded).astype(np.float32)


# microxcaling, mx/mx_ops.py: the largest exponent of a block by torch.max and log2 (_shared_exponents, lines 63 to 80),
# an exponent beyond that of the scale becomes NaN, and the numbers are divided and multiplied by a power of it
# (_quantize_mx, from line 279 on). NaN is in torch.max, and infinity is beyond every exponent.


def microxcaling(x: Array, element: str, emax: int, size: int = 32) -> Array:
    out = []
    for block in x.reshape(-1, size):
        exponent = np.floor(np.log2(np.abs(block).max() or np.float32(2.0**-126))) - emax
        exponent = NAN if exponent > 127 else max(exponent, -127)
        scale = np.float32(2.0) ** np.float32(exponent)
        rounded = as_integers(block / scale) if element == "int8" else saturated(block / scale, element)
        out.append(rounded * scale)
    return np.concatenate(out)


def as_integers(x: Array) -> Array:
    """MXINT8's elements, n/64 with |n| up to 127."""
    return np.where(np.isnan(x), NAN, np.clip(np.rint(x * 64), -127, 127) / 64).astype(np.float32)


# torchao at 050515e, prototype/mx_formats/mx_tensor.py: in to_mx the code of a scale is E8M0_EXPONENT_NAN_VAL where
# max_abs is not finite, under every mode; numbers are multiplied by its inverse, NaN. float8/float8_utils.py,
# amax_to_scale: finfo.max / amax, which is 0 for inf; numbers are multiplied by it, and divided again.
# mx_formats/nvfp4_tensor.py at 02a1bc4, nvfp4_quantize: per_tensor_scale = amax / (448 * 6), by which the scales of
# blocks are divided before they are rounded, within tiny and 448; get_hp_scales multiplies again.


def torchao_mx(x: Array, element: str, emax: int) -> Array:
    out = []
    for block in x.reshape(-1, 32):
        amax = np.abs(block).max()
        code = 255 if not np.isfinite(amax) else max(np.frexp(amax)[1] - 1 - emax + 127, 0) if amax else 0
        scale = NAN if code == 255 else np.float32(2.0 ** (code - 127))
        out.append(saturated(block * (np.float32(1) / scale), element) * scale)
    return np.concatenate(out)


def torchao_float8(x: Array, element: str) -> Array:
    largest = np.float32(fpsim.CATALOGUE[element].largest)
    scale = largest / np.maximum(np.abs(x).max(), np.float32(1e-12))
    return saturated(x * scale, element) / scale


def torchao_nvfp4(x: Array) -> Array:
    of_tensor = np.abs(x).max() / np.float32(448 * 6)
    tiny, out = np.float32(2.0**-6), []
    for block in x.reshape(-1, 16):
        wanted = np.abs(block).max() / np.float32(6) / of_tensor
        scale = np.clip(wanted, tiny, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        out.append(saturated(block * (np.float32(1) / of_tensor / scale), "e2m1fn") * (of_tensor * scale))
    return np.concatenate(out)


# bitsandbytes, functional.quantize_blockwise: what comes back is a value of the code book times the block's absmax, and
# the value is 0, which the inverse of an infinite absmax makes of finite numbers. No product with it is finite.


def by_absmax(x: Array, size: int) -> Array:
    out = []
    for block in x.reshape(-1, min(size, len(x))):
        absmax = np.abs(block).max()
        out.append(np.zeros_like(block) * absmax if not np.isfinite(absmax) else block)
    return np.concatenate(out)


# TransformerEngine at 01c24fe, common/recipe/recipe_common.cuh, compute_scale_from_amax (lines 14 to 49): a scale of 1
# where amax is inf, NaN or 0 (lines 24 to 26); amax is found by fmaxf, which passes NaN over. common/util/ptx.cuh,
# float_to_e8m0: 0xFE of inf, else rounded up; exp2f_rcp is its inverse. common/cast/nvfp4/core_nvfp4.cuh at 0718c01,
# compute_global_encode_scaling_factor_FP4: 1 of inf; compute_decoding_scaling_factor and compute_scaling_coefficient.
# Casts are cvt.satfinite. cvt to e2m1 makes +6 of NaN; here it stays.


def amax_of(x: Array) -> np.float32:
    return np.float32(np.fmax.reduce(np.abs(x), initial=0))


def te_scale_from_amax(x: Array, element: str, is_power: bool = False) -> Array:
    amax, scale = amax_of(x), np.float32(1)
    if np.isfinite(amax) and amax != 0:
        scale = np.minimum(np.float32(fpsim.CATALOGUE[element].largest) / amax, MASK)
        if is_power:
            scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return saturated(x * scale, element) * (np.float32(1) / scale)


def te_mxfp8(x: Array, element: str = "e4m3fn") -> Array:
    out = []
    for block in x.reshape(-1, 32):
        wanted = amax_of(block) * (np.float32(1) / np.float32(fpsim.CATALOGUE[element].largest))
        code = 0xFE
        if np.isfinite(wanted):
            bits = int(wanted.view(np.uint32))
            field, mantissa = bits >> 23, bits & 0x7FFFFF
            code = field + int(mantissa > 0 and field != 0xFE and not (field == 0 and mantissa <= 0x400000))
        scale = np.float32(2.0 ** (code - 127))
        out.append(saturated(block * (np.float32(1) / scale), element) * scale)
    return np.concatenate(out)


def te_nvfp4(x: Array) -> Array:
    whole, out = amax_of(x), []
    whole = np.float32(1) if whole in (0, INF) else np.minimum(np.float32(448 * 6) / whole, MASK)
    for block in x.reshape(-1, 16):
        wanted = amax_of(block) * (whole * (np.float32(1) / np.float32(6)))
        scale = saturated(wanted[None], "e4m3fn")[0]
        by = np.minimum(np.float32(1) / (scale * (np.float32(1) / whole)), MASK)
        out.append(saturated(block * by, "e2m1fn") * scale / whole)
    return np.concatenate(out)


# Formats, and the libraries that have them
STANDARD: dict[str, list[Callable[[Array], Array]]] = {
    "e4m3fn per tensor fp32": [partial(torchao_float8, element="e4m3fn")],
    "e5m2 per tensor fp32": [partial(torchao_float8, element="e5m2")],
    "e4m3fn per row fp32": [partial(torchao_float8, element="e4m3fn")],
    "mxfp8_e4m3": [partial(f, element="e4m3fn", emax=8) for f in (microxcaling, torchao_mx)],
    "mxfp8_e5m2": [partial(f, element="e5m2", emax=15) for f in (microxcaling, torchao_mx)],
    "mxfp4": [partial(f, element="e2m1fn", emax=2) for f in (microxcaling, torchao_mx)],
    "nvfp4": [torchao_nvfp4],
    "mxint8": [partial(microxcaling, element="int8", emax=0)],
    "nf4 per 64 fp32": [partial(by_absmax, size=64)],
    "dynamic8 per 256 fp32": [partial(by_absmax, size=256)],
}
SATURATING: dict[str, Callable[[Array], Array]] = {
    "e4m3fn per tensor fp32 saturate": partial(te_scale_from_amax, element="e4m3fn"),
    "e5m2 per tensor fp32 saturate": partial(te_scale_from_amax, element="e5m2"),
    "e4m3fn per 128 ceil saturate": partial(te_scale_from_amax, element="e4m3fn", is_power=True),
    "e4m3fn per 32 ceil saturate": te_mxfp8,
    "e2m1fn per 16 e4m3fn fp32 saturate": te_nvfp4,
}


def shown(x: Array) -> str:
    """All numbers of a block, equal neighbours counted."""
    words: list[tuple[str, int]] = []
    for value in x.tolist():
        word = f"{value:.3g}"
        if words and words[-1][0] == word:
            words[-1] = word, words[-1][1] + 1
        else:
            words.append((word, 1))
    return ", ".join(word if count == 1 else f"{count} x {word}" for word, count in words)


def table() -> str:
    """A row for each format: what it makes of each input, all 64 numbers."""
    import torch

    lines = ["| format | " + " | ".join(INPUTS) + " |", "| --- |" + " --- |" * len(INPUTS)]
    for name in (*STANDARD, *SATURATING):
        rounded = [fpsim.round_to(torch.from_numpy(x), name).numpy() for x in INPUTS.values()]
        lines.append("| ".join([f"| {name} ", *(f"{shown(r)} " for r in rounded)]) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
