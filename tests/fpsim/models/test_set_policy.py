"""Other formats for a quantised model, at any step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim
from ada_loss import AdaLossScaled

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def step_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    out = model(X)
    (out**2).sum().backward()
    return out.detach(), model.weight.grad


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_next_call_computes_in_the_new_format_as_torchs_casts_say(name: str, dtype: torch.dtype) -> None:
    model = fpsim.quantize(linear(), "e4m3fn")
    step_of(model)
    fpsim.set_policy(model, name)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    out, gradient = step_of(model)
    x, w, b = cast(X), cast(model.weight.detach()), cast(model.bias.detach())
    expected = cast(F.linear(x, w, b))
    assert torch.equal(out, expected)
    # outside of the model the loss is float32, and the gradient is rounded where it enters
    assert torch.equal(gradient, cast(cast(2 * expected).T @ x))


def test_a_training_goes_on_as_one_that_had_the_new_policy_and_these_parameters_from_the_start() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = fpsim.quantize(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), "e5m2")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, optimizer, 3)
    plain = fpsim.dequantize(model)
    other = fpsim.quantize(plain, fpsim.Policy(error="e4m3fn", overrides={"2": "bf16"}))
    states = copy.deepcopy(optimizer.state_dict())
    fpsim.set_policy(model, fpsim.Policy(error="e4m3fn", overrides={"2": "bf16"}))
    train(model, optimizer, 3)
    twin = torch.optim.Adam(other.parameters(), 0.01)
    twin.load_state_dict(states)
    train(other, twin, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_float32_is_a_policy_too_and_there_is_a_way_back() -> None:
    model, plain = fpsim.quantize(linear(), "e4m3fn"), linear()
    first = step_of(model)[0]
    fpsim.set_policy(model, None)
    for a, b in zip(step_of(model), step_of(plain), strict=True):
        assert torch.equal(a, b)
    fpsim.set_policy(model, "e4m3fn", rounding="nearest_even")
    assert torch.equal(step_of(model)[0], first)


def test_delayed_scaling_remembers_what_stays_and_forgets_what_does_not() -> None:
    two = nn.Sequential(linear(), nn.Linear(3, 2))
    model = fpsim.quantize(two, fpsim.recipe("fp8_delayed", two))
    for _ in range(2):
        model(X).sum().backward()
    before = fpsim.scaling_state(model)
    assert {name.partition(":")[0] for name in before} == {"0", "1"}
    fpsim.set_policy(model, fpsim.recipe("fp8_delayed", two, overrides={"1": "bf16"}))
    kept = fpsim.scaling_state(model)
    assert set(kept) == {name for name in before if name.startswith("0:")}
    for name, entry in kept.items():
        assert torch.equal(entry["amaxes"], before[name]["amaxes"])
        assert torch.equal(entry["pending"], before[name]["pending"])
    other = fpsim.BlockFormat("e5m2", "tensor", "fp32", fpsim.Delayed(history=3))
    changed = fpsim.Policy(products=fpsim.Products.all(other))
    fpsim.set_policy(model, changed)  # another rule: the next call begins a history instead of an error
    assert fpsim.scaling_state(model) == {}
    model(X).sum().backward()
    assert {tuple(entry["amaxes"].shape) for entry in fpsim.scaling_state(model).values()} == {(3,)}


def test_a_recording_and_an_adaptive_scaling_go_on() -> None:
    model = fpsim.quantize(nn.Sequential(linear(), nn.Linear(3, 2)), fpsim.Policy(error="e4m3fn"))
    scaled = AdaLossScaled(model)
    with fpsim.record(model) as recording:
        model(X).square().sum().backward()
        fpsim.set_policy(model, fpsim.Policy(error="e5m2"))
        model(X).square().sum().backward()
    found = {(row["site"], row["format"]): row["calls"] for row in recording.rows() if row["role"] == "error"}
    assert found["0:linear", "e4m3fn"] == found["0:linear", "e5m2"] == 1
    scaled.detach()


def test_a_module_that_was_added_is_quantised_and_wrappers_are_seen_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = fpsim.quantize(nn.Sequential(linear()), "fp16")
    model.append(nn.Linear(3, 2))
    fpsim.set_policy(Wrapper(model), fpsim.Policy(activation="bf16", overrides={"1": "e5m2"}))
    rows = {row.module: row.activation for row in fpsim.summary(model)}
    assert rows == {"(model)": "bf16 nearest_even", "0": "bf16 nearest_even", "1": "e5m2 nearest_even"}


def test_what_is_not_one_quantised_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is not quantised"):
        fpsim.set_policy(linear(), "fp16")
    model = fpsim.quantize(nn.Sequential(linear()), "fp16")
    with pytest.raises(ValueError, match="a part of one"):
        fpsim.set_policy(model[0], "bf16")
    with pytest.raises(ValueError, match="has several inside"):
        fpsim.set_policy(nn.Sequential(model, fpsim.quantize(linear(), "fp16")), "bf16")
    with pytest.raises(ValueError, match="matches no module"):
        fpsim.set_policy(model, fpsim.Policy(overrides={"7": None}))
    assert str(fpsim.summary(model)[1].activation) == "fp16 nearest_even"
