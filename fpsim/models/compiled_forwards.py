"""Emulated modules under torch.compile: each is one call of the program, recorded when the program is made.

The mode of the emulation reads the calling code and marks tensors, which Dynamo cannot follow. For this reason the
emulation runs on stand-ins, and its operations are recorded, forward and backward.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.backward_code import is_of_a_model
from fpsim.emulation.marks import MARK
from fpsim.emulation.scope import active
from fpsim.torch_internals import (
    compile_as_one,
    constant_under_compile,
    is_recorded,
    leaves_behind,
    map_leaves,
    register_container,
    standing_in,
    tensors_of,
    watched_seeds,
)
from fpsim.torch_modes import forward_hooks_of, has_transform

__all__ = ["call_under_dynamo", "call_with_hooks_apart", "note_copy", "open_objects", "register", "require_own_thread"]

_forwards: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by their tokens
_tokens = itertools.count()
_copies: weakref.WeakSet[Any] = weakref.WeakSet()  # were copied or loaded, and are not prepared yet
# For models that are being recorded, by the ids of their listeners: the modules that other threads have called.
_recorded: dict[int, list[str]] = {}


def register(forward: Any) -> str:
    """Return a token that identifies an `EmulatedForward` and its policy in a program of torch.compile."""
    token = f"forward {next(_tokens)}"
    _forwards[token] = forward
    _copies.discard(forward)
    return token


def require_own_thread(forward: Any) -> None:
    """Raise NotImplementedError for a call of a model that another thread is recording."""
    # While a model is recorded, its parameters are replaced by stand-ins, with which this thread would compute.
    if _recorded and active.stand_ins is None and (others := _recorded.get(id(forward.listeners))) is not None:
        others.append(forward.name or type(forward.module).__name__)
        raise _of_another_thread(others[0])


def _of_another_thread(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"A thread called {name} while torch.compile made a program of its model in another one, which cannot hold "
        f"that. Run all of a compiled forward in the thread that calls it, and compile it before other threads do."
    )


def note_copy(forward: Any) -> None:
    """Note an `EmulatedForward` that was copied or loaded, and is not ready yet."""
    _copies.add(forward)


def call_under_dynamo(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an `EmulatedForward` where torch.compile traces it."""
    if forward.policy is None:
        return forward.run(forward.module, args, kwargs)
    listeners, is_inside = forward.listeners, _prepare_for_dynamo()
    if is_inside or listeners.scaling is not None or listeners.observer is not None or forward.is_delayed():
        return _run_apart(forward, args, kwargs)
    tensors = {**dict(forward.module.named_parameters()), **dict(forward.module.named_buffers())}
    # Each flag becomes a condition of the program, which is compiled again if a flag changes.
    flags = [module.training for module in forward.module.modules()]
    given = [isinstance(x, nn.Parameter) for x in _tensors_among((args, kwargs))]
    return _recorded_forward(forward.token, tensors, flags, given, args, kwargs)


