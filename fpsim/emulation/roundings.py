"""Round the operands and results of a call, and hook their gradients to be rounded where they arrive."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.aliases import Aliases, round_behind
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.backward import BackwardRounding, ScaledBackwardRounding
from fpsim.emulation.calls import WRITTEN_TO, Call
from fpsim.emulation.marks import (
    OF_A_WEIGHT,
    WIDE,
    ByIdentity,
    format_of,
    is_leaf,
    is_view_of_weight,
    is_weight,
    is_wide_tensor,
    mark,
    mark_as_view_of_weight,
    mark_wide,
    unmark,
    was_any_made_wide,
    writes_behind,
)
from fpsim.emulation.operands import Rounds
from fpsim.emulation.products import ProductCall
from fpsim.emulation.scope import Scope
from fpsim.tensors.autograd import straight_through, with_values
from fpsim.tensors.expressions import round_here_
from fpsim.tensors.launch import round_memory_, rounded
from fpsim.tensors.spec import FLOATING, RoundingSpec, rounding_spec
from fpsim.torch_internals import base_of, calibrate_holders, has_history, is_traced, share_storage, version_of
from fpsim.torch_modes import (
    after_transforms,
    has_transform,
    hook_gradient,
    is_plain,
    layers_behind,
    without_torch_function,
)

__all__ = ["Copy", "Roundings", "values_of"]

INFERENCE = "inference"  # of a copy made in inference mode, which autograd cannot save
Copy = tuple[Any, Tensor, bool | str | None]  # None: only the copy's values belong to the original, not its graph


class Roundings:
    """Roundings of one forward pass, with the copies of tensors that were rounded already.

    scope: the current position of the pass.
    aliases: the aliases of parameters and buffers.
    has_names: whether torch's dtype of the format's name stands for the format.
    has_wide: whether any tensor may be float32 on purpose; until then the search for them is skipped.
    """

    has_names: bool = True

    def __init__(self, scope: Scope, aliases: Aliases | None = None) -> None:
        super().__init__()
        self.scope = scope
        self.aliases = Aliases() if aliases is None else aliases
        self.has_wide = was_any_made_wide()
        self._is_calibrated = False  # whether this pass has measured how many references autograd holds to a gradient
        # {original: {(its format, its gradient's): (its state, copy, whether the copy has a gradient or INFERENCE)}}
        self._operands: ByIdentity[dict[Any, Copy]] = ByIdentity()

    def rounded_operands(self) -> list[tuple[Tensor, dict[Any, Copy]]]:
        """Return the tensors from outside that were rounded, with their copies."""
        return self._operands.items()

    def take_over(self, operands: dict[Any, dict[Any, Copy]]) -> None:
        """Use the copies that another pass has made."""
        # A tensor that comes in may be float32 on purpose: from here on such tensors are searched for.
        self.has_wide = True
        for reference, copies in operands.items():
            if (x := reference()) is not None:
                self._operands[x] = dict(copies)

    def know_values(self, x: Tensor, copies: dict[Any, Copy]) -> None:
        """Use for `x` the rounded values in `copies`, which belong to another tensor with the same numbers."""
        if self._operands.get(x) is None:
            self._operands[x] = {key: (writes_behind(x), *copy[1:]) for key, copy in values_of(copies).items()}

    def forget_operands(self) -> None:
        """Drop the rounded copies of tensors from outside, which may have been written to."""
        self._operands = ByIdentity()

    def mark_wide(self, *tensors: Tensor) -> None:
        """Mark tensors as float32 on purpose."""
        self.has_wide = True
        for x in tensors:
            if x.is_floating_point() or x.is_complex():
                mark_wide(x)

    def prepared(self, x: Any, rounds: Rounds, floats: list[Tensor]) -> Any:
        """Return an argument with each tensor in its format, and append these tensors to `floats`."""
        # This is a method, because a closure that calls itself is a cycle, which kept tensors alive until a collection.
        if isinstance(x, Tensor):
            if x.dtype not in FLOATING or x.layout is not torch.strided:  # `is_roundable`, without the call
                return x
            x = self.operand(x, rounds)
            floats.append(x)
        elif type(x) in (list, tuple) and any(isinstance(item, Tensor) for item in x):
            return type(x)([self.prepared(item, rounds, floats) for item in x])
        return x

    def prepare_target(self, x: Tensor) -> None:
        """Round the target of an in-place call, in its own memory, because the target is an operand too."""
        # A leaf that requires a gradient is left as it is: torch refuses the call.
        if not self._is_in_format(format_of(x), self.scope.specs.activation) and not (x.requires_grad and is_leaf(x)):
            self.round_result(x, WRITTEN_TO, (x,), [], x)

    def _is_in_format(self, known: str | None, spec: RoundingSpec | None) -> bool:
        weight = self.scope.specs.weight
        if known is None or spec is None or known == spec.text:
            return known is not None
        return weight is not None and known == weight.text + OF_A_WEIGHT

    def operand(self, x: Tensor, rounds: Rounds) -> Tensor:
        """Return `x` in its format: a parameter in the weights' format, any other tensor in the activations' format."""
        return self.brought(x, format_of(x), rounds)

    def brought(self, x: Tensor, known: str | None, rounds: Rounds) -> Tensor:
        """Return what `operand` returns, for callers that know the format of `x`."""
        scope = self.scope
        # Cheap checks come first: most operands are activations in their format, and are returned here.
        has_weights_role = type(x) is nn.Parameter or is_weight(x) or (id(x) in scope.weights and scope.stands_in(x))
        if not has_weights_role and known is not None and known == scope.activation and x.dtype is torch.float32:
            return x
        specs = scope.specs
        # Here `x` really has the format's dtype, from autocast or as a parameter. It becomes a float32 container, so
        # that all operands have one dtype.
        if x.dtype is scope.dtype and self.has_names and rounds is Rounds.ALL:
            x, known = x.float(), None
        spec, backward = (specs.weight, specs.weight_grad) if has_weights_role else (specs.activation, specs.error)
        if (spec is None and backward is None) or rounds is Rounds.NOTHING:
            return x
        if not has_weights_role and (known is not None or rounds is Rounds.VIEWED) and rounds.leaves(x, known):
            return x
        if known is not None and self._is_in_format(known, spec):
            return x
        if (spec is None or spec.is_float32) and self._rounds_no(x, backward):
            return x
        aliases = self.aliases
        # Under a transform `x.requires_grad` says nothing: a sample of a batch is shown without its gradient.
        is_shown = has_transform()
        needs_grad: bool | str = torch.is_grad_enabled() and (is_shown or x.requires_grad)
        if not needs_grad and torch.is_inference_mode_enabled():
            needs_grad = INFERENCE
        # This is `writes_behind(x)` in fewer calls.
        state = writes_behind(x) if is_shown or x.is_inference() else version_of(x)
        values: Tensor | None = None
        if not aliases.is_blank:
            alias, state = aliases.of(x), aliases.state_of(x)
            if alias is not None and alias.rounded is not None and alias.state == state:
                if needs_grad is not True and (needs_grad is INFERENCE or not alias.rounded.is_inference()):
                    return alias.rounded
                # A Function or a reentrant checkpoint has given the view a gradient since: the values are still valid.
                values = alias.rounded
        kept = scope.listeners.kept_weights
        if kept is not None and type(x) is nn.Parameter and spec is not None and self._may_keep(x, spec):
            return kept.copy_of(x, scope.weight, partial(_rounded_weight, spec, scope.weight), True)
        copies = self._operands.setdefault(x, {})
        key = spec and spec.text, backward and backward.text
        state_then, rounded, had_grad = copies.get(key, (None, x, False))
        # A copy without a graph node cannot be used in a call with a gradient. Its values can: a tensor that is used
        # twice is rounded to the same numbers, also stochastically.
        if state_then != state or had_grad is not needs_grad:
            role = "weight" if has_weights_role else "activation"
            values = rounded if state_then == state else values
            copies[key] = state, rounded, _ = state, self._rounded_operand(x, spec, backward, role, values), needs_grad
        return rounded

    def new_operand(self, x: Tensor) -> Tensor:
        """Return a new tensor: `x`, which is float32 on purpose, in the activations' format. No other call gets it."""
        # If torch has a dtype for the format, code masks with the extremes of that dtype: float32's extremes are then
        # ordinary numbers.
        specs, is_named = self.scope.specs, self.has_names and self.scope.dtype is not None
        if specs.activation is None and specs.error is None:
            return x
        return self._rounded_operand(x, specs.activation, specs.error, "activation", keep_masks=not is_named)

    def integer_operand(self, x: Tensor) -> Tensor:
        """Return integers in the activations' format."""
        spec = self.scope.specs.activation
        assert spec is not None
        # Integers are rounded to nearest if activations are rounded stochastically: like a Python number, an integer is
        # a constant of the program.
        is_drawn = spec.rounding == "stochastic"
        used = rounding_spec(spec.fmt, overflow=spec.overflow) if is_drawn else spec
        made = self._rounded_operand(x.to(torch.float32), used, None, "activation", keep_masks=False)
        if is_drawn and format_of(made) == used.text:
            mark(made, spec.text)
        return made

    def cast_to_format(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a write to a tensor in the format; cast to it what is float32 on purpose."""
        return tuple([self.new_operand(x) if is_wide_tensor(x) else x for x in args])

    def _rounds_no(self, x: Tensor, backward: RoundingSpec | None) -> bool:
        """True if the gradient of `x` stays float32, unobserved: a copy of `x` would change the order of the sums."""
        listeners = self.scope.listeners
        is_seen = listeners.observer is not None or listeners.scaling is not None
        return (backward is None or backward.is_float32) and not is_seen and x.dtype is torch.float32

    def _rounded_operand(
        self,
        x: Tensor,
        spec: RoundingSpec | None,
        backward: RoundingSpec | None,
        role: str,
        values: Tensor | None = None,
        keep_masks: bool = True,
    ) -> Tensor:
        """Round an operand. values: an earlier rounding of `x`; a stochastic one is used again, without new noise."""
        site, keep_masks = self.scope.site(role), keep_masks and role == "activation"
        is_now, is_drawn = is_plain(x), spec is not None and spec.rounding == "stochastic"
        if not (is_now or is_traced(x)):
            if values is not None and is_drawn:
                copy = with_values(x, values, backward, spec)
            else:
                copy = self._straight_through(x, spec, backward, keep_masks=keep_masks)
            # Views of the copy inherit this mark: they are not activations.
            if role == "weight" and spec is not None:
                mark(copy, self.scope.weight)
            return copy
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        # If the copy needs no graph node, a single pass over the memory copies and rounds.
        if is_now and spec is not None and not has_gradient and not is_drawn:
            copy = rounded(x, spec, keep_masks=keep_masks)
        else:
            copy = x.clone()
            if values is not None and is_drawn:
                with torch.no_grad():
                    copy.data.copy_(values)
            elif spec is not None:
                (round_memory_ if is_now else round_here_)(copy, spec, keep_masks=keep_masks)
        listeners = self.scope.listeners
        if listeners.scaling is not None and (role == "weight" or is_view_of_weight(x)):
            mark_as_view_of_weight(copy)
        if spec is not None:
            mark(copy, spec.text if role == "activation" else self.scope.weight)
            observer = None if listeners.observer is None else listeners.watching(site, role)
            if observer is not None:
                observer(site, role, x.detach(), copy.detach(), spec)
        if backward is not None and copy.requires_grad:
            gradient_role = "weight_grad" if role == "weight" else "error"
            self._register(copy, site, gradient_role, backward, role, (x,))
        return copy

    def _may_keep(self, x: Tensor, spec: RoundingSpec) -> bool:
        """True if a frozen weight's cached rounded copy may be used, because a new copy would be the same."""
        has_gradient, is_seen = x.requires_grad and torch.is_grad_enabled(), self.scope.listeners.observer is not None
        return not (has_gradient or is_seen or spec.rounding == "stochastic") and is_plain(x)

    def carry_marks(self, out: Any, floats: list[Tensor], first: Any, first_mark: str | None) -> None:
        """Mark the results of a call that moved numbers like its operands, if all operands are in one format."""
        # An empty tensor is in every format: transformers concatenates keys with an empty cache.
        marks = {known for x in floats if (known := format_of(x)) is not None or x.numel()}
        if isinstance(first, Tensor):
            marks.add(first_mark)
        if WIDE in marks:  # by type promotion
            self.mark_wide(*tensors_in(out))
        elif len(marks) == 1 and (only := marks.pop()) is not None:
            for x in tensors_in(out):
                if x.is_floating_point():
                    mark(x, only)

    def _straight_through(
        self,
        x: Tensor,
        spec: RoundingSpec | None,
        backward: RoundingSpec | None,
        keep_masks: bool = True,
        keep_infinity: bool = True,
        of_tangent: RoundingSpec | None = None,
    ) -> Tensor:
        """Round under a transform or a tracer. of_tangent: the rounding of tangents if `x` is rounded already."""
        if _is_sharded(x):
            raise NotImplementedError(
                f"A DTensor reached {self.scope.name or 'the top level'}, as tensor parallelism makes them. Expected: "
                f"plain tensors, as DistributedDataParallel and fully_shard pass them to a forward. Omit "
                f"parallelize_module, or leave these modules in float32: Policy(overrides={{name: None}})."
            )
        if self.scope.listeners.scaling is not None and backward is not None:
            raise NotImplementedError(
                f"A gradient at {self.scope.name or 'the top level'} is to be rounded at its own scale, under "
                f"torch.compile or a transform of torch.func. Expected: loss.backward() and torch.autograd.grad. "
                f"Detach the scaling first, or omit the transform."
            )
        rounded = straight_through(x, spec, backward, of_tangent if spec is None else spec)
        if spec is None or not keep_masks:
            return rounded
        # Masks are kept, as by `launch.masks_of`: a saturating format would turn a mask into a number.
        is_mask = x.abs() == torch.finfo(x.dtype).max
        return torch.where(is_mask | (x == -torch.inf) if keep_infinity and spec.saturates else is_mask, x, rounded)

    def round_results(
        self,
        out: Any,
        call: Call,
        operands: tuple[Any, ...],
        floats: list[Tensor],
        target: Any,
        product: ProductCall | None = None,
    ) -> Any:
        """Return `out` with its tensors rounded.

        target: the tensor that the call writes to, if any.
        product: the call, if it may have products to quantise.
        """
        if isinstance(out, Tensor):
            return self.round_result(out, call, operands, floats, target, product)
        if isinstance(out, tuple | list):
            results = [
                self.round_result(x, call, operands, floats, target) if isinstance(x, Tensor) else x for x in out
            ]
            if all(a is b for a, b in zip(out, results, strict=True)):
                return out
            return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)
        return out

    def round_result(
        self,
        out: Tensor,
        call: Call,
        operands: tuple[Any, ...],
        floats: list[Tensor],
        target: Any,
        product: ProductCall | None = None,
        is_now: bool = False,
    ) -> Tensor:
        """Round a result. is_now: True if the caller knows that `out` is plain; False if this has to be checked."""
        specs = self.scope.specs
        if out.dtype not in FLOATING or out.layout is not torch.strided:  # `is_roundable`, without the call
            self._require_no_numbers(out, call)
            return out
        is_now = is_now or is_plain(out)
        plain = is_now or is_traced(out)
        is_target = target is not None and (out is target or any(out is x for x in tensors_in(target)))
        if not is_target:
            # A result in an operand's memory was moved, not computed: dropout in evaluation returns its input, and
            # einsum may return a view.
            is_same = share_storage if plain else operator.is_
            for x in floats:
                if is_same(out, x):
                    self.carry_marks(out, floats, None, None)
                    return out
        if call.chooses_inside and not is_target:
            out = out.clone()
        listeners = self.scope.listeners
        site = self.scope.site(call.name) if product is None else product.site
        spec, error, role, operation = specs.activation, specs.error, "activation", call.name
        if spec is None and product is not None and (spec := product.output) is not None:
            role = "output"
        keep_infinity = not call.has_pole or (call.is_quotient and not isinstance(operands[1], Tensor))
        if not plain:
            of_tangent = spec
            if has_transform() and (spec is None or round_behind(out, spec, keep_infinity)):
                spec = None
                # A target's gradient is rounded where the target is used: another write would add a node to the graph.
                if is_target:
                    return out
            rounded = self._straight_through(out, spec, error, keep_infinity=keep_infinity, of_tangent=of_tangent)
            if is_target:
                return out.copy_(rounded)
            # These tensors and those behind them are results of an emulated call: their views are not from outside.
            for x in (rounded, *layers_behind(rounded)) if has_transform() else ():
                unmark(x)
            return rounded
        if product is not None and product.asks and error is not None and out.requires_grad:
            # The gradient is rounded here, and again as a product's operand: it needs two graph nodes and two sites.
            out, operands, site, operation = out.view_as(out), (out,), f"{site}.output", "output"
        if spec is not None:
            observer = None if listeners.observer is None else listeners.watching(site, role)
            before = None if observer is None else out.detach().clone()
            # Rounded below autograd: the operation's saved tensors hold the rounded value, as on hardware.
            (round_memory_ if is_now else round_here_)(out, spec, keep_masks=True, keep_infinity=keep_infinity)
            if observer is not None and before is not None:
                observer(site, role, before, out.detach(), spec)
            mark(out, spec.text)
        # The result stays unrounded. Its gradient is rounded here, and not again where the result is used.
        elif error is not None:
            mark(out, "float32")
        if self.scope.made is not None:
            self.scope.made[out] = operation, operands
        if error is not None and out.requires_grad and (not is_target or torch.is_grad_enabled()):
            if base_of(out) is None or has_history(out):  # as hook
                self._register(out, site, "error", error, operation, operands)
        return out

    def _require_no_numbers(self, out: Tensor, call: Call) -> None:
        """Raise NotImplementedError for a result in a layout whose numbers would stay unrounded."""
        kind, spec = _NESTED if out.is_nested else _MKLDNN if out.is_mkldnn else None, self.scope.specs.activation
        if kind is not None and out.is_floating_point() and spec is not None and not spec.is_float32:
            raise NotImplementedError(
                f"Got a {kind[0]} from {call.name} at {self.scope.name or 'the top level'}, and its numbers cannot be "
                f"rounded. Use {kind[1]}, or leave these modules in float32: Policy(overrides={{name: None}})."
            )

    def hook(self, out: Tensor, site: str, operation: str, operands: tuple[Any, ...]) -> None:
        """Register a hook that rounds the gradient of a result where the gradient arrives."""
        error = self.scope.specs.error
        if error is not None and (base_of(out) is None or has_history(out)):
            self._register(out, site, "error", error, operation, operands)

    def returned(self, out: Tensor) -> Tensor:
        """Return an output of the model that was moved last; its gradient is rounded where it arrives."""
        # The gradient is rounded before its numbers are summed. Inside of the model, a moved tensor's reader does this.
        error = self.scope.specs.error
        if error is None:
            return out
        # The tensors of a transform carry no marks.
        if has_transform():
            return out if is_wide_tensor(out) else self._straight_through(out, None, error)
        if format_of(out) == self.scope.activation:
            self._register(out, self.scope.site("returned"), "error", error, "returned", (out,))
        return out

    def _register(
        self, out: Tensor, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...]
    ) -> None:
        scaling, traced = self.scope.listeners.scaling, type(out) is not Tensor and is_traced(out)
        if not (self._is_calibrated or traced or has_transform()):
            # Calibrate now: calibration is a small backward pass, which works in no other backward pass or transform.
            calibrate_holders(object())
            self._is_calibrated = True
        if scaling is None:
            hook = BackwardRounding(self.scope, site, role, spec)
        else:
            hook = ScaledBackwardRounding(
                self.scope, site, role, spec, scaling(site, role, spec, operation, operands, out)
            )
        if traced:
            out.register_hook(hook)
        else:
            hook_gradient(out, hook)


_NESTED, _MKLDNN = ("nested tensor", "x.to_padded_tensor(0.0)"), ("tensor in mkldnn's layout", "x.to_dense()")


def values_of(copies: dict[Any, Copy]) -> dict[Any, Copy]:
    """Return the rounded copies of a tensor, detached from their graph and from transforms that have ended."""
    # The copies are in the format: a mode would check each of them again.
    with without_torch_function():
        known = ((key, state, after_transforms(rounded)) for key, (state, rounded, _) in copies.items())
        return {key: (state, rounded.detach(), None) for key, state, rounded in known if rounded is not None}


def _rounded_weight(spec: RoundingSpec, text: str, x: Tensor) -> Tensor:
    """Return a rounded copy of a weight, without a gradient."""
    copy = rounded(x, spec)
    mark(copy, text)
    return copy


def _is_sharded(x: Tensor) -> bool:
    """True if `x` is a DTensor."""
    # The class is recognised by name, because importing it takes a second.
    return type(x) is not Tensor and any(c.__name__ == "DTensor" for c in type(x).__mro__)
