"""Every private name of torch that is used, each behind a function that documents its assumed meaning.

`tests/fpsim/test_torch_internals.py` checks each assumption against the installed torch. Where a wrong assumption would
fail silently (who else holds a gradient's memory?), the fact is measured at run time, with a safe fallback.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import stateless
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from fpsim.torch_modes import has_transform, memory_behind

__all__ = [
    "FORMER",
    "apart_from_compiler",
    "base_of",
    "blind_to_modes",
    "calibrate_holders",
    "called_module",
    "compile_as_one",
    "computing_hooks",
    "constant_under_compile",
    "current_graph_task",
    "direct_parameters",
    "fuse_in_inductor",
    "has_history",
    "has_no_holes",
    "held_by",
    "hooks_of_gradient",
    "is_called_functionally",
    "is_compiled_wrapper",
    "is_held_by_autograd_alone",
    "is_legacy_batched",
    "is_recorded",
    "is_traced",
    "keep_none",
    "leaves_behind",
    "map_leaves",
    "may_compute_weights",
    "operation_homes",
    "own_frame",
    "parametrization_lists",
    "register_container",
    "share_storage",
    "standing_in",
    "tell_of_swaps",
    "tensors_of",
    "version_of",
    "watched_seeds",
    "wrap_checkpoints",
    "written_arguments",
]

Function = TypeVar("Function", bound=Callable[..., Any])
# The driver's handle of torch's current stream on a device, without an object around it. A torch for the CPU has none.
current_stream_handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# What torch knows of a tensor


# These are called several times in each call of an emulated model: they are C functions, without a Python frame.

# The number of writes to the memory of a tensor, by torch and through any of its views. Inference tensors have none.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The tensor that another one is a view of, as autograd sees it; None for a tensor that is not a view.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
# Whether a tensor stands for a batch of tensors, as `torch.autograd.grad(is_grads_batched=True)` makes them.
is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
# Whether two tensors use the same storage, at any offsets.
share_storage: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def has_history(x: Tensor) -> bool:
    """True if autograd has recorded the operation that made `x`."""
    # autograd raises for some views whose base was written to.
    try:
        return x.grad_fn is not None
    except RuntimeError:
        return False


def has_no_holes(x: Tensor) -> bool:
    """True if the elements of `x` fill one block of memory without holes or overlap, in any order."""
    return x.is_contiguous() or x.permute(*sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


# What torch knows of a module

FORMER = "_former_parameters"  # where a replica of nn.DataParallel keeps its substitutes for parameters


def direct_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the current values of the module's own parameters, also plain tensors; absent ones (None) are left out."""
    own = module._parameters.values()
    # A replica of nn.DataParallel keeps them under another name.
    former = module.__dict__.get(FORMER)
    return (p for p in (own if former is None else (*own, *former.values())) if p is not None)


# The dictionaries of a module: its own parameters, its own buffers, its children, and its forward pre-hooks. An absent
# parameter, buffer or child is None.
held_by: Callable[[nn.Module], Any] = attrgetter("_parameters", "_buffers", "_modules", "_forward_pre_hooks")


@contextmanager
def standing_in(
    module: nn.Module, tensors: dict[str, Tensor], others: Sequence[Tensor] = ()
) -> Iterator[dict[int, Tensor]]:
    """Replace parameters and buffers by these tensors inside of the block, tied ones under each of their names.

    Yields the stand-ins by the ids of the parameters and buffers that they replace.

    tensors: the stand-ins by the names of `named_parameters()` and `named_buffers()`.
    others: stand-ins for parameters of other modules, to be marked as parameters.
    Raises NotImplementedError if code in the block assigns another buffer to one of these names: it would be lost.
    """
    parameters = [*module.named_parameters()]
    names = {id(x): name for name, x in (*parameters, *module.named_buffers())}
    homes = [place for m in module.modules() for place in (m._parameters, m._buffers)]
    places = [(place, key, x) for place in homes for key, x in place.items() if x is not None]
    replaced = {id(x): x for x in (*(tensors[name] for name, _ in parameters), *others) if type(x) is not Tensor}
    marked = [x for x in replaced.values() if not isinstance(x, nn.Parameter)]
    for place, key, x in places:
        place[key] = tensors[names[id(x)]]  # type: ignore[assignment]
    try:
        # `isinstance(x, nn.Parameter)` reads this attribute. Without it, a slice of a ParameterList would turn plain
        # tensors into new parameters without a gradient.
        for x in marked:
            x._is_param = True
        yield {of: tensors[name] for of, name in names.items()}
        for place, key, x in places:
            if place.get(key) is not tensors[names[id(x)]]:
                raise NotImplementedError(
                    f"The forward of {type(module).__name__} assigns a new tensor to {names[id(x)]!r}, which a "
                    f"compiled program cannot keep. Expected: change it in place, self.{key}.copy_(...)."
                )
    finally:
        for place, key, x in places:
            place[key] = x  # type: ignore[assignment]
        for x in marked:
            del x._is_param


