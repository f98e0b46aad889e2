"""The interface to torch and NumPy: `round_to`, `round_to_` and `Rounder`."""

from __future__ import annotations

from functools import cache
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from fpsim.formats.blocks import BlockFormat, Element, Format, as_format
from fpsim.tensors.autograd import apply_operator, operator_words, round_differentiably, straight_through
from fpsim.tensors.block_autograd import apply_block_operator, block_words, round_blocks_differentiably
from fpsim.tensors.cuts import axis_pair, require_no_axis
from fpsim.tensors.launch import kernel_for, launch, round_memory_, rounded
from fpsim.tensors.noise import new_key_for
from fpsim.tensors.shared_scales import rounded_blocks
from fpsim.tensors.spec import (
    CONTAINERS,
    BlockSpec,
    RoundingSpec,
    any_spec,
    cannot_hold_blocks,
    container_width,
    holds_blocks,
    require_floating,
    require_ndarray,
    require_no_mask,
    rounding_spec,
)
from fpsim.torch_internals import base_of, constant_under_compile, share_storage
from fpsim.torch_modes import is_plain

__all__ = ["Rounder", "round_to", "round_to_"]


def _require_out(out: Any, x: Any) -> None:
    """Raise ValueError if `out` does not fit `x`; both are tensors, or both are arrays."""
    library = "torch" if isinstance(x, Tensor) else "numpy"
    for what in ("dtype", "device", "shape"):
        # The device is None for arrays, because arrays of NumPy 1 have no device.
        given, wanted = getattr(out, what, None), getattr(x, what, None)
        if given != wanted:
            if what == "shape":
                given, wanted = tuple(out.shape), tuple(x.shape)
            raise ValueError(f"out has {what} {given}, x has {wanted}. They must agree: {library}.empty_like(x) does.")
    if isinstance(out, Tensor):
        strides, is_contiguous = out.stride(), out.is_contiguous()
    else:
        strides, is_contiguous = out.strides, out.flags.c_contiguous
    if not is_contiguous:
        raise ValueError(
            f"out has strides {strides}, which is not contiguous. "
            f"Use {library}.empty(x.shape, dtype=x.dtype), or omit out=."
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors share some of their memory, but not all."""
    distance = abs(a.data_ptr() - b.data_ptr())
    return 0 < distance < a.numel() * a.element_size()


@overload
def round_to(
    x: Tensor,
    fmt: str | Format,
    rounding: str = ...,
    overflow: str | None = ...,
    random_bits: int | None = ...,
    out: Tensor | None = ...,
    axis: int | tuple[int, int] | None = ...,
    variant: str = ...,
) -> Tensor: ...
@overload
def round_to(
    x: np.ndarray[Any, Any],
    fmt: str | Format,
    rounding: str = ...,
    overflow: str | None = ...,
    random_bits: int | None = ...,
    out: np.ndarray[Any, Any] | None = ...,
    axis: int | tuple[int, int] | None = ...,
    variant: str = ...,
) -> np.ndarray[Any, Any]: ...
def round_to(
    x: Any,
    fmt: str | Format,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
    out: Any = None,
    axis: int | tuple[int, int] | None = None,
    variant: str = "A",
) -> Any:
    """Round every element of `x` to a value of `fmt`, kept in the dtype of `x`.

    NaN stays NaN; -0 keeps its sign where the format has one. float64 is rounded directly, never through float32. The
    gradient passes through unchanged (straight-through).

    Args:
        x: a float32, float64, float16 or bfloat16 tensor or ndarray, of any shape and strides, on the CPU or a CUDA
            device.
        fmt: a format, or its name.
        rounding: "nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd" or "stochastic".
        overflow: the result for numbers beyond the largest value: "inf", "nan" or "saturate". None means inf in formats
            that have an inf, and the largest value in others and in block formats.
        random_bits: for "stochastic", how many random bits r decide (1 to 32); None uses every discarded bit up to 32.
        out: a contiguous tensor of the same shape, dtype and device to write to; the result then has no gradient.
        axis: in block formats, the axis along which elements share a scale, by default the last axis. (across, axis)
            also names the axis of a tile's rows. In a product, blocks run along the contraction axis. `x` must then be
            float32; if scales are powers of two, as in the MX formats, bfloat16 and float64 are accepted too.
        variant: with random_bits, how the distance to the lower neighbour is rounded to r bits, which determine the
            probability of rounding up. "A" truncates it, so that results are too close to zero by 2^-(r+1) of the
            spacing on average. "B" rounds it to nearest, ties away, and "C" to nearest even, both without that bias.
            "C_ties_to_odd" and "C_to_odd" do as their names say. A, B and C are IEEE P3109's.

    Returns:
        A tensor or ndarray of the same shape, dtype and device.

    Raises:
        ValueError: for unknown words.
        TypeError: for tensors that cannot be rounded, among them a dtype that cannot hold every value of the format.

    >>> round_to(torch.tensor([1.0, 65519.0, 65520.0, -1e-8]), "fp16")
    tensor([1.0000e+00, 6.5504e+04,        inf, -0.0000e+00])
    >>> round_to(np.array([0.3, 500.0]), "e4m3fn")
    array([3.125e-01, 4.480e+02])
    >>> round_to(torch.tensor([[1.0, 2.2], [300.0, 700.0]]), "mxfp4", axis=1)
    tensor([[  1.,   2.],
            [256., 768.]])
    """
    # The usual call comes first, with checks that cost nothing: a lookup and a launch follow. The other cases are
    # slower anyway.
    is_usual = out is None and type(x) is Tensor and x.dtype is torch.float32 and not x.requires_grad and is_plain(x)
    if not is_usual and torch.compiler.is_compiling() and isinstance(x, Tensor) and out is None:
        return _round_by_operator(x, fmt, (rounding, overflow, random_bits, variant), axis)
    spec = any_spec(fmt, rounding, overflow, random_bits, variant)
    if isinstance(spec, BlockSpec):
        return _round_blocks(x, spec, out, axis, is_usual)
    if axis is not None:
        require_no_axis(axis, fmt)
    if is_usual and x.layout is torch.strided:
        return rounded(x, spec)
    return _round_numbers(x, spec, out)


def _round_by_operator(x: Tensor, fmt: Any, words: tuple[Any, ...], axis: Any) -> Tensor:
    """Round with an operator that torch.compile traces."""
    if not _shares_scales(fmt):
        require_no_axis(axis, fmt)
        require_floating(x)
        return apply_operator(x, operator_words(fmt, *words), None)
    require_floating(x)
    if not _holds_blocks(x.dtype, fmt):
        raise cannot_hold_blocks(x.dtype, fmt)
    return apply_block_operator(x, block_words(fmt, *words), *axis_pair(axis))


def _round_numbers(x: Any, spec: RoundingSpec, out: Any) -> Any:
    """Round each number separately, without shared scales."""
    if isinstance(x, np.ndarray):
        return _round_ndarray(x, spec, out)
    require_floating(x)
    if out is None:
        return round_differentiably(x, spec)
    _require_tensor_out(out, x)
    if not is_plain(x) or not is_plain(out):
        return out.copy_(round_differentiably(x, spec))
    width = container_width(spec, x.dtype)
    if width == 0:
        return out.copy_(x.detach())
    direct = x.is_contiguous() and x.dtype is CONTAINERS[width]
    # A partial overlap would let the kernel read numbers that it has already rounded.
    if direct and not _overlap(x, out):
        launch(x, out, kernel_for(spec, width), new_key_for(x) if spec.rounding == "stochastic" else None)
        torch.autograd.graph.increment_version(out)
        return out
    return out.copy_(rounded(x, spec))


def _require_tensor_out(out: Any, x: Tensor) -> None:
    require_floating(out, "out")
    _require_out(out, x)
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out= keeps no gradient, and x or out requires one. Omit out=, or use torch.no_grad().")


@constant_under_compile
def _shares_scales(fmt: Any) -> bool:
    return isinstance(fmt, BlockFormat) or (isinstance(fmt, str) and _names_blocks(fmt))


@constant_under_compile
def _holds_blocks(dtype: torch.dtype, fmt: Any) -> bool:
    f = as_format(fmt)
    assert isinstance(f, BlockFormat)
    return holds_blocks(dtype, f)


@cache
def _names_blocks(name: str) -> bool:
    """Return whether `name` is the name of a block format; False for an unknown name, for which other code raises."""
    try:
        return isinstance(as_format(name), BlockFormat)
    except ValueError:
        return False


def _round_blocks(x: Any, spec: BlockSpec, out: Any, axis: int | tuple[int, int] | None, is_usual: bool) -> Any:
    """Round blocks that share scales. is_usual: the value that `round_to` computed."""
    along, across = (-1, None) if axis is None else axis_pair(axis)
    if isinstance(x, np.ndarray):
        return _round_blocks_of_ndarray(x, spec, out, along, across)
    # A float32 tensor on the CPU needs no check: blocks of every format fit.
    if type(x) is not Tensor or x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
        require_floating(x)
        if not holds_blocks(x.dtype, spec.fmt):
            raise cannot_hold_blocks(x.dtype, spec.fmt)
    if out is None:
        if is_usual:
            return rounded_blocks(x, spec, along, across)
        return round_blocks_differentiably(x, spec, along, across)
    _require_tensor_out(out, x)
    if is_plain(x) and is_plain(out) and x.dtype is torch.float32 and not share_storage(x, out):
        rounded_blocks(x, spec, along, across, out=out)
        torch.autograd.graph.increment_version(out)
        return out
    return out.copy_(round_blocks_differentiably(x, spec, along, across))


def _round_blocks_of_ndarray(
    x: np.ndarray[Any, Any], spec: BlockSpec, out: Any, along: int, across: int | None
) -> np.ndarray[Any, Any]:
    require_ndarray(x)
    copy = torch.from_numpy(np.array(x, order="C"))
    if not holds_blocks(copy.dtype, spec.fmt):
        raise cannot_hold_blocks(copy.dtype, spec.fmt)
    rounded: np.ndarray[Any, Any] = rounded_blocks(copy, spec, along, across).numpy()
    return rounded if out is None else _written(rounded, x, out)


def _written(rounded: np.ndarray[Any, Any], x: np.ndarray[Any, Any], out: Any) -> np.ndarray[Any, Any]:
    """Write the rounded numbers of `x` to `out`, and return `out`."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is {type(out).__name__} and x a numpy.ndarray. Give an ndarray: numpy.empty_like(x).")
    require_no_mask(out, "out")
    _require_out(out, x)
    out[...] = rounded
    return out


