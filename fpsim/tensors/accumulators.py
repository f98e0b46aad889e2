"""Accumulators of matrix products: format and rounding of the sum, chunks, aligned groups, and splits over ranks."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from fpsim.checks import did_you_mean, is_whole, refuse, shown
from fpsim.formats.floats import CATALOGUE, ROUNDINGS_OF_OTHERS, FloatFormat, as_float_format
from fpsim.kernels.core import MOST_BITS, ROUNDINGS, require_variant

__all__ = ["ACCUMULATORS", "Accumulator", "as_accumulator"]

ORDERS = ("ascending", "torch")
SPLIT_ORDERS = ("ring", "tree", "linear")  # the orders of tensors.reductions
# The largest number of products in a group: the rows of an operand that a group reads have to fit in the cache.
LARGEST_GROUP = 1024
MOST_SPLITS = 1024
EXACT_BITS = 53  # bits of the significand of float64, in which sums are computed
PRODUCT_EXPONENTS = (-298, 255)  # least and largest exponent of a product of two float32

Operands = str | FloatFormat | None  # the format of an operand


@dataclass(frozen=True)
class Accumulator:
    """The arithmetic in which a matrix product is added up: `sum = round(sum + a * b)` for each term, from +0.

    The sum of accumulator and product is exact before it is rounded once, as a fused multiply-add is.

    Accumulators are values: equal fields make equal, hashable accumulators, and `as_accumulator(repr(a)) == a`.

    Args:
        format: the format of the accumulator; a name or a FloatFormat.
        rounding: "nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd" or "stochastic".
        overflow: "inf", "nan" or "saturate"; None means inf in formats that have an inf, and the largest value in
            others.
        random_bits: the number of random bits of every stochastic rounding. None means 32, or as many as a sum of two
            numbers offers: 52 - p for a format of p significant bits.
        product: the format to which each product is rounded before it is added; None means exact products.
        product_rounding: the rounding of products.
        chunk: the number of terms that an inner accumulator adds up, from +0; its result is then added to an outer
            accumulator, with one rounding. None means a single accumulator.
        outer, outer_rounding: format and rounding of the outer accumulator; None means those of the inner accumulator.
        group: the number of products that, with the accumulator, are aligned to the largest exponent among them, cut
            off below `group_bits` significant bits, added exactly and rounded together. The exponent of a product is
            the sum of the exponents of its factors. A sum whose exponent is too large for the format overflows, even
            with rounding toward zero. None means that terms are added one by one.
        group_bits: see group; a number with the largest exponent keeps this number of significant bits.
        sum_bits: with this, the products of a group are aligned and added first, and their sum is added to the
            accumulator later, as on AMD's CDNA3. Both are aligned to the larger exponent of the two, where a
            subnormal accumulator and a zero have the format's least exponent. Both are cut off toward minus infinity:
            the sum of products below `sum_bits` + 1 significant bits, and the accumulator below `group_bits`. The
            result is normalised, and cut off in the same way below `sum_bits`, before it is rounded. A product beyond
            the format's largest number overflows. None means that products and accumulator are added together.
        operands: the format of the operands of a group, or a pair of formats, of a and of b, with None for an unknown
            format. A subnormal then counts with its format's least exponent, as in hardware, which reads the exponent
            field; so does a subnormal sum. Operands are not rounded; a number smaller than the format's values counts
            as a subnormal. If the format is None, each number counts with the exponent of its leading bit.
        zero_exponent: the exponent with which a zero product or sum counts in a group; None means that zeros do not
            count.
        order: "ascending", which is term by term; "torch" leaves the product to torch, in float32 and in its order.
        variant: the variant of every stochastic rounding with random_bits, as in `round_to`.
        splits: the number of parts of the terms, as over the ranks of tensor parallelism. Each part is added up as
            described above and rounded to `split_format`, and the parts are summed in that format. Parts are as long as
            `torch.chunk` makes them. None means a single part.
        split_format: see splits; None means "fp32".
        split_order: the order in which parts are summed, "ring", "tree" or "linear", as in `all_reduce`.

    Raises:
        ValueError: for fields that do not fit together, such as an accumulator that cannot hold one product.

    >>> Accumulator("cb16", chunk=64) == as_accumulator("cb16_chunk64")
    True
    >>> Accumulator("fp16", rounding="stochastic", product="e5m7")
    Accumulator('fp16', rounding='stochastic', product='e5m7')
    >>> Accumulator("fp32", order="torch", splits=4, split_format="bf16")  # four ranks, whose sums are sent in bf16
    Accumulator('fp32', order='torch', splits=4, split_format='bf16')
    """

    format: str | FloatFormat
    rounding: str = "nearest_even"
    overflow: str | None = None
    random_bits: int | None = None
    product: str | FloatFormat | None = None
    product_rounding: str = "nearest_even"
    chunk: int | None = None
    outer: str | FloatFormat | None = None
    outer_rounding: str | None = None
    group: int | None = None
    group_bits: int | None = None
    sum_bits: int | None = None
    operands: Operands | tuple[Operands, Operands] = None
    zero_exponent: int | None = None
    order: str = "ascending"
    variant: str = "A"
    splits: int | None = None
    split_format: str | FloatFormat | None = None
    split_order: str = "ring"

    def __post_init__(self) -> None:
        for name in ("format", "product", "outer", "split_format"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _format_with_zero(value, name))
        _require_roundings(self)
        # Defaults that are written out become None, so that equal accumulators have equal fields.
        if self.overflow is not None:
            overflow = as_float_format(self.format).resolve_overflow(self.overflow)
            is_default = overflow == as_float_format(self.format).resolve_overflow()
            object.__setattr__(self, "overflow", None if is_default else overflow)
        _require_chunks(self)
        if self.outer == self.format:
            object.__setattr__(self, "outer", None)
        if self.outer_rounding == self.rounding:
            object.__setattr__(self, "outer_rounding", None)
        _require_groups(self)
        # Operands are checked after the groups: operands, sum_bits and zero_exponent are refused without a group.
        _take_operands(self)
        _require_room_for_products(self)
        _require_order(self)
        _require_random_bits(self)
        _require_splits(self)

    def __repr__(self) -> str:
        words = [repr(str(self.format))]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                pair = tuple(v and str(v) for v in value) if isinstance(value, tuple) else None
                words.append(f"{field.name}={pair or (str(value) if isinstance(value, FloatFormat) else value)!r}")
        return f"Accumulator({', '.join(words)})"

    def __str__(self) -> str:
        return next((name for name, known in ACCUMULATORS.items() if known == self), None) or repr(self)

    @property
    def roundings(self) -> tuple[str, str | None, str]:
        """Roundings of the accumulator, of products (None if they stay exact) and of the outer accumulator."""
        return self.rounding, self.product_rounding if self.product else None, self.outer_rounding or self.rounding

    @property
    def is_torch(self) -> bool:
        """True if torch itself computes the whole product."""
        return self.order == "torch" and self.splits is None

    @property
    def result_format(self) -> FloatFormat:
        """Format of every value of a result."""
        return as_float_format(self.split_format or self.outer or self.format)

    @property
    def is_stochastic(self) -> bool:
        return "stochastic" in self.roundings

    @property
    def operand_formats(self) -> tuple[FloatFormat | None, FloatFormat | None]:
        """Formats of a and of b; None if unknown."""
        pair = self.operands if isinstance(self.operands, tuple) else (self.operands,) * 2
        return pair  # type: ignore[return-value]  # made formats by __post_init__

    @property
    def counted_exponents(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Least exponents with which a, b and a sum count in a group, and the exponent of a zero; None if not set."""
        a, b = (None if f is None else f.min_exponent for f in self.operand_formats)
        counts = self.operands is not None or self.sum_bits is not None
        of_sum = as_float_format(self.format).min_exponent if counts else None
        return a, b, of_sum, self.zero_exponent

    @property
    def turned(self) -> Accumulator:
        """The accumulator of b^T a^T, with the formats of the operands exchanged."""
        if not isinstance(self.operands, tuple):
            return self
        return replace(self, operands=self.operands[::-1])

    def random_bits_of(self, fmt: FloatFormat) -> int | None:
        """Return the number of random bits that round a sum to `fmt`; None for all 32."""
        offered = EXACT_BITS - 1 - fmt.precision
        return offered if self.random_bits is None and offered < 32 else self.random_bits