def _tensors_among(x: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dictionaries."""
    # This is plain code, without the tree functions of torch: Dynamo reads it line by line.
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = [*x.values()]
    return [y for item in x for y in _tensors_among(item)] if isinstance(x, tuple | list) else []


def _parameters_of(arguments: Any, given: list[bool]) -> list[Tensor]:
    return [x for x, is_parameter in zip(_tensors_among(arguments), given, strict=True) if is_parameter]


def _recorded_forward(
    token: str, tensors: dict[str, Tensor], flags: list[bool], given: list[bool], args: Any, kwargs: Any
) -> Any:
    """Run the forward of `token` with these tensors in place of parameters and buffers.

    flags: the training flags of modules, which are conditions of the program.
    given: for each tensor among the arguments, whether it is a parameter of a module around this one.
    """
    forward = _forwards[token]
    # True if Dynamo traces this function line by line: Dynamo has then given up recording the call as one operation.
    is_given_up = torch.compiler.is_dynamo_compiling()
    if is_given_up or not any(map(is_recorded, (*tensors.values(), *tensors_of((args, kwargs))))):
        return _run_apart(forward, args, kwargs)
    names = {id(x): name for name, x in (*forward.module.named_parameters(), *forward.module.named_buffers())}
    for name, x in (*forward.module.named_parameters(), *forward.module.named_buffers()):
        _give_attributes(tensors[name], vars(x))
    attributes = _Attributes(forward.module)
    try:
        _require_nothing_around(forward.module)
        with (
            standing_in(forward.module, tensors, _parameters_of((args, kwargs), given)) as active.stand_ins,
            watched_seeds() as seeded,
        ):
            others: list[str] = []
            _recorded[id(forward.listeners)] = others
            try:
                out = forward.run(forward.module, args, kwargs)
            except Exception as error:
                if others:
                    raise _of_another_thread(others[0]) from error
                raise
            finally:
                del _recorded[id(forward.listeners)]
            if others:
                raise _of_another_thread(others[0])
            if (kept := attributes.traced()) is not None:
                raise NotImplementedError(
                    f"The forward of {type(forward.module).__name__} keeps a tensor as {kept!r}, which a compiled "
                    f"program cannot do. Use a buffer, and write to it in place: self.buffer.copy_(...)."
                )
            if (source := seeded()) is not None:
                raise NotImplementedError(
                    f"The forward seeds random numbers of {source}, or draws some that are no tensor, which a compiled "
                    f"program would do once. Seed before the model is called, and draw with torch.rand and its like."
                )
        lost = next((x for x in leaves_behind(tensors_of(out)) if not is_recorded(x)), None)
        # The mode sees the operations of a Function, but not its arguments.
        if lost is not None:
            raise NotImplementedError(
                f"An autograd Function is given {names.get(id(lost), 'a tensor')!r} from a list, a closure or an "
                f"object that keeps it, and a compiled program would give it no gradient. Hand it over as an attribute "
                f"of its module, self.weight, or as an argument of the forward."
            )
        out, unknown = open_objects(out)
        if unknown is not None:
            raise NotImplementedError(
                f"Got a {unknown} in what the forward returns, which a compiled program cannot give to its caller. "
                f"Expected tensors and numbers in lists, tuples, dicts, pytrees and objects of plain Python, such as "
                f"transformers' DynamicCache. Return only those."
            )
    # There is a warning too, because Dynamo's own error says only that a type is unsupported.
    except Exception as error:
        warnings.warn(
            f"{type(forward.module).__name__} cannot be compiled as one program: {type(error).__name__}: {error} "
            f"Without fullgraph=True it runs as it does without a compiler.",
            stacklevel=2,
        )
        attributes.restore()
        raise
    finally:
        active.stand_ins = None
    return out


def _require_nothing_around(module: nn.Module) -> None:
    """Raise NotImplementedError for a call inside hooks or a transform, which a program cannot hold."""
    if any(map(is_of_a_model, forward_hooks_of(module))):
        raise NotImplementedError(
            f"{type(module).__name__} has forward hooks, which a compiled program runs in float32 around its forward. "
            f"Take them off, register them on a module inside, or call the model without the compiler."
        )
    if has_transform():
        raise NotImplementedError(
            "A transform of torch.func, such as grad or vmap, calls the model inside of a compiled program, which "
            "cannot hold its emulation. Leave what calls the transform uncompiled."
        )


class _Attributes:
    """The attributes of modules before a recorded call, except for parameters, buffers and modules."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (name, vars(module), {key: (x, _copied(x)) for key, x in _plain(vars(module)).items()})
            for name, module in model.named_modules()
        ]

    def traced(self) -> str | None:
        """Return the name of an attribute that holds a tensor of the recording, and would keep it after the call."""
        for name, attributes, _ in self._kept:
            for key, value in _plain(attributes).items():
                if any(map(is_recorded, tensors_of(value))):
                    return f"{name}.{key}" if name else key
        return None

    def restore(self) -> None:
        """Put all attributes back: the same objects, and lists and dictionaries with their former contents."""
        for _, attributes, before in self._kept:
            for key in _plain(attributes).keys() - before.keys():
                del attributes[key]
            for key, (value, content) in before.items():
                attributes[key] = value
                if type(value) is list:
                    value[:] = content
                elif type(value) is dict:
                    value.clear()
                    value.update(content)


