"""Checked roundings: format, rule, overflow and random bits; and checks of tensors that can be rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import is_whole, refuse, shown
from fpsim.formats.blocks import BlockFormat, Element, Format, as_element, as_format
from fpsim.formats.codebook import Codebook
from fpsim.formats.floats import CATALOGUE, ROUNDINGS_OF_OTHERS, FloatFormat
from fpsim.kernels.core import ROUNDINGS, needs_wider_container, require_variant, scale_limits

CONTAINERS = {32: torch.float32, 64: torch.float64}  # by width
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, repr=False)
class OwnFormat(FloatFormat):
    """A function that rounds an operand, used as a format. Tallies treat it as float32, which holds every result.

    function: (x, axis) -> a tensor of the shape and dtype of x.
    label: the name of the function in tables.
    """

    function: Callable[[Tensor, int], Tensor] = None  # type: ignore[assignment]  # the fields before it have defaults
    label: str = ""

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"<function {self.label}>"


@dataclass(frozen=True)
class RoundingSpec:
    """A rounding of numbers: format, rounding rule, overflow and random bits, checked and complete."""

    fmt: Element
    rounding: str = "nearest_even"
    overflow: str = "inf"
    random_bits: int | None = None
    variant: str = "A"  # one of core.VARIANTS
    text: str = field(init=False, compare=False, repr=False)
    format_text: str = field(init=False, compare=False, repr=False)
    is_float32: bool = field(init=False, compare=False, repr=False)  # whether nothing is rounded
    saturates: bool = field(init=False, compare=False, repr=False)  # it has no inf, and a range far below float32's
    dtype: torch.dtype | None = field(init=False, compare=False, repr=False)  # torch's dtype for it, if there is one

    def __post_init__(self) -> None:
        words = [str(self.fmt), self.rounding]
        if self.overflow != self.fmt.resolve_overflow():
            words.append(self.overflow)
        if self.random_bits:
            words.append(f"{self.random_bits} random bits")
        if self.variant != "A":
            words.append(f"variant {self.variant}")
        # Equal specifications have equal texts. Caches look roundings up by the text, because a string caches its hash.
        object.__setattr__(self, "text", " ".join(words))
        object.__setattr__(self, "format_text", repr(self.fmt))
        object.__setattr__(self, "is_float32", self.fmt == CATALOGUE["fp32"] and self.overflow == "inf")
        names = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((own for name, own in names.items() if self.fmt == CATALOGUE[name]), None)
        object.__setattr__(self, "dtype", dtype)
        # Sums of products of numbers below 2**40 stay finite in float32: each product is below 2**80, and a sum has up
        # to 2**47 products.
        object.__setattr__(self, "saturates", self.overflow != "inf" and float(self.fmt.largest) < 2.0**40)

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        # The string caches its hash, and every call looks the kernel up.
        return hash(self.text)


@dataclass(frozen=True)
class BlockSpec:
    """A rounding of a tensor whose blocks share scales: the format, and the rounding of its elements."""

    fmt: BlockFormat
    element: RoundingSpec
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        words = self.element.text.removeprefix(str(self.element.fmt))
        object.__setattr__(self, "text", f"{self.fmt}{words}")

    @cached_property
    def candidates(self) -> tuple[BlockSpec, ...]:
        """Specs of the candidates among which each block takes the nearest result; only this spec unless the rule is
        Choose().
        """
        return tuple(replace(self, fmt=f) for f in self.fmt.candidates)

    @property
    def rounding(self) -> str:
        """Rounding rule of the elements."""
        return self.element.rounding

    @property
    def overflow(self) -> str:
        """Overflow rule of the elements."""
        return self.element.overflow

    @property
    def random_bits(self) -> int | None:
        """Number of random bits of an element."""
        return self.element.random_bits

    @property
    def variant(self) -> str:
        """Variant of stochastic rounding with few random bits."""
        return self.element.variant

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)


Spec = RoundingSpec | BlockSpec


def any_spec(
    fmt: str | Format,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
    variant: str = "A",
) -> Spec:
    """Check and complete the arguments of `round_to`, for a format of single numbers or of blocks."""
    # As in rounding_spec, the checks raise a clearer error for an argument that cannot be hashed.
    try:
        return _known_any_spec(fmt, rounding, overflow, random_bits, variant)
    except TypeError:
        pass
    return _new_any_spec(fmt, rounding, overflow, random_bits, variant)


def _new_any_spec(
    fmt: str | Format, rounding: str, overflow: str | None, random_bits: int | None, variant: str
) -> Spec:
    f = as_format(fmt)
    if isinstance(f, BlockFormat):
        # Elements saturate by default: OCP MX v1.0, 6.3.
        overflow = "saturate" if overflow is None else overflow
        return _block_spec(f, rounding_spec(f.element, rounding, overflow, random_bits, variant))
    return rounding_spec(f, rounding, overflow, random_bits, variant)


_known_any_spec = lru_cache(maxsize=None, typed=True)(_new_any_spec)


_block_spec = cache(BlockSpec)


def rounding_spec(
    fmt: str | Element,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
    variant: str = "A",
) -> RoundingSpec:
    """Check and complete the arguments of `round_to`, for a format of single numbers."""
    # An argument that cannot be hashed raises TypeError here. The checks of `_new_spec` then raise a clearer error.
    try:
        return _known_spec(fmt, rounding, overflow, random_bits, variant)
    except TypeError:
        pass
    return _new_spec(fmt, rounding, overflow, random_bits, variant)


def _new_spec(
    fmt: str | Element, rounding: str, overflow: str | None, random_bits: int | None, variant: str
) -> RoundingSpec:
    f = as_element(fmt)
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        raise ValueError(
            refuse(f"Unknown rounding {shown(rounding)}", ROUNDINGS, word=rounding, others=ROUNDINGS_OF_OTHERS)
        )
    if random_bits is not None:
        given = shown(random_bits)
        if rounding != "stochastic":
            raise ValueError(f"random_bits={given} was given with rounding={rounding!r}; only 'stochastic' uses it.")
        if not is_whole(random_bits, 1) or random_bits > 32:
            raise ValueError(f"random_bits={given} is invalid. Expected: 1 to 32, or None for 32.")
        random_bits = int(random_bits)
    require_variant(variant, rounding == "stochastic", random_bits)
    if isinstance(f, OwnFormat):
        raise ValueError(
            f"{f} is a function of a tensor and an axis. Expected here: a format. A function can be an operand of a "
            f"product: Products(fprop=(f, f))."
        )
    if isinstance(f, Codebook) and rounding == "to_odd":
        raise ValueError(f"rounding='to_odd' is invalid for {f}: codes of a code book are labels. Use another rule.")
    return RoundingSpec(f, rounding, f.resolve_overflow(overflow), random_bits, variant)


# `typed`, because True is not a number of bits.
_known_spec = lru_cache(maxsize=None, typed=True)(_new_spec)


class ContainerError(TypeError):
    """A tensor's dtype cannot hold every value of a format."""


