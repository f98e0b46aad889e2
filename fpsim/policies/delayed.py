"""Delayed scaling: keep the largest magnitudes of earlier steps on their device, and compute scales from them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fpsim.checks import few, shown
from fpsim.formats.blocks import Delayed
from fpsim.torch_internals import current_graph_task
from fpsim.torch_modes import is_watched, plain_tensors, set_grad_enabled, without_torch_function

__all__ = ["AmaxHistory", "Histories", "loaded"]

Function = TypeVar("Function", bound=Callable[..., Any])

_NOTHING = -1.0  # in the place of an amax that was not recorded in this step
_TENSORS = ("amaxes", "scale", "pending")
_LARGEST_SCALE, _SMALLEST_SCALE = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def _out_of_sight(function: Function) -> Function:
    """Return `function` decorated to run with all torch modes off: the tensors it makes are plain and can be changed.

    The modes are restored at once after any exception, also a KeyboardInterrupt. With a context manager made of a
    generator, the traceback could keep the generator alive, and freeing the generator would disable gradients again.
    """

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with without_torch_function(), plain_tensors():
            set_grad_enabled(False)
            return function(*args, **kwargs)

    return unseen  # type: ignore[return-value]


class AmaxHistory:
    """The amaxes of one operand at one site in earlier steps, and its scale. `Histories.of` returns it.

    The result of `scale` and the argument of `record` stay on the device. The history changes only in `begin_step` of
    its `Histories`. If several amaxes are recorded in a step, the largest of them counts.
    """

    __slots__ = ("largest", "row", "rule", "table")

    def __init__(self, rule: Delayed, largest: float, table: _Table, row: int) -> None:
        self.rule, self.largest, self.table, self.row = rule, largest, table, row

    @property
    def device(self) -> torch.device:
        return self.table.scales.device

    def scale(self) -> Tensor:
        """Return the scale of the operand in this step: a float32 without dimensions, which later steps do not change.

        The scale is 1 until a finite amax other than zero has been recorded in an earlier step.
        """
        with without_torch_function():
            return self.table.scales[self.row]

    @_out_of_sight
    def record(self, amax: Tensor) -> None:
        """Remember the largest magnitude of the operand, for the scales of later steps.

        amax: a tensor of one element, float32 or float64, on the history's device. NaN counts as inf.
        Do not record in a forward pass without gradients, because it is not a training step.
        """
        pending = self.table.pending[self.row]
        pending.copy_(torch.maximum(pending, amax.detach().reshape(()).nan_to_num(nan=torch.inf, posinf=torch.inf)))


class _Table:
    """The histories of one rule on one device, in one tensor: a step has few operations for any number of histories."""

    def __init__(self, rule: Delayed, device: torch.device) -> None:
        self.rule = rule
        self.names: list[str] = []
        self.amaxes = torch.zeros(0, rule.history, dtype=torch.float32, device=device)
        self.scales, self.pending, self.largest = (self.amaxes.new_zeros(0) for _ in range(3))
        self.position = torch.zeros(0, dtype=torch.int64, device=device)  # the column of the oldest amax

    def add(self, name: str, largest: float) -> int:
        """Add a history, and return its row."""
        amaxes = torch.cat([self.amaxes, self.amaxes.new_zeros(1, self.rule.history)])
        position = torch.cat([self.position, self.position.new_zeros(1)])
        columns = ((self.scales, 1.0), (self.pending, _NOTHING), (self.largest, largest))
        grown = [torch.cat([column, column.new_full((1,), value)]) for column, value in columns]
        names = [*self.names, name]
        # This is one assignment: an interrupt between several would leave columns of different lengths.
        self.names, self.amaxes, self.position, (self.scales, self.pending, self.largest) = (
            names,
            amaxes,
            position,
            grown,
        )
        return len(self.names) - 1

    def step(self) -> None:
        """Move the recorded amaxes to the histories, and compute the scales from these."""
        rule, amax = self.rule, self.pending
        has_amax = amax != _NOTHING
        place = self.position.unsqueeze(1)
        self.amaxes.scatter_(
            1, place, torch.where(has_amax.unsqueeze(1), amax.unsqueeze(1), self.amaxes.gather(1, place))
        )
        # The amax of the last step is in the history now, so the new scales take it into account.
        if rule.amax == "max":
            amax = self.amaxes.amax(1)
        # As in _default_sf_compute of NVIDIA TransformerEngine, a scale beyond float32 becomes the largest float32.
        scales = (self.largest / amax / 2.0**rule.margin).clamp(_SMALLEST_SCALE, _LARGEST_SCALE)
        is_usable = has_amax & (amax > 0) & (amax < torch.inf)
        scales = torch.where(is_usable, scales, self.scales)  # a new tensor: this step's may still be in use
        position = torch.where(has_amax, (self.position + 1) % rule.history, self.position)
        pending = torch.full_like(self.pending, _NOTHING)
        # This is one assignment: if the step is interrupted before the assignment, the step can be repeated.
        self.scales, self.position, self.pending = scales, position, pending

    def state(self, row: int) -> dict[str, Tensor]:
        """Return copies of one history's tensors; the amaxes are in order, from the oldest to the newest."""
        order = (self.position[row] + torch.arange(self.rule.history, device=self.position.device)) % self.rule.history
        return {
            "amaxes": self.amaxes[row][order],
            "scale": self.scales[row].clone(),
            "pending": self.pending[row].clone(),
        }

    def set_state(self, row: int, state: Mapping[str, Tensor]) -> None:
        self.amaxes[row], self.position[row] = state["amaxes"], 0
        self.scales = self.scales.clone()  # this step's may still be in use
        self.scales[row], self.pending[row] = state["scale"], state["pending"]


