"""A weight that is written to between the forward of a model's own Function and its backward: as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fpsim import quantize


class Again(torch.autograd.Function):
    """Runs a module again in its backward. What it asks for the gradients of is saved, kept, or the module's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, way: str, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.parameters = module, parameters if way == "kept" else [*module.parameters()]
        ctx.save_for_backward(x, *(parameters if way == "saved" else ()))
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.module(x.detach())
        return None, None, None, *torch.autograd.grad(y, parameters or ctx.parameters, g, allow_unused=True)


class Outer(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.way = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "plain":
            return self.inner(x)  # type: ignore[no-any-return]
        return Again.apply(x, self.inner, self.way, *self.inner.parameters())  # type: ignore[no-any-return]


FORMATS = [None, "bf16", "e4m3fn", "mxfp8_e4m3"]
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def made(way: str, fmt: str | None) -> Any:
    return Outer(way) if fmt is None else quantize(Outer(way), fmt)


@torch.no_grad()
def write(model: Any) -> None:
    model.inner[0].weight.mul_(1.7)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_a_function_saved_and_somebody_wrote_to_raises_as_in_torch(fmt: str | None) -> None:
    model = made("saved", fmt)
    y = model(X)
    write(model)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[4, 8\]\] is at v"):
        y.sum().backward()
    write(model)
    model(X).sum().backward()
    assert model.inner[0].weight.grad is not None


@pytest.mark.parametrize("way", ["kept", "of the module"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_a_function_keeps_by_itself_has_the_gradients_of_what_was_written(fmt: str | None, way: str) -> None:
    """torch counts no writes to it: the module that runs again has the numbers of then."""
    model, plain = made(way, fmt), made("plain", fmt)
    y = model(X)
    write(model)
    y.sum().backward()
    write(plain)
    plain(X).sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, other)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return g * x, None


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, y: None,
    "to the argument": lambda x, y: x.add_(1),
    "to another tensor": lambda x, y: torch.zeros(3).add_(1),
}


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("fmt", [None, "bf16"])
def test_a_write_of_the_function_itself_is_none_that_raises(fmt: str | None, writes: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return Doubled.apply(x, other) * 1.0  # type: ignore[no-any-return]

    model, other = Net() if fmt is None else quantize(Net(), fmt), torch.full((3,), 1.1)
    leaf = torch.full((3,), 1.1, requires_grad=True)
    y = model(leaf.clone(), other)
    WRITES[writes](other, y)
    if writes == "to the argument":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return
    y.sum().backward()
    assert leaf.grad is not None
