"""Private names of torch around calls: modes, transforms, hooks, replacements of a module's call; also of shards.

`tests/fpsim/test_torch_modes.py` checks each assumption against the installed torch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = [
    "CALL_SLOT",
    "SEES_BODIES",
    "Place",
    "PlainFunction",
    "after_transforms",
    "any_mode",
    "below_transforms",
    "body_of",
    "call_inside",
    "forward_hooks_of",
    "function_like",
    "guard_step",
    "has_transform",
    "hook_gradient",
    "hook_steps",
    "hooked",
    "hooks_of_saved_tensors",
    "is_plain",
    "is_sample",
    "is_stand_in",
    "is_unwatched",
    "is_watched",
    "keeps_grad_mode",
    "layers_behind",
    "memory_behind",
    "modes",
    "module_called",
    "over_positions",
    "place_of",
    "plain_tensors",
    "push_mode",
    "require_no_compiler",
    "set_grad_enabled",
    "skip_frames",
    "take_off",
    "tell_of_forward_hooks",
    "unguard_step",
    "unhook_call",
    "unhook_steps",
    "watch_bodies",
    "watch_functions",
    "without_torch_function",
    "wrap_module_hooks",
]

Function = TypeVar("Function", bound=Callable[..., Any])

# The attribute of a module that torch calls instead of the hooks and the forward, unless it is None, which is the
# default. torch leaves it out of copies and pickles.
CALL_SLOT = "_compiled_call_impl"

# These are C functions, bound without a wrapper: Python handles no signal inside of them. A mode's `with` statement
# would run Python code before and after them, where a signal may be handled.
push_mode: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack  # type: ignore[attr-defined]
_pop: Callable[[], TorchFunctionMode] = torch._C._pop_torch_function_stack  # type: ignore[attr-defined]
_size: Callable[[], int] = torch._C._len_torch_function_stack
any_mode = _size  # the number of function modes on the stack of this thread
_at: Callable[[int], TorchFunctionMode] = torch._C._get_function_stack_at  # type: ignore[attr-defined]


_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def hooks_of_saved_tensors() -> Any:
    """Return the current hooks that pack and unpack saved tensors, as saved_tensors_hooks and checkpoints set them."""
    return _top_hooks(False)


hooks_of_saved_tensors._dynamo_marked_constant = True  # type: ignore[attr-defined]  # in a compiled program: None
# Whether a transform of torch.func sees each call.
has_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether a tensor is a zero that autograd made without memory.
_is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor  # type: ignore[assignment]
# Whether a tensor is a wrapper of a transform, perhaps of one that has ended. A wrapper has no separate memory.
_is_shown: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def is_watched() -> bool:
    """True if a tracer, a dispatch mode, a transform of torch.func or forward-mode differentiation sees each call."""
    modes = _dispatch_modes()
    return (modes > 0 and _has_mode(modes)) or has_transform() or forward_ad._current_level >= 0


def is_unwatched() -> bool:
    """True if no dispatch mode, transform or forward-mode differentiation is on, and no hook packs saved tensors."""
    # This joins `is_watched` and `hooks_of_saved_tensors`, for code that runs in each call. Dynamo must not trace it.
    return not (_dispatch_modes() or has_transform() or forward_ad._current_level >= 0 or _top_hooks(False))


def _has_mode(count: int) -> bool:
    """True if one of the modes may keep unrounded results."""
    # The mode of a selective checkpoint does not: it keeps results in the memory in which they are rounded.
    kinds = (type(torch._C._get_dispatch_stack_at(i)) for i in range(count))
    return any(kind.__module__ != "torch.utils.checkpoint" for kind in kinds)


def is_plain(x: Tensor) -> bool:
    """True if a kernel may be called on the memory of `x` at once: it holds the values, and no mode sees the call."""
    if (type(x) is not Tensor and type(x) is not nn.Parameter) or torch.compiler.is_compiling():
        return False
    # The three flags are checked first: `is_watched` would be a Python frame that almost no call needs.
    if (_dispatch_modes() or has_transform() or forward_ad._current_level >= 0) and is_watched():
        return False
    return not (x.is_neg() or _is_zero_tensor(x) or _is_shown(x)) and (x.is_cpu or x.is_cuda)


def layers_behind(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors inside of a torch.func wrapper, with all samples of a batch; the last one has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        yield x


def after_transforms(x: Tensor) -> Tensor | None:
    """Return `x` itself, or the tensor behind it if it belonged to a transform of torch.func that has ended."""
    # The result is None for a sample of a vmap that has ended: torch refuses each call with such a tensor.
    x = torch._C._functorch.unwrap_if_dead(x)
    return x if torch._C._functorch.maybe_get_level(x) <= (torch._C._functorch.maybe_current_level() or 0) else None


def is_sample(x: Tensor) -> bool:
    """True if `x` is a sample of a vmap, so that its numbers cannot be read."""
    return any(torch._C._functorch.is_batchedtensor(layer) for layer in (x, *layers_behind(x)))


def memory_behind(x: Tensor) -> Tensor:
    """Return the tensor that holds the numbers of `x`, which may be a wrapper of a transform of torch.func."""
    return [x, *layers_behind(x)][-1]


def below_transforms() -> AbstractContextManager[None]:
    """Return a context in which transforms of torch.func see no call: calls work on the tensors behind the wrappers."""
    return torch._C._DisableFuncTorch()  # type: ignore[attr-defined, no-any-return]


def modes() -> Iterator[TorchFunctionMode]:
    """Yield the function modes of this thread, the outermost first, without a mode whose function is running."""
    return map(_at, range(_size()))


# Higher-order operations, which take functions: torch.cond, while_loop and others


SEES_BODIES = "_fpsim_sees_bodies"  # an attribute of a mode that wants each call of those functions


def body_of(operation: Any) -> Callable[..., Any] | None:
    """Return the Python body of a higher-order operation, as it runs without a compiler; None for any other."""
    if not isinstance(operation, torch._ops.HigherOrderOperator):
        return None
    require_no_compiler()
    body = operation.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return body if body is None or operation.name() != "cond" else functools.partial(_branches, body)


def require_no_compiler() -> None:
    """Raise NotImplementedError while torch.compile traces how a mode handles a higher-order operation."""
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError("fpsim emulates it without torch.compile, or in a compiled model of fpsim.quantize.")


def _branches(body: Callable[..., Any], pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    """Compute `torch.cond`; under vmap, select the result of each sample's branch, as torch's batching rule does."""
    if not (isinstance(pred, Tensor) and is_sample(pred)):
        return body(pred, true_fn, false_fn, operands)
    results = true_fn(*operands), false_fn(*operands)
    return tree_map(functools.partial(torch.where, pred), *results)


def over_positions(function: Callable[..., Any], first: tuple[Any, ...], last: tuple[Any, ...]) -> Callable[..., Any]:
    """Apply a function of batch, head, query and key, as flex_attention takes, to all positions at once."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    def run(*args: Any) -> Any:
        # This is for `table[i]` in the function, with the i of a sample.
        with TransformGetItemToIndex():
            return _vmap_for_bhqkv(function, prefix=first, suffix=last)(*args)

    return run


