"""lost_updates(quantized): count the updates that changed nothing, and the share that was applied."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fpsim.checks import require_mapping, require_whole, shown
from fpsim.insight.rows import Rows
from fpsim.models.optimizers import OptimizerStore, QuantizedOptimizer
from fpsim.models.parameter_store import ParameterStore
from fpsim.models.storing import local_part, stored
from fpsim.tensors.tally import CHUNK, UpdateCounts
from fpsim.undoing import Exit

__all__ = ["LostUpdates", "lost_updates", "unrecorded"]


def lost_updates(quantized: QuantizedOptimizer, every: int = 1) -> LostUpdates:
    """Record the updates of an optimizer that are lost by rounding, until the end of the block or `detach()`.

    An update is lost if it is not zero, and the stored weight, with its compensation or its master copy, stays the
    same. On a card each recorded step waits for the card. Stochastic rounding loses single updates too, but it makes
    others larger: its `edq` is 1 on average.

    Args:
        quantized: the object that `quantize_optimizer` returned.
        every: the steps 1, 1 + every, and so on are recorded.

    Returns:
        The record. `rows()` returns a row for each recorded step and parameter, `table()` a row for each parameter,
        `never_moved()` the names of the parameters that have not changed.

    Raises:
        TypeError: for anything but a quantised optimizer.
        ValueError: for an invalid `every`.

    >>> from fpsim import Update, quantize_optimizer
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0**-10]))
    >>> optimizer = torch.optim.SGD([("weight", weight)], lr=2.0**-10)
    >>> with lost_updates(quantize_optimizer(optimizer, Update(weight="bf16"))) as lost:
    ...     weight.grad = torch.ones(2)
    ...     optimizer.step()
    >>> [row["lost"] for row in lost.rows()]
    [0.5]
    """
    return LostUpdates(quantized, every)


def unrecorded(optimizers: Iterable[OptimizerStore]) -> list[OptimizerStore]:
    """Return the quantised optimizers whose lost updates are not recorded yet."""
    return [q for q in optimizers if not any(isinstance(observer, LostUpdates) for observer in q.observers)]


class _Sums(UpdateCounts):
    """Counts of one parameter. signs: the sign of the last change of each weight."""

    def __init__(self, store: ParameterStore) -> None:
        super().__init__()
        self.first = local_part(store.parameter.detach()).clone()
        self.signs = self.first.new_zeros(self.first.shape, dtype=torch.int8)

    def row(self, store: ParameterStore) -> dict[str, Any]:
        """Return the parameter's row of the table."""
        return {
            "parameter": store.name,
            "elements": self.first.numel(),
            "lost": self.share,
            "edq": self.edq,
            "at_first": _at_first(store, self),
            "flips": _share(self.flips, self.changes),
        }


