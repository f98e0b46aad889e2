"""Products: in which format each operand of a layer's three matrix products enters it.

`y = x w^T` is the forward product, `dx = dy w` gives the data gradient, `dw = dy^T x` the weight gradient. Each has two
operands, and each operand is quantised along the axis that its product sums over, from the tensor as it was before any
quantisation: the copy of w for dx is not the transpose of the copy for y. Unless its source says otherwise: where one
copy is kept, and in quantisation-aware training, the backward pass uses what the forward product used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from fpsim.checks import known_arguments, require_whole, require_word, shown
from fpsim.formats.blocks import BlockFormat, Element, Format, as_format
from fpsim.formats.floats import FloatFormat
from fpsim.tensors.accumulators import ACCUMULATORS, Accumulator, as_accumulator
from fpsim.tensors.hadamard import Hadamard
from fpsim.tensors.own import own_format, own_spec
from fpsim.tensors.spec import OwnFormat, RoundingSpec, Spec, any_spec, rounding_spec

__all__ = ["PRODUCTS", "Operand", "OperandLike", "ProductSpecs", "Products"]

PRODUCTS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}  # each with its operands
SOURCES = ("original", "fprop")  # of an operand of the backward pass
_NO_WORDS = (None, None, None, "A")  # rounding, overflow, random bits and variant of an operand that has no format
BACKWARDS = ("original", "dequantized", "float32")
STES = ("pass", "clip")  # straight-through estimators


@dataclass(frozen=True)
class Operand:
    """How one operand of a product is quantised.

    Args:
        fmt: a format of single numbers or of blocks, or its name; None, for what comes from the forward product, leaves
            it as it was there. Or a function of your own, `f(x, axis)`: it is given a float32 of the operand's shape,
            without gradients, and the axis that the product sums over, and returns a float32 of that shape.
        rounding: as in `round_to`; None is nearest-even, but for gradients of few bits under a scaling: see `Policy`.
        overflow, random_bits, variant: as in `round_to`.
        hadamard: how it is transformed before, along the axis that the product sums over; the other operand of the
            product alike. An axis whose length the size does not divide is padded with zeros, which adds nothing to the
            product.
        source: what an operand of the backward pass is made of, w of dgrad or x of wgrad: the "original" tensor, or
            "fprop", the numbers that the forward product used, which are then rounded to `fmt`, if there is one, along
            the axis of this product (double quantisation).
        name: of a function of your own, where it is shown; unless given, the function's.
        ste: of an operand of the forward product, what its gradient does at elements that saturated (beyond the largest
            value by half an ulp): "pass", or "clip", which makes it zero, as torch's fake quantisation does. A function
            of your own then returns a pair: the numbers, and a bool tensor, True where the gradient passes.

    Raises:
        ValueError: as `round_to` does, and for a source that is not known, or that nothing would use.
        TypeError: as `round_to` does, and for what is not a `Hadamard`.

    >>> print(Operand("e5m2", "stochastic", random_bits=8))
    e5m2 stochastic 8 random bits
    >>> print(Operand("nvfp4", hadamard=Hadamard(16, "fixed")))
    nvfp4 nearest_even after Hadamard 16 fixed signs
    >>> print(Operand(None, source="fprop"))
    as in fprop
    >>> print(Operand(lambda x, axis: x.sign() * x.abs().mean(axis, keepdim=True), name="sign"))
    sign
    """

    fmt: Format | Callable[[Tensor, int], Tensor] | None
    rounding: str | None = None
    overflow: str | None = None
    random_bits: int | None = None
    hadamard: Hadamard | None = None
    variant: str = "A"
    source: str = "original"
    name: str | None = None
    ste: str = "pass"

    def __post_init__(self) -> None:
        require_word("source", self.source, SOURCES)
        require_word("ste", self.ste, STES)
        if callable(self.fmt) and not isinstance(self.fmt, type):
            self._take_function(self.fmt)
        elif self.name is not None and not self.is_own:
            raise ValueError(
                f"name={shown(self.name)} was given with fmt={shown(self.fmt)}, which has a name. Expected: none."
            )
        elif self.fmt is None:
            if self.source == "original" or (self.rounding, self.overflow, self.random_bits, self.variant) != _NO_WORDS:
                raise ValueError(
                    f"An Operand without a format has rounding={self.rounding!r}, source={self.source!r}. Expected: a "
                    f"format; or Operand(None, source='fprop'), which rounds nothing again. None alone leaves an "
                    f"operand as it comes."
                )
        elif not self.is_own:
            object.__setattr__(self, "fmt", as_format(self.fmt))
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise TypeError(
                f"hadamard is {shown(self.hadamard)}. Expected: a fpsim.Hadamard, such as Hadamard(16), or None."
            )
        if self.ste == "clip" and (self.fmt is None or self.is_delayed):
            raise ValueError(
                f"ste='clip' was given with fmt={shown(self.fmt)}, which does not say here where it saturates. "
                f"Expected: ste='pass', or a format whose scale is that of the tensor at hand."
            )
        self.spec()

    def _take_function(self, function: Any) -> None:
        name = getattr(function, "__name__", type(function).__name__) if self.name is None else self.name
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise TypeError(f"name={shown(name)} is not a name. Expected: a word to show for the function.")
        if (self.rounding, self.overflow, self.random_bits, self.variant) != _NO_WORDS:
            raise ValueError(
                f"The operand {name} is a function, which rounds by itself, and has rounding={self.rounding!r}, "
                f"overflow={self.overflow!r}, random_bits={self.random_bits!r}. Expected: none of them."
            )
        object.__setattr__(self, "fmt", own_format(function, name))
        object.__setattr__(self, "name", name)

    @property
    def is_own(self) -> bool:
        """Whether a function of the user's rounds it."""
        return isinstance(self.fmt, OwnFormat)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:  # by which a kept weight is looked up in every product
        words = ["as" if self.fmt is None else str(self.fmt) if self.is_own else str(self.spec())]
        if self.source == "fprop":
            words.append("in fprop" if self.fmt is None else "of what fprop used")
        words += [f"after {self.hadamard}"] if self.hadamard else []
        return " ".join([*words, *(["clipping its gradient"] if self.ste == "clip" else [])])

    @property
    def is_delayed(self) -> bool:
        """Whether its scale follows from earlier steps."""
        return isinstance(self.fmt, BlockFormat) and self.fmt.is_delayed

    @property
    def words(self) -> tuple[str, str | None, int | None, str]:
        """Rounding, overflow, random bits and variant."""
        rounding = "nearest_even" if self.rounding is None else self.rounding
        return rounding, self.overflow, self.random_bits, self.variant

    @cached_property
    def _spec(self) -> Spec | None:  # looked up in every product: hashing a block format takes as long as a small one
        if self.fmt is None:
            return None
        return own_spec(self.fmt) if isinstance(self.fmt, OwnFormat) else any_spec(self.fmt, *self.words)  # type: ignore[arg-type]

    def spec(self) -> Spec | None:
        """The checked rounding; None where nothing is rounded again."""
        return self._spec


