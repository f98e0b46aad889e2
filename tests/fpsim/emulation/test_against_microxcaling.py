"""MX products against what microxcaling computed: its inputs and results lie beside the repository's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from product_cases import Calls, gradients
from torch import Tensor, nn

from fpsim import quantize

RESULTS = Path(__file__).parents[4] / "shared" / "specs" / "microxcaling.npz"
FORMATS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"]

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason=f"needs {RESULTS}")


def load(*names: str) -> list[Tensor]:
    with np.load(RESULTS) as found:
        return [torch.from_numpy(found[name]) for name in names]


def assert_sums(got: Tensor, expected: Tensor, terms: int, sizes: Tensor) -> None:
    """Equal up to the order of a float32 sum: at most half an ulp of a partial sum for each term, on both sides.

    sizes: the same sums, of magnitudes. Quantised, they are at most 1.5 times as large.
    """
    bound = 2 * terms * 2.0**-24 * 1.5 * sizes.double()
    assert bool(((got.double() - expected.double()).abs() <= bound).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_linear_layer(fmt: str) -> None:
    x, w, b, dy = load("linear.x", "linear.w", "linear.b", "linear.dy")
    model = quantize(nn.Linear(96, 72), fmt)
    model.load_state_dict({"weight": w, "bias": b})
    y, dx, grads = gradients(model, x, dy)
    of_y, of_dx, of_dw, of_db = load(*(f"linear.{fmt}.{name}" for name in ("y", "dx", "dw", "db")))
    assert_sums(y, of_y, 97, x.abs() @ w.abs().T + b.abs())
    assert_sums(dx, of_dx, 72, dy.abs() @ w.abs())
    assert_sums(grads["weight"], of_dw, 80, dy.abs().T @ x.abs())
    assert_sums(grads["bias"], of_db, 80, dy.abs().sum(0))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_convolution(fmt: str) -> None:
    x, w, b, dy = load("conv2d.x", "conv2d.w", "conv2d.b", "conv2d.dy")
    model = quantize(nn.Conv2d(40, 48, 3, padding=1), fmt)
    model.load_state_dict({"weight": w, "bias": b})
    y, dx, grads = gradients(model, x, dy)
    of_y, of_dx, of_dw = load(*(f"conv2d.{fmt}.{name}" for name in ("y", "dx", "dw")))
    leaves = x.abs().requires_grad_(), w.abs().requires_grad_()
    sizes = F.conv2d(*leaves, b.abs(), padding=1)
    of_x, of_w = torch.autograd.grad(sizes, leaves, dy.abs())
    assert_sums(y, of_y, 40 * 9 + 1, sizes.detach())
    assert_sums(dx, of_dx, 48 * 9, of_x)
    assert_sums(grads["weight"], of_dw, 5 * 36, of_w)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_batched_product(fmt: str) -> None:
    a, b, dy = load("matmul.a", "matmul.b", "matmul.dy")
    y, da, grads = gradients(quantize(Calls(torch.matmul, b), fmt), a, dy)
    of_y, of_da, of_db = load(*(f"matmul.{fmt}.{name}" for name in ("y", "da", "db")))
    assert_sums(y, of_y, 64, a.abs() @ b.abs())
    assert_sums(da, of_da, 48, dy.abs() @ b.abs().mT)
    assert_sums(grads["w"], of_db, 40, a.abs().mT @ dy.abs())