def _format_with_zero(value: str | FloatFormat, name: str) -> FloatFormat:
    f = as_float_format(value)
    if not f.has_zero:
        raise ValueError(
            f"{name}={f!s} cannot accumulate: it has no zero to start from, and no sign. "
            f"Expected: any other format, such as 'fp16'."
        )
    return f


def _require_roundings(a: Accumulator) -> None:
    for name in ("rounding", "product_rounding", "outer_rounding"):
        value = getattr(a, name)
        is_known = isinstance(value, str) and value in ROUNDINGS
        if not is_known and not (value is None and name == "outer_rounding"):
            raise ValueError(
                refuse(f"Unknown {name} {shown(value)}", ROUNDINGS, word=value, others=ROUNDINGS_OF_OTHERS)
            )
    if a.product is None and a.product_rounding != "nearest_even":
        raise ValueError(
            f"product_rounding={shown(a.product_rounding)} was given without a product format, so that products stay "
            f"exact. Give product='fp16' or another format, or omit product_rounding."
        )


def _require_chunks(a: Accumulator) -> None:
    if a.chunk is None:
        for name in ("outer", "outer_rounding"):
            if getattr(a, name) is not None:
                raise ValueError(
                    f"{name}={getattr(a, name)!s} was given without a chunk: there is one accumulator. "
                    f"Give chunk=64 or another number of terms, or omit {name}."
                )
    elif not is_whole(a.chunk, 1) or a.chunk >= 2**31:
        raise ValueError(
            f"chunk={shown(a.chunk)} is not a number of terms. Expected: an integer from 1 to 2**31 - 1, or None."
        )


