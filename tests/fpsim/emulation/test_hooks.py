"""Hooks of modules compute in the format, forward and backward, also around the module that is called."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fpsim import quantize
from fpsim.emulation.scope import active


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def scaled(module: nn.Module, *gradients: Any) -> Any:
    return tuple(g if g is None else (g * 3e4) * 1e-4 + g * 1.1 for g in gradients[0])


@pytest.mark.parametrize("where", ["first", "second", "", "second, called alone"])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_modules_have_the_gradients_of_native_code(where: str, kind: str) -> None:
    found = []
    place, _, alone = where.partition(", ")
    for is_native in (True, False):
        model: Any = Hooked().half() if is_native else quantize(Hooked().half().float(), "fp16")
        module = model.get_submodule(place)
        getattr(module, kind)(scaled)
        x = randn(2, 4).half()
        x = (x if is_native else x.float()).requires_grad_()
        y = (module if alone else model)(x)
        y.backward(torch.full_like(y, 0.75))
        gradients = [x.grad, *(p.grad for p in module.parameters())]
        found.append([g.float() for g in gradients])
    for native, ours in zip(*found, strict=True):
        torch.testing.assert_close(native, ours, rtol=2**-9, atol=2**-9, equal_nan=True)  # sums in another order


def several(module: nn.Module, x: Any) -> Any:
    x = x[0] if isinstance(x, tuple) else x
    return (x * 1.1 + 0.25) * 0.7


def of_result(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return several(module, out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["first", "", "second, called alone"])
@pytest.mark.parametrize("when", ["before", "after", "copied"])
def test_forward_hooks_compute_in_the_format_wherever_they_are(where: str, when: str) -> None:
    found = []
    place, _, alone = where.partition(", ")

    def hook(model: nn.Module) -> None:
        module = model.get_submodule(place)
        module.register_forward_pre_hook(several)
        module.register_forward_hook(of_result)

    for is_native in (True, False):
        model: nn.Module = Hooked().bfloat16()
        model = model if is_native else model.float()
        if when != "after":
            hook(model)
        if not is_native:
            model = quantize(model, "bf16")
        if when == "after":
            hook(model)
        if when == "copied":
            model = copy.deepcopy(pickle.loads(pickle.dumps(model)))
        module = model.get_submodule(place) if alone else model
        x = randn(2, 4).bfloat16()
        x = (x if is_native else x.float()).requires_grad_()
        y = module(x)
        y.backward(torch.full_like(y, 0.75))
        found.append([v.float() for v in (y, x.grad)])  # type: ignore[union-attr]
    native, ours = found
    assert torch.equal(ours[0], ours[0].bfloat16().float())
    for a, b in zip(native, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)  # an ulp: products of 4 terms in another order
    assert active.emulation is None


@pytest.mark.full
def test_a_model_with_hooks_around_it_is_not_compiled_in_silence() -> None:
    q, x = quantize(Hooked(), "bf16"), randn(2, 4)
    handle = q.register_forward_hook(of_result)
    expected = q(x)
    with pytest.raises(Exception, match=r"module with forward hooks|has forward hooks"):
        torch.compile(q, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.compile(q, backend="eager")(x), expected)
    handle.remove()
    torch._dynamo.reset()
    plain = torch.compile(q, backend="eager", fullgraph=True)(x)
    assert torch.equal(plain, q(x))
