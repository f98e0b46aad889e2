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

INFERENCE = "inference"  # such a copy can be saved for no backward pass
Copy = tuple[Any, Tensor, bool | str | None]  # None: its values alone are those of the original


class Roundings:
    """The tensors of one forward pass: those that were rounded already, and how others are.

    scope: where the pass is.
    aliases: of parameters and buffers.
    has_names: whether torch's name of the format stands for it.
    has_wide: whether any tensor may be float32 on purpose; until then nothing is looked for.
    """

    has_names: bool = True

    def __init__(self, scope: Scope, aliases: Aliases | None = None) -> None:
        super().__init__()
        self.scope = scope
        self.aliases = Aliases() if aliases is None else aliases
        self.has_wide = was_any_made_wide()
        self._is_calibrated = False  # whether it was asked in this pass who else may hold a gradient
        # of an original: {(its format, its gradient's): (its state, copy, whether that has a gradient or INFERENCE)}
        self._operands: ByIdentity[dict[Any, Copy]] = ByIdentity()

    def rounded_operands(self) -> list[tuple[Tensor, dict[Any, Copy]]]:
        """The tensors from outside that were rounded, with their copies."""
        return self._operands.items()

    def take_over(self, operands: dict[Any, dict[Any, Copy]]) -> None:
        """Know these copies, which another pass has made."""
        self.has_wide = True  # what comes in may be
        for reference, copies in operands.items():
            if (x := reference()) is not None:
                self._operands[x] = dict(copies)

    def know_values(self, x: Tensor, copies: dict[Any, Copy]) -> None:
        """Note how the numbers of `x` were rounded in another tensor, which had these copies."""
        if self._operands.get(x) is None:
            self._operands[x] = {key: (writes_behind(x), *copy[1:]) for key, copy in values_of(copies).items()}

    def forget_operands(self) -> None:
        """Drop the rounded copies of tensors from outside, which may have been written to."""
        self._operands = ByIdentity()

    def mark_wide(self, *tensors: Tensor) -> None:
        """Note that these are float32 on purpose."""
        self.has_wide = True
        for x in tensors:
            if x.is_floating_point() or x.is_complex():
                mark_wide(x)

    def prepared(self, x: Any, rounds: Rounds, floats: list[Tensor]) -> Any:
        """An argument with its tensors in their formats, which are appended to `floats`."""
        # a method, not a closure: one that calls itself is a cycle, and kept every tensor until a collection
        if isinstance(x, Tensor):
            if x.dtype not in FLOATING or x.layout is not torch.strided:  # as is_roundable
                return x
            x = self.operand(x, rounds)
            floats.append(x)
        elif type(x) in (list, tuple) and any(isinstance(item, Tensor) for item in x):
            return type(x)([self.prepared(item, rounds, floats) for item in x])
        return x

    def prepare_target(self, x: Tensor) -> None:
        """The target of a call in place is an operand too, and is rounded in its own memory."""
        if not self._is_in_format(format_of(x), self.scope.specs.activation) and not (x.requires_grad and is_leaf(x)):
            self.round_result(x, WRITTEN_TO, (x,), [], x)

    def _is_in_format(self, known: str | None, spec: RoundingSpec | None) -> bool:
        weight = self.scope.specs.weight
        if known is None or spec is None or known == spec.text:
            return known is not None
        return weight is not None and known == weight.text + OF_A_WEIGHT

    def operand(self, x: Tensor, rounds: Rounds) -> Tensor:
        """`x` in its format: a parameter in the weights', anything else in the activations'."""
        return self.brought(x, format_of(x), rounds)

    def brought(self, x: Tensor, known: str | None, rounds: Rounds) -> Tensor:
        """`operand` for callers that know the format of `x`."""
        scope = self.scope
        has_weights_role = type(x) is nn.Parameter or is_weight(x) or (id(x) in scope.weights and scope.stands_in(x))
        if not has_weights_role and known is not None and known == scope.activation and x.dtype is torch.float32:
            return x
        specs = scope.specs
        if x.dtype is scope.dtype and self.has_names and rounds is Rounds.ALL:
            x, known = x.float(), None  # of autocast, or a parameter: beside the container it would be another dtype
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
        # asked of the mode, not of the copy: a transform shows no sample of a batch with its gradient
        is_shown = has_transform()
        needs_grad: bool | str = torch.is_grad_enabled() and (is_shown or x.requires_grad)
        if not needs_grad and torch.is_inference_mode_enabled():
            needs_grad = INFERENCE
        # what writes_to gives, in fewer calls
        state = writes_behind(x) if is_shown or x.is_inference() else version_of(x)
        values: Tensor | None = None
        if not aliases.is_blank:
            alias, state = aliases.of(x), aliases.state_of(x)
            if alias is not None and alias.rounded is not None and alias.state == state:
                if needs_grad is not True and (needs_grad is INFERENCE or not alias.rounded.is_inference()):
                    return alias.rounded
                values = alias.rounded  # a Function or a reentrant checkpoint gave the view a gradient since
        kept = scope.listeners.kept_weights
        if kept is not None and type(x) is nn.Parameter and spec is not None and self._may_keep(x, spec):
            return kept.copy_of(x, scope.weight, partial(_rounded_weight, spec, scope.weight), True)
        copies = self._operands.setdefault(x, {})
        key = spec and spec.text, backward and backward.text
        state_then, rounded, had_grad = copies.get(key, (None, x, False))
        if state_then != state or had_grad is not needs_grad:
            role = "weight" if has_weights_role else "activation"
            values = rounded if state_then == state else values
            copies[key] = state, rounded, _ = state, self._rounded_operand(x, spec, backward, role, values), needs_grad
        return rounded

    def new_operand(self, x: Tensor) -> Tensor:
        """`x`, float32 on purpose, in the activations' format: a new tensor that is not shared.

        float32's extremes are numbers there, not masks, if the format has a name of which code could ask the extremes.
        """
        specs, is_named = self.scope.specs, self.has_names and self.scope.dtype is not None
        if specs.activation is None and specs.error is None:
            return x
        return self._rounded_operand(x, specs.activation, specs.error, "activation", keep_masks=not is_named)

    def integer_operand(self, x: Tensor) -> Tensor:
        """Integers in the activations' format: to nearest where that is stochastic, as of numbers in a program."""
        spec = self.scope.specs.activation
        assert spec is not None
        is_drawn = spec.rounding == "stochastic"
        used = rounding_spec(spec.fmt, overflow=spec.overflow) if is_drawn else spec
        made = self._rounded_operand(x.to(torch.float32), used, None, "activation", keep_masks=False)
        if is_drawn and format_of(made) == used.text:
            mark(made, spec.text)
        return made

    def cast_to_format(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a write into the format; those that are float32 on purpose are cast first."""
        return tuple([self.new_operand(x) if is_wide_tensor(x) else x for x in args])

    def _rounds_no(self, x: Tensor, backward: RoundingSpec | None) -> bool:
        """True if the gradient stays float32, without observers: a copy would change the order of its sums."""
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
        """values: what `x` was rounded to before, without a gradient or with one: noise is drawn once for a tensor."""
        site, keep_masks = self.scope.site(role), keep_masks and role == "activation"
        is_now, is_drawn = is_plain(x), spec is not None and spec.rounding == "stochastic"
        if not (is_now or is_traced(x)):
            if values is not None and is_drawn:
                copy = with_values(x, values, backward, spec)
            else:
                copy = self._straight_through(x, spec, backward, keep_masks=keep_masks)
            if role == "weight" and spec is not None:
                mark(copy, self.scope.weight)  # which its views carry: they are not activations
            return copy
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        if is_now and spec is not None and not has_gradient and not is_drawn:
            copy = rounded(x, spec, keep_masks=keep_masks)  # in one pass
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
        """True if a frozen weight's rounded copy may be that of another call: it cannot be told from a new one."""
        has_gradient, is_seen = x.requires_grad and torch.is_grad_enabled(), self.scope.listeners.observer is not None
        return not (has_gradient or is_seen or spec.rounding == "stochastic") and is_plain(x)

    def carry_marks(self, out: Any, floats: list[Tensor], first: Any, first_mark: str | None) -> None:
        # an empty tensor is in every format: transformers joins keys to an empty cache
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
        """Round under a transform or a tracer. of_tangent: how a tangent is rounded where the numbers are already."""
        if _is_sharded(x):
            raise NotImplementedError(
                f"A DTensor reached {self.scope.name or 'the top level'}, as tensor parallelism makes them. Expected: "
                f"plain tensors, as DistributedDataParallel and fully_shard give them to a forward. Leave "
                f"parallelize_module away, or leave these modules in float32: Policy(overrides={{name: None}})."
            )
        if self.scope.listeners.scaling is not None and backward is not None:
            raise NotImplementedError(
                f"A gradient at {self.scope.name or 'the top level'} is to be rounded at its own scale, under "
                f"torch.compile or a transform of torch.func. Expected: loss.backward() and torch.autograd.grad. "
                f"Detach the scaling first, or leave the transform away."
            )
        rounded = straight_through(x, spec, backward, of_tangent if spec is None else spec)
        if spec is None or not keep_masks:
            return rounded
        is_mask = x.abs() == torch.finfo(x.dtype).max  # as launch.masks_of
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
        """`out` with its tensors rounded.

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
        """A result, rounded. is_now: whether it is known to be plain; else that is asked."""
        specs = self.scope.specs
        if out.dtype not in FLOATING or out.layout is not torch.strided:  # as is_roundable
            kind = _NESTED if out.is_nested else _MKLDNN if out.is_mkldnn else None
            if kind is not None and out.is_floating_point() and specs.activation and not specs.activation.is_float32:
                raise NotImplementedError(
                    f"Got a {kind[0]} from {call.name} at {self.scope.name or 'the top level'}, and its numbers "
                    f"cannot be rounded. Use {kind[1]}, or leave these modules in float32: "
                    f"Policy(overrides={{name: None}})."
                )
            return out
        is_now = is_now or is_plain(out)
        plain = is_now or is_traced(out)
        is_target = target is not None and (out is target or any(out is x for x in tensors_in(target)))
        if not is_target:
            is_same = share_storage if plain else operator.is_
            for x in floats:
                if is_same(out, x):  # it moved: dropout in evaluation gives back its input, einsum may give a view
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
                if is_target:
                    return out  # its gradient is rounded where it is used: to write to it again would be seen
            rounded = self._straight_through(out, spec, error, keep_infinity=keep_infinity, of_tangent=of_tangent)
            if is_target:
                return out.copy_(rounded)
            for x in (rounded, *layers_behind(rounded)) if has_transform() else ():
                unmark(x)  # it was made here, and so was its tensor outside of the transform: a view of it is no copy
            return rounded
        if product is not None and product.asks and error is not None and out.requires_grad:
            # its gradient is rounded here, and then as an operand: two places in the graph, two sites
            out, operands, site, operation = out.view_as(out), (out,), f"{site}.output", "output"
        if spec is not None:
            observer = None if listeners.observer is None else listeners.watching(site, role)
            before = None if observer is None else out.detach().clone()
            # below autograd: the operation's saved tensors hold the rounded value, as on hardware
            (round_memory_ if is_now else round_here_)(out, spec, keep_masks=True, keep_infinity=keep_infinity)
            if observer is not None and before is not None:
                observer(site, role, before, out.detach(), spec)
            mark(out, spec.text)
        elif error is not None:
            mark(out, "float32")  # its gradient has its place
        if self.scope.made is not None:
            self.scope.made[out] = operation, operands
        if error is not None and out.requires_grad and (not is_target or torch.is_grad_enabled()):
            if base_of(out) is None or has_history(out):  # as hook
                self._register(out, site, "error", error, operation, operands)
        return out

    def hook(self, out: Tensor, site: str, operation: str, operands: tuple[Any, ...]) -> None:
        """Have the gradient of a result rounded where it arrives."""
        error = self.scope.specs.error
        if error is not None and (base_of(out) is None or has_history(out)):
            self._register(out, site, "error", error, operation, operands)

    def returned(self, out: Tensor) -> Tensor:
        """An output that the model moved last, with its gradient rounded where it arrives.

        There no numbers of it are added up yet. Inside of the model, the reader of a moved tensor rounds it.
        """
        error = self.scope.specs.error
        if error is None:
            return out
        if has_transform():  # the transform's tensor has no mark
            return out if is_wide_tensor(out) else self._straight_through(out, None, error)
        if format_of(out) == self.scope.activation:
            self._register(out, self.scope.site("returned"), "error", error, "returned", (out,))
        return out

    def _register(
        self, out: Tensor, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...]
    ) -> None:
        scaling, traced = self.scope.listeners.scaling, type(out) is not Tensor and is_traced(out)
        if not (self._is_calibrated or traced or has_transform()):
            # it takes a backward pass, and none should run in another, nor may in a transform
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
    """The rounding of a tensor's numbers, independent of their graph, and of transforms that have ended."""
    with without_torch_function():  # the copies are in the format, and a mode would look whether they are
        known = ((key, state, after_transforms(rounded)) for key, (state, rounded, _) in copies.items())
        return {key: (state, rounded.detach(), None) for key, state, rounded in known if rounded is not None}


def _rounded_weight(spec: RoundingSpec, text: str, x: Tensor) -> Tensor:
    """A rounded copy of a weight, without a gradient."""
    copy = rounded(x, spec)
    mark(copy, text)
    return copy


def _is_sharded(x: Tensor) -> bool:
    """True if `x` is a DTensor; without its import, which takes a second."""
    return type(x) is not Tensor and any(c.__name__ == "DTensor" for c in type(x).__mro__)