def _require_groups(a: Accumulator) -> None:
    if (a.group is None) != (a.group_bits is None):
        raise ValueError(
            f"group={shown(a.group)} was given with group_bits={shown(a.group_bits)}. Give both, the number of "
            f"products and the significant bits that they keep, as group=32, group_bits=14; or neither."
        )
    if a.group is None or a.group_bits is None:
        return
    if not is_whole(a.group, 1) or a.group > LARGEST_GROUP:
        raise ValueError(
            f"group={shown(a.group)} is not a number of products. Expected: the integers 1 to {LARGEST_GROUP}."
        )
    # Each of group + 1 numbers is below 2**(group_bits + 1) units of the last bit that is kept.
    most = EXACT_BITS - 1 - int(a.group).bit_length()
    if not is_whole(a.group_bits, 1) or a.group_bits > most:
        raise ValueError(
            f"group_bits={shown(a.group_bits)} is invalid. Expected: 1 to {most} for groups of {a.group}, whose "
            f"sum has to be exact in {EXACT_BITS} bits."
        )
    # The limit of sum_bits is lower, because a sum of products keeps one bit more, and is added to the accumulator.
    most = EXACT_BITS - 4 - int(a.group).bit_length()
    if a.sum_bits is not None and not (is_whole(a.sum_bits, a.group_bits) and a.sum_bits <= most):
        raise ValueError(
            f"sum_bits={shown(a.sum_bits)} is invalid. Expected: {a.group_bits}, as many as group_bits, to {most} for "
            f"groups of {a.group}, whose sum has to be exact in {EXACT_BITS} bits; or None."
        )
    if a.product is not None:
        raise ValueError(
            f"product={a.product!s} was given with group={a.group}: products of a group are cut off where the largest "
            f"of them ends, not rounded to a format. Omit one of the two."
        )


def _take_operands(a: Accumulator) -> None:
    """Normalise `operands` to None, one format, or a pair of two different formats."""
    for name in ("sum_bits", "operands", "zero_exponent"):
        if getattr(a, name) is not None and a.group is None:
            raise ValueError(
                f"{name}={shown(getattr(a, name))} was given without a group: terms are added one by one, and no "
                f"exponents are compared. Give group=8, group_bits=25 or the like, or omit {name}."
            )
    if isinstance(a.operands, tuple | list):
        if len(a.operands) != 2:
            raise ValueError(
                f"operands={shown(a.operands)} has {len(a.operands)}. Expected: the format of both operands, or a pair "
                f"of formats, of a and of b, None for one that is not known."
            )
        pair = tuple(None if f is None else _operand_format(f) for f in a.operands)
        object.__setattr__(a, "operands", pair[0] if pair[0] == pair[1] else pair)
    elif a.operands is not None:
        object.__setattr__(a, "operands", _operand_format(a.operands))
    if a.zero_exponent is not None and a.sum_bits is not None:
        raise ValueError(
            f"zero_exponent={shown(a.zero_exponent)} was given with sum_bits={a.sum_bits}: zeros do not count among "
            f"products that meet the accumulator later. Omit one of the two."
        )
    least, largest = PRODUCT_EXPONENTS
    if a.zero_exponent is not None and not (is_whole(a.zero_exponent, least) and is_whole(-a.zero_exponent, -largest)):
        raise ValueError(
            f"zero_exponent={shown(a.zero_exponent)} is invalid. Expected: an exponent from {least} to {largest}, "
            f"as products of float32 have them, or None."
        )


def _operand_format(fmt: Any) -> FloatFormat:
    try:
        return as_float_format(fmt)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"operands={shown(fmt)} is not a format of an operand, whose least exponent counts. {error}"
        ) from None