class Histories:
    """The amax histories of one quantised model.

    A step begins when the outermost quantised module is called with gradients enabled, and not from inside of a
    backward pass. At that moment the amaxes recorded before, forward and backward, move to the histories. If
    torch.distributed is initialised, all ranks of `group` then take the largest amax of any rank, so their scales are
    equal. All ranks must call the same products in the same order. Ranks whose new products differ get an error. If
    only some ranks have new products, these ranks wait for the others, as in any collective operation that some ranks
    do not join.

    group: a process group of torch.distributed; None for all ranks.
    """

    def __init__(self) -> None:
        self.group: Any = None
        self._tables: dict[tuple[Delayed, torch.device], _Table] = {}
        self._histories: dict[str, AmaxHistory] = {}
        self._agreed = 0  # how many histories the ranks have compared
        self._unasked: set[str] = set()  # loaded histories that no product has asked for; empty from the second step on
        self._begun = 0  # the number of steps since histories were loaded

    def __len__(self) -> int:
        return len(self._histories)

    def of(self, site: str, operand: str, rule: Delayed, largest: float, device: torch.device) -> AmaxHistory:
        """Return the history of an operand at a site, and add it if it is new. Call `of` in each call of the site.

        site: the site's name, such as "layer1.conv1:conv2d".
        operand: the name of the operand, such as "fprop.x".
        rule: the length of the history, the margin, and which amax counts.
        largest: the largest value of the operand's format.
        device: the operand's device; a history on another device moves there.
        Raises NotImplementedError under torch.compile, torch.export, fake tensors and transforms of torch.func.
        """
        _require_plain_call(site)
        name = f"{site} {operand}"
        if self._unasked:
            self._unasked.discard(name)
        history = self._histories.get(name)
        if history is None:
            return self._add(name, rule, largest, device)
        if history.rule != rule or history.largest != largest:
            raise ValueError(
                f"The history of {name} was kept for {history.rule} and a largest value of {history.largest:g}, and is "
                f"wanted for {rule} and {largest:g}. Load the state of a model with the same policy."
            )
        if history.device != device:
            self._move(name, device)
            return self._histories[name]
        return history

    def begin_call(self) -> None:
        """Begin a step when the model is called from outside, unless this is an evaluation or a recomputation."""
        if self._histories and torch.is_grad_enabled() and current_graph_task() < 0:
            self.begin_step()

    def begin_step(self) -> None:
        """Combine the recorded amaxes of all ranks, and move them to the histories.

        Raises NotImplementedError as `of` does, and while a CUDA graph is captured.
        """
        if self._tables:
            _require_plain_call("a model")
            _require_no_capture()
        if self._unasked:
            self._tell_unasked()
        self._begin_step()

    def _tell_unasked(self) -> None:
        """Warn of loaded histories that no product used in the first step: they may belong to another model."""
        self._begun += 1
        if self._begun < 2:
            return
        unasked, self._unasked = sorted(self._unasked), set()
        warnings.warn(
            f"The scaling state that was loaded has {few(unasked)}, which no product asked for in the first step "
            f"since. Is it the state of another model?",
            stacklevel=2,
        )

    @_out_of_sight
    def _begin_step(self) -> None:
        self._agree()
        for table in self._tables.values():
            table.step()

    @_out_of_sight
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all histories, by site and operand: tensors, numbers and strings, for torch.save."""
        return {
            name: {**h.table.state(h.row), "largest": h.largest, "rule": asdict(h.rule)}
            for name, h in self._histories.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Resume from a `state_dict`: its histories replace all present ones.

        Raises ValueError for any other value.
        """
        self.take(loaded(state))

    def take(self, fresh: Histories) -> None:
        """Replace all histories by those of `fresh`."""
        self._tables, self._histories, self._agreed = fresh._tables, fresh._histories, 0
        self._unasked, self._begun = {*fresh._histories}, 0

    def __deepcopy__(self, memo: Any) -> Histories:
        return loaded(self.state_dict())

    def __reduce__(self) -> Any:
        return loaded, (self.state_dict(),)

    @_out_of_sight
    def _add(self, name: str, rule: Delayed, largest: float, device: torch.device) -> AmaxHistory:
        table = self._tables.get((rule, device))
        if table is None:
            table = self._tables[rule, device] = _Table(rule, device)
        history = AmaxHistory(rule, largest, table, table.add(name, largest))
        self._histories[name] = history
        return history

    @_out_of_sight
    def _move(self, name: str, device: torch.device) -> None:
        """Move a history to its operand's device; a table without histories is dropped."""
        old = self._histories[name]
        state = old.table.state(old.row)
        history = self._add(name, old.rule, old.largest, device)
        history.table.set_state(history.row, state)
        old.table.names[old.row] = ""
        if not any(old.table.names):
            self._tables = {key: table for key, table in self._tables.items() if table is not old.table}

    def _agree(self) -> None:
        """Take the largest amax of all ranks for each history."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self.group) <= 1:
            return
        # all_reduce of tables in another order would mix operands without an error, so the ranks compare the names of
        # their histories. They do so only if there are new histories.
        if self._agreed != len(self._histories):
            self._require_equal_names()
            self._agreed = len(self._histories)
        for table in self._tables.values():
            dist.all_reduce(table.pending, dist.ReduceOp.MAX, group=self.group)

    def _require_equal_names(self) -> None:
        """Raise RuntimeError if ranks would combine the histories of different operands."""
        own = [name for table in self._tables.values() for name in table.names]
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, own, group=self.group)
        for rank, names in enumerate(gathered):
            if names != gathered[0]:
                different = next((pair for pair in zip(gathered[0], names, strict=False) if pair[0] != pair[1]), None)
                raise RuntimeError(
                    f"Delayed scaling takes the largest amax of all ranks, and ranks 0 and {rank} have different "
                    f"histories: {len(gathered[0])} and {len(names)}"
                    + (f", {different[0]!r} where the other has {different[1]!r}" if different else "")
                    + ". Expected: ranks that call the same products in the same order. Ranks with different models "
                    "belong to different process groups, see fpsim.scaling_group."
                )


def _require_plain_call(where: str) -> None:
    if torch.compiler.is_compiling() or is_watched():
        raise NotImplementedError(
            f"Delayed scaling reached {where} under torch.compile, torch.export, a transform of torch.func or a "
            f"dispatch mode, where nothing can be remembered from step to step. Expected: plain calls; or the "
            f"same format with scale_rule='amax', whose scale is that of the tensor at hand."
        )


def _require_no_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "Delayed scaling was used while a CUDA graph was captured, whose replays would use the scales of this step "
            "for ever. Expected: no graph; or the same format with scale_rule='amax', whose scale is that of the "
            "tensor at hand."
        )


@_out_of_sight
def loaded(state: Mapping[str, Mapping[str, Any]]) -> Histories:
    """Return the histories of a `state_dict`. Raises ValueError for any other value."""
    fresh = Histories()
    for name, entry in state.items():
        rule, largest = _checked(name, entry)
        history = fresh._add(name, rule, largest, entry["scale"].device)
        history.table.set_state(history.row, {k: entry[k] for k in _TENSORS})
    return fresh


def _checked(name: str, entry: Any) -> tuple[Delayed, float]:
    """Check an entry of a state, and return its rule and the largest value of the operand's format."""
    try:
        rule, largest = Delayed(**entry["rule"]), float(entry["largest"])
        shapes = [tuple(entry[k].shape) for k in _TENSORS]
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"The state of {shown(name)} is not a state of delayed scaling: {shown(error)}.") from None
    if shapes != [(rule.history,), (), ()]:
        raise ValueError(
            f"The state of {name!r} has tensors of shapes {shapes}. Expected: {rule.history} amaxes, one scale, one "
            f"pending amax."
        )
    amaxes, scale, pending = (entry[k].detach().double() for k in _TENSORS)
    is_usable = 0 < scale < torch.inf and (pending >= 0 or pending == _NOTHING) and (amaxes >= 0).all()
    if not is_usable or not 0 < largest < torch.inf:
        raise ValueError(
            f"The state of {shown(name)} has scale={scale.item()}, pending={pending.item()}, largest={largest} and "
            f"amaxes up to {amaxes.amax().item()}. Expected: a finite scale above 0, and magnitudes that are not NaN."
        )
    return rule, largest
