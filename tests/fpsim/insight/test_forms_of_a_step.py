"""One way to call the tools: the model first, then a step without arguments or a batch; old forms stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpsim

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Classifier(nn.Module):
    """Gives its loss where it has labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.head(self.up(self.norm(x)).tanh())
        return SimpleNamespace(logits=out, loss=None if labels is None else F.cross_entropy(out, labels))


def step_of(model: nn.Module) -> Any:
    def step() -> Tensor:
        total = model(X, Y).loss
        total.backward()
        return total

    return step


TOOLS = {
    "why": lambda model, step, **o: fpsim.why(model, step, **o),
    "diagnose": lambda model, step, **o: fpsim.diagnose(model, step, **o),
    "compare": lambda model, step, **o: fpsim.compare(model, step, None, "e4m3fn", **o),
    "sensitivity": lambda model, step, **o: fpsim.sensitivity(model, step, "e4m3fn", **o),
    "watch": lambda model, step, **o: fpsim.watch(model, step, ["e4m3fn"], **o).rows(),
}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", TOOLS)
def test_a_step_and_a_batch_of_a_model_with_a_loss_say_the_same_and_leave_all_as_it_was(
    name: str, quantised: bool
) -> None:
    if name == "watch" and quantised:
        pytest.skip("watch takes a plain model")
    model = fpsim.quantize(Classifier(), "bf16") if quantised else Classifier()
    model.up.weight.grad = torch.ones(6, 6)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = repr(model), torch.get_rng_state()
    results = [TOOLS[name](model, given) for given in (step_of(model), (X, Y), {"x": X, "labels": Y})]
    words = [[line for line in str(r).splitlines() if not line.startswith("KL ")] for r in results]  # of outputs
    assert words[0] == words[1] == words[2]
    assert [*map(repr, results[0])] == [*map(repr, results[1])]
    assert all(v.equal(state[k]) for k, v in model.state_dict().items())
    assert model.up.weight.grad.equal(torch.ones(6, 6))
    assert model.head.weight.grad is None
    assert repr(model) == before[0]
    assert torch.get_rng_state().equal(before[1])


def test_a_comparison_of_a_step_is_that_of_its_batch() -> None:
    model = Classifier()
    old = fpsim.compare(model, None, "e4m3fn", (X, Y))
    new = fpsim.compare(model, step_of(model), None, "e4m3fn")
    assert list(old) == list(new)
    assert old.losses == new.losses
    assert list(fpsim.compare(model, (X, Y), None, "e4m3fn")) == list(old)


def test_dtypes_are_formats_and_no_steps() -> None:
    model = Classifier()
    by_name = fpsim.compare(model, None, "bf16", (X, Y))
    assert list(fpsim.compare(model, torch.float32, torch.bfloat16, (X, Y))) == list(by_name)
    assert list(fpsim.compare(model, step_of(model), np.float32, torch.bfloat16)) == list(by_name)
    with pytest.raises(TypeError, match="A format is wanted, not"):
        fpsim.compare(model, lambda: None, "bf16", X)


@pytest.mark.parametrize("name", ["why", "diagnose", "watch"])
def test_a_batch_takes_a_loss_for_a_model_that_has_none(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3))

    def step() -> Tensor:
        total = F.cross_entropy(model(X), Y)
        total.backward()
        return total

    by_batch = TOOLS[name](model, X, loss=lambda out: F.cross_entropy(out, Y))
    assert str(by_batch) == str(TOOLS[name](model, step))


@pytest.mark.parametrize("name", TOOLS)
def test_a_wrong_form_is_refused_in_a_line_that_shows_the_right_one(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(
        TypeError, match=r"^Got .*fpsim\.\w+\(model, lambda: loss\(model\(x\)\)\.backward\(\)\)\.$"
    ) as e:
        TOOLS[name](model, lambda x, y: model(x).sum())
    assert "needs 2 arguments" in str(e.value)
    if name != "compare":  # which runs forward alone for a model without a loss
        with pytest.raises(TypeError, match=r"has no `loss`\. Expected loss=lambda output"):
            TOOLS[name](model, X)
    if name in ("why", "diagnose", "watch"):
        with pytest.raises(TypeError, match=r"Got loss=<function .* with a step"):
            TOOLS[name](model, lambda: model(X).sum(), loss=lambda out: out.sum())


def test_a_step_of_a_model_in_eval_mode_is_not_watched_in_silence() -> None:
    model = nn.Linear(6, 3).eval()
    with pytest.raises(ValueError, match=r"eval mode. watch sees calls in training: model.train\(\)"):
        fpsim.watch(model, lambda: model(X).sum().backward())


def test_old_forms_of_watch_stay() -> None:
    model = nn.Linear(6, 3)
    for watching in (fpsim.watch(model, ["fp16"]), fpsim.watch(model, formats=("fp16",)), fpsim.watch(model)):
        with watching:
            model(X).sum().backward()
        assert {row["format"] for row in watching.rows()} >= {"fp16"}


class Branches(nn.Module):
    """Takes a branch, in which it divides by zero if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: 1 / self.inner(x), lambda x: self.other(x), (x,))  # type: ignore[no-any-return]


def test_diagnose_looks_into_the_branch_that_is_taken() -> None:
    model = Branches()
    with torch.no_grad():
        model.inner.weight.zero_()
        model.inner.bias.zero_()
    assert str(fpsim.diagnose(model, lambda: model(-X.abs()).sum())).startswith("Nothing is inf")
    found = str(fpsim.diagnose(model, lambda: model(X.abs()).sum()))
    assert found.startswith("inf first appears forward at :rdiv, activation: 24 of 24 (100 %), a division by zero")


def test_watch_sees_the_modules_of_the_branch_that_is_taken() -> None:
    model = Branches()
    with fpsim.watch(model) as watched:
        model(X.abs()).sum().backward()
    sites = {row["site"] for row in watched.rows()}
    assert "inner:linear" in sites
    assert "other:linear" not in sites


def test_why_and_sensitivity_take_a_step_with_branches() -> None:
    model = Branches()

    def step() -> Tensor:
        total = model(X.abs()).square().mean()
        total.backward()
        return total

    assert fpsim.why(model, step) is not None
    assert "inner" in str(fpsim.sensitivity(model, step, "e4m3fn"))
