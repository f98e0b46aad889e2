"""Products: the formats in which the operands of a layer's three matrix products are quantised.

`y = x w^T` is the forward product, `dx = dy w` is the data gradient, and `dw = dy^T x` is the weight gradient. Each
product has two operands. Each operand is quantised along the axis over which its product sums, from the tensor as it
was before any quantisation. So the copy of w for dx is not the transpose of the copy for y. An operand's `source` can
change that: with "fprop" the backward pass reuses the forward operands, as in quantisation-aware training, or if only
one copy is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fpsim.checks import known_arguments, require_whole, require_word, shown
from fpsim.formats.floats import FloatFormat
from fpsim.policies.attention import Attention
from fpsim.policies.operand import (
    Operand,
    OperandLike,
    ProductSpecs,
    as_operand,
    in_accumulators,
    is_of_few_bits,
    stochastic,
    with_rounding,
)
from fpsim.tensors.accumulators import ACCUMULATORS, Accumulator, as_accumulator
from fpsim.tensors.spec import rounding_spec

__all__ = ["PRODUCTS", "ProductSpecs", "Products"]

PRODUCTS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}  # each with its operands
BACKWARDS = ("original", "dequantized", "float32")


@known_arguments()
@dataclass(frozen=True)
class Products:
    """The operands of a layer's three matrix products.

    An operand is given as a format, its name, an `Operand`, or None, which does not quantise it.

    Args:
        fprop: (x, w), the operands of y = x w^T.
        dgrad: (dy, w), the operands of dx = dy w.
        wgrad: (dy, x), the operands of dw = dy^T x.
        output: the format of y, if the policy has none for activations; a format of single numbers. The gradient of y
            passes straight through.
        accumulator: the accumulator of all three products: an `Accumulator` or its name, such as "fp16" or
            "hopper_fp8". None leaves the sums to torch, in float32. The bias is added in the accumulator too. A tuple
            of three has an accumulator for each product, in their order; then all products are in float32, even in a
            float64 model. For example, a layer whose terms lie on four ranks in fprop has
            `(Accumulator("fp32", order="torch", splits=4, split_format="bf16"), None, None)`. An accumulator that
            aligns groups takes the formats of the operands given here; its own formats apply to operands that are not
            quantised. Operands with scales, shared or of a gradient, count with the exponents of their leading bits.
        backward: the source of w in dgrad and of x in wgrad. dy is as given in `dgrad` and `wgrad`. "original" takes
            the operands of `dgrad` and `wgrad`. "dequantized" replaces them by the operands that the forward product
            used, as in quantisation-aware training, and "float32" by the tensors without quantisation. With
            `Products.all`, the latter two do not quantise dy either: the backward pass is in float32, as with
            TransformerEngine's `backward_override`.
        attention: whether products of two activations are quantised too. If False, these are left alone: attention's
            two products, inside of `scaled_dot_product_attention` or written as `q @ k`, and any other matmul, bmm or
            einsum in which no operand is a parameter or a view of a parameter. `linear`, `bilinear` and convolutions
            always count as products with a weight. An `Attention` has its own operands and points for attention;
            products with a weight keep the operands given here.

    Raises:
        ValueError: for anything but an operand, by its value.
        TypeError: for anything but an operand, by its type.

    >>> print(Products(fprop=("e4m3fn", "e4m3fn"), dgrad=("e5m2", "e4m3fn"), wgrad=("e5m2", "e4m3fn")))
    fprop=(e4m3fn nearest_even, e4m3fn nearest_even), dgrad=(e5m2 nearest_even, e4m3fn nearest_even), \
