"""Conversions between the format and float32: the reported dtype of a tensor, casts, and new tensors.

The emulation treats the format as a further dtype, below float32. For bf16 and fp16 torch has this dtype, too. It is
then the `x.dtype` of a tensor in the format, code that asks for it gets a tensor in the format, and torch.float32 means
float32 on purpose. For any other format, `x.dtype` is torch.float32 in both cases, and the calling code is read to tell
them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.emulation.aliases import Alias, note_write, spec_of_memory, write_outside
from fpsim.emulation.arguments import tensors_in
from fpsim.emulation.calls import Action, Call
from fpsim.emulation.casts import (
    WIDE_DTYPES,
    asks_for_float32,
    dtype_in,
    has_process_group,
    is_called_by_sharding,
    is_of_machinery,
)
from fpsim.emulation.marks import MARK, WIDE, is_made_here, is_marked_wide, is_roundable, is_state, mark, unmark
from fpsim.emulation.operands import Rounds, leaves_float32
from fpsim.emulation.promotion import NUMBERS, number_in_format, numbers_in_format
from fpsim.tensors.spec import FLOATING
from fpsim.torch_internals import base_of
from fpsim.torch_modes import layers_behind

__all__ = [
    "DTYPE_OF",
    "Asked",
    "asks_for_wide",
    "cast",
    "dtype_of",
    "fill",
    "for_each",
    "is_float64",
    "make",
    "mark_gradients",
    "named_dtype",
    "result_type",
    "set_data",
]

_ZERO_OR_NOTHING = frozenset(
    """
    zeros zeros_like new_zeros empty empty_like new_empty empty_strided new_empty_strided empty_permuted
    """.split()
)
# Names of tensor types, without the prefix "torch." or "torch.cuda.".
_TYPES = {torch.bfloat16: "BFloat16Tensor", torch.float16: "HalfTensor"}
_FLOAT64 = (torch.float64, torch.complex128)
_WIDE_TYPES = {"FloatTensor": torch.float32, "DoubleTensor": torch.float64}


class Asked(Enum):
    """The dtype that a call requests for its result."""

    NOTHING = "no dtype, or one that only the calling code tells"
    NARROW = "the format's"
    WIDE = "float32 or float64"


# Reported dtypes


DTYPE_OF: Any = Tensor.dtype.__get__  # type: ignore[attr-defined]  # a mode's call for `x.dtype`


def dtype_of(emulation: Any, frame: Any, x: Tensor) -> torch.dtype:
    """Return `x.dtype`; for a float32 tensor that is not float32 on purpose, return torch's dtype of the format's name.

    frame: the mode's frame, whose caller reads the attribute.
    """
    dtype, name = x.dtype, emulation.scope.dtype
    if name is None or dtype is not torch.float32 or not emulation.has_names:
        return dtype
    if emulation.has_wide and is_marked_wide(x):
        return dtype
    # Checkpoints, sharding and tracers ask for the memory's dtype, to make buffers; only a model asks for the format's.
    if frame is not None and frame.f_back is not None and is_of_machinery(frame.f_back.f_code.co_filename):
        return dtype
    # The dtype is recorded, because code may ask for it in a module whose own format has another name.
    emulation.names.add(name)
    return name  # type: ignore[no-any-return]


def named_dtype(
    emulation: Any, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Asked]:
    """Return the arguments with the container float32 in place of the format's dtype, and what dtype was requested."""
    name, dtype = emulation.scope.dtype, dtype_in(args, kwargs)
    if call.action is Action.CAST and call.name == "type":
        dtype = _dtype_of_type(args, kwargs) or dtype
    if call.name == "bfloat16" or call.name == "half":
        dtype = torch.bfloat16 if call.name == "bfloat16" else torch.float16
    if dtype is None or not emulation.has_names or (name is None and not emulation.names):
        return args, kwargs, Asked.NOTHING
    if call.name == "view" and name is not None and isinstance(args[0], Tensor):
        _require_no_bits(emulation, args[0], dtype)
    if dtype is not name and dtype not in emulation.names:
        # In a float64 model the container is float64, which `x.dtype` returns for every tensor.
        is_container = dtype is torch.float64 and emulation.scope.is_float64
        is_wide = name is not None and dtype in WIDE_DTYPES and not is_container
        return args, kwargs, Asked.WIDE if is_wide else Asked.NOTHING
    args = tuple(_container_for(x, dtype) for x in args)
    kwargs = {key: _container_for(x, dtype) for key, x in kwargs.items()}
    return args, kwargs, Asked.NARROW