@cache
def container_width(spec: RoundingSpec, dtype: torch.dtype) -> int:
    """Return the width of the container in which `dtype` is rounded; 0 if there is nothing to do.

    Raises ContainerError for a dtype that cannot hold every value of the format.
    """
    if dtype is torch.float64:
        return 64
    f = spec.fmt
    info = torch.finfo(dtype)
    precision = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
    smallest = f.min_exponent - f.mantissa_bits
    if f.mantissa_bits > precision or f.largest > info.max or 2.0**smallest < info.smallest_normal * 2**-precision:
        raise ContainerError(
            f"A {str(dtype).removeprefix('torch.')} tensor cannot hold every value of {f}. "
            f"Expected here: float32 or float64. {_how_to_have_float32(dtype)}"
        )
    if spec.is_float32:
        return 0
    return 64 if needs_wider_container(f) else 32


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _how_to_have_float32(dtype: torch.dtype) -> str:
    """Return advice for an error: which setting made a tensor half precision, or which method converts it."""
    short = _SHORT[dtype]
    bits = short.replace("fp16", "16")  # Lightning's word
    if any(torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on) is dtype for on in ("cpu", "cuda")):
        return (
            f"torch.autocast casts to it. Leave it out, the emulation has its own formats: precision='{bits}-mixed' of "
            f"Lightning, mixed_precision='{short}' of Accelerate, {short}=True of transformers' Trainer."
        )
    # Lightning sets the default dtype while a forward runs.
    if torch.get_default_dtype() is dtype:
        return f"It is the default dtype. Leave precision='{bits}-true' of Lightning, or torch.set_default_dtype, out."
    return "Convert it with x.float() first, and a model that has half parameters with model.float()."