def parametrization_lists(module: nn.Module) -> Iterator[ParametrizationList]:
    """Yield the parametrizations of the module's own tensors."""
    lists = module._modules.get("parametrizations")
    if isinstance(lists, nn.ModuleDict):
        yield from (p for p in lists.values() if isinstance(p, ParametrizationList))


def may_compute_weights(module: nn.Module) -> bool:
    """True if something may compute the module's weights; called before each forward."""
    return "parametrizations" in module._modules or bool(module._forward_pre_hooks)


class ComputingHook(NamedTuple):
    """A hook that sets a weight before each forward.

    hook: the hook itself.
    method: the name of its method that computes the weight.
    weight: the name of the weight.
    sources: the names of the parameters that it is computed from.
    """

    hook: Any
    method: str
    weight: str
    sources: tuple[str, ...]


def computing_hooks(module: nn.Module) -> Iterator[ComputingHook]:
    """Yield the hooks by which `torch.nn.utils` computes weights: the older weight and spectral norms, and pruning."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield ComputingHook(hook, "compute_weight", hook.name, (f"{hook.name}_g", f"{hook.name}_v"))
        elif isinstance(hook, SpectralNorm):
            yield ComputingHook(hook, "compute_weight", hook.name, (f"{hook.name}_orig",))
        elif isinstance(hook, BasePruningMethod):
            yield ComputingHook(hook, "apply_mask", hook._tensor_name, (f"{hook._tensor_name}_orig",))


# The caller's frame. `inspect.currentframe` is a Python function: reading an attribute through it takes twice as long.
own_frame: Callable[[], types.FrameType] = sys._getframe

# These are compared by identity: a look-up among several code objects hashes them each time, which takes 1 us.
_CALLER, _OUTER_CALLER = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
_INNER_CALLER = next((c for c in _CALLER.co_consts if isinstance(c, types.CodeType)), None)  # with hooks
_FUNCTIONAL_CALL = stateless._functional_call.__code__


def called_module() -> nn.Module | None:
    """Return the module whose call runs its replaced `forward`; None if other code called the forward."""
    frame = sys._getframe(2)
    code = frame.f_code
    return frame.f_locals.get("self") if code is _CALLER or code is _INNER_CALLER else None


def is_called_functionally() -> bool:
    """True if `torch.func.functional_call` called the module, with tensors as parameters; to be used in that call."""
    frame = sys._getframe(2)
    while (code := frame.f_code) is _CALLER or code is _INNER_CALLER or code is _OUTER_CALLER:
        if (outer := frame.f_back) is None:
            return False
        frame = outer
    return code is _FUNCTIONAL_CALL


def is_compiled_wrapper(module: nn.Module) -> bool:
    """True if `module` was made by `torch.compile`."""
    # This does not import torch._dynamo, which would take a second.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


# Who watches the calls of torch


_UNLIKELY = 0x5EED_0F_F9_51_4D  # a seed that nobody else takes


@contextmanager
def watched_seeds() -> Iterator[Callable[[], str | None]]:
    """Yield a function that names a global generator from which the block has drawn, or which it has seeded.

    Enter the block while torch.compile traces, when no operation of torch draws. All generators are restored.
    """
    # They are restored because the forward may run again without a compiler. Dynamo does so for torch's and Python's.
    generator, forked, set_state = torch.default_generator, [], torch.set_rng_state

    # fork_rng calls this function, and leaves no other trace of a seed that is set in its block.
    def noted(*args: Any, **kwargs: Any) -> Any:
        forked.append(True)
        return set_state(*args, **kwargs)

    def state_of_torch() -> bytes:
        # Under a mode, the state would be a fake tensor.
        with _disable_current_modes():
            return bytes(generator.get_state().numpy())

    def state_of_numpy() -> tuple[bytes, int]:
        state: Any = np.random.get_state(legacy=False)["state"]  # type: ignore[call-overload]  # noqa: NPY002
        return bytes(state["key"]), state["pos"]

    def drawn() -> str | None:
        changed = (name for name, state in sources.items() if state() != states[name])
        return "torch" if forked else next(changed, None)

    with _disable_current_modes():
        before = generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    generator.manual_seed(_UNLIKELY)
    sources = {"torch": state_of_torch, "random": random.getstate, "numpy.random": state_of_numpy}
    states = {name: state() for name, state in sources.items()}
    try:
        torch.set_rng_state = torch.random.set_rng_state = noted
        yield drawn
    finally:
        torch.set_rng_state = torch.random.set_rng_state = set_state
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
        with _disable_current_modes():
            generator.set_state(before[0])


def is_traced(x: Tensor) -> bool:
    """True if `x` stands for a tensor of a program that torch.compile is making, outside of transforms."""
    if type(x) is Tensor or type(x) is nn.Parameter or torch.compiler.is_exporting():
        return False
    return _is_of_program(x) and not has_transform() and forward_ad._current_level < 0


def is_recorded(x: Tensor) -> bool:
    """True if `x` stands for a tensor of a program that torch.compile is making, also within a transform."""
    return not torch.compiler.is_exporting() and _is_of_program(memory_behind(x))


def _is_of_program(x: Tensor) -> bool:
    known = {"fake_tensor": "FakeTensor", "functional_tensor": "FunctionalTensor"}
    return type(x).__name__ == known.get(type(x).__module__.removeprefix("torch._subclasses."))


def compile_as_one(function: Callable[..., Any]) -> None:
    """Let torch.compile put calls of `function` into its program as they are, and run them to trace their effect.

    This has the effect of torch._dynamo.nonstrict_trace without the import, which takes a second. Call it while Dynamo
    traces.
    """
    rules = sys.modules["torch._dynamo.trace_rules"]
    for known in (rules._allowed_callable_ids, rules._nonstrict_trace_callable_ids):
        known.add(id(function))


# `map_leaves(f, tree)` copies containers that torch knows, with f(leaf) instead of each leaf. `register_container`
# registers a type as such a container, with two functions that flatten and restore it. The compiler traces both.
map_leaves, register_container = _pytree.tree_map, _pytree.register_pytree_node


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in containers that torch knows (tuples, lists, dictionaries, named tuples), at any depth."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


_fused: set[Any] = set()


def fuse_in_inductor(operator: Any, inside: Callable[..., Any]) -> None:
    """Let inductor generate the code of `inside(ops, dtype, *arguments)` for calls of an element-wise operator.

    operator: takes tensors and words; its result has the shape and the dtype of the first tensor.
    inside: gets an element instead of each tensor.
    Does nothing if torch.compile was not imported, or if called again.
    """
    if operator in _fused or "torch._dynamo" not in sys.modules:
        return
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    def lower(x: Any, *words: Any) -> Any:
        loads = [t.make_loader() if isinstance(t, ir.TensorBox) else None for t in (x, *words)]
        dtype = x.get_dtype()

        def inner(index: Any) -> Any:
            elements = [t if load is None else load(index) for t, load in zip((x, *words), loads, strict=True)]
            return inside(ops, dtype, *elements)

        return ir.Pointwise.create(device=x.get_device(), dtype=dtype, inner_fn=inner, ranges=list(x.get_size()))

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    _fused.add(operator)


def blind_to_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a Python function of torch so that modes do not see a call of the copy, but see the calls inside of it."""
    assert isinstance(function, types.FunctionType)
    # torch's functions begin with `if has_torch_function(...)`; in the copy, this name always returns False.
    blind = {**function.__globals__, "has_torch_function": lambda *args: False}
    copy = types.FunctionType(function.__code__, blind, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def constant_under_compile(function: Function) -> Function:
    """Let torch.compile treat the function's results as constants of the graph."""
    # This works like torch.compiler.assume_constant_result, but does not import torch._dynamo, which takes a second.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def apart_from_compiler(function: Function) -> Function:
    """Keep torch.compile from tracing calls of `function`, and calls inside it."""
    # This works like torch.compiler.disable, but does not import torch._dynamo, which would be most of fpsim's import
    # time. Nothing is traced before other code has imported torch._dynamo.
    disabled: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]


