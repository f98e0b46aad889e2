"""The mode that intercepts every torch call of a model and rounds what goes in and what comes out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.autograd import is_plain, straight_through
from fpsim.emulation import recurrent
from fpsim.emulation.arguments import are_integers, roundable_in, tensors_in, typed_in
from fpsim.emulation.backward import BackwardRounding
from fpsim.emulation.calls import LOOK_UPS, NARROWING, REFUSE, WRITTEN_TO, Action, Call, call_of, in_order
from fpsim.emulation.casts import asks_for_float32, autocast_depth, dtype_in, is_called_by_sharding, is_float32_island
from fpsim.emulation.marks import (
    OF_A_WEIGHT,
    WIDE,
    format_of,
    is_roundable,
    is_weight,
    mark,
    writes_to,
)
from fpsim.emulation.operands import Rounds, leaves_float32
from fpsim.emulation.product_calls import CALLS, compute_products
from fpsim.emulation.products import ProductCall, note_views_of_weights, weights_among
from fpsim.emulation.scope import NO_SPECS, Scope
from fpsim.expressions import round_here_
from fpsim.spec import RoundingSpec, rounding_spec
from fpsim.torch_internals import blind_to_modes, calibrate_holders, is_sharded, is_traced, share_storage

__all__ = ["Emulation"]

_WIDE_DTYPES = (torch.float32, torch.float64)

# torch functions of many operations, in Python: their inside is emulated call by call.
_decomposed: dict[Any, Callable[..., Any]] = {f: blind_to_modes(f) for f in (F.multi_head_attention_forward,)}


FLOAT32 = rounding_spec("fp32")  # what an observer is told of a result that is float32 on purpose


class Emulation(TorchFunctionMode):
    """The emulated twin of `torch.autocast`: one per thread, with the scope of the module that runs."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        # {original: {(its format, its gradient's): (version, rounded copy)}}: it does not keep the originals alive
        self._operands = WeakTensorKeyDictionary()
        self._autocast_depth = autocast_depth()
        self._has_wide = False  # whether any tensor may be float32 on purpose; until then nothing is looked for

    def rounded_operands(self) -> list[tuple[Tensor, dict[Any, tuple[int, Tensor]]]]:
        """The tensors from outside that were rounded, with their copies."""
        return [*self._operands.items()]

    def take_over(self, operands: dict[Any, dict[Any, tuple[int, Tensor]]]) -> None:
        """Know these copies, which another pass has made."""
        self._has_wide = True  # what comes in may be
        for reference, copies in operands.items():
            if (x := reference()) is not None:
                self._operands[x] = dict(copies)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = call_of(func)
        action, scope = call.action, self.scope
        specs = scope.specs
        rounds_nothing = specs is NO_SPECS
        if (
            action is Action.PASS
            or (rounds_nothing and scope.products is None)
            or call.name in scope.float32
            or is_called_by_sharding()
        ):
            return call(func, args, kwargs)
        if rounds_nothing and call.name not in CALLS and action not in (Action.REFUSE, Action.DECOMPOSE):
            out = call(func, args, kwargs)
            note_views_of_weights(scope, call, out, args, kwargs)
            return out
        if action is Action.REFUSE:
            raise NotImplementedError(
                f"{resolve_name(func) or call.name} at {scope.name or 'the top level'} hides several operations in one "
                f"call and cannot be emulated. To do: {REFUSE[call.name]}."
            )
        is_left = call.name in recurrent.OPERATIONS and scope.products is None and leaves_float32(specs, args[0])
        if action is Action.DECOMPOSE and not is_left:
            inner = _decomposed.get(func) or partial(recurrent.OPERATIONS[call.name], scope.repeated)
            with self:
                return inner(*args, **kwargs)
        if call.in_place and args and isinstance(args[0], nn.Parameter):
            return call(func, args, kwargs)  # an update or an initialisation, not a step of the computation
        if action is Action.FILL:
            return self._fill(func, call, args, kwargs)
        if action in (Action.FACTORY, Action.LIKE):
            return self._make(func, call, args, kwargs)
        if action is Action.CAST:
            out = self._cast(func, call, args, kwargs)
            note_views_of_weights(scope, call, out, args, kwargs)
            return out
        return self._compute(func, call, args, kwargs)

    def _compute(self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.name.startswith("embedding") and kwargs.get("max_norm") is not None:
            # it changes the weight itself, not the rounded copy
            torch.embedding_renorm_(args[1].detach(), args[0].contiguous(), kwargs["max_norm"], kwargs["norm_type"])
            kwargs = {**kwargs, "max_norm": None}
        keeps_first = call.in_place or kwargs.get("inplace") is True
        target = kwargs.get("out", args[0] if keeps_first and args else None)
        moves, is_wide = call.action is Action.MOVE, self._is_wide_call(func, call, args, kwargs, target)
        rounds = Rounds.WEIGHTS if moves or is_wide else Rounds.ALL
        if self._has_wide and not is_wide and (moves or call.name not in NARROWING):
            rounds = Rounds.SCALARS if moves else Rounds.ALL_BUT_WIDE  # of which there are scalars, or what is added
        if is_float32_island(self._autocast_depth):
            is_wide = is_wide or not any(self._is_narrow(x) for x in roundable_in(args, kwargs))
            rounds = Rounds.NOTHING if is_wide else rounds
        floats: list[Tensor] = []

        new_args = tuple(
            x if (i == 0 and keeps_first) or i in call.skip_positions else self._prepared(x, rounds, floats)
            for i, x in enumerate(args)
        )
        new_kwargs = {
            name: x if name in call.skip_names or name == "out" else self._prepared(x, rounds, floats)
            for name, x in kwargs.items()
        }
        operands = (*new_args, *in_order(new_kwargs)) if new_kwargs else new_args
        first = args[0] if keeps_first and args else None
        if isinstance(first, Tensor) and not is_wide and not moves and call.action is not Action.SET_ITEM:
            self._prepare_target(first)
        was_marked = format_of(first) if isinstance(first, Tensor) else None
        product = None
        is_left = is_wide and (rounds is Rounds.NOTHING or not isinstance(target, Tensor))
        if self.scope.products is not None and call.name in CALLS and not is_left:
            originals, prepared = ((*a, *k.values()) for a, k in ((args, kwargs), (new_args, new_kwargs)))
            product = ProductCall(self.scope, call.name, operands, weights_among(self.scope, originals, prepared))
            out = compute_products(product, partial(call, func), new_args, new_kwargs, target)
        else:
            out = call(func, new_args, new_kwargs)
        if is_wide or (not floats and not isinstance(target, Tensor) and are_integers(args)):
            self._let_results_be_wide(out, call)
            return out
        if call.action is Action.SET_ITEM:
            if was_marked and isinstance(first, Tensor):
                self._round_result(first, call, operands, floats, first)
            return out
        if moves:
            note_views_of_weights(self.scope, call, out, args, kwargs)
            self._carry_marks(out, floats, first, was_marked)
            if call.name not in LOOK_UPS or not isinstance(out, Tensor):
                return out
            activation = self.scope.specs.activation
            if activation is None or format_of(out) == activation.text:
                if out.requires_grad:
                    self._hook(out, self.scope.site(call.name), call.name, operands)
                return out
        return self._round_results(out, call, operands, floats, target, product)

    # float32 on purpose

    def _is_wide_call(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> bool:
        """Whether a call computes float32 on purpose, by torch's type promotion with the format as a dtype below it."""
        if "dtype" in kwargs and not isinstance(target, Tensor) and dtype_in(args, kwargs) in _WIDE_DTYPES:
            return asks_for_float32(func, call.name, args, kwargs)
        if not self._has_wide:
            return False
        tensors = typed_in(args, kwargs)
        if not tensors:
            return False
        if isinstance(target, Tensor):
            return format_of(target) == WIDE
        if call.name in NARROWING and not any(x.is_complex() for x in tensors):
            return all(format_of(x) == WIDE for x in tensors)
        dimensions = max(x.dim() for x in tensors)
        return any(format_of(x) == WIDE for x in tensors if x.dim() or not dimensions)

    def _let_results_be_wide(self, out: Any, call: Call) -> None:
        """These results are float32 on purpose: they are not rounded, nor are their gradients."""
        self._mark_wide(*tensors_in(out))
        found = [x for x in tensors_in(out) if is_roundable(x)]
        if call.action is not Action.MOVE and found:
            site = self.scope.site(call.name)
            self.scope.wide[call.name] = None
            observer = self.scope.listeners.watching(site, "activation")
            if observer is not None:
                for x in found:
                    observer(site, "activation", x.detach(), x.detach(), FLOAT32)

    def _is_narrow(self, x: Tensor) -> bool:
        return format_of(x) not in (None, WIDE)

    def _mark_wide(self, *found: Tensor) -> None:
        self._has_wide = True
        for x in found:
            if x.is_floating_point() or x.is_complex():
                mark(x, WIDE)

    def _make(self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor: float32 on purpose, unless it is made like another one or the model's dtype is asked for."""
        out = call(func, args, kwargs)
        if not isinstance(out, Tensor) or not is_roundable(out) or "out" in kwargs:
            return out
        others = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if dtype_in(args, kwargs) is not None:
            is_wide = asks_for_float32(func, call.name, args, kwargs)
        elif call.action is Action.LIKE:
            is_wide = any(format_of(x) == WIDE for x in others)
        else:
            is_wide = not others or any(format_of(x) == WIDE for x in others)
        if is_wide and not any(out is x for x in others):
            self._mark_wide(out)
        return out

    def _fill(self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New numbers in a tensor, which is as narrow or as wide as before."""
        x = args[0]
        known = format_of(x) if isinstance(x, Tensor) else None
        out = call(func, args, kwargs)
        if known == WIDE:
            self._mark_wide(x)
        elif known is not None:
            self._round_result(x, call, (), [], x)
        return out

    def _cast(self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A cast, which moves values between float32 and the format where it changes no dtype of torch."""
        if is_roundable(args[0]) and leaves_float32(self.scope.specs, args[0]):
            return call(func, args, kwargs)  # the format is float32: a copy would change the order of gradients' sums
        x = self._operand(args[0], Rounds.WEIGHTS) if is_roundable(args[0]) else args[0]
        out = call(func, (x, *args[1:]), kwargs)
        if not isinstance(out, Tensor) or not is_roundable(out):
            return out
        like = next((y for y in (*args[1:], *kwargs.values()) if isinstance(y, Tensor)), None)
        if like is None and dtype_in(args, kwargs) is None and call.name == "to":
            self._carry_marks(out, [x], None, None)  # to another device
            return out
        if asks_for_float32(func, call.name, args, kwargs) or (like is not None and format_of(like) == WIDE):
            if format_of(x) != WIDE or out is not x:
                out = out.clone() if out is args[0] or out is x else out  # its mark is its own
                self._mark_wide(out)
            return out
        if format_of(x) == WIDE and out.dtype in _WIDE_DTYPES:
            return self._operand(out, Rounds.ALL)
        if is_roundable(x):
            self._carry_marks(out, [x], None, None)
        return out

    def _prepared(self, x: Any, rounds: Rounds, floats: list[Tensor]) -> Any:
        """An argument with its tensors in their formats, which are appended to `floats`."""
        # a method, not a closure: one that calls itself is a cycle, and kept every tensor until a collection
        if isinstance(x, Tensor):
            if not is_roundable(x):
                return x
            x = self._operand(x, rounds)
            floats.append(x)
        elif type(x) in (list, tuple) and any(isinstance(item, Tensor) for item in x):
            return type(x)([self._prepared(item, rounds, floats) for item in x])
        return x

    def _prepare_target(self, x: Tensor) -> None:
        """What a call changes in place is an operand too, and is brought into its format where it is."""
        if not self._is_in_format(x, self.scope.specs.activation) and not (x.is_leaf and x.requires_grad):
            self._round_result(x, WRITTEN_TO, (x,), [], x)

    def _is_in_format(self, x: Tensor, spec: RoundingSpec | None) -> bool:
        found, weight = format_of(x), self.scope.specs.weight
        if found is None or spec is None or found == spec.text:
            return found is not None
        return weight is not None and found == weight.text + OF_A_WEIGHT

    def _operand(self, x: Tensor, rounds: Rounds) -> Tensor:
        """`x` in its format: a parameter in the weights', anything else in the activations'."""
        specs = self.scope.specs
        has_weights_role = is_weight(x) or id(x) in self.scope.weights
        spec, backward = (specs.weight, specs.weight_grad) if has_weights_role else (specs.activation, specs.error)
        if (spec is None and backward is None) or rounds is Rounds.NOTHING:
            return x
        if not has_weights_role and rounds.leaves(x):
            return x
        if self._is_in_format(x, spec):
            return x
        copies: dict[Any, tuple[int, Tensor]] = self._operands.setdefault(x, {})
        key, needs_grad = (spec and spec.text, backward and backward.text), x.requires_grad and torch.is_grad_enabled()
        version, rounded = copies.get(key, (None, x))
        if version != writes_to(x) or rounded.requires_grad != needs_grad:
            rounded = self._rounded_operand(x, spec, backward, "weight" if has_weights_role else "activation")
            copies[key] = writes_to(x), rounded
        return rounded

    def _rounded_operand(
        self, x: Tensor, spec: RoundingSpec | None, backward: RoundingSpec | None, role: str
    ) -> Tensor:
        site = self.scope.site(role)
        if not (is_plain(x) or is_traced(x)):
            return self._straight_through(x, spec, backward, keep_masks=role == "activation")
        rounded = x.clone()
        if spec is not None:
            round_here_(rounded, spec, keep_masks=role == "activation")
            activation = self.scope.specs.activation
            is_activation = role == "activation" or (activation is not None and activation.text == spec.text)
            mark(rounded, spec.text if is_activation else spec.text + OF_A_WEIGHT)
            observer = self.scope.listeners.watching(site, role)
            if observer is not None:
                observer(site, role, x.detach(), rounded.detach(), spec)
        if backward is not None and rounded.requires_grad:
            gradient_role = "weight_grad" if role == "weight" else "error"
            self._register(rounded, site, gradient_role, backward, role, (x,))
        return rounded

    def _carry_marks(self, out: Any, floats: list[Tensor], first: Any, first_mark: str | None) -> None:
        # what has no elements is in every format: transformers joins keys to an empty cache
        marks = {known for x in floats if (known := format_of(x)) is not None or x.numel()}
        if isinstance(first, Tensor):
            marks.add(first_mark)
        if WIDE in marks:  # by type promotion
            self._mark_wide(*tensors_in(out))
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
    ) -> Tensor:
        """Round under a transform or a tracer."""
        if is_sharded(x):
            raise NotImplementedError(
                f"A DTensor came to {self.scope.name or 'the top level'}, as tensor parallelism makes them. Possible: "
                f"plain tensors, as DistributedDataParallel and fully_shard give them to a forward. Leave "
                f"parallelize_module away, or leave these modules in float32: Policy(overrides={{name: None}})."
            )
        if self.scope.listeners.scaling is not None and backward is not None:
            raise NotImplementedError(
                f"A gradient at {self.scope.name or 'the top level'} is to be rounded at its own scale, under "
                f"torch.compile or a transform of torch.func. Possible: loss.backward() and torch.autograd.grad. "
                f"Detach the scaling first, or leave the transform away."
            )
        rounded = straight_through(x, spec, backward)
        if spec is None or not keep_masks:
            return rounded
        is_mask = x.abs() == torch.finfo(x.dtype).max  # as launch.masks_of
        return torch.where(is_mask | (x == -torch.inf) if keep_infinity and spec.saturates else is_mask, x, rounded)

    def _round_results(
        self,
        out: Any,
        call: Call,
        operands: tuple[Any, ...],
        floats: list[Tensor],
        target: Any,
        product: ProductCall | None = None,
    ) -> Any:
        """`out` with its tensors rounded.

        target: what the call was told to write to, if anything.
        product: the call, if it may have products to quantise.
        """
        if isinstance(out, Tensor):
            return self._round_result(out, call, operands, floats, target, product)
        if isinstance(out, tuple | list):
            results = [
                self._round_result(x, call, operands, floats, target) if isinstance(x, Tensor) else x for x in out
            ]
            if all(a is b for a, b in zip(out, results, strict=True)):
                return out
            return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)
        return out

    def _round_result(
        self,
        out: Tensor,
        call: Call,
        operands: tuple[Any, ...],
        floats: list[Tensor],
        target: Any,
        product: ProductCall | None = None,
    ) -> Tensor:
        specs = self.scope.specs
        if not is_roundable(out):
            return out
        plain, is_target = is_plain(out) or is_traced(out), any(out is x for x in tensors_in(target))
        is_same = share_storage if plain else operator.is_
        if not is_target and any(is_same(out, x) for x in floats):
            self._carry_marks(out, floats, None, None)
            return out  # it moved: dropout in evaluation gives back its input, einsum may give a view of it
        site = self.scope.site(call.name) if product is None else product.site
        spec, error, role, operation = specs.activation, specs.error, "activation", call.name
        if spec is None and product is not None and (spec := product.output) is not None:
            role = "output"
        keep_infinity = not call.has_pole or (call.is_quotient and not isinstance(operands[1], Tensor))
        if not plain:
            rounded = self._straight_through(out, spec, error, keep_infinity=keep_infinity)
            return out.copy_(rounded) if is_target else rounded
        if product is not None and product.asks and error is not None and out.requires_grad:
            # its gradient is rounded here, and then as an operand: two places in the graph, two sites
            out, operands, site, operation = out.view_as(out), (out,), f"{site}.output", "output"
        if spec is not None:
            observer = self.scope.listeners.watching(site, role)
            before = None if observer is None else out.detach().clone()
            # below autograd: what the operation saved for its backward is the rounded value, as on hardware
            round_here_(out, spec, keep_masks=True, keep_infinity=keep_infinity)
            if observer is not None and before is not None:
                observer(site, role, before, out.detach(), spec)
            mark(out, spec.text)
        elif error is not None:
            mark(out, "float32")  # its gradient has its place
        if error is not None and out.requires_grad:
            self._hook(out, site, operation, operands)
        return out

    def _hook(self, out: Tensor, site: str, operation: str, operands: tuple[Any, ...]) -> None:
        error = self.scope.specs.error
        if error is not None:
            self._register(out, site, "error", error, operation, operands)

    def _register(
        self, out: Tensor, site: str, role: str, spec: RoundingSpec, operation: str, operands: tuple[Any, ...]
    ) -> None:
        scaling = self.scope.listeners.scaling
        scale = None if scaling is None else scaling(site, role, spec, operation, operands, out)
        if not is_traced(out):
            calibrate_holders()  # it takes a backward pass, and none should run in another
        out.register_hook(BackwardRounding(self.scope, site, role, spec, scale))