class LostUpdates:
    """Lost updates of an optimizer; see `lost_updates`. As a context manager it detaches itself at the end."""

    def __init__(self, quantized: QuantizedOptimizer | OptimizerStore, every: int) -> None:
        quantized = quantized.store if isinstance(quantized, QuantizedOptimizer) else quantized
        if not isinstance(quantized, OptimizerStore):
            raise TypeError(
                f"quantized is {shown(quantized)}. Expected: what fpsim.quantize_optimizer(optimizer, update) returns."
            )
        require_whole("every", every, 1)
        self.every = every
        # The optimizer refers to its observers. A strong reference back would keep both alive until the garbage
        # collector runs.
        self._of = weakref.ref(quantized)
        self._begin = quantized.steps
        self._sums = {store: _Sums(store) for store in quantized.stores}
        self._rows = Rows()
        self.is_inside = False  # whether a block of this context manager is running
        self._steps: dict[int, UpdateCounts] = {}
        self.attach()

    def __enter__(self) -> LostUpdates:
        self.is_inside = True
        return self

    __exit__ = Exit()

    def leave(self) -> None:
        """Detach at the end of the block."""
        self.detach()

    def is_of(self, quantized: OptimizerStore) -> bool:
        """True if this record belongs to an optimizer."""
        return self._of() is quantized

    def attach(self) -> None:
        """Start recording; also possible after `detach()`."""
        quantized = self._of()
        if quantized is not None and self not in quantized.observers:
            quantized.observers.append(self)

    def detach(self) -> None:
        """Stop recording; the counts stay."""
        quantized = self._of()
        if quantized is not None and self in quantized.observers:
            quantized.observers.remove(self)

    # Called by the optimizer

    def is_due(self, step: int) -> bool:
        """True if this step is recorded."""
        return (step - self._begin) % self.every == 0

    def saw(self, step: int, store: ParameterStore, before: Tensor, intended: Tensor, group: Mapping[str, Any]) -> None:
        """Count the lost updates in the step of one parameter."""
        # `add_param_group` may have added a parameter after the record began.
        if store not in self._sums:
            self._sums[store] = _Sums(store)
        sums = self._sums[store]
        counts = UpdateCounts.of(before, local_part(store.value), intended, sums.signs)
        sums.add(counts)
        self._steps.setdefault(step, UpdateCounts()).add(counts)
        self._rows.append(
            {
                "step": step,
                "parameter": store.name,
                "lost": counts.share,
                "edq": counts.edq,
                "decay_lost": _decay_lost(store, before, group),
                "flips": _share(counts.flips, counts.changes),
            }
        )

    # Results

    def rows(self) -> Rows:
        """Return a row for each recorded step and parameter. A value is None if there is nothing to count.

        lost: the share of the non-zero updates that changed nothing. edq: <intended, effective> over the squared norm
        of the intended update, 1 where nothing is lost (Collage, arXiv 2405.03637). decay_lost: the share of the
        weights that weight decay alone would not change. flips: the share of the changes whose direction is opposite to
        that of the same weight's last change.
        """
        return Rows(self._rows)

    def steps(self) -> Rows:
        """Return a row for each recorded step, counted from 0: `lost` and `edq` of all parameters together.

        wanted: the number of updates that were not zero. norm: the squared norm of the intended update.
        """
        return Rows(
            {
                "step": step,
                "lost": counts.share,
                "edq": counts.edq,
                "wanted": counts.wanted,
                "norm": counts.norm,
            }
            for step, counts in self._steps.items()
        )

    def to_frame(self) -> Any:
        """Return the rows as a pandas.DataFrame."""
        return self.rows().to_frame()

    def table(self) -> Rows:
        """Return a row for each parameter, over all recorded steps, the largest share of lost updates first.

        at_first: the share of the parameter's weights that have the value with which the record began.
        """
        order = sorted(self._sums, key=lambda store: (-(self._sums[store].share or 0), store.name))
        return Rows([self._sums[store].row(store) for store in order])

    @property
    def share(self) -> float | None:
        """The share of lost updates of all parameters and recorded steps; None before the first recorded step."""
        return self._whole().share

    @property
    def edq(self) -> float | None:
        """The ratio of effective to intended updates of all parameters and recorded steps; None before the first."""
        return self._whole().edq

    def _whole(self) -> UpdateCounts:
        """The counts of all parameters and recorded steps."""
        whole = UpdateCounts()
        for sums in self._sums.values():
            whole.add(sums)
        return whole

    @property
    def words(self) -> str:
        """A description of the optimizer's `Update`."""
        quantized = self._of()
        return "an optimizer that is gone" if quantized is None else str(quantized.update)

    def never_moved(self) -> list[str]:
        """Return the names of the parameters whose weights all have the value with which the record began."""
        return [store.name for store, sums in self._sums.items() if sums.first.numel() and _at_first(store, sums) == 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts so far, as tensors, numbers and strings: `torch.load(..., weights_only=True)` reads it."""
        return {
            "every": self.every,
            "begin": self._begin,
            "rows": [*self._rows],
            "steps": {step: asdict(counts) for step, counts in self._steps.items()},
            "sums": {store.index: vars(sums).copy() for store, sums in self._sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the record whose `state_dict` is `state`, for an optimizer of the same parameters.

        Raises:
            TypeError: for anything but a mapping.
            ValueError: for a mapping that is not such a state; then everything stays as it was.
        """
        require_mapping("state", state, "what state_dict() returns")
        # Parameters are known by index, as in an optimizer's own state: a process that resumes has other objects.
        stores = {store.index: store for store in self._sums}
        try:
            sums = {stores[index]: _loaded(stores[index], saved) for index, saved in state["sums"].items()}
            steps = {step: UpdateCounts(**saved) for step, saved in state["steps"].items()}
            rows = Rows(dict(row) for row in state["rows"])
            require_whole("state['every']", state["every"], 1)
            require_whole("state['begin']", state["begin"], 0)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"state is {shown(state)}, which is not that of a record of these parameters ({type(error).__name__}: "
                f"{error}). Expected: what state_dict() returns."
            ) from error
        self.every, self._begin, self._rows, self._steps = state["every"], state["begin"], rows, steps
        self._sums |= sums

    def __str__(self) -> str:
        still = self.never_moved()
        return f"{self.table()}\nnever moved: {', '.join(still) or '(none)'}"

    def plot(self) -> Any:
        """Plot the share of lost updates against the step, one line for each parameter; needs matplotlib."""
        from fpsim.insight.pictures import plot_lost

        return plot_lost(self.rows())


def _loaded(store: ParameterStore, state: Mapping[str, Any]) -> _Sums:
    """Load the counts of a parameter from a state. Raises ValueError for the counts of another parameter."""
    sums = _Sums(store)
    if {*state} != {*vars(sums)}:
        raise ValueError(f"the counts of {store.name} are {', '.join(map(str, state))}")
    for name, mine in vars(sums).items():
        its = state[name]
        if isinstance(mine, Tensor):
            if not isinstance(its, Tensor) or (its.shape, its.dtype) != (mine.shape, mine.dtype):
                raise ValueError(f"{name} of {store.name} is {shown(its)}")
            its = its.to(mine.device).clone()
        setattr(sums, name, its)
    return sums


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _at_first(store: ParameterStore, sums: _Sums) -> float | None:
    same = local_part(store.parameter.detach()) == sums.first
    return _share(int(same.sum()), same.numel())


def _decay_lost(store: ParameterStore, before: Tensor, group: Mapping[str, Any]) -> float | None:
    """Return the share of the non-zero weights that weight decay alone does not change."""
    decay = float(group.get("lr", 0.0)) * float(group.get("weight_decay", 0.0))
    # Stored copies, such as a master or a compensation, add up decays that are too small to change the weight.
    if not decay or store.weight is None or store.kept:
        return None
    nearest = store.weight.rounded_by("nearest_even")
    # Chunks stay in the cache of a CPU; a card takes the whole tensor. Numbers that share scales cannot be split.
    is_whole = store.weight.shares_scales or before.is_cuda
    parts = [before] if is_whole else before.reshape(-1).split(CHUNK)
    nonzero = same = 0
    for part in parts:
        had = part != 0
        nonzero += int(torch.count_nonzero(had))
        same += int(torch.count_nonzero(had & (stored(part * (1 - decay), nearest) == part)))
    return _share(same, nonzero)
