"""Block formats: the elements' format, the number of elements that share a scale, and the rule for the scale."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from fpsim.checks import did_you_mean, is_finite_number, is_whole, refuse, shown
from fpsim.formats.codebook import CODEBOOKS, Codebook
from fpsim.formats.fixed_point import FixedPoint, named_fixed_point
from fpsim.formats.floats import ALIASES, CATALOGUE, NAMES_OF_OTHERS, FloatFormat, as_float_format
from fpsim.formats.foreign import from_other_library

__all__ = [
    "BLOCKS",
    "NONFINITE",
    "SCALE_RULES",
    "BlockFormat",
    "Choose",
    "Delayed",
    "Element",
    "Format",
    "as_element",
    "as_format",
    "has_room_for_scales",
]

Element = FloatFormat | FixedPoint | Codebook

MX_BLOCK = 32  # elements of a block of OCP MX v1.0
MOST_STEPS = 2**20  # steps of a history, which is kept for each operand
MOST_CANDIDATES = 8  # each candidate is a rounding of the whole tensor
POWER_RULES = ("floor", "ceil", "even", "nearest", "floor_plus1", "ceil_amax", "mid_max")
SCALE_RULES = {
    "floor": "2**(floor(log2(amax)) - emax): the largest element may saturate (OCP MX v1.0, 6.3)",
    "ceil": "2**ceil(log2(amax / largest)): nothing saturates (arXiv 2506.08027; torchao's RCEIL)",
    "even": "the rule floor, applied to amax after it is rounded to the element's significand",
    "nearest": "2**(round(log2(amax)) - emax)",
    "floor_plus1": "2**(floor(log2(amax)) - emax + 1): nothing saturates (AWS Trainium's quantize_mx)",
    "ceil_amax": "2**(ceil(log2(amax)) - emax): nothing saturates (torchao's CEIL)",
    "mid_max": "the rule floor, but twice its scale where amax / scale is nearer to 2**(emax + 1) than to largest "
    "(brevitas)",
    "uos(k)": "the rule floor, applied to amax plus k units in the last place of the element: k = 0.5 is the rule "
    "even; AMD's Primus-Turbo also has k = 0.375 and 1",
    "amax": "amax / largest, in the scale's format",
    "amax/d": "amax / d, in the scale's format: the largest element lands on d (static 4 of arXiv 2512.02010), or "
    "saturates where d is above the largest",
    "absmax": "amax / largest in float32, by which elements are divided (bitsandbytes, torchao)",
}
_SHIFTED = re.compile(r"uos\((\d+(?:\.\d+)?)\)")
_CHOICE = re.compile(r"(mse|mae|max)\((\S+)\)")
_LANDING = re.compile(r"amax/(\d+(?:\.\d+)?)")
NONFINITE = {
    "nan": "the scale is NaN, and so is each element (OCP MX v1.0; microxcaling, torchao)",
    "saturate": "an infinity saturates, and NaN stays alone (NVIDIA TransformerEngine)",
}


@dataclass(frozen=True)
class Delayed:
    """The scale rule of delayed scaling: a tensor's scale follows from the amaxes of earlier steps.

    scale = (largest / amax') / 2**margin, where amax' comes from the last `history` steps, without the current one. If
    amax' is zero or not finite, the previous scale stays (NVIDIA TransformerEngine, DelayedScaling).

    Args:
        history: how many steps are remembered.
        margin: the number of binades left free below the largest value.
        amax: "max" of the history, or the "most_recent".
    """

    history: int = 1024
    margin: int = 0
    amax: str = "max"

    def __post_init__(self) -> None:
        if not is_whole(self.history, 1) or self.history > MOST_STEPS:
            raise ValueError(
                f"history={shown(self.history)} is not a number of steps. Expected: an integer from 1 to "
                f"{MOST_STEPS:,}."
            )
        if not is_whole(self.margin) or abs(self.margin) > 64:
            raise ValueError(f"margin={shown(self.margin)} is invalid. Expected: the integers -64 to 64.")
        if not isinstance(self.amax, str) or self.amax not in ("max", "most_recent"):
            raise ValueError(refuse(f"Unknown amax {shown(self.amax)}", ("max", "most_recent"), word=self.amax))


@dataclass(frozen=True)
class Choose:
    """A scale rule that rounds each block by several rules, and keeps the result that is nearest to its numbers.

    Even where elements are rounded stochastically, the choice compares results of rounding to nearest: choosing by the
    noisy results would bias them.

    Args:
        candidates: two to eight scale rules of a format: ("amax/6", "amax/4") in NVFP4 is 4 over 6 (arXiv 2512.02010);
            ("floor", "ceil") in MXFP4 takes the nearer of two exponents.
        error: the error of a block, from the differences that rounding makes in its elements: "mse" for the sum of
            squares, "mae" for the sum of magnitudes, "max" for the largest magnitude.
        ties: which of two equally near candidates is kept: the "first" or the "last".
        top: in a format with a `tensor_scale`, the block scale to which the block with the tensor's amax is brought,
            under the candidate with the largest element for an amax. None is the largest power of two with which the
            block scales of all candidates fit the scale's format (256 for 4 over 6 in e4m3fn). With 448, the other
            candidate's block scale saturates.

    >>> print(BlockFormat("e2m1fn", 32, scale_rule=Choose(("floor", "ceil"))))
    e2m1fn per 32 mse(floor,ceil)
    >>> as_format("e2m1fn per 16 e4m3fn fp32 mse(amax/6,amax/4)") == BLOCKS["nvfp4_4over6"]
    True
    """

    candidates: tuple[str, ...]
    error: str = "mse"
    ties: str = "first"
    top: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.candidates, list):
            object.__setattr__(self, "candidates", tuple(self.candidates))
        given = self.candidates
        are_words = isinstance(given, tuple) and all(isinstance(rule, str) for rule in given)
        if not are_words or not 2 <= len(given) <= MOST_CANDIDATES or len({*given}) < len(given):
            raise ValueError(
                f"candidates={shown(given)} is no choice. Expected: two to {MOST_CANDIDATES} different scale rules, "
                f"such as ('amax/6', 'amax/4')."
            )
        for name, known in (("error", ("mse", "mae", "max")), ("ties", ("first", "last"))):
            if not isinstance(value := getattr(self, name), str) or value not in known:
                raise ValueError(refuse(f"Unknown {name} {shown(value)}", known, word=value))
        if self.top is not None and not (is_finite_number(self.top) and self.top > 0):
            raise ValueError(f"top={shown(self.top)} is no scale. Expected: a number above 0, or None.")

    def __str__(self) -> str:
        """Return the rule's word in a format's name, or the rule's `repr` if that word does not say everything."""
        word = f"{self.error}({','.join(self.candidates)})"
        return word if self == Choose(self.candidates, self.error) else repr(self)


@dataclass(frozen=True)
class BlockFormat:
    """A format whose numbers are `element * scale`, with one scale for the elements of a block.

    Formats are values: equal fields make equal, hashable formats, and `as_format(repr(f)) == f`.

    Args:
        element: the format of the elements, or its name. An integer is symmetric: "int8" is -127 to 127.
        block: how many elements along one axis share a scale; (rows, columns) for a tile; "row" for all along the axis;
            "tensor" for all elements. If the block does not divide the axis, the last block is shorter.
        scale: the format of the scales: "e8m0fnu" for powers of two, "fp32", or another such as "e4m3fn".
        scale_rule: how a scale follows from amax, the largest magnitude of its block: see SCALE_RULES. Powers of two:
            "floor", "ceil", "even", "nearest", "floor_plus1", "ceil_amax", "mid_max", "uos(0.375)". Any other scale:
            "amax", "amax/4", under which amax becomes 4 instead of the largest element, or Delayed() for a tensor. Only
            float32: "absmax", the default of code books, which divides elements by the scale. "amax" multiplies them by
            largest / amax, which differs in the last bit. Choose(("floor", "ceil")) takes the best rule for each block.
        tensor_scale: whether a float32 for the whole tensor multiplies the scales, which brings the largest block's
            scale to the top of the scale's format (NVFP4). "row": a float32 for each row along the axis, such as each
            token. A number, a multiple of `block`: a float32 for each run of that many elements (128 in arXiv
            2510.27527). The last two are for blocks along one axis.
        gain: elements are rounded at this multiple of their size, and divided by it afterwards: 3/4 in MXFP4 as in
            arXiv 2502.20586, so that nothing saturates under the rule "floor".
        least_amax: under "absmax", the value that replaces a smaller amax: 1e-12 in torchao. With 0, a block of zeros
            has a scale of 0, and stays zero even in formats without a zero.
        nonfinite: the effect of an infinity or NaN on its block. "nan": the scale is NaN, and so is every element
            (with a tensor_scale, of the whole tensor). "saturate": an infinity saturates at `scale_of_infinity`, which
            hides the overflow, and only NaN stays NaN, as in TransformerEngine. Under Delayed() the
            scale comes from earlier steps, so that only the infinity itself becomes NaN, or saturates in an element's
            format without NaN.

    Plus and minus float32's largest number are masks: they stay as they are, and no scale follows from them. In a block
    whose scale is NaN they become NaN too.

    Raises:
        ValueError: for combinations that make no format.

    >>> BlockFormat("e4m3fn", 32) == as_format("mxfp8_e4m3")
    True
    >>> print(BlockFormat("e4m3fn", (128, 128), scale_rule="ceil"))
    e4m3fn per 128x128 ceil
    >>> print(BlockFormat("e4m3fn", "tensor", "fp32", nonfinite="saturate"))
    e4m3fn per tensor fp32 saturate
    """

    element: Element
    block: int | tuple[int, int] | str
    scale: FloatFormat = CATALOGUE["e8m0fnu"]
    scale_rule: str | Delayed | Choose = None  # type: ignore[assignment]  # filled in below
    tensor_scale: bool | int | str = False
    gain: float = 1.0
    least_amax: float = 0.0
    nonfinite: str = "nan"

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", _symmetric(as_element(self.element)))
        object.__setattr__(self, "scale", as_float_format(self.scale))
        if isinstance(self.block, list):
            object.__setattr__(self, "block", tuple(self.block))
        if self.scale_rule is None:
            object.__setattr__(self, "scale_rule", self._default_rule)
        _require_block(self.block)
        _require_rule(self)

    def __str__(self) -> str:
        return _BLOCK_NAMES.get(self) or _systematic_name(self) or repr(self)

    def __repr__(self) -> str:
        """Return a dataclass's `repr`, without `nonfinite` at its default: ids of stored cells contain this text."""
        given = [f.name for f in fields(self) if f.name != "nonfinite" or self.nonfinite != "nan"]
        return f"BlockFormat({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    @property
    def scale_of_infinity(self) -> float:
        """Scale of a block in which a number is infinite.

        If infinities saturate, the scale is 1, as in TransformerEngine's compute_scale_from_amax. In blocks of MXFP8
        and NVFP4 it is the largest number of the scales' format instead (in MXFP8 the code 0xFE).

        >>> [as_format(name).scale_of_infinity for name in ("mxfp4", "e4m3fn per row fp32 saturate")]
        [nan, 1.0]
        >>> as_format("e4m3fn per 32 ceil saturate").scale_of_infinity == 2.0**127
        True
        """
        if self.nonfinite == "nan":
            return math.nan
        is_narrow = self.block == MX_BLOCK if self.has_power_scale else self.scale != CATALOGUE["fp32"]
        return self.scale.largest if is_narrow else 1.0

    @property
    def has_power_scale(self) -> bool:
        """True if scales are powers of two."""
        return self.scale.specials == "scale"

    @property
    def _default_rule(self) -> str:
        if self.has_power_scale:
            return "floor"
        return "absmax" if isinstance(self.element, Codebook) and self.scale == CATALOGUE["fp32"] else "amax"

    @property
    def is_delayed(self) -> bool:
        return isinstance(self.scale_rule, Delayed)

    @property
    def candidates(self) -> tuple[BlockFormat, ...]:
        """Formats among which each block takes the nearest result; only this format unless the rule is Choose()."""
        rule = self.scale_rule
        return tuple(replace(self, scale_rule=c) for c in rule.candidates) if isinstance(rule, Choose) else (self,)

    @property
    def tensor_lands_on(self) -> float:
        """Value to which a `tensor_scale` brings the tensor's amax: the top block scale times the element of the amax.

        >>> as_format("nvfp4").tensor_lands_on, as_format("nvfp4_4over6").tensor_lands_on
        (2688.0, 1536.0)
        """
        top = self.scale.largest
        if isinstance(self.scale_rule, Choose):
            lowest = min(f.lands_on for f in self.candidates)
            fitting = 2.0 ** (math.frexp(top * lowest / self.lands_on)[1] - 1)
            top = fitting if self.scale_rule.top is None else self.scale_rule.top
        return top * self.lands_on

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block; 0 stands for all rows or columns."""
        if isinstance(self.block, tuple):
            return self.block
        return {"row": (1, 0), "tensor": (0, 0)}[self.block] if isinstance(self.block, str) else (1, self.block)

    @property
    def largest(self) -> float:
        """Largest value of an element."""
        return self.element.largest

    @property
    def lands_on(self) -> float:
        """Element that a block's amax becomes if the scale is exact; under Choose() the largest of the candidates'.

        >>> as_format("nvfp4").lands_on, as_format("e2m1fn per 16 e4m3fn fp32 amax/4").lands_on
        (6.0, 4.0)
        """
        if isinstance(self.scale_rule, Choose):
            return max(f.lands_on for f in self.candidates)
        match = _LANDING.fullmatch(str(self.scale_rule))
        return float(match[1]) if match else self.element.largest

    @property
    def rounds_up_from(self) -> int:
        """Float32 mantissa field of an amax from which the scale is one power of two larger; 2**23 if it never is.

        >>> f"{1 + as_format('e2m1fn per 32 mid_max').rounds_up_from / 2**23:.6f}"  # 6 / 4 is 1.5
        '1.750000'
        """
        top, rule = 1 << 23, str(self.scale_rule)
        largest = int(math.frexp(self.element.largest)[0] * 2 * top) - top  # the mantissa field of the largest element
        shifted = 0.5 if rule == "even" else float(match[1]) if (match := _SHIFTED.fullmatch(rule)) else 0.0
        if shifted:
            return top - round(math.ldexp(shifted, 23 - min(self.element.mantissa_bits, 22)))
        # `near` is the field of the first float32 above sqrt(2), which no float32 equals.
        near = 3474676
        fields = {"ceil": largest + 1, "nearest": near, "floor_plus1": 0, "ceil_amax": 1}
        return {**fields, "mid_max": (largest + top) // 2 + 1}.get(rule, top)

    @property
    def bits_per_value(self) -> float:
        """Bits of an element plus its share of the block's scale. Scales of rows and tensors are not counted.

        >>> as_format("mxfp4").bits_per_value, as_format("nvfp4").bits_per_value
        (4.25, 4.5)
        """
        rows, columns = self.tile
        return self.element.bits + (self.scale.bits / (rows * columns) if rows and columns else 0)


def _symmetric(element: Element) -> Element:
    if not isinstance(element, FixedPoint):
        return element
    if not element.signed:
        raise ValueError(f"{element} has no negative values. The elements of a block are signed: 'int8', 'int4'.")
    return replace(element, symmetric=True)


def _require_block(block: object) -> None:
    sides = block if isinstance(block, tuple) else (block,)
    if (isinstance(block, str) and block in ("row", "tensor")) or (
        len(sides) in (1, 2) and all(is_whole(side, 1) and side < 2**31 for side in sides)
    ):
        return
    raise ValueError(
        f"block={shown(block)} is not a block. Expected: a number of elements from 1 to 2**31 - 1, (rows, columns), "
        f"'row' or 'tensor'."
    )


def has_room_for_scales(element: Element) -> bool:
    """Return whether float32 holds the product of every element and scale. element: not a code book."""
    # Every format that 32 bits can round has room: see kernels.core.needs_wider_container.
    return element.min_ulp_exponent >= -94 and element.mantissa_bits <= 22


def _require_rule(f: BlockFormat) -> None:
    if isinstance(f.scale_rule, Delayed):
        if f.block != "tensor" or f.scale != CATALOGUE["fp32"] or f.tensor_scale:
            raise ValueError(
                f"Delayed scaling got block={shown(f.block)}, scale={f.scale}, tensor_scale={f.tensor_scale}. "
                f"Expected: block='tensor', scale='fp32', and no second scale."
            )
    elif isinstance(f.scale_rule, Choose):
        for rule in f.scale_rule.candidates:
            _require_word(f, rule)
        top = f.scale_rule.top
        if f.block == "tensor" or (top is not None and not (f.tensor_scale and top <= f.scale.largest)):
            raise ValueError(
                f"{f.scale_rule!r} got block={shown(f.block)}, scale={f.scale}, tensor_scale={f.tensor_scale}. "
                f"Expected: blocks, tiles or rows; and top=None, or beneath a tensor_scale at most {f.scale.largest:g}."
            )
    else:
        _require_word(f, f.scale_rule)
    _require_second_scale(f)
    if f.tensor_scale and (f.has_power_scale or f.scale.largest > 1e30):
        raise ValueError(
            f"tensor_scale={shown(f.tensor_scale)} was given with scales in {f.scale}, whose range needs no second "
            f"scale. Expected: a narrow format such as scale='e4m3fn', or tensor_scale=False."
        )
    if not is_finite_number(f.gain) or not 0 < f.gain <= 1 or (f.gain != 1 and not f.has_power_scale):
        raise ValueError(
            f"gain={shown(f.gain)} is invalid. Expected: above 0 and at most 1; 1 unless scales are powers."
        )
    if not isinstance(f.nonfinite, str) or f.nonfinite not in NONFINITE:
        raise ValueError(refuse(f"Unknown nonfinite {shown(f.nonfinite)}", NONFINITE, word=f.nonfinite))
    if f.element.specials == "scale":
        raise ValueError(f"{f.element} has no zero and no sign. Elements are numbers such as e4m3fn or int8.")
    if not is_finite_number(f.least_amax) or f.least_amax < 0 or (f.least_amax and f.scale_rule != "absmax"):
        raise ValueError(
            f"Got least_amax={shown(f.least_amax)} with scale_rule={shown(f.scale_rule)}. Expected: 0 or more under "
            f"scale_rule='absmax', else 0."
        )
    is_book = isinstance(f.element, Codebook)
    if f.element.min_ulp_exponent < -94 and is_book and f.has_power_scale:
        raise ValueError(
            f"{f.element} holds a multiple of 2**{f.element.min_ulp_exponent}, which leaves no room for a power of two "
            f"in a float32. Use scale='fp32', or values that are multiples of 2**-94."
        )
    if not is_book and not has_room_for_scales(f.element):
        raise ValueError(
            f"{f.element} leaves no room for a scale in a float32: a block needs elements of at most 23 significant "
            f"bits whose smallest value is at least 2**-94."
        )
    if f.scale.min_exponent > 0 or f.scale.largest < 1:
        raise ValueError(f"{f.scale} does not hold 1. Scales are in a format such as e8m0fnu, e4m3fn or fp32.")


def _require_second_scale(f: BlockFormat) -> None:
    n, block = f.tensor_scale, f.block
    if isinstance(n, bool):
        return
    is_number = isinstance(n, int) and isinstance(block, int) and block < n < 2**31 and n % block == 0
    if not isinstance(block, int) or not ((isinstance(n, str) and n == "row") or is_number):
        raise ValueError(
            f"tensor_scale={shown(n)} is invalid with block={shown(block)}. Expected: True, False; of blocks of a "
            f"number of elements also 'row', or a multiple of that number."
        )


def _require_word(f: BlockFormat, rule: object) -> None:
    """Raise ValueError unless `rule` is the name of a scale rule that fits this format."""
    is_book, is_power = isinstance(f.element, Codebook), f.has_power_scale
    rules = [r for r in POWER_RULES if r != "even" or not is_book] if is_power else ["amax"]
    rules += ["absmax"] if f.scale == CATALOGUE["fp32"] else []
    word = rule if isinstance(rule, str) else ""
    steps = float(match[1]) if (match := _SHIFTED.fullmatch(word)) else 0.0
    lands_on = float(match[1]) if (match := _LANDING.fullmatch(word)) else 0.0
    last_place = math.ldexp(1.0, -min(f.element.mantissa_bits, 22)) if is_power and not is_book else 0.0
    is_shift = 0 < steps * last_place <= 1 and (steps * last_place * 2**23).is_integer()
    if word in rules or is_shift or (not is_power and 0 < lands_on <= 2 * f.element.largest):
        return
    rules += [] if is_power and is_book else ["uos(k)"] if is_power else ["amax/d"]
    hint = did_you_mean(rule, SCALE_RULES) if word else ""
    if word in POWER_RULES or steps:
        hint = " Scales that are powers of two are those of scale='e8m0fnu'."
    if is_power and steps:
        hint = f" {f.element} has no unit in the last place." if is_book else f" k is from 0 to {1 / last_place:g}."
    if not is_power and lands_on:
        hint = f" d is from 0 to {2 * f.element.largest:g}, twice the largest element."
    raise ValueError(
        f"scale_rule={shown(rule)} is invalid with scales in {f.scale}.{hint} Expected: {', '.join(rules)}"
        + ("." if is_power else ", or Delayed() for a tensor with scale='fp32'.")
    )


_PER = re.compile(
    r"(\S+) per (tensor|row|\d+|(\d+) ?x ?(\d+))((?: [a-z0-9_]+(?:[/(]\S*)?)*?)( saturate)?"
    r"(?: at (\d+(?:\.\d+)?(?:e-?\d+)?))?"
)


def _systematic_name(f: BlockFormat) -> str | None:
    """Return '<element> per <block> [scale [fp32 [per <block>]]] [rule] [saturate] [at gain]'; None if lossy."""
    size = "x".join(map(str, f.block)) if isinstance(f.block, tuple) else f.block
    words = [str(f.element).replace("symmetric ", ""), "per", str(size)]
    if isinstance(f.element, FixedPoint):
        words[0] = f"int{f.element.word_length}"
    if not f.has_power_scale:
        words += [str(f.scale), *(["fp32"] if f.tensor_scale else [])]
        words += [] if isinstance(f.tensor_scale, bool) else ["per", str(f.tensor_scale)]
    if f.scale_rule != f._default_rule:
        words.append("delayed" if f.is_delayed else str(f.scale_rule))
    if f.nonfinite != "nan":
        words.append(f.nonfinite)
    if f.gain != 1:
        words += ["at", repr(float(f.gain))]
    name = " ".join(words)
    # A code book without a name is shown by a digest, which cannot be parsed.
    if isinstance(f.element, Codebook) and str(f.element) not in CODEBOOKS:
        return name if not f.least_amax and (not f.is_delayed or f.scale_rule == Delayed()) else None
    return name if _from_words(name) == f else None


def _from_words(name: str) -> BlockFormat | None:
    """Parse a name as `_systematic_name` writes it; None for any other name."""
    match = _PER.fullmatch(name)
    if match is None:
        return None
    block = (int(match[3]), int(match[4])) if match[3] else int(match[2]) if match[2].isdigit() else match[2]
    scale: str | None = None
    rule: str | Delayed | Choose | None = None
    has_two: bool | int | str = False
    words = match[5].split()
    if words[1:3] == ["fp32", "per"]:
        has_two = int(words[3]) if words[3:] and words[3].isdigit() else " ".join(words[3:4])
        del words[1:4]
    for word in words:
        if word == "delayed":
            rule, scale = Delayed(), "fp32"
        elif match_of_choice := _CHOICE.fullmatch(word):
            rule = Choose(tuple(match_of_choice[2].split(",")), match_of_choice[1])
        elif word in SCALE_RULES or not word.isidentifier():
            rule = word
        elif word == "fp32" and scale is not None:
            has_two = True  # the second of two formats is the format of the tensor's scale
        else:
            scale = word
    scale = scale or ("fp32" if str(rule).startswith(("amax", "absmax")) else "e8m0fnu")
    gain, nonfinite = float(match[7] or 1.0), "saturate" if match[6] else "nan"
    return BlockFormat(as_element(match[1]), block, as_float_format(scale), rule, has_two, gain, 0.0, nonfinite)  # type: ignore[arg-type]


Format = FloatFormat | FixedPoint | Codebook | BlockFormat
_CALL = re.compile(r"(FixedPoint|Codebook|BlockFormat)\(.*\)", re.DOTALL)


def as_element(fmt: str | Element) -> Element:
    """Return the format of single numbers for a name, a `repr` or a format. Block formats are refused."""
    parsed = as_format(fmt)
    if isinstance(parsed, BlockFormat):
        raise ValueError(
            f"{fmt!r} shares its scales among numbers, and a format of single numbers is expected here. "
            f"Use the format of its elements, '{parsed.element}'."
        )
    return parsed


def as_format(fmt: Any) -> Format:
    """Return the format for a name, a `repr` or a format.

    Args:
        fmt: a name of the catalogues ("fp16", "e4m3fn", "mxfp4", "nvfp4"); an alias ("half"); eXmY, eXmYfn or eXmYfnuz
            for any other format with the standard bias; "int8" and the like; a code book's name ("nf4", "dynamic8",
            "hif8"); "<element> per <block> [scale [fp32 [per <block>]]] [rule] [saturate] [at gain]" for elements that
            share a scale ("e4m3fn per tensor fp32", "int4 per 32", "e4m3fn per 128x128 ceil", "e2m1fn per 16x16 e4m3fn
            fp32", "e2m1fn per 16 e4m3fn fp32 per row", "e2m1fn per 32 at 0.75", "dynamic8 per 256 fp32"); the `repr` of
            a format; a format; a floating dtype of torch, NumPy or ml_dtypes (torch.float8_e4m3fn); or gfloat's
            FormatInfo.

    Raises:
        ValueError: for an unknown name.
        TypeError: for an object that describes no format.

    >>> as_format("half") is as_format("fp16")
    True
    >>> as_format("e3m3")
    FloatFormat(exponent_bits=3, mantissa_bits=3, bias=3, specials='ieee', subnormals=True)
    >>> as_format("int4 per row").element.values()[:3]
    (-7.0, -6.0, -5.0)
    """
    if isinstance(fmt, FixedPoint | Codebook | BlockFormat):
        return fmt
    if isinstance(fmt, str):
        return _parse(fmt)
    return fmt if isinstance(fmt, FloatFormat) else from_other_library(fmt)


@cache
def _parse(text: str) -> Format:
    name = text.strip().lower()
    if name in BLOCKS:
        return BLOCKS[name]
    if name in CODEBOOKS:
        return CODEBOOKS[name]
    if (found := named_fixed_point(name) or _from_words(name)) is not None:
        return found
    if _CALL.fullmatch(text.strip()):
        return _from_repr(text)
    hint = did_you_mean(name, [*BLOCKS, *CATALOGUE, *ALIASES, *CODEBOOKS], 3, NAMES_OF_OTHERS)
    books, blocks = ", ".join(CODEBOOKS), ", ".join(BLOCKS)
    hint = f"{hint} Blocks: {blocks}, or such as 'e4m3fn per tensor fp32'. Code books: {books}."
    return as_float_format(text, hint)


def _from_repr(text: str) -> Format:
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"Unknown format {shown(text)}: {error}") from None
    if not isinstance(value, FixedPoint | Codebook | BlockFormat):
        raise ValueError(f"Unknown format {shown(text)}.")
    return value


def _evaluate(node: ast.expr) -> Any:
    """Evaluate a literal, or a call of a format's class with such arguments, and execute nothing else."""
    if isinstance(node, ast.Tuple):
        return tuple(map(_evaluate, node.elts))
    # The `repr` of a code book contains these names.
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Name):
        return -_evaluate(node.operand)
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    kinds = {kind.__name__: kind for kind in (FloatFormat, FixedPoint, Codebook, BlockFormat, Delayed, Choose)}
    if not isinstance(node.func, ast.Name) or node.func.id not in kinds:
        raise ValueError(f"a call of something else than {', '.join(kinds)}")
    named = {str(k.arg): _evaluate(k.value) for k in node.keywords}
    return kinds[node.func.id](*map(_evaluate, node.args), **named)


