"""Rounding under autograd, transforms and tracers: the operator, and the straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpsim.formats.blocks import Format
from fpsim.tensors.launch import round_memory_, rounded
from fpsim.tensors.noise import new_traceable_key
from fpsim.tensors.spec import RoundingSpec, container_width, rounding_spec
from fpsim.torch_internals import constant_under_compile, keep_none
from fpsim.torch_modes import PlainFunction, has_transform, is_plain
from fpsim.torch_nodes import in_forward_mode

# For fewer elements than this, a second pass over the tensor costs less than a Python autograd node.
SMALL = 1 << 15


OperatorWords = tuple[str, str, str, int, str]  # format, rounding, overflow, random bits, variant


def words_of(spec: RoundingSpec) -> OperatorWords:
    """Return a rounding as the arguments of the operator."""
    return spec.format_text, spec.rounding, spec.overflow, spec.random_bits or 0, spec.variant


@constant_under_compile
def operator_words(
    fmt: str | Format, rounding: str, overflow: str | None, random_bits: int | None, variant: str
) -> OperatorWords:
    """Return the operator's arguments as constants of a compiled graph."""
    # torch.compile cannot trace the code that checks and caches a rounding.
    return words_of(rounding_spec(fmt, rounding, overflow, random_bits, variant))  # type: ignore[arg-type]


def apply_operator(x: Tensor, words: OperatorWords, key: Tensor | None) -> Tensor:
    """Round `x` with the operator. key: the key of stochastic rounding; None draws a new key."""
    require_no_forward_mode("A rounding")
    if key is None and words[1] == "stochastic":
        key = new_traceable_key(x)
    return torch.ops.fpsim.round(x, *words[:-1], key, words[-1])  # type: ignore[no-any-return]


# The operator that torch.compile, FakeTensorMode and functorch see. A format travels as its `repr`: the arguments of an
# operator are tensors, numbers and strings.


@torch.library.custom_op("fpsim::round", mutates_args=())
def _round_op(
    x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, key: Tensor | None, variant: str = "A"
) -> Tensor:
    return rounded(x, rounding_spec(fmt, rounding, overflow, random_bits or None, variant), key)


@_round_op.register_fake
def _(
    x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, key: Tensor | None, variant: str = "A"
) -> Tensor:
    # A dtype that cannot hold the format raises here: when the program is traced, not only when it runs.
    container_width(rounding_spec(fmt, rounding, overflow, random_bits or None, variant), x.dtype)
    return torch.empty_like(x)


@_round_op.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, fmt: str, rounding: str, overflow: str, random_bits: int, key: Tensor | None,
    variant: str = "A",
) -> tuple[Tensor, int | None]:  # fmt: skip
    words = fmt, rounding, overflow, random_bits, variant
    dim, key_dim = in_dims[0], in_dims[5]
    if key is None:
        return apply_operator(x, words, None), dim
    # randomness="different": one key is enough, because the noise differs between elements.
    if key_dim is not None:
        key = key.select(key_dim, 0)
        if dim is None:
            x, dim = x.expand(info.batch_size, *x.shape), 0
    # randomness="same": every sample starts from the same noise.
    elif dim is not None:
        return torch.stack([apply_operator(sample, words, key) for sample in x.unbind(dim)]), 0
    return apply_operator(x, words, key), dim


def _backward_op(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
    return gradient, *[None] * 6


_round_op.register_autograd(_backward_op, setup_context=keep_none)


class StraightThrough(PlainFunction):
    """Round in the forward pass; pass the gradient on, or round it too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, spec: RoundingSpec | None, backward_spec: RoundingSpec | None, tangent_spec: RoundingSpec | None
    ) -> Tensor:
        if spec is None:
            return x.view_as(x)
        return rounded(x, spec) if is_plain(x) else apply_operator(x, words_of(spec), None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backward_spec, ctx.tangent_spec = inputs[2:]
        ctx.materialize_grads = False  # as `keep_none` does, without a call

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.backward_spec is not None and gradient is not None:
            gradient = round_differentiably(gradient, ctx.backward_spec)
        return gradient, None, None, None


class _StraightThroughBothModes(StraightThrough):
    """StraightThrough with a rule for forward mode: a separate class, as torch.compile refuses a Function with jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        spec = ctx.tangent_spec
        return tangent.view_as(tangent) if spec is None else straight_through(tangent, spec, None)


def straight_through(
    x: Tensor,
    spec: RoundingSpec | None,
    backward_spec: RoundingSpec | None,
    tangent_spec: RoundingSpec | None = None,
) -> Tensor:
    """Return `x` rounded, with its gradient and its forward-mode tangent passed on or rounded."""
    if torch.compiler.is_compiling():
        return StraightThrough.apply(x, spec, backward_spec, tangent_spec)  # type: ignore[no-any-return]
    out = _StraightThroughBothModes.apply(x, spec, backward_spec, tangent_spec)
    # torch forbids in-place writes to an input that a Function returned.
    return out.clone() if spec is None else out


class _WithValues(_StraightThroughBothModes):
    """Replace numbers by the known values to which they round, and keep their gradient and tangent."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, values: Tensor, backward_spec: RoundingSpec | None, tangent_spec: RoundingSpec | None
    ) -> Tensor:
        return values.clone()


def with_values(
    x: Tensor, values: Tensor, backward_spec: RoundingSpec | None, tangent_spec: RoundingSpec | None
) -> Tensor:
    """Return `values`, to which `x` was rounded, with the gradient and the tangent of `x` (rounded or not)."""
    return _WithValues.apply(x, values.detach(), backward_spec, tangent_spec)  # type: ignore[no-any-return]


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward mode is active, other than under torch.compile.

    The operators themselves have rules only for vmap.
    """
    return not torch.compiler.is_compiling() and (has_transform() or in_forward_mode())


def require_no_forward_mode(what: str) -> None:
    """Raise NotImplementedError if torch.compile traces forward mode."""
    # The compiled program would compute no tangents, and torch would treat missing tangents as zero. Without
    # `fullgraph=True`, torch catches the error and runs the function without a compiler.
    if torch.compiler.is_compiling() and in_forward_mode():
        raise NotImplementedError(
            f"{what} is compiled in forward mode (torch.func.jvp, jacfwd, dual numbers), where its tangent would be "
            f"lost. Expected: reverse mode, or forward mode of a function that is not compiled."
        )


def round_differentiably(x: Tensor, spec: RoundingSpec, log2_scale: Tensor | None = None) -> Tensor:
    """Return `x` rounded, with its gradient unchanged. log2_scale: as in `launch.round_memory_`."""
    # Tracers and transforms need the Function. For a plain tensor, the Function pays only if a second pass over a clone
    # costs more.
    if not is_plain(x):
        return straight_through(x, spec, None)
    if x.requires_grad and torch.is_grad_enabled():
        if x.numel() >= SMALL and log2_scale is None:
            return StraightThrough.apply(x, spec, None, None)  # type: ignore[no-any-return]
        # The backward pass of `clone` is the straight-through gradient. It takes 6 us a call, 20 us less than a
        # Function.
        out = x.clone()
        round_memory_(out, spec, None, log2_scale)
        return out
    return rounded(x, spec, None, log2_scale)
