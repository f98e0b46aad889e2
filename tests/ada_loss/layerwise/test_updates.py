"""Updates: when a scale is computed, and what it is between two updates."""

from __future__ import annotations

import math

import pytest
import torch
from layerwise_cases import AHEAD, backward, seeded
from torch import Tensor, nn

from ada_loss import AdaLossScaled, AdaLossTransformLinear, Recorder, layer_rule
from fpsim import Policy, quantize


def test_a_scale_is_reused_between_updates_and_computed_anew_after() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    x = torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, [AdaLossTransformLinear()], update_every=3) as handle:
        handle.observer = recorder = Recorder()
        for size in (2.0**-18, 2.0**-12, 2.0**-8, 2.0**-16):
            backward(model, x, size)
    factors = [row["unbound"] for row in recorder.rows() if row["site"] == "1:linear" and row["role"] == "error"]
    assert factors[0] == factors[1] == factors[2]
    assert factors[3] == pytest.approx(factors[0] / 4, rel=0.01)  # of gradients four times larger


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("rule", AHEAD)
def test_a_gradient_that_tells_nothing_decides_nothing_for_the_steps_to_come(rule: str, value: float) -> None:
    # the first step of a residual network whose blocks begin with zero, or of a dynamic loss scale, which overflows
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="e5m2"))
    x = torch.randn(4, 8, generator=seeded())
    small = {"fixed": layer_rule("fixed", fixed_loss_scale=4.0)}.get(rule, rule)

    def scales(*sizes: float) -> list[dict[str, int]]:
        with AdaLossScaled(model, rule=small, update_every=4) as handle:
            found = []
            for size in sizes:
                backward(model, x, size)
                found.append(handle.log2_scales())
        return found

    used = scales(1e-6)[0]
    assert max(used.values()) > 0
    first = scales(value, 1e-6, 1e-6)
    assert set(first[0].values()) == {0}
    assert first[1:] == [used, used]
    later = scales(1e-6, 1e-6, 1e-6, 1e-6, value, 1e-6)  # the fifth step updates
    assert later[5] == used


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.queries(x) @ self.keys(x).t()


def test_a_place_that_comes_between_updates_is_measured_and_has_its_factor_from_the_next_step_on() -> None:
    torch.manual_seed(0)
    model = quantize(Scores(), Policy(error="e4m3fn"))
    x = torch.randn(4, 4, generator=seeded()) * 2.0**-8
    used, measured = [], {}
    for frozen in (False, True):
        with AdaLossScaled(model, update_every=100) as handle:
            model.keys.requires_grad_(not frozen)
            backward(model, x, 1e-4)
            model.keys.requires_grad_(True)
            backward(model, x, 1e-4)
            measured = handle.log2_scales()
            backward(model, x, 1e-4)
            used.append(handle.log2_scales())
    assert used[0] == used[1]
    assert used[0]["keys:linear"] > used[0][":matmul"]
    assert measured.pop("keys:linear") > 0
    assert measured.items() < used[0].items()


class Apart(Scores):
    """The keys' gradient comes by an addition, and by the product where that is asked for."""

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        keys = self.keys(x)
        return self.queries(x) @ (keys if both else keys.detach()).t() + keys


def test_a_product_that_a_graph_brings_after_all_was_known_has_its_factor_before_the_next_update() -> None:
    torch.manual_seed(0)
    model = quantize(Apart(), Policy(error="e4m3fn"))
    x = torch.randn(4, 4, generator=seeded()) * 2.0**-8
    with AdaLossScaled(model, update_every=100) as handle:
        updating, later = model(x, False), model(x)
        updating.backward(torch.full((4, 4), 1e-4))
        between = model(x)
        later.backward(torch.zeros(4, 4))  # brings the product, and tells nothing of it
        between.backward(torch.full((4, 4), 1e-4))
        backward(model, x, 1e-4)
        scales = handle.log2_scales()
    assert scales["keys:linear"] > scales[":add"]  # the sum alone would hand on its own


def test_weights_of_zero_decide_nothing_for_the_steps_to_come() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = quantize(net, Policy(error="e5m2"))
    x, scales = torch.randn(4, 8, generator=seeded()), []
    for zeroed in (False, True):
        model.load_state_dict(net.state_dict())
        with AdaLossScaled(model, rule="abs_range", update_every=4) as handle:
            if zeroed:
                nn.init.zeros_(model[1].weight)
                backward(model, x, 1e-4)
                model.load_state_dict(net.state_dict())
            backward(model, x, 1e-4)
            scales.append(handle.log2_scales())
    assert scales[0] == scales[1]
    assert scales[0]["0:linear"] > scales[0]["1:linear"]


def test_between_updates_a_place_keeps_its_scale_whatever_another_has_to_lower() -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    model[1].weight.data[0] = 0.0  # nothing of this output's gradient reaches the first layer
    x, gradient = torch.randn(4, 8, generator=seeded()), torch.randn(4, 8, generator=seeded(1)) * 1e-7
    with AdaLossScaled(model, update_every=100) as handle:
        for _ in range(2):
            model(x).backward(gradient)
        before = handle.log2_scales()
        large = gradient.clone()
        large[:, 0] = 1e6
        model(x).backward(large)
        after = handle.log2_scales()
    assert after["1:linear"] < before["1:linear"]
    assert after["0:linear"] == before["0:linear"]


@pytest.mark.parametrize("ahead", [2, 3])
def test_updates_come_also_where_forward_passes_run_ahead(ahead: int) -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    x, scales = torch.randn(4, 8, generator=seeded()), []
    with AdaLossScaled(model, update_every=2) as handle:
        backward(model, x, 1e-4)
        for _ in range(4):
            outs = [model(x) for _ in range(ahead)]
            for out in outs:
                out.backward(torch.ones_like(out) * 1e-7)
            scales.append(handle.log2_scales())
    with AdaLossScaled(model) as handle:
        out = model(x)
        out.backward(torch.ones_like(out) * 1e-7)
        assert scales[-1] == handle.log2_scales()


class Halves(nn.Module):
    """Two layers that are called one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, half: str) -> Tensor:
        return getattr(self, half)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("update_every", [2, 3, 4])
def test_updates_come_also_to_a_graph_that_is_made_before_the_step_that_updates(update_every: int) -> None:
    torch.manual_seed(0)
    model, x = quantize(Halves(), Policy(error="fp16")), torch.randn(4, 8, generator=seeded())
    with AdaLossScaled(model, update_every=update_every) as handle:
        (model(model(x, "first"), "last") * 1e-4).sum().backward()
        for _ in range(4):
            shared = model(x, "first")
            for retain in (True, False):  # the second layer is called again after the first backward pass
                (model(shared, "last") * 1e-7).sum().backward(retain_graph=retain)
        scales = handle.log2_scales()
    with AdaLossScaled(model) as handle:
        (model(model(x, "first"), "last") * 1e-7).sum().backward()
        assert scales == handle.log2_scales()
