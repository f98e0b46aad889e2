"""Binary floating-point formats: fields, derived numbers, values and codes, and the catalogue of names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property

from fpsim.checks import did_you_mean, is_whole, number_of, refuse, shown

__all__ = [
    "ALIASES",
    "CATALOGUE",
    "NAMES_OF_OTHERS",
    "OVERFLOWS",
    "ROUNDINGS_OF_OTHERS",
    "FloatFormat",
    "as_float_format",
]

SPECIALS = {
    "ieee": "the top exponent holds inf and, with mantissa bits, NaN",
    "fn": "no inf; one NaN per sign, the code of all ones; the rest of the top exponent is finite",
    "fnuz": "no inf and no -0; one NaN, at the code of -0",
    "none": "every code is finite",
    "p3109": "no -0; NaN at the code of -0, inf at the largest code of each sign",
    "dlfloat": "one code per sign, all ones, for NaN and inf alike; exponent field 0 is a normal binade",
    "scale": "unsigned powers of two, no zero, NaN at the code of all ones",
}
OVERFLOWS = ("inf", "nan", "saturate")

FLOAT32_LARGEST = math.ldexp(2**24 - 1, 104)
FLOAT32_SMALLEST_EXPONENT = -149


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format that a float32 holds exactly.

    Exponent field `e` and mantissa field `m` stand for `2**(e - bias) * 1.m`, and for `2**(1 - bias) * 0.m` where `e`
    is 0 (subnormals).

    Formats are values: equal fields make equal, hashable formats, and `as_format(repr(f)) == f`.

    Args:
        exponent_bits: 1 to 8.
        mantissa_bits: 0 to 23, without the leading bit.
        bias: the bias of the exponent field. The default is the standard bias, `2**(exponent_bits - 1) - 1`, plus 1
            for "fnuz" and "p3109".
        specials: which codes are inf, NaN or -0: "ieee", "fn", "fnuz", "none", "p3109", "dlfloat" or "scale".
        subnormals: False leaves a gap between zero and the smallest normal value.

    Raises:
        ValueError: for fields that make no format, or a format that float32 cannot hold.

    >>> FloatFormat(5, 10) == as_float_format("fp16")
    True
    >>> f = FloatFormat(exponent_bits=3, mantissa_bits=2)
    >>> f.largest, f.smallest_normal, f.smallest_subnormal, f.epsilon
    (14.0, 0.25, 0.0625, 0.25)
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int = None  # type: ignore[assignment]  # filled in below; an int once constructed
    specials: str = "ieee"
    subnormals: bool = True

    def __post_init__(self) -> None:
        _require_fields(self)
        if self.bias is None:
            object.__setattr__(self, "bias", _standard_bias(self))
        # NumPy's integers are accepted, but would overflow in the powers of two below.
        for name in ("exponent_bits", "mantissa_bits", "bias"):
            object.__setattr__(self, name, int(getattr(self, name)))
        # Neither kind has a field for subnormals: DLFloat's lowest exponent is a normal binade, and scales have no
        # mantissa.
        if self.specials in ("dlfloat", "scale") and self.subnormals:
            object.__setattr__(self, "subnormals", False)
        _require_float32_container(self)

    def __str__(self) -> str:
        return _NAMES.get(self) or _systematic_name(self) or repr(self)

    # The hash is cached: formats are keys of caches that every rounding looks up.
    @cached_property
    def _hash(self) -> int:
        return hash((self.exponent_bits, self.mantissa_bits, self.bias, self.specials, self.subnormals))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Only the fields are pickled: a cached hash of a string differs from process to process.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    # Special values of the format

    @property
    def is_signed(self) -> bool:
        return self.specials != "scale"

    @property
    def has_inf(self) -> bool:
        return self.specials in ("ieee", "p3109", "dlfloat")

    @property
    def has_nan(self) -> bool:
        if self.specials == "ieee":
            # Without a mantissa, the top exponent is one code: inf.
            return self.mantissa_bits > 0
        return self.specials != "none"

    @property
    def has_zero(self) -> bool:
        return self.specials != "scale"

    @property
    def has_negative_zero(self) -> bool:
        return self.specials in ("ieee", "fn", "none", "dlfloat")

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return int(self.is_signed) + self.exponent_bits + self.mantissa_bits

    # Derived numbers

    @property
    def precision(self) -> int:
        """Significant bits of a normal value, the leading one included."""
        return self.mantissa_bits + 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal binade."""
        lowest_field = 0 if self.specials in ("dlfloat", "scale") else 1
        return lowest_field - self.bias

    @property
    def min_ulp_exponent(self) -> int:
        """Exponent of the spacing around zero: the smallest value's, or without subnormals the smallest normal's."""
        return self.min_exponent - (self.mantissa_bits if self.subnormals else 0)

    @property
    def _largest_magnitude_code(self) -> int:
        """Code of the largest finite value."""
        top = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        if self.specials == "ieee":
            return top - 2**self.mantissa_bits
        return top - (self.specials in ("fn", "p3109", "dlfloat", "scale"))

    @cached_property
    def largest(self) -> float:
        """The largest finite value."""
        return self._magnitude(self._largest_magnitude_code)

    @property
    def smallest_normal(self) -> float:
        """The smallest normal value (DLFloat has no 2**min_exponent: that code is its zero)."""
        if self.specials == "dlfloat":
            return math.ldexp(1 + self.epsilon, self.min_exponent)
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float | None:
        """The smallest subnormal value, None in a format without subnormals."""
        if not self.subnormals or self.mantissa_bits == 0:
            return None
        return math.ldexp(1.0, self.min_ulp_exponent)

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return self.smallest_subnormal or self.smallest_normal

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger value if the exponent range were unbounded: 2**-mantissa_bits."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @cached_property
    def finite_count(self) -> int:
        """Number of finite values, where 0 and -0 count as one.

        >>> as_float_format("e2m1fn").finite_count, as_float_format("fp16").finite_count
        (15, 63487)
        """
        positive = self._largest_magnitude_code
        if self.specials == "scale":
            return positive + 1
        if not self.subnormals and self.specials != "dlfloat":
            positive -= 2**self.mantissa_bits - 1
        return 2 * positive + 1

    def values(self) -> tuple[float, ...]:
        """Return all finite values in ascending order, 0 once, for formats of up to 16 bits.

        >>> as_float_format("e2m1fn").values()[7:]
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        """
        if self.bits > 16:
            raise ValueError(
                f"values() of {self} would list {self.finite_count:,} numbers. It lists formats of up to 16 bits, "
                f"this one has {self.bits}. Decode the codes you need with decode()."
            )
        # The magnitudes are a set, because without subnormals several codes stand for zero.
        magnitudes = sorted({self._magnitude(code) for code in range(self._largest_magnitude_code + 1)})
        if not self.is_signed:
            return tuple(magnitudes)
        return tuple(-v for v in reversed(magnitudes) if v) + tuple(magnitudes)

    # Codes

    def decode(self, code: int) -> float:
        """Return the value of a code: finite, inf or NaN. DLFloat's single code for NaN and inf decodes to NaN.

        Without subnormals, the codes of exponent field 0 are zeros. Raises ValueError for a code out of range.

        >>> as_float_format("e4m3fn").decode(0x7E), as_float_format("fp16").decode(0x0001)
        (448.0, 5.960464477539063e-08)
        """
        if not is_whole(code, 0) or not 0 <= code < 2**self.bits:
            raise ValueError(f"Code {shown(code)} is out of range for {self}: 0 to {2**self.bits - 1}.")
        sign_bit = 2 ** (self.exponent_bits + self.mantissa_bits)
        negative, magnitude = self.is_signed and code >= sign_bit, code % sign_bit
        if self.specials in ("fnuz", "p3109") and code == sign_bit:
            return math.nan
        if magnitude > self._largest_magnitude_code:
            infinite = self.specials == "p3109" or (self.specials == "ieee" and magnitude % 2**self.mantissa_bits == 0)
            return math.copysign(math.inf if infinite else math.nan, -1 if negative else 1)
        return math.copysign(self._magnitude(magnitude), -1 if negative else 1)

    def encode(self, value: float) -> int:
        """Return the code of a value of the format; for NaN the canonical, quiet one.

        Raises ValueError for a value that the format does not hold: round it first.

        >>> hex(as_float_format("fp16").encode(1.0)), hex(as_float_format("e4m3fn").encode(-448.0))
        ('0x3c00', '0xfe')
        """
        value = number_of("value", value)
        sign_bit = 2 ** (self.exponent_bits + self.mantissa_bits)
        negative = math.copysign(1.0, value) < 0
        if not math.isfinite(value):
            return self._encode_special(value, negative, sign_bit)
        if value == 0 and self.has_zero:
            return sign_bit if negative and self.has_negative_zero else 0
        fraction, exponent = math.frexp(abs(value))  # abs(value) == fraction * 2**exponent, fraction in [0.5, 1)
        ulp_exponent = max(exponent - 1, self.min_exponent) - self.mantissa_bits
        significand = math.ldexp(fraction, exponent - ulp_exponent)  # in ulps, and therefore a code if it is an integer
        code = int(significand) + (ulp_exponent + self.mantissa_bits - self.min_exponent) * 2**self.mantissa_bits
        # In these formats exponent field 0 is a normal binade: fields are one less than in other formats.
        if self.specials in ("dlfloat", "scale"):
            code -= 2**self.mantissa_bits if value else 0
        known = significand == int(significand) and 0 <= code <= self._largest_magnitude_code
        if not known or self._magnitude(code) != abs(value) or (negative and value and not self.is_signed):
            raise ValueError(f"value={value!r} is not a value of {self}. Round it to the format first.")
        return code + (sign_bit if negative else 0)

    def _encode_special(self, value: float, negative: bool, sign_bit: int) -> int:
        inf, nan = math.isinf(value), math.isnan(value)
        if (inf and not self.has_inf) or (nan and not self.has_nan) or (inf and negative and not self.is_signed):
            raise ValueError(f"{self} has no code for {value!r}: {SPECIALS[self.specials]}.")
        sign = sign_bit if negative and inf else 0
        if self.specials in ("fnuz", "p3109") and nan:
            return sign_bit
        if self.specials == "ieee":
            first = self._largest_magnitude_code + 1
            # The leading mantissa bit marks a quiet NaN (IEEE 754-2019, 6.2.1).
            return sign + first + (2**self.mantissa_bits // 2 if nan else 0)
        return sign + sign_bit - 1

    def _magnitude(self, code: int) -> float:
        """Return the value of a finite code without its sign bit."""
        field, mantissa = divmod(code, 2**self.mantissa_bits)
        if self.specials in ("dlfloat", "scale"):
            if code == 0 and self.has_zero:
                return 0.0
            return math.ldexp(2**self.mantissa_bits + mantissa, field - self.bias - self.mantissa_bits)
        if field == 0:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits) if self.subnormals else 0.0
        return math.ldexp(2**self.mantissa_bits + mantissa, field - self.bias - self.mantissa_bits)

    def resolve_overflow(self, overflow: str | None = None) -> str:
        """Return the overflow rule: `overflow` or, for None, "inf" if the format has an inf, else "saturate".

        Raises ValueError for an unknown word, and for an inf or a NaN that the format lacks.

        >>> as_float_format("fp16").resolve_overflow(), as_float_format("e4m3fn").resolve_overflow()
        ('inf', 'saturate')
        """
        if overflow is None:
            return "inf" if self.has_inf else "saturate"
        if not isinstance(overflow, str) or overflow not in OVERFLOWS:
            raise ValueError(
                f"Unknown overflow {shown(overflow)}. Known: {', '.join(OVERFLOWS)}, or None for the default."
            )
        if (overflow == "inf" and not self.has_inf) or (overflow == "nan" and not self.has_nan):
            possible = [o for o in OVERFLOWS if o == "saturate" or getattr(self, f"has_{o}")]
            raise ValueError(
                f"overflow={overflow!r} is invalid: {self} has no {overflow} ({SPECIALS[self.specials]}). "
                f"Expected: {', '.join(possible)}."
            )
        return overflow


