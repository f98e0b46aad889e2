"""Operands of products that are transformed first, and those whose scales come from earlier steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from fpsim import BlockFormat, Delayed, Hadamard, Operand, Policy, Products, quantize

# Transforms


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (3, 7, 20), (10, 20)),
    "one axis": (F.linear, (20,), (10, 20)),
    "matmul": (torch.matmul, (3, 7, 20), (3, 20, 10)),
    "broadcast": (torch.matmul, (2, 3, 7, 20), (20, 10)),
    "einsum": (lambda x, w: torch.einsum("bik,kj->bji", x, w), (3, 7, 20), (20, 10)),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1), (3, 20, 5, 6), (10, 20, 3, 3)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (3, 20, 5, 6), (20, 10, 3, 3)),
    "grouped": (lambda x, w: F.conv1d(x, w, groups=2), (3, 32, 9), (32, 16, 3)),
    "tbc": (lambda x, w: torch.conv_tbc(x, w, w.new_zeros(w.shape[2])), (6, 3, 20), (2, 20, 10)),
}


class Of(nn.Module):
    """A function of its input and one weight."""

    def __init__(self, f: Any, w: Tensor) -> None:
        super().__init__()
        self.f, self.weight = f, nn.Parameter(w.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.weight)


def derivatives(model: nn.Module, x: Tensor) -> list[Tensor]:
    """y, dx and dw for a dy of small integers."""
    x = x.clone().requires_grad_()
    y = model(x)
    (w,) = model.parameters()
    return [y.detach(), *torch.autograd.grad(y, (x, w), integers(*y.shape, seed=7))]


@pytest.mark.parametrize("signs", [None, "fixed", "random"])
@pytest.mark.parametrize("case", CASES)
def test_a_transform_of_both_operands_changes_nothing_in_exact_arithmetic(case: str, signs: str | None) -> None:
    f, of_x, of_w = CASES[case]
    x, model = integers(*of_x), Of(f, integers(*of_w, seed=1))
    operand = Operand("fp32", hadamard=Hadamard(16, signs))
    for got, expected in zip(
        derivatives(quantize(model, Policy(products=Products.all(operand, attention=True))), x),
        derivatives(model, x),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_each_operand_is_quantised_after_its_transform() -> None:
    x, w, dy = torch.randn(29, 24), torch.randn(40, 24), torch.randn(29, 40)
    x[3, 5] = 100.0
    transform, fmt = Hadamard(16, "fixed"), "nvfp4"
    plain, turned = Operand(fmt), Operand(fmt, hadamard=transform)
    products = Products(fprop=(turned, turned), dgrad=(plain, plain), wgrad=(turned, turned))
    model = quantize(Of(F.linear, w), Policy(products=products))
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    dx, dw = torch.autograd.grad(y, (leaf, model.weight), dy)

    def quantised(t: Tensor, axis: int, is_turned: bool = True) -> Tensor:
        if is_turned:  # 24 features and 29 tokens are padded to 32
            t = F.pad(t, (0, -t.shape[1] % 16) if axis else (0, 0, 0, -t.shape[0] % 16))
            t = fpsim.hadamard(t, transform, axis)
        return fpsim.round_to(t, fmt, axis=axis)

    assert torch.equal(y, quantised(x, 1) @ quantised(w, 1).T)
    assert torch.equal(dx, quantised(dy, 1, False) @ quantised(w, 0, False))
    assert torch.equal(dw, quantised(dy, 0).T @ quantised(x, 0))


def test_random_signs_are_drawn_anew_for_each_product_and_follow_the_seed() -> None:
    operand = Operand("e2m1fn per 32", hadamard=Hadamard(32, "random"))
    model, x = quantize(nn.Linear(64, 64), Policy(products=Products.all(operand))), torch.randn(32, 64)
    torch.manual_seed(0)
    first, second = model(x), model(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), first)
    assert not torch.equal(first, second)


def test_a_grouped_convolution_whose_groups_do_not_fit_is_refused() -> None:
    model = quantize(
        nn.Conv1d(24, 32, 1, groups=2), Policy(products=Products.all(Operand("fp32", hadamard=Hadamard(8))))
    )
    with pytest.raises(
        ValueError, match=r"size 8 reached fprop of the product at :conv1d, in 2 groups, whose length 12"
    ):
        model(torch.ones(1, 24, 3))


def test_operands_of_a_product_are_transformed_alike() -> None:
    with pytest.raises(ValueError, match=r"wgrad: dy has Hadamard 16, x with none\. Both operands"):
        Products(wgrad=(Operand("mxfp4", hadamard=Hadamard(16)), "mxfp4"))
    with pytest.raises(ValueError, match=r"fprop: x has no Hadamard transform, w with Hadamard 16 fixed signs"):
        Products(fprop=(None, Operand("mxfp4", hadamard=Hadamard(16, "fixed"))))
    with pytest.raises(TypeError, match=r"hadamard is 16\. Expected: a fpsim\.Hadamard"):
        Operand("mxfp4", hadamard=16)  # type: ignore[arg-type]


# Delayed scaling


def delayed(rule: Delayed) -> Policy:
    forward, gradient = (
        Operand(BlockFormat(element, "tensor", "fp32", rule), overflow="saturate") for element in ("e4m3fn", "e5m2")
    )
    return Policy(products=Products((forward, forward), (gradient, forward), (gradient, forward)))


class Naive:
    """A linear layer under delayed scaling, step by step, in NumPy's float32 and torch's product."""

    def __init__(self, w: Tensor, history: int) -> None:
        self.w, self.history = w, history
        self.amaxes: dict[str, list[np.float32]] = {}

    def quantised(self, operand: str, x: Tensor, element: str, is_step: bool) -> Tensor:
        largest = {"e4m3fn": 448.0, "e5m2": 57344.0}[element]
        last = self.amaxes.setdefault(operand, [])
        known = last if is_step else last[:-1]  # an evaluation has the scales of the step before it
        scale = np.float32(largest) / max(known[-self.history :]) if known else np.float32(1)
        if is_step:
            last.append(np.float32(x.abs().max().item()))
        # divided by a product with the inverse, as in NVIDIA TransformerEngine
        return fpsim.round_to(x * float(scale), element, overflow="saturate") * float(np.float32(1) / scale)

    def step(self, x: Tensor, dy: Tensor | None) -> list[Tensor]:
        xq, wq = (self.quantised(f"fprop.{k}", v, "e4m3fn", dy is not None) for k, v in (("x", x), ("w", self.w)))
        found = [F.linear(xq, wq)]
        if dy is not None:
            w = self.quantised("dgrad.w", self.w, "e4m3fn", True)
            found.append(self.quantised("dgrad.dy", dy, "e5m2", True) @ w)
            found.append(self.quantised("wgrad.dy", dy, "e5m2", True).T @ self.quantised("wgrad.x", x, "e4m3fn", True))
        return found


def steps(model: nn.Module, naive: Naive, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = (torch.randn(6, 8, generator=generator) * 2.0 ** (step % 5)).requires_grad_()
        dy = torch.randn(6, 4, generator=generator) * 2.0 ** (-10 - step % 3)
        if step % 4 == 3:  # an evaluation
            with torch.no_grad():
                assert torch.equal(model(x), naive.step(x.detach(), None)[0])
            continue
        y = model(x)
        dx, dw = torch.autograd.grad(y, (x, model.weight), dy)
        for got, expected in zip((y, dx, dw), naive.step(x.detach(), dy), strict=True):
            assert torch.equal(got, expected)


def test_a_layer_under_delayed_scaling_is_what_the_definition_says_also_from_a_saved_state() -> None:
    net = nn.Linear(8, 4, bias=False)
    model, naive = quantize(net, delayed(Delayed(history=3))), Naive(net.weight.detach(), 3)
    steps(model, naive, 0, 9)
    fresh = quantize(net, delayed(Delayed(history=3)))
    fpsim.load_scaling_state(fresh, fpsim.scaling_state(model))
    duplicate, other = copy.deepcopy(model), copy.deepcopy(naive)
    steps(fresh, naive, 9, 14)
    steps(duplicate, other, 9, 14)


class Checkpointed(nn.Module):
    """Two layers, the first of them run again in the backward pass."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.use_reentrant = nn.Linear(8, 8), nn.Linear(8, 8), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.second(F.gelu(self.first(x)))
        return self.second(checkpoint(lambda v: F.gelu(self.first(v)), x, use_reentrant=self.use_reentrant))


def test_what_a_checkpoint_runs_again_has_the_scales_of_the_first_time() -> None:
    gradients = []
    for use_reentrant in (None, False, True):
        model = quantize(Checkpointed(use_reentrant), delayed(Delayed(history=2)))
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            (model(x) * 10.0**-step).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for again in gradients[1:]:
        for a, b in zip(gradients[0], again, strict=True):
            assert torch.equal(a, b)


def test_delayed_scaling_needs_a_model_that_remembers() -> None:
    policy = delayed(Delayed())
    with (
        pytest.raises(ValueError, match=r"emulate\(\) remembers nothing.*quantize\(model, policy\)"),
        fpsim.emulate(policy),
    ):
        pass
    assert policy.products is not None
    assert policy.products.is_delayed
    assert not Products.all("nvfp4").is_delayed
