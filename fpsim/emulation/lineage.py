"""Origin of the tensors of a call, for products: weights, or results of the products of an attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fpsim.emulation.arguments import tensors_in, typed_in
from fpsim.emulation.calls import LOOK_UPS, Action, Call
from fpsim.emulation.marks import is_roundable, is_view_of_weight, mark_as_view_of_weight
from fpsim.emulation.scope import Attended, Scope

__all__ = ["attended_among", "follow_attention", "know_copy", "note_views_of_weights", "weights_among"]


def weights_among(scope: Scope, originals: tuple[Any, ...], prepared: tuple[Any, ...]) -> dict[int, Tensor]:
    """Return the prepared arguments, by id, that are weights."""
    # The call's own arguments are checked, because the prepared ones may be rounded copies, which have no role.
    pairs = zip(tensors_in(originals), tensors_in(prepared), strict=True)
    return {id(made): made for x, made in pairs if is_view_of_weight(x) or scope.stands_in(x)}


def note_views_of_weights(scope: Scope, call: Call, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark views, copies and slices of a weight as weights, for products and for a scaling."""
    if scope.products is None and scope.listeners.scaling is None:
        return
    # A look-up in an embedding moves numbers of a weight, but its result is an activation.
    if call.action not in (Action.MOVE, Action.CAST) or call.name in LOOK_UPS:
        return
    operands = typed_in(args, kwargs)
    if operands and all(is_view_of_weight(x) or scope.stands_in(x) for x in operands):
        for x in tensors_in(out):
            if is_roundable(x) or x.is_complex():
                mark_as_view_of_weight(x)


def attended_among(scope: Scope, originals: tuple[Any, ...], prepared: tuple[Any, ...]) -> dict[int, Attended]:
    """Return the states of prepared arguments that come from q k^T of an attention with rounding points, by id."""
    known = scope.listeners.attended
    # Almost every call returns here, because only attention with rounding points records such tensors.
    if not known.held:
        return {}
    pairs = zip(tensors_in(originals), tensors_in(prepared), strict=True)
    found = ((x, made, one) for x, made in pairs if (one := known.get(x)) is not None)
    return {id(made): one if one.is_still(x) else Attended(None, None) for x, made, one in found}


def follow_attention(
    scope: Scope, function: Callable[..., Any], call: Call, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Record which results were computed from the scores, or from the weights, of an attention."""
    known = scope.listeners.attended
    if scope.products is None or scope.products.points is None or not known.held:
        return
    first = args[0] if args else None
    if isinstance(first, Tensor) and known.get(first) is not None:
        # Writes through x.data do not raise the version counter: from here on, the numbers of x are unknown.
        if call.name == "data" or call.writes_to_first(args, kwargs):
            known[first] = Attended(None, None)
    source = next((x for x in typed_in(args, kwargs) if known.get(x) is not None), None)
    if source is None:
        return
    found = known.get(source)
    assert found is not None
    # A computed result with the same rows still belongs to the attention, but has no scores. Its product with the
    # values is rounded at the rounding points, or refused if keys come in blocks, because blocks need the scores.
    for x in tensors_in(out):
        is_moved = call.action is Action.MOVE and source is first
        if known.get(x) is None and (is_moved or x.shape[-2:-1] == source.shape[-2:-1]):
            moved = _moved(found, source, x, function, call, args, kwargs) if found.is_still(source) else None
            known[x] = Attended(None, None) if moved is None else moved.of(x)


def know_copy(scope: Scope, x: Tensor, copy: Tensor) -> None:
    """Copy the tracked state of a tensor to its copy."""
    if (found := scope.listeners.attended.get(x)) is not None:
        scope.listeners.attended[copy] = found.of(copy)


def _moved(
    found: Attended, source: Tensor, x: Tensor, function: Callable[..., Any], call: Call, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Attended:  # fmt: skip
    """Return the state of a result: with scores if the call can move weights and scores alike; else without."""
    if found.scores is None or call.action not in (Action.MOVE, Action.CAST):
        return Attended(None, None)

    def move(y: Tensor) -> Tensor:
        return function(y, *args[1:], **kwargs)  # type: ignore[no-any-return]

    last = source.dim() - 1
    if call.name in PERMUTATIONS:
        axes = _permuted(call.name, args[1:], last + 1)
        place = None if axes is None or kwargs else axes.index(last - found.is_turned)
        return Attended(None, None) if place is None or place < last - 1 else found.moved(move, place == last - 1)
    is_kept = call.action is Action.CAST or call.name in KEEPING
    if not is_kept or source is not args[0] or x.shape[-2:] != source.shape[-2:]:
        return Attended(None, None)
    return found if x.shape == source.shape else found.moved(move)


# Operations that move no number along the axes of queries and keys, if these remain the last two axes.
KEEPING = frozenset(
    "contiguous clone view reshape view_as reshape_as unsqueeze squeeze flatten unflatten expand expand_as".split()
)
PERMUTATIONS = frozenset("mT mH adjoint t T H transpose swapaxes swapdims permute".split())


def _permuted(name: str, dims: tuple[Any, ...], n: int) -> list[int] | None:
    """Return the order of n axes after a call; None if it is unknown."""
    axes = list(range(n))
    if name == "permute":
        flat = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
        return [d % n for d in flat]
    a, b = dims if len(dims) == 2 else (-1, -2)
    # With more than two axes, t and H raise an error, and T, which is deprecated there, reverses all axes.
    if n < 2 or (not dims and name in ("t", "T", "H") and n > 2):
        return None
    axes[a], axes[b] = axes[b], axes[a]
    return axes