def _require_fields(f: FloatFormat) -> None:
    for name, low, high in (("exponent_bits", 1, 8), ("mantissa_bits", 0, 23)):
        value = getattr(f, name)
        if not is_whole(value, low) or value > high:
            raise ValueError(f"{name}={shown(value)} makes no format. Expected: the integers {low} to {high}.")
    if f.bias is not None and not is_whole(f.bias):
        raise ValueError(f"bias={shown(f.bias)} makes no format. Expected: an integer, or None for the standard's.")
    # The bias is bounded first: the checks that follow compute with the bias, and put it into their messages.
    if f.bias is not None and abs(f.bias) > 10**9:
        raise ValueError(f"bias={shown(f.bias)} makes no format that a float32 holds. Expected: -200 to 200, or None.")
    if not isinstance(f.specials, str) or f.specials not in SPECIALS:
        raise ValueError(refuse(f"Unknown specials {shown(f.specials)}", SPECIALS, word=f.specials))
    if not isinstance(f.subnormals, bool):
        raise ValueError(f"subnormals={shown(f.subnormals)} makes no format. Expected: True, False.")
    if f.specials == "scale" and f.mantissa_bits:
        raise ValueError(f"specials='scale' means powers of two: mantissa_bits must be 0, not {f.mantissa_bits}.")
    if f.specials in ("dlfloat", "p3109") and f.mantissa_bits == 0:
        raise ValueError(f"specials={f.specials!r} needs at least one mantissa bit, not mantissa_bits=0.")


