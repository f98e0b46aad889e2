"""The short way: a fast path for calls whose tensors are plain and in known formats, and which nothing observes.

Most calls of a model qualify. Without this path, a small model spends its time on checks that have the same outcome in
all such calls. Here these checks are made once for each function under a policy, and cached as the function's plan. A
plan that does not fit the arguments of a call returns NotImplemented before it has done anything. The call then takes
the slow path through `mode`, which handles every case and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

from fpsim.emulation.arguments import keep_masks, masks_to_scale, tensors_in
from fpsim.emulation.calls import LOOK_UPS, Action, Call, call_of, in_order
from fpsim.emulation.casts import has_process_group, is_float32_island
from fpsim.emulation.lineage import weights_among
from fpsim.emulation.marks import WIDE, format_of, mark
from fpsim.emulation.operands import Rounds
from fpsim.emulation.product_calls import compute_products, has_products
from fpsim.emulation.products import ProductCall
from fpsim.emulation.scope import NO_SPECS, Scope
from fpsim.emulation.without_graph import WORDS, way_of
from fpsim.tensors.spec import ContainerError
from fpsim.torch_modes import is_unwatched

__all__ = ["by_short_way"]

_SEQUENCES = (list, tuple, torch.Size)


class Plan:
    """Cached treatment of one function in the modules of one policy.

    run: function that runs a call, given the plan, the mode, the torch function and its arguments. It returns
        NotImplemented for arguments that do not fit. None if every call takes the slow path.
    rounds: which operands are brought into their formats.
    scales: whether a mask may be lost when a tensor is multiplied by a number.
    is_product: whether the function may compute products whose operands are quantised.
    casts_integers: whether integer tensors of several elements are cast to the format of the tensors next to them.
    asks: whether a call has to check for modes, hooks of saved tensors, process groups and a step of an optimizer.
    shortest: the `Way` of calls without a graph; None if these calls have none.
    may_write: whether the function has an argument `inplace`, with which it writes to its first argument.
    """

    __slots__ = ("asks", "call", "casts_integers", "is_product", "may_write", "rounds", "run", "scales", "shortest")

    def __init__(self, scope: Scope, call: Call) -> None:
        self.call, self.run = call, _way_of(scope, call)
        self.asks, self.may_write = self.run is not _left, call.inplace_at is not None
        self.is_product = has_products(scope, call.name)
        self.rounds = Rounds.ALL if call.narrows else Rounds.ALL_BUT_WIDE
        spec = scope.specs.activation
        self.scales = call.scales and spec is not None and spec.dtype is None
        self.casts_integers = spec is not None and not (spec.is_float32 or call.narrows)
        self.shortest = way_of(scope, call, self.run in (_moved, _computed), self.rounds, self.scales)


def by_short_way(emulation: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an emulated call; NotImplemented, with nothing done, if the call needs the slow path."""
    # The function alone is the key, because all plans in this cache belong to one module under one policy.
    scope = emulation.scope
    plan = scope.plans.get(function)
    if plan is None:
        plan = scope.plans[function] = Plan(scope, call_of(function))
    run, shortest = plan.run, None if is_grad_enabled() else plan.shortest
    if run is None and shortest is None:
        return NotImplemented
    # With a process group the caller may be torch's sharding, for which only the slow path checks.
    if plan.asks and not (emulation.step is None and is_unwatched() and not has_process_group()):
        return NotImplemented
    if shortest is not None:
        out = shortest.run(shortest, emulation, function, args, kwargs)
        if out is not NotImplemented:
            return out
    if run is None:
        return NotImplemented
    try:
        return run(plan, emulation, function, args, kwargs)
    # The same as in `mode`: a TypeError in an operator would become "unsupported operand".
    except ContainerError as error:
        raise RuntimeError(str(error)) from None


def _way_of(scope: Scope, call: Call) -> Callable[..., Any] | None:
    """Return the fast path of a function's calls, one of the functions below; None if the calls need the slow path."""
    action, is_product = call.action, has_products(scope, call.name)
    # Only the slow path tracks which tensors come from q k^T.
    if scope.products is not None and scope.products.points is not None and action is not Action.PASS:
        return None
    if type(call) is not Call or call.in_place or action not in (Action.PASS, Action.MOVE, Action.COMPUTE):
        return None
    if call.name in scope.plans.kernels:
        return None
    is_left = call.name in scope.float32 or (scope.specs is NO_SPECS and not is_product)
    if action is Action.PASS or (is_left and (scope.products is None or action is Action.COMPUTE)):
        return None if call.takes_dtype or call.inplace_at is not None or call.name == "grad" else _left
    is_unusual = call.chooses_inside or call.has_threshold or call.is_of_each or call.drops is not None
    if is_left or is_unusual or call.skip_positions or call.skip_names:
        return None
    if action is Action.MOVE:
        return None if call.name == "data" or call.name in LOOK_UPS else _moved
    is_promoted_otherwise = call.gives_float64 or call.only_compared is not None or call.has_dtype_of_first
    return None if call.is_view or call.may_renormalise or is_promoted_otherwise else _computed


# The fast paths. Each takes the same steps as `mode` and `roundings` for such a call, in the same order.


