"""Weights that are computed before they are used: by a parametrization, or by a hook as torch's older norms do.

The computation of such a weight runs in float32 on master values. Its result has the role of a weight wherever it is
used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fpsim.emulation.entering import computing_a_weight
from fpsim.emulation.marks import mark_as_weight
from fpsim.torch_internals import computing_hooks, direct_parameters, may_compute_weights, parametrization_lists

__all__ = ["adopt", "modules_that_compute", "release", "sources"]


class _ComputingForward:
    """Stands in for the `forward` of a ParametrizationList."""

    def __init__(self, module: ParametrizationList) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with computing_a_weight():
            out = type(self.module).forward(self.module, *args, **kwargs)
        # A parametrised buffer is not a weight.
        if any(True for _ in direct_parameters(self.module)):
            mark_as_weight(out)
        return out


class _ComputingMethod:
    """Stands in for the method of a hook that computes a weight."""

    def __init__(self, hook: Any, method: str) -> None:
        self.hook, self.method = hook, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with computing_a_weight():
            out = getattr(type(self.hook), self.method)(self.hook, *args, **kwargs)
        mark_as_weight(out)
        return out


def adopt(module: nn.Module) -> None:
    """Compute the weights of this one module in float32, and mark them; modules adopted before stay as they are."""
    # Called before each forward, because a norm may be registered at any time.
    if not may_compute_weights(module):
        return
    for parametrization in parametrization_lists(module):
        if "forward" not in vars(parametrization):
            parametrization.forward = _ComputingForward(parametrization)  # type: ignore[method-assign]
    for computation in computing_hooks(module):
        if computation.method not in vars(computation.hook):
            setattr(computation.hook, computation.method, _ComputingMethod(computation.hook, computation.method))
            # The hook had computed this weight before the hook was intercepted.
            weight = vars(module).get(computation.weight)
            if isinstance(weight, Tensor):
                mark_as_weight(weight)


def release(module: nn.Module) -> None:
    """Undo `adopt`."""
    for parametrization in parametrization_lists(module):
        if isinstance(vars(parametrization).get("forward"), _ComputingForward):
            del parametrization.forward
    for computation in computing_hooks(module):
        if isinstance(vars(computation.hook).get(computation.method), _ComputingMethod):
            delattr(computation.hook, computation.method)


def modules_that_compute(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside `model` that compute weights: parametrizations and their submodules."""
    return {inner for m in model.modules() if isinstance(m, ParametrizationList) for inner in m.modules()}


def sources(module: nn.Module) -> set[str]:
    """Return the names of the module's own parameters that are used only to compute other parameters."""
    return {name for computation in computing_hooks(module) for name in computation.sources}
