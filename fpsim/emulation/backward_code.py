"""Emulation of a model's own code in the backward pass: the code of autograd Functions and of hooks.

A result that depends on the incoming gradient has the role error; any other result has the role activation. The
gradient that a Function returns for an operand is rounded where it arrives, with the role and the scale of the operand.
No gradient is rounded twice: the Function passes on the values that the gradient had before it was rounded here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fpsim.emulation.aliases import Aliases
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.backward import show_at_scale
from fpsim.emulation.calls import SHAPE_OF_OTHERS, Action, Call, call_of
from fpsim.emulation.conversions import DTYPE_OF, dtype_of
from fpsim.emulation.marks import (
    WIDE,
    ByIdentity,
    format_of,
    is_roundable,
    mark,
    mark_of,
    writes_to,
)
from fpsim.emulation.mode import Emulation, TracedEmulation
from fpsim.emulation.operands import Rounds
from fpsim.emulation.scope import BACKWARD, Scope, active, in_backward
from fpsim.tensors.autograd import round_differentiably, with_values
from fpsim.tensors.expressions import round_here_, round_traced
from fpsim.tensors.launch import round_memory_
from fpsim.tensors.spec import RoundingSpec
from fpsim.torch_internals import base_of, is_traced, share_storage
from fpsim.torch_modes import (
    has_transform,
    is_plain,
    without_torch_function,
)

__all__ = ["BackwardCode", "CopyOfArgument", "OwnCode", "RunIn", "is_of_a_model", "run_in_backward", "run_modes_by"]

_BEFORE = "_fpsim_before"  # of an error: its values before rounding, and the number of writes to it then
_NO_MODELS = ("torch", "fpsim", "ada_loss")

# The argument, the number of writes to it when the Function's forward ended, and the copy.
CopyOfArgument = tuple[TensorWeakRef, int, TensorWeakRef]
RunIn = Callable[[Emulation, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
_run_in: RunIn


def run_modes_by(run_in: RunIn) -> None:
    """Set the function that enters a mode, calls a given function, and leaves the mode."""
    # `entering` sets it, because it imports this file: this file cannot import `entering`, too.
    global _run_in
    _run_in = run_in


class OwnCode:
    """State of the forward pass at a piece of the model's own code.

    site: the code's name among the operations of the module; results are rounded at this site.
    takes_wide: for each argument, whether it is float32 on purpose.
    gives_wide: the same for each result.
    copies: the rounded copies of arguments that a Function was given. The references are weak: a Function that needs a
        copy keeps the copy alive.
    has_weights: whether a weight is among the arguments.
    is_island: whether the code computes in float32, because autocast is switched off.
    scale: function that returns the scale at which dy enters the products, if no role rounds dy before; else None.
    """

    __slots__ = (
        "aliases", "asks", "copies", "gives_wide", "has_names", "has_weights", "is_island", "names", "output", "scale",
        "scope", "site", "stand_ins", "takes_wide",
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
        self.copies: list[CopyOfArgument] = []
        self.has_weights = self.is_island = False
        self.scale: Callable[[Tensor, bool], Tensor | None] | None = None
        self.output, self.asks = None, False  # as of a ProductCall, where its results are rounded

    @classmethod
    def met_by(cls, emulation: Emulation, name: str) -> OwnCode:
        """Return the state for code of this name at the current position of a forward pass."""
        return cls(emulation.scope, name, emulation.has_names, emulation.aliases, emulation.names)

    @property
    def label(self) -> str:
        """Name of the code in the sites of its backward pass."""
        return self.site.removeprefix(f"{self.scope.name}:")


def is_of_a_model(code: Any) -> bool:
    """True if a Function or hook is a model's own, and not this project's or torch's. torch's are operations."""
    while isinstance(code, partial):
        code = code.func
    return str(getattr(code, "__module__", "")).partition(".")[0] not in _NO_MODELS


def run_in_backward(
    code: OwnCode, run: Callable[..., Any], gradients: Any, is_given_back: bool, adds_depth: bool = False
) -> Any:
    """Call `run()` under emulation, in the thread that runs the backward pass.

    gradients: the incoming gradients, in a tuple or a list.
    is_given_back: whether the results of `run` are the gradients of arguments, which are rounded where they arrive.
    adds_depth: whether `run` opens a block of autocast that is not in the model's code.
    """
    kind = BackwardCode if code.stand_ins is None else _TracedBackwardCode
    emulation = kind(code, adds_depth)
    try:
        return _run_in(emulation, emulation.computed, (run, gradients, is_given_back), {})
    finally:
        # This breaks a cycle that would keep every tensor of the pass alive until the garbage collector runs.
        emulation.activations.errors = emulation.errors.errors = None


class BackwardCode(Emulation):
    """Mode in which a model's own code runs in the backward pass.

    activations: the scope of calls in which no tensor depends on the incoming gradient.
    errors: the scope of all other calls.
    log2_scale: log2 of the scale at which the results of the running call are rounded, if they are errors; None for a
        scale of 1.
    """

    def __init__(self, code: OwnCode, adds_depth: bool) -> None:
        self.activations = in_backward(code.scope, code.label, self, False)
        self.errors = in_backward(code.scope, code.label, self, True)
        # Both scopes share a counter: two calls of an operation get two names, also if only one computes an error.
        self.errors.counts = self.activations.counts
        Emulation.__init__(self, self.activations, code.aliases, code.has_names)
        self.names |= code.names
        self.autocast_depth += adds_depth - code.is_island
        self.code, self.stand_ins = code, code.stand_ins or {}
        self.has_weights = code.has_weights
        self.log2_scale: Tensor | None = None
        self._known: ByIdentity[tuple[Tensor | None]] = ByIdentity()  # errors, with their scales
        self._scale_of_products: Tensor | None = None
        self._copies: ByIdentity[tuple[Tensor, bool]] = ByIdentity()  # of arguments of the Function
        for copy in code.copies:
            self.know_copy(copy, copy[2]())

    def know_copy(self, copy: CopyOfArgument, now: Tensor | None) -> None:
        """Use `now` as the copy of an argument. If the argument was written to, use only the graph node of `now`."""
        argument = copy[0]()
        if argument is not None and now is not None:
            self._copies[argument] = (now, writes_to(argument) == copy[1])

    def computed(self, run: Callable[..., Any], gradients: Any, is_given_back: bool) -> Any:
        """Record the incoming gradients as errors, call `run()`, and return its results."""
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
        """Return the gradient of the i-th argument before it was rounded here."""
        # The gradient of a float32 argument is not rounded where it arrives, so that it keeps its rounding from here.
        if not isinstance(x, Tensor) or self.code.takes_wide[i : i + 1] == [True]:
            return x
        before = _before(x)
        return x if before is None else before

    # Which tensors depend on the incoming gradient

    def _note(self, x: Tensor, log2_scale: Tensor | None) -> None:
        self._known[x] = (log2_scale,)

    def _error(self, x: Tensor) -> tuple[Tensor | None] | None:
        """Return the scale of an error, in a tuple; None for any other tensor."""
        if not self._known.held:
            return None
        found = self._known.get(x)
        # A view of an error is an error, whether a call made it under this mode or not.
        base = base_of(x) if found is None else None
        return found if base is None else self._known.get(base)

    def among(self, operands: tuple[Any, ...]) -> dict[int, Tensor]:
        """Return the errors among these operands, by id."""
        return {id(x): x for x in tensors_in(operands) if self._error(x) is not None}

    def scale_of_products(self) -> Tensor | None:
        """Return log2 of the scale at which an error enters a product."""
        return self.log2_scale if self._scale_of_products is None else self._scale_of_products

    # Calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == DTYPE_OF:
            return dtype_of(self, inspect.currentframe(), args[0])
        around, scale = self.scope, self.log2_scale
        # In any other scope a checkpoint recomputes a module: its calls belong to a forward pass.
        if around is not self.activations and around is not self.errors:
            return super().__torch_function__(func, types, args, kwargs)
        call = call_of(func)
        given: tuple[Any, ...] = (args, tuple((kwargs or {}).values()))
        # Operations that take only the shape or the dtype of an error compute no error.
        if call.name in SHAPE_OF_OTHERS or call.action is Action.CAST:
            given = args[:1]
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
        """Record that the results of a call are errors, and record the unrounded values of results that are views."""
        for x in tensors_in(out):
            # A result that is already recorded was rounded at a scale of its own.
            if self._known.get(x) is None:
                self._note(x, log2_scale)
        for x in tensors_in(call.written(args, kwargs)):
            self._note(x, log2_scale)
            if (base := base_of(x)) is not None:
                self._note(base, log2_scale)
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not isinstance(out, Tensor) or out is first:
            return
        is_moved = call.is_view or call.name == "clone"
        if not is_moved or any(True for _ in tensors_in((args[1:], tuple(kwargs.values())))):
            return
        # Take the same view of the unrounded values: a Function often reshapes the gradient that it returns.
        before = _before(first)
        if before is not None:
            _keep_before(out, func(before, *args[1:], **kwargs))

    # Roundings

    def brought(self, x: Tensor, known: str | None, rounds: Rounds) -> Tensor:
        result = self._brought(x, known, rounds)
        found = self._copies.get(x) if result is not x and result.requires_grad else None
        if found is None:
            return result
        # A Function may ask autograd for gradients of its arguments, or of saved tensors. The copy that its forward got
        # is a node between these and the loss; another copy would not be part of that graph.
        own, has_numbers = found
        known = format_of(result)
        if has_numbers and format_of(own) == known:
            return own
        result = with_values(own, result, None, None)
        if known is not None:
            mark(result, known)
        return result

    def _brought(self, x: Tensor, known: str | None, rounds: Rounds) -> Tensor:
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
        """Round an error out of place, and keep its unrounded values."""
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
        # A write in place is rounded in place, at the scale of the incoming gradient. A new result gets a scale of its
        # own, if a scaling chooses one.
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
            show_at_scale(observer, site, "error", before.detach(), result.detach(), spec, log2_scale)
        return result

    def _round_memory_(self, x: Tensor, spec: RoundingSpec) -> None:
        """Round the numbers written to an error, in place."""
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
    """`BackwardCode` while torch.compile traces a program of the backward pass."""


def _before(x: Tensor) -> Tensor | None:
    """Return the values of an error before it was rounded; None if the error was written to since."""
    kept = vars(x).get(_BEFORE)
    return kept[0] if kept is not None and kept[1] == writes_to(x) else None


def _keep_before(x: Tensor, before: Tensor) -> None:
    if not has_transform():
        vars(x)[_BEFORE] = (before, writes_to(x))
