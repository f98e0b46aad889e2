"""What the fuzz tests of fpsim draw: formats, words, tensors, and things that are none of these."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
import torch
from hypothesis import strategies as st

import fpsim
from fpsim.formats.floats import SPECIALS

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd", "stochastic")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PATTERNS = {16: torch.int16, 32: torch.int32, 64: torch.int64}

# Things that are no format, no word and no tensor. Some have no hash, some no truth, some no length.
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**5000), 2**31, 2**63, 2**64]),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=30),
    st.binary(max_size=10),
    st.lists(st.integers() | st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=5), max_size=2),
    st.sampled_from(
        [
            object(),
            object,
            len,
            {1, 2},
            Fraction(1, 3),
            np.float32(5),
            np.int64(5),
            np.bool_(True),
            np.array([1.0, 2.0]),
            np.array(["up", "down"]),
            np.str_("fp16"),
            torch.tensor(3),
            torch.tensor([0.5, 1.0]),
            torch.float16,
            slice(1),
            range(3),
            "-" * 1000,
            "fp16\0",
            "\udcff",
            "(" * 500,
        ]
    ),
)


@st.composite
def formats(draw: st.DrawFn) -> fpsim.FloatFormat:
    """Any format that there is: one of the catalogue, or one of drawn fields."""
    if draw(st.booleans()):
        return draw(st.sampled_from(list(fpsim.CATALOGUE.values())))
    exponent_bits = draw(st.integers(1, 8))
    specials = draw(st.sampled_from(list(SPECIALS)))
    mantissa_bits = 0 if specials == "scale" else draw(st.integers(0, 23))
    bias = draw(st.none() | st.integers(-130, 160))
    subnormals = draw(st.booleans())
    try:
        return fpsim.FloatFormat(exponent_bits, mantissa_bits, bias, specials, subnormals)
    except ValueError:
        return fpsim.as_format("e3m3")


def naive(f: fpsim.FloatFormat) -> oracle.Format:
    """The oracle's format, which looks at the spacing and lists no values: a new format is drawn each time."""
    return _Spaced(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.subnormals)


class _Spaced(oracle.Format):
    def neighbours(self, magnitude: Fraction) -> tuple[Fraction, Fraction, bool]:
        return self.neighbours_by_spacing(magnitude)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of drawn bit patterns: up to three dimensions, in one piece, transposed, with gaps or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    width = 8 * dtype.itemsize
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    patterns = draw(st.lists(st.integers(-(1 << (width - 1)), (1 << (width - 1)) - 1), min_size=count, max_size=count))
    x = torch.tensor(patterns, dtype=PATTERNS[width]).view(dtype).reshape(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "gaps", "expanded", "negated"]))
    if layout == "transposed":
        x = x.mT if x.dim() > 1 else x
    elif layout == "gaps" and x.dim():
        x = torch.stack([x, x], -1)[..., 0]
    elif layout == "expanded":
        x = x.expand(2, *x.shape)
    elif layout == "negated" and dtype in (torch.float32, torch.float64):
        x = torch.complex(torch.zeros_like(x), x).conj().imag  # torch negates it when it is read
    return x.requires_grad_() if draw(st.booleans()) else x


def numbers(x: Any) -> list[float]:
    """The elements of a tensor or an array, in order."""
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x.detach().resolve_neg()
    return [float(v) for v in x.double().flatten().tolist()]


def is_same(a: float, b: float) -> bool:
    """Equal, with the sign of zero; any NaN is equal to any NaN."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