def _require_room_for_products(a: Accumulator) -> None:
    if a.product is None:
        return
    f, product = as_float_format(a.format), as_float_format(a.product)
    fits = (
        product.mantissa_bits <= f.mantissa_bits
        and product.largest <= f.largest
        and product.min_ulp_exponent >= f.min_ulp_exponent
    )
    if not fits:
        raise ValueError(
            f"An accumulator in {f!s} is narrower than one product in {product!s}: it does not hold every value of "
            f"it. Expected: a product format within the accumulator's range and precision, the accumulator's own, or "
            f"product=None for exact products."
        )


def _require_order(a: Accumulator) -> None:
    if not isinstance(a.order, str) or a.order not in ORDERS:
        raise ValueError(refuse(f"Unknown order {shown(a.order)}", ORDERS, word=a.order))
    if a.order == "torch":
        for field in (f for f in fields(a) if f.name != "order" and not f.name.startswith("split")):
            value, wanted = getattr(a, field.name), CATALOGUE["fp32"] if field.name == "format" else field.default
            if value != wanted:
                raise ValueError(
                    f"order='torch' was given with {field.name}={value!s}. torch adds up in float32 and in an order of "
                    f"its own. Use Accumulator('fp32', order='torch'), or omit order."
                )


def _require_splits(a: Accumulator) -> None:
    if not isinstance(a.split_order, str) or a.split_order not in SPLIT_ORDERS:
        raise ValueError(refuse(f"Unknown split_order {shown(a.split_order)}", SPLIT_ORDERS, word=a.split_order))
    if a.splits is None:
        if a.split_format is not None or a.split_order != "ring":
            raise ValueError(
                f"split_format={a.split_format!s}, split_order={shown(a.split_order)} were given without splits: there "
                f"is one part. Give splits=4 or another number of ranks, or omit both."
            )
    elif not is_whole(a.splits, 2) or a.splits > MOST_SPLITS:
        raise ValueError(
            f"splits={shown(a.splits)} is not a number of parts. Expected: an integer from 2 to {MOST_SPLITS}, or None."
        )
    elif a.split_format is None:
        object.__setattr__(a, "split_format", CATALOGUE["fp32"])


def _require_random_bits(a: Accumulator) -> None:
    formats = [as_float_format(f) for f in (a.format, a.outer) if f is not None]
    most = min(32, *(EXACT_BITS - 1 - f.precision for f in formats))
    # A variant uses one bit more than random_bits. Below this bit, a sum rounded to odd has one last bit, which says
    # whether anything was cut off.
    require_variant(a.variant, a.is_stochastic, a.random_bits, min(most - 1, MOST_BITS))
    if a.random_bits is None:
        return
    if not a.is_stochastic:
        raise ValueError(
            f"random_bits={shown(a.random_bits)} was given without a 'stochastic' rounding, which alone uses them."
        )
    if not is_whole(a.random_bits, 1) or a.random_bits > most:
        raise ValueError(
            f"random_bits={shown(a.random_bits)} is invalid. Expected: 1 to {most}, or None for as many as there are."
        )


