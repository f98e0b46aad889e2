"""The state of adaptive scaling: saved, loaded, copied, and of bounded size."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from layerwise_cases import AHEAD, assert_same, backward, gradients, seeded
from torch import Tensor, nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransformLinear, Recorder, layer_rule
from fpsim import Policy, quantize


@pytest.mark.parametrize("rule", ["approx_range", "amax_history"])
def test_a_saved_state_goes_on_to_the_same_bits(rule: str, tmp_path: Any) -> None:
    def run(handle: AdaLossScaled, steps: range) -> list[dict[str, Tensor]]:
        return [backward(handle.model, x, 10.0 ** -(i % 7)) for i in steps]

    x = torch.randn(4, 8, generator=seeded())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    every = 4 if rule in AHEAD else 1
    whole = AdaLossScaled(quantize(net, "e5m2"), rule=rule, update_every=every)
    expected = run(whole, range(10))
    first = AdaLossScaled(quantize(net, "e5m2"), rule=rule, update_every=every)
    run(first, range(6))
    torch.save(first.state_dict(), tmp_path / "scaling.pt")
    second = AdaLossScaled(quantize(net, "e5m2"), rule=rule, update_every=every)
    second.load_state_dict(torch.load(tmp_path / "scaling.pt", weights_only=True))
    assert second.state_dict() == first.state_dict()
    assert second.log2_scales() == first.log2_scales() != {}
    assert second.step == 6
    for got, want in zip(run(second, range(6, 10)), expected[6:], strict=True):
        assert_same(got, want)


def test_a_saved_state_goes_on_to_the_same_bits_where_the_next_gradient_outgrows_its_scale_at_once() -> None:
    model, x = quantize(nn.Linear(8, 64), Policy(error="e4m3fn"), rounding="stochastic"), torch.ones(4, 8)
    found = []
    for resumed in (False, True):
        torch.manual_seed(0)
        handle = AdaLossScaled(model, update_every=100)
        for _ in range(2):
            backward(model, x, 2.0**-20)
        if resumed:
            state = handle.state_dict()
            handle.detach()
            handle = AdaLossScaled(model, update_every=100)
            handle.load_state_dict(state)
        found.append(backward(model, x, 2.0**-3))
        handle.detach()
    assert_same(*found)


def test_a_state_that_is_loaded_after_steps_replaces_all_that_they_have_left() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "e5m2")
    with AdaLossScaled(model) as handle:
        backward(model, torch.randn(4, 8, generator=seeded()), 1e-3)
        state = handle.state_dict()
        state["sites"] = state["sites"][1:]
        handle.load_state_dict(state)
        assert handle.state_dict() == state


def test_a_state_loaded_between_updates_gives_what_it_gives_a_new_handle() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8, generator=seeded())
    run, fresh = (AdaLossScaled(quantize(net, "e5m2"), update_every=100) for _ in range(2))
    for _ in range(4):
        backward(run.model, x, 1e-4)
    state = run.state_dict()
    for site in state["sites"]:
        site.update(kept=None, ceiling=0.0)
    run.load_state_dict(state)
    fresh.load_state_dict(state)
    for size in (1e-4, 1e-6):
        assert_same(backward(run.model, x, size), backward(fresh.model, x, size))
        assert run.log2_scales() == fresh.log2_scales()


def test_branches_of_the_original_take_factors_from_a_state_not_scales() -> None:
    torch.manual_seed(0)
    model, x = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "fp16"), torch.randn(4, 8, generator=seeded())
    settings = {"init_scale": 0.25, "update_every": 100, "branches": "original"}
    with AdaLossScaled(model, [AdaLossTransformLinear()], **settings) as handle:  # type: ignore[arg-type]
        backward(model, x, 1e-6)
        scales, state = handle.log2_scales(), handle.state_dict()
    with AdaLossScaled(model, [AdaLossTransformLinear()], **settings) as handle:  # type: ignore[arg-type]
        handle.load_state_dict(state)
        backward(model, x, 1e-4)  # of which the factor would be another
        assert handle.log2_scales() == scales
        assert scales["1:linear"] == -2  # as init_scale says
        assert scales["0:linear"] > 0


@pytest.mark.parametrize("rule", ["approx_range", "amax_history"])
def test_scales_stay_with_the_gradients_whatever_the_default_device(rule: str) -> None:
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "e5m2", rounding="stochastic")
    x, weights = torch.randn(4, 8), torch.randn(4, 8) * 1e-6
    results, states, rows = [], [], []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model.zero_grad()
        with torch.device(device), AdaLossScaled(model, rule=rule, update_every=2 if rule in AHEAD else 1) as handle:
            handle.observer = recorder = Recorder()
            for _ in range(3):
                (model(x) * weights).sum().backward()
                handle.load_state_dict(handle.state_dict())
            states.append(handle.state_dict())
        results.append(gradients(model))
        rows.append(str(recorder.rows()))
    assert_same(*results)
    assert states[0] == states[1]
    assert rows[0] == rows[1]


def test_a_copy_of_the_scaling_itself_is_refused_with_what_to_do() -> None:
    with AdaLossScaled(quantize(nn.Linear(2, 2), "fp16")) as handle:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"neither copied nor pickled\. Copy or save its \.model and its state"):
                duplicate(handle)
        copy.deepcopy(handle.model)


def test_a_gradient_can_be_copied_and_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    with AdaLossScaled(quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), "e5m2")) as handle:
        (gradient,) = torch.autograd.grad(handle(x).sum() * 1e-7, [x])
    assert gradient.count_nonzero()
    torch.save(gradient, tmp_path / "gradient.pt")
    copies = [copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), torch.load(tmp_path / "gradient.pt")]
    for duplicate in copies:
        assert torch.equal(duplicate, gradient)
        with fpsim.emulate("e5m2"):  # as an operand it has no scale, whatever it was rounded at
            assert torch.equal(duplicate * 1, torch.zeros(4, 8))


def test_what_the_engine_keeps_does_not_grow_with_the_steps() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2")
    with AdaLossScaled(model) as handle:
        sizes = []
        for _ in range(5):
            backward(model, torch.randn(4, 8, generator=seeded()))
            engine = handle._engine
            sizes.append((len(engine.states), len(engine.constants), len(engine.unlinked)))
    assert len(set(sizes)) == 1


SETTINGS: dict[str, Any] = {
    "rule": "abs_range",
    "transforms": [AdaLossTransformLinear()],
    "init_scale": 2.0,
    "update_every": 3,
    "scale_upper_bound": 16.0,
    "accum_upper_bound": 1024.0,
    "branches": "original",
    "u_min": 6e-8,
    "u_max": 6e4,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_state_of_another_setting_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    model = quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "fp16")
    with AdaLossScaled(model, **{name: SETTINGS[name]}) as one:
        backward(model, torch.ones(1, 2))
        torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    with AdaLossScaled(model, **{name: SETTINGS[name]}) as same:
        same.load_state_dict(state)
        assert same.step == 1
    said = {"transforms": "modules"}.get(name, name)
    with (
        AdaLossScaled(model) as other,
        pytest.raises(ValueError, match=rf"of other settings: {said}=.* This has {said}"),
    ):
        other.load_state_dict(state)


def test_a_state_of_another_parameter_of_the_rule_is_refused() -> None:
    model = quantize(nn.Linear(2, 2), "fp16")
    with AdaLossScaled(model, rule=layer_rule("exact", n_uf_threshold=0.5)) as one:
        state = one.state_dict()
    with (
        AdaLossScaled(model, rule="exact") as two,
        pytest.raises(ValueError, match=r"settings: params=\{'n_uf_threshold': 0\.5\}\. This has params=\{'n_uf_thr"),
    ):
        two.load_state_dict(state)


def test_a_state_without_settings_is_refused_with_what_it_lacks() -> None:
    with AdaLossScaled(quantize(nn.Linear(2, 2), "fp16")) as handle:
        with pytest.raises(ValueError, match=r"The state has \['scale'\], and lacks rule, init_scale, .* sites\."):
            handle.load_state_dict({"scale": 1})
        state = handle.state_dict()
        old = {name: state[name] for name in ("rule", "params", "step", "updated", "sites")}  # as 0.1 kept it
        with pytest.raises(ValueError, match=r"lacks init_scale, update_every, .*older ones kept the rule alone"):
            handle.load_state_dict(old)