OperandLike = Operand | Format | str | Callable[[Tensor, int], Tensor] | None


class ProductSpecs(NamedTuple):
    """The operands of the three products, the rounding of the forward product's result, and in what sums are made."""

    fprop: tuple[Operand | None, Operand | None]
    dgrad: tuple[Operand | None, Operand | None]
    wgrad: tuple[Operand | None, Operand | None]
    output: RoundingSpec | None
    accumulators: tuple[Accumulator, Accumulator, Accumulator] | None  # of the three; None where all are torch's


@known_arguments()
@dataclass(frozen=True)
class Products:
    """The operands of a layer's three matrix products.

    An operand is given as a format, its name, an `Operand`, or None, which leaves it as it comes.

    Args:
        fprop: (x, w), the operands of y = x w^T.
        dgrad: (dy, w), those of dx = dy w.
        wgrad: (dy, x), those of dw = dy^T x.
        output: the format of y, where the policy has none for activations; a format of single numbers. Its gradient
            passes.
        accumulator: what the sums of all three are made in: an `Accumulator` or its name, such as "fp16" or
            "hopper_fp8"; None leaves them to torch, in float32. The bias is added there too. Where they differ, three
            in the order of the products (all in float32 then, of a float64 model too): a layer whose terms lie on four
            ranks in fprop has `(Accumulator("fp32", order="torch", splits=4, split_format="bf16"), None, None)`.
        backward: what w is in dgrad, and x in wgrad, in the place of operands for them, with dy as it is given there:
            "original" takes those of `dgrad` and `wgrad`; "dequantized" what the forward product used, as it is, as in
            quantisation-aware training; "float32" the tensor as it comes. With `Products.all`, dy comes as it is too:
            the backward pass is in float32, as by TransformerEngine's `backward_override`.
        attention: whether products of two activations are quantised too. Without it they are left alone: attention's
            two products, inside of `scaled_dot_product_attention` or written as `q @ k`, and any other matmul, bmm or
            einsum none of whose operands is a parameter or a view of one. `linear`, `bilinear` and convolutions always
            count as products with a weight.

    Raises:
        ValueError: for what is not an operand, by its value.
        TypeError: for what is not an operand, by its type.

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
    attention: bool = False
    backward: str = "original"

    def __post_init__(self) -> None:
        for product, names in PRODUCTS.items():
            object.__setattr__(self, product, _pair(product, names, getattr(self, product)))
        _take_backward(self)
        _require_sources(self)
        if self.output is not None:
            output = _operand("output", self.output)
            if output.is_own:
                raise TypeError(
                    f"output={shown(self.output)} is a function. Expected: a format of single numbers, or its name."
                )
            object.__setattr__(self, "output", output)
        if isinstance(self.accumulator, tuple | list):
            object.__setattr__(self, "accumulator", _three(self.accumulator))
        elif self.accumulator is not None:
            object.__setattr__(self, "accumulator", as_accumulator(self.accumulator))
        if not isinstance(self.attention, bool):
            raise TypeError(f"attention={shown(self.attention)} is invalid. Expected: True, False.")
        _require_equal_transforms(self)
        self.specs  # noqa: B018  # a block format as an output is an error now, not in a forward pass

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
        """All operands of all products in one format.

        fmt, rounding, overflow, random_bits, variant: as in `Operand`.
        rest: `output`, `accumulator`, `attention`, `backward`, and products that differ.

        >>> print(Products.all("mxfp4", wgrad=(None, None)).dgrad[0])
        mxfp4 nearest_even
        """
        is_whole = isinstance(fmt, Operand | None)
        one = fmt if is_whole else Operand(fmt, rounding, overflow, random_bits, None, variant)  # type: ignore[arg-type]
        names = PRODUCTS if rest.get("backward", "original") == "original" else ("fprop",)
        return cls(**{**dict.fromkeys(names, (one, one)), **rest})

    @classmethod
    def by_operand(cls, x: OperandLike = None, w: OperandLike = None, dy: OperandLike = None, **rest: Any) -> Products:
        """An operand in the same format in both of its products.

        x: the input, of fprop and wgrad.
        w: the weight, of fprop and dgrad.
        dy: the gradient of the result, of dgrad and wgrad.
        rest: `output`, `attention`, `backward` and `accumulator`, where there is one.

        >>> print(Products.by_operand(dy="e5m2").dgrad[0], Products.by_operand(dy="e5m2").fprop)
        e5m2 nearest_even (None, None)
        """
        if rest.get("backward", "original") != "original":
            return cls(fprop=(x, w), dgrad=(dy, None), wgrad=(dy, None), **rest)
        return cls(fprop=(x, w), dgrad=(dy, w), wgrad=(dy, x), **rest)

    @cached_property
    def specs(self) -> ProductSpecs:
        """What is done to each operand."""
        output, given = self.output, self.accumulator
        assert output is None or isinstance(output, Operand)
        each = given if isinstance(given, tuple) else (given,) * 3
        one, two, three = (ACCUMULATORS["fp32"] if a is None else as_accumulator(a) for a in each)
        accumulators = None if one.is_torch and two.is_torch and three.is_torch else (one, two, three)
        fprop, dgrad, wgrad = (getattr(self, product) for product in PRODUCTS)
        rounding = None if output is None else rounding_spec(output.fmt, *output.words)  # type: ignore[arg-type]
        return ProductSpecs(fprop, dgrad, wgrad, rounding, accumulators)

    @property
    def is_delayed(self) -> bool:
        """Whether the scale of any operand follows from earlier steps."""
        return any(o is not None and o.is_delayed for p in PRODUCTS for o in getattr(self, p))

    def with_rounding(self, rounding: str) -> Products:
        """The same products, with another rounding of every operand."""

        def changed(operand: Operand | None) -> Operand | None:
            if operand is None or operand.fmt is None or operand.is_own:
                return operand
            return replace(operand, rounding=rounding, random_bits=None, variant="A")

        fprop, dgrad, wgrad = ((changed(a), changed(b)) for a, b in self.specs[:3])
        return replace(self, fprop=fprop, dgrad=dgrad, wgrad=wgrad)

    def with_stochastic_gradients(self, most_bits: int) -> Products:
        """The same products, with dy rounded stochastically in a format of at most so many bits, where none was named.

        Blocks that share scales stay as they are.
        """
        require_whole("most_bits", most_bits, 1)
        _, dgrad, wgrad = self.specs[:3]
        if not (_is_of_few_bits(dgrad[0], most_bits) or _is_of_few_bits(wgrad[0], most_bits)):
            return self
        dgrad, wgrad = ((_stochastic(dy, most_bits), other) for dy, other in (dgrad, wgrad))
        return replace(self, dgrad=dgrad, wgrad=wgrad)

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
        return ", ".join([*texts, *(["attention too"] if self.attention else [])])


def _three(
    given: Sequence[Accumulator | FloatFormat | str | None],
) -> tuple[Accumulator | None, ...] | Accumulator | None:
    """The accumulators of the three products; the one where all are equal."""
    if len(given) != len(PRODUCTS):
        raise ValueError(
            f"accumulator={shown(given)} has {len(given)}. Expected: one for all products, or three in the order of "
            f"{', '.join(PRODUCTS)}, None for torch's own."
        )
    each = tuple(None if a is None else as_accumulator(a) for a in given)
    return each[0] if len({*each}) == 1 else each


def _take_backward(products: Products) -> None:
    """Put the operands that `backward` stands for into their places; then it stands for nothing more."""
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
    """Raise ValueError for a source that is not there, or whose numbers are those of another product."""
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


def _is_of_few_bits(dy: Operand | None, most_bits: int) -> bool:
    """Whether a gradient is rounded, number by number, to a format of at most so many bits by a rule nobody named."""
    if dy is None or dy.rounding is not None or not isinstance(dy.fmt, Element) or dy.is_own:
        return False
    return dy.fmt.bits <= most_bits


def _stochastic(dy: Operand | None, most_bits: int) -> Operand | None:
    return replace(dy, rounding="stochastic") if dy is not None and _is_of_few_bits(dy, most_bits) else dy


def _operand(name: str, value: object) -> Operand:
    if isinstance(value, Operand):
        return value
    try:
        return Operand(value)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}={shown(value)} is not an operand. {error}") from None


def _pair(product: str, names: tuple[str, str], value: object) -> tuple[Operand | None, Operand | None]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(
            f"{product}={shown(value)} is not a pair of operands. Expected: ({', '.join(names)}), each a format, an "
            f"Operand, or None to leave it as it comes; Products.all(fmt) for all operands in one format."
        )
    a, b = (None if v is None else _operand(f"{product}: {n}", v) for n, v in zip(names, value, strict=True))
    return a, b