def tell_of_swaps(told: Callable[[Tensor], None]) -> None:
    """Patch `torch.utils.swap_tensors` to run `told(x)` before it looks for weak references to `x`."""
    home: Any = torch.utils
    known = home.weakref

    def getweakrefs(x: Any) -> list[Any]:
        told(x)
        return known.getweakrefs(x)  # type: ignore[no-any-return]

    home.weakref = types.SimpleNamespace(**{**vars(known), "getweakrefs": getweakrefs})


def operation_homes() -> list[Any]:
    """Return the namespaces in which operations are registered: `torch.ops.aten` and its like."""
    return [getattr(torch.ops, library) for library in torch.ops]


def written_arguments(function: Callable[..., Any]) -> tuple[frozenset[int], frozenset[str]]:
    """Return positions and names of the arguments that an operation writes to by its schema, except `out`.

    function: an operator of torch or a custom one, or a function of torch with the name of an operator.
    """
    overloads: list[Any] = []
    if isinstance(function, torch._ops.OpOverload):
        overloads = [function]
    else:
        packet = function
        if not isinstance(function, torch._ops.OpOverloadPacket):
            packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)  # type: ignore[assignment]
        if isinstance(packet, torch._ops.OpOverloadPacket):
            overloads = [getattr(packet, name) for name in packet.overloads()]
    positions, names = set(), set()
    for overload in overloads:
        name = overload._schema.name
        for i, argument in enumerate(overload._schema.arguments):
            # TorchScript sorts a list in place, under the name of torch.sort.
            if str(argument.type).startswith("List") and "foreach" not in name and name.startswith("aten::"):
                continue
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out:
                positions.add(i)
                names.add(argument.name)
    return frozenset(positions), frozenset(names)


