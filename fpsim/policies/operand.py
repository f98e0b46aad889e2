"""Operand: how one operand of a matrix product is quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from fpsim.checks import require_word, shown
from fpsim.formats.blocks import BlockFormat, Element, Format, as_format
from fpsim.formats.floats import FloatFormat
from fpsim.tensors.accumulators import Accumulator
from fpsim.tensors.hadamard import Hadamard
from fpsim.tensors.own import own_format, own_spec
from fpsim.tensors.spec import OwnFormat, RoundingSpec, Spec, any_spec

__all__ = [
    "Operand",
    "OperandLike",
    "ProductSpecs",
    "as_operand",
    "in_accumulators",
    "is_of_few_bits",
    "stochastic",
    "with_rounding",
]

SOURCES = ("original", "fprop")  # sources of an operand of the backward pass
STES = ("pass", "clip")  # straight-through estimators
_NO_WORDS = (None, None, None, "A")  # rounding, overflow, random bits and variant of an operand that has no format


@dataclass(frozen=True)
class Operand:
    """Quantisation of one operand of a product.

    Args:
        fmt: a format of single numbers or of blocks, or its name. None is for source="fprop": the operand stays as it
            was in the forward product. Or a function of your own, `f(x, axis)`: its arguments are a float32 tensor of
            the operand's shape, without gradients, and the axis over which the product sums; it returns a float32
            tensor of that shape.
        rounding: as in `round_to`; None is nearest-even. Gradients of few bits under a scaling are an exception, see
            `Policy`.
        overflow, random_bits, variant: as in `round_to`.
        hadamard: the transform before the rounding, along the axis over which the product sums. The other operand of
            the product must have the same one. If the size does not divide the axis, the axis is padded with zeros,
            which add nothing to the product.
        source: the tensor that is rounded, for an operand of the backward pass (w of dgrad or x of wgrad). "original"
            is the original tensor. "fprop" is the numbers that the forward product used; if there is a `fmt`, they are
            then rounded to it along the axis of this product (double quantisation).
        name: the name by which a function of your own is shown; None takes the function's name.
        ste: the gradient at elements that saturated (beyond the largest value by half an ulp), for an operand of the
            forward product: "pass" passes it, and "clip" makes it zero, as torch's fake quantisation does. With "clip",
            a function of your own returns a pair: the numbers, and a bool tensor, True where the gradient passes.

    Raises:
        ValueError: as `round_to` does, and for a source that is unknown, or that has no effect.
        TypeError: as `round_to` does, and for a `hadamard` that is not a `Hadamard`.

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
        """True if a function of the user rounds the operand."""
        return isinstance(self.fmt, OwnFormat)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:  # the key by which every product looks up a cached weight
        words = ["as" if self.fmt is None else str(self.fmt) if self.is_own else str(self.spec())]
        if self.source == "fprop":
            words.append("in fprop" if self.fmt is None else "of what fprop used")
        words += [f"after {self.hadamard}"] if self.hadamard else []
        return " ".join([*words, *(["clipping its gradient"] if self.ste == "clip" else [])])

    @property
    def is_delayed(self) -> bool:
        """True if the operand's scale depends on earlier steps."""
        return isinstance(self.fmt, BlockFormat) and self.fmt.is_delayed

    @property
    def words(self) -> tuple[str, str | None, int | None, str]:
        """The rounding, the overflow, the random bits and the variant."""
        rounding = "nearest_even" if self.rounding is None else self.rounding
        return rounding, self.overflow, self.random_bits, self.variant

    @cached_property
    def _spec(self) -> Spec | None:  # cached, because every product reads it, and hashing a block format is slow
        if self.fmt is None:
            return None
        return own_spec(self.fmt) if isinstance(self.fmt, OwnFormat) else any_spec(self.fmt, *self.words)  # type: ignore[arg-type]

    def spec(self) -> Spec | None:
        """Return the checked rounding; None if nothing is rounded again."""
        return self._spec


OperandLike = Operand | Format | str | Callable[[Tensor, int], Tensor] | None


def as_operand(name: str, value: object) -> Operand:
    if isinstance(value, Operand):
        return value
    try:
        return Operand(value)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}={shown(value)} is not an operand. {error}") from None


Three = tuple[Accumulator, Accumulator, Accumulator]
Pair = tuple[Operand | None, Operand | None]


class ProductSpecs(NamedTuple):
    """The operands of the three products, the rounding of the forward product's result, and the accumulators.

    accumulators: one for each of the three products, with the formats of its operands; None if torch computes them all.
    scaled: the accumulators for a dy that is rounded at a scale, whose exponents are then not those of its format.
    result, error: the rounding of y and dx inside of the product, for a product of an attention.
    """

    fprop: Pair
    dgrad: Pair
    wgrad: Pair
    output: RoundingSpec | None
    accumulators: Three | None
    scaled: Three | None
    result: Operand | None = None
    error: Operand | None = None

    @property
    def unordered(self) -> ProductSpecs:
        """The same specs, but for products whose operands have no known order."""
        if self.accumulators is None:
            return self
        one, two, three = (a if a.group is None else replace(a, operands=None) for a in self.accumulators)
        return self._replace(accumulators=(one, two, three), scaled=(one, two, three))


def in_accumulators(each: Three, fprop: Pair, dgrad: Pair, wgrad: Pair) -> tuple[Three, Three] | tuple[None, None]:
    """Return the `accumulators` and `scaled` of products with these operands."""
    if all(accumulator.is_torch for accumulator in each):
        return None, None
    one, two, three = map(_knowing, each, (fprop, dgrad, wgrad), (fprop, fprop, fprop[::-1]))
    return (one, two, three), (one, _at_a_scale(two), _at_a_scale(three))


def _knowing(accumulator: Accumulator, pair: Pair, used: Pair) -> Accumulator:
    """Return the accumulator of a product. An accumulator that aligns groups gets the formats of the operands.

    used: the operands of the forward product, which replace operands with source="fprop" and no format.
    """
    if accumulator.group is None:
        return accumulator
    formats = []
    for operand, of_fprop, own in zip(pair, used, accumulator.operand_formats, strict=True):
        if operand is not None and operand.fmt is None:
            operand = of_fprop
        # Shared scales shift the exponents of a block, and a function of the user may do so too.
        fmt = own if operand is None else operand.fmt
        formats.append(fmt if isinstance(fmt, FloatFormat) else None)
    return replace(accumulator, operands=tuple(formats))  # type: ignore[arg-type]


def _at_a_scale(accumulator: Accumulator) -> Accumulator:
    if accumulator.group is None:
        return accumulator
    return replace(accumulator, operands=(None, accumulator.operand_formats[1]))


def with_rounding(operand: Operand | None, rounding: str) -> Operand | None:
    """Return the same operand with another rounding, if a format rounds it."""
    if operand is None or operand.fmt is None or operand.is_own:
        return operand
    return replace(operand, rounding=rounding, random_bits=None, variant="A")


def is_of_few_bits(dy: Operand | None, most_bits: int) -> bool:
    """Return True if a gradient's format has single numbers, at most `most_bits` bits, and the default rounding."""
    if dy is None or dy.rounding is not None or not isinstance(dy.fmt, Element) or dy.is_own:
        return False
    return dy.fmt.bits <= most_bits


def stochastic(dy: Operand | None, most_bits: int) -> Operand | None:
    """Return the operand of a gradient, with stochastic rounding if `is_of_few_bits`."""
    return replace(dy, rounding="stochastic") if dy is not None and is_of_few_bits(dy, most_bits) else dy
