"""Places where gradients are rounded: what is kept of each, what each is told, and how they find one another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ada_loss.transforms import Product
from fpsim.scaling import RoundingSpec, keep_memory_of, memory_of

__all__ = [
    "MOMENTS",
    "Arrival",
    "Edge",
    "Engine",
    "Memory",
    "Place",
]

MOMENTS = 10
ROOM = 16.0  # by how much a gradient may outgrow the last one without being looked at before it is rounded


class Engine(Protocol):
    """Who decides for places."""

    def scale_at(self, place: Place, gradient: Tensor, may_round: bool) -> Tensor | None: ...

    def limits_of(self, place: Place, gradient: Tensor) -> Tensor: ...


class Memory:
    """What is kept of one place from step to step."""

    __slots__ = (
        "amax",
        "ceiling",
        "chosen",
        "factors",
        "history",
        "kept",
        "log2_scale",
        "moments",
        "noticed",
        "reached",
        "uses",
    )

    def __init__(self) -> None:
        self.factors: dict[int, Tensor] = {}  # by product, or MEASURED; 0 is one not known yet
        self.noticed: dict[int, Tensor] = {}  # the same on the host, where a card's may come later
        self.kept: Tensor | None = None  # the scale between updates, unless its gradient would overflow
        self.ceiling = 0.0  # on the CPU, the largest magnitude that fits at it; 0 where that is not known
        self.amax = 0.0  # of the last gradient, where the ceiling is known
        self.reached = 0  # the last step in which a gradient came
        self.uses = 0  # how often the site's gradients came in that step, where this is of the first of them
        self.history: Tensor | None = None
        self.log2_scale: Tensor | None = None  # the last one
        self.moments = keep_memory_of(torch.zeros(MOMENTS, dtype=torch.float64, device="cpu"))
        self.chosen = keep_memory_of(torch.full((5,), math.nan, dtype=torch.float64, device="cpu"))

    def has_room(self) -> bool:
        """Whether the last gradient left so much room below the ceiling that the next one will fit."""
        return 0.0 < self.amax * ROOM <= self.ceiling

    def knows(self, indices: Iterable[int]) -> bool:
        """Whether these factors are known. On a card they may be and not be noticed yet: nothing waits for the copy."""
        noticed = self.noticed
        return all(index in noticed and memory_of(noticed[index])[0] != 0 for index in indices)

    def notice(self, index: int) -> None:
        factor = self.factors[index]
        if factor.device.type == "cpu":
            self.noticed[index] = factor
            return
        if index not in self.noticed:
            pinned = torch.zeros(1, dtype=torch.float64, device="cpu", pin_memory=True)
            self.noticed[index] = keep_memory_of(pinned)
        self.noticed[index].copy_(factor, non_blocking=True)

    def to(self, device: torch.device) -> None:
        if self.moments.device == device:
            return
        self.factors = {index: factor.to(device) for index, factor in self.factors.items()}
        self.history = None if self.history is None else self.history.to(device)
        self.kept, self.ceiling = None if self.kept is None else self.kept.to(device), 0.0
        self.moments, self.chosen = self.moments.to(device), self.chosen.to(device)


class Edge:
    """From a product to the places that the gradient of its operand reaches."""

    __slots__ = ("index", "is_hidden", "other", "other_moments", "product_channel", "targets", "terms")

    def __init__(self, targets: list[Place], product: Product, index: int) -> None:
        self.targets, self.terms, self.index = targets, product.terms, index
        self.product_channel = product.channel
        self.is_hidden = product.other is None
        # saved for the backward pass anyway; let go once its moments are known, and kept where they are the products'
        self.other = None if product.other is None else product.other.detach()
        self.other_moments: Tensor | None = None


class Arrival(NamedTuple):
    """What a consumer tells a place: the scale of its gradient, whether it was chosen anew, and who must measure."""

    log2_scale: Tensor
    anew: bool
    measure: bool
    sender: Place | Edge
    amax: Tensor | None = None  # where it is known


class Place:
    """One tensor whose gradient is rounded: where its scale comes from and where it goes."""

    __slots__ = (
        "arrivals",
        "dtype",
        "edges",
        "engine",
        "is_chosen",
        "is_linked",
        "key",
        "made_in",
        "passes",
        "predicted",
        "role",
        "spec",
        "task",
    )

    def __init__(
        self,
        engine: Engine,
        site: str,
        role: str,
        spec: RoundingSpec,
        dtype: torch.dtype,
        is_chosen: bool,
        is_linked: bool,
        made_in: int,
    ) -> None:
        self.engine, self.key, self.role, self.spec, self.dtype = engine, (site, role), role, spec, dtype
        self.is_chosen, self.is_linked = is_chosen, is_linked
        self.made_in = made_in  # the backward pass that runs a checkpoint's forward, or -1
        self.edges: list[Edge] = []
        self.predicted: list[int] = []  # the products among them for which a factor is chosen here
        self.passes: list[Place] = []
        self.arrivals: list[Arrival] = []
        self.task = -1

    def receive(self, task: int, arrival: Arrival) -> None:
        if self.task != task:  # what an earlier, partial backward left behind
            self.task, self.arrivals = task, []
        self.arrivals.append(arrival)

    def __call__(self, gradient: Tensor, may_round: bool) -> Tensor | None:
        return self.engine.scale_at(self, gradient, may_round)
