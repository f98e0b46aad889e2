"""Layers, and blocks around blocks, from which `random_modules` draws."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from module_functions import WIDTH, Through
from module_places import Applied, linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Layers that make their parameters themselves


class LateLinear(nn.Module):
    """A layer that has its parameters from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lazy(x)  # type: ignore[no-any-return]


class Hypernetwork(nn.Module):
    """A weight that is computed from others, and goes to a child as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 3) * 0.5), nn.Parameter(torch.randn(3, WIDTH) * 0.5)
        self.child = Applied(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, self.a @ self.b)  # type: ignore[no-any-return]


def normed_linear() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)


class Experts(nn.Module):
    """Each token goes to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        gates = F.softmax(self.gate(x).float(), -1).to(x.dtype)
        return torch.stack([e(x) for e in self.experts], -1).mul(gates[..., None, :]).sum(-1)


class HookedParameter(nn.Module):
    """A hook keeps the gradient of a weight to a mask, as sparse training does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.register_buffer("mask", (torch.randn(WIDTH, WIDTH) > 0).float())
        self.w.register_hook(self.masked)

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.mask.to(gradient.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class TaggedParameter(nn.Module):
    """A parameter says how it is used, as muP's do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.w.multiplier = 0.3  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w * getattr(self.w, "multiplier", 1.0)


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, WIDTH)).view(x.shape)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x.select(-2, 0))
        steps = []
        for i in range(x.shape[-2]):
            h = self.cell(x.select(-2, i), h)
            steps.append(h)
        return torch.stack(steps, -2)


class Remembering(nn.Module):
    """Uses what it computed in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = x * 0.9 if self.before is None else x + self.before * 0.25
        self.before = out.detach()
        return out


LAYERS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make
    for make in (LateLinear, Hypernetwork, normed_linear, weight_normed, attention, Experts)
    + (HookedParameter, TaggedParameter, BatchNormed, Recurrent, Remembering)
}


# Around other blocks


class Function(nn.Module):
    def __init__(self, function: Through) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Around(nn.Module):
    """A block with others inside."""

    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def run(self, x: Tensor) -> Tensor:
        for block in self.inside:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class InSequence(Around):
    pass


class Deep(Around):
    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__([nn.Sequential(nn.Sequential(*inside))])


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(x) * 0.5


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(torch.tanh(self.run(x)))


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)  # type: ignore[no-any-return]


class CheckpointedReentrant(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=True)  # type: ignore[no-any-return]


class CheckpointedModules(Around):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.inside:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Generated(Around):
    """A forward that is a generator, in a module that asks it for its values."""

    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__([Steps(inside)])

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.inside[0](x)
        return last  # type: ignore[no-any-return]


class Steps(Around):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        for block in self.inside:
            x = block(x) * 0.9
            yield x


class Awaited(Around):
    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__([Coroutine(inside)])

    def forward(self, x: Tensor) -> Tensor:
        return asyncio.run(self.inside[0](x))  # type: ignore[no-any-return]


class Coroutine(Around):
    async def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.run(x) * 1.003


class AroundANorm(Around):
    """Its input is first used without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = (self.run(x) * 1.0).abs().amax() + 0.5
        return self.run(x / largest)


class Frozen(Around):
    """Only what comes before it learns."""

    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__(inside)
        self.inside.requires_grad_(False)


class Hooked(Around):
    """Hooks change what goes in and what comes out."""

    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__(inside)
        self.inside[0].register_forward_pre_hook(scale_input)
        self.inside[-1].register_forward_hook(add_to_output)


def scale_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 0.7, *args[1:])


def add_to_output(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out + 0.3


class WithoutAutocast(Around):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.run(x)


class InADict(Around):
    def __init__(self, inside: list[nn.Module]) -> None:
        super().__init__([Dicts(inside)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inside[0]({"x": [x, None]})["out"].x  # type: ignore[no-any-return]


class Dicts(Around):
    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        return {"out": SimpleNamespace(x=self.run(batch["x"][0]))}


AROUND: dict[str, type[Around]] = {
    around.__name__: around
    for around in (InSequence, Deep, Residual, Twice, Checkpointed, CheckpointedReentrant, CheckpointedModules)
    + (Generated, Awaited, AroundANorm, Frozen, Hooked, WithoutAutocast, InADict)
}
