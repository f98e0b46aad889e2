"""Attention with rounding points: its softmax and its product with the values, for keys in one block or in several."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fpsim.emulation.forms import Batched, Form, Side
from fpsim.emulation.marks import writes_to
from fpsim.emulation.products import Product, ProductCall
from fpsim.emulation.scope import Attended
from fpsim.policies.attention import Attention
from fpsim.policies.operand import Operand, ProductSpecs
from fpsim.torch_modes import PlainFunction

__all__ = ["attended", "dropout", "softmax", "weighted"]

_ROWS = Side(-1, -2)


def weighted(call: ProductCall, weights: Tensor, value: Tensor, found: Attended | None, **rest: Any) -> Tensor:
    """Return o = p v of an attention with points. found: the tracked state of the weights."""
    points = _points(call)
    # For keys in one block, the weights suffice. In several blocks, each computes its exponentials from the scores.
    if points.block_kv is None or not weights.shape[-1]:
        make = partial(_OfWeights, points)
        return call.compute(Batched(weights, value), weights, value, specs=points.pv, make=make, **rest)
    if found is None or found.scores is None or found.is_turned or found.writes != writes_to(found.scores):
        raise NotImplementedError(
            f"The product at {call.site} is that of an attention whose keys come in blocks of {points.block_kv}, and "
            f"its weights are not a softmax as torch.softmax gives it, with dropout at most. Expected: matmul, bmm or "
            f"einsum of torch.softmax(scores, -1) and the values, or F.scaled_dot_product_attention; or block_kv=None."
        )
    scores, in_blocks = found.scores, partial(_InBlocks, points, found.keep)
    return call.compute(Batched(scores, value), scores, value, specs=points.pv, make=in_blocks, **rest)


def softmax(call: ProductCall, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return the weights of an attention from its scores; leave any other softmax to torch."""
    known, points = call.scope.listeners.attended, _points(call)
    if known.get(input) is None or dim is None:
        return NotImplemented
    is_turned = dim % input.dim() == input.dim() - 2
    if not is_turned and dim % input.dim() != input.dim() - 1:
        if points.block_kv is None and points.diff is None and points.exp is None:
            return NotImplemented
        raise NotImplementedError(
            f"softmax at {call.site} is over axis {dim} of scores with {input.dim()} axes. Expected: the last axis, or "
            f"the last but one, for an attention with block_kv, diff or exp."
        )
    scores = input if dtype is None else input.to(dtype)
    weights = _weights(call, points, scores.mT).mT.contiguous() if is_turned else _weights(call, points, scores)
    found = Attended(None, None)
    if points.block_kv is not None:
        # The scores are copied, so that later writes to them do not reach the tracked state.
        scores = scores.clone()
        found = Attended(scores, None, writes_to(scores), is_turned)
    known[weights] = found.of(weights)
    return weights