def _round_ndarray(x: np.ndarray[Any, Any], spec: RoundingSpec, out: Any) -> np.ndarray[Any, Any]:
    require_ndarray(x)
    rounded = torch.from_numpy(np.array(x, order="C"))
    round_memory_(rounded, spec)
    return rounded.numpy() if out is None else _written(rounded.numpy(), x, out)


def round_to_(
    x: Tensor,
    fmt: str | Element,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    random_bits: int | None = None,
    variant: str = "A",
) -> Tensor:
    """Round `x` in place and return it: `round_to` without a second copy, for any strides.

    The gradient passes through unchanged.

    Args:
        x: a tensor of any strides. A leaf that requires a gradient is refused, as torch does.
        fmt, rounding, overflow, random_bits, variant: as in `round_to`; block formats are refused.

    >>> x = torch.tensor([[1.0, 2.1], [3.3, 4.0]])
    >>> round_to_(x.T, "e5m2"); x
    tensor([[1.0000, 3.5000],
            [2.0000, 4.0000]])
    tensor([[1.0000, 2.0000],
            [3.5000, 4.0000]])
    """
    spec = rounding_spec(fmt, rounding, overflow, random_bits, variant)
    require_floating(x)
    base = base_of(x)
    if torch.is_grad_enabled() and x.requires_grad and (x if base is None else base).is_leaf:
        raise RuntimeError(
            "round_to_ was given a leaf that requires a gradient, or a view of one; an in-place change would lose its "
            "history. Use round_to(x), or torch.no_grad()."
        )
    if not is_plain(x):
        return x.copy_(round_differentiably(x, spec))
    round_memory_(x, spec)
    # The kernel wrote below autograd: without a new version, a backward pass would not notice a changed saved tensor.
    torch.autograd.graph.increment_version(x)
    return x


