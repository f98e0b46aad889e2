"""Codes of a tensor whose blocks share scales: of its elements, of its scales, and the second scale of the tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpsim.checks import shown
from fpsim.formats.blocks import BlockFormat, as_format
from fpsim.formats.fixed_point import FixedPoint
from fpsim.kernels import blocks
from fpsim.kernels.core import BINARY32
from fpsim.tensors.cuts import axis_pair, of_each_element, second_amaxes, second_of_each_element
from fpsim.tensors.element_codes import codable, element_codes, element_values
from fpsim.tensors.shared_scales import block_plan, block_scales, recorded_amax, rounded_blocks
from fpsim.tensors.spec import BlockSpec, require_float32, under_transform
from fpsim.torch_modes import is_plain, is_sample

__all__ = ["BlockCodes", "decode_blocks", "encode_blocks"]

NIBBLE = 4  # bits: two such codes are in a byte
_MASK = torch.finfo(torch.float32).max
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class BlockCodes:
    """A block-scaled tensor as hardware stores it. Each value is element * scale / tensor_scale.

    `encode` makes it and `decode` reads it. The layout is that of safetensors of compressed-tensors and torchao.

    Args:
        fmt: the format, or its name.
        shape: of the tensor.
        codes: of the elements. Those of 4 bits are uint8, two in a byte along the axis that blocks run along, the first
            one in the low nibble; the last high nibble is 0 where their number is odd. Of up to 8 bits uint8 in the
            shape of the tensor, of more int32. Integers are in two's complement.
        scales: the codes of the scales, uint8, or int32 of more than 8 bits; of scales in float32 the numbers. The
            shape is that of `scales_of`.
        tensor_scale: the second scale of a format that has one, a float32 of no dimension: 2688 / amax in NVFP4, by
            which numbers are divided. If each row, or each n elements, has one: the tensor's shape, with their number
            along the axis. None for other formats.
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
    """Round a float32 as `round_to` does, and return the codes."""
    require_float32(x)
    if not is_plain(x):
        raise under_transform("encode")
    if not x.numel():
        raise ValueError(f"x of shape {tuple(x.shape)} has no elements, and no scales. Expected: one element or more.")
    f, (along, across) = spec.fmt, axis_pair(axis)
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
    # are powers of two, else within 2**-22, and elements are at least 2**-15 apart.
    found = rounded.double()
    if second is not None:
        found = found * second_of_each_element(second, f, x.shape, along).double()
    if f.gain != 1:
        found = found * f.gain
    # Under a scale of 0 values do not show the elements: the kernel of a narrow scale multiplied by float32's largest
    # number.
    is_narrow = not f.has_power_scale and f.scale.mantissa_bits < BINARY32.mantissa_bits
    hidden = x.double() * (_MASK if is_narrow else 1.0)
    if isinstance(f.element, FixedPoint):  # whose zero has no sign: -0 was made of a negative element
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
    """Return the float32 values, in the arithmetic of `round_to`: each product and quotient is rounded by itself."""
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
    # float64 holds the product of an element and a scale, which is then rounded once
    values = (elements * of_each_element(scales, f, given.shape, along, across).double()).float()
    if f.gain != 1:
        return values / torch.tensor(f.gain, device=values.device)
    if given.tensor_scale is None:
        return values
    return values / second_of_each_element(given.tensor_scale, f, given.shape, along)


def _second_scales(x: Tensor, spec: BlockSpec, along: int) -> Tensor:
    """Return the second scale of the tensor, or of its parts, from their amaxes: kernels.blocks.make_tensor_scale."""
    f = spec.fmt
    if isinstance(f.tensor_scale, bool):
        amax = recorded_amax(x, spec)
    else:
        moved = x.movedim(along, -1).contiguous() if x.dim() else x
        patterns = second_amaxes(moved, f, block_plan(spec).parameters[blocks.COUNTED])
        amax = patterns.view(torch.float32)
        amax = amax.view(*moved.shape[:-1], amax.shape[-1]).movedim(-1, along) if x.dim() else amax.view(())
    top = float(torch.tensor(f.tensor_lands_on))
    whole = (top / amax.double()).float().clamp(max=_MASK)  # a quotient in float64 is rounded as one in float32
    infinite = math.nan if f.nonfinite == "nan" else 1.0
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), whole, infinite))


def _codes_of(found: Tensor, f: BlockFormat, overflow: str) -> Tensor:
    """Return the codes of numbers that lie near elements, each the code of the nearest."""
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
    """Pack two codes into a byte, the first one in the low nibble."""
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
