"""What the copy that `quantize` makes keeps of the parameters of a model: their attributes and hooks."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fpsim

MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
SEEN: dict[str, Any] = {}  # which hooks find by a global name


class Masked(nn.Module):
    """A layer in which a hook keeps gradients to a mask, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mask", MASK.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.mask


class Times:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.mask


def times(mask: Tensor, gradient: Tensor) -> Tensor:
    return gradient * mask


def by_a_closure_over_the_module(model: Masked) -> Callable[[Tensor], Tensor]:
    return lambda g: g * model.mask


def by_a_default(model: Masked) -> Callable[[Tensor], Tensor]:
    return lambda g, mask=model.mask: g * mask


def by_a_keyword_default(model: Masked) -> Callable[[Tensor], Tensor]:
    def hook(g: Tensor, *, mask: Tensor = model.mask) -> Tensor:
        return g * mask

    return hook


KEPT: dict[str, Callable[[Masked], Callable[[Tensor], Any]]] = {
    "a tensor of its own": lambda model: lambda g: g * MASK,
    "an object": lambda model: Times(model.mask),
    "a method of the module": lambda model: model.masked,
    "a partial": lambda model: functools.partial(times, model.mask),
    "a closure over the module": by_a_closure_over_the_module,
    "a default": by_a_default,
    "a keyword default": by_a_keyword_default,
    "a builtin": lambda model: torch.neg,
}


def gradient_of(model: nn.Module, name: str = "layer.weight") -> Tensor:
    model.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("kind", KEPT)
def test_a_hook_on_a_gradient_is_kept_and_sees_the_copy(kind: str) -> None:
    model = Masked()
    model.layer.weight.register_hook(KEPT[kind](model))
    copied = fpsim.quantize(model, "bf16")
    expected = gradient_of(fpsim.quantize(copy.deepcopy(model), "bf16")) * MASK  # which torch has left the hook out of
    if kind == "a builtin":
        expected = -gradient_of(fpsim.quantize(copy.deepcopy(model), "bf16"))
    assert torch.equal(gradient_of(copied), expected)
    model.mask.fill_(7.0)
    assert torch.equal(gradient_of(copied), expected), "the original's mask is another one"
    assert torch.equal(gradient_of(fpsim.dequantize(copied)), expected)


def test_a_hook_after_accumulation_is_kept_and_sees_the_parameter_of_the_copy() -> None:
    model, seen = Masked(), []
    model.layer.bias.register_post_accumulate_grad_hook(seen.append)
    copied = fpsim.quantize(model, "bf16")
    gradient_of(copied)
    assert seen == [copied.layer.bias]


def stepping(optimizer: Any) -> Callable[[Tensor], None]:
    return lambda p: optimizer.step()


def among(things: Any) -> Callable[[Tensor], Any]:
    return lambda g: g * things[0].mask


def weakly(model: Masked) -> Callable[[Tensor], Any]:
    reference = weakref.ref(model)
    return lambda g: g * reference().mask  # type: ignore[union-attr]


