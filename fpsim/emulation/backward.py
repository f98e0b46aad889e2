"""The backward pass: round a gradient where it arrives, in place if nothing else refers to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fpsim.emulation.marks import MARK, is_rounded_at, mark, mark_of
from fpsim.emulation.scope import Observer, Scope
from fpsim.tensors.autograd import round_differentiably
from fpsim.tensors.expressions import round_traced
from fpsim.tensors.launch import round_memory_, rounded, to_float64
from fpsim.tensors.spec import RoundingSpec, Spec, container_width
from fpsim.torch_internals import has_no_holes, is_held_by_autograd_alone, is_legacy_batched, is_traced
from fpsim.torch_modes import is_plain

__all__ = ["BackwardRounding", "ScaledBackwardRounding", "show_at_scale"]


class BackwardRounding:
    """Tensor hook that rounds the gradient of one tensor.

    scope: the scope of the module in whose forward pass the tensor was made.
    site, role: the names of the tensor and of its role, for observers.
    spec: the rounding of the gradient.
    """

    __slots__ = ("role", "scope", "site", "spec")

    def __init__(self, scope: Scope, site: str, role: str, spec: RoundingSpec) -> None:
        self.scope, self.site, self.role, self.spec = scope, site, role, spec

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        """Return the rounded gradient, or None where it is rounded in place or needs no rounding."""
        if gradient is None or gradient.is_sparse or is_legacy_batched(gradient) or not is_plain(gradient):
            return self._unusual(gradient)
        # With create_graph=True this gradient is differentiated again: its rounding needs a node of the graph.
        if torch.is_grad_enabled():
            return self._unusual(gradient)
        spec, listeners = self.spec, self.scope.listeners
        # `hasattr` first: most gradients carry no mark, and this hook runs for each tensor of a backward pass.
        if hasattr(gradient, MARK) and is_rounded_at(gradient, None, spec):
            return None
        observer = None if listeners.observer is None else listeners.watching(self.site, self.role)
        if spec.is_float32 and container_width(spec, gradient.dtype) == 0:
            # The gradient stays as it is, even with holes: a contiguous copy would be summed in another order later.
            self._show(observer, gradient, gradient, None)
            return None
        is_dense = gradient.is_contiguous() or has_no_holes(gradient)
        # Rounding in place saves an allocation. It is safe only if nobody else sees the memory: a saved tensor, another
        # branch or the user's own gradient would change too. With an observer, the unrounded tensor is needed as well.
        if observer is None and is_dense and is_held_by_autograd_alone(gradient, object()):
            round_memory_(gradient, spec)
            mark(gradient, spec.text)
            return None
        return self._apart(observer, gradient, gradient, None)

    def _scale_of(self, gradient: Tensor) -> Tensor | None:
        """Return log2 of the gradient's scale, without rounding the gradient in place; None for a scale of 1."""
        return None

    def _unusual(self, gradient: Tensor | None) -> Tensor | None:
        """Round a gradient that is None, sparse, traced, seen by a transform, or differentiated again."""
        # The gradient is None for an unused output of an operation whose other output was used.
        if gradient is None:
            return None
        if gradient.is_sparse:
            return self._sparse(gradient)
        if is_legacy_batched(gradient):
            raise NotImplementedError(
                f"A batch of gradients reached {self.site}, of torch.autograd.grad(is_grads_batched=True) or "
                f"torch.autograd.functional.jacobian(vectorize=True), and cannot be rounded. Expected: one gradient "
                f"after the other, or torch.func.vmap over torch.func.vjp."
            )
        spec, log2_scale = self.spec, self._scale_of(gradient)
        if is_rounded_at(gradient, log2_scale, spec):
            return None
        if not is_traced(gradient) or torch.is_grad_enabled():
            result = round_differentiably(gradient, spec, log2_scale)
            # The mark carries the scale: the model's own code that gets this gradient rounds at the same scale.
            if log2_scale is not None:
                mark(result, spec.text, log2_scale)
            return result
        if container_width(spec, gradient.dtype) == 0:
            return None
        result = round_traced(gradient, spec)
        mark(result, spec.text)
        return result

    def _sparse(self, gradient: Tensor) -> Tensor:
        """Return the rounded sparse gradient of an embedding; the entries of each row are summed first."""
        # Rows of a token that occurs twice are added up in float32, as in the dense gradient, then rounded once.
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
        result = self(values)
        values = values if result is None else result
        return torch.sparse_coo_tensor(indices, values, gradient.shape, is_coalesced=True, check_invariants=False)

    def _apart(self, observer: Observer | None, before: Tensor, gradient: Tensor, log2_scale: Tensor | None) -> Tensor:
        """Round a gradient out of place. before: the unrounded tensor, for the observer."""
        result = rounded(gradient, self.spec, None, log2_scale)
        mark(result, self.spec.text, log2_scale)
        self._show(observer, before, result, log2_scale)
        return result

    def _show(self, observer: Observer | None, before: Tensor, after: Tensor, log2_scale: Tensor | None) -> None:
        if observer is not None:
            show_at_scale(observer, self.site, self.role, before, after, self.spec, log2_scale)


class ScaledBackwardRounding(BackwardRounding):
    """Tensor hook that rounds the gradient at a scale, which is found when the gradient arrives.

    scale: function that returns log2 of the scale, see `Scaling`. If nobody else holds the gradient, the function may
        also round it in place.
    """

    __slots__ = ("scale",)

    def __init__(
        self, scope: Scope, site: str, role: str, spec: RoundingSpec, scale: Callable[[Tensor, bool], Tensor | None]
    ) -> None:
        super().__init__(scope, site, role, spec)
        self.scale = scale

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        """Round as `BackwardRounding` does, but at the scale."""
        if gradient is None or gradient.is_sparse or is_legacy_batched(gradient) or not is_plain(gradient):
            return self._unusual(gradient)
        if torch.is_grad_enabled():
            return self._unusual(gradient)
        spec, listeners = self.spec, self.scope.listeners
        # The scaling may round a gradient in place if nobody else holds it: an observer needs a copy from before.
        is_free = mark_of(gradient) is None and has_no_holes(gradient) and is_held_by_autograd_alone(gradient, object())
        observer = listeners.watching(self.site, self.role) if is_free else None
        before = gradient if observer is None else gradient.detach().clone()
        log2_scale = self.scale(gradient, is_free)
        if is_rounded_at(gradient, log2_scale, spec):
            self._show(observer, before, gradient, log2_scale)
            return None
        if not is_free:
            observer = listeners.watching(self.site, self.role)
        if container_width(spec, gradient.dtype) == 0:
            self._show(observer, gradient, gradient, log2_scale)
            return None
        # The holders are checked again, because the scaling may have stored the gradient.
        if observer is None and has_no_holes(gradient) and is_held_by_autograd_alone(gradient, object()):
            round_memory_(gradient, spec, None, log2_scale)
            mark(gradient, spec.text, log2_scale)
            return None
        return self._apart(observer, before, gradient, log2_scale)

    def _scale_of(self, gradient: Tensor) -> Tensor | None:
        return self.scale(gradient, False)


def show_at_scale(
    observer: Observer, site: str, role: str, before: Tensor, after: Tensor, spec: Spec, log2_scale: Tensor | None
) -> None:
    """Show an observer the numbers as the format stores them: multiplied by the scale."""
    # The multiplication is exact, because float64 has a wider range of exponents.
    if log2_scale is not None:
        before, after = to_float64(before, log2_scale), to_float64(after, log2_scale)
    observer(site, role, before, after, spec)