@functools.cache
def watch_bodies() -> None:
    """Patch torch to run higher-order operations without compiling their functions if a mode has SEES_BODIES."""
    # torch compiles the functions first, also in eager code, and refuses to do so under a mode.
    from torch._higher_order_ops import utils
    from torch.nn.attention import flex_attention

    # flex_attention compiles by itself, and has a switch against that.
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    setattr(flex_attention, name, _UnlessWatched(getattr(flex_attention, name)))
    compile_and_call = getattr(utils, "_hop_compile_and_call", None)
    # A torch before 2.13 has no such function: there, its error stays.
    if compile_and_call is None:
        return

    def call(function: Any, args: Any, kwargs: Any = None) -> Any:
        if any(getattr(mode, SEES_BODIES, False) for mode in modes()):
            return function(*args, **(kwargs or {}))
        return compile_and_call(function, args, kwargs)

    utils._hop_compile_and_call = call


class _UnlessWatched:
    """torch's switch against compiling functions first. It is on if a mode wants to see the functions."""

    def __init__(self, known: Any) -> None:
        self.known = known

    def __bool__(self) -> bool:
        return bool(self.known) or any(getattr(mode, SEES_BODIES, False) for mode in modes())


# autograd Functions


_SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction


def skip_frames(code: CodeType, is_deep: bool = False) -> None:
    """Let torch.compile run frames of this code as they are, like torch's own. is_deep: also all frames below them."""
    compiler: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
    compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip if is_deep else default))


class _Unwatched(_SingleLevelFunction):
    apply = vars(torch._C._FunctionBase)["apply"]


class PlainFunction(torch.autograd.Function, _Unwatched):
    """An autograd Function that `watch_functions` does not see, because its `apply` goes straight to torch's."""


