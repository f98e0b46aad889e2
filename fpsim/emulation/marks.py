"""Marks: the format that a tensor's values are in, so that nothing is rounded twice."""

from __future__ import annotations

import itertools
import weakref
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fpsim.tensors.spec import FLOATING, RoundingSpec
from fpsim.torch_internals import base_of, version_of
from fpsim.torch_modes import has_transform, layers_behind

__all__ = [
    "MARK",
    "OF_A_WEIGHT",
    "WIDE",
    "WIDE_MARK",
    "ByIdentity",
    "alone_of",
    "forget",
    "forget_everywhere",
    "format_of",
    "is_leaf",
    "is_made_here",
    "is_marked_wide",
    "is_roundable",
    "is_rounded_at",
    "is_seen_from_outside",
    "is_state",
    "is_view_of_weight",
    "is_weight",
    "is_wide_tensor",
    "mark",
    "mark_as_seen_from_outside",
    "mark_as_state",
    "mark_as_view_of_weight",
    "mark_as_weight",
    "mark_like",
    "mark_of",
    "mark_of_new",
    "mark_rounded",
    "mark_wide",
    "note_inference_write",
    "unmark",
    "was_any_made_wide",
    "writes_behind",
    "writes_to",
]

# Suffix of the format in a weight's mark, so that a module that uses the tensor as an activation still rounds it.
OF_A_WEIGHT = " of a weight"
# The mark of tensors that are float32 on purpose, and not in the format.
WIDE = "wide"
MARK = "_fpsim"  # the attribute of a tensor where its mark is


# A mark is a plain tuple, because torch.save writes it with the tensor, and torch.load(weights_only=True) takes no
# class. It holds the rounding's text, the number of writes to the tensor when it was marked, the scale of a gradient
# (None for 1), and whether the tensor has a graph node at which its gradient is rounded. This is False for a leaf, and
# for a tensor that requires a gradient only later. The mark is valid until the tensor is written to. WIDE stands for a
# dtype, not for values, and stays valid after writes.
Mark = tuple[str, int | None, Tensor | None, bool]

WIDE_MARK: Mark = (WIDE, 0, None, True)  # one for all tensors that are float32 on purpose, known by identity


class _MarkAtScale(tuple[Any, ...]):
    """The mark of a gradient rounded at a scale. Copies do not inherit it: the scale is compared by identity."""

    __slots__ = ()

    # Serialised as an empty torch.Size, which torch.load(weights_only=True) accepts and which reads as no mark.
    def __reduce__(self) -> Any:
        return torch.Size, ((),)


def is_roundable(x: Tensor) -> bool:
    """True if the emulation rounds tensors of this kind: dense ones of a floating dtype that torch computes with."""
    return x.dtype in FLOATING and x.layout is torch.strided


def mark_as_weight(x: Tensor) -> None:
    """Mark `x`, which was computed from parameters, as a weight wherever it is used."""
    if not isinstance(x, nn.Parameter):
        x._fpsim_weight = True  # type: ignore[attr-defined]


def is_weight(x: Tensor) -> bool:
    """True if `x` has the role of a weight: a parameter, or a tensor marked as one."""
    # `type` first: `isinstance` of a Parameter runs Python code of its metaclass, and most tensors are plain.
    is_parameter = type(x) is not Tensor and isinstance(x, nn.Parameter)
    return is_parameter or getattr(x, "_fpsim_weight", False)


def mark_as_view_of_weight(x: Tensor) -> None:
    """Mark `x` as holding values of a weight and nothing else: a product with `x` counts as a product with a weight."""
    if not is_weight(x):
        x._fpsim_view_of_weight = True  # type: ignore[attr-defined]


def is_view_of_weight(x: Tensor) -> bool:
    """True if `x` is a weight, or a view, copy or slice of one."""
    return is_weight(x) or getattr(x, "_fpsim_view_of_weight", False)


def mark_as_state(x: Tensor) -> None:
    """Mark `x` as a buffer of a quantised model: values written to it stay as computed."""
    x._fpsim_state = True  # type: ignore[attr-defined]


def is_state(x: Tensor) -> bool:
    """True if `x` is a buffer of a quantised model."""
    return getattr(x, "_fpsim_state", False)


