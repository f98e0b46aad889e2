"""A trace: each torch call of a model's step, with the calls that it reads from, the module it is in, and its gradient.

It sees a plain model, one under autocast, and a quantised one, and changes none of their numbers.
"""

# In this folder, because `casts` looks for the code that called past the frames of this folder.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import LOOK_UPS, Action, call_of
from fpsim.emulation.entering import entered
from fpsim.emulation.scope import Listeners, make_scope
from fpsim.policy import Policy
from fpsim.torch_internals import is_compiled_wrapper

__all__ = ["Operation", "Trace", "Visitor"]


class Operation:
    """One torch call that gave a tensor of floating-point numbers; or a parameter, which nothing gave.

    site: "blocks.0.widen:linear", the module's name and the operation, the second one of a module call ":linear_1"; the
        name of a parameter. A module that is called again has the sites of its first call.
    module: its name; "" for the model itself and for what is outside of it.
    name: the operation's name; "parameter" for a parameter.
    call: how many calls of this site came before.
    computes: whether it computes its values; views, copies and selections give values that went in.
    sources: what gave each operand, in the order of its arguments; None for what came from outside.
    parents: the same without None, each once.
    children: those that read its result.
    """

    __slots__ = ("call", "children", "computes", "module", "name", "notes", "parents", "site", "sources")

    def __init__(
        self, site: str, module: str, name: str, call: int, computes: bool, sources: list[Operation | None]
    ) -> None:
        self.site, self.module, self.name, self.call, self.computes = site, module, name, call, computes
        self.sources, self.parents = sources, [*dict.fromkeys(s for s in sources if s is not None)]
        self.children: list[Operation] = []
        self.notes: dict[str, Any] = {}  # of the visitor
        for parent in self.parents:
            parent.children.append(self)

    def __repr__(self) -> str:
        return f"Operation({self.site!r})"


class Visitor(Protocol):
    """Sees the operations of a trace."""

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        """An operation gave a result; operands are the tensors of floating-point numbers among its arguments."""

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        """A gradient came to the result of an operation, or to a parameter."""


class Trace:
    """Traces the calls of `model`, and with `everything` those outside of it too, such as the loss.

    model: any module.
    visitor: is told of each operation.
    emulated: whether the model is quantised.
    is_due: asked at each call of the model, whether to trace it.
    """

    def __init__(
        self, model: nn.Module, visitor: Visitor, emulated: bool, is_due: Callable[[], bool] = lambda: True
    ) -> None:
        self.model, self.visitor, self.emulated, self.is_due = model, visitor, emulated, is_due
        self.operations: list[Operation] = []
        self.results = WeakTensorKeyDictionary()  # {tensor: the Operation that gave it}
        self.inside = 0  # the calls of the model that are being traced
        self._frames: list[tuple[str, dict[str, int]]] = [("", {})]  # the modules that run, and their calls so far
        self._calls: dict[str, int] = {}
        self._entered: list[ExitStack | None] = []
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._hooks: list[Any] = []  # of parameters, which live on

    @contextmanager
    def installed(self, everything: bool = False) -> Iterator[Trace]:
        """Trace each call of the model that comes inside of the block."""
        with ExitStack() as stack:
            stack.callback(self.model.register_forward_pre_hook(self._enter).remove)
            stack.callback(self.model.register_forward_hook(self._leave, always_call=True).remove)
            stack.callback(self.clear)
            if everything:
                stack.enter_context(_Outside(self))
            yield self

    def clear(self) -> None:
        """Forget the operations so far; gradients of their results that are still to come are seen."""
        for hook in self._hooks:
            hook.remove()
        self.operations, self._calls, self._hooks = [], {}, []
        self.results = WeakTensorKeyDictionary()

    # The model's calls

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self.is_due():
            self._entered.append(None)
            return
        stack = ExitStack()
        self._entered.append(stack)
        if self.emulated:  # the mode of the emulation goes below this one, and rounds nothing outside of modules
            stack.enter_context(entered(make_scope("", Policy(), Listeners())))
        for name, inner in self.model.named_modules():  # a call that is not traced has no hooks to run
            if inner is not self.model and not is_compiled_wrapper(inner):
                stack.callback(inner.register_forward_pre_hook(partial(self._enter_module, name)).remove)
                stack.callback(inner.register_forward_hook(self._leave_module, always_call=True).remove)
        stack.enter_context(_Inside(self))
        self.inside += 1
        self._frames.append(("", {}))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        stack = self._entered.pop()
        if stack is not None:
            self._frames.pop()
            self.inside -= 1
            stack.close()

    def _enter_module(self, name: str, module: nn.Module, _: Any) -> None:
        self._frames.append((name, {}))

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        self._frames.pop()

    # Their operations

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and tell the visitor what it gave."""
        kind = call_of(func)
        if kind.action is Action.PASS:
            return func(*args, **kwargs)
        operands = [*_floats_in((*args, *kwargs.values()))]
        sources = [self._origin(x) for x in operands]
        out = func(*args, **kwargs)
        results = [*_floats_in((out,))]
        given = [x for x in results if kind.in_place or not any(x is y for y in operands)]
        given = [x for x in given if id(x) not in self._names]  # an initialisation or an update is no part of a step
        if given:
            self._note(kind.name, kind.action is Action.COMPUTE or kind.name in LOOK_UPS, sources, operands, given)
        return out

    def _origin(self, x: Tensor) -> Operation | None:
        found = self.results.get(x)
        if found is None and (name := self._names.get(id(x))) is not None:
            found = self.results[x] = Operation(name, name.rpartition(".")[0], "parameter", 0, False, [])
            if x.requires_grad:
                self._hooks.append(x.register_hook(partial(self._came, found)))
        return found

    def _note(
        self,
        name: str,
        computes: bool,
        sources: list[Operation | None],
        operands: list[Tensor],
        results: list[Tensor],
    ) -> None:
        module, counts = self._frames[-1]
        for result in results:
            seen = counts[name] = counts.get(name, -1) + 1
            site = f"{module}:{name}_{seen}" if seen else f"{module}:{name}"
            call = self._calls[site] = self._calls.get(site, -1) + 1
            operation = Operation(site, module, name, call, computes, sources)
            self.operations.append(operation)
            self.results[result] = operation
            self.visitor.forward(operation, operands, result)
            if result.requires_grad:
                result.register_hook(partial(self._came, operation))

    def _came(self, operation: Operation, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.visitor.backward(operation, gradient.detach())


class _Inside(TorchFunctionMode):
    """Sees the calls inside of the model, above the emulation: operands not yet rounded, results rounded."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.call(func, args, kwargs or {})


class _Outside(_Inside):
    """Sees the calls outside of the model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.trace.inside:
            return func(*args, **(kwargs or {}))
        return self.trace.call(func, args, kwargs or {})


def _floats_in(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        for x in tensors_in(value):
            if x.is_floating_point() and x.layout is torch.strided:
                yield x
