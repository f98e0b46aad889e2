"""What stands in a module's `forward`: runs the true one under the module's scope, and is found behind other wrappers.

Libraries wrap `forward` too. Some keep what they found there as an attribute of the module, some in a closure; some
take its `__func__` and bind that again, and take off one `__wrapped__` after the other to find the way back.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_module
from fpsim.emulation.entering import run_entered
from fpsim.emulation.marks import is_made_here, is_roundable, is_seen_from_outside, is_state, mark_as_state
from fpsim.emulation.operands import Rounds
from fpsim.emulation.scope import Listeners, Scope, active, make_scope
from fpsim.models.computed_weights import adopt, release
from fpsim.models.opened import open_objects
from fpsim.policies.policy import FEW_BITS, Policy, RoleSpecs, describe
from fpsim.policies.products import Products
from fpsim.torch_internals import (
    FORMER,
    called_module,
    compile_as_one,
    constant_under_compile,
    direct_parameters,
    held_by,
    is_traced,
    standing_in,
)

__all__ = ["EmulatedForward", "bound_elsewhere", "emulated_forward", "emulated_forwards", "install", "uninstall"]

_KEY = "_fpsim_forward"  # of the module's __dict__, where nobody else looks


class EmulatedForward:
    """Stands in for a module's `forward` and runs the true one under the module's scope.

    It looks like a bound method. It has no `__wrapped__`: who takes wrappers off ends here.

    policy: None once the model is dequantised. It is then still called by who wrapped it, and rounds nothing.
    inner: the `forward` that another library had put there, if any.
    wide: the operations whose results were float32 on purpose in the last call.
    """

    def __init__(self, module: nn.Module, name: str, policy: Policy, listeners: Listeners) -> None:
        self.module, self.name, self.listeners = module, name, listeners
        self.policy: Policy | None = policy
        self.inner = vars(module).get("forward")
        self._prepare()

    def _prepare(self) -> None:
        forward = self.true_forward(self.module)
        functools.update_wrapper(self, forward, updated=())  # bound: its signature has no self
        del self.__dict__["__wrapped__"]
        self.__code__ = getattr(forward, "__code__", None)  # torch.export asks where it is written
        try:
            self._signature: inspect.Signature | None = inspect.signature(forward)
        except (TypeError, ValueError):  # a builtin has none
            self._signature = None
        self._scopes = {False: make_scope(self.name, self.policy or Policy(), self.listeners)}
        self.wide: dict[str, None] = {}
        self.token = f"forward {next(_tokens)}"  # a program that torch.compile made is of one forward and its policy
        _forwards[self.token] = self
        _copies.discard(self)

    def renew(self, name: str, policy: Policy | None, listeners: Listeners) -> None:
        """Take other formats where it stands; None for a policy rounds nothing any more."""
        self.name, self.policy, self.listeners = name, policy, listeners
        self._prepare()

    def true_forward(self, module: nn.Module) -> Callable[..., Any]:
        """What `module.forward` would be without this: a method, a static one, or what a library put there."""
        if self.inner is not None:
            return self.inner  # type: ignore[no-any-return]
        for c in type(module).__mro__:
            if "forward" in vars(c):
                break
        of_class = vars(c)["forward"]
        return of_class.__get__(module) if hasattr(of_class, "__get__") else of_class  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("module", "name", "policy", "listeners", "inner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _copies.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedForward:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return duplicate

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__ or "_scopes" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._prepare()  # after a copy or a load, once the module is whole again
        return getattr(self, name)

    @property
    def scope(self) -> Scope:
        """The formats now: the scaling that is attached may want gradients of few bits rounded stochastically."""
        is_stochastic = self.listeners.rounds_few_bits_stochastically
        if is_stochastic not in self._scopes:
            policy = (self.policy or Policy()).with_stochastic_gradients(FEW_BITS)
            self._scopes[is_stochastic] = make_scope(self.name, policy, self.listeners)
        return self._scopes[is_stochastic]  # type: ignore[no-any-return]

    @property
    def specs(self) -> RoleSpecs:
        return self.scope.specs

    @property
    def products(self) -> Products | None:
        return self.scope.products

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> _UnboundForward:
        return _UnboundForward(self)

    @property
    def __signature__(self) -> inspect.Signature | None:
        """Asked by inspect.signature. No attribute of the instance: functools.wraps would give it to the wrapper."""
        return self._signature  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_dynamo_compiling():
            return self._call_under_dynamo(args, kwargs)
        if args and isinstance(args[0], nn.Module) and vars(args[0]).get(_KEY) is self:  # bound once more
            return self.run(args[0], args[1:], kwargs)
        if not torch.compiler.is_compiling():
            called = called_module()
            if called is not None and called is not module and vars(called).get(_KEY) is self:
                module = called  # a shallow copy, with attributes of its own
        return self.run(module, args, kwargs)

    def _call_under_dynamo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch.compile traces in the place of the true forward: one call, run as it is to make the program.

        The mode reads what the code says and marks tensors, which Dynamo cannot follow. So the emulation runs itself,
        on stand-ins, and what it computes is recorded, forward and backward.
        """
        if self.policy is None:
            return self.run(self.module, args, kwargs)
        listeners, is_inside = self.listeners, _prepare_for_dynamo()
        if is_inside or listeners.scaling is not None or listeners.observer is not None or _is_delayed(self.module):
            return _run_apart(self, args, kwargs)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        flags = [module.training for module in self.module.modules()]  # each becomes a condition of the program
        return _recorded_forward(self.token, tensors, flags, args, kwargs)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The true forward of `module` under its scope."""
        forward = self.true_forward(module)
        if self.policy is None:
            return forward(*args, **kwargs)
        self.wide = {}  # of this call, the last one
        known = self._scopes.get(self.listeners.rounds_few_bits_stochastically) or self.scope
        scope = known.again(_prepare_weights(module), self.wide)
        is_outermost = active.emulation is None
        has_names = self.listeners.has_names and scope.dtype is not None
        has_names = has_names and is_outermost and _dtype_of_model(module) is not scope.dtype
        out = run_entered(
            scope, functools.partial(_run_whole, forward) if is_outermost else forward, args, kwargs, has_names
        )
        return _driven(out, scope, has_names) if inspect.isgenerator(out) else out


def _run_whole(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a whole model, with what only moved of its inputs brought into the format."""
    return _in_format(active.emulation, forward(*args, **kwargs), (*args, *kwargs.values()))