def _require_no_bits(emulation: Any, x: Tensor, dtype: torch.dtype) -> None:
    """Raise NotImplementedError for a view of bits, because memory holds float32's bits, not those of the format."""
    name, is_ours = emulation.scope.dtype, x.dtype is torch.float32 and not is_marked_wide(x)
    is_of_bits = dtype is not name if is_ours else dtype is name and x.dtype is not name
    if is_of_bits and not (has_process_group() and is_called_by_sharding()):
        own = str(name if is_ours else x.dtype).removeprefix("torch.")
        raise NotImplementedError(
            f"view at {emulation.scope.name or 'the top level'} asks for the bits of a tensor of {own} as {dtype}. A "
            f"number of {name} is held in float32 here, which has other bits. Use x.to({dtype}) for the number, or do "
            f"this outside of the model."
        )


def _container_for(x: Any, dtype: torch.dtype) -> Any:
    """Replace the format's dtype by float32, and its tensor type by float32's; return other arguments unchanged."""
    if x is dtype:
        return torch.float32
    place, name = _type_named(x)
    return f"{place}.FloatTensor" if name == _TYPES[dtype] else x


def _type_named(x: Any) -> tuple[str, str]:
    """Return "torch.cuda" and "HalfTensor" for torch.cuda.HalfTensor or its name; ("", "") for anything else."""
    if isinstance(x, type):
        x = f"{x.__module__}.{x.__name__}"
    place, _, name = x.rpartition(".") if isinstance(x, str) else ("", "", "")
    return (place, name) if place in ("torch", "torch.cuda") and name.endswith("Tensor") else ("", "")


def _dtype_of_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    _, word = _type_named(args[1] if len(args) > 1 else kwargs.get("dtype"))
    return {**{name: dtype for dtype, name in _TYPES.items()}, **_WIDE_TYPES}.get(word)