class Rounder(nn.Module):
    """A layer that rounds activations forward and their gradients backward, each to its own format.

    Shapes and dtypes pass unchanged.

    Args:
        forward: the format of activations; None leaves them alone.
        backward: the format of their gradients; None leaves them alone.
        rounding: the rounding of activations, as in `round_to`.
        backward_rounding: the rounding of gradients; None means the same.
        overflow, backward_overflow: as in `round_to`, for activations and for gradients.
        random_bits, variant: as in `round_to`, for activations and gradients alike if their rounding is stochastic.
            Raises ValueError if neither is stochastic.

    >>> layer = Rounder(forward="e4m3fn", backward="e5m2")
    >>> x = torch.tensor([0.3], requires_grad=True)
    >>> (layer(x) * 1.3).backward(); x.grad
    tensor([1.2500])
    """

    def __init__(
        self,
        forward: str | Element | None = None,
        backward: str | Element | None = None,
        rounding: str = "nearest_even",
        backward_rounding: str | None = None,
        overflow: str | None = None,
        backward_overflow: str | None = None,
        random_bits: int | None = None,
        variant: str = "A",
    ) -> None:
        super().__init__()
        backward_rounding = rounding if backward_rounding is None else backward_rounding
        # The arguments of a side without a format are checked against e5m2, which has inf and NaN.
        onward = rounding_spec("e5m2" if forward is None else forward, rounding, overflow)
        back = rounding_spec("e5m2" if backward is None else backward, backward_rounding, backward_overflow)
        if random_bits is not None or variant != "A":
            used = [spec for fmt, spec in ((forward, onward), (backward, back)) if fmt is not None] or [onward]
            first = next((spec for spec in used if spec.rounding == "stochastic"), used[0])
            # `rounding_spec` refuses random bits and a variant that no rounding uses.
            rounding_spec(first.fmt, first.rounding, first.overflow, random_bits, variant)
            onward, back = (
                rounding_spec(spec.fmt, spec.rounding, spec.overflow, random_bits, variant)
                if spec.rounding == "stochastic"
                else spec
                for spec in (onward, back)
            )
        self.forward_spec = None if forward is None else onward
        self.backward_spec = None if backward is None else back

    def forward(self, x: Tensor) -> Tensor:
        require_floating(x)
        return straight_through(x, self.forward_spec, self.backward_spec)

    def extra_repr(self) -> str:
        return f"forward={self.forward_spec or 'float32'}, backward={self.backward_spec or 'float32'}"