def _dtype_of_model(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point parameter, as transformers' models say it."""
    for p in direct_parameters(module):
        if p.is_floating_point():
            return p.dtype
    return next((dtype for child in module.children() if (dtype := _dtype_of_model(child)) is not None), None)


def _in_format(emulation: Any, out: Any, given: tuple[Any, ...]) -> Any:
    if isinstance(out, Tensor):
        if is_made_here(out) or not is_roundable(out):
            return out
        is_moved = is_seen_from_outside(out) or any(out is x for x in given)
        return emulation.operand(out, Rounds.ALL) if is_moved else out
    if type(out) in (list, tuple):
        parts = [_in_format(emulation, x, given) for x in out]
        return type(out)(parts) if any(a is not b for a, b in zip(out, parts, strict=True)) else out
    return out


def _driven(generator: Generator[Any, Any, Any], scope: Scope, has_names: bool) -> Generator[Any, Any, Any]:
    """A forward that is a generator: each of its steps runs under the scope, and what calls it does not."""
    send, value = generator.send, None
    while True:
        try:
            given = run_entered(scope, send, (value,), {}, has_names)
        except StopIteration as end:
            return end.value
        try:
            value, send = (yield given), generator.send
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:
            value, send = error, generator.throw


def _is_delayed(model: nn.Module) -> bool:
    """Whether any operand inside of `model` takes its scale from earlier steps."""
    forwards = (vars(module).get(_KEY) for module in model.modules())
    return any(x is not None and x.products is not None and x.products.is_delayed for x in forwards)


_forwards: weakref.WeakValueDictionary[str, EmulatedForward] = weakref.WeakValueDictionary()  # by their tokens
_tokens = itertools.count()
_copies: weakref.WeakSet[EmulatedForward] = weakref.WeakSet()  # and what was loaded: not prepared yet


def _recorded_forward(token: str, tensors: dict[str, Tensor], flags: list[bool], args: Any, kwargs: Any) -> Any:
    """The forward known by `token`, with these tensors in the place of parameters and buffers; flags are conditions."""
    forward = _forwards[token]
    if tensors and not any(map(is_traced, tensors.values())):  # Dynamo gave up and calls it
        return forward.run(forward.module, args, kwargs)
    try:
        with standing_in(forward.module, tensors):
            out = forward.run(forward.module, args, kwargs)
        out, unknown = open_objects(out)
        if unknown is not None:
            raise NotImplementedError(
                f"Got a {unknown} in what the forward returns, which a compiled program cannot give to its caller. "
                f"Expected tensors and numbers in lists, tuples, dicts, pytrees and objects of plain Python, such as "
                f"transformers' DynamicCache. Return only those."
            )
    except Exception as error:  # what Dynamo says of it is that a type is unsupported
        warnings.warn(
            f"{type(forward.module).__name__} cannot be compiled as one program: {type(error).__name__}: {error} "
            f"Without fullgraph=True it runs as it does without a compiler.",
            stacklevel=2,
        )
        raise
    return out


_run_apart: Any = None  # once torch.compile has come to an emulated module


@constant_under_compile
def _prepare_for_dynamo() -> bool:
    """Ready the functions that torch.compile calls as they are. Returns whether the emulation is active already."""
    global _run_apart
    for forward in list(_copies):  # Dynamo cannot follow how
        forward._prepare()
    if _run_apart is None:
        compile_as_one(_recorded_forward)
        _run_apart = torch.compiler.disable(
            lambda forward, args, kwargs: forward.run(forward.module, args, kwargs),
            reason="an emulated module cannot be part of a compiled program while its gradients are scaled or it is "
            "observed, with delayed scaling, or inside of another emulated module that is not compiled. Expected: "
            "compile the whole quantised model, detach the scaling, leave the recording; or compile without "
            "fullgraph=True, and the module runs as it does without a compiler.",
        )
    return active.emulation is not None


class _UnboundForward:
    """As the `__func__` of a bound method: takes the module before its inputs, and may be bound to a copy of it."""

    def __init__(self, forward: EmulatedForward) -> None:
        functools.update_wrapper(self, forward, updated=())
        del self.__dict__["__wrapped__"]
        self._bound_signature = forward.__signature__

    @property
    def __signature__(self) -> inspect.Signature | None:
        if self._bound_signature is None:
            return None
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        return self._bound_signature.replace(parameters=[first, *self._bound_signature.parameters.values()])

    def __deepcopy__(self, memo: dict[int, Any]) -> _UnboundForward:
        return self  # as a function

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        emulated = vars(module).get(_KEY)
        return type(module).forward(module, *args, **kwargs) if emulated is None else emulated.run(module, args, kwargs)


def _prepare_weights(module: nn.Module) -> list[int]:
    """Adopt the weights that are computed around here, and know the buffers.

    Returns the ids of the plain tensors in the place of parameters: torch.func.functional_call puts them there.

    Asked of all modules whose weights may be used in the module's scope: its own, and those inside. Children too: an
    attention uses the weights of its last layer itself. What was added to the model after it was quantised runs under
    the scope around it, however deep.
    """
    plain_ids, waiting = [], [module]
    while waiting:
        m = waiting.pop()
        if m is None:
            continue
        parameters, buffers, children, hooks = held_by(m)
        if hooks or "parametrizations" in children:
            adopt(m)
        for b in buffers.values():
            if b is not None and not is_state(b):
                mark_as_state(b)
        for p in parameters.values() if FORMER not in vars(m) else direct_parameters(m):
            if type(p) is not nn.Parameter and p is not None and not isinstance(p, nn.Parameter):
                plain_ids.append(id(p))
        if m is module or _KEY not in vars(m):
            waiting += children.values()
    return plain_ids


class _EmulatedRepr:
    """Stands in for a module's `extra_repr` and adds what is rounded."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        own = type(self.module).extra_repr(self.module)
        emulated = vars(self.module)[_KEY]
        words = f"fpsim: {describe(emulated.specs, emulated.products)}"
        return f"{own}, {words}" if own else words


class _NoScript:
    """torch.jit.script asks a module for this, and calls it."""

    def __call__(self) -> Any:
        raise NotImplementedError(
            "torch.jit.script reached a quantised model, whose rounding TorchScript cannot express. Expected: "
            "torch.compile and torch.export. Script the model that fpsim.dequantize(model) gives."
        )


def install(module: nn.Module, name: str, policy: Policy, listeners: Listeners) -> None:
    """Have `module` run under its policy."""
    emulated = vars(module).get(_KEY)
    if emulated is not None and _is_reached(module, emulated):  # dequantised, and still called by who wrapped it
        emulated.renew(name, policy, listeners)
    else:
        emulated = EmulatedForward(module, name, policy, listeners)
        module.forward = emulated
        vars(module)[_KEY] = emulated
    module.extra_repr = _EmulatedRepr(module)  # type: ignore[method-assign]
    vars(module)["__prepare_scriptable__"] = _NoScript()
    adopt(module)


def uninstall(module: nn.Module) -> None:
    """Undo `install`, whoever wrapped the forward since."""
    attributes = vars(module)
    emulated = attributes[_KEY]
    for name, value in list(attributes.items()):
        if name == _KEY or not _is_ours(value, emulated):
            continue
        if name == "forward" and emulated.inner is None:
            del attributes[name]
        else:
            attributes[name] = emulated.true_forward(module)
    for name in ("extra_repr", "__prepare_scriptable__"):
        attributes.pop(name, None)
    release(module)
    if _is_reached(module, emulated):
        emulated.renew(emulated.name, None, emulated.listeners)
    else:
        del attributes[_KEY]


def emulated_forward(module: nn.Module) -> EmulatedForward | None:
    """What emulates this one module, behind whatever wrappers; None for a module that is not quantised."""
    emulated = vars(module).get(_KEY)
    return emulated if emulated is not None and emulated.policy is not None and _is_reached(module, emulated) else None


def emulated_forwards(model: nn.Module) -> Iterator[tuple[nn.Module, EmulatedForward]]:
    """The quantised modules inside of `model`, and what emulates them. Raises TypeError for what is not a module."""
    require_module(model)
    for module in model.modules():
        emulated = emulated_forward(module)
        if emulated is not None:
            yield module, emulated


def bound_elsewhere(model: nn.Module, originals: Iterable[nn.Module]) -> str | None:
    """The name of a module in a copy whose `forward` still runs one of the originals, if there is one."""
    known = {id(module) for module in originals}
    for name, module in model.named_modules():
        for layer in _layers(vars(module).get("forward")):
            if id(layer) in known or id(getattr(layer, "__self__", None)) in known:
                return name or type(module).__name__
    return None


def _is_reached(module: nn.Module, emulated: EmulatedForward) -> bool:
    """Whether a call of the module comes to `found`: it is `forward`, or inside of it, or kept by the module beside."""
    attributes = vars(module)
    kept = (value for name, value in attributes.items() if name != _KEY and not isinstance(value, nn.Module))
    return "forward" in attributes and any(_is_ours(layer, emulated) for value in kept for layer in _layers(value))


def _is_ours(layer: Any, emulated: EmulatedForward) -> bool:
    function = layer.__func__ if isinstance(layer, types.MethodType) else layer
    return function is emulated or isinstance(function, _UnboundForward)


def _layers(forward: Any) -> Iterator[Any]:
    """`forward`, and the functions that it may call: what it wraps, closes over, or keeps."""
    waiting, seen = [forward], set()
    while waiting:
        layer = waiting.pop()
        if not callable(layer) or isinstance(layer, type) or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if not isinstance(layer, EmulatedForward | nn.Module):
            waiting += _inside(layer)


def _inside(layer: Any) -> list[Any]:
    if isinstance(layer, types.MethodType):
        return [layer.__func__]
    if isinstance(layer, functools.partial):
        return [layer.func, *layer.args, *vars(layer).values()]
    cells = getattr(layer, "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells if cell != types.CellType()]
    return [*contents, *getattr(layer, "__dict__", {}).values()]
