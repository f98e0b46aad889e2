"""Everything that a step may change, kept and put back: the model, its optimizers, a scaler, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.models.installed import emulated_forwards
from fpsim.models.quantize import listeners

__all__ = ["Kept"]


class Kept:
    """The state of a model, its optimizers and a scaler at one time.

    optimizers: those that are known.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: Any) -> None:
        self.model, self.scaler = model, scaler
        self.optimizers: list[torch.optim.Optimizer] = []
        self._states: list[tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]] = []
        self._modules = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
        ]
        self.tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self.gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        histories = [listener.histories for listener in listeners(model)] if any(emulated_forwards(model)) else []
        self._histories = [(history, history.state_dict()) for history in histories]
        self._scaler_state = copy.deepcopy(vars(scaler)) if isinstance(scaler, torch.amp.GradScaler) else None
        if optimizer is not None:
            self.know(optimizer)

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state of an optimizer of the model too, unless it is kept."""
        own = {id(p) for p in self.model.parameters()}
        is_own = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if not is_own or any(optimizer is known for known in self.optimizers):
            return
        groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        states = {p: {k: (v, _copied(v)) for k, v in state.items()} for p, state in optimizer.state.items()}
        self.optimizers.append(optimizer)
        self._states.append((groups, states))

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back as it was."""
        for module, training in self._modules:
            module.training = training
        for module, name, buffer in self._buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for tensor, value in self.tensors:
            if not _same(tensor, value):
                tensor.copy_(value)
        for parameter, gradient, held in self.gradients:
            if gradient is not None and held is not None and not _same(gradient, held):
                gradient.copy_(held)
            parameter.grad = gradient
        for history, saved in self._histories:
            history.load_state_dict(saved)
        for optimizer, (groups, states) in zip(self.optimizers, self._states, strict=True):
            _restore_optimizer(optimizer, groups, states)
        if self._scaler_state is not None:
            vars(self.scaler).clear()
            vars(self.scaler).update(copy.deepcopy(self._scaler_state))


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = _copied(value)
    for parameter in [p for p in optimizer.state if p not in states]:
        del optimizer.state[parameter]
    for parameter, saved_state in states.items():
        state = optimizer.state[parameter]
        for key in [k for k in state if k not in saved_state]:
            del state[key]
        for key, (original, value) in saved_state.items():
            if isinstance(original, Tensor):
                state[key] = original if _same(original, value) else original.copy_(value)
            else:
                state[key] = _copied(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.layout is torch.strided and torch.equal(a, b)
