"""Emulation of a model's autograd Functions, and of the hooks that it registers on tensors, in both passes.

A Function gets its operands in their formats, as any operation does, so that it saves numbers of the format. The
gradient of its result is rounded where it arrives. The Function is applied through a subclass, whose contexts mark
saved tensors, and whose `backward` runs in a separate mode: see `backward_code`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fpsim.emulation.aliases import Alias, note_write
from fpsim.emulation.backward_code import (
    BackwardCode,
    CopyOfArgument,
    OwnCode,
    RunIn,
    is_of_a_model,
    run_in_backward,
    run_modes_by,
)
from fpsim.emulation.calls import Call, known_calls
from fpsim.emulation.marks import (
    OF_A_WEIGHT,
    WIDE,
    ByIdentity,
    format_of,
    is_marked_wide,
    is_roundable,
    is_state,
    is_view_of_weight,
    is_weight,
    mark,
    mark_as_state,
    mark_as_view_of_weight,
    mark_as_weight,
    mark_like,
    mark_of,
    mark_wide,
    writes_to,
)
from fpsim.emulation.mode import Emulation
from fpsim.emulation.operands import Rounds
from fpsim.emulation.scope import Scope, active
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import base_of, is_traced, share_storage
from fpsim.torch_modes import (
    function_like,
    is_plain,
    modes,
    push_mode,
    take_off,
    watch_functions,
    without_torch_function,
)

__all__ = ["watch_own_code"]

_LIKE = "_fpsim_like"  # of a Function: the class that is applied instead
_WARNED = "_fpsim_warned"  # of a Function
_CODE = "_fpsim_code"  # of a context: the OwnCode that it belongs to
_SAVED = "_fpsim_saved"  # of a context: the marks of its saved tensors


@cache
def watch_own_code(run_in: RunIn) -> None:
    """Patch torch, once in a process, to emulate the code that an emulated forward pass leaves to the backward pass.

    run_in: function that enters a mode, calls a given function, and leaves the mode.
    """
    run_modes_by(run_in)
    watch_functions(_apply)
    known_calls[Tensor.register_hook] = _HookCall(Tensor.register_hook)


class _Running(threading.local):
    code: OwnCode | None = None  # of the Function that is applied in this thread


_running = _Running()


def _apply(apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `cls.apply(*args, **kwargs)`, emulated if the Function is a model's."""
    emulation: Emulation | None = active.emulation
    if emulation is None or not is_of_a_model(cls) or vars(cls).get(_LIKE) is cls:
        return apply(cls, *args, **kwargs)
    scope = emulation.scope
    if scope.rounds_nothing or (emulation.step is not None and emulation.step.is_running(scope)):
        return apply(cls, *args, **kwargs)
    # The mode is off while it computes an operation. This Function is then a part of the operation, whose result is
    # rounded.
    if not any(mode is emulation for mode in modes()):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            _warn_of_one_operation(cls, scope)
        return apply(cls, *args, **kwargs)
    code, around = OwnCode.met_by(emulation, cls.__name__), (scope.is_in_step, scope.made, _running.code)
    with without_torch_function():
        # A Function in float32 gets its arguments as they are. For any other Function, rounded copies are recorded with
        # their originals.
        code.is_island = emulation.leaves_raw(x for x in args if isinstance(x, Tensor) and is_roundable(x))
        given = args if code.is_island else tuple(_given(emulation, x) for x in args)
        versions = [writes_to(y) if y is not x else None for x, y in zip(args, given, strict=True)]
        code.copies = [
            (TensorWeakRef(x), writes_to(x), TensorWeakRef(y)) for x, y in zip(args, given, strict=True) if y is not x
        ]
        code.takes_wide = [isinstance(x, Tensor) and is_marked_wide(x) for x in given]
        code.has_weights = any(isinstance(x, Tensor) and is_view_of_weight(x) for x in given)
    try:
        scope.is_in_step, _running.code = scope.is_in_step or torch.is_grad_enabled(), code
        scope.made = made = None if scope.listeners.scaling is None else ByIdentity[Any]()
        # Around the forward a tracer runs torch's own operations, such as those that save a result.
        with nullcontext() if code.stand_ins is None else without_torch_function():
            out = apply(_like(cls), *given, **kwargs)
    finally:
        scope.is_in_step, scope.made, _running.code = around
    with without_torch_function():
        # A forward that wrote to its argument wrote to the rounded copy: its numbers go to the argument's memory.
        for x, y, version in zip(args, given, versions, strict=True):
            if version is not None and writes_to(y) != version:
                alias = emulation.aliases.of(x)
                with torch.no_grad():
                    (x if alias is None else alias.memory(x)).data.copy_(y)
                note_write(emulation, x)
        code.copies = [
            (argument, version if x is None else writes_to(x), copy)
            for argument, version, copy in code.copies
            for x in [argument()]
        ]
        made_of = None if made is None else made.get
        outputs = out if type(out) is tuple else (out,)
        results = [_result(emulation, code, x, given, i, made_of) for i, x in enumerate(outputs)]
        for x in results:
            if isinstance(x, Tensor) and base_of(x) is not None:
                _know_memory(emulation, x, args, given)
    return tuple(results) if type(out) is tuple else results[0]


