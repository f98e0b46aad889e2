"""sensitivity(model, loss, policy): which modules the small formats cost most, each alone in them and alone out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fpsim.border import require_memory, require_module, require_seed
from fpsim.checks import number_of, require_callable, require_whole, shown
from fpsim.forwards import emulated_forwards
from fpsim.model import dequantize, quantize, set_policy
from fpsim.noise import seed_here
from fpsim.policy import FormatLike, Policy
from fpsim.recipes import as_policy_of
from fpsim.rows import Rows
from fpsim.torch_modes import keeps_grad_mode
from fpsim.undoing import Undo, undone

__all__ = ["Sensitivity", "sensitivity"]


class Sensitivity(Rows):
    """A row for each module, the one that costs most first; see `sensitivity`.

    float32, quantised: the loss of the whole model in float32 and under the policy.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        if not isinstance(policy, Policy):
            raise TypeError(f"policy is {shown(policy)}. Expected: a fpsim.Policy.")
        self._policy = policy
        self.float32, self.quantised = 0.0, 0.0

    def policy(self, k: int) -> Policy:
        """The policy with the k modules that cost most left in float32. Raises ValueError for more than there are."""
        require_whole("k", k, 0, len(self))
        return replace(self._policy, overrides={**self._policy.overrides, **{row["module"]: None for row in self[:k]}})

    def __str__(self) -> str:
        return f"loss {self.float32:.6g} in float32, {self.quantised:.6g} under the policy\n{super().__str__()}"

    __repr__ = __str__

    def plot(self) -> Any:
        """A figure: what each module adds to the loss, alone and beside all others; needs matplotlib."""
        from fpsim.pictures import plot_costs

        return plot_costs(self, _excess(self.quantised, self.float32))


@keeps_grad_mode
def sensitivity(
    model: nn.Module, loss: Callable[[nn.Module], Tensor | float], policy: FormatLike, *, seed: int = 0
) -> Sensitivity:
    """What each module costs: the loss with it alone in the small formats, and with it alone left in float32.

    A module is one without modules inside that has parameters. Each row has `module`; `alone`, the loss with it alone
    quantised minus float32's; `without`, the loss under the policy minus that with this module alone in float32;
    `cost`, the larger of both; and both losses. `alone` finds what breaks by itself, `without` what breaks the others.
    A loss that is not finite costs inf. That is 2 runs for each module, and 2 more; `loss` decides how much data one
    takes.

    `model` stays as it is: a copy is run, with the same dropout and noise each time.

    model: any module, quantised or not.
    loss: from a model to its loss, on the data that is to decide. Called under torch.no_grad(), unless it enables
        gradients itself.
    policy: the small formats; what `quantize` takes.
    seed: of dropout and noise.
    Raises ValueError for a model none of whose modules has parameters, for one whose loss is not finite in float32, and
    what `quantize` raises.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> with torch.no_grad():
    ...     _ = net[1].weight.mul_(1e6)
    >>> found = sensitivity(net, lambda m: m(torch.ones(1, 4)).abs().mean(), "fp16")
    >>> found[0]["module"], found[0]["alone"], list(found.policy(1).overrides)
    ('1', inf, ['1'])
    """
    require_module(model)
    require_memory(model)
    require_callable("loss", loss, "lambda model: model(x).mean()")
    require_seed(seed)
    plain = dequantize(model) if any(True for _ in emulated_forwards(model)) else model
    wanted = as_policy_of(policy, plain)
    names = [
        name
        for name, module in plain.named_modules()
        if name and not any(module.children()) and any(True for _ in module.parameters())
    ]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no module inside that has parameters. Possible: a model of several layers."
        )
    found = Sensitivity(wanted)
    copy = quantize(plain, None)
    state = {name: x.clone() for name, x in copy.state_dict().items()}
    by_module = wanted.for_modules(plain)

    def run(changed: Policy) -> float:
        set_policy(copy, changed)

        def seeded(undo: Undo) -> float:
            seed_here(undo, seed, seed)
            undo.by(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
            torch.set_grad_enabled(False)
            return number_of("loss(model)", loss(copy))

        value = undone(seeded)
        copy.load_state_dict(state)  # of running statistics
        return value

    found.float32 = run(Policy())
    if not math.isfinite(found.float32):
        raise ValueError(
            f"The loss of {type(model).__name__} is {found.float32} in float32, and no format can be blamed for that. "
            f"Possible: a model and data with a finite loss; fpsim.diagnose(model, step) says where it breaks."
        )
    found.quantised = run(wanted)
    for name in names:
        own = replace(by_module[name], overrides={})
        only, but = run(Policy(overrides={name: own})), run(_without(wanted, name))
        row: dict[str, Any] = {"module": name, "type": type(plain.get_submodule(name)).__name__, "cost": 0.0}
        row |= {"alone": _excess(only, found.float32), "without": _excess(found.quantised, but)}
        row["cost"] = max(row["alone"], row["without"])
        found.append({**row, "loss_alone": only, "loss_without": but})
    found.sort(key=lambda row: -row["cost"])
    return found


def _without(policy: Policy, name: str) -> Policy:
    return replace(policy, overrides={**policy.overrides, name: None})


def _excess(a: float, b: float) -> float:
    """How much larger a loss is than another; one that is not finite is larger than any that is."""
    if math.isfinite(a) and math.isfinite(b):
        return a - b
    return 0.0 if math.isfinite(a) == math.isfinite(b) else (math.inf if math.isfinite(b) else -math.inf)
