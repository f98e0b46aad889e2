"""Operands that a function of the user's rounds."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ada_loss
import fpsim
from fpsim import Operand, Policy, Products, quantize


def mx(x: Tensor, axis: int) -> Tensor:
    return fpsim.round_to(x, "mxfp4", axis=axis)


class Model(nn.Module):
    """A convolution, a linear layer and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 32, 3), nn.Linear(36, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(self.conv(x).flatten(2).relu())
        return h @ h.mT


def stepped(model: Any, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).to(next(model.parameters()).dtype).requires_grad_()
    model.zero_grad()
    y = (model if forward is None else forward)(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = Model()
    by_function = Policy(products=Products.all(Operand(mx), attention=True))
    return quantize(model, by_function), quantize(model, Policy(products=Products.all("mxfp4", attention=True)))


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpoint", "copied", "half"])
def test_a_function_that_rounds_as_a_format_gives_its_bits(way: str) -> None:
    model, by_format = pair()
    forward: Any = None
    if way == "compiled":
        forward = torch.compile(model, backend="aot_eager")
    elif way == "checkpoint":
        forward = lambda x: checkpoint(model, x, use_reentrant=False)
    elif way == "copied":
        model = copy.deepcopy(model)
    elif way == "half":
        model, by_format = model.bfloat16(), by_format.bfloat16()
    for mine, wanted in zip(stepped(model, forward), stepped(by_format), strict=True):
        assert torch.equal(mine, wanted)


def test_a_function_is_given_float32_in_which_it_may_write_and_an_axis_that_counts_from_zero() -> None:
    seen: list[tuple[tuple[int, ...], torch.dtype, bool, int]] = []

    def spoils(x: Tensor, axis: int) -> Tensor:
        seen.append((tuple(x.shape), x.dtype, torch.is_grad_enabled(), axis))
        return x.mul_(2.0)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        layer = nn.Linear(5, 3, bias=False).to(dtype)
        weight = layer.weight.detach().clone()
        model = quantize(layer, Policy(products=Products(fprop=(None, spoils), dgrad=(None, spoils))))
        x = torch.randn(2, 4, 5).to(dtype).requires_grad_()
        model(x).sum().backward()
        assert torch.equal(model.weight, weight)
        assert torch.allclose(x.grad, (2 * weight).sum(0).expand(2, 4, 5), rtol=0.0, atol=4 * torch.finfo(dtype).eps)  # type: ignore[arg-type]
    assert seen == [((3, 5), torch.float32, False, 1), ((3, 5), torch.float32, False, 0)] * 3


def test_tables_have_its_name_and_a_healthy_step_is_not_blamed() -> None:
    model, _ = pair()
    with fpsim.record(model) as recording:
        stepped(model)
    assert {row["format"] for row in recording.rows()} == {"mx"}
    assert all(row["sqnr_db"] < 30 for row in recording.rows())
    assert str(Operand(mx, name="mine")) == "mine"
    assert "mx" in str(fpsim.summary(model))
    classifier = quantize(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), Policy(products=Products.all(mx))
    )
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert "Nothing was found" in str(fpsim.why(classifier, lambda: classifier(x).square().mean().backward()))


def test_a_scaling_of_layers_leaves_it_alone_and_scales_other_operands() -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), Policy(products=Products(dgrad=("fp16", mx))))
    scaled = ada_loss.AdaLossScaled(model)
    (scaled(torch.randn(4, 8)).sum() * 1e-9).backward()
    assert all(p.grad.any() for p in model.parameters())
    assert any(scaled.log2_scales().values())
    own = quantize(nn.Linear(8, 8), Policy(products=Products(dgrad=(mx, None))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has nothing to scale
        alone = ada_loss.AdaLossScaled(own)
    alone(torch.randn(4, 8)).sum().backward()
    assert not any(alone.log2_scales().values())


def test_what_the_forward_product_used_is_given_to_it() -> None:
    torch.manual_seed(0)
    double = Operand(lambda x, axis: x * 2, name="double", source="fprop")
    layer = quantize(nn.Linear(32, 8), Policy(products=Products(fprop=(None, mx), dgrad=(None, double))))
    x = torch.randn(4, 32, requires_grad=True)
    layer(x).sum().backward()
    expected = torch.ones(4, 8) @ (2 * mx(layer.weight.detach(), 1))
    assert torch.allclose(x.grad, expected, rtol=0.0, atol=8 * 2.0**-24)  # type: ignore[arg-type]  # the order of sums


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda x, axis: x[:1],
            r"returned a float32 of shape \(1, 8\) on cpu. Expected: a float32 tensor of",
        ),
        (lambda x, axis: x.double(), "returned a float64"),
        (lambda x, axis: None, "returned NoneType"),
        (lambda x, axis: x / (x - x), "made NaN of numbers"),
    ],
    ids=["shape", "dtype", "none", "nan"],
)
def test_what_it_may_not_give_is_refused(function: Callable[..., Any], words: str) -> None:
    layer = quantize(nn.Linear(8, 3), Policy(products=Products.all(Operand(function, name="mine"))))
    with pytest.raises((TypeError, ValueError), match=f"The operand function mine at :linear {words}"):
        layer(torch.zeros(2, 8))


def test_nan_beside_an_infinity_is_not_its_own() -> None:
    layer = quantize(nn.Linear(8, 3), Policy(products=Products(fprop=(mx, None))))
    assert layer(torch.full((2, 8), torch.inf)).isnan().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Operand(mx, "stochastic"), "which rounds by itself"),
        (lambda: Operand("mxfp4", name="mine"), "which has a name"),
        (lambda: Operand(mx, name=""), "is not a name"),
        (lambda: Policy(error=Operand(mx).fmt), r"A function can be an operand of a product"),  # type: ignore[arg-type]
        (lambda: fpsim.round_to(torch.ones(2), Operand(mx).fmt), "Expected here: a format"),  # type: ignore[arg-type]
        (lambda: ada_loss.sweep("digits", [{"products": {"dy": lambda x, axis: x}}]), "a worker cannot import"),
    ],
)
def test_a_function_stands_where_an_operand_stands_and_nowhere_else(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_operands_of_one_function_are_equal_and_pickled() -> None:
    assert Operand(mx) == Operand(mx) != Operand(mx, name="other")
    assert pickle.loads(pickle.dumps(Products.all(Operand(mx)))) == Products.all(mx)
    assert Products.all(mx).with_rounding("stochastic") == Products.all(mx)
