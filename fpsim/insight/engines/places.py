"""Find where two engines differ: compare each module's outputs, and the results of its own code on the same inputs.

The floor is the difference that another order of the same sums makes. A difference below it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpsim.insight.engines.sides import Door, Pair, cloned
from fpsim.torch_internals import tensors_of
from fpsim.torch_modes import without_torch_function

__all__ = ["PRODUCTS_OF_TORCH", "Kept", "Local", "Measured", "Permuted", "Place", "Split", "relative_of"]

PRODUCTS_OF_TORCH: dict[Any, tuple[int, int, int, int]] = {  # positions of a and b, and the axis that is summed of each
    F.linear: (0, 1, -1, -1),
    torch.matmul: (0, 1, -1, -2),
    Tensor.matmul: (0, 1, -1, -2),
    Tensor.__matmul__: (0, 1, -1, -2),
    torch.mm: (0, 1, -1, -2),
    Tensor.mm: (0, 1, -1, -2),
    torch.bmm: (0, 1, -1, -2),
    Tensor.bmm: (0, 1, -1, -2),
    torch.addmm: (1, 2, -1, -2),
    torch.baddbmm: (1, 2, -1, -2),
}


class _Products(TorchFunctionMode):
    """Computes matrix products in another way. The operands are already rounded if an emulation runs inside."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        places = PRODUCTS_OF_TORCH.get(func)
        if places is None or len(args) <= places[1]:
            return func(*args, **named)
        a, b = args[places[0]], args[places[1]]
        is_usual = all(type(x) in (Tensor, torch.nn.Parameter) and x.dim() > 1 for x in (a, b))
        if not is_usual or a.shape[places[2]] != b.shape[places[3]]:
            return func(*args, **named)
        return self.product(func, args, named, places)

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Any) -> Any:
        raise NotImplementedError


def _with(args: tuple[Any, ...], places: tuple[int, int, int, int], move: Callable[[Tensor, int], Tensor]) -> Any:
    changed = [*args]
    for i, axis in ((places[0], places[2]), (places[1], places[3])):
        changed[i] = move(args[i], axis)
    return changed


class Permuted(_Products):
    """Permutes the terms of the sums in each product.

    is_asked: a function that tells whether to count a product that runs now. changed: the number of counted products.
    """

    def __init__(self, is_asked: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.changed = 0
        self._is_asked = is_asked

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Any) -> Any:
        self.changed += self._is_asked()
        length = args[places[0]].shape[places[2]]
        order = torch.randperm(length, generator=torch.Generator().manual_seed(length))

        def move(x: Tensor, axis: int) -> Tensor:
            return x.index_select(axis, order.to(x.device))

        return func(*_with(args, places, move), **kwargs)