def mark_as_seen_from_outside(x: Tensor) -> None:
    """Mark `x` as a view of a tensor from outside, which is not rounded yet."""
    x._fpsim_outside = True  # type: ignore[attr-defined]


def is_seen_from_outside(x: Tensor) -> bool:
    """True if `x` is a view of a tensor from outside."""
    return getattr(x, "_fpsim_outside", False)


# Inference tensors have no version counter. One counter serves all of them, negative to differ from every version.
_inference_writes = itertools.count(1)
_inference_version = 0


def note_inference_write() -> None:
    """Invalidate the marks of all inference tensors, one of which may have been written to."""
    global _inference_version
    _inference_version = -next(_inference_writes)


def writes_to(x: Tensor) -> int:
    """Return a number that changes whenever `x` is written to."""
    return _inference_version if x.is_inference() else version_of(x)


def writes_behind(x: Tensor) -> Any:
    """Return a value that changes whenever `x` is written to, also for the tensors of a transform."""
    if not has_transform():
        return writes_to(x)
    # A tensor inside of vmap counts no writes, but the tensors behind it do.
    return (writes_to(x), *[version_of(y) for y in layers_behind(x) if not y.is_inference()])


def is_leaf(x: Tensor) -> bool:
    """True if `x`, which requires a gradient, is not the result of an operation."""
    # A view is a result of an operation. torch's `is_leaf` raises an error for a view whose base has changed.
    return base_of(x) is None and x.is_leaf


def mark(x: Tensor, text: str, log2_scale: Tensor | None = None) -> None:
    """Mark `x` as rounded at this scale by the rounding that `text` names."""
    # `writes_to` and `is_leaf` are inlined, because this runs for every result.
    is_inference = x.is_inference()
    writes = _inference_version if is_inference else version_of(x)
    has_place = x.requires_grad and not (base_of(x) is None and x.is_leaf)
    if log2_scale is not None:
        x._fpsim = _MarkAtScale((text, writes, log2_scale, has_place))  # type: ignore[attr-defined]
    elif writes or has_place or is_inference:
        x._fpsim = (text, writes, None, has_place)  # type: ignore[attr-defined]
    else:
        x._fpsim = mark_of_new(text)  # type: ignore[attr-defined]


@cache
def mark_of_new(text: str) -> Mark:
    """Return the mark of rounded tensors that have no gradient and no writes. It is compared by identity."""
    return text, 0, None, False


_has_wide = False


def mark_wide(x: Tensor) -> None:
    """Mark `x` as float32 on purpose, also after writes."""
    global _has_wide
    _has_wide = True
    x._fpsim = WIDE_MARK  # type: ignore[attr-defined]
    # The tensors behind a transform's tensors outlive the transform.
    if has_transform():
        for y in layers_behind(x):
            y._fpsim = WIDE_MARK  # type: ignore[attr-defined]


def is_marked_wide(x: Tensor) -> bool:
    """True if `x` is float32 on purpose."""
    mark = getattr(x, "_fpsim", None)
    if mark is None:
        return has_transform() and _is_wide_behind(x)
    return bool(mark and mark[0] == WIDE)


def is_wide_tensor(x: Any) -> bool:
    """True if an argument is a roundable tensor that is float32 on purpose."""
    return isinstance(x, Tensor) and is_roundable(x) and is_marked_wide(x)


def was_any_made_wide() -> bool:
    """True if any tensor of this process was ever marked as float32 on purpose; until then nobody searches for one."""
    return _has_wide


def alone_of(x: Tensor, new: Mark) -> Mark | None:
    """Return the mark of a dense float32 tensor if it is `new` or WIDE_MARK, and its only mark; else None.

    new: a mark from `mark_of_new`.
    """
    # A tensor with another mark, such as that of a weight, has a second attribute.
    notes = x.__dict__
    if len(notes) != 1 or x.dtype is not torch.float32:
        return None
    if x.layout is not torch.strided:
        return None
    mark = notes.get(MARK)
    # An inference tensor, which has no version, never has this mark, because `mark` makes another tuple for it.
    if mark is new:
        return None if version_of(x) or x.requires_grad else new
    if mark is WIDE_MARK:
        return WIDE_MARK
    known = format_of(x)
    return new if known == new[0] else WIDE_MARK if known == WIDE else None


