"""What the forty failures of forums are written with: a module of a function, a step, a model in a format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fpsim


@dataclass(frozen=True)
class Planted:
    """A step that fails, and what must be said of it."""

    model: nn.Module
    step: Callable[[], Tensor]
    place: str
    role: str
    kind: str
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None

    def is_named_by(self, found: fpsim.Why) -> bool:
        """The module of the place is told, and role and kind in the first ten lines; silence is wrong."""
        lines = "\n".join(str(found).splitlines()[:10])
        place = "" if found.cause is None else found.cause["place"].partition(":")[0]
        said = all(re.search(words, lines, re.IGNORECASE) for words in (self.role, self.kind))
        return found.cause is not None and re.fullmatch(self.place, place) is not None and said


class Of(nn.Module):
    """Children by name, and a forward as a function of the module and what came in."""

    def __init__(self, forward: Callable[..., Tensor], **children: object) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            if isinstance(child, torch.Tensor) and not isinstance(child, nn.Parameter):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(seeded(outputs, inputs, seed=inputs + outputs) * gain / math.sqrt(inputs))
        layer.bias.zero_()
    return layer


def step_of(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        result = loss()
        result.backward()
        return result

    return step


def in_format(model: nn.Module, fmt: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model in `fmt`, and the cast of its inputs."""
    if fmt == "half":
        return model.half(), Tensor.half
    if fmt == "bfloat16":
        return model.bfloat16(), Tensor.bfloat16
    return (model if fmt == "float32" else fpsim.quantize(model, fmt)), Tensor.float


def plant(
    model: nn.Module,
    fmt: str,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    place: str,
    role: str,
    kind: str,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Planted:
    """`loss` of the model's output in a format; "autocast" runs in half where autocast says so."""
    auto = fmt == "autocast"
    model, cast = in_format(model, "float32" if auto else fmt)
    x = cast(inputs) if inputs.is_floating_point() else inputs

    def value() -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=auto):
            return loss(model(x))

    taken = None if optimizer is None else optimizer(model.parameters())
    return Planted(model, step_of(model, value), place, role, kind, taken)


def mean_square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def attention(scale: float = 1.0, bias: Callable[[Tensor], Tensor] = lambda s: s, gain: float = 1.0) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        scores = bias(self.q(x) @ self.k(x).transpose(-1, -2) * scale)
        return self.out(scores.softmax(-1) @ self.v(x))

    inside = Of(forward, q=linear(16, 16, gain), k=linear(16, 16, gain), v=linear(16, 16), out=linear(16, 16))
    return nn.Sequential(linear(16, 16), inside, linear(16, 4))


def around(forward: Callable[..., Tensor], width: int = 8, **children: object) -> nn.Module:
    """A linear layer, what fails, and a linear layer."""
    return nn.Sequential(linear(8, width), Of(forward, **children), linear(width, 4))