_OF_MODULES = frozenset(vars(nn.Module()))


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that a forward may have set, which are neither torch's nor fpsim's."""
    return {key: x for key, x in attributes.items() if key not in _OF_MODULES and not key.startswith("_fpsim")}


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict) else value


def _give_attributes(stand_in: Tensor, attributes: dict[str, Any]) -> None:
    """Copy a parameter's attributes, except fpsim's marks, to a stand-in: some forwards read them, such as muP's."""
    own = vars(stand_in)
    own.update({k: v for k, v in attributes.items() if k not in own and k != MARK and not k.startswith("_dynamo")})


_run_apart: Any = None  # set once torch.compile has come to an emulated module


@constant_under_compile
def _prepare_for_dynamo() -> bool:
    """Prepare the functions that torch.compile calls without tracing them. Returns whether an emulation is active."""
    global _run_apart
    # Copies are prepared now, because Dynamo cannot trace how a forward prepares itself.
    for forward in list(_copies):
        forward.prepare()
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


_hooked_apart: Any = None


def call_with_hooks_apart(slot: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module that has forward hooks, where torch.compile traces it, outside of the program."""
    _prepare_for_hooks()
    return _hooked_apart(slot, args, kwargs)


@constant_under_compile
def _prepare_for_hooks() -> None:
    global _hooked_apart
    if _hooked_apart is None:
        _hooked_apart = torch.compiler.disable(
            lambda slot, args, kwargs: slot.run(slot.module(), args, kwargs),
            reason="an emulated module with forward hooks cannot be part of a compiled program, which would run them "
            "in float32. Take them off, register them on a module inside; or compile without fullgraph=True.",
        )


# Objects that a compiled program returns: they are flattened to types that a program can return, and then rebuilt


_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device)  # constants of a program
# The types of objects, and types that objects hold, by key. A program returns a type as this key, a string.
_types: dict[str, type] = {}

# If a type overrides one of these methods, the attributes do not describe the whole object.
_MAKING = ("__new__", "__setattr__")


@dataclass(frozen=True)
class _Object:
    """An object in a form that a program can return; unflattening makes the object again.

    of: the type of the object, by its key in `_types`.
    names, values: its attributes, with their values flattened.
    """

    of: str
    names: tuple[str, ...]
    values: list[Any]


@dataclass(frozen=True)
class _Constant:
    value: Any


@dataclass(frozen=True)
class _Type:
    place: str


# The compiler traces the next three functions line by line.


def _make_object(values: Any, context: Any) -> Any:
    """Return the object, made without its `__init__`."""
    of, names = context
    instance: Any = object.__new__(_types[of])
    for name, value in zip(names, values):
        setattr(instance, name, value)
    return instance


def _make_constant(values: Any, context: Any) -> Any:
    return context


def _make_type(values: Any, context: Any) -> Any:
    return _types[context]


register_container(_Object, lambda x: (x.values, (x.of, x.names)), _make_object)
register_container(_Constant, lambda x: ([], x.value), _make_constant)
register_container(_Type, lambda x: ([], x.place), _make_type)


def open_objects(out: Any) -> tuple[Any, str | None]:
    """Return `out` with objects of plain Python as `_Object`s, and the name of the first type that cannot be one."""
    unknown: list[str] = []

    def opened(leaf: Any, outer: tuple[int, ...] = ()) -> Any:
        if isinstance(leaf, _COMPUTED):
            return leaf
        if isinstance(leaf, _CONSTANTS):
            return _Constant(leaf)
        if isinstance(leaf, type):
            return _Type(_place(leaf))
        if not _is_plain(leaf) or id(leaf) in outer:
            unknown.append(type(leaf).__name__)
            return leaf
        inside = (*outer, id(leaf))
        values = [map_leaves(lambda inner: opened(inner, inside), value) for value in vars(leaf).values()]
        return _Object(_place(type(leaf)), tuple(vars(leaf)), values)

    result = map_leaves(opened, out)
    return result, unknown[0] if unknown else None


def _place(of: type) -> str:
    place = f"{of.__module__}.{of.__qualname__} at {id(of)}"
    _types[place] = of
    return place


def _is_plain(x: Any) -> bool:
    """Return whether the `__dict__` of `x` holds its whole state."""
    of = type(x)
    has_slots = any(vars(c).get("__slots__") for c in of.__mro__)
    is_made_plainly = not has_slots and all(getattr(of, name) is getattr(object, name) for name in _MAKING)
    return hasattr(x, "__dict__") and is_made_plainly and not isinstance(x, nn.Module) and not callable(x)
