"""`x * parameter` is a product of one term: a branch behind a gate is scaled for what the gate does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layerwise_cases import seeded
from tiers import parametrize
from torch import Tensor, nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransform, Recorder

WIDTH = 8
Gate = Callable[[Tensor, Tensor], Tensor]


class Gated(nn.Module):
    """A residual branch, `x + gate * linear(x)`. `call` takes the branch and the gate."""

    def __init__(self, gate: Tensor, call: Gate, is_frozen: bool = False) -> None:
        super().__init__()
        self.fc, self.call = nn.Linear(WIDTH, WIDTH), call
        self.gate = nn.Parameter(gate, requires_grad=not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self.fc(x), self.gate)


def model_of(block: Callable[[], nn.Module], policy: Any) -> nn.Module:
    torch.manual_seed(0)
    return fpsim.quantize(nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), nn.Linear(WIDTH, 4)), policy)


def backward(model: nn.Module, steps: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """What a recorder was told of the branch in the last step."""
    recorder = Recorder()
    x = torch.randn(64, WIDTH, generator=seeded())
    with AdaLossScaled(model, **options) as handle:
        handle.observer = recorder
        for _ in range(steps):
            model.zero_grad()
            (model(x.to(dtype)).float().square().mean() * 1e-4).backward()
    rows = [row for row in recorder.rows() if row["site"] == "1.fc:linear" and row["role"] == "error"]
    return rows[-1]


def in_place(y: Tensor, gate: Tensor) -> Tensor:
    y *= gate
    return y


SPELLINGS: dict[str, Gate] = {
    "y * gate": lambda y, gate: y * gate,
    "gate * y": lambda y, gate: gate * y,
    "*=": in_place,
    "mul": lambda y, gate: torch.mul(other=y, input=gate),
    "mul_": lambda y, gate: y.mul_(gate),
    "multiply": lambda y, gate: torch.multiply(y, gate),
    "multiply_": lambda y, gate: y.multiply_(gate),
    "__rmul__": lambda y, gate: y.__rmul__(gate),
    "a view": lambda y, gate: y * gate.view(-1)[None],
    "a cast": lambda y, gate: y * gate.to(y.dtype),
    "float32 and back": lambda y, gate: y * gate.float().to(y.dtype),
    "expand": lambda y, gate: y * gate.expand(y.shape),
    "addcmul": lambda y, gate: torch.addcmul(torch.zeros_like(y), y, gate),
    "addcmul the other way": lambda y, gate: torch.addcmul(torch.zeros_like(y), gate, y),
    "addcmul_": lambda y, gate: torch.zeros_like(y).addcmul_(y, gate),
}
POLICIES = {"all": fpsim.as_policy("fp16"), "errors": fpsim.Policy(error="fp16")}
SHAPES: dict[str, tuple[int, ...]] = {"vector": (WIDTH,), "0-d": (), "one": (1,)}


def by_einsum(y: Tensor, gate: Tensor) -> Tensor:
    return torch.einsum("ij,j->ij", y, gate.expand(WIDTH))


@parametrize("is_frozen", [False, True], keep={False, True})
@parametrize("shape", SHAPES, keep={"vector", "0-d"})
@parametrize("policy", POLICIES, keep=set(POLICIES))
@parametrize("spelling", SPELLINGS, keep=set(SPELLINGS))
def test_a_gate_is_the_product_of_one_term_however_it_is_spelt(
    spelling: str, policy: str, shape: str, is_frozen: bool
) -> None:
    gate, fmt = torch.full(SHAPES[shape], 2.0**-20), POLICIES[policy]
    row = backward(model_of(lambda: Gated(gate, SPELLINGS[spelling], is_frozen), fmt))
    plain = backward(model_of(lambda: Gated(gate, by_einsum), fmt))
    assert row["log2_wanted"] == plain["log2_wanted"]
    assert row["log2_wanted"] > 20


def exponential(y: Tensor, gate: Tensor) -> Tensor:
    return y * gate.log().exp()


OTHERS: dict[str, Gate] = {
    "a number": lambda y, gate: y * float(gate.detach()[0]),
    "no parameter": lambda y, gate: y * gate.detach().clone().mul(1.0),
    "computed of one": exponential,
    "an activation": lambda y, gate: y * (y.detach() * 0 + gate),
    "written to a part": lambda y, gate: (y.view(-1).view_as(y).mul_(gate), y)[1],
    "computed in float32": lambda y, gate: (y * gate.float()).to(y.dtype),
}


@pytest.mark.parametrize("spelling", OTHERS)
@pytest.mark.filterwarnings("ignore:Every gradient of")
def test_what_is_no_parameter_of_the_format_passes_the_scale_on(spelling: str) -> None:
    gate = torch.full((WIDTH,), 2.0**-20)
    row = backward(model_of(lambda: Gated(gate, OTHERS[spelling]), "fp16"))
    plain = backward(model_of(lambda: Gated(gate, lambda y, gate: y + 0 * gate.sum()), "fp16"))
    assert row["log2_wanted"] == plain["log2_wanted"]


@parametrize("rule", ["approx_range", "abs_range", "element_wise_range"], keep={"approx_range", "element_wise_range"})
def test_the_factor_of_a_gate_is_that_of_its_products(rule: str) -> None:
    torch.manual_seed(0)
    inner = nn.Linear(WIDTH, 3)
    gate = nn.Parameter(fpsim.round_to(torch.randn(5, 3) * 1e-4, "fp16"))

    class Outer(nn.Module):  # each element of x is multiplied by five gates, and its gradient is a sum of five terms
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = inner, gate

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, None] * self.gate

    model, recorder = fpsim.quantize(Outer(), "fp16"), Recorder()
    g = fpsim.round_to(torch.randn(4, 5, 3, generator=seeded()) * 1e-6, "fp16")
    with AdaLossScaled(model, [AdaLossTransform("Outer")], rule=rule) as handle:
        handle.observer = recorder
        model(torch.randn(4, WIDTH)).backward(g)
    row = next(row for row in recorder.rows() if row["site"] == ":mul" and row["role"] == "error")
    a, b, fmt = g.double().abs().numpy(), gate.detach().double().abs().numpy(), fpsim.as_format("fp16")
    products, least = (a * b)[(a * b) > 0], a[a > 0].min() * b[b > 0].min()
    limit = fmt.largest / (a.max() * max(1.0, 5 * b.max()))
    expected = {
        # t = sqrt(2) erfinv(1e-3), from the golden table A.1; half of the terms are taken for zero
        "approx_range": fmt.smallest / 1.253314465e-3 / math.sqrt((a * a).mean() * (b * b).mean() * 5 / 2),
        "abs_range": min(fmt.smallest / (5 * least), limit),
        "element_wise_range": min(fmt.smallest / products.min(), fmt.largest / (5 * products.max())),
    }
    assert row["unbound"] == pytest.approx(max(expected[rule], 1.0), rel=1e-9)


def lost(
    fmt: str, gate: float, call: Gate = SPELLINGS["gate * y"], dtype: torch.dtype = torch.float32, **options: Any
) -> float:
    """The share of the branch's weight whose gradient is zero in the second step."""
    policy = fpsim.Policy(error=fmt, weight_grad=fmt)
    model = model_of(lambda: Gated(torch.full((WIDTH,), gate), call), policy).to(dtype)
    backward(model, 2, dtype, **options)
    weight = model[1].fc.weight  # type: ignore[union-attr]
    return float((weight.grad == 0).float().mean())  # type: ignore[union-attr, operator]