def log2_scale_limits(spec: RoundingSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Return the limits of log2 of a scale at which a tensor of this dtype can be rounded.

    The limits are (0, 0) for a dtype that cannot be scaled. A bfloat16 tensor is rounded in float32 and has the limits
    of float32: if bfloat16 holds the values of a format, it also holds the values at every scale within these limits,
    with 39 exponents to spare. Numbers in float16 have lost their range before any scale could help.

    >>> log2_scale_limits(rounding_spec("e5m2"), torch.bfloat16)
    (-112, 78)
    >>> log2_scale_limits(rounding_spec("e5m2"), torch.float16)
    (0, 0)
    """
    if dtype is torch.float16:
        return 0, 0
    return scale_limits(spec.fmt, 64 if dtype is torch.float64 else 32)


def require_no_mask(x: np.ndarray[Any, Any], name: str = "x") -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, and its mask would be lost. Expected: a torch.Tensor or a plain numpy.ndarray. "
            f"Round its data: numpy.ma.array(round_to({name}.data, ...), mask={name}.mask)."
        )


def require_ndarray(x: np.ndarray[Any, Any]) -> None:
    """Raise TypeError for an array that torch cannot hold as it is."""
    require_no_mask(x)
    if x.dtype not in (np.float32, np.float64, np.float16) or not x.dtype.isnative:
        name = "float32" if x.dtype.itemsize <= 2 else "float64"  # as below
        rest = _if_that_rounds(x.dtype.kind in "iu" or x.dtype.itemsize > 8, 8 * x.dtype.itemsize)
        raise TypeError(
            f"x has dtype {x.dtype}. Expected: float32, float64, float16 in native byte order. "
            f"Convert it with x.astype(numpy.{name}){rest}."
        )


def under_transform(function: str) -> NotImplementedError:
    """Return the error for numbers that torch.compile or a torch.func transform hides."""
    return NotImplementedError(
        f"{function} was called under torch.compile or a transform of torch.func. Call it outside of them."
    )


def require_floating(x: Any, name: str = "x") -> None:
    if isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a numpy.ndarray. Expected here: a torch.Tensor; torch.from_numpy({name}) is one.")
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} is {type(x).__name__}. Expected: a torch.Tensor or a numpy.ndarray; wrap it with torch.as_tensor."
        )
    if x.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {str(x.layout).removeprefix('torch.')}. Expected: dense tensors. "
            f"Round its values: torch.sparse_coo_tensor(x.indices(), round_to(x.values(), ...), x.shape)."
        )
    if x.dtype not in FLOATING:
        rest = _if_that_rounds(not x.dtype.is_complex, 8 * x.dtype.itemsize)
        raise TypeError(
            f"{name} has dtype {str(x.dtype).removeprefix('torch.')}. Expected: float32, float64, float16, bfloat16. "
            + (
                "Round x.real and x.imag."
                if x.dtype.is_complex
                else f"Convert it with x.{_holder_of(x.dtype)}(){rest}."
            )
        )
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise TypeError(f"{name} is on device {x.device}. Expected: cpu, cuda. Move it with x.cpu().")


def _if_that_rounds(is_number: bool, bits: int) -> str:
    """Return the warning, for an error message, about a conversion to float64 that rounds numbers first."""
    return ", which rounds beyond 53 bits: a tie after that may fall the other way" if is_number and bits >= 64 else ""


def _holder_of(dtype: torch.dtype) -> str:
    """Return the method that casts a tensor to a dtype that holds its numbers: float32 would round large integers."""
    return "float" if dtype.itemsize <= 2 else "double"


def holds_numbers(x: Tensor) -> bool:
    """Return whether the elements of `x` are in memory; False for a meta or fake tensor, and for a freed storage.

    >>> holds_numbers(torch.ones(2)), holds_numbers(torch.ones(2, device="meta"))
    (True, False)
    """
    if type(x) is Tensor:
        return not x.is_meta and (x.data_ptr() != 0 or x.numel() == 0)
    # A fake tensor says that it is on the CPU, but its storage is on device meta.
    storage = x.untyped_storage()
    return storage.device.type != "meta" and (x.numel() == 0 or storage.data_ptr() != 0)


def require_numbers(x: Tensor, name: str = "x") -> None:
    """Raise TypeError for a tensor without numbers to look at."""
    if not holds_numbers(x):
        raise TypeError(
            f"{name} is {_without_numbers(x)}. Expected: a tensor on cpu or cuda that holds numbers. "
            f"Give a model memory with model.to_empty(device='cpu'), and load its numbers."
        )


def _without_numbers(x: Tensor) -> str:
    kind = "on device meta" if x.device.type == "meta" else f"a {type(x).__name__} on device {x.device} without memory"
    return f"{kind}, where tensors hold no numbers"


def address_of(x: Tensor) -> int:
    """Return the address of the elements of `x` for a kernel: the last check against a tensor without memory.

    Raises TypeError if there are elements and no memory.
    """
    address = x.data_ptr()
    if not address and x.numel():
        raise no_memory(x)
    return address


def no_memory(x: Tensor) -> TypeError:
    """Return the error for a tensor that reached a kernel and has elements, but no memory."""
    return TypeError(f"A tensor reached a kernel that is {_without_numbers(x)}. Expected: one on cpu or cuda.")


def require_float32(x: Any) -> None:
    """Raise TypeError for a tensor that is not float32, as codes, scales and tallies of blocks require."""
    require_floating(x)
    if x.dtype is not torch.float32:
        dtype = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"x has dtype {dtype}. Blocks are looked at in float32: convert it with x.float().")


def holds_blocks(dtype: torch.dtype, f: BlockFormat) -> bool:
    """Return whether a dtype holds every result of rounding its own numbers in blocks of `f`.

    float32 always does. Under scales that are powers of two, float64 and bfloat16 do too: bfloat16 has float32's
    exponents, and below its smallest normal number, x and any rounding of x to a coarser grid are multiples of 2^-133.
    Under any other scale, a result has more significant bits than bfloat16, and a float64 number is rounded to float32
    first.
    """
    if dtype is torch.float32:
        return True
    if not f.has_power_scale or isinstance(f.element, Codebook) or f.gain != 1:
        return False
    return dtype is torch.float64 or (dtype is torch.bfloat16 and f.element.mantissa_bits <= 7)


def cannot_hold_blocks(dtype: torch.dtype, fmt: object) -> ContainerError:
    """Return the error for a tensor whose dtype does not hold the results of rounding it in blocks."""
    name = str(dtype).removeprefix("torch.")
    return ContainerError(f"x has dtype {name}. Blocks of {fmt} are rounded in float32: round x.float().")


def saturated_from(fmt: Element) -> float:
    """Return the magnitude from which saturation is counted: the largest value plus half of the spacing there."""
    if isinstance(fmt, Codebook):
        return fmt.saturated_from
    return fmt.largest + math.ldexp(0.5, math.frexp(fmt.largest)[1] - 1 - fmt.mantissa_bits)