def _require_float32_container(f: FloatFormat) -> None:
    # The spacing of the smallest normal binade counts too, with and without subnormals.
    lowest = f.min_exponent - f.mantissa_bits
    if lowest < FLOAT32_SMALLEST_EXPONENT:
        raise ValueError(
            f"A float32 cannot hold {f!r}: its smallest values are multiples of 2**{lowest}, "
            f"float32's of 2**{FLOAT32_SMALLEST_EXPONENT}. Use a smaller bias or fewer bits."
        )
    if f.bias < -200 or f._largest_magnitude_code < 1 or not 0 < f.largest <= FLOAT32_LARGEST:
        # Below this bias `largest` itself may overflow a float64.
        largest = f"{f.largest:g}" if f.bias >= -200 else f"about 2**{2**f.exponent_bits - f.bias}"
        raise ValueError(
            f"A float32 cannot hold {f!r}: its largest value is {largest}, and must lie between its smallest "
            f"and float32's largest, {FLOAT32_LARGEST:g}. Use another bias, or other specials."
        )


def _standard_bias(f: FloatFormat) -> int:
    return 2 ** (f.exponent_bits - 1) - 1 + (f.specials in ("fnuz", "p3109"))


def _systematic_name(f: FloatFormat) -> str | None:
    """Return eXmY, eXmYfn or eXmYfnuz if that describes the format fully, else None."""
    suffix = {"ieee": "", "fn": "fn", "fnuz": "fnuz"}.get(f.specials)
    name = f"e{f.exponent_bits}m{f.mantissa_bits}{suffix}"
    # Some names of the catalogue stand for another format than their letters say: "e2m1fn" has no NaN.
    if suffix is None or name in CATALOGUE or not f.subnormals or f.bias != _standard_bias(f):
        return None
    return name


