"""The shortest path of a call: under `torch.no_grad`, if the operands are weights and results of earlier such calls.

Without a graph no gradient has to be rounded. Three of the checks in `short_way` remain: the format of each operand is
known, nothing observes the call, and the result has memory of its own. A token of a small model takes some three
hundred calls, many of which take less time than the checks that are left out. Each path here takes the same steps as
`short_way`, `conversions` and `product_calls` for such a call, in the same order. A call that does not fit is left to
these modules, before anything is done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpsim.emulation.calls import LOOK_UPS, Action, Call, in_order
from fpsim.emulation.casts import is_float32_island
from fpsim.emulation.forms import Linear
from fpsim.emulation.kept_weights import key_of_product
from fpsim.emulation.marks import MARK, WIDE_MARK, alone_of, format_of, mark, mark_of_new, mark_wide
from fpsim.emulation.operands import Rounds
from fpsim.emulation.product_calls import CALLS
from fpsim.emulation.scope import NO_SPECS, Scope
from fpsim.policies.operand import ProductSpecs
from fpsim.tensors.launch import rounded, rounds_in_place
from fpsim.tensors.shared_scales import rounds_blocks
from fpsim.tensors.spec import BlockSpec
from fpsim.torch_internals import base_of, share_storage, version_of

__all__ = ["WORDS", "Way", "way_of"]

# Types of arguments that hold no tensors. torch.dtype is left out, because a dtype may stand for the format.
WORDS = frozenset({int, float, bool, str, type(None), slice, type(...)})
_SEQUENCES = (list, tuple, torch.Size)
_Run = Callable[["Way", Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Product(NamedTuple):
    """Quantisation of the operands of linear layers.

    key: the cache key of the quantised weight.
    flat: function that quantises x with its leading axes flattened.
    whole: function that quantises x with all its axes; None if blocks extend over several tokens.
    """

    key: Hashable
    flat: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], Tensor] | None


def _product_of(specs: ProductSpecs) -> _Product | None:
    """Return the quantisation of linear layers; None if it depends on more than the operands of a call."""
    first, (side, side_of_weight) = specs.fprop[0], Linear.fprop
    key = key_of_product(specs, side_of_weight)
    if key is None or specs.accumulators is not None:
        return None
    if first is None or (spec := first.spec()) is None:
        flat: Callable[[Tensor], Tensor] = _as_it_is
        whole: Callable[[Tensor], Tensor] | None = flat
    elif first.is_delayed or first.is_own or first.hadamard is not None:
        return None
    elif isinstance(spec, BlockSpec):
        flat = rounds_blocks(spec, side.axis, side.across)
        is_of_several = spec.fmt.tile[0] != 1 and spec.fmt.block != "tensor"
        whole = None if is_of_several else rounds_blocks(spec, -1, None)
    else:
        flat = whole = partial(rounded, spec=spec)
    return _Product((key, torch.float32), flat, whole)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Way:
    """Path by which the modules of one policy run a function without a graph.

    run: function that runs a call; it returns NotImplemented for a call that does not fit.
    mark: the mark of a new tensor in the activations' format.
    round_: two functions that round a new tensor to this format; -inf is a number for the first, a mask for the second.
    """

    __slots__ = ("call", "mark", "name", "product", "round_", "rounds", "run", "scales")

    def __init__(self, scope: Scope, call: Call, run: _Run, rounds: Rounds, scales: bool) -> None:
        activation = scope.specs.activation
        assert activation is not None
        self.run, self.call, self.name, self.rounds, self.scales = run, call, call.name, rounds, scales
        self.mark = mark_of_new(activation.text)
        self.round_ = rounds_in_place(activation, False), rounds_in_place(activation, True)
        self.product: _Product | None = None


def way_of(scope: Scope, call: Call, is_computed: bool, rounds: Rounds, scales: bool) -> Way | None:
    """Return the shortest path of a function's calls; None if the calls need the paths of `short_way` or `mode`.

    is_computed: whether the function has a path in `short_way` that computes or moves numbers (`_computed`, `_moved`).
    rounds, scales: as in `short_way.Plan`.
    """
    specs = scope.specs
    if specs is NO_SPECS or specs.activation is None or specs.activation.rounding == "stochastic":
        return None
    if type(call) is not Call or call.in_place or call.name in scope.float32 or call.name in scope.plans.kernels:
        return None
    # Only the slow path through `mode` tracks which tensors come from q k^T.
    if scope.products is not None and scope.products.points is not None:
        return None
    if call.action is Action.CAST:
        is_known = call.name in ("to", "float") and scope.dtype is not None
        return Way(scope, call, _cast, rounds, scales) if is_known else None
    if not is_computed or call.is_squared_difference:
        return None
    if call.action is Action.MOVE:
        is_left = call.inplace_at is not None or call.name in LOOK_UPS
        return None if is_left else Way(scope, call, _moved, rounds, scales)
    products = scope.products
    if products is None or call.name not in CALLS:
        return Way(scope, call, _computed, rounds, scales)
    if call.name == "scaled_dot_product_attention" and not products.attention:
        return Way(scope, call, _computed, rounds, scales)
    way = Way(scope, call, _linear, rounds, scales)
    way.product = _product_of(products.specs) if call.name == "linear" else None
    return None if way.product is None else way


def _is_seen(scope: Scope) -> bool:
    """True if roundings are observed, or if the scope has state of one call, such as stand-ins for weights."""
    if scope.weights or scope.listeners.observer is not None:
        return True
    return scope.made is not None or scope.errors is not None


def _is_usual_weight(x: Any) -> bool:
    return type(x) is nn.Parameter and x.dtype is torch.float32 and x.layout is torch.strided


def _moved(way: Way, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that moves results of this emulation, all in one format, and mark its results with this format."""
    narrow, known, scope = way.mark, None, emulation.scope
    if scope.listeners.observer is not None or scope.weights:
        return NotImplemented
    for x in kwargs.values():
        if type(x) not in WORDS:
            return NotImplemented
    for x in args:
        kind = type(x)
        # `type(x) is Tensor` excludes subclasses and parameters, which `isinstance` would include.
        if kind is Tensor:
            one = alone_of(x, narrow)
            if one is None or (known is not None and known is not one):
                return NotImplemented
            known = one
        elif kind in _SEQUENCES:
            for item in x:
                if type(item) is Tensor:
                    one = alone_of(item, narrow)
                    if one is None or (known is not None and known is not one):
                        return NotImplemented
                    known = one
                elif type(item) not in WORDS:
                    return NotImplemented
        elif kind not in WORDS:
            return NotImplemented
    if known is None or (known is WIDE_MARK and not emulation.has_wide) or emulation.aliases.may_know(args[0]):
        return NotImplemented
    out = func(*args, **kwargs) if kwargs else func(*args)
    for x in (out,) if type(out) is Tensor else out:
        if known is WIDE_MARK:
            mark_wide(x)
        else:
            mark(x, narrow[0])
    return out