class Split(_Products):
    """Splits each sum into two halves, and adds their results in float32, as a kernel with another split of K does."""

    def product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Any) -> Any:
        length = args[places[0]].shape[places[2]]
        if length < 2 or func in (torch.addmm, torch.baddbmm) or kwargs or len(args) > 2:
            return func(*args, **kwargs)
        parts = []
        for first, n in ((0, length // 2), (length // 2, length - length // 2)):

            def move(x: Tensor, axis: int, first: int = first, n: int = n) -> Tensor:
                return x.narrow(axis, first, n).contiguous().float()

            parts.append(func(*_with(args, places, move)))
        return (parts[0] + parts[1]).to(args[places[0]].dtype)


FEW = 0.005  # below this share, the numbers that differ may be those near the middle of two neighbours of a format
MARGIN = 4.0  # a difference above this times the floor is not explained by the order of sums
TINY = 2.0**-40  # the least floor, below every dtype's rounding of a sum: a measured floor of zero is luck


class Kept:
    """A visitor that keeps the results of each call of each module, by the module's name and the call's number."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[str, int], Any] = {}
        self._calls: dict[str, int] = {}

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = door.run(*args, **kwargs)
        with without_torch_function():
            self._note(door, out)
        return out

    def _note(self, door: Door, out: Any) -> None:
        call = self._calls.get(door.name, 0)
        self._calls[door.name] = call + 1
        self.seen(door, call, out)

    def seen(self, door: Door, call: int, out: Any) -> None:
        self.outputs[door.name, call] = cloned(out)


class Measured(Kept):
    """A visitor that compares each call's results with those of another run. keeps: whether it also keeps its own."""

    def __init__(self, kept: Kept, valid: Tensor, keeps: bool = False) -> None:
        super().__init__()
        self._kept, self._valid, self._keeps = kept, valid, keeps
        self.relative: dict[str, float] = {}
        self.order: list[str] = []
        self.unlike: dict[str, str] = {}

    def seen(self, door: Door, call: int, out: Any) -> None:
        if self._keeps:
            super().seen(door, call, out)
        if (door.name, call) not in self._kept.outputs:
            self.unlike.setdefault(door.name, "called more often than in a")
            return
        known = floats_of(self._kept.outputs[door.name, call])
        found = floats_of(out)
        if [x.shape for x in known] != [x.shape for x in found]:
            shapes = " and ".join(str([tuple(x.shape) for x in of]) for of in (known, found))
            self.unlike.setdefault(door.name, f"its outputs have other shapes: {shapes}")
            return
        if door.name not in self.relative:
            self.order.append(door.name)
        self.relative[door.name] = max(self.relative.get(door.name, 0.0), relative_of(known, found, self._valid))


def floats_of(out: Any) -> list[Tensor]:
    return [x for x in tensors_of(out) if x.is_floating_point()]


def relative_of(a: list[Tensor], b: list[Tensor], valid: Tensor) -> float:
    """Return the largest |b - a| / |a| of several tensors, without padding; inf if b is not finite where a is."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        x, y = x.double(), y.double()
        if x.shape[: valid.dim()] == valid.shape:
            x, y = x[valid], y[valid]
        # Masks hold -inf or the dtype's least number. A relative difference of these says nothing.
        mask = x.isfinite() & (x.abs() < 1e37)
        if bool((~y.isfinite() & mask).any()):
            return math.inf
        difference, norm = (y - x)[mask].norm(), x[mask].norm()
        if float(difference):
            worst = max(worst, float(difference / norm) if float(norm) else math.inf)
    return worst


def share_of(a: list[Tensor], b: list[Tensor], valid: Tensor) -> float:
    """Return the share of the numbers that differ at all; the first two that differ are not counted."""
    differ = count = 0
    for x, y in zip(a, b, strict=True):
        if x.shape[: valid.dim()] == valid.shape:
            x, y = x[valid], y[valid]
        differ += int((x != y).sum())
        count += x.numel()
    # By chance one or two numbers of a small result may lie near the middle of two neighbours of a narrow format.
    return max(differ - 2, 0) / max(count, 1)


@dataclass
class Place:
    """A module whose own code differs.

    local: the relative difference of its own code on the same inputs.
    floor: the relative difference that another order of sums makes there.
    is_lucky: whether so few numbers differ that another order of sums may explain them, although the floor shows none.
        A sum near the middle of two numbers of a narrow format is rounded to one or the other.
    """

    name: str
    kind_of: str
    local: float
    floor: float
    inputs: Any = None
    is_lucky: bool = False

    @property
    def is_beyond(self) -> bool:
        """True if the difference is more than another order of sums makes."""
        return self.local > max(MARGIN * self.floor, TINY) and not self.is_lucky


class Local:
    """A visitor for runs of a: after each module, it runs b's own code on the same inputs, with a's inner modules."""

    def __init__(self, pair: Pair, valid: Tensor, told: Callable[[], object]) -> None:
        self._pair, self._valid, self._told = pair, valid, told
        self.places: dict[str, Place] = {}
        self.order: list[str] = []

    def __call__(self, door: Door, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        other = self._pair.doors["b"].get(door.name)
        if other is None:
            return door.run(*args, **kwargs)
        before, given = torch.get_rng_state(), cloned((args, kwargs))
        out = door.run(*args, **kwargs)
        after = torch.get_rng_state()
        with without_torch_function():
            self._compare(door, other, given, before, [x.detach().clone() for x in floats_of(out)])
        torch.set_rng_state(after)
        self._told()
        return out

    def _compare(self, door: Door, other: Door, given: Any, state: Tensor, known: list[Tensor]) -> None:
        name = door.name

        def quietly(which: Door, mode: Any = None) -> list[Tensor]:
            torch.set_rng_state(state)
            choice = (lambda n: "b" if n == name else "a") if which is other else (lambda n: "a")
            return floats_of(self._pair.quietly(which, choice, cloned(given), mode))

        if name not in self.places:
            self.order.append(name)
        found = quietly(other)
        if [x.shape for x in found] != [x.shape for x in known]:
            local = math.inf
        else:
            local = relative_of(known, found, self._valid)
        floor, is_lucky = 0.0, False
        if 0 < local < math.inf:
            # a's own code is run again on copies, as b's is: an emulation may know more about the tensors of this run
            # than about their copies.
            known = quietly(door)
            local = relative_of(known, found, self._valid)
            mode = Permuted(lambda: self._pair.running == name)
            floor = relative_of(known, quietly(door, lambda: mode), self._valid)
            has_sums = mode.changed > 0 and _have_equal_tensors(door.module, other.module)
            is_lucky = has_sums and share_of(known, found, self._valid) < FEW
        earlier = self.places.get(name)
        if earlier is None or local > earlier.local:
            kept = cloned(given) if local > max(MARGIN * floor, TINY) else None
            self.places[name] = Place(name, type(door.module).__name__, local, floor, kept, is_lucky)


def _have_equal_tensors(a: nn.Module, b: nn.Module) -> bool:
    mine, others = ([*chain(m.parameters(recurse=False), m.buffers(recurse=False))] for m in (a, b))
    return len(mine) == len(others) and all(
        x.shape == y.shape and torch.equal(_narrowed(x, y), _narrowed(y, x)) for x, y in zip(mine, others, strict=True)
    )


def _narrowed(x: Tensor, y: Tensor) -> Tensor:
    """Round `x` to the dtype of `y` if that is narrower, as native weights are rounded; return float64."""
    is_wider = x.is_floating_point() and y.is_floating_point() and x.itemsize > y.itemsize
    return (x.to(y.dtype) if is_wider else x).double()