CATALOGUE: dict[str, FloatFormat] = {
    "fp32": FloatFormat(8, 23),  # IEEE 754-2019 binary32
    "tf32": FloatFormat(8, 10),  # NVIDIA A100 whitepaper
    "fp16": FloatFormat(5, 10),  # IEEE 754-2019 binary16
    "bf16": FloatFormat(8, 7),  # Google bfloat16
    "cb16": FloatFormat(6, 9),  # Cerebras CB16
    "dlfloat16": FloatFormat(6, 9, 31, "dlfloat", subnormals=False),  # Agrawal et al., ARITH 2019
    "e4m3": FloatFormat(4, 3),  # IEEE-style, as ml_dtypes float8_e4m3
    "e4m3fn": FloatFormat(4, 3, 7, "fn"),  # OCP OFP8 v1.0; Micikevicius et al. 2022
    "e4m3fnuz": FloatFormat(4, 3, 8, "fnuz"),  # Noune et al. 2022
    "e4m3b11fnuz": FloatFormat(4, 3, 11, "fnuz"),  # ml_dtypes float8_e4m3b11fnuz
    "e5m2": FloatFormat(5, 2),  # OCP OFP8 v1.0
    "e5m2fnuz": FloatFormat(5, 2, 16, "fnuz"),  # Noune et al. 2022
    "e3m4": FloatFormat(3, 4),  # ml_dtypes float8_e3m4
    "p3109_p3": FloatFormat(5, 2, 16, "p3109"),  # IEEE P3109 draft, K = 8, P = 3
    "p3109_p4": FloatFormat(4, 3, 8, "p3109"),  # IEEE P3109 draft, K = 8, P = 4
    "hfp8_143": FloatFormat(4, 3, 11, "none"),  # Sun et al., NeurIPS 2019, forward format, bias 7 + 4
    "e8m0fnu": FloatFormat(8, 0, 127, "scale", subnormals=False),  # OCP MX v1.0, the scale
    "e2m3fn": FloatFormat(2, 3, 1, "none"),  # OCP MX v1.0, FP6
    "e3m2fn": FloatFormat(3, 2, 3, "none"),  # OCP MX v1.0, FP6
    "e2m1fn": FloatFormat(2, 1, 1, "none"),  # OCP MX v1.0, FP4
}

