"""What torch.compile takes of an emulated module: one call, run as it is to make the program.

The mode reads what the code says and marks tensors, which Dynamo cannot follow. So the emulation runs itself, on
stand-ins, and what it computes is recorded, forward and backward.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from fpsim.emulation.scope import active
from fpsim.models.opened import open_objects
from fpsim.torch_internals import compile_as_one, constant_under_compile, is_traced, standing_in

__all__ = ["call_under_dynamo", "note_copy", "register"]

_forwards: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by their tokens
_tokens = itertools.count()
_copies: weakref.WeakSet[Any] = weakref.WeakSet()  # and what was loaded: not prepared yet


def register(forward: Any) -> str:
    """The token by which a program that torch.compile makes knows an `EmulatedForward` and its policy."""
    token = f"forward {next(_tokens)}"
    _forwards[token] = forward
    _copies.discard(forward)
    return token


def note_copy(forward: Any) -> None:
    """Note an `EmulatedForward` that was copied or loaded, and is not ready yet."""
    _copies.add(forward)


def call_under_dynamo(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.compile traces in the place of the true forward of an `EmulatedForward`."""
    if forward.policy is None:
        return forward.run(forward.module, args, kwargs)
    listeners, is_inside = forward.listeners, _prepare_for_dynamo()
    if is_inside or listeners.scaling is not None or listeners.observer is not None or forward.is_delayed():
        return _run_apart(forward, args, kwargs)
    tensors = {**dict(forward.module.named_parameters()), **dict(forward.module.named_buffers())}
    flags = [module.training for module in forward.module.modules()]  # each becomes a condition of the program
    return _recorded_forward(forward.token, tensors, flags, args, kwargs)


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
