"""The state of delayed scaling of a quantised model: saved, restored, and shared by which ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fpsim.delayed import Histories
from fpsim.forwards import emulated_forwards
from fpsim.model import listeners

__all__ = ["load_scaling_state", "scaling_state", "set_scaling_group"]


def scaling_state(model: nn.Module) -> dict[str, Any]:
    """What delayed scaling remembers of the earlier steps of a quantised model, by site and operand.

    `state_dict` has none of it, so that its keys stay those of the model. `copy.deepcopy` and pickling of the model
    keep it. A training that is to continue to the same bits saves it beside `model.state_dict()`, on each rank its own.
    Empty for a model without delayed scaling, and before its first call.

    model: quantised, or with quantised modules inside.
    Returns copies of tensors where they are, numbers and words, as torch.save keeps and `torch.load` gives.
    Raises ValueError for a model that is not quantised.
    """
    return {
        f"{place}{name}": entry
        for place, histories in _histories(model).items()
        for name, entry in histories.state_dict().items()
    }


def load_scaling_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Go on with delayed scaling from what `scaling_state` gave; what the model remembers is dropped.

    Raises ValueError for a model that is not quantised, and for what is no such state.
    """
    found = _histories(model)
    parts: dict[str, dict[str, Any]] = {place: {} for place in found}
    for name, entry in state.items():
        place = max((p for p in found if name.startswith(p)), key=len, default=None)
        if place is None:
            raise ValueError(f"The state names {name!r}, and quantised are only: {', '.join(found)}.")
        parts[place][name.removeprefix(place)] = entry
    for place, histories in found.items():
        histories.load_state_dict(parts[place])


def set_scaling_group(model: nn.Module, group: Any) -> None:
    """Let the ranks of this process group, and not all, take the largest amax of them in each step.

    They call the same products in the same order, as in data-parallel training. Not copied or pickled with the model.

    group: as torch.distributed.new_group gives; None for all ranks.
    Raises ValueError for a model that is not quantised.
    """
    for histories in _histories(model).values():
        histories.group = group


def _histories(model: nn.Module) -> dict[str, Histories]:
    """The histories of a model by where it is quantised: "" for one, "encoder." and so on for several inside."""
    wanted = {id(found): found for found in listeners(model)}
    if len(wanted) == 1:
        return {"": next(iter(wanted.values())).histories}
    result: dict[str, Histories] = {}
    names = {module: name for name, module in model.named_modules()}
    for module, forward in emulated_forwards(model):
        found = wanted.pop(id(forward.listeners), None)
        if found is not None:
            place = names[module].removesuffix(forward.name)
            result[place if place.endswith(".") or not place else f"{place}."] = found.histories
    return result