def dropout(call: ProductCall, input: Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
    """Apply dropout to an attention's weights. torch itself draws the factors, from the same random numbers."""
    known = call.scope.listeners.attended
    found = known.get(input)
    if found is None:
        return NotImplemented
    rest = {**dict(zip(("training", "inplace"), args)), **kwargs}
    is_on = rest.get("training", rest.get("train", True))
    if not is_on:
        return NotImplemented
    found = found if found.is_still(input) else Attended(None, None)
    # Dropout of ones returns the factors: each block multiplies its part of the weights by them.
    keep = F.dropout(torch.ones_like(input), p)
    out = input.mul_(keep) if rest.get("inplace", False) or call.operation == "dropout_" else input * keep
    both = keep if found.keep is None else found.keep * keep
    known[out] = (found if found.scores is None else found._replace(keep=both)).of(out)
    return out


def attended(call: ProductCall, scores: Tensor, hides_all: Tensor, dropout_p: float) -> tuple[Tensor, Attended | None]:
    """Return the weights of `scaled_dot_product_attention`, and their tracked state.

    scores: -inf for hidden keys, but not in rows where all keys are hidden.
    hides_all: the rows where all keys are hidden, whose weights are zeros.
    """
    points = _points(call)
    weights = _weights(call, points, scores).masked_fill(hides_all, 0.0)
    if points.block_kv is None:
        return F.dropout(weights, dropout_p) if dropout_p else weights, None
    keep = torch.ones_like(weights, requires_grad=False)
    keep = (F.dropout(keep, dropout_p) if dropout_p else keep).masked_fill(hides_all, 0.0)
    return weights * keep, Attended(scores, keep, writes_to(scores))


def _points(call: ProductCall) -> Attention:
    assert call.scope.products is not None
    points = call.scope.products.points
    assert points is not None
    return points


def _weights(call: ProductCall, points: Attention, scores: Tensor) -> Tensor:
    """Compute softmax over the last axis, with the rounding points `diff` and `exp`, for keys in one block."""
    if (points.diff is None and points.exp is None) or not scores.shape[-1]:
        return torch.softmax(scores, -1)
    specs = ProductSpecs((None, None), (None, None), (None, None), None, None, None)
    product = Product(Batched(scores, scores.mT), f"{call.site}.softmax", specs, call.scope.listeners, scores)
    weights: Tensor = _Softmax.apply(product, points, scores)
    return weights


def _exponentials(product: Product, points: Attention, scores: Tensor, largest: Tensor) -> Tensor:
    diff = product.at_point(scores - largest, points.point("diff"), "diff")
    return product.at_point(torch.exp(diff), points.point("exp"), "exp")


class _Softmax(PlainFunction):
    """softmax with its rounding points; its gradient is computed from the resulting weights."""

    @staticmethod
    def forward(ctx: Any, product: Product, points: Attention, scores: Tensor) -> Tensor:
        wide = scores.detach().to(product.working)
        with product.own_dtype():
            powers = _exponentials(product, points, wide, wide.amax(-1, keepdim=True))
            weights = powers / powers.sum(-1, keepdim=True)
        ctx.save_for_backward(weights)
        ctx.dtype = scores.dtype
        return weights.to(scores.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (weights,) = ctx.saved_tensors
        gradient = gradient.to(weights.dtype)
        inner = (weights * gradient).sum(-1, keepdim=True)
        return None, None, (weights * (gradient - inner)).to(ctx.dtype)


class _Times:
    """Form of a product whose x was multiplied by a number; the sums are divided by this number."""

    def __init__(self, form: Form, number: float) -> None:
        self._form, self._number = form, number
        self.fprop, self.dgrad, self.wgrad, self.groups = form.fprop, form.dgrad, form.wgrad, form.groups
        self.arrange, self.data_gradient, self.bias_gradient = form.arrange, form.data_gradient, form.bias_gradient

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return self._form.forward(x, w, bias) / self._number

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._form.weight_gradient(dy, x) / self._number


class _OfWeights(Product):
    """Product o = p v, in which p is rounded at a scale."""

    __slots__ = ("points",)

    def __init__(self, points: Attention, form: Form, *rest: Any) -> None:
        self.points = points
        super().__init__(form, *rest)

    def in_accumulators(self, form: Form) -> Form:
        form = super().in_accumulators(form)
        return form if self.points.p_scale == 1 else _Times(form, self.points.p_scale)

    def quantised(self, x: Tensor, operand: Operand | None, side: Side, role: str, *rest: Any, **named: Any) -> Tensor:
        if role in ("fprop.x", "wgrad.x") and self.points.p_scale != 1:
            x = x * self.points.p_scale
        return super().quantised(x, operand, side, role, *rest, **named)


class _InBlocks(_OfWeights):
    """Product o = softmax(s) v, computed over one block of keys after the other, in the order of flash-attention.

    The operand x is the scores s. `passing` holds the tensors for the backward pass: scores, values, o, the sums of
    exponentials, and the factors of dropout.
    """

    __slots__ = ("keep",)

    def __init__(self, points: Attention, keep: Tensor | None, *rest: Any) -> None:
        self.keep = keep
        super().__init__(points, *rest)

    def _blocks(self, keys: int) -> list[slice]:
        n = self.points.block_kv
        assert n is not None
        return [slice(start, min(start + n, keys)) for start in range(0, keys, n)]

    def forward_with(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with self.own_dtype():
            scores, value = x.detach().to(self.working), w.detach().to(self.working)
            keep = None if self.keep is None else self.keep.detach().to(self.working)
            largest = torch.full_like(scores[..., :1], -math.inf)
            total, out = torch.zeros_like(largest), torch.zeros_like(scores[..., :1] * value[..., :1, :])
            for part in self._blocks(scores.shape[-1]):
                one = scores[..., part]
                above = torch.maximum(largest, one.amax(-1, keepdim=True))
                shift = _finite(above)
                # This factor rescales earlier blocks to the new maximum, as in flash-attention. It is 0 at first.
                decay = torch.exp(largest - shift)
                powers = _exponentials(self, self.points, one, shift)
                weights = powers if keep is None else powers * keep[..., part]
                pq, vq = self.operands("fprop", weights, value[..., part, :])
                # All exponentials are summed, because dropout acts on the weights after they are normalised.
                total = total * decay + powers.sum(-1, keepdim=True)
                out = out * decay + self._form(pq, vq).forward(pq, vq, None)
                largest = above
            out = self.at_point(out / total, self.specs.result, "output")
            self.passing = [x, w, out, total, keep]
            return out.to(self.dtype, copy=True), x, w

    def _form(self, p: Tensor, v: Tensor) -> Form:
        return self.in_accumulators(Batched(p, v))

    def backward(
        self, dy: Tensor, x: Tensor | None, w: Tensor | None, needs_bias: bool, has_used: bool = False
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        saved: list[Any] = self.passing
        saved_scores, saved_value, out, total, keep = saved
        with torch.no_grad(), self.own_dtype():
            scores, value = saved_scores.detach().to(self.working), saved_value.detach().to(self.working)
            log2_scales = self.log2_scales(dy)
            dy = dy.detach().to(self.working)
            of_dgrad = self.quantised(dy, self.specs.dgrad[0], _ROWS, "dgrad.dy", log2_scales[0])
            # The row sum of dp * p is computed from dy and o, once for all blocks, as in flash-attention.
            inner = (of_dgrad * out).sum(-1, keepdim=True)
            shift = _finite(scores.amax(-1, keepdim=True))
            of_scores, of_value = [], []
            for part in self._blocks(scores.shape[-1]):
                v = value[..., part, :]
                # Weights are computed again, with the final maximum and sum, instead of being stored for all blocks.
                weights = _exponentials(self, self.points, scores[..., part], shift) / total
                kept = None if keep is None else keep[..., part]
                form = self._form(weights, v)
                # Autograd passes an operand if the other one needs a gradient: it passes w if the scores need one.
                if w is not None:
                    vq = self.quantised(v, self.specs.dgrad[1], form.dgrad[1], "dgrad.w")
                    dp = self.at_point(form.data_gradient(of_dgrad, vq), self.specs.error, "dgrad.dx")
                    of_scores.append(weights * ((dp if kept is None else dp * kept) - inner))
                if x is not None:
                    p = weights if kept is None else weights * kept
                    dyq, pq = self.operands("wgrad", dy, p, log2_scales[1])
                    of_value.append(form.weight_gradient(dyq, pq))
            data = torch.cat(of_scores, -1) if of_scores else None
            weight = torch.cat(of_value, -2) if of_value else None
            return data, weight, None


def _finite(largest: Tensor) -> Tensor:
    """Return the maximum to subtract: 0 where all keys so far are hidden, so that their exponentials become 0."""
    # -inf - (-inf) would be NaN.
    return largest.masked_fill(largest == -math.inf, 0.0)
