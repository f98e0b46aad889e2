"""The model's own code that runs in the backward pass, of autograd Functions and of hooks: it computes in the format.

A Function is given operands in their formats, as any operation is, so that it saves numbers of the format, and the
gradient of its result is rounded where it arrives. What its `backward` computes then is emulated call by call. A result
that depends on the incoming gradient is an error, any other one an activation. What it returns is the gradient of an
operand, and is rounded where that one arrives, by the role and the scale of that place; it is handed over as it was
before it was rounded here, for no gradient is rounded twice.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.aliases import Aliases, note_write
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import SHAPE_OF_OTHERS, Action, Call, call_of, known_calls
from fpsim.emulation.conversions import DTYPE_OF, dtype_of
from fpsim.emulation.marks import (
    WIDE,
    ByIdentity,
    format_of,
    is_marked_wide,
    is_roundable,
    is_state,
    is_view_of_weight,
    is_weight,
    mark,
    mark_as_view_of_weight,
    mark_like,
    mark_of,
    mark_wide,
    writes_to,
)
from fpsim.emulation.mode import Emulation, TracedEmulation
from fpsim.emulation.operands import Rounds
from fpsim.emulation.scope import BACKWARD, Scope, active, in_backward
from fpsim.tensors.autograd import round_differentiably
from fpsim.tensors.expressions import round_here_, round_traced
from fpsim.tensors.launch import round_memory_, to_float64
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import base_of, is_traced, share_storage
from fpsim.torch_modes import (
    function_like,
    has_transform,
    is_plain,
    modes,
    push_mode,
    take_off,
    watch_functions,
    without_torch_function,
)

__all__ = ["OwnCode", "is_of_a_model", "run_in_backward", "watch_own_code"]

_LIKE = "_fpsim_like"  # of a Function: the class that is applied in its place
_WARNED = "_fpsim_warned"  # of a Function
_CODE = "_fpsim_code"  # of a context: the OwnCode that it belongs to
_SAVED = "_fpsim_saved"  # of a context: what was known of the tensors that it saves
_BEFORE = "_fpsim_before"  # of an error: what it was before it was rounded, and the writes to it until then
_NO_MODELS = ("torch", "fpsim", "ada_loss")

RunIn = Callable[[Emulation, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
_run_in: RunIn


@cache
def watch_own_code(run_in: RunIn) -> None:
    """From here on, what a forward pass of an emulation leaves to its backward pass is emulated there.

    run_in: enters a mode, calls a function with these arguments, and leaves the mode.
    """
    global _run_in
    _run_in = run_in
    watch_functions(_apply)
    known_calls[Tensor.register_hook] = _HookCall(Tensor.register_hook)


class OwnCode:
    """A piece of the model's own code, as the forward pass met it, and where that was.

    site: its name among the operations of the module; its results are rounded there.
    takes_wide: of each argument, whether it is float32 on purpose.
    gives_wide: the same of each result.
    has_weights: whether a weight is among the arguments.
    scale: gives the scale at which dy enters the products, where no role rounds it before; else None.
    """

    __slots__ = (
        "aliases", "asks", "gives_wide", "has_names", "has_weights", "names", "output", "scale", "scope", "site",
        "stand_ins", "takes_wide",
    )  # fmt: skip

    def __init__(
        self,
        scope: Scope,
        name: str,
        has_names: bool,
        aliases: Aliases | None = None,
        names: Iterable[torch.dtype] = (),
    ) -> None:
        self.scope, self.site = scope, scope.site(name)
        self.aliases, self.has_names, self.names = aliases, has_names, {*names}
        self.stand_ins = active.stand_ins
        self.takes_wide: list[bool] = []
        self.gives_wide: list[bool] = []
        self.has_weights = False
        self.scale: Callable[[Tensor, bool], Tensor | None] | None = None
        self.output, self.asks = None, False  # as of a ProductCall, where its results are rounded

    @classmethod
    def met_by(cls, emulation: Emulation, name: str) -> OwnCode:
        """The code of this name, where a forward pass is now."""
        return cls(emulation.scope, name, emulation.has_names, emulation.aliases, emulation.names)

    @property
    def label(self) -> str:
        """Its name in the sites of what it computes in the backward pass."""
        return self.site.removeprefix(f"{self.scope.name}:")


def is_of_a_model(code: Any) -> bool:
    """Whether a Function or a hook is a model's own: not of torch, whose Functions are operations, nor of ours."""
    while isinstance(code, partial):
        code = code.func
    return str(getattr(code, "__module__", "")).partition(".")[0] not in _NO_MODELS