ACCUMULATORS: dict[str, Accumulator] = {
    "fp32": Accumulator("fp32", order="torch"),
    "fp16": Accumulator("fp16"),
    "cb16_chunk64": Accumulator("cb16", chunk=64),
    # Wang et al., NeurIPS 2018, 2.3: sums in (1, 6, 9), inside chunks of 64 and between them. cb16 has these fields.
    "wang2018": Accumulator(FloatFormat(6, 9), chunk=64),
    # DeepSeek-V3, 3.3.2: sums of 128 terms are added up in float32 outside of the tensor core.
    "hopper_fp8_chunk128": Accumulator(
        "e8m13", "toward_zero", chunk=128, outer="fp32", outer_rounding="nearest_even", group=32, group_bits=14,
        operands="e4m3fn",
    ),
    **{
        # Xie et al., arXiv 2511.10909 (MMA-Sim 2.1.1): a group has as many products as a step reads numbers of an
        # operand (8 bytes on Volta, 16 on Ampere and Ada, 32 on Hopper and Blackwell). Products are aligned with the
        # accumulator, and cut off below `group_bits`. The sum is cut off to float32, and for FP8 on Ada and Hopper to
        # e8m13 (DeepSeek-V3, arXiv 2412.19437, 3.5.2, reports e8m13 for Hopper). Zeros count for bf16 and TF32, whose
        # products have lower exponents: the exponent of a product of fp16 or FP8 is at least -28.
        name: Accumulator(
            fmt, "toward_zero", group=group, group_bits=bits, operands=operands,
            zero_exponent=-107 - bits if operands in ("bf16", "tf32") else None,
        )
        for name, fmt, group, bits, operands in (
            ("volta_fp16", "fp32", 4, 24, "fp16"),
            ("ampere_fp16", "fp32", 8, 25, "fp16"),
            ("ampere_bf16", "fp32", 8, 25, "bf16"),
            ("ampere_tf32", "fp32", 4, 25, "tf32"),
            ("ada_fp8", "e8m13", 16, 14, "e4m3fn"),
            ("hopper_fp16", "fp32", 16, 26, "fp16"),
            ("hopper_bf16", "fp32", 16, 26, "bf16"),
            ("hopper_fp8", "e8m13", 32, 14, "e4m3fn"),
            ("blackwell_fp8", "fp32", 32, 26, "e4m3fn"),
        )
    },
    # AMD's matrix cores by the same source: 24 fraction bits to add up products, 31 to add the sum to the accumulator
    **{
        f"cdna3_{name}": Accumulator("fp32", group=group, group_bits=25, sum_bits=32, operands=operands)
        for name, group, operands in (("fp16", 8, "fp16"), ("bf16", 8, "bf16"), ("xf32", 4, "tf32"))
    },
}  # fmt: skip
# Tensor cores that add up in the same way.
ALIASES = {
    "turing_fp16": "ampere_fp16",
    "ada_fp16": "ampere_fp16",
    "ada_bf16": "ampere_bf16",
    "blackwell_fp16": "hopper_fp16",
    "blackwell_bf16": "hopper_bf16",
}

_CHUNKED = re.compile(r"(.+)_chunk(\d+)")
_REPR = re.compile(r"Accumulator\((.*)\)", re.DOTALL)


def as_accumulator(accumulator: str | Accumulator | FloatFormat) -> Accumulator:
    """Return the accumulator for a name, a format, a `repr` or an accumulator.

    Args:
        accumulator: a name of ACCUMULATORS ("fp32", "fp16", "cb16_chunk64", "wang2018", "hopper_fp8",
            "hopper_fp8_chunk128", "ampere_fp16" and other tensor cores); any format's name, which means adding up in
            that format; a format's name with `_chunkN`; the `repr` of an accumulator; a FloatFormat; or an
            Accumulator. "fp32" is torch's own product; `Accumulator("fp32")` adds up in float32 term by term.

    Raises:
        ValueError: for an unknown name.
        TypeError: for an object that describes no accumulator.

    >>> as_accumulator("bf16_chunk32")
    Accumulator('bf16', chunk=32)
    >>> as_accumulator("hopper_fp8")
    Accumulator('e8m13', rounding='toward_zero', group=32, group_bits=14, operands='e4m3fn')
    """
    if isinstance(accumulator, Accumulator):
        return accumulator
    if isinstance(accumulator, FloatFormat):
        return _parse(str(accumulator))
    if not isinstance(accumulator, str):
        raise TypeError(
            f"Expected an accumulator, got {shown(accumulator)} of type {type(accumulator).__name__}. "
            f"Use a name such as 'fp16' or 'cb16_chunk64', or an Accumulator."
        )
    return _parse(accumulator)


@cache
def _parse(text: str) -> Accumulator:
    if match := _REPR.fullmatch(text.strip()):
        return _from_repr(text, match[1])
    name = text.strip().lower()
    if (name := ALIASES.get(name, name)) in ACCUMULATORS:
        return ACCUMULATORS[name]
    chunked = _CHUNKED.fullmatch(name)
    try:
        fmt = as_float_format(chunked[1] if chunked else text)
    except ValueError:
        hint = did_you_mean(name, [*ACCUMULATORS, *ALIASES, *CATALOGUE], 3)
        raise ValueError(
            f"Unknown accumulator {shown(text)}.{hint} Known: {', '.join(ACCUMULATORS)}; a format's name such as "
            f"'bf16', with chunks 'bf16_chunk64'; or Accumulator(format, ...)."
        ) from None
    # Under any of its names ("float32", "e8m23"), the format stands for torch's own product.
    if fmt == CATALOGUE["fp32"] and not chunked:
        return ACCUMULATORS["fp32"]
    return Accumulator(fmt, chunk=int(chunked[2]) if chunked else None)


def _from_repr(text: str, arguments: str) -> Accumulator:
    # The text is parsed as a call, and `literal_eval` reads the arguments: a `repr` from a file must not run code.
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return Accumulator(*positional, **named)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"Unknown accumulator {shown(text)}: {error}") from None