def wrap_checkpoints(
    wrap: Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]], settle: Callable[[Any], None]
) -> None:
    """Patch torch.utils.checkpoint to replace every function that it will run again by `wrap(function, args)`.

    settle: called with the outputs of a reentrant checkpoint, before autograd sees them. It may refuse them.
    """
    from torch.utils import checkpoint

    reentrant, other = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    forward = reentrant.forward

    def forward_wrapped(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        outputs = forward(ctx, wrap(run_function, args), preserve_rng_state, *args)
        settle(outputs)
        return outputs

    def generator_wrapped(fn: Any, *rest: Any, **kwargs: Any) -> Any:
        return other(wrap(fn, rest[_CHECKPOINT_SETTINGS:]), *rest, **kwargs)

    reentrant.forward = staticmethod(forward_wrapped)  # type: ignore[method-assign]
    checkpoint._checkpoint_without_reentrant_generator = generator_wrapped


# Settings before the function's own arguments: preserve_rng_state, context_fn, determinism_check, debug, early_stop.
_CHECKPOINT_SETTINGS = 5


# The backward pass


# The number of the backward pass that runs in this thread, -1 outside of a pass; each new pass has a higher number.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # bound, not wrapped: each gradient asks


class _Holders(NamedTuple):
    """Reference counts of a gradient in its hook, in Python and in torch: the tensor, its storage and its base."""

    references: int
    uses: int
    storage_references: int
    storage_uses: int
    base_references: int = 0
    base_uses: int = 0


_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count

# Reference counts of a gradient that only autograd holds: of one that owns its memory, and of a view. The counts differ
# between versions of Python and torch. They also depend on the key, the reference count of a call's argument: Dynamo's
# frame evaluation adds 1 to it, and stays on after an error under fullgraph=True. None: the counts cannot be trusted.
_alone: dict[int, tuple[_Holders, _Holders] | None] = {}
_measuring = threading.Lock()
_callback_of_frames: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]


