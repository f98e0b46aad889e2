"""The mode that intercepts every torch call of a model and rounds its operands and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from fpsim.emulation.aliases import Alias, Aliases, note_write, view_from_outside, write_outside, written_outside
from fpsim.emulation.arguments import (
    are_integers,
    as_numbers,
    has_lazy,
    keep_masks,
    mask_among,
    masks_to_scale,
    renormalised,
    roundable_in,
    tensors_in,
    typed_in,
)
from fpsim.emulation.calls import (
    LOOK_UPS,
    NARROWING,
    Action,
    Call,
    call_of,
    in_order,
    only_multiplies,
)
from fpsim.emulation.casts import (
    WIDE_DTYPES,
    autocast_depth,
    dtype_in,
    has_process_group,
    is_called_by_sharding,
    is_float32_island,
)
from fpsim.emulation.checkpoints import packed_afterwards
from fpsim.emulation.conversions import (
    DTYPE_OF,
    Asked,
    asks_for_wide,
    cast,
    dtype_of,
    fill,
    for_each,
    is_float64,
    make,
    mark_gradients,
    named_dtype,
    result_type,
    set_data,
)
from fpsim.emulation.decomposed import by_operations, flex_attention
from fpsim.emulation.lineage import attended_among, follow_attention, know_copy, note_views_of_weights, weights_among
from fpsim.emulation.marks import (
    WIDE,
    format_of,
    is_made_here,
    is_marked_wide,
    is_roundable,
    is_state,
    is_weight,
    is_wide_tensor,
    mark,
    mark_as_weight,
    mark_like,
    unmark,
)
from fpsim.emulation.operands import Rounds
from fpsim.emulation.product_calls import OF_ATTENTION, compute_products, has_products
from fpsim.emulation.products import ProductCall
from fpsim.emulation.promotion import integers_in_format, scalars_in_format, scalars_of_call, step_in_format
from fpsim.emulation.roundings import Roundings
from fpsim.emulation.scope import NO_SPECS, Attended, Scope
from fpsim.emulation.short_way import by_short_way
from fpsim.emulation.steps import Step
from fpsim.tensors.spec import FLOATING, ContainerError, rounding_spec
from fpsim.torch_internals import base_of, own_frame
from fpsim.torch_modes import has_transform, hooks_of_saved_tensors, require_no_compiler, skip_frames

__all__ = ["Emulation", "TracedEmulation"]

FLOAT32 = rounding_spec("fp32")  # the rounding that an observer gets for a result that is float32 on purpose


class Emulation(Roundings, TorchFunctionMode):
    """Mode of one thread that emulates torch calls in the scope of the running module: a twin of `torch.autocast`."""

    _fpsim_sees_bodies = True  # torch_modes.SEES_BODIES

    def __init__(self, scope: Scope, aliases: Aliases | None = None, has_names: bool = True) -> None:
        super().__init__(scope, aliases)
        self.has_names = has_names  # whether torch's name of the format may stand for it; not where it is a real dtype
        self.names: set[torch.dtype] = set()  # those that `x.dtype` has returned
        self.autocast_depth = autocast_depth()
        self.step: Step | None = None  # of an optimizer that runs inside
        self.is_in_kernel = False  # whether a kernel of the policy runs: its operations are torch's own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reads of `x.dtype` come first: they need nothing below. A variable for the frame would make a reference cycle.
        if func == DTYPE_OF:
            return dtype_of(self, inspect.currentframe() if is_dynamo_compiling() else own_frame(), args[0])
        kwargs = kwargs or {}
        if not is_dynamo_compiling():
            out = by_short_way(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        call, scope = call_of(func), self.scope
        action = call.action
        if scope.has_kernels and (out := scope.by_kernel(self, call, args, kwargs)) is not NotImplemented:
            return out
        if call.is_special:
            if action is Action.DTYPE:
                return result_type(self, func, args, kwargs)
            if call.body is not None:
                require_no_compiler()
                body = flex_attention if call.name == "flex_attention" else call.body
                with self:
                    return body(*args, **kwargs)
        if (self.step is not None and self.step.is_running(scope)) or (types and has_lazy(types)):
            return call(func, args, kwargs)
        # The `__torch_function__` of a mask class calls attention again, with a plain tensor as its mask or with flags.
        if types and (mask := mask_among(types)) is not None:
            with self:
                return mask.__torch_function__(func, types, args, kwargs)
        if scope.is_float32 and any(map(is_float64, tensors_in((*args, *(kwargs or {}).values())))):
            out = self._pass(func, call, args, kwargs)
            self.mark_wide(*filter(is_float64, tensors_in(out)))
            return out
        asked = Asked.NOTHING
        if call.takes_dtype or "dtype" in kwargs:
            args, kwargs, asked = named_dtype(self, call, args, kwargs)
        specs = scope.specs
        rounds_nothing = specs is NO_SPECS
        # A sharding library calls torch between modules, only to move bytes: these calls do not belong to the model.
        if (
            action is Action.PASS
            or (rounds_nothing and scope.products is None)
            or call.name in scope.float32
            or (has_process_group() and is_called_by_sharding())
        ):
            return self._pass(func, call, args, kwargs)
        has_products_in = scope.products is not None and has_products(scope, call.name)
        if rounds_nothing and not has_products_in and action not in (Action.REFUSE, Action.DECOMPOSE):
            out = self._pass(func, call, args, kwargs)
            note_views_of_weights(scope, call, out, args, kwargs)
            follow_attention(scope, func, call, out, args, kwargs)
            return out
        if call.is_special:
            out = by_operations(self, func, call, args, kwargs)
            if out is not NotImplemented:
                return out
        run = self.compute if call.only_computes and not self.has_wide and "out" not in kwargs else self._emulated
        hooks = hooks_of_saved_tensors()
        # Hooks of saved tensors run after the result is rounded, because the operation may save its result.
        try:
            if hooks is None:
                out = run(func, call, args, kwargs, asked)
            else:
                with packed_afterwards(hooks):
                    out = run(func, call, args, kwargs, asked)
            if scope.products is not None and not has_products_in:
                follow_attention(scope, func, call, out, args, kwargs)
            return out
        except ContainerError as error:  # a TypeError in an operator would become "unsupported operand"
            raise RuntimeError(str(error)) from None

    def _pass(self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without rounding; record a write to its first argument, and mark gradients that it returns."""
        out = call(func, args, kwargs)
        if args and isinstance(args[0], Tensor) and call.writes_to_first(args, kwargs):
            note_write(self, args[0])
        elif call.name == "grad":
            mark_gradients(self, out, args, kwargs)
        return out

    def _emulated(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> Any:
        """Run an emulated call: dispatch it to the treatment of casts, views, reads, writes or computations."""
        first = args[0] if args else None
        # A dropout that drops nothing returns its input, unrounded. In a compiled program it returns a copy.
        if call.drops is not None and isinstance(first, Tensor) and call.drops_nothing(args, kwargs):
            out = call(func, args, kwargs)
            if out is not first:
                if (known := format_of(first)) is not None:
                    mark_like(out, known)
                know_copy(self.scope, first, out)
            return out
        if call.is_of_each and len(moved := [*tensors_in(args)]) > 1:
            return self._each_moved(func, call, moved, args, kwargs)
        written = first if isinstance(first, Tensor) and call.writes_to_first(args, kwargs) else None
        if written is not None and self.is_stored(written):
            return write_outside(self, func, call, args, kwargs)
        # Under a transform `x.data` shares the memory of `x`, and is not a view of a rounded copy.
        if call.name == "data" and isinstance(first, Tensor) and has_transform():
            out = call(func, args, kwargs)
            self.aliases.add(out, Alias(first))
            if is_weight(first) or self.scope.stands_in(first):
                mark_as_weight(out)
            return out
        if call.is_view and isinstance(first, Tensor) and (not is_made_here(first) or self.aliases.of(first)):
            view = view_from_outside(self, func, call, args, kwargs)
            if view is not NotImplemented:
                return view
        if call.converts:
            out = self._converted(func, call, args, kwargs, asked)
        elif call.action is Action.READ:
            return self._read(func, call, args, kwargs, asked)
        else:
            if self.has_wide and (asked is Asked.NARROW or (call.copies and not is_wide_tensor(first))):
                args = self.cast_to_format(args)
            into = kwargs.get("out")
            if isinstance(into, Tensor) and (alias := self.aliases.of(into)) is not None and alias.is_of_copy:
                # The call runs unchanged, so that torch raises its own error.
                if into.requires_grad and torch.is_grad_enabled():
                    return call(func, args, kwargs)
                self.compute(func, call, args, {**kwargs, "out": alias.memory(into)}, asked)
                note_write(self, into)
                return into
            out = self.compute(func, call, args, kwargs, asked)
        if written is not None:
            note_write(self, written)
        elif call.is_view and call.name == "data" and isinstance(first, Tensor) and out is not first:
            self.aliases.add(out, Alias(first))
        return out

    def _each_moved(
        self, func: Callable[..., Any], call: Call, moved: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return views of several tensors; each view keeps the dtype of its tensor."""
        floats: list[Tensor] = []
        out = call(func, tuple(self.prepared(x, Rounds.ALL_BUT_WIDE, floats) for x in args), kwargs)
        prepared = iter(floats)
        for view, x in zip(tensors_in(out), moved, strict=True):
            if is_roundable(x):
                self.carry_marks(view, [next(prepared)], None, None)
        return out

    def _converted(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> Any:
        """Run a call that makes or fills a tensor, or that decides a tensor's dtype."""
        action = call.action
        if action is Action.FILL:
            return fill(self, func, call, args, kwargs)
        if action is Action.CAST:
            out = cast(self, func, call, args, kwargs, asked)
            note_views_of_weights(self.scope, call, out, args, kwargs)
            return out
        if action is Action.SET_DATA:
            return set_data(self, func, call, args, kwargs)
        if action is Action.FOREACH:
            return for_each(self, func, call, args, kwargs)
        if action is Action.STEP:
            return step_in_format(self, func, call, args, kwargs, asked)
        return make(self, func, call, args, kwargs, asked)

    def _read(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> Any:
        """Run a call that reads values and returns none in the format, such as a comparison."""
        is_wide = self.has_wide and self._is_wide_call(func, call, args, kwargs, None, asked)
        rounds = Rounds.ALL_BUT_WIDE if is_wide else Rounds.ALL
        if self.leaves_raw(roundable_in(args, kwargs)):
            rounds = Rounds.NOTHING
        floats: list[Tensor] = []
        args = tuple([self.prepared(as_numbers(x), rounds, floats) for x in args])
        if kwargs:
            kwargs = {name: self.prepared(as_numbers(x), rounds, floats) for name, x in kwargs.items()}
        args, kwargs = scalars_in_format(self.scope.specs.activation, call, args, kwargs, is_wide)
        if call.is_comparison and not is_wide and rounds is not Rounds.NOTHING:
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor) and x.dtype not in FLOATING:
                    args, kwargs = integers_in_format(self, call, args, kwargs, call.in_place, floats)
                    break
        spec = self.scope.specs.activation
        if call.name != "bincount" or not floats or spec is None or spec.is_float32:
            return call(func, args, kwargs)
        # bincount sums float32 weights in float32, and weights of any other dtype in float64.
        if not is_wide:
            args = tuple([x.double() if isinstance(x, Tensor) and is_roundable(x) else x for x in args])
            kwargs = {name: x.double() if x is floats[-1] else x for name, x in kwargs.items()}
        out = call(func, args, kwargs)
        self.mark_wide(out)
        return out

    def is_stored(self, x: Tensor) -> bool:
        """True if `x` is a parameter, a buffer or a tracked alias, and is not float32 on purpose."""
        is_master = is_state(x) or isinstance(x, nn.Parameter) or self.scope.stands_in(x)
        return (is_master or self.aliases.of(x) is not None) and not is_marked_wide(x)

    def compute(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> Any:
        """Run a call without special treatment: bring its operands into their formats, and round its results."""
        if call.may_renormalise and kwargs.get("max_norm") is not None:
            kwargs = renormalised(args, kwargs)
        keeps_first = call.may_write and call.writes_to_first(args, kwargs)
        first = args[0] if keeps_first and args else None
        target = kwargs.get("out", first)
        is_wide, rounds = self._treatment(func, call, args, kwargs, target, asked)
        if call.has_threshold or self.has_wide:
            args, kwargs = scalars_of_call(self, call, args, kwargs, is_wide, keeps_first)
        floats: list[Tensor] = []
        new_args, new_kwargs = self._in_formats(call, args, kwargs, keeps_first, rounds, floats, is_wide)
        if call.action is Action.SET_ITEM:
            return self._set_item(func, call, new_args, new_kwargs, is_wide)
        operands = (*new_args, *in_order(new_kwargs)) if new_kwargs else new_args
        # Formats are read before the call, because a write drops the marks of the target and of the target's base.
        known_base, was_marked = None if target is None else self.format_of_base(target), None
        if isinstance(first, Tensor):
            if not is_wide and call.action is not Action.MOVE:
                self.prepare_target(first)
            was_marked = format_of(first)
        product = None
        is_left = is_wide and (rounds is Rounds.NOTHING or not isinstance(target, Tensor))
        if has_products(self.scope, call.name) and (not is_left or call.name in OF_ATTENTION):
            originals, prepared = ((*a, *k.values()) for a, k in ((args, kwargs), (new_args, new_kwargs)))
            product = ProductCall(self.scope, call.name, operands, weights_among(self.scope, originals, prepared))
            product.attended = attended_among(self.scope, originals, prepared)
            out = compute_products(product, partial(call, func), new_args, new_kwargs, target)
        else:
            masks = None if is_wide or not call.scales else masks_to_scale(self.scope.specs.activation, operands)
            # `call(...)` also counts writes to inference tensors. Without a target nothing is written: `func` suffices.
            out = call(func, new_args, new_kwargs) if target is not None else func(*new_args, **new_kwargs)
            if masks is not None:
                out = keep_masks(out, masks)
        if isinstance(given := kwargs.get("out"), Tensor):
            return self._given_out(given, known_base, out, call, operands, floats, is_wide)
        # A float result computed from integers alone is float32 on purpose too: torch gives it the default dtype.
        if is_wide or (not floats and not isinstance(target, Tensor) and are_integers(args)):
            self.let_results_be_wide(out, call)
            return out
        if call.action is Action.MOVE:
            note_views_of_weights(self.scope, call, out, args, kwargs)
            return self._moved(out, call, operands, floats, first, was_marked, rounds)
        rounds_all = self.round_result if isinstance(out, Tensor) else self.round_results
        result = rounds_all(out, call, operands, floats, target, product)
        if product is not None and product.gives_scores:
            self.scope.listeners.attended[result] = Attended(None, None)
        if isinstance(first, Tensor):
            self.know_again(base_of(first), known_base, call)
        return result

    def _treatment(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any],
        target: Any, asked: Asked,
    ) -> tuple[bool, Rounds]:  # fmt: skip
        """Return whether a call computes in float32 on purpose, and which of its operands are rounded."""
        may_be_wide = self.has_wide or call.takes_dtype or call.gives_float64 or "dtype" in kwargs
        is_wide = may_be_wide and self._is_wide_call(func, call, args, kwargs, target, asked)
        if is_wide:
            rounds = Rounds.ALL_BUT_WIDE
        elif call.is_view and args and isinstance(args[0], Tensor) and is_made_here(args[0]):
            rounds = Rounds.VIEWED
        elif call.may_multiply and self.has_wide and only_multiplies(call.name, args, kwargs):
            rounds = Rounds.ALL_BUT_WIDE
        elif call.action is Action.MOVE or call.narrows or asked is Asked.NARROW:
            rounds = Rounds.ALL
        else:
            rounds = Rounds.ALL_BUT_WIDE
        # Where autocast is switched off, operands that are not in the format stay unrounded, and so does the result.
        if is_float32_island(self.autocast_depth):
            is_wide = is_wide or self.leaves_raw(roundable_in(args, kwargs))
            rounds = Rounds.NOTHING if is_wide else rounds
        return is_wide, rounds

    def _in_formats(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], keeps_first: bool, rounds: Rounds,
        floats: list[Tensor], is_wide: bool,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        """Return the arguments with each operand in its format, and append these operands to `floats`."""
        index, moves = 1 if call.action is Action.SET_ITEM else -1, call.action is not Action.COMPUTE
        positional, has_others = [*args], False  # of other than floating dtype, which may be integers to promote
        for i, x in enumerate(args):
            if (i == 0 and keeps_first) or i in call.skip_positions:
                continue
            if isinstance(x, Tensor):
                if x.dtype in FLOATING and x.layout is torch.strided:  # `is_roundable`, without the call
                    positional[i] = x = self.operand(x, rounds)
                    floats.append(x)
                else:
                    has_others = has_others or (i != index and (moves or x.dtype is not torch.bool))
            elif isinstance(x, list | tuple):
                known = len(floats)
                positional[i] = self.prepared(x, rounds, floats)
                has_others = has_others or (i != index and len(floats) - known < len(x))
        new_args, named = tuple(positional), kwargs
        if kwargs:
            named = {**kwargs}
            for name, x in kwargs.items():
                if isinstance(x, Tensor | list | tuple) and name != "out" and name not in call.skip_names:
                    known = len(floats)
                    named[name] = self.prepared(x, rounds, floats)
                    has_others = has_others or len(floats) == known
        if has_others and call.promotes and not is_wide and rounds is not Rounds.NOTHING:
            return integers_in_format(self, call, new_args, named, keeps_first, floats)
        return new_args, named

    def _moved(
        self, out: Any, call: Call, operands: tuple[Any, ...], floats: list[Tensor], first: Any,
        was_marked: str | None, rounds: Rounds,
    ) -> Any:  # fmt: skip
        """Return the result of a call that moves values, marked as in the format of these values."""
        self.carry_marks(out, floats, first, was_marked)
        if (rounds is Rounds.VIEWED or has_transform()) and not (isinstance(out, Tensor) and is_made_here(out)):
            for x in tensors_in(out):
                if not is_made_here(x) and is_roundable(x) and not any(x is y for y in operands):
                    unmark(x)
        if call.name not in LOOK_UPS or not isinstance(out, Tensor):
            return out
        activation = self.scope.specs.activation
        # Embedding rows were rounded as weights. If activations have the same format, only a gradient hook is missing.
        if activation is None or format_of(out) == activation.text:
            if out.requires_grad:
                self.hook(out, self.scope.site(call.name), call.name, operands)
            return out
        return self.round_results(out, call, operands, floats, None)

    def _given_out(
        self, given: Tensor, known_base: str | None, out: Any, call: Call, operands: tuple[Any, ...],
        floats: list[Tensor], is_wide: bool,
    ) -> Any:  # fmt: skip
        """Return the result of a call with `out=`, computed in the operands' dtype and stored in the target's dtype."""
        if self.is_stored(given):
            written_outside(self, given)
            return out
        was_wide = is_marked_wide(given)
        if was_wide and is_wide:
            return out
        result = self.round_results(out, call, operands, floats, given)
        if was_wide:
            self.mark_wide(given)
        self.know_again(base_of(given), known_base, call)
        return result

    def _set_item(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_wide: bool
    ) -> Any:
        """Write values into a part of the target, which stays in its format."""
        target = args[0]
        known, known_base = format_of(target), self.format_of_base(target)
        call(func, *scalars_in_format(self.scope.specs.activation, call, args, kwargs, is_wide))
        self.know_again(target, known, call)
        self.know_again(base_of(target), known_base, call)

    def format_of_base(self, x: Any) -> str | None:
        """Return the format of the base of which `x` is a view; None without a base."""
        base = base_of(x) if isinstance(x, Tensor) else None
        return None if base is None else format_of(base)

    def know_again(self, x: Tensor | None, known: str | None, call: Call) -> None:
        """Restore the mark `known` of `x` after numbers of this format were written to a part of `x`."""
        if x is not None and known is not None and known != WIDE:
            mark(x, known)
            if torch.is_grad_enabled() and x.requires_grad:
                self.hook(x, self.scope.site(call.name), call.name, (x,))

    # float32 on purpose

    def _is_wide_call(
        self,
        func: Callable[..., Any],
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        asked: Asked,
    ) -> bool:
        """True if torch's type promotion, with the format as a dtype below float32, makes the result float32."""
        if asked is not Asked.NOTHING or call.gives_float64:
            return asked is not Asked.NARROW
        if "dtype" in kwargs or call.takes_dtype:
            if not isinstance(target, Tensor) and dtype_in(args, kwargs) in WIDE_DTYPES:
                return asks_for_wide(self, func, call, args, kwargs)
        if not self.has_wide:
            return False
        if isinstance(target, Tensor) and kwargs.get("out") is not target:
            return is_marked_wide(target)
        kwargs = {name: x for name, x in kwargs.items() if name != "out"} if "out" in kwargs else kwargs
        if call.has_dtype_of_first:
            args, kwargs = args[:1], {}
        elif call.only_compared is not None:
            positions, names = call.only_compared
            args = tuple(x for i, x in enumerate(args) if i not in positions)
            kwargs = {name: x for name, x in kwargs.items() if name not in names}
        tensors = typed_in(args, kwargs)
        if not tensors:
            return False
        if call.name in NARROWING and not any(x.is_complex() for x in tensors):
            if all(is_marked_wide(x) for x in tensors):
                return True
            if not (call.may_multiply and only_multiplies(call.name, args, kwargs)):
                return False
        # A 0-dimensional tensor does not promote a tensor that has dimensions.
        dimensions = 0 if call.expands else max(x.dim() for x in tensors)
        return any(is_marked_wide(x) for x in tensors if x.dim() or not dimensions)

    def let_results_be_wide(self, out: Any, call: Call) -> None:
        """Mark results as float32 on purpose: they are not rounded, nor are their gradients."""
        results = [out] if type(out) is Tensor else [*tensors_in(out)]
        self.mark_wide(*results)
        if call.action is Action.MOVE or not any(map(is_roundable, results)):
            return
        site = self.scope.site(call.name)
        self.scope.wide[call.name] = None
        observer = self.scope.listeners.watching(site, "activation")
        if observer is not None:
            for x in filter(is_roundable, results):
                observer(site, "activation", x.detach(), x.detach(), FLOAT32)

    def leaves_raw(self, operands: Iterable[Tensor]) -> bool:
        """True if autocast is switched off here, and none of the operands is in the format."""
        return is_float32_island(self.autocast_depth) and not any(map(self._is_narrow, operands))

    def _is_narrow(self, x: Tensor) -> bool:
        return format_of(x) not in (None, WIDE)


# A compiled part of a model breaks its graph at each torch call, and enters this method. Dynamo would compile its
# frames too, with wrong results: `x.dim()` returned a device.
skip_frames(Emulation.__torch_function__.__code__, is_deep=True)


_HISTORY_OF: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # a mode's call for `x.grad_fn`


class TracedEmulation(Emulation):
    """`Emulation` while torch.compile traces a program: in every call, stand-ins replace parameters and buffers.

    stand_ins: tensors by the ids of the parameters and buffers that they replace.
    """

    def __init__(self, stand_ins: Mapping[int, Tensor], scope: Scope, has_names: bool = True) -> None:
        super().__init__(scope, has_names=has_names)
        self.stand_ins = stand_ins

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # None is returned, as for a leaf, because a module refuses to register a parameter that has a `grad_fn`.
        if func == _HISTORY_OF and isinstance(args[0], nn.Parameter):
            return None
        if any(isinstance(x, torch.Generator) for x in (*args, *(kwargs or {}).values())):
            raise NotImplementedError(
                f"{call_of(func).name} at {self.scope.name or 'the top level'} is given a torch.Generator, which a "
                f"compiled program would make and seed once. Give it numbers drawn before, or draw without one."
            )
        if call_of(func).body is not None:
            raise NotImplementedError(
                f"torch's {call_of(func).name} at {self.scope.name or 'the top level'} is given functions, whose "
                f"operations a compiled program of an emulated model cannot hold. Use Python's own `if` and `while`."
            )
        args, kwargs = self._standing_in(args), self._standing_in(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def _standing_in(self, x: Any) -> Any:
        # A list, a closure or an object may hold the parameter itself. Without its stand-in, the program would treat
        # the parameter as a constant, which has no gradient.
        if type(x) is Tensor or type(x) is nn.Parameter:
            found = self.stand_ins.get(id(x))
            if found is None and x.requires_grad and not has_transform():
                raise NotImplementedError(
                    f"A forward of a compiled program uses a tensor of shape {tuple(x.shape)} that requires a gradient "
                    f"and is neither an input nor one of the model's parameters and buffers: it would be a constant, "
                    f"and get no gradient. Give it to the forward as an argument, or register it as a parameter."
                )
            return x if found is None else found
        if type(x) in (list, tuple):
            return type(x)(map(self._standing_in, x))
        return {name: self._standing_in(y) for name, y in x.items()} if type(x) is dict else x
