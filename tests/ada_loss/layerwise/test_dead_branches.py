"""A branch that a small number multiplies: the default leaves it dead and says so once; what it names revives it."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpsim
from ada_loss import AdaLossScaled
from ada_loss.layerwise.engine import Dead
from ada_loss.record import Recorder


class Gated(nn.Module):
    """x + 1e-6 f(x). gate: a number, of which the rule does not know, or a parameter, of which it does."""

    def __init__(self, gate: float | nn.Parameter) -> None:
        super().__init__()
        self.gate, self.fc = gate, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.fc(x)


def gated(gate: float | nn.Parameter, error: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Gated(gate), nn.Linear(8, 4))
    return fpsim.quantize(model.to(dtype), fpsim.Policy(error=error, weight_grad=error))


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, steps: int = 2, loss_scale: float = 1.0) -> float:
    """The share of the branch's weight whose gradient is zero in the last step."""
    for _ in range(steps):
        model.zero_grad()
        (model(X.to(model[1].fc.weight.dtype)).float().square().mean() * 1e-2 * loss_scale).backward()
    return float((model[1].fc.weight.grad == 0).float().mean())


def test_what_the_first_step_has_noted_is_forgotten_once_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[weakref.ref[Tensor]] = []

    def note(self: Dead, *args: Any) -> None:
        of_class(self, *args)
        noted.extend(weakref.ref(flag) for _, flag in self._found)

    of_class = Dead.note
    monkeypatch.setattr(Dead, "note", note)
    model = gated(1.0, "fp16")
    with AdaLossScaled(model):
        train(model, 2)
        assert noted
        assert all(flag() is None for flag in noted)


@pytest.mark.parametrize(
    ("error", "dtype"),
    [
        ("fp16", torch.float32),
        ("e5m2", torch.float32),
        ("e5m2", torch.bfloat16),
        ("e4m3fn", torch.float32),
        ("e4m3fn", torch.bfloat16),
    ],
    ids=str,
)
def test_the_dead_branch_is_told_of_once_with_what_to_do_and_that_revives_it(error: str, dtype: torch.dtype) -> None:
    model = gated(1e-6, error, dtype)
    with AdaLossScaled(model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train(model, 4) == 1.0
    texts = [str(w.message) for w in told if "underflowed in the first step" in str(w.message)]
    assert len(texts) == 1
    assert "1.fc:linear" in texts[0]
    assert "Make that an nn.Parameter, which may be frozen, or use rule='current'" in texts[0]
    assert "Where the layers before it have room for that, init_scale=2.0**20 or a loss scale will do" in texts[0]
    remedies: list[tuple[Any, dict[str, Any], float]] = [
        (nn.Parameter(torch.tensor(1e-6)), {}, 1.0),
        (nn.Parameter(torch.tensor(1e-6), requires_grad=False), {}, 1.0),
        (1e-6, {"rule": "current"}, 1.0),
    ]
    if error != "e4m3fn":  # whose largest number the gradients of the output would exceed then: it has no room
        remedies += [(1e-6, {"init_scale": 2.0**20}, 1.0), (1e-6, {}, 2.0**20)]
    for gate, options, loss_scale in remedies:
        revived = gated(gate, error, dtype)
        with AdaLossScaled(revived, **options), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert train(revived, loss_scale=loss_scale) < 0.1, (gate, options, loss_scale)


def test_a_branch_that_lives_is_not_told_of_and_no_bit_changes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = gated(0.5, "fp16")
        with AdaLossScaled(model):
            train(model)
    gradients = []
    for looks in (True, False):
        torch.manual_seed(0)
        fpsim.manual_seed(0)
        model = fpsim.quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "e5m2", rounding="stochastic")
        with AdaLossScaled(model) as scaled:
            scaled._engine._dead.looks = looks
            for _ in range(3):
                model(X).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))  # the noise of the training is drawn as without it


def test_a_recorder_prints_the_sites_that_lose_most() -> None:
    recorder = Recorder()
    assert "without rows so far" in str(recorder)
    model = gated(1e-6, "fp16")
    with AdaLossScaled(model) as scaled, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaled.observer = recorder
        train(model)
    lines = str(recorder).splitlines()
    rows = recorder.rows()
    assert f"{len(rows)} rows of steps 1 to 2" in lines[0]
    worst = {row["site"] for row in rows if row["underflow"] == 1.0}
    assert lines[2].split()[0] in worst
    assert "1.fc:linear" in worst
    assert len(lines) <= 14
    assert repr(recorder) == str(recorder)