def result_type(emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `torch.result_type`, with the format's own dtype for tensors in the format."""

    # torch promotes by dtype and number of axes alone: one-element tensors without memory replace the arguments.
    def standing_for(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        is_narrow = x.dtype is torch.float32 and emulation.has_names and not is_marked_wide(x)
        name = emulation.scope.dtype if is_narrow else None
        return torch.empty([1] * x.dim(), dtype=name or x.dtype, device="meta")

    return func(*map(standing_for, args), **{key: standing_for(x) for key, x in kwargs.items()})


def mark_gradients(emulation: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark gradients from `x.grad` or torch.autograd.grad as float32 on purpose if their tensors are so marked."""
    if is_attribute := len(args) == 1 and not kwargs:
        inputs, gradients = args[0], (out,)
    else:
        inputs, gradients = args[1] if len(args) > 1 else kwargs["inputs"], out
    for x, gradient in zip((inputs,) if isinstance(inputs, Tensor) else inputs, gradients, strict=False):
        if not isinstance(gradient, Tensor):
            continue
        # The tensors behind transforms are marked too, so that the mark is known after the transforms end.
        if emulation.has_wide and any(map(is_marked_wide, (x, *layers_behind(x)))):
            emulation.mark_wide(gradient, *layers_behind(gradient))
        # A gradient of torch.autograd.grad is the result of a call: from here on it counts as made here.
        elif not is_attribute:
            for y in (gradient, *layers_behind(gradient)):
                if not is_made_here(y):
                    unmark(y)


# Casts


def is_float64(x: Any) -> bool:
    """True if `x` is a tensor of float64 or complex128."""
    return isinstance(x, Tensor) and x.dtype in _FLOAT64


def asks_for_wide(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """True if a call asks for float32 or float64 by name, or for float64 in any way if the model is not float64."""
    if dtype_in(args, kwargs) in _FLOAT64 and not emulation.scope.is_float64:
        return True
    return asks_for_float32(func, call.name, args, kwargs)


def cast(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
) -> Any:
    """Run a cast; if torch's dtype does not change, it is a cast between float32 and the format."""
    specs = emulation.scope.specs
    if call.name == "type" and len(args) == 1 and not kwargs:
        return _name_of_dtype(emulation, func, args[0])
    if call.name in ("half", "bfloat16"):
        if asked is not Asked.NARROW:  # another dtype of torch
            x = emulation.operand(args[0], Rounds.ALL_BUT_WIDE) if is_roundable(args[0]) else args[0]
            out = call(func, (x, *args[1:]), kwargs)
            emulation.carry_marks(out, [x], None, None)
            return out
        func, args = Tensor.to, (args[0], torch.float32)
    # If the format is float32, nothing is copied: a copy would change the order in which gradients are added up.
    if is_roundable(args[0]) and leaves_float32(specs, args[0]):
        out = call(func, args, kwargs)
        if is_float64(out):
            emulation.mark_wide(out)
        return out
    x = args[0]
    like = next((y for y in (*args[1:], *kwargs.values()) if isinstance(y, Tensor)), None)
    if call.name in ("float", "double") or asked is Asked.WIDE or (like is not None and is_marked_wide(like)):
        is_wide = True
    else:
        is_wide = asked is Asked.NOTHING and like is None and asks_for_float32(func, call.name, args, kwargs)
    alias = emulation.aliases.of(x)
    is_ours = is_made_here(x) or (alias is not None and is_made_here(alias.base))
    # A cast of a result to its own dtype returns the tensor itself, which later writes have to reach. A tensor that
    # really has a dtype of few bits is widened first. A buffer is read as it is.
    stays = (not is_wide and is_ours) or x.dtype not in WIDE_DTYPES
    if is_roundable(x) and not (is_state(x) or emulation.leaves_raw((x,)) or stays):
        x = emulation.operand(x, Rounds.ALL_BUT_WIDE)
    out = call(func, (x, *args[1:]), kwargs)
    if is_float64(out) and not (emulation.scope.is_float64 or is_float64(x)):
        emulation.mark_wide(out)
        return out
    if not isinstance(out, Tensor) or not is_roundable(out):
        return out
    # The call only moves the tensor to another device.
    if like is None and dtype_in(args, kwargs) is None and call.name == "to":
        emulation.carry_marks(out, [x], None, None)
        return out
    if is_wide:
        if not is_marked_wide(x) or out is not x:
            # torch returns the tensor itself, which is float32 already: a copy is marked, and not this tensor.
            out = out.clone() if out is args[0] or out is x else out
            emulation.mark_wide(out)
        return out
    if out.dtype not in WIDE_DTYPES:
        return out
    if stays and out is x and not is_marked_wide(x):
        emulation.prepare_target(x)
        return x
    result = emulation.new_operand(out) if is_marked_wide(out) else emulation.operand(out, Rounds.ALL)
    # torch would have returned its argument itself, a tensor from outside: writes to the result go to its memory.
    if result is not args[0] and out is x and not is_made_here(args[0]):
        emulation.aliases.add(result, Alias(args[0], own=partial(_itself, args[0])))
    return result


def _itself(x: Tensor) -> Tensor:
    return x


def _name_of_dtype(emulation: Any, func: Callable[..., Any], x: Tensor) -> Any:
    type_name, name = func(x), emulation.scope.dtype
    place, kind = _type_named(type_name)
    is_narrow = name is not None and emulation.has_names and kind == "FloatTensor" and not is_marked_wide(x)
    return f"{place}.{_TYPES[name]}" if is_narrow else type_name


# New tensors


def make(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
) -> Any:
    """Make a new tensor: float32 on purpose, unless it is made like another one or asks for the format's dtype."""
    out = call(func, args, kwargs)
    if not isinstance(out, Tensor) or not is_roundable(out):
        return out
    if isinstance(kwargs.get("out"), Tensor):
        return out if is_marked_wide(out) else emulation.round_result(out, call, (), [], out)
    others = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
    # torch.as_tensor(x, dtype=...) may return x itself, and is a cast.
    if any(out is x for x in others):
        return out if dtype_in(args, kwargs) is None else cast(emulation, Tensor.to, call, args, kwargs, asked)
    if asked is not Asked.NOTHING:
        is_wide = asked is Asked.WIDE
    elif dtype_in(args, kwargs) is not None:
        is_wide = asks_for_wide(emulation, func, call, args, kwargs)
    elif call.action is Action.LIKE:
        like = args[0] if args else kwargs.get("input")
        is_wide = isinstance(like, Tensor) and is_marked_wide(like)  # whatever dtype the fill value has
    else:
        is_wide = not others or any(is_marked_wide(x) for x in others)
    if is_wide:
        emulation.mark_wide(out)
        return out
    # Every format except e8m0 has zero; empty memory has no numbers to round.
    spec = emulation.scope.specs.activation
    if spec is not None and call.name in _ZERO_OR_NOTHING and getattr(spec.fmt, "specials", None) != "scale":
        mark(out, spec.text)
        return out
    return out if out.requires_grad and out.is_leaf else emulation.operand(out, Rounds.ALL)


def fill(emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a tensor with new numbers; a tensor in the format stays in the format, and a float32 one stays float32."""
    x = args[0] if args else next((y for y in kwargs.values() if isinstance(y, Tensor)), None)
    if not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
        return call(func, args, kwargs)
    is_wide = is_marked_wide(x)
    out = call(func, args, kwargs)
    if not is_wide and is_roundable(x):
        emulation.round_result(x, call, (), [], x)
    return out


def set_data(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `x.data = y` or `torch.ops.aten.set_`, after which `x` has the memory of `y` and its dtype."""
    # `x.set_(y)` reaches no mode. It counts as a write, after which `x` is rounded again.
    x, other = args[0], next((y for y in (*args[1:], *kwargs.values()) if isinstance(y, Tensor)), None)
    out = call(func, args, kwargs)
    if other is not None and not isinstance(x, nn.Parameter):
        unmark(x)
        if is_marked_wide(other):
            emulation.mark_wide(x)
    emulation.forget_operands()
    return out


def for_each(
    emulation: Any, func: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function of lists: results for tensors in the format are rounded, all others stay as they are."""
    # The other tensors are parameters, states and gradients from outside: optimizers work on lists of them.
    first = args[0] if args and isinstance(args[0], list | tuple) else ()
    for others in (*args[1:], *kwargs.values()):
        for i, y in enumerate(others if type(others) in (list, tuple) else (others,)):
            if not isinstance(y, Tensor) or i >= len(first):
                continue
            x = first[i]
            is_mixed = y.dtype not in FLOATING or x.dtype not in FLOATING
            if emulation.has_wide and not is_mixed:
                # This is `is_marked_wide` of both tensors, without the calls: an optimizer has thousands of tensors.
                known: Any = getattr(x, MARK, None)
                other: Any = getattr(y, MARK, None)
                is_mixed = (bool(known) and known[0] == WIDE) is not (bool(other) and other[0] == WIDE)
                is_mixed = is_mixed and (known is not None or not call.in_place)
            # torch also computes tensor by tensor if lists have several dtypes.
            if is_mixed:
                return _each_alone(emulation, call, first, args, kwargs)
    if call.in_place and len(first) > 1:
        for i in range(len(first)):
            for_each(emulation, func, call, *_of_one(i, args, kwargs))
        return [*first]
    known = [(x, is_roundable(x) and _is_ours(emulation, call, x), is_marked_wide(x)) for x in first]
    if all(is_ours for _, is_ours, _ in known):
        operands = [emulation.prepared(y, Rounds.ALL_BUT_WIDE, []) for y in args[call.in_place :]]
        args = (first, *operands) if call.in_place else tuple(operands)
        kwargs = {name: emulation.prepared(y, Rounds.ALL_BUT_WIDE, []) for name, y in kwargs.items()}
        spec = emulation.scope.specs.activation
        if call.has_threshold and spec is not None and not any(is_wide for _, _, is_wide in known):
            args = tuple(numbers_in_format(y, spec.fmt, NUMBERS) for y in args)
    if call.in_place and first:
        _in_place(emulation, func, call, first[0], args[1:], kwargs)
        return [*first]
    out = call(func, args, kwargs)
    if not any(is_ours for _, is_ours, _ in known) or not isinstance(out, list | tuple):
        return out
    results = []
    for y, (x, is_ours, is_wide) in zip(out, known, strict=True):
        if is_wide and isinstance(y, Tensor):
            emulation.mark_wide(y)
        is_rounded = is_ours and not is_wide and isinstance(y, Tensor)
        results.append(emulation.round_result(y, call, (x,), [], None) if is_rounded else y)
    return type(out)(results)


def _each_alone(emulation: Any, call: Call, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of lists tensor by tensor, by the method of the same name."""
    name = call.name.removeprefix("_foreach_")
    method = getattr(Tensor, name, None) or getattr(Tensor, name.removesuffix("_"))
    results = []
    with emulation:
        for i, x in enumerate(first):
            one, named = _of_one(i, args[1:], kwargs)
            out = method(x, *map(_only, one), **{key: _only(y) for key, y in named.items()})
            results.append(x.copy_(out) if call.in_place and out is not x else out)
    return results if call.in_place else tuple(results)


def _only(x: Any) -> Any:
    return x[0] if isinstance(x, list) else x


def _is_ours(emulation: Any, call: Call, x: Tensor) -> bool:
    """True if `x` counts as in the format: an emulated result, or a parameter that an optimizer's step reads."""
    return is_made_here(x) or (emulation.scope.write is not None and not call.in_place and emulation.is_stored(x))


def _of_one(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the i-th tensor of a list."""

    def pick(y: Any) -> Any:
        return [y[i]] if isinstance(y, list | tuple) else y

    return tuple(map(pick, args)), {name: pick(y) for name, y in kwargs.items()}


def _in_place(
    emulation: Any, func: Callable[..., Any], call: Call, x: Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run a function of lists in place on one tensor of a list."""
    is_wide, is_stored = is_marked_wide(x), emulation.is_stored(x)
    is_in_step = is_stored and emulation.scope.write is not None
    spec = emulation.scope.specs.activation if is_in_step or not is_stored else spec_of_memory(emulation, x)
    is_rounded = not is_wide and spec is not None and (is_stored or (is_made_here(x) and is_roundable(x)))
    number: Any = others[0] if others else None
    number = number[0] if isinstance(number, list | tuple) and number else number
    takes_number = is_rounded and call.name == "_foreach_mul_" and type(number) in (float, int) and x.is_cpu

    def write(target: Tensor, *rest: Any, **named: Any) -> None:
        # On the CPU torch casts the number to the tensor's dtype here; its backward pass uses the number uncast.
        product = target.detach() * number_in_format(number, spec.fmt) if takes_number and spec else None
        func([target], *rest, **named)
        if product is not None:
            target.data.copy_(product)

    if is_stored:
        write_outside(emulation, write, call, (x, *others), kwargs)
        return
    known_base = emulation.format_of_base(x)
    call(write, (x, *others), kwargs)
    if is_rounded:
        emulation.round_result(x, call, (x,), [], x)
        emulation.know_again(base_of(x), known_base, call)
    note_write(emulation, x)
