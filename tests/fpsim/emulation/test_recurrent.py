"""Recurrent layers: the operations inside against torch's one call, and in a format against a recurrence by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fpsim
from ada_loss import AdaLossScaled
from fpsim import Policy, emulate, quantize
from fpsim.emulation.recurrent import OPERATIONS

LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "projected": (nn.LSTM, {"proj_size": 3}),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "deep": {"num_layers": 3},
    "both ways": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5},
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(layer: str, form: str = "plain") -> nn.RNNBase:
    torch.manual_seed(0)
    kind, options = LAYERS[layer]
    return kind(4, 5, **{**options, **FORMS[form]})


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, PackedSequence):
        return [result.data, result.batch_sizes]
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]


def outcome(layer: nn.Module, *inputs: Any) -> list[Tensor]:
    """What comes out, and the gradients of inputs and parameters."""
    leaves = [t for t in flat(inputs) if t.is_floating_point()]
    for t in leaves:
        t.requires_grad_().grad = None
    layer.zero_grad()
    torch.manual_seed(1)
    found = [t for t in flat(layer(*inputs)) if t.is_floating_point()]
    sum((t * randn(*t.shape, seed=2)).sum() for t in found).backward()
    parameters = {name.rpartition(".")[2]: p for name, p in layer.named_parameters()}
    gradients = [t.grad for t in [*leaves, *(parameters[name] for name in sorted(parameters))]]
    return [t.detach().clone() for t in [*found, *gradients] if t is not None]


def require_equal(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    assert len(found) == len(expected) > 2
    for a, b in zip(found, expected, strict=True):
        if tolerance:
            torch.testing.assert_close(a, b, **tolerance)
        else:
            assert torch.equal(a, b)


def take_the_way_through_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the formats round nothing."""
    monkeypatch.setattr(fpsim.emulation.decomposed, "leaves_float32", lambda specs, x: False)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's, of its own speed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sequence", ["padded", "packed", "unsorted", "single"])
