"""State of delayed scaling of a quantised model: saved, restored, and shared among ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from fpsim.checks import few, require_mapping, shown
from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import keeps_history, listeners
from fpsim.policies.delayed import Histories, loaded
from fpsim.policies.policy import Policy

__all__ = ["load_scaling_state", "scaling_state", "set_scaling_group"]


def scaling_state(model: nn.Module) -> dict[str, Any]:
    """Return the amax histories of a quantised model's delayed scales, by site and operand.

    `state_dict` contains none of these, so that its keys stay those of the model. `copy.deepcopy` and pickling of the
    model keep them. To resume a training with the same bits, save this state in addition to `model.state_dict()`,
    separately on each rank. The state is empty for a model without delayed scaling, and before the first call.

    Args:
        model: a quantised model, or one with quantised modules inside.

    Returns:
        Copies of tensors on their devices, numbers and strings, which torch.save and `torch.load` keep as they are.

    Raises:
        ValueError: for a model that is not quantised.
    """
    return {
        f"{place}{name}": entry
        for place, histories in _histories(model).items()
        for name, entry in histories.state_dict().items()
    }


def load_scaling_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Resume delayed scaling from a `scaling_state`; the model's own histories are dropped.

    An empty state starts all histories again. A state that lacks some of the model's histories is loaded with a
    warning. The products of a model are known only after the model has run: the second step warns of histories for
    which the first step had no product.

    The whole state is checked first: a state that is refused leaves everything as it was.

    Args:
        model: a quantised model, or one with quantised modules inside.
        state: the result of `scaling_state`.

    Raises:
        TypeError: for anything but a mapping.
        ValueError: for a model that is not quantised, for a value that is not such a state, and for the state of
            another model, which has names that no product of this model asks for, or other formats.
    """
    by_place = _histories(model)
    require_mapping("state", state, "what scaling_state(model) returns")
    parts: dict[str, dict[str, Any]] = {place: {} for place in by_place}
    for name, entry in state.items():
        if not isinstance(name, str):
            raise ValueError(f"The state names {shown(name)}. Expected: sites and operands, '0:linear fprop.x'.")
        place = max((p for p in by_place if name.startswith(p)), key=len, default=None)
        if place is None:
            raise ValueError(f"The state names {shown(name)}. Expected: names that begin with {', '.join(by_place)}.")
        parts[place][name.removeprefix(place)] = entry
    # All parts are checked before the first part is loaded, so that no state is half loaded.
    fresh = {place: loaded(part) for place, part in parts.items()}
    _require_wanted(model, parts)
    lacking = [name for name in scaling_state(model) if name not in state]
    if state and lacking:
        warnings.warn(
            f"The state lacks {few(lacking)}, which the model remembers. The scaling of these operands begins again.",
            stacklevel=2,
        )
    for place, histories in by_place.items():
        histories.take(fresh[place])


def _require_wanted(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for histories of operands that no product of the model scales by a history."""
    policies: dict[int, dict[str, Policy]] = {}
    for _, forward in emulated_forwards(model):
        assert forward.policy is not None
        policies.setdefault(id(forward.listeners.histories), {})[forward.name] = forward.policy
    by_place = {place: policies[id(histories)] for place, histories in _histories(model).items()}
    strange = [n for place, part in parts.items() for n, e in part.items() if not keeps_history(n, e, by_place[place])]
    if strange:
        raise ValueError(
            f"The state is of another model or policy: no product asks for {few(strange)}. Load the state of a model "
            f"with the same names and policy."
        )


def set_scaling_group(model: nn.Module, group: Any) -> None:
    """Let the ranks of this process group, instead of all ranks, share the largest amax in each step.

    The ranks call the same products in the same order, as in data-parallel training. The group is not copied or pickled
    with the model.

    Args:
        group: a result of torch.distributed.new_group; None for all ranks.

    Raises:
        TypeError: for anything but a group.
        ValueError: for a model that is not quantised.
    """
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group is {shown(group)}. Expected: what torch.distributed.new_group returns, or None.")
    for histories in _histories(model).values():
        histories.group = group


def _histories(model: nn.Module) -> dict[str, Histories]:
    """Return the histories by prefix of names: "" for one model; "encoder." and others if `model` contains several."""
    wanted = {id(group): group for group in listeners(model)}
    if len(wanted) == 1:
        return {"": next(iter(wanted.values())).histories}
    result: dict[str, Histories] = {}
    names = {module: name for name, module in model.named_modules()}
    for module, forward in emulated_forwards(model):
        group = wanted.pop(id(forward.listeners), None)
        if group is not None:
            place = names[module].removesuffix(forward.name)
            result[place if place.endswith(".") or not place else f"{place}."] = group.histories
    return result
