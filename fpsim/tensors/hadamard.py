"""Hadamard transforms of tensors, which spread an outlier over its group before a product's operand is quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpsim.checks import did_you_mean, is_whole, shown
from fpsim.kernels.hadamard import LANES, cpu_loop, cuda_loop
from fpsim.tensors.autograd import is_transformed, require_no_forward_mode
from fpsim.tensors.launch import NO_KEY_ADDRESS, PARALLEL_FROM, key_arguments, run_on_card, run_parts
from fpsim.tensors.noise import new_key_for, new_traceable_key
from fpsim.tensors.spec import address_of, require_floating
from fpsim.torch_internals import has_no_holes, keep_none
from fpsim.torch_modes import PlainFunction, is_plain

__all__ = ["Hadamard", "apply_hadamard_operator", "hadamard", "padded_to_groups", "require_groups", "transformed"]

SIGNS = (None, "fixed", "random")
LARGEST_SIZE = 1024
# The signs of NVIDIA's TransformerEngine for groups of 16: bit i is set where sign i is minus.
FIXED_SIGNS = sum(1 << i for i, sign in enumerate("+++-+------+-+--") if sign == "-")


@dataclass(frozen=True)
class Hadamard:
    """A Hadamard transform: x -> x D H / sqrt(size), in groups of `size` along an axis.

    H is Sylvester's matrix in its natural order, and D a diagonal of signs. D H / sqrt(size) is orthogonal: if both
    operands of a product are transformed along the axis that it sums over, the product stays the same, and nothing has
    to be undone.

    Args:
        size: the number of elements of a group, a power of two from 2 to 1024.
        signs: None for no D; "fixed" for the 16 signs + + + - + - - - - - - + - + - - of NVIDIA's TransformerEngine,
            which are repeated after 16 and cut off for smaller groups; "random" for signs that a noise key decides,
            which are the same for every group.

    Raises:
        ValueError: for other sizes and signs.

    >>> Hadamard(16, "fixed")
    Hadamard(size=16, signs='fixed')
    """

    size: int
    signs: str | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.size, 2) or self.size > LARGEST_SIZE or self.size & (self.size - 1):
            raise ValueError(
                f"size={shown(self.size)} is invalid for a Hadamard transform. Expected: powers of two, 2 to 1024."
            )
        if not (self.signs is None or isinstance(self.signs, str)) or self.signs not in SIGNS:
            raise ValueError(
                f"Unknown signs {shown(self.signs)}.{did_you_mean(self.signs, ['fixed', 'random'])} "
                f"Known: None, 'fixed', 'random'."
            )
        object.__setattr__(self, "size", int(self.size))

    def __str__(self) -> str:
        return f"Hadamard {self.size}" + (f" {self.signs} signs" if self.signs else "")


def hadamard(x: Tensor, transform: Hadamard, axis: int = -1, key: Tensor | None = None) -> Tensor:
    """Return the Hadamard transform of `x` along `axis`.

    float32 is computed in float32: first the sums and differences in the order of the fast transform, which is the same
    on every device, then one product with 1 / sqrt(size), which is exact if the size is a power of four. A NaN or inf
    reaches its whole group, and so does a sum beyond the largest float32, as inf. float16 and bfloat16 are computed in
    float32 and rounded once. The gradient is that of the linear map, which is the inverse transform.

    Args:
        x: float32, float64, float16 or bfloat16, of any shape and strides, on the CPU or a CUDA device.
        transform: the size and the signs.
        axis: the axis of the groups. Its length is a multiple of the size.
        key: the 64 bits that determine random signs, an int64 of no dimension on the CPU; None draws them from the
            stream of the noise. Two tensors with the same key get the same signs.

    Returns:
        A tensor of the same shape, dtype and device.

    Raises:
        ValueError: for a length that the size does not divide.
        IndexError: for an axis that `x` does not have.
        TypeError: for tensors that cannot be transformed.

    >>> hadamard(torch.tensor([8.0, 0.0, 0.0, 0.0]), Hadamard(4))
    tensor([4., 4., 4., 4.])
    >>> x, w, t = torch.arange(8.0).view(2, 4), torch.ones(1, 4), Hadamard(4, "fixed")
    >>> torch.equal(hadamard(x, t) @ hadamard(w, t).T, x @ w.T)
    True
    """
    if not isinstance(transform, Hadamard):
        raise TypeError(
            f"transform is {type(transform).__name__}, {shown(transform)}. "
            f"Expected: a fpsim.Hadamard, such as Hadamard(16)."
        )
    require_floating(x)
    if not is_whole(axis):
        raise TypeError(f"axis={shown(axis)} is not an integer. Expected: {-x.dim()} to {x.dim() - 1}.")
    if not -x.dim() <= axis < x.dim():
        raise IndexError(
            f"axis={shown(axis)} is out of range for {x.dim()} dimensions. Expected: {-x.dim()} to {x.dim() - 1}."
        )
    axis %= x.dim()
    require_groups(transform, x.shape[axis], f"x of shape {tuple(x.shape)} along axis {axis}")
    if key is not None:
        _require_key(key)
    # Without random signs the key is dropped: an operator with a key would be traced, and the key saved, for nothing.
    plain = is_plain(x)
    if transform.signs != "random":
        key = None
    elif key is None:
        key = new_key_for(x) if plain else new_traceable_key(x)
    if plain and not (x.requires_grad and torch.is_grad_enabled()):
        return transformed(x, transform, axis, key)
    if is_transformed():
        return _Transformed.apply(x, transform.size, transform.signs or "none", axis, False, key)  # type: ignore[no-any-return]
    return apply_hadamard_operator(x, transform, axis, key)


def _require_key(key: Any) -> None:
    if not isinstance(key, Tensor) or key.dtype is not torch.int64 or key.dim():
        given = f"a tensor of {key.dtype}, shape {tuple(key.shape)}" if isinstance(key, Tensor) else shown(key)
        raise TypeError(f"key is {given}. Expected: an int64 tensor of no dimension, or None.")


def apply_hadamard_operator(
    x: Tensor, transform: Hadamard, axis: int, key: Tensor | None, is_inverse: bool = False
) -> Tensor:
    """Transform `x` with the operator. axis: counted from 0."""
    require_no_forward_mode("A Hadamard transform")
    return torch.ops.fpsim.hadamard(x, transform.size, transform.signs or "none", axis, is_inverse, key)  # type: ignore[no-any-return]


def require_groups(transform: Hadamard, length: int, where: str) -> None:
    """Raise ValueError, naming `where`, if an axis of this length is not a whole number of groups."""
    if length % transform.size:
        largest = length & -length
        fitting = f"sizes that divide it, {largest} at most" if largest > 1 else "no size at all, for it is odd"
        raise ValueError(
            f"A Hadamard transform of size {transform.size} reached {where}, whose length {length} it does not divide. "
            f"Expected: {fitting}. Choose another size, pad the axis, or omit the transform here."
        )


def padded_to_groups(x: Tensor, transform: Hadamard, axis: int) -> Tensor:
    """Pad an axis of `x` with zeros at its end to a whole number of groups; return `x` itself if nothing is missing.

    If two operands are padded along the axis that their product sums over, the product stays the same.
    """
    missing = -x.shape[axis] % transform.size
    if not missing:
        return x
    shape = list(x.shape)
    shape[axis] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=axis)


def transformed(x: Tensor, transform: Hadamard, axis: int, key: Tensor | None, is_inverse: bool = False) -> Tensor:
    """Return the transform of a plain tensor, below autograd. The result has the strides of `x` if `x` has no holes.

    axis: counted from 0.
    """
    if x.dtype is not torch.float32 and x.dtype is not torch.float64:
        return transformed(x.float(), transform, axis, key, is_inverse).to(x.dtype)
    x = x.detach()
    out = torch.empty_like(x)
    # Memory with holes cannot be viewed as (groups, size, inner): a copy is transformed in place.
    if not has_no_holes(x):
        x = out.copy_(x)
    lines = x.numel() // transform.size
    if lines == 0:
        return out
    # Dimensions are sorted by stride: `inner` is the distance in memory, in elements, between neighbours of a group.
    behind = sorted(range(x.dim()), key=x.stride, reverse=True)
    behind = behind[behind.index(axis) + 1 :]
    inner = int(np.prod([x.shape[d] for d in behind], dtype=np.int64))
    pattern = FIXED_SIGNS if transform.signs == "fixed" else 0
    words = inner, pattern, int(transform.signs == "random"), int(is_inverse)
    if x.is_cuda:
        on_card = cuda_loop(transform.size, 8 * x.element_size())
        arguments = address_of(x), address_of(out), lines, *words, *key_arguments(key)
        run_on_card(on_card, x, -(-lines * transform.size // on_card.threads), arguments)
        return out
    loop = cpu_loop(transform.size, 8 * x.element_size())
    key_address = NO_KEY_ADDRESS if key is None else key.data_ptr()
    source, target = address_of(x), address_of(out)
    threads = torch.get_num_threads() if x.numel() >= PARALLEL_FROM else 1
    # Parts are whole vectors of lines, so that only the last thread has lanes without a line.
    per_thread = -(-lines // (threads * LANES)) * LANES
    parts = [
        (source, target, first, min(first + per_thread, lines), *words, key_address)
        for first in range(0, lines, per_thread)
    ]
    run_parts(loop, parts, x, out, key)
    return out


# The operator that autograd, torch.compile, FakeTensorMode and functorch see.


@torch.library.custom_op("fpsim::hadamard", mutates_args=())
def _hadamard_op(x: Tensor, size: int, signs: str, axis: int, is_inverse: bool, key: Tensor | None) -> Tensor:
    return transformed(x, Hadamard(size, None if signs == "none" else signs), axis, key, is_inverse)


@_hadamard_op.register_fake
def _(x: Tensor, size: int, signs: str, axis: int, is_inverse: bool, key: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@_hadamard_op.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, size: int, signs: str, axis: int, is_inverse: bool, key: Any) -> Any:
    dim, key_dim = in_dims[0], in_dims[-1]
    if dim is not None:
        x = x.movedim(dim, 0)
    if key_dim is None:
        return torch.ops.fpsim.hadamard(x, size, signs, axis + 1, is_inverse, key), 0
    samples = x.unbind() if dim is not None else [x] * info.batch_size
    keys = key.unbind(key_dim)
    return torch.stack(
        [torch.ops.fpsim.hadamard(s, size, signs, axis, is_inverse, k) for s, k in zip(samples, keys, strict=True)]
    ), 0


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.words, key = inputs
    keep_none(ctx)
    ctx.save_for_backward(key)


def _backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
    if gradient is None:
        return None, None, None, None, None, None
    size, signs, axis, is_inverse = ctx.words
    (key,) = ctx.saved_tensors
    # The transform is orthogonal: its adjoint is the inverse.
    return torch.ops.fpsim.hadamard(gradient, size, signs, axis, not is_inverse, key), None, None, None, None, None


_hadamard_op.register_autograd(_backward, setup_context=_setup)


class _Transformed(PlainFunction):
    """The operator under torch.func transforms. As the map is linear, forward-mode tangents are transformed too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, size: int, signs: str, axis: int, is_inverse: bool, key: Tensor | None) -> Tensor:
        return torch.ops.fpsim.hadamard(x, size, signs, axis, is_inverse, key)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _setup(ctx, inputs, output)
        ctx.save_for_forward(inputs[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if gradient is None:
            return None, None, None, None, None, None
        size, signs, axis, is_inverse = ctx.words
        return _Transformed.apply(gradient, size, signs, axis, not is_inverse, *ctx.saved_tensors), *[None] * 5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _Transformed.apply(tangent, *ctx.words, *ctx.saved_tensors)  # type: ignore[no-any-return]
