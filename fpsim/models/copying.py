"""Carry over the attributes and hooks of parameters, which `copy.deepcopy` of a model loses.

torch's `Parameter.__deepcopy__` copies only numbers and `requires_grad`. Other libraries need more: `_no_weight_decay`
of Mamba and `infshape` of muP, by which optimizers and initialisations recognise a parameter, are attributes; the mask
that a sparse training keeps is a hook.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fpsim.emulation.marks import MARK
from fpsim.torch_internals import hooks_of_gradient

__all__ = ["carry_over"]

Memo = dict[int, Any]  # copy.deepcopy's memo: the copies, by the ids of the originals


def carry_over(model: nn.Module, memo: Memo) -> list[str]:
    """Give the copies of a model's parameters and buffers the attributes and hooks of the originals.

    Hooks are copied as `copy.deepcopy` copies the hooks of modules: functions are shared, and methods of a module
    become methods of its copy. A function that closes over a module or a parameter of the model, or that has it as a
    default, is copied too.

    Returns the names of the parameters and buffers with a hook that would still see the original: through an optimizer,
    a global name, or a list in a closure.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    own = {id(x) for _, x in tensors} | {id(module) for module in model.modules()}
    left_behind = []
    for name, x in tensors:
        duplicate = memo.get(id(x))
        # If a module copies itself in another way, `memo` lacks the copies of its tensors.
        if duplicate is None or duplicate is x:
            continue
        for attribute, value in vars(x).items():
            if attribute != MARK and attribute not in vars(duplicate):
                setattr(duplicate, attribute, _copied_value(value, memo))
        hooks, after = ([hook for hook in some if not _is_ours(hook)] for some in hooks_of_gradient(x))
        if any(_sees_the_original(hook, own) for hook in (*hooks, *after)):
            left_behind.append(name)
        elif hooks or after:
            is_trained = duplicate.requires_grad
            # torch puts no hooks on a parameter that is frozen.
            duplicate.requires_grad_()
            for hook in hooks:
                duplicate.register_hook(_copied(hook, own, memo))
            for hook in after:
                duplicate.register_post_accumulate_grad_hook(_copied(hook, own, memo))
            duplicate.requires_grad_(is_trained)
    return left_behind


def _is_ours(hook: Any) -> bool:
    """Return whether a hook belongs to this package: hooks of `fpsim.watch`, for one, watch only the original."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] == __name__.partition(".")[0]  # type: ignore[no-any-return]


def _copied_value(value: Any, memo: Memo) -> Any:
    try:
        return copy.deepcopy(value, memo)
    # Some values, such as a group of processes, cannot be copied: the copy shares them.
    except Exception:
        return value


def _copied(hook: Any, own: set[int], memo: Memo) -> Any:
    """Return the hook for a copy of the model."""
    if not isinstance(hook, FunctionType):
        return copy.deepcopy(hook, memo)
    if not _given(hook, own):
        return hook

    def moved(x: Any) -> Any:
        return memo[id(x)] if id(x) in own else x

    closure = tuple(cell if cell == CellType() else _cell(cell, moved) for cell in hook.__closure__ or ())
    defaults = None if hook.__defaults__ is None else tuple(map(moved, hook.__defaults__))
    duplicate = FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, closure)
    functools.update_wrapper(duplicate, hook)
    duplicate.__kwdefaults__ = {name: moved(x) for name, x in (hook.__kwdefaults__ or {}).items()}
    return duplicate


def _cell(cell: CellType, moved: Callable[[Any], Any]) -> CellType:
    """Return the same cell, because others may write to it; or a new one if the cell holds a part of the model."""
    content = moved(cell.cell_contents)
    return cell if content is cell.cell_contents else CellType(content)


def _given(hook: FunctionType, own: set[int]) -> list[Any]:
    """Return the parts of the model that a function closes over or has as a default."""
    return [x for x in _held(hook) if id(x) in own]


def _held(function: FunctionType) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _sees_the_original(hook: Any, own: set[int]) -> bool:
    """Return whether a copy of this hook would still refer to the original model, or to its optimizer."""
    # Objects that the hook reaches, each with a flag: whether a copy of the hook would share it.
    waiting: list[tuple[Any, bool]] = [(hook, False)]
    if isinstance(hook, FunctionType):
        given = {id(x) for x in _given(hook, own)}  # `_copied` replaces these
        waiting = [(x, True) for x in _inside(hook) if id(x) not in given]
    seen = set()
    while waiting:
        x, is_shared = waiting.pop()
        if isinstance(x, Optimizer) or (is_shared and id(x) in own):
            return True
        if (id(x), is_shared) in seen or isinstance(x, nn.Module | Tensor | type | ModuleType):
            continue
        seen.add((id(x), is_shared))
        is_shared |= isinstance(x, FunctionType | weakref.ref)
        waiting += [(inner, is_shared) for inner in _inside(x)]
    return False


def _inside(x: Any) -> Iterator[Any]:
    """Yield the values that an object holds, or that a function uses."""
    if isinstance(x, FunctionType):
        yield from _held(x)
        for name in _names(x.__code__):
            value = x.__globals__.get(name)
            if not isinstance(value, FunctionType) or value.__globals__ is x.__globals__:
                yield value
    elif isinstance(x, MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, weakref.ref):
        yield x()
    elif isinstance(x, Mapping):
        yield from (*x.keys(), *x.values())
    elif isinstance(x, list | tuple | set | frozenset):
        yield from x
    if not isinstance(x, FunctionType):
        yield from getattr(x, "__dict__", {}).values()


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(constant) for constant in inner))