BLOCKS: dict[str, BlockFormat] = {
    "mxfp8_e4m3": BlockFormat(CATALOGUE["e4m3fn"], 32),  # OCP MX v1.0, table 1, as the next five
    "mxfp8_e5m2": BlockFormat(CATALOGUE["e5m2"], 32),
    "mxfp6_e2m3": BlockFormat(CATALOGUE["e2m3fn"], 32),
    "mxfp6_e3m2": BlockFormat(CATALOGUE["e3m2fn"], 32),
    "mxfp4": BlockFormat(CATALOGUE["e2m1fn"], 32),
    "mxint8": BlockFormat(FixedPoint(8, 6), 32),
    "nvfp4": BlockFormat(CATALOGUE["e2m1fn"], 16, CATALOGUE["e4m3fn"], tensor_scale=True),  # arXiv 2509.25149
    "nvfp4_4over6": BlockFormat(  # arXiv 2512.02010
        CATALOGUE["e2m1fn"], 16, CATALOGUE["e4m3fn"], Choose(("amax/6", "amax/4")), tensor_scale=True
    ),
    "nvfp4_row": BlockFormat(  # a second scale for each token: NVIDIA TransformerEngine
        CATALOGUE["e2m1fn"], 16, CATALOGUE["e4m3fn"], tensor_scale="row"
    ),
    "nvint4": BlockFormat(FixedPoint(4, 0), 16, CATALOGUE["e4m3fn"], tensor_scale=True),  # arXiv 2510.25602
    "msfp12": BlockFormat(FixedPoint(4, 2), 16),  # Rouhani et al., NeurIPS 2020: a sign, 3 bits, a shared exponent
    "msfp16": BlockFormat(FixedPoint(8, 6), 16),
}

_BLOCK_NAMES = {f: name for name, f in BLOCKS.items()}
