"""Encode numbers to the codes of a small format, decode them, and find the scales of blocks.

A code is the bit pattern of a small float, or the index of a number in a code book. Tensors whose blocks share scales
also have codes of the scales. In NVFP4 they also have a second scale of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.formats.blocks import BlockFormat, as_format
from fpsim.formats.codebook import Codebook
from fpsim.formats.fixed_point import FixedPoint
from fpsim.formats.floats import FloatFormat
from fpsim.kernels import blocks
from fpsim.kernels.core import BINARY32, BINARY64
from fpsim.tensors.cuts import axis_pair, of_each_element, require_no_axis, second_amaxes_along, second_of_each_element
from fpsim.tensors.ops import round_to
from fpsim.tensors.shared_scales import block_plan, block_scales, recorded_amax, rounded_blocks
from fpsim.tensors.spec import BlockSpec, any_spec, require_float32, require_floating, under_transform
from fpsim.torch_modes import is_plain, is_sample

__all__ = ["BlockCodes", "decode", "encode", "scales_of"]


@overload
def encode(
    x: Tensor,
    fmt: BlockFormat,
    rounding: str = ...,
    overflow: str | None = ...,
    *,
    axis: int | tuple[int, int] | None = ...,
) -> BlockCodes: ...
@overload
def encode(x: Tensor, fmt: Coded, rounding: str = ..., overflow: str | None = ..., *, axis: None = ...) -> Tensor: ...
@overload
def encode(
    x: Tensor, fmt: str, rounding: str = ..., overflow: str | None = ..., *, axis: int | tuple[int, int] | None = ...
) -> Any: ...
def encode(
    x: Tensor,
    fmt: str | Coded | BlockFormat,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    *,
    axis: int | tuple[int, int] | None = None,
) -> Tensor | BlockCodes:
    """Round `x` to a format of up to 16 bits, a code book, or a format of blocks, and return the codes.

    NaN gets the code of the canonical quiet NaN. In a block whose scale is NaN, elements get the code 0 if their format
    has no NaN.

    Args:
        x, fmt, rounding, overflow: as in `round_to`; `x` is a tensor, and in float32 for a format of blocks.
        axis: for a format of blocks, as in `round_to`.

    Returns:
        Int32 in the shape of `x`, on its device. For a format of blocks, a `BlockCodes`: the codes (two of 4 bits in a
        byte), the codes of the scales, and the second scale. `decode` returns the values of `round_to`, bit for bit.

    Raises:
        ValueError: for a format of more than 16 bits, for a NaN or a mask in `x` that has no code, and for an empty
            tensor in a format of blocks.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3fn")
    tensor([ 56, 254], dtype=torch.int32)
    >>> x = torch.tensor([[6.0, 0.5, -3.0, 1.0]])
    >>> encode(x, "nvfp4")
    BlockCodes(nvfp4 (1, 4): codes uint8 (1, 2), scales uint8 (1, 1), tensor_scale float32 ())
    >>> decode(encode(x, "nvfp4"))
    tensor([[ 6.0000,  0.5000, -3.0000,  1.0000]])
    """
    parsed = as_format(fmt)
    if isinstance(parsed, BlockFormat):
        require_floating(x)
        _require_memory(x)
        spec = any_spec(parsed, rounding, overflow)
        assert isinstance(spec, BlockSpec)
        return encode_blocks(x, spec, axis)
    require_no_axis(axis, fmt)
    f = codable(fmt)  # type: ignore[arg-type]
    require_floating(x)
    _require_memory(x)
    return element_codes(x, f, rounding, overflow)


def _require_memory(x: Tensor) -> None:
    if x.device.type == "meta":
        raise TypeError("x is on device meta, where tensors hold no numbers to encode. Expected: cpu, cuda.")


def scales_of(x: Tensor, fmt: str | BlockFormat, *, axis: int | tuple[int, int] | None = None) -> Tensor:
    """Return the scales of the blocks of `x` in a format: a value is an element times its block's scale.

    The second scale of a whole tensor, as in NVFP4, is not among these scales.

    Args:
        x: a float32 tensor of any strides, on the CPU or a CUDA device.
        fmt: a format whose numbers share scales, or its name.
        axis: as in `round_to`.

    Returns:
        Float32 in the shape of `x`, but each axis along which blocks run is divided by their length and rounded up. The
        result has no dimension if the whole tensor has one scale.

    Raises:
        ValueError: for a format of single numbers, for delayed scaling, and for a tensor without elements.
        TypeError: for other dtypes.
        NotImplementedError: under torch.compile and transforms of torch.func.

    >>> scales_of(torch.tensor([[6.0, 0.5, 96.0, 1.0]]), "e2m1fn per 2")
    tensor([[ 1., 16.]])
    """
    spec = any_spec(fmt)
    if not isinstance(spec, BlockSpec):
        raise ValueError(
            f"The numbers of fmt={shown(fmt)} share no scale. Expected: a format of blocks, such as 'mxfp4'."
        )
    require_float32(x)
    if not is_plain(x):
        raise under_transform("scales_of")
    if not x.numel():
        raise ValueError(f"x of shape {tuple(x.shape)} has no elements, and no scales. Expected: one element or more.")
    return block_scales(x, spec, *axis_pair(axis))


@overload
def decode(codes: BlockCodes, fmt: None = ...) -> Tensor: ...
@overload
def decode(codes: Tensor, fmt: str | Coded) -> Tensor: ...
def decode(codes: Tensor | BlockCodes, fmt: str | Coded | None = None) -> Tensor:
    """Return the values of integer codes of a format of up to 16 bits, of a code book, or of blocks.

    Args:
        codes: a tensor of any integer dtype and shape, or the `BlockCodes` of a format of blocks.
        fmt: a format, or its name. A `BlockCodes` contains its own format.

    Returns:
        Float32 in the shape of `codes`, on its device; for blocks, in the shape of the tensor.

    Raises:
        ValueError: for a format of more than 16 bits and for codes out of range.
        TypeError: for other dtypes.

    >>> decode(torch.tensor([0x3C00, 0x7C00]), "fp16")
    tensor([1., inf])
    >>> scale = torch.tensor([[128]], dtype=torch.uint8)  # 2**1
    >>> decode(BlockCodes("mxfp4", (1, 4), torch.tensor([[0x17, 0x2D]], dtype=torch.uint8), scale))
    tensor([[12.,  1., -6.,  2.]])
    """
    if isinstance(codes, BlockCodes):
        if fmt is not None and as_format(fmt) != codes.fmt:
            raise ValueError(f"codes are of {codes.fmt}, and fmt={shown(fmt)} was given. Omit fmt.")
        return decode_blocks(codes)
    if fmt is None:
        raise TypeError("decode got no fmt. Expected: the format of the codes; a BlockCodes alone has its own.")
    f = codable(fmt)
    if not isinstance(codes, Tensor):
        raise TypeError(f"codes is {type(codes).__name__}. Expected: a torch.Tensor; wrap it with torch.as_tensor.")
    if codes.layout is not torch.strided or codes.device.type == "meta":
        layout = str(codes.layout).removeprefix("torch.")
        raise TypeError(
            f"codes has layout {layout} on device {codes.device}. Expected: a dense tensor that holds numbers."
        )
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype is torch.bool:
        raise TypeError(f"codes has dtype {str(codes.dtype).removeprefix('torch.')}. Expected: any integer dtype.")
    if is_sample(codes):
        raise under_transform("decode")
    return element_values(codes, f)


NIBBLE = 4  # bits of a code that is stored two in a byte
_MASK = torch.finfo(torch.float32).max
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class BlockCodes:
    """A block-scaled tensor as hardware stores it. Each value is element * scale / tensor_scale.

    `encode` makes it and `decode` reads it. The layout is the one that compressed-tensors and torchao store in
    safetensors.

    Args:
        fmt: the format, or its name.
        shape: the shape of the tensor.
        codes: the codes of the elements. Codes of 4 bits are uint8, two in a byte along the axis of the blocks, with
            the first code in the low nibble; the last high nibble is 0 if their number is odd. Other codes of up to 8
            bits are uint8 in the shape of the tensor, longer codes int32. Elements that are integers have codes in
            two's complement.
        scales: the codes of the scales, uint8, or int32 for more than 8 bits; for scales in float32, the numbers
            themselves. The shape is that of `scales_of`.
        tensor_scale: the second scale of a format that has one, a float32 of no dimension by which numbers are divided:
            2688 / amax in NVFP4. If each row, or each n elements, has a second scale, the shape is that of the tensor,
            with the number of second scales along the axis. None for other formats.
        axis: as in `round_to`.

    >>> from fpsim import encode
    >>> x = torch.tensor([[6.0, 0.5, -3.0, 1.0]])
    >>> x_codes = encode(x, "mxfp4")
    >>> x_codes.codes, x_codes.scales  # 7 is 6.0, 1 is 0.5, 13 is -3.0, 2 is 1.0; and 127 is 2**0
    (tensor([[23, 45]], dtype=torch.uint8), tensor([[127]], dtype=torch.uint8))
    """

    fmt: BlockFormat
    shape: torch.Size
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None = None
    axis: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        f = as_format(self.fmt)
        if not isinstance(f, BlockFormat):
            raise ValueError(
                f"The numbers of fmt={shown(self.fmt)} share no scale. Expected: a format such as 'mxfp4'."
            )
        object.__setattr__(self, "fmt", f)
        try:
            given = self.shape if isinstance(self.shape, Sequence) else None
            object.__setattr__(self, "shape", torch.Size(given))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"shape={shown(self.shape)} is not a shape. Expected: that of the tensor, (4, 64)."
            ) from None
        axis_pair(self.axis)
        wanted = {"codes": self._packed_shape(), "scales": _scales_shape(self)}
        if f.tensor_scale:
            wanted["tensor_scale"] = _second_shape(self)
        for name, shape in wanted.items():
            _require_part(name, getattr(self, name), shape, _dtypes_of(f, name), self)
        if not f.tensor_scale and self.tensor_scale is not None:
            raise ValueError(f"tensor_scale={shown(self.tensor_scale)} was given, and {f} has none. Expected: None.")

    def __repr__(self) -> str:
        parts = [
            f"{name} {_words(x)}"
            for name in ("codes", "scales", "tensor_scale")
            if (x := getattr(self, name)) is not None
        ]
        return f"BlockCodes({self.fmt} {tuple(self.shape)}: {', '.join(parts)})"

    def unpacked(self) -> Tensor:
        """Return one code for each element, in the shape of the tensor.

        >>> BlockCodes("mxfp4", (1, 3), torch.tensor([[0x17, 0x0D]]).byte(), torch.tensor([[127]]).byte()).unpacked()
        tensor([[ 7,  1, 13]], dtype=torch.uint8)
        """
        if not _is_packed(self.fmt):
            return self.codes
        along = _along(self)
        both = torch.stack((self.codes & 15, self.codes >> NIBBLE), along + 1).flatten(along, along + 1)
        return both.narrow(along, 0, self.shape[along] if self.shape else 1).reshape(self.shape)

    def _packed_shape(self) -> tuple[int, ...]:
        if not _is_packed(self.fmt):
            return tuple(self.shape)
        shape, along = list(self.shape) or [1], _along(self)
        shape[along] = -(-shape[along] // 2)
        return tuple(shape)


def encode_blocks(x: Tensor, spec: BlockSpec, axis: int | tuple[int, int] | None) -> BlockCodes:
    """Round a float32 tensor as `round_to` does, and return the codes."""
    require_float32(x)
    if not is_plain(x):
        raise under_transform("encode")
    if not x.numel():
        raise ValueError(f"x of shape {tuple(x.shape)} has no elements, and no scales. Expected: one element or more.")
    f, (along, across) = spec.fmt, axis_pair(axis)
    # Elements of more than 16 bits raise here. Elements in fixed point are integers, and need no table.
    if not isinstance(f.element, FixedPoint):
        codable(f.element)
    x = x.detach()
    rounded = rounded_blocks(x, spec, along, across)
    scales = block_scales(x, spec, along, across)
    second = _second_scales(x, spec, along) if f.tensor_scale else None
    scale = of_each_element(scales, f, x.shape, along, across)
    is_nan = (
        scale.isnan() if second is None else scale.isnan() | second_of_each_element(second, f, x.shape, along).isnan()
    )
    if ((rounded.abs() == _MASK) & ~is_nan).any():
        raise ValueError(
            f"x holds plus or minus float32's largest number, a mask, and {f} has no code for it. Expected: numbers."
        )
    # The kernels return values, not elements. Dividing by the scales in float64 recovers the element: exactly if scales
    # are powers of two; otherwise within 2**-22, while elements are at least 2**-15 apart.
    found = rounded.double()
    if second is not None:
        found = found * second_of_each_element(second, f, x.shape, along).double()
    if f.gain != 1:
        found = found * f.gain
    # Under a scale of 0, all values are 0 and do not show the elements. The elements are computed again as in the
    # kernels: with a narrow scale, a kernel multiplies by float32's largest number.
    is_narrow = not f.has_power_scale and f.scale.mantissa_bits < BINARY32.mantissa_bits
    hidden = x.double() * (_MASK if is_narrow else 1.0)
    # The zero of fixed point has no sign: a -0 among the values comes from a negative element.
    if isinstance(f.element, FixedPoint):
        least = math.ldexp(1.0, -f.element.fraction_length)
        hidden = torch.where(rounded.signbit(), hidden.clamp(max=-least), hidden.clamp(min=0.0))
    found = torch.where(scale == 0, hidden, found / scale.double())
    if not f.element.has_nan:
        found = torch.where(is_nan, 0.0, found)
    codes = _codes_of(found, f, spec.overflow)
    if _is_packed(f):
        codes = _packed(codes, along % x.dim() if x.dim() else 0)
    if f.scale.bits <= 16:
        scales = _stored(element_codes(scales, f.scale), f.scale.bits)
    return BlockCodes(f, x.shape, codes.contiguous(), scales.contiguous(), second, axis)


def decode_blocks(given: BlockCodes) -> Tensor:
    """Return the float32 values, in the arithmetic of `round_to`: each product and quotient is rounded separately."""
    for x in (given.codes, given.scales, given.tensor_scale):
        if x is not None and is_sample(x):
            raise under_transform("decode")
    f, (along, across) = given.fmt, axis_pair(given.axis)
    codes = given.unpacked()
    if isinstance(f.element, FixedPoint):
        half = 1 << (f.element.word_length - 1)
        signed = (codes.long() + half) % (2 * half) - half
        elements = signed.double() * math.ldexp(1.0, -f.element.fraction_length)
    else:
        elements = element_values(codes, codable(f.element)).double()
    scales = given.scales if f.scale.bits > 16 else element_values(given.scales, f.scale)
    # float64 holds the product of an element and a scale, which is then rounded once.
    values = (elements * of_each_element(scales, f, given.shape, along, across).double()).float()
    # The divisor is a tensor on the device: on a card, torch multiplies by the reciprocal of a Python number.
    if f.gain != 1:
        return values / torch.tensor(f.gain, device=values.device)
    if given.tensor_scale is None:
        return values
    return values / second_of_each_element(given.tensor_scale, f, given.shape, along)


def _second_scales(x: Tensor, spec: BlockSpec, along: int) -> Tensor:
    """Return the second scale of the tensor, or of each part, as kernels.blocks.make_tensor_scale computes it."""
    f = spec.fmt
    if isinstance(f.tensor_scale, bool):
        amax = recorded_amax(x, spec)
    else:
        amax = second_amaxes_along(x, f, block_plan(spec).parameters[blocks.COUNTED], along)
    top = float(torch.tensor(f.tensor_lands_on))
    # The quotient is rounded twice, but equals a quotient in float32, because float64 has more than twice as many bits.
    whole = (top / amax.double()).float().clamp(max=_MASK)
    infinite = math.nan if f.nonfinite == "nan" else 1.0
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), whole, infinite))


def _codes_of(found: Tensor, f: BlockFormat, overflow: str) -> Tensor:
    """Return the codes of numbers that lie near elements: for each number, the code of the nearest element."""
    if not isinstance(f.element, FixedPoint):
        return _stored(element_codes(found, codable(f.element), overflow=overflow), f.element.bits)
    integers = (found.clamp(f.element.lowest, f.element.largest) * math.ldexp(1.0, f.element.fraction_length)).round()
    if integers.isnan().any():
        raise ValueError(f"x holds NaN and {f} has no code for it. Expected: finite values; see torch.nan_to_num.")
    return _stored(integers.long() % (1 << f.element.word_length), f.element.word_length)


def _stored(codes: Tensor, bits: int) -> Tensor:
    return codes.to(torch.uint8 if bits <= 8 else torch.int32)


def _is_packed(f: BlockFormat) -> bool:
    return f.element.bits == NIBBLE


def _packed(codes: Tensor, along: int) -> Tensor:
    """Pack two codes into a byte, with the first code in the low nibble."""
    codes = codes.reshape(codes.shape or (1,)).movedim(along, -1)
    pairs = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << NIBBLE)).movedim(-1, along)


def _along(given: BlockCodes) -> int:
    along, rank = axis_pair(given.axis)[0], max(len(given.shape), 1)
    if type(along) is not int or not -rank <= along < rank:
        raise ValueError(
            f"axis={shown(given.axis)} is not an axis of a tensor of shape {tuple(given.shape)}. Expected: {-rank} to "
            f"{rank - 1}."
        )
    return along % rank


def _scales_shape(given: BlockCodes) -> tuple[int, ...]:
    f, shape = given.fmt, list(given.shape)
    along, across = _along(given), axis_pair(given.axis)[1]
    if f.block == "tensor" or not shape:
        return ()
    r, c = f.tile
    shape[along] = -(-shape[along] // (c or shape[along] or 1))
    if r != 1:
        other = (along - 1 if along else 1) if across is None else across
        shape[other] = -(-shape[other] // r)
    return tuple(shape)


def _second_shape(given: BlockCodes) -> tuple[int, ...]:
    f, shape = given.fmt, list(given.shape)
    if isinstance(f.tensor_scale, bool) or not shape:
        return ()
    along = _along(given)
    length = shape[along] if f.tensor_scale == "row" else int(f.tensor_scale)
    shape[along] = -(-shape[along] // (length or 1))
    return tuple(shape)


def _dtypes_of(f: BlockFormat, name: str) -> tuple[torch.dtype, ...]:
    if name == "tensor_scale" or (name == "scales" and f.scale.bits > 16):
        return (torch.float32,)
    return (torch.uint8,) if name == "codes" and _is_packed(f) else _INTEGERS


def _require_part(name: str, x: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], of: BlockCodes) -> None:
    names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
    what = f"{name} of {of.fmt} for a tensor of shape {tuple(of.shape)}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {shown(x)}, of type {type(x).__name__}. Expected: {what}, a tensor of {names}.")
    if x.layout is not torch.strided or x.device.type == "meta":
        raise TypeError(f"{name} is {_words(x)} on device {x.device}. Expected: a dense tensor that holds numbers.")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {str(x.dtype).removeprefix('torch.')}. Expected: {what}, of {names}.")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}. Expected: {what}, which is {shape}.")


def _words(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


Coded = FloatFormat | Codebook


def element_codes(x: Tensor, f: Coded, rounding: str = "nearest_even", overflow: str | None = None) -> Tensor:
    """Round a floating tensor and return the codes, int32. Raises ValueError for a NaN that has no code."""
    x = x.detach()
    rounded = round_to(x if x.dtype is torch.float64 else x.float(), f, rounding, overflow)
    is_nan = rounded.isnan()
    if not f.has_nan and is_nan.any():
        raise ValueError(f"x holds NaN and {f} has no code for it. Expected: finite values; see torch.nan_to_num.")
    width = 64 if x.dtype is torch.float64 else 32
    # The codes are looked up in a table of all values, not computed from bit fields, so that code books work too.
    table, codes = (torch.from_numpy(a).to(x.device) for a in _code_table(f, width))
    # Bit patterns are compared as integers, because no processor flushes integers to zero. The patterns of negative
    # numbers run backwards.
    patterns = rounded.view(torch.int32 if width == 32 else torch.int64)
    ordered = (patterns ^ ((patterns >> (width - 1)) & torch.iinfo(patterns.dtype).max)).contiguous()
    result = codes[torch.searchsorted(table, ordered).clamp_(max=len(table) - 1)]
    return torch.where(is_nan, torch.full_like(result, f.encode(math.nan) if f.has_nan else 0), result)


def element_values(codes: Tensor, f: Coded) -> Tensor:
    """Return the float32 values of integer codes. Raises ValueError for codes out of range."""
    index = codes.long()
    table = torch.from_numpy(_value_table(f))
    if codes.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(table):
        raise ValueError(
            f"codes holds {int(index.min())} to {int(index.max())}. The codes of {f} are 0 to {len(table) - 1}."
        )
    return table.to(codes.device)[index]


def codable(fmt: str | Coded) -> Coded:
    """Return the format if its numbers have codes, else raise ValueError."""
    f = as_format(fmt)
    if not isinstance(f, Coded):
        raise ValueError(f"{f} has no codes here. Expected: a float format of up to 16 bits, or a code book.")
    if f.bits > 16:
        raise ValueError(f"{f} has {f.bits} bits. encode() and decode() take formats of up to 16 bits.")
    return f


# The cached tables are arrays, not tensors: a cached tensor would keep the device or the tracer of the first call.


@cache
def _value_table(f: Coded) -> np.ndarray[Any, Any]:
    values = f.values if isinstance(f, Codebook) else [f.decode(code) for code in range(2**f.bits)]
    return np.array([BINARY32.bits(v) for v in values], np.uint32).view(np.float32)


@cache
def _code_table(f: Coded, width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the patterns of all values in a container of `width` bits, with inf and -0, in order, and their codes."""
    values = [v for v, _ in f.ascending] if isinstance(f, Codebook) else [*f.values()]
    if f.has_inf and not isinstance(f, Codebook):
        values = [-math.inf, *values, math.inf]
    if f.has_negative_zero:
        values.insert(values.index(0.0), -0.0)
    container = BINARY32 if width == 32 else BINARY64
    integer: Any = np.int32 if width == 32 else np.int64
    patterns = np.array([container.bits(v) for v in values], np.uint32 if width == 32 else np.uint64).view(integer)
    ordered = patterns ^ ((patterns >> (width - 1)) & np.iinfo(integer).max)
    return ordered, np.array([f.encode(v) for v in values], np.int32)
