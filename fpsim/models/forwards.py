"""Stand-in for a module's `forward`: it runs the true forward under the module's scope.

Other libraries wrap `forward` too, and fpsim has to find its stand-in behind their wrappers. Some libraries store the
former `forward` in an attribute of the module, and some in a closure. Some bind its `__func__` again, and follow
`__wrapped__` back to the original.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.backward_code import OwnCode, is_of_a_model, run_in_backward
from fpsim.emulation.caches import Stored, cache_use
from fpsim.emulation.entering import run_entered
from fpsim.emulation.marks import is_made_here, is_roundable, is_seen_from_outside, is_state, mark_as_state
from fpsim.emulation.operands import Rounds
from fpsim.emulation.scope import Listeners, Scope, Weights, active, make_scope
from fpsim.models.compiled_forwards import (
    call_under_dynamo,
    call_with_hooks_apart,
    note_copy,
    register,
    require_own_thread,
)
from fpsim.models.computed_weights import adopt
from fpsim.policies.operand import Operand
from fpsim.policies.policy import FEW_BITS, Policy, RoleSpecs
from fpsim.policies.products import Products
from fpsim.torch_internals import (
    FORMER,
    called_module,
    direct_parameters,
    held_by,
    is_called_functionally,
    map_leaves,
    tensors_of,
)
from fpsim.torch_modes import (
    CALL_SLOT,
    call_inside,
    forward_hooks_of,
    module_called,
    tell_of_forward_hooks,
    without_torch_function,
    wrap_module_hooks,
)
from fpsim.torch_nodes import sends_sums_by_moving

__all__ = ["KEY", "EmulatedForward", "HookedCall", "UnboundForward", "leave"]

KEY = "_fpsim_forward"  # key in the module's __dict__


class EmulatedForward:
    """Stands in for a module's `forward`, and runs the true forward under the module's scope.

    It looks like a bound method, but has no `__wrapped__`: code that unwraps functions ends here.

    policy: None once the model is dequantised. Wrappers of other libraries may still call the stand-in, which then
        rounds nothing.
    inner: the `forward` that another library had put there, if any.
    wide: the operations whose results were float32 on purpose in the last call.
    """

    def __init__(self, module: nn.Module, name: str, policy: Policy, listeners: Listeners) -> None:
        self.module, self.name, self.listeners = module, name, listeners
        self.policy: Policy | None = policy
        self.inner = vars(module).get("forward")
        self.prepare()

    def prepare(self) -> None:
        """Compute all attributes that depend on the module, its policy and its listeners."""
        forward = self.true_forward(self.module)
        functools.update_wrapper(self, forward, updated=())  # bound: its signature has no self
        del self.__dict__["__wrapped__"]
        # torch.export looks up in which file and line a forward is written.
        self.__code__ = getattr(forward, "__code__", None)
        try:
            self._signature: inspect.Signature | None = inspect.signature(forward)
        except (TypeError, ValueError):  # a builtin has none
            self._signature = None
        self.cache_use = cache_use(self.module, self._signature)
        plain = vars(type(self.module)).get("forward") if self.inner is None else None
        # `_method` is the method of the class, which is bound at each call without a search through the classes.
        self._method = plain if type(plain) is FunctionType else None
        self._scopes = {False: make_scope(self.name, self.policy or Policy(), self.listeners)}
        self.wide: dict[str, None] = {}
        watch_module_hooks()
        _note_classes(self.module)
        surround(self.module)
        # The forward is registered again for each policy: a program of torch.compile belongs to one forward and policy.
        self.token = register(self)

    def renew(self, name: str, policy: Policy | None, listeners: Listeners) -> None:
        """Change name, policy and listeners in place. If the policy is None, nothing is rounded any more."""
        self.name, self.policy, self.listeners = name, policy, listeners
        self.prepare()

    def true_forward(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that this object replaces: a (static) method, or a function that a library installed."""
        if self.inner is not None:
            return self.inner  # type: ignore[no-any-return]
        of_class: Any = None
        for c in type(module).__mro__:
            if "forward" in vars(c):
                of_class = vars(c)["forward"]
                break
        is_bound = hasattr(of_class, "__get__")
        return of_class.__get__(module, type(module)) if is_bound else of_class  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: self.__dict__[name] for name in ("module", "name", "policy", "listeners", "inner")}
        return {**kept, "is_hooked": any(map(is_of_a_model, forward_hooks_of(self.module)))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_hooked = state.get("is_hooked", False)
        self.__dict__.update({name: value for name, value in state.items() if name != "is_hooked"})
        watch_module_hooks()
        # torch leaves the slot out of copies.
        if is_hooked:
            vars(self.module)[CALL_SLOT] = HookedCall(self.module)
        note_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedForward:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return duplicate

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__ or "_scopes" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # `prepare` must not run earlier: while a copy or a load is under way, the module may lack its attributes.
        self.prepare()
        return getattr(self, name)

    @property
    def scope(self) -> Scope:
        """The current scope. With an attached scaling, its formats may round gradients of few bits stochastically."""
        is_stochastic = self.listeners.rounds_few_bits_stochastically
        if is_stochastic not in self._scopes:
            policy = (self.policy or Policy()).with_stochastic_gradients(FEW_BITS)
            self._scopes[is_stochastic] = make_scope(self.name, policy, self.listeners)
        return self._scopes[is_stochastic]  # type: ignore[no-any-return]

    @property
    def specs(self) -> RoleSpecs:
        return (self.scope.plans.border or self.scope).specs

    @property
    def products(self) -> Products | None:
        return self.scope.products

    @property
    def stored(self) -> Mapping[str, Operand] | None:
        """Operands of the keys and values that this module stores itself; None if it stores none, or rounds none."""
        return self.scope.cache if self.cache_use is not None and self.cache_use.stores else None

    def is_delayed(self) -> bool:
        """Return whether any operand inside the module takes its scale from earlier steps."""
        forwards = (vars(module).get(KEY) for module in self.module.modules())
        return any(x is not None and x.products is not None and x.products.is_delayed for x in forwards)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> UnboundForward:
        return UnboundForward(self)

    @property
    def __signature__(self) -> inspect.Signature | None:
        """Signature of the forward, for inspect.signature."""
        # This is a property, because functools.wraps would copy an attribute of the instance to a wrapper.
        return self._signature  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_dynamo_compiling():
            return call_under_dynamo(self, args, kwargs)
        first = args[0] if args else None
        if type(first) is not Tensor and isinstance(first, nn.Module) and vars(first).get(KEY) is self:
            return self.run(first, args[1:], kwargs)  # bound once more
        if not torch.compiler.is_compiling():
            called = called_module()
            # `called` is a shallow copy of the module, as DataParallel makes it, with other parameters.
            if called is not None and called is not module and vars(called).get(KEY) is self:
                module = called
        return self.run(module, args, kwargs, active.emulation is not None and is_called_functionally())

    def run(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_functional: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the true forward of `module` under its scope.

        is_functional: whether tensors were put in the module for this call.
        call: if given, it is called in place of the forward, and runs the forward with the hooks around it.
        """
        method = self._method
        if call is not None:
            forward = call
        # The class is examined at each call, because its method may have been replaced.
        elif type(module).__dict__.get("forward") is method and method is not None:
            forward = MethodType(method, module)
        else:
            forward = self.true_forward(module)
        if self.policy is None:
            return forward(*args, **kwargs)
        self.wide = {}  # those of this call, which is the last one
        known = self._scopes.get(self.listeners.rounds_few_bits_stochastically) or self.scope
        emulation = active.emulation
        around = None if emulation is None else emulation.scope
        is_outermost, dtype = emulation is None, None
        if around is None or around.listeners is not self.listeners:
            require_own_thread(self)
            if is_outermost and self.name:
                _warn_of_method(self, module)
            weights, dtype = _prepared_inside(module, {} if around is None else around.weights)
            is_float64 = dtype is torch.float64
        elif is_functional:
            (weights, _), is_float64 = _prepared_inside(module, around.weights), around.is_float64
        else:
            weights, is_float64 = _prepared(module, around.weights), around.is_float64
        scope = known.again(weights, self.wide, is_float64)
        is_whole = not self.name and self.listeners.needs_cache
        stored = None
        if is_whole or (scope.cache is not None and self.cache_use is not None):
            stored = Stored(self.cache_use, self.name or type(module).__name__)
            if scope.cache is not None:
                args, kwargs = stored.enter(args, kwargs)
        border = scope.plans.border
        if border is not None and (around is None or around.plans.border is None):
            forward = functools.partial(_run_fused, border.again(weights, self.wide, is_float64), forward)
        name = scope.dtype if border is None else border.dtype
        has_names = self.listeners.has_names and name is not None and is_outermost and dtype is not name
        out = run_entered(
            scope, functools.partial(_run_whole, forward) if is_outermost else forward, args, kwargs, has_names
        )
        driver = _DRIVERS.get(type(out))
        if stored is not None and driver is None:
            stored.require_rounded()
            if is_whole:
                stored.require_any(self.policy)
        return out if driver is None else driver(out, scope, has_names)


# The number of frames that are looked at: between a module and the method, torch, decorators and helpers have frames.
_METHODS = 32
_is_of_module: dict[tuple[str, str], bool] = {}  # by module and name: classes of emulated modules, and their mixins
_warned_of_methods: weakref.WeakSet[Any] = weakref.WeakSet()  # classes and Listeners


def _note_classes(module: nn.Module) -> None:
    for cls in type(module).__mro__:
        if cls is not object and not cls.__module__.startswith("torch."):
            _is_of_module[cls.__module__, cls.__qualname__] = issubclass(cls, nn.Module)


def _warn_of_method(forward: EmulatedForward, module: nn.Module) -> None:
    """Warn, once for a class, if a method of a model calls one of its modules outside of any forward."""
    # Methods do not run under the model's scope, as its forward does. They also train, draw weights, average weights
    # and count hits, which a format would spoil. They could not be intercepted either: shallow copies of the model,
    # such as DataParallel's, share its attributes, but have other parameters. Therefore a module that is called
    # alone looks at its callers.
    listeners = forward.listeners
    if listeners in _warned_of_methods or torch.compiler.is_compiling():
        return
    frame, level = inspect.currentframe(), 1
    while level < _METHODS:
        if frame is None:
            return
        code = frame.f_code
        is_of_module = _is_of_module.get((frame.f_globals.get("__name__", ""), code.co_qualname.rpartition(".")[0]))
        # The method is one of a mixin that is not a module, such as transformers' GenerationMixin: its code runs around
        # a model's forward, and does not belong to the model.
        if is_of_module is False:
            return
        # `f_locals` of other frames is not read: before Python 3.13, reading it keeps a frame's tensors alive until the
        # frame ends.
        caller = frame.f_locals.get("self") if is_of_module else None
        around = None
        if isinstance(caller, nn.Module) and caller is not module and "forward" in vars(caller):  # else it is replaced
            around = vars(caller).get(KEY)
        if around is not None and around.listeners is listeners and not around.scope.rounds_nothing:
            break
        frame, level = frame.f_back, level + 1
    else:
        return
    _warned_of_methods.add(listeners)
    cls = type(caller)
    if cls not in _warned_of_methods:
        _warned_of_methods.add(cls)
        warnings.warn(
            f"{cls.__name__}.{code.co_name} calls {forward.name} outside of the model's forward. Modules that a method "
            f"calls are emulated; what it computes beside them is not, and is float32 in both passes. If that is the "
            f"model's, call the method in a block of fpsim.emulate, or from a forward.",
            stacklevel=level + 1,
        )


def _run_whole(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a whole model, and round inputs and gradients that only moved through it to the format."""
    out = forward(*args, **kwargs)
    # Reading the attributes of a tensor would make calls of the mode.
    with without_torch_function():
        if type(out) is Tensor and is_made_here(out) and not sends_sums_by_moving(out):
            return out
        return _in_format(active.emulation, out, (*args, *kwargs.values()))


def _run_fused(border: Scope, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module that is one kernel; results are rounded as they leave it."""
    out = forward(*args, **kwargs)
    if type(out) in _DRIVERS:
        raise NotImplementedError(
            f"{border.name or 'The model'} has fused=True and a forward that yields or awaits, which ends in no one "
            f"place. Expected: a forward that returns its results; or fused=False."
        )
    emulation: Any = active.emulation
    inside = emulation.scope
    try:
        emulation.scope = border
        with without_torch_function():
            return map_leaves(
                lambda x: emulation.operand(x, Rounds.ALL) if isinstance(x, Tensor) and is_roundable(x) else x, out
            )
    finally:
        emulation.scope = inside


def _in_format(emulation: Any, out: Any, given: tuple[Any, ...]) -> Any:
    """Return results of a whole model in the format. Containers stay the same objects if nothing in them changes."""
    if isinstance(out, Tensor):
        if not is_roundable(out):
            return out
        if is_made_here(out) or not (is_seen_from_outside(out) or any(out is x for x in given)):
            return emulation.returned(out) if sends_sums_by_moving(out) else out
        return emulation.operand(out, Rounds.ALL)
    if type(out) in (list, tuple):
        parts = [_in_format(emulation, x, given) for x in out]
        return type(out)(parts) if any(a is not b for a, b in zip(out, parts, strict=True)) else out
    if type(out) is dict:
        values = {key: _in_format(emulation, x, given) for key, x in out.items()}
        return values if any(out[key] is not x for key, x in values.items()) else out
    # Any other container may be recognised by its identity, as a cache of keys is: the container is rebuilt only if a
    # tensor in it changes.
    made = (x for x in tensors_of(out) if is_made_here(x) and sends_sums_by_moving(x))
    shown = {id(x): y for x in made if (y := emulation.returned(x)) is not x}
    return map_leaves(lambda x: shown.get(id(x), x), out) if shown else out


def _driven(generator: Generator[Any, Any, Any], scope: Scope, has_names: bool) -> Generator[Any, Any, Any]:
    """Run a forward that is a generator: each step runs under the scope, and the code of its caller runs outside."""
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


# A coroutine is driven step by step, as a generator is. Code that runs while it waits is not under the scope.
_steps = types.coroutine(_driven)


async def _awaited(coroutine: Any, scope: Scope, has_names: bool) -> Any:
    """Run a forward that is `async def`."""
    return await _steps(coroutine, scope, has_names)


async def _streamed(generator: AsyncGenerator[Any, Any], scope: Scope, has_names: bool) -> AsyncGenerator[Any, Any]:
    """Run a forward that is `async def` and yields."""
    step: Any = generator.asend(None)
    while True:
        try:
            given = await _steps(step, scope, has_names)
        except StopAsyncIteration:
            return
        try:
            step = generator.asend((yield given))
        except GeneratorExit:
            await generator.aclose()
            raise
        except BaseException as error:
            step = generator.athrow(error)


_DRIVERS: dict[type, Callable[..., Any]] = {
    types.GeneratorType: _driven,
    types.CoroutineType: _awaited,
    types.AsyncGeneratorType: _streamed,
}


class UnboundForward:
    """The `__func__` of an EmulatedForward: a function of the module and its inputs, also for copies of the module."""

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

    def __deepcopy__(self, memo: dict[int, Any]) -> UnboundForward:
        return self  # as deepcopy keeps a function

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        emulated = vars(module).get(KEY)
        return type(module).forward(module, *args, **kwargs) if emulated is None else emulated.run(module, args, kwargs)


# Hooks of modules


def surround(module: nn.Module) -> None:
    """Run an emulated module's forward hooks under its scope too, if any of the hooks belongs to the model."""
    if vars(module).get(CALL_SLOT) is None and any(map(is_of_a_model, forward_hooks_of(module))):
        vars(module)[CALL_SLOT] = HookedCall(module)


def leave(module: nn.Module) -> None:
    """Undo `surround`."""
    if isinstance(vars(module).get(CALL_SLOT), HookedCall):
        del vars(module)[CALL_SLOT]


class HookedCall:
    """Stand-in for the call of a module: hooks and forward run under its scope, unless a scope is entered already.

    The stand-in stays until the first call that finds no hook.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            inside: Any = self.module()
            is_hooked = len(forward_hooks_of(inside)) > 0
            return call_with_hooks_apart(self, args, kwargs) if is_hooked else call_inside(inside)(*args, **kwargs)
        return self.run(module_called() or self.module(), args, kwargs)

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `module`, which is the module that this object belongs to, or a shallow copy of it."""
        call, forward, hooks = call_inside(module), vars(module).get(KEY), forward_hooks_of(module)
        if not hooks and vars(module).get(CALL_SLOT) is self:
            del vars(module)[CALL_SLOT]
        # A module with hooks of torch's sharding is called as it is, because these hooks first put the parameters in
        # place.
        is_left = not any(map(is_of_a_model, hooks)) or any(map(_is_of_sharding, hooks))
        if active.emulation is not None or forward is None or forward.policy is None or is_left:
            return call(*args, **kwargs)
        return forward.run(module, args, kwargs, call=call)


def _is_of_sharding(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.distributed")


@functools.cache
def watch_module_hooks() -> None:
    """Let full backward hooks and pre-hooks of emulated modules compute in the format from now on."""

    def wrapped(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        return _ModuleHook(hook) if KEY in vars(module) and is_of_a_model(hook) else hook

    wrap_module_hooks(wrapped)
    tell_of_forward_hooks(lambda module: surround(module) if KEY in vars(module) else None)


class _ModuleHook:
    """A full backward hook or pre-hook that computes in the formats of its module."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *gradients: Any) -> Any:
        forward: EmulatedForward = vars(module)[KEY]
        if forward.policy is None or forward.scope.rounds_nothing or active.emulation is not None:
            return self.hook(module, *gradients)
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        scope = forward.scope.again({}, {}, dtype is torch.float64)
        has_names = forward.listeners.has_names and scope.dtype is not None and dtype is not scope.dtype
        code = OwnCode(scope, "hook", has_names)
        return run_in_backward(code, functools.partial(self.hook, module, *gradients), gradients, False)


# The weights of a call, and its buffers


def _prepared_inside(module: nn.Module, around: Weights) -> tuple[Weights, torch.dtype | None]:
    """Prepare a module and all modules inside it, before the outermost call of a model.

    Returns the weights, and the dtype of the first floating-point parameter, as transformers' models report it.
    """
    # All modules are prepared at once, because a scope knows the weights of the scope around it. In this way a weight
    # has its role wherever it is used: by a module above its own, by a module that receives it as an argument, or by a
    # module that keeps it in a list.
    weights, dtype, waiting, seen = around, None, [module], set[int]()
    while waiting:
        m = waiting.pop()
        if m is not None and id(m) not in seen:  # absent, or in several places
            seen.add(id(m))
            weights = _prepared(m, weights)
            parameters, _, children, _ = held_by(m)
            if dtype is None:
                for p in parameters.values() if FORMER not in vars(m) else direct_parameters(m):
                    if p is not None and p.is_floating_point():
                        dtype = p.dtype
                        break
            waiting += reversed(children.values())
    return weights, dtype


def _prepared(module: nn.Module, around: Weights) -> Weights:
    """Adopt the computed weights of one module, and mark its buffers as state, before each call of the module.

    Returns the tensors by which torch.func.functional_call replaces parameters, including the tensors in `around`.
    """
    parameters, buffers, children, hooks = held_by(module)
    if hooks or "parametrizations" in children:
        adopt(module)
    if buffers:
        for b in buffers.values():
            # functional_call replaces buffers too: a tensor that is a weight in `around` stays a weight.
            if b is not None and not is_state(b) and not isinstance(b, nn.Parameter) and id(b) not in around:
                mark_as_state(b)
    weights = around
    for p in parameters.values() if FORMER not in module.__dict__ else direct_parameters(module):
        if type(p) is nn.Parameter or p is None:
            continue
        if not (isinstance(p, nn.Parameter) or id(p) in weights):
            weights = {**weights} if weights is around else weights
            weights[id(p)] = weakref.ref(p)  # type: ignore[index]
    return weights