def _left(plan: Plan, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call unchanged: `x.shape`, or any call if nothing is rounded."""
    return NotImplemented if kwargs else func(*args)


def _moved(plan: Plan, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that moves results of this emulation, all in one format, and mark its results with this format."""
    call = plan.call
    if (kwargs or plan.may_write) and not _are_words(call, args, kwargs):
        return NotImplemented
    known = _one_format_of(emulation.scope, args, call.promotes)
    if not known or (known is WIDE and not emulation.has_wide):
        return NotImplemented
    if call.is_view and type(args[0]) is Tensor and emulation.aliases.of(args[0]) is not None:
        return NotImplemented
    out = func(*args, **kwargs)
    if known is WIDE:
        emulation.let_results_be_wide(out, call)
        return out
    for x in (out,) if type(out) is Tensor else tensors_in(out):
        if x.is_floating_point():
            mark(x, known)
    return out


def _computed(
    plan: Plan, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call that computes, and round its result, or mark the result if all operands are float32 on purpose."""
    call, scope, values, wide = plan.call, emulation.scope, args, 0
    if kwargs:
        if kwargs.get("out") is not None or (call.is_squared_difference and kwargs.get("reduction") == "none"):
            return NotImplemented
        values = (*args, *kwargs.values())
    if plan.may_write and call.writes_to_first(args, kwargs):
        return NotImplemented
    places: list[int] = []  # of the floating tensors
    integers: list[int] = []  # of the integer tensors that are cast to the format
    unknown: list[tuple[int, str | None]] = []  # of those that are not known to be in the format, with their mark
    for i, x in enumerate(values):
        kind = type(x)
        if kind is Tensor or kind is nn.Parameter:
            if x.dtype is torch.float32 and x.layout is torch.strided:
                known = format_of(x)
                wide += known is WIDE
                if known is None or known != scope.activation or _has_role(scope, x):
                    unknown.append((i, known))
                places.append(i)
            elif x.is_floating_point() or x.is_complex():
                return NotImplemented
            elif call.promotes and x.dtype is not torch.bool:
                # An integer tensor passed by name may be an index or a count: only the slow path can tell.
                if not plan.casts_integers or x.numel() == 1 or i >= len(args):
                    return NotImplemented
                integers.append(i)
        elif kind not in WORDS and (kind not in _SEQUENCES or any(isinstance(item, Tensor) for item in x)):
            return NotImplemented
    if wide == 0 < len(places):
        return _rounded(plan, emulation, func, args, kwargs, values, places, unknown, integers)
    if (
        not places
        or integers
        or wide < len(places)
        or not emulation.has_wide
        or any(_has_role(scope, values[i]) for i in places)
    ):
        return NotImplemented
    out = func(*args, **kwargs)
    emulation.let_results_be_wide(out, call)
    return out


def _rounded(
    plan: Plan, emulation: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    values: tuple[Any, ...], places: list[int], unknown: list[tuple[int, str | None]], integers: list[int],
) -> Any:  # fmt: skip
    """Run a call with its operands in the format, and round its result. values: all arguments, positional first."""
    call, scope, originals = plan.call, emulation.scope, values
    if unknown or integers:
        if unknown and is_float32_island(emulation.autocast_depth):
            return NotImplemented
        prepared = [*values]
        for i, known in unknown:
            prepared[i] = emulation.brought(values[i], known, plan.rounds)
        for i in integers:
            prepared[i] = emulation.integer_operand(values[i])
        places += integers
        values = tuple(prepared)
        args, kwargs = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
    floats = [*map(values.__getitem__, places)]
    operands = (*args, *in_order(kwargs)) if kwargs else args
    if plan.is_product:
        product = ProductCall(scope, call.name, operands, weights_among(scope, originals, values))
        out = compute_products(product, partial(call, func), args, kwargs, None)
        return emulation.round_results(out, call, operands, floats, None, product)
    masks = masks_to_scale(scope.specs.activation, operands) if plan.scales and len(floats) == 1 else None
    out = func(*args, **kwargs)
    if masks is not None:
        out = keep_masks(out, masks)
    # `is_plain` is not called again: a new tensor is neither a negative view nor zeros without memory.
    if type(out) is Tensor:
        return emulation.round_result(out, call, operands, floats, None, None, out.is_cpu or out.is_cuda)
    return emulation.round_results(out, call, operands, floats, None)


def _are_words(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if no keyword argument may hold a tensor, and the call does not write to its first argument."""
    for x in kwargs.values():
        if type(x) not in WORDS:
            return False
    return call.inplace_at is None or not call.writes_to_first(args, kwargs)


def _has_role(scope: Scope, x: Tensor) -> bool:
    """True if a tensor has the role of a weight, as in `Roundings.operand`."""
    is_one = type(x) is nn.Parameter or getattr(x, "_fpsim_weight", False)
    return is_one or (id(x) in scope.weights and scope.stands_in(x))


def _one_format_of(scope: Scope, args: Sequence[Any], promotes: bool) -> str | None:
    """Return the one format of the floating-point tensors: WIDE or the activations'; "" if there are no such tensors.

    Returns None if the formats differ, are others or unknown, or if a tensor is a weight. promotes: whether the slow
    path casts integers to the format of the tensors next to them.
    """
    found = ""
    for x in args:
        kind = type(x)
        if kind in WORDS:
            continue
        if kind is Tensor:
            if x.dtype is not torch.float32 or x.layout is not torch.strided:
                if promotes or x.is_floating_point() or x.is_complex():
                    return None
                continue
            known = format_of(x)
            if known is None or not (known is WIDE or known == scope.activation):
                return None
            if _has_role(scope, x) or getattr(x, "_fpsim_view_of_weight", False):
                return None
        elif kind in _SEQUENCES:
            known = _one_format_of(scope, x, promotes)
            if not known:
                if known is None:
                    return None
                continue
        else:
            return None
        if found and known != found:
            return None
        found = known
    return found
