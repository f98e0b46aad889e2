"""Torch functions that hide several operations, written as these operations; recurrent layers are in `recurrent`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from fpsim.emulation import recurrent
from fpsim.emulation.calls import QUOTIENT_OF_NUMBER, REFUSE, Action, Call
from fpsim.emulation.operands import leaves_float32
from fpsim.emulation.scope import active
from fpsim.torch_internals import blind_to_modes
from fpsim.torch_modes import over_positions

__all__ = ["by_operations", "flex_attention"]

# Python versions of torch functions that hide many operations: each operation in them is emulated.
_decomposed: dict[Any, Callable[..., Any]] = {
    torch.ldexp: lambda input, other, **out: _ldexp(input, other, **out),
    Tensor.ldexp: lambda self, other: _ldexp(self, other),
    Tensor.ldexp_: lambda self, other: self.mul_(torch.pow(2.0, other)),
    F.multi_head_attention_forward: blind_to_modes(F.multi_head_attention_forward),
    QUOTIENT_OF_NUMBER: lambda self, other: self.reciprocal() * other,
}


def by_operations(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of a call whose operations are emulated one by one; NotImplemented if torch has to run it.

    Raises NotImplementedError for a function of `REFUSE`.
    """
    scope = emulation.scope
    if call.action is Action.REFUSE:
        raise NotImplementedError(
            f"{resolve_name(func) or call.name} at {scope.name or 'the top level'} hides several operations in one "
            f"call and cannot be emulated. To do: {REFUSE[call.name]}."
        )
    # A recurrent layer in which nothing is rounded is left to torch's fused kernel.
    is_left = call.name in recurrent.OPERATIONS and scope.products is None and leaves_float32(scope.specs, args[0])
    if call.action is Action.DECOMPOSE and not is_left:
        inner = _decomposed.get(func) or partial(recurrent.OPERATIONS[call.name], scope.repeated)
        with emulation:
            return inner(*args, **kwargs)
    if call.is_squared_difference and _is_elementwise(args, kwargs):
        with emulation:
            difference = args[0] - args[1]
            return difference * difference
    return NotImplemented


def _ldexp(x: Tensor, other: Tensor, **out: Any) -> Tensor:
    """Compute ldexp as torch does: multiply x by a power of two, whose dtype follows from the exponents."""
    # With integer exponents, the result has the dtype of x. With floating-point exponents, torch promotes.
    made = torch.mul(x, torch.pow(2.0, other), **out)
    return made.type_as(x) if x.is_floating_point() and not (out or other.is_floating_point()) else made


def _is_elementwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a loss is not reduced: it returns one number for each pair of elements."""
    # Native kernels of an unreduced loss round the difference first, also on cards. With a sum they compute in float32.
    named = {name: x for name, x in kwargs.items() if x is not None}
    if len(args) != 2 or named != {"reduction": "none"}:
        return False
    return all(isinstance(x, Tensor) for x in args) and args[0].shape == args[1].shape


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute flex_attention as `math_attention` of torch/_higher_order_ops/flex_attention.py does, call by call.

    Scores and weights are float32 on purpose; `score_mod` gets float32 scores. The weights are cast to the query's
    format for their product with the values, and the product is rounded. The emulation's mode has to be active.

    query: (batch, heads, positions, features). key, value: the same, with another length and perhaps fewer heads.
    Returns the result, in the query's order of strides; log2 of the sums of exponentials; and the largest score divided
    by ln 2. The last two are empty if the call does not ask for them.
    """
    scope = active.emulation.scope
    if scope.products is not None and scope.products.attention:
        raise NotImplementedError(
            f"flex_attention at {scope.name or 'the top level'} has two products of activations, which "
            f"Products(attention=True) cannot quantise inside of it. To do: call F.scaled_dot_product_attention with a "
            f"mask, or write the products with @."
        )
    # torch's own function is not called, because it reads `query.dtype`. Outside of a model's own code this dtype is
    # float32, so that the function's casts would do nothing.
    if scope.rounds_nothing or query.dtype is torch.float64:
        wide_query, wide_key = query, key
    else:
        wide_query, wide_key = query.float(), key.float()
    groups, batch = query.size(1) // key.size(1), query.size(0)
    wide_key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (wide_key, value))
    wide_key, value = (x.expand(batch, *x.shape[1:]) for x in (wide_key, value))
    scores = (wide_query @ wide_key.mT) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    is_seen = over_positions(block_mask[-1], (), (None,) * len(mask_buffers))(*places, *mask_buffers)
    moved = over_positions(score_mod, (0,), (None,) * len(score_buffers))(scores, *places, *score_buffers)
    scores = torch.where(is_seen, moved, torch.full_like(scores[:1, :1, :1, :1], -math.inf))
    sums = largest = torch.empty(0, device=scores.device)
    if kernel_options.get("OUTPUT_LOGSUMEXP", True):
        sums = torch.logsumexp(scores, -1) / math.log(2)
    if kernel_options.get("OUTPUT_MAX", True):
        largest = torch.amax(scores, -1) / math.log(2)
    hides_all = scores.detach().isneginf().all(-1, keepdim=True)  # the result of such a row is zeros
    weights = torch.softmax(scores.masked_fill(hides_all, 0.0), -1).masked_fill(hides_all, 0.0)
    return _laid_out(weights.type_as(query) @ value.type_as(query), query), sums, largest


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Copy `x` to the stride order of another tensor, except that the last axis becomes the innermost one."""
    order = [*sorted(range(x.dim() - 1), key=like.stride, reverse=True), x.dim() - 1]
    return x.permute(order).contiguous().permute(*[order.index(i) for i in range(x.dim())])
