"""One product under emulation: its operands are quantised, and so are those of the products that are its gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.backward import show_at_scale
from fpsim.emulation.forms import Form, Side, in_matrices, in_order
from fpsim.emulation.kept_weights import key_of_product
from fpsim.emulation.marks import is_roundable
from fpsim.emulation.scope import Attended, Listeners, Scope
from fpsim.formats.blocks import BlockFormat, Delayed
from fpsim.policies.operand import Operand, ProductSpecs
from fpsim.policies.products import PRODUCTS
from fpsim.tensors.accumulators import Accumulator
from fpsim.tensors.block_autograd import passes, round_blocks_traced
from fpsim.tensors.cuts import Cut
from fpsim.tensors.expressions import round_traced
from fpsim.tensors.gemm import accumulate, apply_accumulate_operator
from fpsim.tensors.hadamard import Hadamard, apply_hadamard_operator, padded_to_groups, require_groups, transformed
from fpsim.tensors.launch import rounded
from fpsim.tensors.noise import new_key_for, new_traceable_key
from fpsim.tensors.own import rounded_by_function
from fpsim.tensors.shared_scales import recorded_amax, rounded_blocks
from fpsim.tensors.spec import FLOATING, BlockSpec, OwnFormat, RoundingSpec
from fpsim.torch_internals import is_legacy_batched, is_traced, share_storage
from fpsim.torch_modes import PlainFunction, is_plain

__all__ = ["Product", "ProductCall"]

ScaleOf = Callable[[Tensor, bool], Tensor | None]


class ProductCall:
    """A call of a torch function that computes one or several products, and its site.

    scope: the scope of the running module, which has products.
    operation: the name of the torch function.
    operands: the function's arguments, in the order of torch's own parameters.
    weights: the operands that are parameters or views of parameters, by id.
    asks: whether a scaling was queried for the scale of the gradient that arrives at one of the products.
    output: how the result is rounded if no role rounds it; None if no operand was quantised.
    errors: the operands that depend on the incoming gradient, by id, if the call is in the backward pass of the
        model's own code; else None.
    attended: the states of the operands that come from q k^T of an attention with rounding points, by id.
    gives_scores: whether the call computes q k^T of such an attention.
    """

    __slots__ = (
        "asks", "attended", "errors", "gives_scores", "operands", "operation", "output", "scope", "site", "weights",
    )  # fmt: skip

    def __init__(self, scope: Scope, operation: str, operands: tuple[Any, ...], weights: dict[int, Tensor]) -> None:
        self.scope, self.operation, self.operands, self.weights = scope, operation, operands, weights
        self.site = scope.site(operation)
        self.asks = self.gives_scores = False
        self.attended: dict[int, Attended] = {}
        self.errors: dict[int, Tensor] | None = None if scope.errors is None else scope.errors.among(operands)
        self.output: RoundingSpec | None = None

    def is_weight(self, x: Tensor) -> bool:
        """True if this operand is a parameter or a view of one."""
        return id(x) in self.weights

    def takes(self, x: Tensor, w: Tensor, has_weight: bool = False) -> bool:
        """True if the product of `x` and `w` is quantised; torch's own function computes any other product.

        has_weight: whether the torch function implies that one of them is a weight.
        Raises NotImplementedError for tensors that are complex, or whose memory cannot be read here.
        """
        assert self.scope.products is not None
        is_wanted = has_weight or bool(self.scope.products.attention) or self.is_weight(x) or self.is_weight(w)
        # In code that has a weight among its arguments, the product of an error and a saved activation is a weight
        # gradient.
        if self.errors and self.scope.errors.has_weights:
            is_wanted = is_wanted or (id(x) in self.errors) != (id(w) in self.errors)
        is_usual = x.dtype is w.dtype and is_roundable(x) and is_roundable(w)
        if is_usual and is_plain(x) and is_plain(w):
            return is_wanted
        if is_wanted and (x.is_complex() or w.is_complex()):
            raise NotImplementedError(
                f"A product at {self.site} has complex operands to quantise, and no format here has complex numbers. "
                f"Expected: real products, of torch.view_as_real(x) or of x.real and x.imag; or leave these modules' "
                f"products as they are: Policy(overrides={{name: None}})."
            )
        if is_wanted and any(t.dtype in FLOATING and t.layout is not torch.strided for t in (x, w)):
            raise NotImplementedError(
                f"A product at {self.site} has operands to quantise that are sparse or nested, and they lie in no "
                f"blocks. Expected: dense tensors, x.to_dense() or nested.to_padded_tensor(0.0); or leave these "
                f"modules' products in float32: Policy(overrides={{name: None}})."
            )
        if not (is_wanted and is_roundable(x) and is_roundable(w)) or x.is_meta or w.is_meta:
            return False
        # torch raises its own error for two dtypes.
        if x.dtype is not w.dtype and not torch.is_autocast_enabled(x.device.type):
            return False
        if not all(is_plain(t) or is_traced(t) for t in (x, w)):
            raise NotImplementedError(
                f"A product at {self.site} has operands to quantise under torch.export, a transform of torch.func or "
                f"forward-mode differentiation, or as a subclass of Tensor. Expected: plain tensors and plain calls, "
                f"also under torch.compile; or leave these modules' products in float32: "
                f"Policy(overrides={{name: None}})."
            )
        return True

    def compute(
        self, form: Form, x: Tensor, w: Tensor, bias: Tensor | None = None, operands: tuple[Any, ...] | None = None,
        operation: str | None = None, part: str = "", specs: ProductSpecs | None = None,
        make: Callable[..., Product] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return y of one product.

        form: the form of the product.
        x, w, bias: the operands of the product, as the form takes them.
        operands, operation, part: the product's operands, operation and name, if the call has several products.
        specs, make: for a product of an attention, the specs of its operands, and the class that replaces `Product`.
        """
        scope = self.scope
        assert scope.products is not None
        if self.errors:
            return self._in_backward(form, x, w, bias, part)
        specs = scope.products.specs if specs is None else specs
        self.output = specs.output
        product = (make or Product)(form, f"{self.site}{part}", specs, scope.listeners, x)
        product.is_step = product.is_step or scope.is_in_step
        if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias))):
            return product.forward(x, w, bias)
        scaling = scope.listeners.scaling
        if scaling is None:
            return _Node.apply(product, x, w, bias)  # type: ignore[no-any-return]
        by_dgrad, by_wgrad = (
            needed and _plain_spec(pair[0])
            for needed, pair in ((x.requires_grad, specs.dgrad), (w.requires_grad, specs.wgrad))
        )
        if not (by_dgrad or by_wgrad):
            return _Node.apply(product, x, w, bias)  # type: ignore[no-any-return]
        is_apart = bool(by_dgrad and by_wgrad and by_dgrad != by_wgrad)
        # A view of w is a separate graph node behind y, at which the scaling finds the scale of a second copy of dy.
        alias = w.view_as(w) if is_apart else w
        out: Tensor = _Node.apply(product, x, alias, bias)
        operation, operands = operation or self.operation, self.operands if operands is None else operands
        scale = scaling(product.site, "error", by_dgrad or by_wgrad, operation, operands, out)  # type: ignore[arg-type]
        product.scales = {"dgrad": scale, "wgrad": scale}
        if is_apart:
            product.scales["wgrad"] = scaling(product.site, "wgrad.dy", by_wgrad, "wgrad", (w,), alias)  # type: ignore[arg-type]
        self.asks = True
        return out

    def _in_backward(self, form: Form, x: Tensor, w: Tensor, bias: Tensor | None, part: str) -> Tensor:
        """Return y of a product in the backward pass of the model's own code, if an operand depends on the gradient."""
        scope, is_error = self.scope, [_is_among(self.errors, t) for t in (x, w)]
        assert scope.products is not None
        if scope.products.points is not None and not any(_is_among(self.weights, t) for t in (x, w)):
            raise NotImplementedError(
                f"A product at {self.site}, in the backward pass of the model's own code, has no weight, and which of "
                f"an attention's six products it is, is not known. Expected: attention written with torch's products "
                f"and softmax; or Products(attention=True); or Policy(overrides={{name: None}}) for these modules."
            )
        kind = "fprop"
        if is_error[0] != is_error[1]:
            kind = "dgrad" if _is_among(self.weights, w if is_error[0] else x) else "wgrad"
        product = _InBackward(form, f"{self.site}{part}", scope.products.specs.unordered, scope.listeners, x)
        product.require_plain_gradients()
        product.kind, product.is_step, product.error_is_second = kind, True, is_error[1] and not is_error[0]
        product.log2_scale = scope.errors.scale_of_products()
        with torch.no_grad():
            y = product.forward(x, w, bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias)):
            y = _Once.apply(product.site, y, x, w, bias)
        assert self.errors is not None
        # An einsum computes several products, one after the other: y may be an operand of the next product.
        self.errors[id(y)] = y
        return y

    def gradients(
        self, form: Form, dy: Tensor, x: Tensor | None, w: Tensor | None, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of a product for the model's own code: of x if w is given, and of w if x is given."""
        scope = self.scope
        assert scope.products is not None
        product = Product(form, self.site, scope.products.specs, scope.listeners, dy)
        product.require_plain_gradients()
        product.is_step = scope.is_in_step
        if scope.errors is not None and (log2_scale := scope.errors.scale_of_products()) is not None:
            product.scales = dict.fromkeys(("dgrad", "wgrad"), lambda _dy, _may_round: log2_scale)
        return product.backward(dy, x, w, needs_bias)


def _is_among(tensors: dict[int, Tensor] | None, x: Tensor) -> bool:
    """True if `x` is one of these tensors, or a view of one."""
    return any(x is y or share_storage(x, y) for y in (tensors or {}).values())


def _is_of_fprop(operand: Operand | None) -> bool:
    """True if the backward pass uses an operand as the forward product quantised it."""
    return operand is not None and operand.source == "fprop"


def _plain_spec(operand: Operand | None) -> RoundingSpec | None:
    """Return the rounding of an operand whose format has no scales; None for any other operand."""
    spec = None if operand is None or operand.is_own else operand.spec()
    return spec if isinstance(spec, RoundingSpec) else None


class Product:
    """Computation of one product: forward, and backward with operands that are quantised again.

    scales: for each product, the function that returns the scale at which dy is rounded; empty for a scale of 1.
    is_step: whether gradients are recorded. If so, amaxes of operands are recorded too, for the scales of later steps.
    passing: for x and w, a mask of where the gradient passes; None if it passes everywhere.
    clips: whether `passing` is recorded.
    """

    __slots__ = (
        "clips", "device", "dtype", "form", "is_step", "listeners", "passing", "scales", "site", "specs", "working",
    )  # fmt: skip

    def __init__(self, form: Form, site: str, specs: ProductSpecs, listeners: Any, x: Tensor) -> None:
        self.site, self.specs, self.listeners = site, specs, listeners
        self.form = self.in_accumulators(form)
        self.device, self.is_step = x.device.type, torch.is_grad_enabled()
        # The dtype in which products are added up, or handed to the accumulator.
        self.working = torch.float64 if x.dtype is torch.float64 and specs.accumulators is None else torch.float32
        casts = self.working is torch.float32 and torch.is_autocast_enabled(self.device)
        self.dtype = torch.get_autocast_dtype(self.device) if casts else x.dtype  # of y
        self.scales: dict[str, ScaleOf] = {}
        self.passing: list[Tensor | None] = [None, None]
        self.clips = False

    def in_accumulators(self, form: Form) -> Form:
        """Return the form; if there are accumulators, its sums are computed in them."""
        specs, site, listeners = self.specs, self.site, self.listeners
        accumulators = specs.accumulators if listeners.scaling is None else specs.scaled
        if accumulators is None:
            return form
        each = in_order(form, accumulators)
        return in_matrices(form, [None if a.is_torch else partial(_multiply, site, listeners, a) for a in each])

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return self.forward_with(x, w, bias)[0]

    def forward_with(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and the quantised operands: x in the layout that `arrange` returns, and w in its own layout."""
        with self.own_dtype():
            kept = self._kept(w)
            x, w = x.detach(), w.detach()
            if x.dtype is not self.working or w.dtype is not self.working:
                x, w = x.to(self.working), w.to(self.working)
            x = self.form.arrange(x)
            self._require_whole_groups(x)
            xq, wq = self.operands("fprop", x, w, kept=kept)
            y = self.form.forward(xq, wq, None if bias is None else bias.to(self.working))
            return self.at_point(y, self.specs.result, "output").to(self.dtype), xq, wq

    def at_point(self, x: Tensor, point: Operand | None, role: str) -> Tensor:
        """Round `x` at a rounding point of an attention; return it unchanged if `point` is None."""
        return x if point is None else self.quantised(x, point, Side(-1, -2), role)

    def _kept(self, w: Tensor) -> Tensor | None:
        """Return the cached quantised w while the model is frozen; None if each call has to quantise w."""
        kept, operand, side = self.listeners.kept_weights, self.specs.fprop[1], self.form.fprop[1]
        if kept is None or self.listeners.observer is not None or not kept.is_kept(w):
            return None
        key = key_of_product(self.specs, side)

        def quantised(x: Tensor) -> Tensor:
            return self.quantised(x.detach().to(self.working), operand, side, "fprop.w")

        return kept.copy_of(w, (key, self.working), quantised) if key is not None and is_plain(w) else None

    @property
    def takes_used(self) -> tuple[bool, bool]:
        """Whether dw is computed from the forward product's quantised x, and whether dx is from its quantised w."""
        return _is_of_fprop(self.specs.wgrad[1]), _is_of_fprop(self.specs.dgrad[1])

    def backward(
        self, dy: Tensor, x: Tensor | None, w: Tensor | None, needs_bias: bool, has_used: bool = False
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx if w is given, dw if x is given, and the gradient of the bias if it is needed.

        has_used: whether x and w, where `takes_used` is True, are already the forward product's quantised operands;
            else they are quantised again.
        """
        form, data, weight = self.form, None, None
        with torch.no_grad(), self.own_dtype():
            log2_scales = self.log2_scales(dy)
            dy = dy.detach().to(self.working)
            arranged, shared = form.arrange(dy), None
            if w is not None:
                w = w.detach()
                wide = w.to(self.working)
                if self.takes_used[1] and not has_used:
                    wide = self._as_in_fprop(wide, 1, form.fprop[1])
                dyq, wq = self.operands("dgrad", arranged, wide, log2_scales[0])
                data = self.at_point(form.data_gradient(dyq, wq), self.specs.error, "dgrad.dx")
                data = self._of_original(data, 0).to(w.dtype)
                shared = dyq if self._share_dy() else None
            if x is not None:
                x = x.detach()
                if self.takes_used[0]:
                    other = x if has_used else self._as_in_fprop(form.arrange(x.to(self.working)), 0, form.fprop[0])
                else:
                    other = form.arrange(x.to(self.working))
                dyq, xq = self.operands("wgrad", arranged, other, log2_scales[1], shared)
                weight = self._of_original(form.weight_gradient(dyq, xq), 1).to(x.dtype)
            return data, weight, form.bias_gradient(dy) if needs_bias else None

    @property
    def changes_gradients(self) -> bool:
        """True if a gradient is clipped, or transformed back because its operand was transformed."""
        is_transformed = any(self.takes_used) and any(
            o is not None and o.hadamard is not None for o in self.specs.fprop
        )
        return is_transformed or any(o is not None and o.ste == "clip" for o in self.specs.fprop)

    def require_plain_gradients(self) -> None:
        """Raise NotImplementedError if clipping or a transform would change a gradient of the model's own code."""
        if self.changes_gradients:
            raise NotImplementedError(
                f"A product at {self.site}, in the backward pass of the model's own code, gives a gradient that "
                f"ste='clip' or a transform of fprop would change, and of which operand is not known there. Expected: "
                f"torch's own layers and products; or leave these modules out: Policy(overrides={{name: None}})."
            )

    def _require_whole_groups(self, x: Tensor) -> None:
        """Raise ValueError if gradients of transformed operands could not be transformed back."""
        operand = self.specs.fprop[0]
        if operand is None or operand.hadamard is None or not self.changes_gradients:
            return
        where = f"fprop of the product at {self.site}, whose gradients are transformed back"
        require_groups(operand.hadamard, x.shape[self.form.fprop[0].axis] // self.form.groups, where)

    def _of_original(self, gradient: Tensor, i: int) -> Tensor:
        """Return the gradient of the original x (i = 0) or w (i = 1), given the gradient of the quantised operand."""
        operand, passes = self.specs.fprop[i], self.passing[i]
        transform = None if operand is None else operand.hadamard
        is_transformed = transform is not None and self.takes_used[1 - i]
        if passes is None and not is_transformed:
            return gradient
        shape = gradient.shape
        arranged = self.form.arrange(gradient) if i == 0 else gradient
        # A gradient is clipped in the transformed basis, in which the operand saturated, and then transformed back.
        if passes is not None:
            if transform is not None and not is_transformed:
                arranged = self._turned(arranged, transform, i, False)
            arranged = torch.where(passes.view_as(arranged), arranged, 0.0)
        if transform is not None:
            arranged = self._turned(arranged, transform, i, True)
        return arranged.reshape(shape)

    def _turned(self, x: Tensor, transform: Hadamard, i: int, is_inverse: bool) -> Tensor:
        """Apply the transform of the forward product's i-th operand, or its inverse, without random signs."""
        axis = self.form.fprop[i].axis % x.dim()
        apply = apply_hadamard_operator if is_traced(x) else transformed
        return apply(x, transform, axis, None, is_inverse)

    def own_dtype(self) -> AbstractContextManager[Any]:
        """Return a context in which torch's autocast changes nothing."""
        if torch.is_autocast_enabled(self.device):
            return torch.autocast(self.device, enabled=False)
        return nullcontext()

    def log2_scales(self, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return log2 of dy's scales for dgrad and wgrad. A shared scale is computed once; else dgrad's comes first."""
        dgrad, wgrad = self.scales.get("dgrad"), self.scales.get("wgrad")
        if dgrad is None or wgrad is None:
            return None, None
        first = dgrad(dy, False)
        return first, first if wgrad is dgrad else wgrad(dy, False)

    def _share_dy(self) -> bool:
        """True if both gradients use one quantised copy of dy, because its rounding depends on no axis and no noise."""
        a, b = self.specs.dgrad[0], self.specs.wgrad[0]
        if a is None or a != b or a.rounding == "stochastic" or a.hadamard is not None or a.is_delayed or a.is_own:
            return False
        return not isinstance(a.fmt, BlockFormat) or a.fmt.block == "tensor"

    def operands(
        self, product: str, a: Tensor, b: Tensor, log2_scale: Tensor | None = None, shared: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Quantise the two operands of a product.

        log2_scale: log2 of the scale of the first operand, if this operand is dy.
        shared, kept: the first and the second operand, if they are quantised already.
        """
        pair: tuple[Operand | None, Operand | None] = getattr(self.specs, product)
        sides: tuple[Side, Side] = getattr(self.form, product)
        roles = [f"{product}.{name}" for name in PRODUCTS[product]]
        if pair[0] is not None and pair[0].hadamard is not None:
            a, b = self._transformed(product, a, b, pair[0].hadamard, sides)
        first = self.quantised(a, pair[0], sides[0], roles[0], log2_scale, shared)
        return first, self.quantised(b, pair[1], sides[1], roles[1], None, kept)

    def _transformed(
        self, product: str, a: Tensor, b: Tensor, transform: Hadamard, sides: tuple[Side, Side]
    ) -> tuple[Tensor, Tensor]:
        """Return both operands of a product after a Hadamard transform along the axis that it sums over."""
        groups = 1 if product == "wgrad" else self.form.groups
        length, other = a.shape[sides[0].axis] // groups, b.shape[sides[1].axis]
        # The groups of a convolution lie one behind the other along the axis: padding at its end would mix their sums.
        if groups > 1:
            require_groups(transform, length, f"{product} of the product at {self.site}, in {groups} groups")
        elif length != other:
            raise ValueError(
                f"A Hadamard transform reached {product} of the product at {self.site}, which sums over axes of length "
                f"{length} and {other}, one of them broadcast. Expected: axes of one length, or no transform here."
            )
        traced = is_traced(a)
        # Both operands use one key, because equal random signs cancel in the product.
        key = (new_traceable_key(a) if traced else new_key_for(a)) if transform.signs == "random" else None
        results = []
        for x, side in ((a, sides[0]), (b, sides[1])):
            padded = x if groups > 1 else padded_to_groups(x, transform, side.axis)
            axis = side.axis % x.dim()
            apply = apply_hadamard_operator if traced else transformed
            results.append(apply(padded, transform, axis, key))
        return results[0], results[1]

    def _as_in_fprop(self, x: Tensor, i: int, side: Side) -> Tensor:
        """Quantise x (i = 0) or w (i = 1) as in the forward product; record no amax, and call no observer."""
        operand = self.specs.fprop[i]
        if operand is not None and operand.hadamard is not None:
            x = self._turned(x, operand.hadamard, i, False)
        return self.quantised(x, operand, side, f"fprop.{PRODUCTS['fprop'][i]}", is_again=True)

    def quantised(
        self,
        x: Tensor,
        operand: Operand | None,
        side: Side,
        role: str,
        log2_scale: Tensor | None = None,
        known: Tensor | None = None,
        is_again: bool = False,
    ) -> Tensor:
        if operand is None or (spec := operand.spec()) is None:
            return x
        place = PRODUCTS["fprop"].index(role[-1]) if self.clips and operand.ste == "clip" and not is_again else None
        observer = None if is_again or is_traced(x) else self.listeners.watching(self.site, role)
        if isinstance(spec.fmt, OwnFormat):
            result, passing = rounded_by_function(x, spec.fmt, side.axis, self.site, operand.ste == "clip")
            if place is not None:
                self.passing[place] = passing
            if observer is not None:
                observer(self.site, role, x, result, spec)
            return result
        if place is not None:
            self.passing[place] = passes(x, spec, side.axis, side.across)
        if is_traced(x):
            if known is not None:
                return known
            if isinstance(spec, BlockSpec):
                return round_blocks_traced(x, spec, side.axis, side.across)
            return round_traced(x, spec)
        if isinstance(spec, BlockSpec):
            scale = self._scale_of_history(x, spec, role, is_again) if operand.is_delayed else None
            cut = Cut(side.axis, side.across, scale)
            result = rounded_blocks(x, spec, side.axis, side.across, scale=cut.scale) if known is None else known
            if observer is not None:
                observer(self.site, role, x, result, spec, cut)
            return result
        result = rounded(x, spec, None, log2_scale) if known is None else known
        if observer is not None:
            show_at_scale(observer, self.site, role, x, result, spec, log2_scale)
        return result

    def _scale_of_history(self, x: Tensor, spec: BlockSpec, role: str, is_again: bool) -> Tensor:
        """Return an operand's scale from earlier steps. Record its amax for later steps, unless it is recomputed."""
        assert isinstance(spec.fmt.scale_rule, Delayed)
        history = self.listeners.histories.of(self.site, role, spec.fmt.scale_rule, spec.fmt.largest, x.device)
        if self.is_step and not is_again:
            history.record(recorded_amax(x, spec))
        return history.scale()


class _InBackward(Product):
    """A product that the model's own code computes in the backward pass, quantised as one of the three products.

    kind: "fprop", "dgrad" or "wgrad".
    error_is_second: whether only the second operand depends on the gradient.
    log2_scale: log2 of the scale at which the operand that depends on the gradient is rounded, if it has no own scale.
    """

    __slots__ = ("error_is_second", "kind", "log2_scale")
    kind: str
    error_is_second: bool
    log2_scale: Tensor | None

    def _kept(self, w: Tensor) -> Tensor | None:
        return None

    def operands(
        self, product: str, a: Tensor, b: Tensor, log2_scale: Tensor | None = None, shared: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        pair: list[Operand | None] = [*getattr(self.specs, self.kind)]
        sides, scales = self.form.fprop, [self.log2_scale, None]
        roles = [f"{self.kind}.{name}" for name in PRODUCTS[self.kind]]
        if self.error_is_second:
            for each in (pair, scales, roles):
                each.reverse()
        both = [a, b]
        for i, operand in enumerate(pair):
            # The forward product summed along the other axis.
            if _is_of_fprop(operand):
                name = roles[i].partition(".")[2]
                turned = Side(sides[i].across, sides[i].axis)
                both[i] = self._as_in_fprop(both[i], PRODUCTS["fprop"].index(name), turned)
        if pair[0] is not None and pair[0].hadamard is not None:
            both = [*self._transformed(product, both[0], both[1], pair[0].hadamard, sides)]
        first = self.quantised(both[0], pair[0], sides[0], roles[0], scales[0])
        return first, self.quantised(both[1], pair[1], sides[1], roles[1], scales[1])


def _multiply(
    site: str, listeners: Listeners, accumulator: Accumulator, a: Tensor, b: Tensor, added: Tensor | None
) -> Tensor:
    if is_traced(a):
        return apply_accumulate_operator(a, b, added, accumulator)
    out = accumulate(a, b, accumulator, added)
    if (told := getattr(listeners.observer, "summed", None)) is not None:
        told(site, a, b, added, out, accumulator)
    return out


class _Node(PlainFunction):
    """A product in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, product: Product, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        _, needs_x, needs_w, _ = ctx.needs_input_grad
        ctx.product, ctx.bias_dtype = product, bias is not None and bias.dtype
        ctx.set_materialize_grads(False)
        product.clips = True
        y, *used = product.forward_with(x, w, bias)
        ctx.dtypes = x.dtype, w.dtype
        # Operands are saved as they were before quantisation: the backward products quantise them along other axes.
        x, w = (b if takes else a for a, b, takes in zip((x, w), used, product.takes_used, strict=True))
        # `passing` is saved through autograd, and not on the product, so that a checkpoint drops and recomputes it.
        passing, product.passing = product.passing, [None, None]
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None, *passing)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if dy is None:
            return None, None, None, None
        product, (x, w, *passing) = ctx.product, ctx.saved_tensors
        product.passing = passing
        if is_legacy_batched(dy) or not (is_plain(dy) or is_traced(dy)):
            raise NotImplementedError(
                f"The gradient that reached the product at {product.site} is a batch of gradients, of "
                f"is_grads_batched=True or torch.func.vmap, and cannot be quantised. Expected: one "
                f"gradient after the other."
            )
        data, weight, bias = product.backward(dy, x, w, ctx.needs_input_grad[3], has_used=True)
        dtypes = *ctx.dtypes, ctx.bias_dtype
        gradients = tuple(g if g is None else g.to(d) for g, d in zip((data, weight, bias), dtypes, strict=True))
        # With create_graph=True, a second derivative raises an error instead of silently being computed in float32.
        if torch.is_grad_enabled():
            gradients = tuple(g if g is None else _Once.apply(product.site, g, dy, x, w) for g in gradients)  # type: ignore[assignment]
        return None, *gradients


class _Once(PlainFunction):
    """Node that copies a gradient of a product, and raises NotImplementedError if the copy is differentiated."""

    @staticmethod
    def forward(ctx: Any, site: str, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        ctx.site, ctx.of = site, 2 + len(sources)
        ctx.set_materialize_grads(False)
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # type: ignore[override]
        if gradient is None:
            return (None,) * ctx.of
        raise NotImplementedError(
            f"A gradient of the product at {ctx.site} was differentiated again. The operands of a product are "
            f"quantised for its first derivatives alone. Expected: double backward without products, or with these "
            f"modules' products in float32: Policy(overrides={{name: None}})."
        )