def run_in_backward(
    code: OwnCode, run: Callable[..., Any], gradients: Any, is_given_back: bool, adds_depth: bool = False
) -> Any:
    """`run()` under emulation, in the thread that runs the backward pass.

    gradients: those that it is given, in a tuple or a list.
    is_given_back: whether its results are the gradients of arguments, which are rounded where they arrive.
    adds_depth: whether it opens a block of autocast of its own, which says nothing.
    """
    kind = BackwardCode if code.stand_ins is None else _TracedBackwardCode
    emulation = kind(code, adds_depth)
    try:
        return _run_in(emulation, emulation.computed, (run, gradients, is_given_back), {})
    finally:
        emulation.activations.errors = emulation.errors.errors = None  # a cycle would keep every tensor


class BackwardCode(Emulation):
    """The mode in which such code runs.

    activations, errors: the scopes of calls without and with a tensor that depends on the incoming gradient.
    log2_scale: at which the results of the call that runs are rounded, if they are errors; None for 1.
    """

    def __init__(self, code: OwnCode, adds_depth: bool) -> None:
        self.activations = in_backward(code.scope, code.label, self, False)
        self.errors = in_backward(code.scope, code.label, self, True)
        self.errors.counts = self.activations.counts
        Emulation.__init__(self, self.activations, code.aliases, code.has_names)
        self.names |= code.names
        self.autocast_depth += adds_depth
        self.code, self.stand_ins = code, code.stand_ins or {}
        self.has_weights = code.has_weights
        self.log2_scale: Tensor | None = None
        self._known: ByIdentity[tuple[Tensor | None]] = ByIdentity()  # errors, with their scales
        self._scale_of_products: Tensor | None = None

    def computed(self, run: Callable[..., Any], gradients: Any, is_given_back: bool) -> Any:
        """What `run()` returns."""
        with without_torch_function():
            for x in tensors_in(gradients):
                self._begin(x)
        out = run()
        if not is_given_back:
            return out
        with without_torch_function():
            if type(out) is tuple:
                return tuple(self._given_back(x, i) for i, x in enumerate(out))
            return self._given_back(out, 0)

    def _begin(self, gradient: Tensor) -> None:
        known = mark_of(gradient)
        self._note(gradient, None if known is None else known[2])
        if self.code.scale is not None:
            self._scale_of_products = self.code.scale(gradient, False)

    def _given_back(self, x: Any, i: int) -> Any:
        """The gradient of the i-th argument: unrounded, but for one of float32, whose place rounds nothing."""
        if not isinstance(x, Tensor) or self.code.takes_wide[i : i + 1] == [True]:
            return x
        before = _before(x)
        return x if before is None else before

    # Which tensors depend on the incoming gradient

    def _note(self, x: Tensor, log2_scale: Tensor | None) -> None:
        self._known[x] = (log2_scale,)

    def _error(self, x: Tensor) -> tuple[Tensor | None] | None:
        """The scale of an error, in a tuple; None for any other tensor."""
        if not self._known.held:
            return None
        found = self._known.get(x)
        base = base_of(x) if found is None else None
        return found if base is None else self._known.get(base)

    def among(self, operands: tuple[Any, ...]) -> dict[int, Tensor]:
        """The errors among these, by id."""
        return {id(x): x for x in tensors_in(operands) if self._error(x) is not None}

    def scale_of_products(self) -> Tensor | None:
        """log2 of the scale at which an error enters a product."""
        return self.log2_scale if self._scale_of_products is None else self._scale_of_products

    # Calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == DTYPE_OF:
            return dtype_of(self, inspect.currentframe(), args[0])
        around, scale = self.scope, self.log2_scale
        if around is not self.activations and around is not self.errors:  # of a module that runs again
            return super().__torch_function__(func, types, args, kwargs)
        call, given = call_of(func), (args, tuple((kwargs or {}).values()))
        if call.name in SHAPE_OF_OTHERS or call.action is Action.CAST:
            given = args[:1]  # of the others it takes the shape or the dtype
        elif call.action is Action.LIKE:
            given = ()
        error = next((found for x in tensors_in(given) if (found := self._error(x)) is not None), None)
        self.scope, self.log2_scale = (self.activations, None) if error is None else (self.errors, error[0])
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        finally:
            self.scope, self.log2_scale = around, scale
        if error is not None or call.name == "grad":
            self._follow(func, call, args, kwargs or {}, out, None if error is None else error[0])
        return out

    def _follow(
        self, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        log2_scale: Tensor | None,
    ) -> None:  # fmt: skip
        """Note that the results of a call are errors, and what a view of an error was before it was rounded."""
        for x in tensors_in(out):
            if self._known.get(x) is None:  # else it has been rounded, at a scale of its own
                self._note(x, log2_scale)
        for x in tensors_in(call.written(args, kwargs)):
            self._note(x, log2_scale)
            if (base := base_of(x)) is not None:
                self._note(base, log2_scale)
        first = args[0] if args else None
        is_moved = (call.is_view or call.name == "clone") and isinstance(out, Tensor) and isinstance(first, Tensor)
        if not is_moved or out is first or any(True for _ in tensors_in((args[1:], tuple(kwargs.values())))):
            return
        before = _before(first)
        if before is not None:
            _keep_before(out, func(before, *args[1:], **kwargs))

    # Roundings

    def brought(self, x: Tensor, known: str | None, rounds: Rounds) -> Tensor:
        around = self.scope
        if around is not self.activations and around is not self.errors:
            return super().brought(x, known, rounds)
        error = self._error(x)
        if error is None:
            self.scope = self.activations
            try:
                return super().brought(x, known, rounds)
            finally:
                self.scope = around
        spec, was = self.errors.specs.activation, mark_of(x)
        if spec is None or rounds in (Rounds.NOTHING, Rounds.VIEWED) or (was is not None and was[0] == spec.text):
            return x
        if was is not None and was[0] == WIDE and rounds.leaves(x, WIDE):
            return x
        return self._rounded(x, spec, error[0])

    def new_operand(self, x: Tensor) -> Tensor:
        error, spec = self._error(x), self.errors.specs.activation
        if error is None or self.scope is not self.errors:
            return super().new_operand(x)
        return x if spec is None else self._rounded(x, spec, error[0])

    def _rounded(self, x: Tensor, spec: RoundingSpec, log2_scale: Tensor | None) -> Tensor:
        """An error, rounded in memory of its own; it knows what it was before."""
        if spec.is_float32:
            return x
        if is_traced(x) and not torch.is_grad_enabled():
            result = round_traced(x, spec)
        else:
            result = round_differentiably(x, spec, log2_scale)
        mark(result, spec.text, log2_scale)
        self._note(result, log2_scale)
        before = _before(x)
        _keep_before(result, x if before is None else before)
        return result

    def round_result(
        self, out: Tensor, call: Call, operands: tuple[Any, ...], floats: list[Tensor], target: Any,
        product: Any = None, is_now: bool = False,
    ) -> Tensor:  # fmt: skip
        spec = self.errors.specs.activation
        if self.scope is not self.errors or not is_roundable(out):
            return super().round_result(out, call, operands, floats, target, product, is_now)
        if spec is None or spec.is_float32:
            return out
        is_target = target is not None and (out is target or any(out is x for x in tensors_in(target)))
        if not is_target and any(share_storage(out, x) for x in floats):
            self.carry_marks(out, floats, None, None)
            return out
        listeners, site = self.scope.listeners, self.scope.site(call.name) if product is None else product.site
        observer = None if listeners.observer is None else listeners.watching(site, "error")
        before, result, log2_scale = out, out, self.log2_scale
        if not is_target:
            if listeners.scaling is not None and is_plain(out):
                log2_scale = listeners.scaling(site, "error", spec, BACKWARD, (log2_scale,), out)(out, False)
            result = self._rounded(out, spec, log2_scale)
        else:
            before = out if observer is None else out.detach().clone()
            self._round_memory_(out, spec)
        if observer is not None:
            shown = [x.detach() for x in (before, result)]
            if log2_scale is not None:
                shown = [to_float64(x, log2_scale) for x in shown]
            observer(site, "error", *shown, spec)
        return result

    def _round_memory_(self, x: Tensor, spec: RoundingSpec) -> None:
        """Round what was written to an error, where it is."""
        if is_plain(x):
            round_memory_(x, spec, None, self.log2_scale)
            mark(x, spec.text, self.log2_scale)
        elif is_traced(x):
            round_here_(x, spec)
            mark(x, spec.text)
        else:
            x.copy_(round_differentiably(x, spec, self.log2_scale))

    def _is_narrow(self, x: Tensor) -> bool:
        if self._error(x) is None:
            return super()._is_narrow(x)
        known = mark_of(x)
        return known is not None and known[0] != WIDE