def _warn_of_one_operation(cls: type, scope: Scope) -> None:
    """Warn, once for each class, of a Function inside of a call that the mode treats as one operation."""
    if not vars(cls).get(_WARNED, False):
        setattr(cls, _WARNED, True)
        warnings.warn(
            f"The autograd Function {cls.__name__} was applied inside of another operation at "
            f"{scope.name or 'the top level'}. Its forward and its backward compute in float32, and the operation's "
            f"result is rounded. Apply it in a forward of the model.",
            stacklevel=5,
        )


def _given(emulation: Emulation, x: Any) -> Any:
    """Return an argument of a Function in its format. A copy of a parameter gets the parameter's attributes."""
    if not isinstance(x, Tensor) or not is_roundable(x) or is_state(x):
        return x
    copy = emulation.operand(x, Rounds.ALL_BUT_WIDE)
    alias = emulation.aliases.of(x)
    if copy is x and alias is not None and alias.is_of_copy and (is_plain(x) or is_traced(x)):
        # The Function gets a view of the copy: its forward runs without a graph, where views of `x` itself would be
        # views of the parameter's own memory.
        copy = x.view_as(x)
        if (known := format_of(x)) is not None:
            mark_like(copy, known)
    if copy is not x and (is_view_of_weight(x) or emulation.scope.stands_in(x)):
        mark_as_view_of_weight(copy)
        # Attributes with a leading underscore are torch's or ours, and are left out. One of them would turn a stand-in
        # into a parameter.
        for name, value in vars(x).items():
            if not name.startswith("_"):
                vars(copy).setdefault(name, value)
    return copy


def _result(
    emulation: Emulation, code: OwnCode, x: Any, given: tuple[Any, ...], i: int, made_of: Callable[[Tensor], Any] | None
) -> Any:
    """Return a result of a Function, rounded if it is not rounded yet; its gradient is rounded where it arrives.

    made_of: function that returns the operation in the forward that made a result, and its operands. From these a
        scaling predicts the gradient that a product passes on.
    """
    if isinstance(x, Tensor) and is_traced(x):
        _know_as_argument(x, given, emulation.scope)
    is_wide = isinstance(x, Tensor) and is_marked_wide(x)
    code.gives_wide.append(is_wide)
    if not isinstance(x, Tensor) or is_wide or not is_roundable(x):
        return x
    # A Function may be applied in a backward pass: its errors are rounded as errors already.
    if isinstance(emulation, BackwardCode) and emulation.among((x,)):
        return x
    known, site = _format_of_numbers(x), f"{code.site}.{i}" if i else code.site
    made = (made_of(x) if made_of is not None else None) or (_BORDER.name, given)
    if known is None or not (is_plain(x) or is_traced(x)):
        # A view of an argument, or of a parameter's own memory, is rounded where it is used.
        if _argument_of(x, given) is not None or emulation.aliases.of(x) is not None:
            return x
        x = emulation.round_result(x, _BORDER, given, [], None, code)  # type: ignore[arg-type]
    elif x.requires_grad:
        mark(x, known)
        emulation.hook(x, site, *made)
    if x.requires_grad:
        _ask_for_scale(emulation.scope, code, x, made, site)
    return x


def _argument_of(x: Tensor, given: tuple[Any, ...]) -> Tensor | None:
    """Return the argument that a result is, or is a view of; None for a new tensor."""
    return next((y for y in given if isinstance(y, Tensor) and (x is y or share_storage(x, y))), None)


