"""States of another model, and states of no sense, are refused in words, and leave everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, GradScaler

INF, NAN = float("inf"), float("nan")
Change = Callable[[dict[str, Any]], object]


def layers(*names: str) -> nn.Sequential:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4))
    return model


def trained(model: nn.Module) -> nn.Module:
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(2, 4)).square().sum().backward()
    return model


def delayed(*names: str) -> nn.Module:
    return trained(fpsim.quantize(layers(*names), "recipe:fp8_delayed"))


def plain(state: Any) -> Any:
    """A state that can be compared: tensors as lists."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list) else state


def first(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["a:linear fprop.x"]
    return found


SCALING: dict[str, tuple[Change, str]] = {
    "scale 0": (lambda s: first(s)["scale"].fill_(0), "has scale=0.0.*Expected: a finite scale above 0"),
    "scale inf": (lambda s: first(s)["scale"].fill_(INF), "has scale=inf"),
    "scale NaN": (lambda s: first(s)["scale"].fill_(NAN), "has scale=nan"),
    "scale below 0": (lambda s: first(s)["scale"].fill_(-2), "has scale=-2"),
    "amax NaN": (lambda s: first(s)["amaxes"][-1:].fill_(NAN), "amaxes up to nan"),
    "amax below 0": (lambda s: first(s)["amaxes"].fill_(-3), "amaxes up to -3"),
    "pending NaN": (lambda s: first(s)["pending"].fill_(NAN), "pending=nan"),
    "largest NaN": (lambda s: first(s).update(largest=NAN), "largest=nan"),
    "largest a word": (lambda s: first(s).update(largest="x"), "is not a state of delayed scaling"),
    "no scale": (lambda s: first(s).pop("scale"), "is not a state of delayed scaling"),
    "an entry that is a number": (lambda s: s.update({"b:linear fprop.x": 3}), "is not a state of delayed scaling"),
    "a name that is a number": (lambda s: s.update({3: {}}), "The state names 3"),
    "another layer": (lambda s: s.update({"c:linear fprop.x": first(s)}), "another model.*'c:linear fprop.x'"),
    "another operand": (lambda s: s.update({"a:linear fprop.v": first(s)}), "another model.*'a:linear fprop.v'"),
    "another format": (lambda s: first(s).update(largest=57344.0), "another model or policy.*'a:linear fprop.x'"),
}


@pytest.mark.parametrize("kind", SCALING)
def test_a_scaling_state_of_no_sense_is_refused_and_nothing_is_loaded(kind: str) -> None:
    model = delayed("a", "b")
    before = copy.deepcopy(fpsim.scaling_state(model))
    other = fpsim.scaling_state(delayed("a", "b"))
    change, words = SCALING[kind]
    change(other)
    with pytest.raises(ValueError, match=words):
        fpsim.load_scaling_state(model, other)
    assert plain(fpsim.scaling_state(model)) == plain(before)


def test_a_scaling_state_with_an_amax_that_overflowed_is_loaded() -> None:
    model = delayed("a")
    state = fpsim.scaling_state(model)
    first(state)["amaxes"][-1] = INF
    fpsim.load_scaling_state(model, state)
    assert plain(fpsim.scaling_state(model)) == plain(state)


def test_a_scaling_state_is_refused_by_a_model_without_delayed_scaling() -> None:
    with pytest.raises(ValueError, match=r"no product asks for 'a:linear fprop\.x'"):
        fpsim.load_scaling_state(fpsim.quantize(layers("a"), "fp16"), fpsim.scaling_state(delayed("a")))


def test_a_scaling_state_names_at_most_five_strangers() -> None:
    with pytest.raises(ValueError, match=r"(, '[cd]:linear [\w.]+'){4} and \d+ more\. Load the state"):
        fpsim.load_scaling_state(delayed("a"), fpsim.scaling_state(delayed("c", "d")))


def adaptive(rule: str = "approx_range", *names: str) -> AdaLossScaled:
    scaled = AdaLossScaled(fpsim.quantize(layers(*(names or ("a", "b"))), "fp16"), rule=rule)
    trained(scaled.model)
    return scaled


def site(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["sites"][0]
    return found


ADAPTIVE: dict[str, tuple[Change, str]] = {
    "step below 0": (lambda s: s.update(step=-5), r"has step=-5\. Expected: a whole number"),
    "step 1.5": (lambda s: s.update(step=1.5), r"has step=1\.5"),
    "step 2**70": (lambda s: s.update(step=2**70), "has step=1180591620717411303424"),
    "step True": (lambda s: s.update(step=True), "has step=True"),
    "an update after the step": (lambda s: s.update(updated=9), "updated=9, after its step=3"),
    "sites a word": (lambda s: s.update(sites="ab"), "has sites='ab'"),
    "a site that is a number": (lambda s: s["sites"].append(3), "Expected: a list of mappings"),
    "a site twice": (lambda s: s["sites"].append(dict(site(s))), "Expected: names of sites, each once"),
    "a site without factors": (lambda s: site(s).pop("factors"), "lacks factors"),
    "kept 1.5": (lambda s: site(s).update(kept=1.5), r"has kept=1\.5"),
    "kept 2**70": (lambda s: site(s).update(kept=2**70), "has kept="),
    "a factor NaN": (lambda s: site(s).update(factors={0: NAN}), "has factors="),
    "a factor a word": (lambda s: site(s).update(factors={0: "x"}), "has factors="),
    "amax NaN": (lambda s: site(s).update(amax=NAN), "has amax=nan"),
    "ceiling below 0": (lambda s: site(s).update(ceiling=-1.0), r"has ceiling=-1\.0"),
    "reached a word": (lambda s: site(s).update(reached="x"), "has reached='x'"),
    "reached after the step": (lambda s: site(s).update(reached=4), "has reached=4"),
    "a history": (lambda s: site(s).update(history=[1.0]), r"has history=\[1\.0\]"),
    "another role": (lambda s: site(s).update(role="weight"), "with role 'weight'"),
    "another model": (lambda s: site(s).update(site="c:linear"), "of another model: it has the sites 'c:linear'"),
}


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_a_state_of_adaptive_scaling_of_no_sense_is_refused_and_nothing_is_loaded(kind: str) -> None:
    scaled, other = adaptive(), copy.deepcopy(adaptive().state_dict())
    before = copy.deepcopy(scaled.state_dict())
    change, words = ADAPTIVE[kind]
    change(other)
    with pytest.raises(ValueError, match=words):
        scaled.load_state_dict(other)
    assert scaled.state_dict() == before


@pytest.mark.parametrize("rule", ["approx_range", "amax_history", "exact", "current", "fixed"])
def test_a_state_of_adaptive_scaling_is_loaded_whole(rule: str) -> None:
    state, scaled = adaptive(rule).state_dict(), AdaLossScaled(fpsim.quantize(layers("a", "b"), "fp16"), rule=rule)
    scaled.load_state_dict(state)
    assert scaled.state_dict() == {**state, "sites": scaled.state_dict()["sites"]}
    assert [s["factors"] for s in scaled.state_dict()["sites"]] == [s["factors"] for s in state["sites"]]


@pytest.mark.parametrize("scale", [NAN, -1.0, "1", None])
def test_a_scaler_state_of_no_sense_is_refused_and_nothing_is_loaded(scale: Any) -> None:
    scaler = GradScaler(init_scale=8.0)
    with pytest.raises(ValueError, match="scale="):
        scaler.load_state_dict({**GradScaler(init_scale=4.0).state_dict(), "scale": scale, "max_gradient_norm": 2.0})
    assert scaler.state_dict() == GradScaler(init_scale=8.0).state_dict()


@pytest.mark.parametrize("scale", [0.0, INF, 1e-46, 1e39])  # the last two are 0 and inf as float32
def test_a_scaler_state_whose_scale_ends_the_training_is_said(scale: float) -> None:
    scaler = GradScaler()
    with pytest.warns(RuntimeWarning, match=r"Call update\(new_scale=\.\.\.\) with a finite number"):
        scaler.load_state_dict({**GradScaler().state_dict(), "scale": scale})
    assert scaler.get_scale() == scale  # a rule can reach it, and goes on as it was


def recorded() -> fpsim.Recording:
    with fpsim.record(fpsim.quantize(layers("a"), "fp16")) as recording:
        pass
    model = fpsim.quantize(layers("a"), "fp16")
    with fpsim.record(model, into=recording):
        trained(model)
    return recording


RECORDING: dict[str, tuple[Change, str]] = {
    "every 0": (lambda s: s.update(every=0), r"state\['every'\]=0 is out of range"),
    "nothing": (lambda s: s.clear(), "not the state of a Recording"),
    "counts of another size": (lambda s: s["sums"][0].update(counts=torch.zeros(2)), "counts of shape"),
    "counts of another dtype": (
        lambda s: s["sums"][0].update(counts=s["sums"][0]["counts"].float()),
        "counts of shape",
    ),
    "calls a word": (lambda s: s["sums"][0].update(calls="x"), r"\['calls'\]='x' is not an integer"),
    "calls below 0": (lambda s: s["sums"][0].update(calls=-1), r"\['calls'\]=-1 is out of range"),
    "a tally below 0": (
        lambda s: s["sums"][0].update(counts=-1 - s["sums"][0]["counts"]),
        "numbers below 0 among its counts",
    ),
    "a count below 0": (lambda s: s.update(seen=[("a", "error", -1)]), "=-1 is out of range"),
    "an unknown format": (lambda s: s["sums"][0].update(format="fp9"), "Unknown format 'fp9'"),
    "no format": (lambda s: s["sums"][0].pop("format"), "KeyError: 'format'"),
}


@pytest.mark.parametrize("kind", RECORDING)
def test_a_state_of_a_recording_of_no_sense_is_refused_and_nothing_is_loaded(kind: str) -> None:
    recording, other = recorded(), copy.deepcopy(recorded().state_dict())
    before = copy.deepcopy(recording.state_dict())
    change, words = RECORDING[kind]
    change(other)
    with pytest.raises(ValueError, match=words):
        recording.load_state_dict(other)
    assert plain(recording.state_dict()) == plain(before)


def test_a_scaling_state_that_lacks_what_the_model_remembers_is_said() -> None:
    model = delayed("a")
    state = fpsim.scaling_state(model)
    name = next(iter(state))
    with pytest.warns(UserWarning, match=r"The state lacks 'a:linear [\w.]+'.*begins again"):
        fpsim.load_scaling_state(model, {name: state[name]})
    fpsim.load_scaling_state(model, state)  # of what is no longer remembered nothing is lacking
    assert plain(fpsim.scaling_state(model)) == plain(state)
    fpsim.load_scaling_state(model, {})  # is asked for
    assert fpsim.scaling_state(model) == {}


def test_a_scaling_state_of_another_models_own_operations_is_said_after_a_step() -> None:
    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight)

    other = fpsim.quantize(Scorer(), "recipe:fp8_delayed")
    trained(other)
    state = fpsim.scaling_state(other)
    assert next(iter(state)).startswith(":linear ")
    model = fpsim.quantize(layers("a"), "recipe:fp8_delayed")
    fpsim.load_scaling_state(model, state)  # what products a model forms is not known before it ran
    with pytest.warns(UserWarning, match=r"':linear [\w.]+'.*no product asked for in the first step.*another model"):
        trained(model)
    trained(model)  # said once
    again = fpsim.quantize(Scorer(), "recipe:fp8_delayed")
    fpsim.load_scaling_state(again, state)
    trained(again)