ALIASES: dict[str, str] = {
    "float32": "fp32",
    "e8m23": "fp32",
    "e8m10": "tf32",
    "float16": "fp16",
    "half": "fp16",
    "e5m10": "fp16",
    "bfloat16": "bf16",
    "e8m7": "bf16",
    "cbfloat16": "cb16",
    "e6m9": "cb16",
    "fp8_e4m3": "e4m3fn",
    "fp8_e5m2": "e5m2",
    "ue4m3": "e4m3fn",  # scales of blocks have no sign (PTX ISA), and the same values above it
    "ue5m3": "e5m3fn",
}

# Names in other libraries and papers that name no format here, with the formats that the error suggests.
NAMES_OF_OTHERS: dict[str, tuple[str, ...]] = {
    "fp4": ("e2m1fn", "mxfp4", "nvfp4"),
    "fp4_e2m1": ("e2m1fn", "mxfp4"),  # microxcaling, as fp6_e3m2 and fp6_e2m3
    "fp4_e2m1fn": ("e2m1fn", "mxfp4"),
    "float4_e2m1fn_x2": ("e2m1fn", "mxfp4"),  # torch packs two
    "fp6": ("e3m2fn", "e2m3fn", "mxfp6_e3m2", "mxfp6_e2m3"),
    "fp6_e3m2": ("e3m2fn", "mxfp6_e3m2"),
    "fp6_e2m3": ("e2m3fn", "mxfp6_e2m3"),
    "fp8": ("e4m3fn", "e5m2"),
    "fp8_e4m3fn": ("e4m3fn",),
    "fp8_e4m3fnuz": ("e4m3fnuz",),
    "fp8_e5m2fnuz": ("e5m2fnuz",),
    "fp8_e3m4": ("e3m4",),
    "hf8": ("e4m3fn",),  # Intel
    "bf8": ("e5m2",),
    "hfp8": ("hfp8_143", "e5m2"),  # Sun et al., NeurIPS 2019: forward and backward
    "bfp": ("mxint8", "msfp16", "msfp12"),
    "bfp8": ("mxint8", "msfp16"),  # integers of 8 bits that share an exponent, of 32 and of 16 numbers
    "bfp16": ("msfp16",),
    "bfp4": ("msfp12",),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e5m2"),
    "mxfp6": ("mxfp6_e3m2", "mxfp6_e2m3"),
    "mxfp4_e2m1": ("mxfp4",),
    "float": ("fp32",),
    "single": ("fp32",),
}