wgrad=(e5m2 nearest_even, e4m3fn nearest_even)
    >>> print(Products.all("mxfp8_e4m3", output="bf16"))
    mxfp8_e4m3 nearest_even, output=bf16 nearest_even
    >>> print(Products.all("mxfp4", backward="dequantized"))
    fprop=(mxfp4 nearest_even, mxfp4 nearest_even), dgrad=(as it is, as in fprop), wgrad=(as it is, as in fprop)
    """

    fprop: tuple[OperandLike, OperandLike] = (None, None)
    dgrad: tuple[OperandLike, OperandLike] = (None, None)
    wgrad: tuple[OperandLike, OperandLike] = (None, None)
    output: OperandLike = None
    accumulator: Accumulator | FloatFormat | str | tuple[Accumulator | FloatFormat | str | None, ...] | None = None
    attention: bool | Attention = False
    backward: str = "original"

    def __post_init__(self) -> None:
        for product, names in PRODUCTS.items():
            object.__setattr__(self, product, _pair(product, names, getattr(self, product)))
        _take_backward(self)
        _require_sources(self)
        if self.output is not None:
            output = as_operand("output", self.output)
            if output.is_own:
                raise TypeError(
                    f"output={shown(self.output)} is a function. Expected: a format of single numbers, or its name."
                )
            object.__setattr__(self, "output", output)
        if isinstance(self.accumulator, tuple | list):
            object.__setattr__(self, "accumulator", _three(self.accumulator))
        elif self.accumulator is not None:
            object.__setattr__(self, "accumulator", as_accumulator(self.accumulator))
        if not isinstance(self.attention, bool | Attention):
            raise TypeError(
                f"attention={shown(self.attention)} is invalid. Expected: True, False, or a fpsim.Attention(q=..., "
                f"k=...), which says where it rounds."
            )
        if self.points is not None and self.points.is_plain:
            object.__setattr__(self, "attention", False)
        _require_equal_transforms(self)
        self.specs  # noqa: B018  # raises an error for a block format as an output now, not in a forward pass

    @classmethod
    def all(
        cls,
        fmt: OperandLike,
        rounding: str | None = None,
        overflow: str | None = None,
        random_bits: int | None = None,
        variant: str = "A",
        **rest: Any,
    ) -> Products:
        """Return products whose operands are all in one format.

        fmt, rounding, overflow, random_bits, variant: as in `Operand`.
        rest: `output`, `accumulator`, `attention`, `backward`, and products with other operands.

        >>> print(Products.all("mxfp4", wgrad=(None, None)).dgrad[0])
        mxfp4 nearest_even
        """
        is_whole = isinstance(fmt, Operand | None)
        one = fmt if is_whole else Operand(fmt, rounding, overflow, random_bits, None, variant)  # type: ignore[arg-type]
        # If `backward` is not "original", the backward pass has no separate operands, so only fprop has the format.
        names = PRODUCTS if rest.get("backward", "original") == "original" else ("fprop",)
        return cls(**{**dict.fromkeys(names, (one, one)), **rest})

    @classmethod
    def by_operand(cls, x: OperandLike = None, w: OperandLike = None, dy: OperandLike = None, **rest: Any) -> Products:
        """Return products in which each operand has the same format in both of its products.

        x: the input, in fprop and wgrad.
        w: the weight, in fprop and dgrad.
        dy: the gradient of the result, in dgrad and wgrad.
        rest: `output`, `attention`, `backward` and `accumulator`, if any.

        >>> print(Products.by_operand(dy="e5m2").dgrad[0], Products.by_operand(dy="e5m2").fprop)
        e5m2 nearest_even (None, None)
        """
        if rest.get("backward", "original") != "original":
            return cls(fprop=(x, w), dgrad=(dy, None), wgrad=(dy, None), **rest)
        return cls(fprop=(x, w), dgrad=(dy, w), wgrad=(dy, x), **rest)

    @cached_property
    def specs(self) -> ProductSpecs:
        """The specs of each operand."""
        output, given = self.output, self.accumulator
        assert output is None or isinstance(output, Operand)
        each = given if isinstance(given, tuple) else (given,) * 3
        one, two, three = (ACCUMULATORS["fp32"] if a is None else as_accumulator(a) for a in each)
        fprop, dgrad, wgrad = (getattr(self, product) for product in PRODUCTS)
        accumulators, scaled = in_accumulators((one, two, three), fprop, dgrad, wgrad)
        rounding = None if output is None else rounding_spec(output.fmt, *output.words)  # type: ignore[arg-type]
        return ProductSpecs(fprop, dgrad, wgrad, rounding, accumulators, scaled)

    @property
    def points(self) -> Attention | None:
        """The points of attention; None if `attention` is not an `Attention`."""
        return self.attention if isinstance(self.attention, Attention) else None

    @property
    def is_delayed(self) -> bool:
        """True if the scale of any operand depends on earlier steps."""
        is_one = any(o is not None and o.is_delayed for p in PRODUCTS for o in getattr(self, p))
        return is_one or (self.points is not None and self.points.is_delayed)

    def with_rounding(self, rounding: str) -> Products:
        """Return the same products, with another rounding of every operand."""
        fprop, dgrad, wgrad = ((with_rounding(a, rounding), with_rounding(b, rounding)) for a, b in self.specs[:3])
        attention = self.points.with_rounding(rounding) if self.points else self.attention
        return replace(self, fprop=fprop, dgrad=dgrad, wgrad=wgrad, attention=attention)

    def with_stochastic_gradients(self, most_bits: int) -> Products:
        """Return the same products, with dy rounded stochastically in formats of at most `most_bits` bits.

        A rounding that the user has named stays, and so do blocks that share scales.
        """
        require_whole("most_bits", most_bits, 1)
        (_, dgrad, wgrad), attention = self.specs[:3], self.attention
        if self.points is not None:
            attention = self.points.with_stochastic_gradients(most_bits)
        if not (is_of_few_bits(dgrad[0], most_bits) or is_of_few_bits(wgrad[0], most_bits)) and (
            attention == self.attention
        ):
            return self
        dgrad, wgrad = ((stochastic(dy, most_bits), other) for dy, other in (dgrad, wgrad))
        return replace(self, dgrad=dgrad, wgrad=wgrad, attention=attention)

    def __str__(self) -> str:
        words = {p: tuple(str(o or "as it is") for o in getattr(self, p)) for p in PRODUCTS}
        all_words = {word for pair in words.values() for word in pair}
        texts = [*all_words] if len(all_words) == 1 else [f"{p}=({', '.join(pair)})" for p, pair in words.items()]
        if self.output is not None:
            texts.append(f"output={self.output}")
        if self.accumulator is not None:
            each = self.accumulator if isinstance(self.accumulator, tuple) else (self.accumulator,)
            words_of_each = ", ".join(str(a or "fp32") for a in each)
            texts.append(f"accumulator={words_of_each if len(each) == 1 else f'({words_of_each})'}")
        if self.attention:
            texts.append("attention too" if self.points is None else f"attention=({self.points})")
        return ", ".join(texts)


def _three(
    given: Sequence[Accumulator | FloatFormat | str | None],
) -> tuple[Accumulator | None, ...] | Accumulator | None:
    """Return the accumulators of the three products; a single one if all are equal."""
    if len(given) != len(PRODUCTS):
        raise ValueError(
            f"accumulator={shown(given)} has {len(given)}. Expected: one for all products, or three in the order of "
            f"{', '.join(PRODUCTS)}, None for torch's own."
        )
    each = tuple(None if a is None else as_accumulator(a) for a in given)
    return each[0] if len({*each}) == 1 else each


def _take_backward(products: Products) -> None:
    """Convert `backward` to operands of dgrad and wgrad, and reset the field to "original"."""
    require_word("backward", products.backward, BACKWARDS)
    if products.backward == "original":
        return
    for product, of_fprop in (("dgrad", products.fprop[1]), ("wgrad", products.fprop[0])):
        dy, given = getattr(products, product)
        if given is not None:
            raise ValueError(
                f"{product}=({dy}, {given}) was given with backward={products.backward!r}, which says what its second "
                f"operand is. Expected: one of the two; ({dy}, None) keeps dy."
            )
        comes = products.backward == "dequantized" and of_fprop is not None
        object.__setattr__(products, product, (dy, Operand(None, source="fprop") if comes else None))
    object.__setattr__(products, "backward", "original")


def _require_sources(products: Products) -> None:
    """Raise ValueError for a source that does not exist, or that an operand of this product cannot have."""
    specs = {product: getattr(products, product) for product in PRODUCTS}
    for product, pair in specs.items():
        if product != "fprop" and any(o is not None and o.ste == "clip" for o in pair):
            raise ValueError(f"{product} has ste='clip'. Expected: it at x or w of fprop, whose gradient it clips.")
    for product, (first, second) in specs.items():
        name = PRODUCTS[product][1]
        wrong = [n for n, o in zip(PRODUCTS[product], (first, second), strict=True) if o and o.source == "fprop"]
        if wrong and (product == "fprop" or wrong != [name]):
            raise ValueError(
                f"{product}: {wrong[0]} has source='fprop'. Expected: it at w of dgrad and at x of wgrad, which the "
                f"forward product has used before."
            )
        if not wrong:
            continue
        of = specs["fprop"][PRODUCTS["fprop"].index(name)]
        if of is None:
            raise ValueError(
                f"{product}: {name} has source='fprop', and fprop leaves {name} as it comes: nothing would change. "
                f"Expected: an operand for {name} in fprop; or source='original'."
            )
        if of.hadamard is not None and of.hadamard.signs == "random":
            raise ValueError(
                f"{product}: {name} has source='fprop', where {name} is transformed with random signs, {of}: its "
                f"gradient is transformed back, and those signs are not kept. Expected: signs that are fixed, or none."
            )


def _require_equal_transforms(products: Products) -> None:
    for product, names in PRODUCTS.items():
        a, b = (o and o.hadamard for o in getattr(products, product))
        if a != b:
            raise ValueError(
                f"{product}: {names[0]} has {a or 'no Hadamard transform'}, {names[1]} with "
                f"{b or 'none'}. Both operands of a product are transformed alike, so that it stays what it is."
            )


def _pair(product: str, names: tuple[str, str], value: object) -> tuple[Operand | None, Operand | None]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(
            f"{product}={shown(value)} is not a pair of operands. Expected: ({', '.join(names)}), each a format, an "
            f"Operand, or None to leave it as it comes; Products.all(fmt) for all operands in one format."
        )
    a, b = (None if v is None else as_operand(f"{product}: {n}", v) for n, v in zip(names, value, strict=True))
    return a, b