def watch_functions(run: Callable[[Callable[..., Any], type, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Patch torch to call `run(apply, cls, args, kwargs)` when the autograd Function `cls` is applied.

    apply: torch's own function, which takes the class and the arguments.
    """
    # The patch is below `cls.apply`, because code may have stored `cls.apply` under another name before.
    home: Any = torch.autograd.function
    under_transforms = home.custom_function_call

    def plain(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    def plain_under_transforms(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not vars(cls).get(_IS_LIKE, False):
            return under_transforms(cls, *args, **kwargs)
        # A mode would see one operation, and nothing of its inside.
        with without_torch_function():
            return under_transforms(cls, *args, **kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return run(plain, cls, args, kwargs)

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return run(plain_under_transforms, cls, args, kwargs)

    for function in (run, plain, plain_under_transforms, apply, call):
        skip_frames(function.__code__)
    _SingleLevelFunction.apply = classmethod(apply)
    home.custom_function_call = call


_IS_LIKE = "_fpsim_is_like"  # of a class that `function_like` has made


def function_like(
    cls: Any, begin: Callable[[Any], None], backward: Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any],
    of_context: type,
) -> Any:  # fmt: skip
    """Subclass the autograd Function `cls`, under its name, so that its calls are reported.

    begin: called with each context before the Function gets it.
    backward: called instead of the Function's own backward, with that backward, the context and the gradients.
    of_context: a class that comes before torch's own class among the bases of contexts.
    """
    plain = torch.autograd.Function
    has_setup = cls.setup_context is not plain.setup_context
    name = "vjp" if cls.vjp is not plain.vjp else "backward"

    def seen(method: str, is_begin: bool) -> staticmethod[..., Any]:
        """Wrap a method of the Function, so that modes see its calls from any caller."""

        @functools.wraps(getattr(cls, method))
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_begin:
                begin(args[0])
            with torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
                return getattr(cls, method)(*args, **kwargs)

        return staticmethod(run)

    def ran(ctx: Any, *gradients: Any) -> Any:
        return backward(getattr(cls, name), ctx, gradients)

    own: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own |= {"forward": seen("forward", not has_setup), name: staticmethod(ran), _IS_LIKE: True}
    if has_setup:
        own["setup_context"] = seen("setup_context", True)
    for method in ("vmap", "jvp"):
        if getattr(cls, method) is not getattr(plain, method):
            own[method] = seen(method, False)
    made: Any = type(cls)(cls.__name__, (cls,), own)
    made._backward_cls = type(f"{cls.__name__}Backward", (of_context, made._backward_cls), {})
    return made


def wrap_module_hooks(wrap: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Patch torch to run `wrap(module, hook)` instead of each full backward hook and pre-hook of a module."""
    from torch.utils.hooks import BackwardHook

    plain = BackwardHook.__init__

    @functools.wraps(plain)
    def init(self: Any, module: nn.Module, user_hooks: Any, user_pre_hooks: Any) -> None:
        plain(self, module, *([wrap(module, hook) for hook in hooks] for hooks in (user_hooks, user_pre_hooks)))

    BackwardHook.__init__ = init  # type: ignore[method-assign]


def tell_of_forward_hooks(told: Callable[[nn.Module], None]) -> None:
    """Patch torch to run `told(module)` when a forward hook or pre-hook is registered on a module."""

    def telling(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            handle = plain(self, *args, **kwargs)
            told(self)
            return handle

        return register

    for name in ("register_forward_hook", "register_forward_pre_hook"):
        setattr(nn.Module, name, telling(getattr(nn.Module, name)))


def forward_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward pre-hooks and hooks of a module."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


_FakeTensor: type = torch._subclasses.FakeTensor


def is_stand_in(x: Tensor) -> bool:
    """True if `x` has a shape and no numbers: on device meta, or of a FakeTensorMode."""
    # The type is checked too, because a fake tensor reports the device that it stands for.
    return x.is_meta or isinstance(x, _FakeTensor)


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def plain_tensors() -> AbstractContextManager[None]:
    """Return a context that makes no inference tensors, and restores the grad mode too."""
    # This is a C object, which restores both at any signal.
    return torch._C._InferenceMode(False)  # type: ignore[no-any-return]


def keeps_grad_mode(function: Function) -> Function:
    """Restore the grad mode if `function` raises."""

    @functools.wraps(function)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        # If a signal interrupts the end of `with torch.no_grad()`, gradients stay off.
        is_enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except BaseException:
            set_grad_enabled(is_enabled)
            raise

    return keeping  # type: ignore[return-value]


def take_off(mode: TorchFunctionMode) -> None:
    """Remove a mode from the stack of this thread, wherever and however often it is there; the others stay."""
    # The stack is read again in each iteration, so that `take_off` may be called again after an interrupt.
    while size := _size():
        if _at(size - 1) is mode:
            _pop()
        elif any(other is mode for other in modes()):
            _take_from_below(mode)
        else:
            return


def _take_from_below(mode: TorchFunctionMode) -> None:
    above = [*modes()]
    del above[: next(i for i, other in enumerate(above) if other is mode) + 1]
    try:
        for _ in range(len(above) + 1):
            _pop()
    finally:
        present = [*modes()]
        for other in above:
            if not any(other is x for x in present):
                push_mode(other)


def call_inside(module: nn.Module) -> Callable[..., Any]:
    """Return the call of `module` with its hooks and its forward, which bypasses the replacement in CALL_SLOT."""
    return module._call_impl  # type: ignore[no-any-return]


_CALLER: CodeType = nn.Module._wrapped_call_impl.__code__


def module_called() -> nn.Module | None:
    """Return the module whose call runs the replacement in CALL_SLOT; None if other code called the replacement."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_code is _CALLER else None


def hooked(x: Tensor, hook: Callable[[Tensor], Any], handles: list[Any]) -> None:
    """Put a hook on the gradient of `x`, and its handle into `handles`; after a signal both are done, or neither."""
    size = len(handles)
    try:
        handles.append(x.register_hook(hook))
    except BaseException:
        del handles[size:]
        hooks = x._backward_hooks or {}
        for key in [key for key, registered in hooks.items() if registered is hook]:
            del hooks[key]
        raise


def hook_gradient(x: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Run `x.register_hook(hook)` for a result, without a handle to remove it by."""
    # Making a handle would take two thirds of the time. The hook itself is its key, where torch uses numbers.
    hooks = x._backward_hooks
    if hooks is None:
        x._backward_hooks = hooks = OrderedDict()
        if (node := x.grad_fn) is not None:
            node._register_hook_dict(x)
    hooks[hook] = hook  # type: ignore[index]


GUARD = "fpsim_guard"  # the attribute by which a guard is found


# These hooks are removed by their function and not by a handle: a signal may come before a handle is stored.


def hook_steps(optimizer: Optimizer | None, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Call two functions around each step of an optimizer, or of all optimizers."""
    if optimizer is None:
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
    else:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def unhook_steps(optimizer: Optimizer | None, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Undo `hook_steps`, wherever it was interrupted; may be called again."""
    if optimizer is None:
        _take_out(_global_optimizer_pre_hooks, before)
        _take_out(_global_optimizer_post_hooks, after)
    else:
        _take_out(optimizer._optimizer_step_pre_hooks, before)
        _take_out(optimizer._optimizer_step_post_hooks, after)


class _Guard:
    """Wrapper of the steps of an optimizer.

    before: the attribute that replaced the optimizer's method before this guard; None for the method itself.
    step: the attribute that replaces the method now.
    is_on: whether errors are reported.
    """

    def __init__(self, before: Any) -> None:
        self.before, self.is_on = before, True
        self.step: Any = None


def guard_step(optimizer: Optimizer, on_error: Callable[[], object]) -> None:
    """Call a function if a step of this optimizer raises: hooks after the step do not run then."""
    # The guard replaces the method, as torch's schedules do, and does not keep the optimizer alive. Schedules take
    # `__func__` of the method that they find, so the guard has one.
    guard = _Guard(vars(optimizer).get("step"))
    reference = weakref.ref(optimizer)

    def unbound(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(self).step(self, *args, **kwargs) if guard.before is None else guard.before(*args, **kwargs)
        except BaseException:
            if guard.is_on:
                on_error()
            raise

    @functools.wraps(type(optimizer).step if guard.before is None else guard.before)
    def step(*args: Any, **kwargs: Any) -> Any:
        held = reference()
        if held is None:
            raise ReferenceError("The optimizer of this step is gone. Keep the optimizer itself, not its step alone.")
        return unbound(held, *args, **kwargs)

    vars(unbound)[GUARD] = guard  # `functools.wraps` of a schedule copies it
    vars(step).update({"__func__": unbound, GUARD: guard})
    vars(optimizer)["step"] = guard.step = step


def unguard_step(optimizer: Optimizer) -> None:
    """Undo `guard_step`. A guard that other code has wrapped stays in place and does nothing."""
    step = vars(optimizer).get("step")
    guard = getattr(step, GUARD, None)
    if guard is None:
        return
    guard.is_on = False
    if step is guard.step and guard.before is None:
        del vars(optimizer)["step"]
    elif step is guard.step:
        vars(optimizer)["step"] = guard.before


def unhook_call(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Undo `module.register_forward_pre_hook(hook)`; may be called again."""
    for key in _take_out(module._forward_pre_hooks, hook):
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _take_out(hooks: MutableMapping[int, Any], hook: Callable[..., Any]) -> list[int]:
    keys = [key for key, registered in hooks.items() if registered == hook]
    for key in keys:
        hooks.pop(key, None)
    return keys


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which torch's functions call no mode and no subclass."""
    return torch._C.DisableTorchFunction()


# Tensors of which each rank has a part


class Place(NamedTuple):
    """Offset of this rank's part of a sharded tensor in the whole, and the shape of the whole."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def place_of(x: Tensor) -> Place | None:
    """Return the place of this rank's part of a sharded tensor (a DTensor); None for a whole tensor."""
    mesh, placements = getattr(x, "device_mesh", None), getattr(x, "placements", None)
    if mesh is None or placements is None or all(p.is_replicate() for p in placements):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(x.shape, mesh, placements)
    return Place(tuple(x.shape), tuple(offset))
