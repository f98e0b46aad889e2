"""Traces of a model's step: each torch call, its module, its gradient, and the calls whose results it reads.

A trace works on a plain model, a model under autocast and a quantised model, and changes none of their numbers.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fpsim.border import require_result
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import LOOK_UPS, Action, Call, call_of
from fpsim.emulation.casts import CAST_NAMES
from fpsim.emulation.entering import run_entered, take_off_leftovers
from fpsim.emulation.scope import Listeners, make_scope
from fpsim.policies.policy import Policy
from fpsim.torch_internals import current_graph_task, is_compiled_wrapper
from fpsim.torch_modes import (
    CALL_SLOT,
    call_inside,
    has_transform,
    hooked,
    is_sample,
    module_called,
    push_mode,
    take_off,
    watch_bodies,
    without_torch_function,
)
from fpsim.undoing import Undo, undone

__all__ = [
    "BACKWARD",
    "Around",
    "Edit",
    "Operation",
    "Trace",
    "Visitor",
    "around_calls",
    "not_around_calls",
    "who_is_around",
]

T = TypeVar("T")
TO_INTEGERS = frozenset("long int short char byte".split()) | CAST_NAMES  # if they are given such a dtype


class Operation:
    """A torch call whose result is a floating-point tensor; or a parameter (no call).

    site: the module's name and the operation, "blocks.0.widen:linear". The second linear in one call of the module has
        "blocks.0.widen:linear_1". A parameter has its name. Each call of a module has the same sites.
    module: the module's name; "" for the model itself and for code outside of it, such as a step that calls its parts.
    name: the operation's name; "parameter" for a parameter.
    call: the number of earlier calls of this site.
    index: the position of the torch call in the trace, equal in each run of a step; -1 for a parameter.
    caller: the module that called `module`.
    computes: whether the operation computes values; views, copies and selections return values of their operands.
    sources: for each operand, in the order of the arguments, the operation that made it; None if it is from outside.
    parents: the sources without None, each once.
    children: the operations that read its result.
    """

    __slots__ = tuple("call caller children computes index module name notes parents site sources".split())

    def __init__(
        self, site: str, module: str, name: str, call: int, computes: bool, sources: list[Operation | None]
    ) -> None:
        self.site, self.module, self.name, self.call, self.computes = site, module, name, call, computes
        self.index, self.caller = -1, ""
        self.sources, self.parents = sources, [*dict.fromkeys(s for s in sources if s is not None)]
        self.children: list[Operation] = []
        self.notes: dict[str, Any] = {}  # of the visitor
        for parent in self.parents:
            parent.children.append(self)

    def __repr__(self) -> str:
        return f"Operation({self.site!r})"

    @property
    def origin(self) -> Operation:
        """The operation that computed these values: this operation, or the one at the start of its chain of views."""
        at = self
        while not at.computes and len(at.parents) == 1 and at.parents[0].name != "parameter":
            at = at.parents[0]
        return at

    def all_behind(self) -> dict[int, Operation]:
        """Return this operation and all operations that it depends on, directly or not, by id."""
        return _reached(self, "parents")

    def all_ahead(self) -> dict[int, Operation]:
        """Return this operation and all operations that depend on its result, directly or not, by id."""
        return _reached(self, "children")


def _reached(start: Operation, way: str) -> dict[int, Operation]:
    known, waiting = dict[int, Operation](), [start]
    while waiting:
        at = waiting.pop()
        if id(at) not in known:
            known[id(at)] = at
            waiting += getattr(at, way)
    return known


class Visitor(Protocol):
    """Receives the operations of a trace."""

    def forward(self, operation: Operation, operands: list[Tensor], result: Tensor) -> None:
        """Visit the result of an operation; operands are the floating-point tensors among its arguments."""

    def backward(self, operation: Operation, gradient: Tensor) -> None:
        """Visit a gradient that reached the result of an operation, or a parameter."""


BACKWARD = (Tensor.backward, torch.autograd.backward)
Edit = Callable[[int, Call, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Trace:
    """Trace of the calls of `model`, and, within `run`, of calls of its parts and of code outside, such as the loss.

    model: any module.
    visitor: receives each operation.
    emulated: whether the model is quantised.
    verb: the name of the public function that traces, for messages.
    is_due: called at each call of the model; returns whether to trace it. None traces all calls of one thread.
    is_part_due: the same for each call by which a step calls a part of the model directly.
    edit: runs each torch function instead of the trace, to try the effect of another argument or dtype.
    on_call: receives the arguments of each traced call of the model, and its result.
    needs_numbers: whether a result that is meta or fake is an error.
    keeps: returns whether the visitor needs the values of an operand that a call is about to write to.
    on_backward: runs `Tensor.backward` and `torch.autograd.backward`, instead of the trace.
    on_integers: receives the operation whose result a call casts to integers, and the integers.
    arguments: the arguments of the visited call, with the values that the call read.
    running: the name of the running function.
    """

    def __init__(
        self,
        model: nn.Module,
        visitor: Visitor,
        emulated: bool,
        verb: str,
        is_due: Callable[[], bool] | None = None,
        edit: Edit | None = None,
        on_call: Callable[[tuple[Any, ...], dict[str, Any], Any], None] | None = None,
        needs_numbers: bool = True,
        keeps: Callable[[Tensor], bool] | None = None,
        is_part_due: Callable[[], bool] | None = None,
    ) -> None:
        self.model, self.visitor, self.emulated, self.verb = model, visitor, emulated, verb
        self.is_due = self.claim if is_due is None else is_due
        self.is_part_due = self.claim if is_part_due is None else is_part_due
        self.edit, self.on_call, self.needs_numbers, self.keeps = edit, on_call, needs_numbers, keeps
        self._before: dict[int, Tensor] = {}  # copies of the running call's targets, by the operand's id
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._index, self.running = -1, ""
        self.operations: list[Operation] = []
        self.results = WeakTensorKeyDictionary()  # {tensor: the Operation that made it}
        self.inside = 0  # the calls of the model that are being traced
        self.is_installed = False
        self._frames: list[tuple[str, dict[str, int]]] = [("", {})]  # the modules that run, and their calls so far
        self._calls: dict[str, int] = {}
        self._take_names()
        self._hooks: list[Any] = []  # of parameters and other leaves, which live on
        self._inner: list[tuple[nn.Module, Around]] = []  # those inside of the model, while it runs
        self._owner: dict[str, threading.Thread] = {}  # whose calls are traced
        self._backward_threads: set[int] = set()  # in which gradients of results arrived
        self._has_warned = False
        self.on_backward: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.on_integers: Callable[[Operation, Tensor], None] | None = None
        self.is_alone = False  # whether it runs a step; no other thread may trace one meanwhile

    def install(self) -> None:
        """Trace the calls of the model until `remove`."""
        take_off_leftovers()
        try:
            self.is_installed = True
            around_calls(self.model, self._model_called)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Stop tracing, also within a running call; the visitor still receives pending gradients."""
        self.is_installed = False
        not_around_calls(self.model, self._model_called)
        self.clear()

    def run(self, step: Callable[[], T], sees_outside: bool = True) -> T:
        """Run `step` and return its result. If `sees_outside`, calls outside of the model are traced too."""

        def outside(undo: Undo) -> T:
            undo.by(self._end_inner)
            # A step may call the parts of a model one by one, as in `model.encode(x)` or `gan["d"](gan["g"](z))`. Each
            # part is traced like the model, under the part's name.
            self._begin_inner()
            if sees_outside:
                mode = _Outside(self)
                undo.by(mode.end)
                push_mode(mode)
            return step()

        return undone(outside)

    def install_alone(self) -> None:
        """Install for a step of this thread. Raises RuntimeError if another thread runs a step of this model."""
        self.claim()
        self.is_alone = True
        # The trace is installed before others are searched: if two threads begin at once, one finds the other's trace.
        self.install()
        for other in who_is_around(self.model):
            trace = getattr(other, "__self__", None)
            if trace is self:
                return
            if isinstance(trace, Trace) and trace.is_alone and trace.owner is not self.owner:
                self.remove()
                raise RuntimeError(
                    f"fpsim.{trace.verb} is running a step of this {type(self.model).__name__} in thread "
                    f"{trace.owner.name!r}, so fpsim.{self.verb} cannot run one in thread {self.owner.name!r}. Wait "
                    f"until it has ended, or use a copy of the model for each thread."
                )

    def _take_names(self) -> None:
        # References keep ids unique: `functional_call` lends the model tensors that die, and their ids may be reused.
        self._named = dict(self.model.named_parameters())
        self._names = {id(p): name for name, p in self._named.items()}

    def clear(self) -> None:
        """Drop the operations so far; the visitor still receives pending gradients of their results."""
        for hook in self._hooks:
            hook.remove()
        self.operations, self._calls, self._hooks = [], {}, []
        self.results = WeakTensorKeyDictionary()

    @property
    def is_replaced(self) -> bool:
        """True if the wrapper of the model's call was replaced, as by `model.compile()`."""
        return self.is_installed and self._model_called not in who_is_around(self.model)

    # One thread

    @property
    def owner(self) -> threading.Thread:
        """The thread whose calls are traced."""
        return self._owner["thread"]

    def claim(self, and_warn: bool = True) -> bool:
        """True if this thread's calls are traced: the first thread that calls this is traced as long as it lives."""
        thread = threading.current_thread()
        if self._owner.setdefault("thread", thread) is thread:
            return True
        if not self.owner.is_alive():
            self._owner["thread"] = thread
            return True
        if and_warn and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"fpsim.{self.verb} sees the calls that come from one thread, {self.owner.name!r}. Those from "
                f"{thread.name!r} are left out. Use a copy of the model, and a {self.verb} of its own, for each "
                f"thread.",
                stacklevel=2,
            )
        return False

    # The model's calls

    def _model_called(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_installed:
            return call(*args, **kwargs)
        if self.inside and self.claim(and_warn=False):  # the model calls itself
            return self._in_frame("", call, args, kwargs)
        if not self.is_due():
            return call(*args, **kwargs)
        return self._entered("", call, args, kwargs)

    def _entered(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The emulation's mode is pushed first, below the trace's mode, which then sees results after they are rounded.
        # The policy here rounds nothing outside of modules.
        if self.emulated:
            scope = make_scope("", Policy(), Listeners())
            return run_entered(scope, self._traced, (name, call, args, kwargs), {})
        return self._traced(name, call, args, kwargs)

    def _traced(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def traced(undo: Undo) -> Any:
            undo.by(partial(self._end_call, self._frames[:1], len(self._inner)))
            self._begin_inner()
            self._take_names()  # again: parameters may have been replaced
            self.inside, self._frames = 1, [*self._frames, (name, {})]
            mode = _Inside(self)
            undo.by(mode.end)
            push_mode(mode)
            out = call(*args, **kwargs)
            if self.on_call is not None and self.is_installed and not name:
                with without_torch_function():
                    self.on_call(args, kwargs, out)
            return out

        return undone(traced)

    def _end_call(self, frames: list[tuple[str, dict[str, int]]], inner: int) -> None:
        self.inside, self._frames = 0, frames
        self._end_inner(inner)

    def _begin_inner(self) -> None:
        known = {id(inner) for inner, _ in self._inner}
        for name, inner in self.model.named_modules():  # a call that is not traced runs nothing around them
            if inner is not self.model and id(inner) not in known and not is_compiled_wrapper(inner):
                around = partial(self._inner_called, name)
                self._inner.append((inner, around))
                around_calls(inner, around)

    def _end_inner(self, kept: int = 0) -> None:
        while len(self._inner) > kept:
            not_around_calls(*self._inner[-1])
            self._inner.pop()

    def _inner_called(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (self.is_installed and self.claim(and_warn=False)):
            return call(*args, **kwargs)
        if self.inside:
            return self._in_frame(name, call, args, kwargs)
        # Within a backward pass, a checkpoint recomputes operations that were already traced in the forward pass.
        if current_graph_task() >= 0 or not self.is_part_due():
            return call(*args, **kwargs)
        return self._entered(name, call, args, kwargs)

    def _in_frame(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frames, size = self._frames, len(self._frames)
        try:
            frames.append((name, {}))
            return call(*args, **kwargs)
        finally:
            del frames[size:]

    # Their operations

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and show the visitor its result."""
        kind = call_of(func)
        if kind.action is Action.PASS:
            if self.on_backward is not None and func in BACKWARD:
                return self.on_backward(func, args, kwargs)
            return func(*args, **kwargs)
        # Inside of vmap, tensors have no numbers that could be read.
        if has_transform() and any(map(is_sample, tensors_in((*args, *kwargs.values())))):
            return func(*args, **kwargs)
        operands = [*_floats_in((*args, *(x for name, x in kwargs.items() if name != "out")))]
        sources = {id(x): self._origin(x) for x in operands}
        written = [*_floats_in(tuple(kind.written(args, kwargs)))]
        self.running = kind.name
        before = self._before_writes(operands, written)
        self._index = index = self._index + 1
        out = func(*args, **kwargs) if self.edit is None else self.edit(index, kind, func, args, kwargs)
        known = {*sources}.difference(map(id, written))
        is_sampled = has_transform()
        for i, x in enumerate(_floats_in((out,))):
            if not kind.in_place and id(x) in known:
                continue
            if id(x) in self._names:  # an initialisation or an update is not part of a step
                continue
            if is_sampled and is_sample(x):  # random numbers that differ between samples
                continue
            read = args, kwargs
            if kind.action is Action.FOREACH:  # the i-th result is of the i-th tensors
                read = _of_each(i, args, kwargs)
                operands = [*_floats_in((*read[0], *read[1].values()))]
            self._before = before
            self.arguments = (_mapped(read[0], self.read), _mapped(read[1], self.read)) if before else read
            self._note(index, kind, [sources[id(y)] for y in operands], operands, x)
            self.arguments, self._before = ((), {}), {}
        if self.on_integers is not None and kind.name in TO_INTEGERS and operands and isinstance(out, Tensor):
            source = sources[id(operands[0])]
            if source is not None and not (out.is_floating_point() or out.dtype is torch.bool):
                with without_torch_function():
                    self.on_integers(source, out)
        return out

    @property
    def place(self) -> str:
        """Label of the running function: the name of its module, and its own name."""
        return f"{self._frames[-1][0]}:{self.running}"

    def read(self, x: Tensor) -> Tensor:
        """Return the values that an operand had when the visited call read it."""
        return self._before.get(id(x), x)

    def _before_writes(self, operands: list[Tensor], written: list[Tensor]) -> dict[int, Tensor]:
        """Return copies of the operands that share memory with the target of a write, by id."""
        if self.keeps is None:
            return {}
        with without_torch_function():
            memory = {x.untyped_storage().data_ptr() for x in written if id(x) not in self._names}
            if not memory:
                return {}
            shared = [x for x in operands if x.untyped_storage().data_ptr() in memory and self.keeps(x)]
            return {id(x): x.detach().clone() for x in shared}

    def _origin(self, x: Tensor) -> Operation | None:
        operation = self.results.get(x)
        if operation is None and (name := self._names.get(id(x))) is not None:
            operation = self.results[x] = Operation(name, name.rpartition(".")[0], "parameter", 0, False, [])
            if x.requires_grad:
                with without_torch_function():
                    self.hook(x, partial(self._came, operation))
        return operation

    def _note(
        self, index: int, kind: Call, sources: list[Operation | None], operands: list[Tensor], result: Tensor
    ) -> None:
        module, counts = self._frames[-1]
        name, computes = kind.name, kind.action is Action.COMPUTE or kind.name in LOOK_UPS
        seen = counts[name] = counts.get(name, -1) + 1
        site = f"{module}:{name}_{seen}" if seen else f"{module}:{name}"
        call = self._calls[site] = self._calls.get(site, -1) + 1
        operation = Operation(site, module, name, call, computes, sources)
        operation.index, operation.caller = index, self._frames[-2][0] if len(self._frames) > 1 else ""
        self.operations.append(operation)
        self.results[result] = operation
        with without_torch_function():  # another trace may lie below
            if self.needs_numbers:
                require_result(result, f"The result of {site}", self.verb)
            self.visitor.forward(operation, operands, result)
            if result.requires_grad:
                self.hook(result, partial(self._came, operation))

    def hook(self, x: Tensor, hook: Callable[[Tensor], Any]) -> None:
        """Register a hook for the gradient of `x`. A leaf outlives the trace: `clear` removes its hook."""
        if x.is_leaf:
            hooked(x, hook, self._hooks)
        else:
            x.register_hook(hook)

    def _came(self, operation: Operation, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        thread = threading.get_ident()
        if operation.name != "parameter":
            self._backward_threads.add(thread)
        # This gradient comes from another thread's backward pass through the same parameter.
        elif gradient.device.type == "cpu" and thread not in (self.owner.ident, *self._backward_threads):
            return
        self.visitor.backward(operation, gradient.detach())


class _Inside(TorchFunctionMode):
    """Mode above the emulation that sees calls inside of the model: their operands unrounded, their results rounded.

    has_ended: whether the call is over. If the mode is then still on torch's stack, `take_off_leftovers` removes it.
    """

    _fpsim_sees_bodies = True  # torch_modes.SEES_BODIES

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        watch_bodies()
        self.trace, self.has_ended = trace, False

    def end(self) -> None:
        """Take the mode off torch's stack."""
        self.has_ended = True
        take_off(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.has_ended or not self.trace.is_installed:
            return func(*args, **(kwargs or {}))
        body = call_of(func).body
        if body is not None:
            with self:
                return body(*args, **(kwargs or {}))
        return self.trace.call(func, args, kwargs or {})


class _Outside(_Inside):
    """Mode that sees the calls outside of the model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.trace.inside:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _of_each(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the i-th element of each list among the arguments, and every other argument unchanged."""

    def pick(value: Any) -> Any:
        return value[i] if isinstance(value, list | tuple) and i < len(value) else value

    return tuple(map(pick, args)), {name: pick(value) for name, value in kwargs.items()}


def _mapped(value: Any, read: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a nested value in which `read` has replaced each tensor."""
    if isinstance(value, Tensor):
        return read(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, read) for v in value)
    return {k: _mapped(v, read) for k, v in value.items()} if type(value) is dict else value


def _floats_in(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        for x in tensors_in(value):
            if x.is_floating_point() and x.layout is torch.strided:
                yield x


# Wrappers around a module's call, which can also run code after the call raises. They are in this package because
# `casts` skips the package's frames when it searches for the calling code.

# A wrapper runs a call: around(call, args, kwargs) returns call(*args, **kwargs).
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Surrounded:
    """A module's call with its wrappers. Copies of the module are called without the wrappers.

    arounds: the wrappers, the outermost last.
    before: the value of the module's attribute `CALL_SLOT` before the first wrapper was added.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.arounds: list[Around] = []
        self.before: Callable[..., Any] | None = getattr(module, CALL_SLOT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.module()
        module = module_called() or own
        assert module is not None
        # The called module is a shallow copy, such as a replica of nn.DataParallel.
        if module is not own:
            return call_inside(module)(*args, **kwargs)
        call = call_inside(module) if self.before is None else self.before
        for around in (*self.arounds,):
            call = partial(_run, around, call)
        return call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _run(around: Around, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return around(call, args, kwargs)


def around_calls(module: nn.Module, around: Around) -> None:
    """Add `around` as the outermost wrapper of the calls of `module`; `not_around_calls` removes it."""
    attributes = vars(module)
    # The loop repeats, because another thread may remove the attribute meanwhile.
    while True:
        surrounded = attributes.setdefault(CALL_SLOT, _Surrounded(module))
        if not isinstance(surrounded, _Surrounded):
            surrounded = attributes[CALL_SLOT] = _Surrounded(module)
        if around not in surrounded.arounds:
            surrounded.arounds.append(around)
        if attributes.get(CALL_SLOT) is surrounded:
            return


def not_around_calls(module: nn.Module, around: Around) -> None:
    """Remove the wrapper `around` from the calls of `module`, if it is there."""
    attributes = vars(module)
    surrounded = attributes.get(CALL_SLOT)
    if not isinstance(surrounded, _Surrounded):
        return
    if around in surrounded.arounds:
        surrounded.arounds.remove(around)
    if not surrounded.arounds:
        if surrounded.before is None:
            attributes.pop(CALL_SLOT, None)
        else:
            attributes[CALL_SLOT] = surrounded.before


def who_is_around(module: nn.Module) -> list[Around]:
    """Return the wrappers of the calls of `module`, in the order in which they were added."""
    surrounded = vars(module).get(CALL_SLOT)
    return [*surrounded.arounds] if isinstance(surrounded, _Surrounded) else []
