"""One parameter and its states as an optimizer stores them: decoded before a step, rounded once after it.

The copies of weights, and the position of the random bits, are saved with the optimizer's `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpsim.checks import is_whole, shown
from fpsim.models.storing import State, local_part, noise_key, states_in, store_, stored
from fpsim.policies.update import Storage, Update, state_storage
from fpsim.tensors.noise import is_captured
from fpsim.torch_internals import version_of

__all__ = [
    "COMPENSATION",
    "COPIES",
    "MASTER",
    "SECOND",
    "ParameterStore",
    "SavedRun",
    "check_state",
    "loaded_copies",
    "saved",
    "without_ours",
]

# Tensors that are stored in addition to the weight, by their names in a state_dict.
MASTER, SECOND, COMPENSATION = "fpsim_master", "fpsim_second", "fpsim_compensation"
COPIES = (MASTER, SECOND, COMPENSATION)


class ParameterStore:
    """The tensors that an optimizer stores for one parameter.

    parameter: the parameter of the optimizer, in float32.
    name: its name in the model or the optimizer.
    index: its index in the optimizer. With the seed and the step, this is the key of the random bits.
    update: the formats, without overrides.
    kept: tensors that are stored in addition to the weight, by their names in COPIES.
    """

    def __init__(self, parameter: Tensor, name: str, index: int, update: Update) -> None:
        self.parameter, self.name, self.index, self.update = parameter, name, index, update
        self.kept: dict[str, Tensor] = {}
        self.weight = update.weight_storage or update.master_storage
        self._master = self._master_storage()
        self._states: dict[str, Storage | None] = {}
        self.visible: Tensor | None = None  # the weight that the model reads, while the optimizer updates another copy
        self._version = -1  # the version of the parameter when it was stored
        # The weight before a step, for a compensation and for detecting updates that would be lost.
        self._before: Tensor | None = None
        self._at_begin = -1  # the parameter's version when the optimizer received it

    def _master_storage(self) -> Storage | None:
        # If the weight is float32, the parameter is the master copy itself.
        if self.update.weight is None:
            return None
        return self.update.master_storage

    @property
    def is_exact(self) -> bool:
        """True if nothing of this parameter is rounded."""
        return self.update.is_float32

    @torch.no_grad()
    def begin(self) -> None:
        """Round the weight to nearest, and start the copies from it, as libraries that cast a model first do."""
        if self.weight is None:
            return
        store_(self.parameter, self._nearest(self.weight))
        parameter = self.parameter.detach()
        if self._master is not None:
            self.kept[MASTER] = parameter.clone()
            store_(self.kept[MASTER], self._nearest(self._master))
        elif self.update.compensation == "remainder16":
            self.kept[MASTER] = parameter.clone()
        elif self.update.compensation == "pair":
            self.kept[SECOND] = torch.zeros_like(parameter)
        elif self.update.compensation == "kahan":
            self.kept[COMPENSATION] = torch.zeros_like(parameter)
        self._end()

    @staticmethod
    def _nearest(storage: Storage) -> Storage:
        return storage.rounded_by("nearest_even") if storage.spec.rounding == "stochastic" else storage

    # Around a step in float32

    @property
    def value(self) -> Tensor:
        """Return the stored weight, the sum of all its parts: the number that a step changes."""
        if MASTER in self.kept:
            return self.kept[MASTER]
        weight = self.parameter.detach() if self.visible is None else self.visible
        for name in (SECOND, COMPENSATION):
            if name in self.kept:
                return weight + self.kept[name]
        return weight

    @property
    def storage(self) -> Storage | None:
        """Storage of `value`; None where that is float32."""
        return self._master if MASTER in self.kept else self.weight

    @property
    def is_compensated(self) -> bool:
        """True if `value` is the sum of the weight and of its rounding error."""
        return SECOND in self.kept or COMPENSATION in self.kept

    def keeping(self) -> Callable[[], None]:
        """Save the current copies of the weight, and return a function that restores them."""
        kept = [(name, x, x.clone()) for name, x in self.kept.items()]

        def put_back() -> None:
            for _, x, value in kept:
                x.copy_(value)
            self.kept = {name: x for name, x, _ in kept}

        return put_back

    def decode(self) -> None:
        """Write the numbers that the optimizer works on to the parameter."""
        self.visible = self._before = None
        # Arithmetic in the format has its own steps, which read the stored tensors.
        if not self.update.is_in_format:
            self._decode()
        self._at_begin = version_of(self.parameter)

    def _decode(self) -> None:
        if MASTER in self.kept and version_of(self.parameter) != self._version:
            self._follow()
        if self.update.has_copy:
            self.visible = self.parameter.detach().clone()
            self.parameter.copy_(self.value)
        elif self.update.compensation == "kahan" or self.update.lost is not None:
            self._before = self.parameter.detach().clone()

    @property
    def was_written(self) -> bool:
        """True if the step has written to the parameter."""
        return version_of(self.parameter) != self._at_begin

    @property
    def was_changed(self) -> bool:
        """True if the step has written another number to the parameter, as far as its former value is known."""
        before = self._before if self.visible is None else self.value
        if not self.was_written or before is None:
            return self.was_written
        return not torch.equal(local_part(self.parameter.detach()), local_part(before))

    def hide(self, x: Tensor, was_written: bool) -> None:
        """Undo `show`: write the optimizer's weight `x` to the parameter. was_written: whether the step wrote to it."""
        self.parameter.copy_(x)
        if not was_written:
            self._at_begin = version_of(self.parameter)

    def _follow(self) -> None:
        """Start the master copy again if the weight was written to since the last step, as by load_state_dict."""
        assert self.weight is not None
        # If the weight still equals the rounded master, the write restored the same numbers, and the master is kept.
        # Under stochastic rounding, the master may have been rounded in either direction.
        x = local_part(self.parameter.detach())
        ways = ("down", "up") if self.weight.spec.rounding == "stochastic" else (self.weight.spec.rounding,)
        master = local_part(self.kept[MASTER])
        fits = [x == stored(master, self.weight.rounded_by(way)) for way in ways]
        if not bool((fits[0] | fits[-1] | x.isnan()).all()):
            self.begin()

    def undo(self) -> None:
        """Put the weight back as the model saw it, because the step was skipped or the parameter had no gradient."""
        if self.visible is not None:
            self.parameter.copy_(self.visible)
        self._end()

    def abandon(self) -> None:
        """Clean up after a step that raised: restore the stored weight if it is known, else round the current one."""
        if self.visible is not None or self.update.is_in_format:
            self.undo()
            return
        if self._before is not None:
            self.parameter.copy_(self._before)
        elif self.weight is not None and not self.kept:
            store_(self.parameter.detach(), self._nearest(self.weight))
        self._end()

    def _end(self) -> None:
        self.visible = self._before = None
        self._version = version_of(self.parameter)

    def store(self, seed: int, step: int) -> None:
        """Round the weight that the optimizer has updated."""
        if self.update.is_in_format:
            return
        x = self.parameter.detach()
        if COMPENSATION in self.kept and self._before is not None:
            self._store_compensated(x, self._before)
        elif MASTER in self.kept:
            if self._master is not None:
                self._store_changed(x, self._master, self.kept[MASTER], self._key(self._master, seed, step, "master"))
            self.kept[MASTER].copy_(x)
            assert self.weight is not None
            store_(x, self.weight, self._key(self.weight, seed, step, "weight"))
        elif SECOND in self.kept:
            assert self.weight is not None
            whole = x.clone()
            store_(x, self.weight)
            self.kept[SECOND].copy_(whole - x)
            store_(self.kept[SECOND], self.weight)
        elif self.weight is not None:
            self._store_changed(x, self.weight, self._before, self._key(self.weight, seed, step, "weight"))
        self._end()

    def _store_changed(self, x: Tensor, storage: Storage, before: Tensor | None, key: Tensor | None) -> None:
        """Round `x` in place. With lost="least", a number that the step would leave unchanged becomes its neighbour."""
        if self.update.lost is None or before is None:
            store_(x, storage, key)
            return
        asked, old = local_part(x).clone(), local_part(before)
        store_(x, storage, key)
        new = local_part(x)
        for rounding, is_due in (("up", asked > old), ("down", asked < old)):
            neighbour = stored(asked, storage.rounded_by(rounding))
            # The largest number has no neighbour above it.
            new.copy_(torch.where((new == old) & is_due & neighbour.isfinite(), neighbour, new))

    def _store_compensated(self, x: Tensor, before: Tensor) -> None:
        """Store a sum by Kahan's method, computed in float32: weight and compensation are each rounded once."""
        assert self.weight is not None
        owed = self.kept[COMPENSATION] + (x - before)
        x.copy_(before + owed)
        store_(x, self.weight)
        self.kept[COMPENSATION].copy_(owed - (x - before))
        store_(self.kept[COMPENSATION], self.weight)

    def show(self, seed: int, step: int, evaluation: int) -> None:
        """Write the weight as it is stored to the parameter, for a model that a closure runs within a step.

        evaluation: how often the closure was evaluated before. At 0 the step has changed nothing yet.
        """
        if evaluation == 0:
            if self.visible is not None:
                self.parameter.copy_(self.visible)
        elif self.weight is not None and not self.update.is_in_format:
            store_(self.parameter.detach(), self.weight, self._key(self.weight, seed, step, f"closure {evaluation}"))

    def _key(self, storage: Storage, seed: int, step: int, name: str) -> Tensor | None:
        if storage.spec.rounding != "stochastic":
            return None
        # In a CUDA graph, a key from the host would be the same in each replay: the card draws one.
        if is_captured(self.parameter):
            return None
        return noise_key(seed, step, self.index, name)

    # States

    def state_storage(self, state: State) -> Storage | None:
        """Storage of a state of the optimizer; None if the state stays as it is."""
        if not state.x.is_floating_point() or self.parameter.numel() < self.update.min_size:
            return None
        name = state.name
        if not self._names_state(state):
            return None
        if name not in self._states:
            self._states[name] = state_storage(self.update, name)
        return self._states[name]

    def _names_state(self, state: State) -> bool:
        """Return whether the update names this state: by name, or by a pattern if it has the parameter's shape."""
        pattern = next((p for p in self.update.state_patterns if fnmatchcase(state.name, p)), None)
        if pattern is None or state.name == "step":
            return False
        # A pattern means tensors of the parameter's shape, not counters. A nested state mostly belongs to a view of the
        # parameter, which may have other axes.
        is_alike = state.x.shape == self.parameter.shape
        return "*" not in pattern or is_alike or (state.is_nested and state.x.numel() == self.parameter.numel())

    def store_states(self, states: Mapping[Any, Any], seed: int, step: int) -> None:
        """Round the states of this parameter."""
        for state in states_in(states):
            storage = self.state_storage(state)
            if storage is not None:
                store_(state.x, storage, self._key(storage, seed, step, state.text))


