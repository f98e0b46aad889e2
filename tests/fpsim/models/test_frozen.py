"""Weights that are rounded once: the same numbers as without, and no write to them goes unseen."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpsim
from fpsim.emulation import products, roundings

FORMATS = ["bf16", "e4m3fn", "mxfp8_e4m3", "nvfp4", "recipe:fp8_current", "recipe:mxfp8"]


class Net(nn.Module):
    """A convolution, two layers of which one has the other's weight, a lookup, and a product with a weight's view."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(16, 32), nn.Conv1d(32, 32, 1)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.words(x).mT).mT
        return self.second(torch.tanh(self.first(y))) @ self.first.weight.T


def made(fmt: object) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return fpsim.quantize(Net(), fmt), torch.randint(0, 16, (3, 4))


def rounded_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what is rounded, in place or not, from here on."""
    seen: list[torch.Size] = []

    def note_calls(name: str) -> None:
        own = getattr(roundings, name)

        def noting(x: Tensor, *args: object, **kwargs: object) -> Any:
            seen.append(x.shape)
            return own(x, *args, **kwargs)

        monkeypatch.setattr(roundings, name, noting)

    note_calls("round_memory_")
    note_calls("rounded")
    return seen


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_frozen_model_gives_the_same_numbers(fmt: str) -> None:
    model, x = made(fmt)
    with torch.no_grad():
        plain = [model(x), model(x[:1])]
        with fpsim.frozen(model):
            frozen = [model(x), model(x[:1]), model(x)]
    assert torch.equal(frozen[0], plain[0])
    assert torch.equal(frozen[1], plain[1])
    assert torch.equal(frozen[2], plain[0])


def test_a_weight_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = fpsim.quantize(nn.Linear(5, 7), "e4m3fn"), torch.ones(2, 5)
    seen = rounded_weights(monkeypatch)
    with torch.no_grad(), fpsim.frozen(model):
        for _ in range(3):
            model(x)
    assert seen.count(torch.Size([7, 5])) == 1
    assert seen.count(torch.Size([7 * 5])) == 1  # once more at the end, flat, to be compared
    seen.clear()
    with torch.no_grad():
        model(x), model(x)
    assert seen.count(torch.Size([7, 5])) == 2


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_write_that_torch_counts_is_refused_at_the_next_call(fmt: str) -> None:
    model, x = made(fmt)
    block = fpsim.frozen(model)
    with torch.no_grad():
        block.__enter__()
        model(x)
        model.first.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"The weight 'first.weight' was written to inside of fpsim.frozen"):
            model(x)
        with pytest.raises(RuntimeError, match=r"The weight 'first.weight' was written to inside of fpsim.frozen"):
            block.__exit__(None, None, None)
        model(x)


def through_data(w: nn.Parameter) -> None:
    w.data.mul_(2.0)


def through_numpy(w: nn.Parameter) -> None:
    w.detach().numpy()[0] = 3.0


def by_other_memory(w: nn.Parameter) -> None:
    w.data = torch.ones_like(w)


@pytest.mark.parametrize("write", [through_data, through_numpy, by_other_memory])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_write_that_torch_does_not_count_is_seen_at_the_end(fmt: str, write: Callable[[nn.Parameter], None]) -> None:
    model, x = made(fmt)
    block = fpsim.frozen(model)
    with torch.no_grad():
        block.__enter__()
        model(x)
        write(model.first.weight)
        with pytest.raises(RuntimeError, match=r"The weight '.*weight' was written to inside of fpsim.frozen"):
            block.__exit__(None, None, None)
        expected = fpsim.quantize(fpsim.dequantize(model), fmt)(x)
        assert torch.equal(model(x), expected)  # nothing is kept


def test_a_write_behind_the_first_of_many_numbers_is_seen_at_the_end() -> None:
    model = fpsim.quantize(nn.Linear(400, 300), "e4m3fn")
    block = fpsim.frozen(model)
    block.__enter__()
    with torch.no_grad():
        model(torch.ones(1, 400))
    model.weight.data[-1, -1] = 9.0
    with pytest.raises(RuntimeError, match="The weight 'weight' was written to"):
        block.__exit__(None, None, None)


def test_an_operand_is_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = fpsim.quantize(nn.Linear(32, 7), "mxfp8_e4m3"), torch.ones(2, 32)
    seen: list[torch.Size] = []
    own = products.rounded_blocks
    monkeypatch.setattr(products, "rounded_blocks", lambda x, *args, **kw: seen.append(x.shape) or own(x, *args, **kw))
    with torch.no_grad(), fpsim.frozen(model):
        for _ in range(3):
            model(x)
    assert seen.count(torch.Size([7, 32])) == 1 + 1  # once more at the end, to be compared
    assert seen.count(torch.Size([2, 32])) == 3


def test_stochastic_weights_are_rounded_at_each_call() -> None:
    model, x = made(fpsim.Policy(weight="e4m3fn", rounding="stochastic"))
    with torch.no_grad():
        torch.manual_seed(1)
        expected = [model(x) for _ in range(2)]
        torch.manual_seed(1)
        with fpsim.frozen(model):
            found = [model(x) for _ in range(2)]
    assert not torch.equal(expected[0], expected[1])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradients_are_those_of_a_model_that_is_not_frozen(fmt: str) -> None:
    model, x = made(fmt)
    model(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with fpsim.frozen(model):
        with torch.inference_mode():
            model(x)  # what is kept of it serves the next call
        model(x).sum().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_a_frozen_model_of_weights_without_gradients_passes_one_to_its_input() -> None:
    model = fpsim.quantize(nn.Linear(4, 4).requires_grad_(False), "bf16")
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    with fpsim.frozen(model):
        with torch.inference_mode():
            model(x)
        model(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_recording_sees_the_weight_of_each_call() -> None:
    model, x = fpsim.quantize(nn.Linear(4, 4, bias=False), "e4m3fn"), torch.ones(1, 4)
    with torch.no_grad(), fpsim.frozen(model), fpsim.record(model) as recording:
        model(x), model(x)
    assert [row["count"] for row in recording.rows() if row["role"] == "weight"] == [32]


def test_other_formats_inside_of_the_block_have_copies_of_their_own() -> None:
    model, x = made("bf16")
    with torch.no_grad(), fpsim.frozen(model):
        model(x)
        fpsim.set_policy(model, "e4m3fn")
        found = model(x)
    assert torch.equal(found, fpsim.quantize(fpsim.dequantize(model), "e4m3fn")(x))


def test_the_copies_are_dropped_at_the_end_and_after_an_error() -> None:
    model, x = fpsim.quantize(nn.Linear(4, 4), "bf16"), torch.ones(1, 4)
    found: list[weakref.ref[object]] = []

    def failing() -> None:
        with torch.no_grad(), fpsim.frozen(model):
            model(x)
            found.append(weakref.ref(model.forward.listeners.kept_weights))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert found[0]() is None
    with torch.no_grad():
        model.weight.mul_(2.0)
        model(x)


def test_what_is_not_a_quantised_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"This Linear is not quantised, and rounds no weights. Use fpsim.quantize"):
        fpsim.frozen(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        fpsim.frozen("model")  # type: ignore[arg-type]