@parametrize("update_every", [1, 2], keep={1})
@parametrize("branches", ["exact", "original"], keep={"exact", "original"})
@parametrize("gate", [1e-3, 1e-6, 1e-12], keep={1e-3, 1e-6, 1e-12})
@parametrize("fmt", ["fp16", "e5m2", "e4m3fn"], keep={"fp16", "e4m3fn"})
def test_what_is_behind_a_small_gate_is_not_lost(fmt: str, gate: float, branches: str, update_every: int) -> None:
    dtypes = [torch.float32] if fmt == "fp16" else [torch.float32, torch.bfloat16]  # bfloat16 holds no fp16
    for dtype in dtypes:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zeros = lost(fmt, gate, dtype=dtype, branches=branches, update_every=update_every)
        assert zeros < 0.05, dtype


@pytest.mark.filterwarnings("ignore:Every gradient of")
def test_a_number_in_the_place_of_a_gate_still_loses_all() -> None:
    assert lost("fp16", 1e-6, OTHERS["a number"]) == 1.0


@pytest.mark.parametrize("rule", ["current", "approx_range"])
def test_with_float32s_range_the_gradients_of_a_gated_model_are_those_without_scaling(rule: str) -> None:
    grads = []
    for scales in (False, True):
        model = model_of(lambda: Gated(torch.full((WIDTH,), 1e-6), SPELLINGS["gate * y"]), fpsim.Policy(error="fp32"))
        if scales:
            backward(model, rule=rule)
        else:
            x = torch.randn(64, WIDTH, generator=seeded())
            (model(x).square().mean() * 1e-4).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))