def _computed(way: Way, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that computes, and round its result, or mark the result if all operands are float32 on purpose."""
    scope, narrow, wide = emulation.scope, way.mark, 0
    if _is_seen(scope):
        return NotImplemented
    for x in kwargs.values():
        if type(x) not in WORDS:
            return NotImplemented
    if way.call.inplace_at is not None and way.call.writes_to_first(args, kwargs):
        return NotImplemented
    floats: list[Tensor] = []
    unknown: list[int] = []  # of the weights
    prepared, kept = args, scope.listeners.kept_weights
    for i, x in enumerate(args):
        kind = type(x)
        if kind is Tensor:
            known = alone_of(x, narrow)
            if known is WIDE_MARK:
                wide += 1
            elif known is None:
                if x.is_floating_point() or x.is_complex() or (way.call.promotes and x.dtype is not torch.bool):
                    return NotImplemented
                continue
            floats.append(x)
        elif kind is nn.Parameter:
            if not _is_usual_weight(x):
                return NotImplemented
            if kept is None or emulation.aliases.may_know(x) or (copy := kept.find(x, scope.weight)) is None:
                unknown.append(i)
            else:
                prepared = (*prepared[:i], copy, *prepared[i + 1 :])
                floats.append(copy)
        elif kind not in WORDS and (kind not in _SEQUENCES or any(isinstance(item, Tensor) for item in x)):
            return NotImplemented
    if wide:
        if wide < len(floats) or unknown or not emulation.has_wide:
            return NotImplemented
        return _left_wide(way, emulation, func(*args, **kwargs) if kwargs else func(*args))
    if not (floats or unknown) or (way.scales and len(floats) + len(unknown) == 1):
        return NotImplemented
    # Where autocast is switched off, weights are used unrounded.
    if (unknown or prepared is not args) and is_float32_island(emulation.autocast_depth):
        return NotImplemented
    for i in unknown:
        made = emulation.brought(args[i], format_of(args[i]), way.rounds)
        prepared = (*prepared[:i], made, *prepared[i + 1 :])
        floats.append(made)
    return _finished(way, emulation, func(*prepared, **kwargs) if kwargs else func(*prepared), prepared, kwargs, floats)


def _left_wide(way: Way, emulation: Any, out: Any) -> Any:
    """Mark a result as float32 on purpose, as `let_results_be_wide` does for calls that nothing observes."""
    if type(out) is not Tensor or out.dtype is not torch.float32:
        emulation.let_results_be_wide(out, way.call)
        return out
    mark_wide(out)
    scope, name = emulation.scope, way.name
    scope.counts[name] = scope.counts.get(name, 0) + 1
    scope.wide[name] = None
    return out


def _finished(
    way: Way, emulation: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[Tensor]
) -> Any:
    """Round a result in place if it has new memory and no gradient; leave any other result to `round_results`."""
    call = way.call
    is_new = type(out) is Tensor and out.dtype is torch.float32 and out.is_cpu and not out.requires_grad
    if not is_new or out.layout is not torch.strided:
        return emulation.round_results(out, call, (*args, *in_order(kwargs)), floats, None)
    address, is_inference = out.data_ptr(), out.is_inference()
    # Inference tensors have no base that would reveal a view, and the addresses of a view and its base may differ.
    if is_inference or base_of(out) is not None:
        is_new = not any(share_storage(out, x) for x in floats)
    else:
        for x in floats:
            is_new = is_new and x.data_ptr() != address
    if not is_new:
        return emulation.round_results(out, call, (*args, *in_order(kwargs)), floats, None)
    counts, name = emulation.scope.counts, way.name
    # Count as `Scope.site` does, so that the next call that an observer sees has the right number.
    counts[name] = counts.get(name, 0) + 1
    if call.has_pole:
        way.round_[call.is_quotient and not isinstance(args[1], Tensor)](out, address)
    else:
        way.round_[True](out, address)
    if is_inference or version_of(out):
        mark(out, way.mark[0])
    else:  # as `mark` does
        setattr(out, MARK, way.mark)
    return out


def _linear(way: Way, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the product of a linear layer with quantised operands, and round its result."""
    scope, product = emulation.scope, way.product
    assert product is not None
    if kwargs or not 2 <= len(args) <= 3 or _is_seen(scope):
        return NotImplemented
    x, w, bias = args if len(args) == 3 else (*args, None)
    is_usual = type(x) is Tensor and _is_usual_weight(w) and (bias is None or _is_usual_weight(bias))
    if not is_usual or alone_of(x, way.mark) is not way.mark or not x.is_cpu or x.is_neg() or w.dim() != 2:
        return NotImplemented
    if torch.is_autocast_enabled("cpu") or is_float32_island(emulation.autocast_depth) or not x.numel():
        return NotImplemented
    kept = scope.listeners.kept_weights
    if kept is None or emulation.aliases.may_know(w) or (copy := kept.find(w, scope.weight)) is None:
        return NotImplemented
    if (quantised := kept.find(copy, product.key)) is None:
        return NotImplemented
    if bias is not None and (emulation.aliases.may_know(bias) or (bias := kept.find(bias, scope.weight)) is None):
        return NotImplemented
    if product.whole is not None and 2 <= x.dim() <= 3 and x.is_contiguous():
        # This makes the same BLAS call as the form, with fewer torch calls.
        out = F.linear(product.whole(x), quantised, bias)
    else:
        form = Linear(x, quantised)
        out = form.forward(product.flat(form.arrange(x)), quantised, bias)
    return _finished(way, emulation, out, args, kwargs, [])


def _cast(way: Way, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast a result of this emulation to float32 or to the format's own dtype, as `conversions.cast` does."""
    scope, narrow = emulation.scope, way.mark
    asked = torch.float32 if way.name == "float" else args[1] if len(args) == 2 else None
    is_wide, x = asked is torch.float32, args[0]
    if kwargs or len(args) > 2 or type(x) is not Tensor or not (is_wide or asked is scope.dtype):
        return NotImplemented
    known = alone_of(x, narrow)
    if known is None or not emulation.has_names or _is_seen(scope) or emulation.aliases.may_know(x):
        return NotImplemented
    if known is (WIDE_MARK if is_wide else narrow):
        return x
    if is_wide:
        # A copy is made, since `x.to` would return x itself, to which the mark must not spread.
        out = x.clone()
        emulation.mark_wide(out)
        return out
    if not x.is_cpu or x.is_neg():
        return NotImplemented
    scope.counts["activation"] = scope.counts.get("activation", 0) + 1
    out = rounded(x, scope.specs.activation)
    mark(out, narrow[0])
    return out