LEFT: dict[str, Callable[[Masked], Any]] = {
    "an optimizer": lambda model: stepping(torch.optim.SGD(model.parameters(), lr=0.1)),
    "an optimizer in a dict": lambda model: stepping({1: torch.optim.SGD(model.parameters(), lr=0.1)}[1]),
    "a list": lambda model: among([model]),
    "an object": lambda model: among(SimpleNamespace(inner=(model,)).inner),
    "a weak reference": weakly,
    "a global name": lambda model: lambda g: g * SEEN["model"].mask,
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_hook_that_would_still_see_the_original_is_left_behind_and_a_warning_names_it(kind: str) -> None:
    model = Masked()
    SEEN["model"] = model
    try:
        model.layer.weight.register_hook(LEFT[kind](model))
        with pytest.warns(UserWarning, match=r"gradients of layer\.weight that use .*inplace=True") as warned:
            copied = fpsim.quantize(model, "bf16")
    finally:
        SEEN.clear()
    assert warned[0].filename == __file__
    assert not copied.layer.weight._backward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fpsim.quantize(model, "bf16", inplace=True).layer.weight._backward_hooks


class Shape:
    """As muP's `infshape`: an object of its own, which here knows its module."""

    def __init__(self, width: int, module: nn.Module) -> None:
        self.width, self.module = width, module


def test_attributes_of_parameters_are_kept_and_point_into_the_copy() -> None:
    model = Masked()
    model.layer.bias._no_weight_decay = True
    model.layer.weight.infshape = Shape(3, model.layer)
    model.layer.weight.lock = threading.Lock()  # nothing copies that
    model.mask.note = "a buffer"
    for copied in (fpsim.quantize(model, "bf16"), fpsim.dequantize(fpsim.quantize(model, "bf16"))):
        assert copied.layer.bias._no_weight_decay
        assert copied.layer.weight.infshape.width == 3
        assert copied.layer.weight.infshape.module is copied.layer
        assert copied.layer.weight.lock is model.layer.weight.lock
        assert copied.mask.note == "a buffer"


def test_groups_by_an_attribute_train_as_before() -> None:
    """As Mamba's training does: what says `_no_weight_decay` does not decay."""
    trained = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model.weight._no_weight_decay = True
        model = fpsim.quantize(model, "fp32", inplace=inplace)
        kept = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
        rest = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
        optimizer = torch.optim.SGD([{"params": kept}, {"params": rest, "weight_decay": 0.5}], lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_a_tied_parameter_has_its_hook_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.register_hook(lambda g: g * 0.5)
    model[0].weight.is_tied = True
    copied = fpsim.quantize(model, "bf16")
    assert copied[0].weight is copied[1].weight
    assert copied[1].weight.is_tied
    assert len(copied[0].weight._backward_hooks or {}) == 1


def test_parametrised_lazy_and_frozen_parameters_keep_theirs() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.LazyLinear(3), "c": nn.Linear(3, 3)})
    parametrize.register_parametrization(model["a"], "weight", nn.Identity())
    of_a = model["a"].parametrizations["weight"].original
    for p in (of_a, model["b"].bias, model["c"].bias):
        p.tag = "kept"
    for p in (of_a, model["c"].bias):  # torch puts no hook on what has no numbers yet
        p.register_hook(lambda g: g * 0.5)
    model["c"].bias.requires_grad_(False)
    copied = fpsim.quantize(model, "bf16")
    of_a = copied["a"].parametrizations["weight"].original
    for p in (of_a, copied["b"].bias, copied["c"].bias):
        assert p.tag == "kept"
    assert [len(p._backward_hooks or {}) for p in (of_a, copied["c"].bias)] == [1, 1]
    assert not copied["c"].bias.requires_grad
    copied["b"](torch.ones(2, 4))
    assert copied["b"].bias.tag == "kept", "it has numbers now"
    copied["a"](torch.ones(2, 3)).sum().backward()
    assert torch.equal(of_a.grad, torch.ones(3, 3)), "two rows, by a half"


def test_what_rounding_notes_of_a_parameter_is_not_taken_along() -> None:
    model = nn.Linear(3, 2)
    quantised = fpsim.quantize(model, "bf16", inplace=True)
    gradient_of(quantised, "weight")
    assert set(vars(fpsim.dequantize(quantised).weight)) <= set()


class Multiplied(nn.Module):
    """A parameter, and a buffer, that say how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("b", torch.ones(2))
        self.w.multiplier, self.b.multiplier = 0.25, 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w * getattr(self.w, "multiplier", 1.0) + self.b * getattr(self.b, "multiplier", 1.0)


def test_attributes_are_there_in_a_compiled_program() -> None:
    model = fpsim.quantize(Multiplied(), "bf16")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(torch.ones(4, 3))
    out.sum().backward()
    assert torch.equal(out, torch.full((4, 2), 3 * 0.25 + 2.0))
    assert torch.equal(model.w.grad, torch.full((3, 2), 4 * 0.25))
