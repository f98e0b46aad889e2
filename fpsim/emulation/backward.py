"""The backward pass: rounds a gradient where it arrives, in place where nobody else holds it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fpsim.emulation.marks import is_rounded_at, mark_of, mark_rounded
from fpsim.emulation.scope import Observer, Scope
from fpsim.tensors.autograd import is_plain, round_differentiably
from fpsim.tensors.expressions import round_traced
from fpsim.tensors.launch import round_memory_, rounded, to_float64
from fpsim.tensors.spec import RoundingSpec, container_width
from fpsim.torch_internals import has_no_holes, is_held_by_autograd_alone, is_legacy_batched, is_traced

__all__ = ["BackwardRounding"]


class BackwardRounding:
    """A tensor hook: rounds the gradient of one tensor.

    scope: of the module in whose forward pass the tensor was made.
    site, role, spec: what is told to observers, and how the gradient is rounded.
    scale: gives the log2 of the scale at which it is rounded, see `Scaling`; None for a scale of 1.
    """

    __slots__ = ("role", "scale", "scope", "site", "spec")

    def __init__(
        self,
        scope: Scope,
        site: str,
        role: str,
        spec: RoundingSpec,
        scale: Callable[[Tensor, bool], Tensor | None] | None,
    ) -> None:
        self.scope, self.site, self.role, self.spec, self.scale = scope, site, role, spec, scale

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        """The rounded gradient, or None where it is rounded in place or needs no rounding."""
        if gradient is None:  # an output that nobody used, beside one that somebody did
            return None
        if gradient.is_sparse:
            return self._round_sparse(gradient)
        if is_legacy_batched(gradient):
            raise NotImplementedError(
                f"A batch of gradients came to {self.site}, of torch.autograd.grad(is_grads_batched=True) or "
                f"torch.autograd.functional.jacobian(vectorize=True), and cannot be rounded. Possible: one gradient "
                f"after the other, or torch.func.vmap over torch.func.vjp."
            )
        spec, listeners = self.spec, self.scope.listeners
        can_launch = not torch.is_grad_enabled() and is_plain(gradient)  # no double backward, no transform
        log2_scale, observer, before, may_round = None, None, None, False
        if self.scale is not None:
            may_round = (
                can_launch
                and mark_of(gradient) is None
                and has_no_holes(gradient)
                and is_held_by_autograd_alone(gradient)
            )
            if may_round:
                observer = listeners.watching(self.site, self.role)
                before = None if observer is None else gradient.detach().clone()  # the scaling may round it at once
            log2_scale = self.scale(gradient, may_round)
        if is_rounded_at(gradient, log2_scale, spec):
            if observer is not None and before is not None:
                self._show(observer, before, gradient, log2_scale)
            return None
        if is_traced(gradient) and not torch.is_grad_enabled():
            if container_width(spec, gradient.dtype) == 0:
                return None
            result = round_traced(gradient, spec)
            mark_rounded(result, None, spec)
            return result
        if not can_launch:
            return round_differentiably(gradient, spec, log2_scale)
        if not may_round:
            observer = listeners.watching(self.site, self.role)
        if container_width(spec, gradient.dtype) == 0:  # not rounded; a copy has no holes, and sums in another order
            if observer is not None:
                self._show(observer, gradient, gradient, log2_scale)
            return None
        # asked again: the scaling may have kept the gradient
        if observer is None and has_no_holes(gradient) and is_held_by_autograd_alone(gradient):
            round_memory_(gradient, spec, None, log2_scale)
            mark_rounded(gradient, log2_scale, spec)
            return None
        result = rounded(gradient, spec, None, log2_scale)
        mark_rounded(result, log2_scale, spec)
        if observer is not None:
            self._show(observer, gradient if before is None else before, result, log2_scale)
        return result

    def _round_sparse(self, gradient: Tensor) -> Tensor:
        """The gradient of an embedding: its rows are summed, then rounded."""
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
        result = self(values)
        values = values if result is None else result
        return torch.sparse_coo_tensor(indices, values, gradient.shape, is_coalesced=True, check_invariants=False)

    def _show(self, observer: Observer, before: Tensor, after: Tensor, log2_scale: Tensor | None) -> None:
        if log2_scale is not None:  # as the format sees it; exact, for float64 has exponents to spare
            before, after = to_float64(before, log2_scale), to_float64(after, log2_scale)
        observer(self.site, self.role, before, after, self.spec)