def is_held_by_autograd_alone(gradient: Tensor, probe: object) -> bool:
    """True if only the autograd engine refers to the memory of this gradient, so that it may be changed in place.

    Call it from a tensor hook directly: a function between them holds another reference. Returns False if unknown.
    probe: `object()`, written in the call: its reference count is that of any argument.
    """
    measured = _alone.get(sys.getrefcount(probe))
    if measured is None:
        return False
    base = gradient._base
    alone = measured[base is not None]
    if sys.getrefcount(gradient) > alone.references or _uses(gradient) > alone.uses:
        return False
    if base is not None:
        if sys.getrefcount(base) > alone.base_references or _uses(base) > alone.base_uses or not has_no_holes(base):
            return False
    # Memory that cannot be resized was not allocated by torch: it may be NumPy's.
    storage = gradient.untyped_storage()
    if sys.getrefcount(storage) > alone.storage_references or not storage.resizable():
        return False
    return _storage_uses(storage._cdata) <= alone.storage_uses


def calibrate_holders(probe: object) -> None:
    """Measure the references to a gradient that autograd alone holds, once. Call it outside of a backward pass.

    The counts are trusted if each further holder raises at least one of them: a name, an alias, a view, the storage, a
    NumPy array, a DLPack capsule. probe: as in `is_held_by_autograd_alone`.
    """
    references = sys.getrefcount(probe)
    if references in _alone or current_graph_task() >= 0:
        return
    # A debugger holds the variables of frames, and Dynamo would compile the code that measures.
    if sys.gettrace() is not None or callable(_callback_of_frames()):
        return
    with _measuring:
        if references in _alone:
            return
        found = {
            (is_view, hold): _count_holders(is_view, hold)
            for is_view in (False, True)
            for hold in (_hold_nothing, *_WAYS_TO_HOLD)
        }
        # Another thread has begun or ended a compilation meanwhile.
        if any(in_hook != references for in_hook, _ in found.values()):
            return
        alone = found[False, _hold_nothing][1], found[True, _hold_nothing][1]
        is_trusted = all(
            any(more > least for more, least in zip(counted, alone[is_view], strict=True))
            for (is_view, hold), (_, counted) in found.items()
            if hold is not _hold_nothing
        )
        _alone[references] = alone if is_trusted else None


def _hold_nothing(gradient: Tensor) -> Any:
    return None


_WAYS_TO_HOLD: tuple[Callable[[Tensor], Any], ...] = (lambda g: g, Tensor.detach, lambda g: g.narrow(0, 0, 1))
_WAYS_TO_HOLD += (Tensor.untyped_storage, Tensor.numpy, torch.to_dlpack)  # type: ignore[attr-defined]


def _count_holders(is_view: bool, hold: Callable[[Tensor], Any]) -> tuple[int, _Holders]:
    """Return an argument's reference count, and a gradient's counts in its hook while `hold(gradient)` is alive."""
    counts: list[tuple[int, _Holders]] = []

    # A function like `is_held_by_autograd_alone`, called with the same number of references.
    def count(gradient: Tensor, probe: object) -> tuple[int, _Holders]:
        base = gradient._base
        own = sys.getrefcount(gradient), _uses(gradient)
        of_base = (0, 0) if base is None else (sys.getrefcount(base), _uses(base))
        storage = gradient.untyped_storage()
        holders = _Holders(*own, sys.getrefcount(storage), _storage_uses(storage._cdata), *of_base)
        return sys.getrefcount(probe), holders

    class Hook:
        def __call__(self, gradient: Tensor) -> None:
            held = hold(gradient)
            counts.append(count(gradient, object()))
            del held

    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.zeros(2, device="cpu", requires_grad=True) * 2
        x.register_hook(Hook())
        ((x.view(1, 2) if is_view else x) * 2).sum().backward()
    return counts[0]


def leaves_behind(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that get gradients in a backward pass from these tensors."""
    waiting, seen = [x.grad_fn for x in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]


def keep_none(ctx: Any, inputs: Any = None, output: Any = None) -> None:
    """Pass None instead of zeros to a backward where no gradient arrives, as torch does for its own operations."""
    # Like `set_materialize_grads(False)`, which torch.compile refuses to trace.
    ctx.materialize_grads = False


def hooks_of_gradient(x: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks on the gradient of a leaf, and the hooks that are called once the gradient is in `x.grad`."""
    return [*(x._backward_hooks or {}).values()], [*(x._post_accumulate_grad_hooks or {}).values()]  # type: ignore[attr-defined]
