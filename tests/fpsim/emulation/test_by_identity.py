"""What is known of a tensor is known of this very one, for as long as it is there."""

from __future__ import annotations

import gc
import weakref

import torch

from fpsim.emulation.marks import ByIdentity


def test_equal_tensors_are_told_apart() -> None:
    known: ByIdentity[str] = ByIdentity()
    x, y = torch.ones(2), torch.ones(2)
    known[x] = "x"
    assert known.get(x) == "x"
    assert known.get(y) is None
    known[x] = "again"
    assert [(a is x, value) for a, value in known.items()] == [(True, "again")]


def test_a_tensor_that_is_gone_is_forgotten_with_what_was_known_of_it() -> None:
    known: ByIdentity[torch.Tensor] = ByIdentity()
    x, value = torch.ones(2), torch.zeros(2)
    known[x], told = value, weakref.ref(value)
    gc.disable()  # at once, not with the next collection
    try:
        del value, x
        assert told() is None
        assert known.held == {}
    finally:
        gc.enable()


def test_what_is_known_goes_with_the_dictionary_and_the_tensor_stays() -> None:
    known: ByIdentity[torch.Tensor] = ByIdentity()
    x = torch.ones(2)
    value = known[x] = torch.zeros(2)
    told = weakref.ref(value)
    gc.disable()
    try:
        del value, known
        assert told() is None
    finally:
        gc.enable()
    del x


def test_the_base_of_a_view_is_known_though_python_let_go_of_it() -> None:
    known: ByIdentity[str] = ByIdentity()
    x = torch.ones(2) * 2
    view = x.view(1, 2)
    known[x] = "x"
    del x  # torch keeps the object of Python for the base of the view
    assert view._base is not None
    assert known.get(view._base) == "x"
    assert [value for _, value in known.items()] == ["x"]