def mark_like(x: Tensor, known: str) -> None:
    """Copy to `x` the mark of a tensor with the same values. The gradient is rounded at that tensor, not at `x`."""
    if known == WIDE:
        mark_wide(x)
    else:
        x._fpsim = (known, writes_to(x), None, True)  # type: ignore[attr-defined]


def unmark(x: Tensor) -> None:
    """Drop the format of `x`, which still counts as the result of an emulated call."""
    x._fpsim = ("", None, None, True)  # type: ignore[attr-defined]


def forget(x: Tensor) -> None:
    """Remove the mark: `x` is then like a tensor that no emulated call has seen."""
    vars(x).pop(MARK, None)


def mark_of(x: Tensor) -> Mark | None:
    """Return the mark of a tensor if it is float32 on purpose, or has not changed since it was marked; else None."""
    mark = getattr(x, "_fpsim", None)
    if not mark or mark[0] == WIDE:
        return mark or None
    return mark if mark[1] == writes_to(x) and mark[3] >= x.requires_grad else None


def format_of(x: Tensor) -> str | None:
    """Return the format of `x`; None if the format is unknown, or if `x` is a gradient rounded at a scale."""
    mark = getattr(x, "_fpsim", None)
    # Numbers rounded at a scale may lie between the format's values. An empty mark is the copy of a mark with a scale.
    if not mark or mark[2] is not None:
        return WIDE if mark is None and has_transform() and _is_wide_behind(x) else None
    if mark[0] == WIDE:
        return WIDE
    writes = _inference_version if x.is_inference() else version_of(x)
    return mark[0] if mark[1] == writes and mark[3] >= x.requires_grad else None


def _is_wide_behind(x: Tensor) -> bool:
    """True if the tensor behind the transform's `x` is float32 on purpose."""
    marks = (getattr(y, "_fpsim", None) for y in layers_behind(x))
    return any(mark and mark[0] == WIDE for mark in marks)


def is_made_here(x: Tensor) -> bool:
    """True if `x` is the result of an emulated call, also after writes; else it came from outside."""
    return getattr(x, "_fpsim", None) is not None


def is_rounded_at(gradient: Tensor, log2_scale: Tensor | None, spec: RoundingSpec) -> bool:
    """True if this tensor object, perhaps passed on by an addition, has the mark of `spec` and of this scale."""
    # The scale is compared by identity: a comparison of numbers would wait for the GPU.
    mark = mark_of(gradient)
    return mark is not None and mark[0] == spec.text and mark[2] is log2_scale


def mark_rounded(gradient: Tensor, log2_scale: Tensor | None, spec: RoundingSpec) -> None:
    """Mark this tensor object as rounded by `spec` at this scale."""
    mark(gradient, spec.text, log2_scale)


# A weak dictionary with tensors as keys. WeakKeyDictionary compares keys by `==`, which returns a tensor for tensors.


Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Weak dictionary of tensors by identity: an entry lives as long as its tensor.

    held: {the tensor's id: (a reference to it, its value)}.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def get(self, x: Tensor) -> Value | None:
        """Return the value of a tensor, or None."""
        # The reference is compared too: the id may be that of a freed tensor, whose callback has not run yet.
        found = self.held.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def setdefault(self, x: Tensor, value: Value) -> Value:
        """Return the value of a tensor; if it has none, set it to `value` first."""
        key = id(x)
        found = self.held.get(key)
        if found is not None and found[0]() is x:
            return found[1]
        # A strong reference would make a cycle, which keeps all values alive until the garbage collector runs.
        own = weakref.ref(self)

        def forget(_: object) -> None:
            found = own()
            if found is not None:
                found.held.pop(key, None)

        self.held[key] = weakref.ref(x, forget), value
        return value

    def __setitem__(self, x: Tensor, value: Value) -> None:
        self.held.pop(id(x), None)
        self.setdefault(x, value)

    def items(self) -> list[tuple[Tensor, Value]]:
        """Return the tensors that are alive, with their values."""
        return [(x, value) for reference, value in [*self.held.values()] if (x := reference()) is not None]


def forget_everywhere(x: Tensor) -> None:
    """Remove `x` from every dictionary, because its contents are about to be swapped with those of another tensor."""
    # The callbacks of its weak references are found by their module, and run as if the tensor were gone.
    for reference in weakref.getweakrefs(x):
        callback = reference.__callback__
        if getattr(callback, "__module__", None) == __name__:
            callback(reference)
