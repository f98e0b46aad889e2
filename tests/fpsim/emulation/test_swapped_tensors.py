"""`torch.utils.swap_tensors` where the emulation knows the tensors."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from emulated_cases import randn
from tiers import parametrize
from torch import nn

from fpsim import emulate, quantize

NATIVE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _swap(a: nn.Linear, b: nn.Linear) -> None:
    torch.utils.swap_tensors(a.weight, b.weight)


@parametrize("fmt", [*NATIVE, "mxfp8_e4m3"], keep={"bf16", "mxfp8_e4m3"})
@pytest.mark.parametrize("use", [True, False], ids=["used before", "new"])
def test_a_weight_that_is_swapped_inside_of_emulate_is_the_other_one_from_then_on(fmt: str, use: bool) -> None:
    """As a model that had that weight from the beginning."""
    one, other, x = nn.Linear(32, 4), nn.Linear(32, 4), randn(3, 32)
    of_one, of_other = copy.deepcopy(one), copy.deepcopy(other)
    of_one.weight, of_other.weight = of_other.weight, of_one.weight
    with emulate(fmt):
        if use:
            one(x), other(x)
        _swap(one, other)
        found = one(x), other(x)
    with emulate(fmt):
        expected = of_one(x), of_other(x)
    for a, b, m, n in zip(found, expected, (one, other), (of_one, of_other), strict=True):
        assert torch.equal(a, b)
        a.sum().backward()
        b.sum().backward()
        assert torch.equal(m.weight.grad, n.weight.grad)  # type: ignore[arg-type]
    if fmt == "bf16":
        assert torch.equal(found[0], of_one.bfloat16()(x.bfloat16()).float())


def test_torchs_own_refusals_to_swap_stay() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    held: Any = weakref.ref(one.weight)
    with emulate("bf16"):
        one(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="weakref"):
            _swap(one, other)
    assert held() is one.weight


def test_a_module_that_converts_by_swapping_does_so_inside_of_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, x = nn.Linear(4, 4), randn(2, 4)
    with emulate("bf16"):
        with torch.no_grad():
            before = model(x)
        model.double()
        assert model.weight.dtype is torch.float64
        model.float()
        assert torch.equal(model(x), before)


def test_a_quantised_model_reads_the_weight_that_was_swapped_in_its_forward() -> None:
    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                first = self.a(x)
                _swap(self.a, self.b)
                return torch.stack([first, self.a(x), self.b(x)])

    model, x = Swaps(), randn(2, 4)
    native = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert torch.equal(quantize(model, "bf16")(x), native.float())
