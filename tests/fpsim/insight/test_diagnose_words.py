"""What diagnose says of a place: masks, calls, divisions, integers, the end of the format, names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fpsim


class Attention(nn.Module):
    """Scores with a constant where nobody may look."""

    def __init__(self, fill: float, gain: float = 1.0) -> None:
        super().__init__()
        self.fill, self.gain = fill, gain

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        scores = (x @ x.mT * self.gain).masked_fill(~seen, self.fill)
        return scores.softmax(-1) @ x


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fill", [-1e9, -1e4, torch.finfo(torch.float32).min, -torch.inf])
def test_a_constant_mask_that_softmax_does_not_look_at_is_not_named(fill: float) -> None:
    model = fpsim.quantize(Attention(fill), "e4m3fn")
    found = fpsim.diagnose(model, lambda: model(X).sum())
    assert found.cause is None, str(found)


def test_what_saturates_beside_a_mask_is_named_and_the_mask_is_not() -> None:
    model = fpsim.quantize(Attention(-1e9, 1e3), "e4m3fn")
    found = fpsim.diagnose(model, lambda: model(X).sum())
    assert found.cause is not None
    assert (found.cause["site"], found.cause["kind"]) == (":mul", "saturation")
    assert not any(event["site"] == ":masked_fill" for event in found)


def test_a_mask_that_leaks_is_named_with_the_weight_that_leaks() -> None:
    policy = fpsim.Policy(activation="e2m3fn", float32=("softmax",))
    model = fpsim.quantize(Attention(-1e9, 0.1), policy)  # -1e9 is -7.5 there, and exp(-7.5) 6e-4
    found = fpsim.diagnose(model, lambda: model(X / 2).sum())
    assert found.cause is not None
    assert (found.cause["site"], found.cause["kind"]) == (":masked_fill", "saturation")
    assert "a mask that leaks: :softmax gives up to 0." in str(found)


def test_the_call_of_a_shared_module_and_its_caller_are_told() -> None:
    class Block(nn.Module):
        def __init__(self, exp: nn.Module, gain: float) -> None:
            super().__init__()
            self.exp, self.gain = exp, gain

        def forward(self, x: Tensor) -> Tensor:
            return self.exp(x * self.gain)

    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() / 1e3

    shared = Exp()
    model = nn.Sequential(Block(shared, 1.0), nn.Tanh(), Block(shared, 2e5))
    found = fpsim.diagnose(model, lambda: model(X).sum())
    assert found.cause is not None
    assert (found.cause["call"], found.cause["calls"], found.cause["caller"]) == (1, 2, "2")
    assert "0.exp:exp, activation, call 2 of 2, called by 2:" in str(found)


def test_the_batch_of_ten_that_breaks_is_told() -> None:
    model, batches = nn.Sequential(nn.Linear(8, 2)), [X] * 6 + [torch.full_like(X, 3e4)] + [X] * 3

    def in_half() -> None:
        with torch.autocast("cpu", torch.float16):
            for x in batches:
                model(x).float().sum().backward()

    with torch.no_grad():
        model[0].weight.fill_(2.0)
    found = fpsim.diagnose(model, in_half)
    assert "0:linear, activation, call 7 of 10: " in str(found)


def test_a_division_by_zero_is_called_one_and_an_integer_count_is_shown() -> None:
    model, count = nn.Linear(8, 2), torch.zeros((), dtype=torch.long)
    found = fpsim.diagnose(model, lambda: (model(X).sum() * 0 / count).backward())
    assert "NaN first appears forward at :div, activation: 1 of 1 (100 %), a division by zero" in str(found)
    assert {"what": "operand 2 (integers)", "range": "0"} in found.operands


def test_nothing_finite_is_said_so() -> None:
    model = nn.Linear(8, 2)
    found = fpsim.diagnose(model, lambda: (model(X).sum() * 0 / torch.zeros(())).backward())
    assert "no number is finite" in str(found)
    rows = {row["site"]: row["result"] for row in found.chain}
    assert rows[":div"] == "1 of 1 NaN"


@pytest.mark.parametrize("kind", ["quantised", "autocast"])
def test_the_end_of_the_format_is_that_of_the_operation(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model = fpsim.quantize(model, "fp16") if kind == "quantised" else model

    def step() -> None:
        with torch.autocast("cpu", torch.float16, enabled=kind == "autocast"):
            out = model(X)
        (out.float().sum() * 2.0**24).backward()

    found = fpsim.diagnose(model, step)
    assert found.cause is not None
    assert found.cause["largest"] == 65504, str(found)


def test_nan_of_a_division_in_an_emulated_format_has_that_formats_end() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()

    model = fpsim.quantize(nn.Sequential(Norm()), "fp16")
    found = fpsim.diagnose(model, lambda: model(torch.zeros(2, 4)).sum())
    assert found.cause is not None
    assert (found.cause["site"], found.cause["kind"], found.cause["largest"]) == ("0:div", "NaN", 65504)
    assert "a division by zero (2 of 2 divisors)" in str(found)


def test_a_bias_is_called_by_its_name_and_the_layer_that_limits_the_scale_is_told() -> None:
    torch.manual_seed(0)
    model = fpsim.quantize(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), "fp16")
    x, scaler = torch.randn(64, 8), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    y = torch.zeros(64, dtype=torch.long)
    found = fpsim.diagnose(
        model, lambda: scaler.scale(nn.functional.cross_entropy(model(x), y)).backward(), scaler=scaler
    )
    names = {name for name, _ in model.named_parameters()}
    assert {event["site"] for event in found if event["role"] == "weight_grad"} <= names
    assert found.scale is not None
    assert found.scale[1] is not None
    assert found.layers[0]["site"] in names
    # what is printed first is what the scale was found by: at twice that scale its gradient overflows
    assert found.scale[1] <= found.layers[0]["fits"] < 2 * found.scale[1]
    fits = {row["site"]: row["fits"] for row in found.layers if row["site"] in names}
    assert set(fits) == names
    assert max(fits.values()) < 1e12  # of fp16; of float32 it would be 1e39


def test_buffers_that_are_read_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8)).eval()
    model[0].running_var.fill_(-1.0)
    found = fpsim.diagnose(model, lambda: model(X).sum())
    assert [row["what"] for row in found.operands][1:3] == ["0.running_mean", "0.running_var"]


def test_where_nothing_breaks_what_was_looked_at_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    lines = str(fpsim.diagnose(model, lambda: model(X).sum().backward())).splitlines()
    assert lines[0].startswith("Nothing is inf, NaN or saturated.")
    assert lines[1] == (
        "Looked at: 3 results, 3 gradients of results, those of 4 of 4 parameters; parameters, buffers and .grad "
        "afterwards."
    )


def labels_of(figure: object) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", [0, 41, 46, 119])
def test_a_picture_of_many_operations_labels_the_cause(place: int) -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 100).exp()

    model = nn.Sequential(*(Exp() if i == place else nn.Tanh() for i in range(120)))
    found = fpsim.diagnose(model, lambda: model(X))
    assert found.cause is not None
    figure = found.plot()
    assert found.cause["site"] in labels_of(figure)
    assert len(labels_of(figure)) < 70
    assert figure.axes[0].get_title() == f"inf first appears at {found.cause['site']}"
    assert fpsim.why(model, lambda: model(X).sum()).cause["place"] in labels_of(
        fpsim.why(model, lambda: model(X).sum()).plot()
    )


def test_a_picture_of_a_watch_labels_the_site_of_which_most_is_lost() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e-9

    model = nn.Sequential(*(Small() if i == 61 else nn.Identity() if i == 62 else nn.ReLU() for i in range(120)))
    model = nn.Sequential(*model[:62], *(nn.Softplus() for _ in range(58)))
    with fpsim.watch(model, ["e4m3fn"], every=1) as watching:
        model(X.abs())
    assert "61:mul" in labels_of(watching.plot("activation", "underflow"))
