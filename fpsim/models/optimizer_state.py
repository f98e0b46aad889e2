"""What a quantised optimizer adds to its state_dict: copies of weights, and where its random bits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpsim.checks import is_whole, shown
from fpsim.models.parameter_store import COPIES, ParameterStore

__all__ = ["SavedRun", "check_state", "loaded_copies", "saved", "without_ours"]

# Entries of parameter groups, which every checkpoint of an optimizer keeps.
UPDATE, SEED, STEPS = "fpsim_update", "fpsim_seed", "fpsim_steps"
OURS = (UPDATE, SEED, STEPS)


class SavedRun(NamedTuple):
    """Where the random bits of a saved run are."""

    seed: int
    steps: int


def saved(state: dict[str, Any], stores: Sequence[ParameterStore], seed: int, steps: int) -> dict[str, Any]:
    """An optimizer's state_dict with what is needed to go on to the same bits."""
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
    """The state as the optimizer itself knows it."""
    by_index = {
        index: {name: x for name, x in entry.items() if name not in COPIES} for index, entry in state["state"].items()
    }
    # an optimizer whose states are all ours, as SGD without momentum, has none
    by_index = {index: entry for index, entry in by_index.items() if entry or not state["state"][index]}
    groups = [{name: x for name, x in group.items() if name not in OURS} for group in state["param_groups"]]
    return {**state, "state": by_index, "param_groups": groups}


def check_state(state: dict[str, Any], stores: Sequence[ParameterStore]) -> SavedRun | None:
    """What a state says of its run; None for the state of a plain optimizer.

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
    """The copies of each parameter's weight that a state has; None where they begin again from the weight.

    Raises ValueError for a state that lacks some, or has them in other shapes.
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