# Words of IEEE 754, PTX, LLVM, MPFR, NumPy, qtorch and microxcaling, with the rules that the error suggests.
ROUNDINGS_OF_OTHERS = {
    word: names
    for words, names in {
        "rne rn rnte even round rint half_even nearest_ties_to_even ties_to_even tiestoeven": ("nearest_even",),
        "rna rnta away half_away half_up ties_to_away tiestoaway": ("nearest_away",),
        "rtz rz rtoz zero trunc truncate chop towardzero towards_zero round_toward_zero": ("toward_zero",),
        "floor": ("down", "toward_zero"),  # microxcaling cuts magnitudes
        "ru rup rp rtp ceil towardpositive": ("up",),
        "rd rdn rm rtn towardnegative": ("down",),
        "rto ro odd jam jamming von_neumann toodd": ("to_odd",),
        "sr stoch stochastic_rounding random": ("stochastic",),
    }.items()
    for word in words.split()
}

_NAMES = {f: name for name, f in CATALOGUE.items()}
_SYSTEMATIC = re.compile(r"e([1-8])m([0-9]{1,2})(fn|fnuz)?")
_REPR = re.compile(r"FloatFormat\(([^()]*)\)")
_FIELD = re.compile(r"""\s*(?:(\w+)\s*=\s*)?(?:([-+]?[0-9]{1,9})|(None|True|False)|'(\w*)'|"(\w*)")\s*""")
_WORDS = {"None": None, "True": True, "False": False}


def as_float_format(fmt: str | FloatFormat, hint: str | None = None) -> FloatFormat:
    """Return the float format for a name, a `repr` or a format; blocks.as_format knows the other kinds too.

    fmt: a name of the catalogue ("fp16", "e4m3fn"), an alias ("half", "float8_e4m3fn"), eXmY, eXmYfn or eXmYfnuz for
        any other format with the standard bias, the `repr` of a format, or a format.
    hint: the text that the error for an unknown name adds; None looks for near matches among the float formats.
    Raises ValueError for an unknown name, TypeError for an object that is neither a name nor a format.

    >>> as_float_format("half") is as_float_format("fp16")
    True
    """
    if isinstance(fmt, FloatFormat):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(
            f"Expected a format, got {shown(fmt)} of type {type(fmt).__name__}. "
            f"Use a name such as 'fp16', or a FloatFormat."
        )
    return _parse(fmt, hint)


@cache
def _parse(text: str, hint: str | None = None) -> FloatFormat:
    name = text.strip().lower()
    # ml_dtypes and torch write float8_e4m3fn.
    for candidate in (name, re.sub(r"^float\d+_", "", name)):
        known = CATALOGUE.get(ALIASES.get(candidate, candidate))
        if known is not None:
            return known
    if match := _SYSTEMATIC.fullmatch(ALIASES.get(name, name)):
        return FloatFormat(int(match[1]), int(match[2]), specials=match[3] or "ieee")
    if match := _REPR.fullmatch(text.strip()):
        return _from_repr(text, match[1])
    # `blocks` passes its own hint, with the names of all kinds of formats.
    hint = did_you_mean(name, [*CATALOGUE, *ALIASES], 3, NAMES_OF_OTHERS) if hint is None else hint
    raise ValueError(
        f"Unknown format {shown(text)}.{hint} Known: {', '.join(CATALOGUE)}, or eXmY such as 'e5m10', "
        f"or FloatFormat(exponent_bits, mantissa_bits, ...)."
    )


def _from_repr(text: str, fields: str) -> FloatFormat:
    """Parse `FloatFormat(5, 10)` or `FloatFormat(exponent_bits=5, ...)` without evaluating it."""
    positional: list[object] = []
    named: dict[str, object] = {}
    try:
        for part in fields.strip().removesuffix(",").split(","):
            match = _FIELD.fullmatch(part)
            if match is None:
                words = "is not a field. Expected: integers, None, True, False, 'words'."
                raise ValueError(f"{shown(part.strip())} {words}")
            name, integer, word, single, double = match.groups()
            value = int(integer) if integer else _WORDS[word] if word else (single if double is None else double)
            if name is None and named:
                raise ValueError("a field without a name follows one with a name. Name it, or put it first.")
            if name in named:
                raise ValueError(f"{name} comes twice.")
            if name is None:
                positional.append(value)
            else:
                named[name] = value
        return FloatFormat(*positional, **named)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"Unknown format {shown(text)}: {error}") from None