def _know_memory(emulation: Emulation, x: Tensor, args: tuple[Any, ...], given: tuple[Any, ...]) -> None:
    """If `x` is a view of an argument's copy, record the part of the argument's memory to which writes to `x` go."""
    if not is_plain(x):
        return
    for argument, copy in zip(args, given, strict=True):
        if copy is argument or not share_storage(x, copy) or emulation.aliases.of(x) is not None:
            continue
        known = emulation.aliases.of(argument)
        memory = argument if known is None else known.memory(argument)
        # The view is described by size, strides and offset, which hold for the argument's memory if it is laid out
        # like the copy.
        if is_plain(memory) and memory.dtype is x.dtype and memory.stride() == copy.stride():
            place = x.size(), x.stride(), x.storage_offset() - copy.storage_offset() + memory.storage_offset()
            base = argument if known is None else known.base
            emulation.aliases.add(x, Alias(base, own=partial(memory.detach().as_strided, *place)))


def _know_as_argument(x: Tensor, given: tuple[Any, ...], scope: Scope) -> None:
    """Copy an argument's marks to the result that returns it, because a tracer makes a new tensor for the result."""
    of = _argument_of(x, given)
    if of is None or x is of:
        return
    if is_state(of):
        mark_as_state(x)
    elif is_weight(of) or scope.stands_in(of):
        mark_as_weight(x)
    elif is_view_of_weight(of):
        mark_as_view_of_weight(x)
    known = format_of(of)
    if known is not None and mark_of(x) is None:
        mark_like(x, known)


def _format_of_numbers(x: Tensor) -> str | None:
    """Return the format of the numbers of a result, or None."""
    # `format_of` cannot be used: the forward ran without a graph, so that its marks do not cover the gradient.
    known = getattr(x, "_fpsim", None)
    return known[0] if known and known[2] is None and known[1] == writes_to(x) else None


def _ask_for_scale(scope: Scope, code: OwnCode, x: Tensor, made: tuple[str, tuple[Any, ...]], site: str) -> None:
    """Ask the scaling for the scale of dy as an operand of products, if no role rounds the gradient of the result."""
    scaling = scope.listeners.scaling
    if scaling is None or scope.products is None or scope.specs.error is not None:
        return
    dy = [pair[0] for pair in (scope.products.specs.dgrad, scope.products.specs.wgrad)]
    spec = next((s for o in dy if o is not None and isinstance(s := o.spec(), RoundingSpec)), None)
    if spec is not None:
        code.scale = scaling(site, "error", spec, *made, x)


class _Border:
    """Stand-in for a Call, with which results of a Function are rounded."""

    name, has_pole, chooses_inside = "function", False, False


_BORDER: Any = _Border()


def _like(cls: Any) -> Any:
    """Return the class that is applied instead of a Function."""
    # In the class that is made, the attribute `_LIKE` is the class itself, so that `_apply` does not wrap it again.
    made = vars(cls).get(_LIKE)
    if made is None:
        made = function_like(cls, _begin, _backward, _Context)
        setattr(cls, _LIKE, made)
        setattr(made, _LIKE, made)
    return made


def _begin(ctx: Any) -> None:
    setattr(ctx, _CODE, _running.code)


def _backward(backward: Callable[..., Any], ctx: Any, gradients: tuple[Any, ...]) -> Any:
    code: OwnCode | None = getattr(ctx, _CODE, None)
    if code is None or active.emulation is not None:
        return backward(ctx, *gradients)
    if any(code.gives_wide):
        gradients = tuple(
            _wide(g) if isinstance(g, Tensor) and is_wide else g
            for g, is_wide in zip(gradients, code.gives_wide, strict=False)
        )
    # torch.amp.custom_bwd opens a block of autocast around the backward, which restores the setting of the forward.
    adds_depth = hasattr(ctx, "_fwd_used_autocast")
    return run_in_backward(code, partial(backward, ctx, *gradients), gradients, True, adds_depth)


def _wide(gradient: Tensor) -> Tensor:
    """Return the gradient of a tensor that is float32 on purpose, and mark it as such."""
    # A view is marked, because others may hold the gradient itself, for which the mark is wrong.
    gradient = gradient.view_as(gradient)
    mark_wide(gradient)
    return gradient