class _TracedBackwardCode(BackwardCode, TracedEmulation):
    """The same where torch.compile makes a program of the backward pass."""


def _before(x: Tensor) -> Tensor | None:
    """What an error was before it was rounded, if nothing was written to it since."""
    kept = vars(x).get(_BEFORE)
    return kept[0] if kept is not None and kept[1] == writes_to(x) else None


def _keep_before(x: Tensor, before: Tensor) -> None:
    if not has_transform():
        vars(x)[_BEFORE] = (before, writes_to(x))


# autograd Functions


class _Running(threading.local):
    code: OwnCode | None = None  # of the Function that is applied in this thread


_running = _Running()


def _apply(apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cls.apply(*args, **kwargs)`."""
    emulation: Emulation | None = active.emulation
    if emulation is None or not is_of_a_model(cls) or vars(cls).get(_LIKE) is cls:
        return apply(cls, *args, **kwargs)
    scope = emulation.scope
    if scope.rounds_nothing or (emulation.step is not None and emulation.step.is_running(scope)):
        return apply(cls, *args, **kwargs)
    if not any(mode is emulation for mode in modes()):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            _warn_of_one_operation(cls, scope)
        return apply(cls, *args, **kwargs)
    code, around = OwnCode.met_by(emulation, cls.__name__), (scope.is_in_step, scope.made, _running.code)
    with without_torch_function():
        given = tuple(_given(emulation, x) for x in args)
        versions = [writes_to(y) if y is not x else None for x, y in zip(args, given, strict=True)]
        code.takes_wide = [isinstance(x, Tensor) and is_marked_wide(x) for x in given]
        code.has_weights = any(isinstance(x, Tensor) and is_view_of_weight(x) for x in given)
    try:
        scope.is_in_step, _running.code = scope.is_in_step or torch.is_grad_enabled(), code
        scope.made = made = None if scope.listeners.scaling is None else ByIdentity()
        out = apply(_like(cls), *given, **kwargs)
    finally:
        scope.is_in_step, scope.made, _running.code = around
    with without_torch_function():
        for x, y, version in zip(args, given, versions, strict=True):
            if version is not None and writes_to(y) != version:
                with torch.no_grad():
                    x.data.copy_(y)
                note_write(emulation, x)
        made_of = None if made is None else made.get
        outputs = out if type(out) is tuple else (out,)
        results = [_result(emulation, code, x, given, i, made_of) for i, x in enumerate(outputs)]
    return tuple(results) if type(out) is tuple else results[0]


def _warn_of_one_operation(cls: type, scope: Scope) -> None:
    """Warn, once for each class, where a Function is a part of what the mode takes for one operation."""
    if not vars(cls).get(_WARNED, False):
        setattr(cls, _WARNED, True)
        warnings.warn(
            f"The autograd Function {cls.__name__} was applied inside of another operation at "
            f"{scope.name or 'the top level'}. Its forward and its backward compute in float32, and what the operation "
            f"gives is rounded. Apply it in a forward of the model.",
            stacklevel=5,
        )


def _given(emulation: Emulation, x: Any) -> Any:
    """An argument of a Function: in its format, and with the attributes of the parameter that it is a copy of."""
    if not isinstance(x, Tensor) or not is_roundable(x) or is_state(x) or emulation.leaves_raw(x):
        return x
    copy = emulation.operand(x, Rounds.ALL_BUT_WIDE)
    if copy is not x and (is_view_of_weight(x) or emulation.scope.stands_in(x)):
        mark_as_view_of_weight(copy)
        for name, value in vars(x).items():
            if not name.startswith("_fpsim"):
                vars(copy).setdefault(name, value)
    return copy


def _result(
    emulation: Emulation, code: OwnCode, x: Any, given: tuple[Any, ...], i: int, made_of: Callable[[Tensor], Any] | None
) -> Any:
    """A result of a Function: its gradient is rounded where it arrives, and its numbers are, if they were not yet.

    made_of: the operation that gave a result of the forward, and its operands: what a product sends, a scaling knows.
    """
    is_wide = isinstance(x, Tensor) and is_marked_wide(x)
    code.gives_wide.append(is_wide)
    if not isinstance(x, Tensor) or is_wide or not is_roundable(x):
        return x
    if isinstance(emulation, BackwardCode) and emulation.among((x,)):
        return x
    known, site = _format_of_numbers(x), f"{code.site}.{i}" if i else code.site
    made = (made_of(x) if made_of is not None else None) or (_BORDER.name, given)
    if known is None or not (is_plain(x) or is_traced(x)):
        if any(isinstance(y, Tensor) and (x is y or share_storage(x, y)) for y in given):
            return x  # a view of an argument, which is rounded where it is used
        x = emulation.round_result(x, _BORDER, given, [], None, code)  # type: ignore[arg-type]
    elif x.requires_grad:
        mark(x, known)
        emulation.hook(x, site, *made)
    if x.requires_grad:
        _ask_for_scale(emulation.scope, code, x, made, site)
    return x


def _format_of_numbers(x: Tensor) -> str | None:
    """The format of the numbers of a result, whether its gradient has its place already or not."""
    known = getattr(x, "_fpsim", None)
    return known[0] if known and known[2] is None and known[1] == writes_to(x) else None


def _ask_for_scale(scope: Scope, code: OwnCode, x: Tensor, made: tuple[str, tuple[Any, ...]], site: str) -> None:
    """Ask the scaling for the scale of dy as an operand of products, where no role has asked for that of the result."""
    scaling = scope.listeners.scaling
    if scaling is None or scope.products is None or scope.specs.error is not None:
        return
    dy = [pair[0] for pair in (scope.products.specs.dgrad, scope.products.specs.wgrad)]
    spec = next((s for o in dy if o is not None and isinstance(s := o.spec(), RoundingSpec)), None)
    if spec is not None:
        code.scale = scaling(site, "error", spec, *made, x)


class _Border:
    """A Function where its results are rounded, as of a Call."""

    name, has_pole, chooses_inside = "function", False, False


_BORDER: Any = _Border()


def _like(cls: Any) -> Any:
    """The class that is applied in the place of a Function."""
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
    adds_depth = hasattr(ctx, "_fwd_used_autocast")  # torch.amp.custom_bwd switches it as it was
    return run_in_backward(code, partial(backward, ctx, *gradients), gradients, True, adds_depth)


def _wide(gradient: Tensor) -> Tensor:
    """The gradient of what is float32 on purpose, which is so too; the tensor itself may be that of others."""
    gradient = gradient.view_as(gradient)
    mark_wide(gradient)
    return gradient


class _Context:
    """Of the contexts of Functions: what they save is known again, where autograd gives back other tensors."""

    def save_for_backward(self, *tensors: Any) -> None:
        with without_torch_function():
            setattr(self, _SAVED, [_known_of_weight(x) for x in tensors])
        super().save_for_backward(*tensors)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> Any:
        with _aside():  # a checkpoint runs its forward again for them
            tensors = super().saved_tensors  # type: ignore[misc]
        with without_torch_function():
            for x, known in zip(tensors, getattr(self, _SAVED, ()), strict=False):
                if x is not None and known is not None and not is_weight(x):
                    mark_as_view_of_weight(x)
                    if known and format_of(x) is None:
                        mark_like(x, known)
        return tensors


def _known_of_weight(x: Tensor | None) -> str | None:
    """The format of what is a weight, or a view or a copy of one; None for any other tensor."""
    return format_of(x) or "" if isinstance(x, Tensor) and is_view_of_weight(x) else None


@contextmanager
def _aside() -> Iterator[None]:
    """A block in which the mode of a backward pass is off."""
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
    """`x.register_hook(hook)` in a forward pass: the hook computes in the format, but for that of a parameter."""

    __slots__ = ()

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        emulation: Emulation | None = active.emulation
        x = args[0]
        hook = args[1] if len(args) > 1 else kwargs.get("hook")
        is_left = isinstance(x, nn.Parameter) or not is_roundable(x) or not (callable(hook) and is_of_a_model(hook))
        if emulation is None or is_left or emulation.scope.rounds_nothing:
            return super().__call__(function, args, kwargs)
        code = OwnCode.met_by(emulation, "hook")
        code.gives_wide = [is_marked_wide(x)]
        return function(x, _Hook(code, hook))


class _Hook:
    """A hook of a tensor. What it returns is no operand's gradient that is rounded elsewhere: it is rounded here."""

    def __init__(self, code: OwnCode, hook: Callable[[Tensor], Any]) -> None:
        self.code, self.hook = code, hook

    def __call__(self, gradient: Tensor) -> Any:
        if active.emulation is not None:
            return self.hook(gradient)
        given = _wide(gradient) if self.code.gives_wide[0] else gradient
        return run_in_backward(self.code, partial(self.hook, given), (given,), False)
