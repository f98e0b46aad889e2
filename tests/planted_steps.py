"""What planted steps are written with: a case and what must be said of it, small modules, a step in a format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fpsim


@dataclass(frozen=True)
class Step:
    """A model and a step of it, as `why` takes them."""

    model: nn.Module
    step: Callable[[], object]
    optimizer: Any = None
    scaler: Any = None

    def why(self) -> fpsim.Why:
        return fpsim.why(self.model, self.step, self.optimizer, self.scaler)


Build = Callable[..., Step]


@dataclass(frozen=True)
class Case:
    """A step that fails, and what must be said of it.

    build: makes it anew; the result has `why()`. kind, place, role: patterns of all that `why` has for them; a place
    without a colon is a module or a tensor, and any operation of the module will do. told: where the case is from.
    missed: why the cause is not named as the author of the case would.
    """

    name: str
    build: Callable[[], Any]
    kind: str
    place: str
    role: str
    told: str
    missed: str = ""

    def is_named_by(self, found: fpsim.Why) -> bool:
        """Place, role and kind are right, and stand in the first line; silence is wrong."""
        if found.cause is None:
            return False
        place, role, kind = (found.cause[name] for name in ("place", "role", "kind"))
        at = place if ":" in self.place else place.partition(":")[0]
        wanted = ((self.place, at), (self.role, role), (self.kind, kind))
        is_right = all(re.fullmatch(pattern, got) for pattern, got in wanted)
        first = str(found).splitlines()[0].lower()
        return is_right and all(words.lower() in first for words in (place, role, kind))


CASES: list[Case] = []  # that are a step of their own; planted_grid.py has those of each model and format
HEALTHY: dict[str, list[Build]] = {"loop": [], "unseen": [], "own": []}


def case(kind: str, place: str, role: str = "activation", *, told: str, missed: str = "") -> Callable[[Build], Build]:
    """Register a step that fails.

    told: "forum" (told in forums), "post" (a script as people post it), "loop" (a whole training loop), "unseen" (a
    model that no other test has): these were written, with their answers, before `why` was asked. "own": by the hand
    that wrote `why`. docs/diagnose.md has how many of each were right at first.
    """

    def registered(build: Build) -> Build:
        CASES.append(Case(build.__name__, build, kind, place, role, told, missed))
        return build

    return registered


def healthy(told: str) -> Callable[[Build], Build]:
    """Register a step in which nothing is wrong."""

    def registered(build: Build) -> Build:
        HEALTHY[told].append(build)
        return build

    return registered


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


class Own(torch.optim.Optimizer):
    """An optimizer as one writes it; a subclass says how a parameter moves."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def move(self, p: Any, lr: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group["lr"])


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(seeded(outputs, inputs, seed=inputs + outputs) * gain / math.sqrt(inputs))
        layer.bias.zero_()
    return layer


def step_of(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    auto: torch.dtype | None = None,
    after: Callable[[], object] = lambda: None,
) -> Callable[[], Tensor]:
    """A step of `loss`, under autocast to `auto`; `after` follows the backward pass, then the optimizer's step."""

    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", auto, enabled=auto is not None):
            value = loss()
        value.backward()
        after()
        if optimizer is not None:
            optimizer.step()
        return value

    return step


def in_training(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Any = None,
    auto: torch.dtype | None = None,
    after: Callable[[], object] = lambda: None,
) -> Step:
    """As `step_of`, but for the optimizer, which `why` steps."""
    return Step(model, step_of(model, loss, None, auto, after), optimizer)


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
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Step:
    """`loss` of the model's output in a format; "autocast" runs in half where autocast says so."""
    auto = torch.float16 if fmt == "autocast" else None
    model, cast = in_format(model, "float32" if auto else fmt)
    x = cast(inputs) if inputs.is_floating_point() else inputs
    taken = None if optimizer is None else optimizer(model.parameters())
    return in_training(model, lambda: loss(model(x)), taken, auto)


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