class _Context:
    """Base of the contexts of Functions. It marks saved tensors again, as autograd returns new tensors for them."""

    def save_for_backward(self, *tensors: Any) -> None:
        with without_torch_function():
            code: OwnCode | None = getattr(self, _CODE, None)
            copies = {} if code is None else {id(copy[2]()): i for i, copy in enumerate(code.copies)}
            scope = None if code is None else code.scope
            setattr(self, _SAVED, [(_known_of_saved(x, scope), copies.get(id(x))) for x in tensors])
        super().save_for_backward(*tensors)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> Any:
        # A checkpoint recomputes its forward here, and this code does not belong to the backward pass.
        with _aside():
            tensors = super().saved_tensors  # type: ignore[misc]
        with without_torch_function():
            code: OwnCode | None = getattr(self, _CODE, None)
            for x, (known, i) in zip(tensors, getattr(self, _SAVED, ()), strict=False):
                copy = None if code is None or i is None else code.copies[i]
                if copy is not None and copy[2]() is x:
                    _require_unwritten(copy)
                # Hooks of saved tensors returned another tensor.
                elif copy is not None and isinstance(active.emulation, BackwardCode):
                    active.emulation.know_copy(copy, x)
                if x is None or known is None:
                    continue
                if known == WIDE:
                    mark_wide(x)
                elif known == OF_A_WEIGHT:
                    mark_as_weight(x)
                elif not is_weight(x):
                    mark_as_view_of_weight(x)
                    if known and format_of(x) is None:
                        mark_like(x, known)
        return tensors


def _require_unwritten(copy: CopyOfArgument) -> None:
    """Raise torch's error if a saved tensor was written to; torch sees no write, as the Function saved a copy."""
    x = copy[0]()
    if x is not None and is_plain(x) and not x.is_inference() and writes_to(x) != copy[1]:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {[*x.shape]}] is at version {writes_to(x)}; expected version {copy[1]} instead. An autograd "
            f"Function saved a copy of it in its format. Write to it after the backward pass, or save a clone."
        )


def _known_of_saved(x: Tensor | None, scope: Scope | None) -> str | None:
    """Return the mark to restore on a saved tensor: float32 on purpose, or of a weight, its view or copy; else None."""
    # A weight without a format is saved without a copy, and so is its view, for which autograd returns another tensor.
    if not isinstance(x, Tensor):
        return None
    if is_weight(x) or (scope is not None and is_traced(x) and scope.stands_in(x)):
        return OF_A_WEIGHT
    return WIDE if is_marked_wide(x) else format_of(x) or "" if is_view_of_weight(x) else None


@contextmanager
def _aside() -> Iterator[None]:
    """Switch the mode of a backward pass off inside of the block."""
    emulation: Any = active.emulation
    if not isinstance(emulation, BackwardCode):
        yield
        return
    active.emulation = None
    take_off(emulation)
    try:
        yield
    finally:
        push_mode(emulation)
        active.emulation = emulation


# Hooks


class _HookCall(Call):
    """`x.register_hook(hook)` in a forward pass: the hook computes in the format, unless `x` is a parameter."""

    __slots__ = ()

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        emulation: Emulation | None = active.emulation
        x = args[0]
        hook: Any = args[1] if len(args) > 1 else kwargs.get("hook")
        # Hooks of parameters see the gradient as the optimizer does, in float32.
        is_left = isinstance(x, nn.Parameter) or not is_roundable(x) or not (callable(hook) and is_of_a_model(hook))
        if emulation is None or is_left or emulation.scope.rounds_nothing:
            return super().__call__(function, args, kwargs)
        code = OwnCode.met_by(emulation, "hook")
        code.gives_wide, code.is_island = [is_marked_wide(x)], emulation.leaves_raw((x,))
        return function(x, _Hook(code, hook))


class _Hook:
    """Tensor hook of a model. Its result is rounded here, because no later hook of this package rounds the result."""

    def __init__(self, code: OwnCode, hook: Callable[[Tensor | None], Any]) -> None:
        self.code, self.hook = code, hook

    def __call__(self, gradient: Tensor | None) -> Any:
        # A Function may return None for a gradient.
        if active.emulation is not None or gradient is None:
            return self.hook(gradient)
        given = _wide(gradient) if self.code.gives_wide[0] else gradient
        return run_in_backward(self.code, partial(self.hook, given), (given,), False)