def test_the_operations_inside_are_those_of_torch(
    layer: str, form: str, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(layer, form)
    x = randn(3, 6, 4) if model.batch_first else randn(6, 3, 4)
    inputs: tuple[Any, ...] = (x,)
    if sequence in ("packed", "unsorted"):
        lengths = [6, 4, 1] if sequence == "packed" else [2, 6, 2]
        packed = pack_padded_sequence(x, torch.tensor(lengths), model.batch_first, enforce_sorted=sequence == "packed")
        inputs = (packed._replace(data=packed.data.detach()),)
    elif sequence == "single":  # with no batch, and a state to begin with
        count = model.num_layers * (2 if model.bidirectional else 1)
        state = [randn(count, model.proj_size or 5, seed=3), randn(count, 5, seed=4)]
        inputs = (randn(6, 4), tuple(state) if model.mode == "LSTM" else state[0])
    expected = outcome(model, *inputs)
    quantised = quantize(model, "fp32")
    require_equal(outcome(quantised, *inputs), expected)  # where nothing is rounded torch's own call is left alone
    take_the_way_through_the_operations(monkeypatch)
    require_equal(outcome(quantised, *inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_cells_are_those_of_torch(
    kind: type[nn.RNNCellBase], bias: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cell = kind(4, 5, bias)  # type: ignore[call-arg, arg-type]
    states = (randn(3, 5, seed=3), randn(3, 5, seed=4))
    state: Any = states if kind is nn.LSTMCell else states[0]
    inputs = (randn(3, 4), state) if given else (randn(3, 4),)
    expected = outcome(cell, *inputs)
    quantised = quantize(cell, "fp32")
    require_equal(outcome(quantised, *inputs), expected)
    take_the_way_through_the_operations(monkeypatch)
    require_equal(outcome(quantised, *inputs), expected, rtol=1e-4, atol=1e-5)


class ByHand(nn.Module):
    """An LSTM layer as its formulas stand in the documentation of torch."""

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layer = nn.ParameterDict({name: p.detach().clone() for name, p in layer.named_parameters()})

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        p, linear = self.layer, nn.functional.linear
        h, c, outputs = x.new_zeros(x.shape[1], 5), x.new_zeros(x.shape[1], 5), []
        for x_t in x:
            a, b = linear(x_t, p["weight_ih_l0"], p["bias_ih_l0"]), linear(h, p["weight_hh_l0"], p["bias_hh_l0"])
            i, f, g, o = (a + b).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h[None], c[None])


@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn"])
def test_a_layer_in_a_format_has_the_bits_of_its_formulas(fmt: str) -> None:
    layer = make("lstm")
    assert isinstance(layer, nn.LSTM)
    x = randn(6, 3, 4)
    found, expected = outcome(quantize(layer, fmt), x), outcome(quantize(ByHand(layer), fmt), x)
    require_equal(found, expected)
    for value in found:
        assert torch.equal(value, fpsim.round_to(value, fmt))
    assert not torch.allclose(found[0], outcome(layer, x)[0], rtol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_step_has_the_sites_of_the_first(layer: str) -> None:
    sites = []
    for length in (2, 7):
        model = quantize(nn.ModuleDict({"rnn": make(layer, "deep")}), "e5m2")
        with fpsim.record(model) as recording:
            outputs, _ = model["rnn"](randn(length, 3, 4))
            outputs.sum().backward()
        rows = recording.rows()
        sites.append({(row["site"], row["role"]) for row in rows})
        counts = {row["site"]: row["count"] for row in rows if row["role"] == "activation"}
        size = 5 * {"lstm": 4, "projected": 4, "gru": 3}.get(layer, 1)
        assert counts["rnn:linear"] == counts["rnn:linear_1"] == length * 3 * size
    assert sites[0] == sites[1]


def test_packed_sequences_round_what_they_hold_and_no_padding() -> None:
    model = quantize(make("gru"), "e4m3fn")
    x = randn(6, 3, 4)
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 1]))
    with torch.no_grad():
        padded, lengths = pad_packed_sequence(model(packed)[0])
        for i, length in enumerate(lengths):
            assert torch.equal(padded[:length, i], model(x[:length, i])[0])


def test_adaptive_scaling_saves_the_gradients_of_early_steps() -> None:
    layer, x = make("lstm"), randn(30, 8, 4)
    policy = Policy(error="e4m3fn", weight_grad="e4m3fn")

    def gradient(model: nn.Module) -> Tensor:
        last = model(x)[0][-1]
        (last.square().mean() * 1e-2).backward()
        found = model.weight_ih_l0.grad
        assert isinstance(found, Tensor)
        return found

    exact = gradient(layer)
    lost = gradient(quantize(layer, policy))
    model = quantize(layer, policy)
    with AdaLossScaled(model):
        saved = gradient(model)
    assert (lost - exact).norm() > 0.5 * exact.norm()
    assert (saved - exact).norm() < 0.2 * exact.norm()


def test_a_layer_can_be_left_in_float32() -> None:
    layer, x = make("lstm"), randn(6, 3, 4)
    expected = outcome(layer, x)
    model = quantize(nn.ModuleDict({"rnn": layer}), Policy(activation="fp16", overrides={"rnn": None}))
    require_equal(outcome(model["rnn"], x), expected)


def test_functions_and_operators_are_decomposed_as_modules_are() -> None:
    cell, x, h = nn.GRUCell(4, 5), randn(3, 4), randn(3, 5, seed=1)
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    expected = quantize(cell, "fp16")(x, h)
    with emulate("fp16"):
        assert torch.equal(torch.gru_cell(x, h, *weights), expected)
        assert torch.equal(torch.ops.aten.gru_cell.default(x, h, *weights), expected)
    assert set(OPERATIONS) == {f"{n}{end}" for n in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")}