# Entries of parameter groups, which every checkpoint of an optimizer contains.
UPDATE, SEED, STEPS = "fpsim_update", "fpsim_seed", "fpsim_steps"
OURS = (UPDATE, SEED, STEPS)


class SavedRun(NamedTuple):
    """The seed and the number of steps of a saved run, from which its random bits continue."""

    seed: int
    steps: int


def saved(state: dict[str, Any], stores: Sequence[ParameterStore], seed: int, steps: int) -> dict[str, Any]:
    """Return an optimizer's state_dict with all that is needed to resume with the same bits."""
    by_index = dict(state["state"])
    for index, store in enumerate(stores):
        if store.kept:
            by_index[index] = {**by_index.get(index, {}), **store.kept}
    groups = [dict(group) for group in state["param_groups"]]
    for group in groups:
        updates = sorted({str(stores[i].update) for i in group["params"]})
        group.update({UPDATE: "; ".join(updates), SEED: seed, STEPS: steps})
    return {**state, "state": by_index, "param_groups": groups}


def without_ours(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without fpsim's additions, as the optimizer itself saves it."""
    by_index = {
        index: {name: x for name, x in entry.items() if name not in COPIES} for index, entry in state["state"].items()
    }
    # A parameter whose states are all ours, as with SGD without momentum, has no entry in the optimizer's own state.
    by_index = {index: entry for index, entry in by_index.items() if entry or not state["state"][index]}
    groups = [{name: x for name, x in group.items() if name not in OURS} for group in state["param_groups"]]
    return {**state, "state": by_index, "param_groups": groups}


def check_state(state: dict[str, Any], stores: Sequence[ParameterStore]) -> SavedRun | None:
    """Return the run's position in its random bits from a state; None for the state of a plain optimizer.

    Raises ValueError for the state of another update.
    """
    if not isinstance(state, dict) or not all(isinstance(state.get(key), kind) for key, kind in _PARTS.items()):
        raise ValueError(f"The state is {shown(state)}. Expected: what optimizer.state_dict() returns.")
    run: SavedRun | None = None
    place = 0
    for group in state["param_groups"]:
        here = stores[place : place + len(group["params"])]
        place += len(group["params"])
        if UPDATE not in group:
            continue
        wanted = "; ".join(sorted({str(store.update) for store in here}))
        if group[UPDATE] != wanted:
            raise ValueError(
                f"The state is of an optimizer that stores {group[UPDATE]}; this one stores {wanted}. Load it into an "
                f"optimizer of the same update, or into a plain one and quantize that afterwards."
            )
        if not is_whole(group.get(SEED)) or not is_whole(group.get(STEPS), 0):
            raise ValueError(
                f"The state has {SEED}={shown(group.get(SEED))} and {STEPS}={shown(group.get(STEPS))}. Expected: two "
                f"integers, as state_dict() saves them."
            )
        run = SavedRun(int(group[SEED]), int(group[STEPS]))
    return run


_PARTS = {"state": dict, "param_groups": list}


def loaded_copies(
    state: dict[str, Any], stores: Sequence[ParameterStore], run: SavedRun | None
) -> list[dict[str, Tensor] | None]:
    """Return the copies of each parameter's weight in a state; None where they start again from the weight.

    Raises ValueError for a state that lacks some copies, or has them in other shapes.
    """
    result: list[dict[str, Tensor] | None] = []
    for index, store in enumerate(stores):
        entry = state["state"].get(index, {})
        kept = {name: entry[name] for name in COPIES if name in entry}
        if run is None:
            result.append(None)
            continue
        if set(kept) != set(store.kept):
            raise ValueError(
                f"The state has {', '.join(kept) or 'no copies'} for {store.name}, and "
                f"{', '.join(store.kept) or 'none'} is needed. Save optimizer.state_dict() of the quantised optimizer."
            )
        result.append({name: _as_kept(x, store, name) for name, x in kept.items()})
    return result


def _as_kept(x: Any, store: ParameterStore, name: str) -> Tensor:
    p = store.parameter
    if not isinstance(x, Tensor) or x.shape != p.shape:
        given = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
        raise ValueError(
            f"{name} of {store.name} is {given} in the state. Expected: a tensor of shape {tuple(p.shape)}."
        )
    return x.detach().to(device=p.device, dtype=torch.float32).clone()
