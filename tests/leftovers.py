"""What an interrupted call may leave behind: on torch, in this thread, on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import ada_loss
import fpsim
from fpsim.emulation import steps
from fpsim.emulation.scope import active
from fpsim.models.forwards import HookedCall
from fpsim.models.quantize import listeners
from fpsim.tensors import noise

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
POLICY = "fp16"
FOR_GOOD = (steps._begin, steps._end)  # hooks that the first emulation puts on all optimizers


class Middle(nn.Module):
    """Runs a function of the test's before it gives its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] = int

    def forward(self, x: Tensor) -> Tensor:
        self.then()
        return x + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.norm, self.last = nn.Linear(6, 8), Middle(), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.middle(self.first(x)))))


def loss_of(model: nn.Module) -> Tensor:
    return model(X).square().mean()


def left_on(*models: nn.Module) -> list[str]:
    """What is left by calls that have ended; empty where nothing is."""
    found = [f"{type(mode).__name__} on torch's stack" for mode in torch.overrides._get_current_function_mode_stack()]
    if noise._inside or noise._here.streams:
        found.append("a stream of noise")
    if active.emulation is not None:
        found.append("an active emulation")
    if not torch.is_grad_enabled():
        found.append("gradients are off")
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting():
        found.append("a block of autocast")
    hooks = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    found += ["a hook on all optimizers" for hook in hooks if hook not in FOR_GOOD]
    for model in models:
        for name, module in model.named_modules():
            places = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            if any(places):
                found.append(f"a hook on {name!r}")
            if module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, HookedCall):
                found.append(f"a call of {name!r}")
        found += [f"a hook on {name!r}" for name, p in model.named_parameters() if p._backward_hooks]
        if any(True for _ in fpsim.models.installed.emulated_forwards(model)):
            found += ["an observer" for listener in listeners(model) if listener.observer is not None]
            found += ["a scaling" for listener in listeners(model) if listener.scaling is not None]
    return found


def watched(model: nn.Module) -> None:
    with fpsim.watch(model, ["fp16"], every=1):
        loss_of(model).backward()


def recorded(model: nn.Module) -> None:
    with fpsim.record(model):
        loss_of(model).backward()


def emulated(model: nn.Module) -> None:
    with fpsim.emulate(POLICY):
        loss = loss_of(model)
    loss.backward()


def why(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()

    fpsim.why(model, step, optimizer)


def scaled(model: nn.Module) -> None:
    ada_loss.AdaLossScaled.detach_from(model)  # of one that an earlier interrupt kept from its block
    with ada_loss.AdaLossScaled(model):
        loss_of(model).backward()


def under_torchs_noise(model: nn.Module) -> None:
    with fpsim.noise_of_torch():
        loss_of(model).backward()


# What is called on a model, and whether the model is quantised.
ENTRIES: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "watch": (watched, False),
    "diagnose": (lambda model: fpsim.diagnose(model, lambda: loss_of(model).backward()), False),
    "diagnose quantised": (lambda model: fpsim.diagnose(model, lambda: loss_of(model).backward()), True),
    "why": (why, False),
    "why quantised": (why, True),
    "scaled": (scaled, True),
    "watch of a step": (lambda model: fpsim.watch(model, lambda: loss_of(model).backward(), ["fp16"]), False),
    "compare of a step": (lambda model: fpsim.compare(model, lambda: loss_of(model), None, POLICY), False),
    "sensitivity of a step": (lambda model: fpsim.sensitivity(model, lambda: loss_of(model), POLICY), False),
    "compare": (lambda model: fpsim.compare(model, None, POLICY, X, loss=lambda out: out.square().mean()), False),
    "sensitivity": (lambda model: fpsim.sensitivity(model, loss_of, POLICY), False),
    "last_layers": (lambda model: fpsim.last_layers(model, lambda: loss_of(model)), False),
    "emulate": (emulated, False),
    "record": (recorded, True),
    "quantised": (lambda model: loss_of(model).backward(), True),
    "delayed": (lambda model: loss_of(model).backward(), True),
    "quantize": (lambda model: fpsim.quantize(model, POLICY), False),
    "noise_of_torch": (under_torchs_noise, True),
}


def model_for(entry: str) -> nn.Module:
    model = Net()
    if entry == "delayed":
        return fpsim.quantize(model, fpsim.recipe("fp8_delayed", model))
    return fpsim.quantize(model, POLICY) if ENTRIES[entry][1] else model
