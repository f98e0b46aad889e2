"""Recording a model that runs: a tally of every site and role, which changes no result."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fpsim


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


INPUT = torch.linspace(-1, 1, 24).reshape(4, 6)


def run(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    out = model(INPUT)
    (out**2 * 1e-6).sum().backward()
    return torch.cat([out.detach().flatten(), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_recording_changes_no_result(rounding: str) -> None:
    model = fpsim.quantize(small_model(), "fp16", rounding=rounding)
    torch.manual_seed(3)
    plain = run(model)
    torch.manual_seed(3)
    with fpsim.record(model):
        recorded = run(model)
    assert torch.equal(plain, recorded)


def test_a_recording_tallies_the_tensors_of_each_site_and_role() -> None:
    model = fpsim.quantize(small_model(), "e5m2")
    with fpsim.record(model) as recording:
        run(model)
        run(model)
    rows = {(row["site"], row["role"]): row for row in recording.rows()}
    weights = fpsim.tally(model[0].weight.detach(), "e5m2")
    row = rows["0:weight", "weight"]
    assert (row["calls"], row["count"], row["underflow_count"]) == (2, 2 * 30, 2 * weights.underflow)
    assert row["exact_count"] == 2 * weights.exact
    # by hand: the first layer's product before it is rounded
    x, w, b = (fpsim.round_to(t.detach(), "e5m2") for t in (INPUT, *model[0].parameters()))
    product = fpsim.tally(nn.functional.linear(x, w, b), "e5m2")
    recorded = recording.tallies()["0:linear", "activation", "e5m2 nearest_even"].exponents
    assert recorded == {exponent: 2 * n for exponent, n in product.exponents.items()}
    assert rows["0:linear", "error"]["count"] == 2 * 20
    assert rows["2:weight", "weight_grad"]["count"] == 2 * 15


def test_the_underflow_of_errors_is_that_of_the_gradient_before_it_is_rounded() -> None:
    model = fpsim.quantize(nn.Linear(2, 2, bias=False), fpsim.Policy(error="fp16"))
    with fpsim.record(model) as recording:
        model(torch.ones(1, 2)).backward(torch.tensor([[1e-9, 1.0]]))
    (row,) = (row for row in recording.rows() if row["role"] == "error" and row["site"] == ":linear")
    assert (row["nonzero"], row["underflow_count"], row["underflow"]) == (2, 1, 0.5)


def test_every_nth_call_is_tallied() -> None:
    model = fpsim.quantize(small_model(), "fp16")
    with fpsim.record(model, every=3) as recording:
        for _ in range(7):
            run(model)
    assert {row["calls"] for row in recording.rows()} == {3}
    recording.clear()
    assert recording.rows() == []


def test_outside_the_block_nothing_is_recorded_and_a_copy_records_nothing() -> None:
    model = fpsim.quantize(small_model(), "fp16")
    with fpsim.record(model) as recording:
        run(copy.deepcopy(model))
        assert recording.rows() == []
        run(model)
    before = recording.rows()
    run(model)
    assert recording.rows() == before


def test_recording_a_plain_or_a_recorded_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Call fpsim\.quantize"), fpsim.record(small_model()):
        pass
    model = fpsim.quantize(small_model(), "fp16")
    with fpsim.record(model), pytest.raises(ValueError, match="recorded already"), fpsim.record(model):
        pass
    with pytest.raises(ValueError, match="every=0"), fpsim.record(model, every=0):
        pass


@pytest.mark.parametrize("fmt", ["fp16", "e4m3fn", fpsim.FloatFormat(4, 2, bias=9, specials="none")], ids=str)
def test_a_recording_goes_on_from_a_file_of_tensors_numbers_and_strings(tmp_path: Path, fmt: fpsim.FormatLike) -> None:
    model = fpsim.quantize(small_model(), fmt, rounding="stochastic")
    with fpsim.noise_of_torch():
        torch.manual_seed(3)
        with fpsim.record(model, every=2) as whole:
            run(model), run(model), run(model)
        torch.manual_seed(3)
        with fpsim.record(model, every=2) as first:
            run(model)
        torch.save(first.state_dict(), tmp_path / "recording.pt")
        second = fpsim.Recording()
        second.load_state_dict(torch.load(tmp_path / "recording.pt", weights_only=True))
        with fpsim.record(model, into=second):
            run(model), run(model)
    assert second.rows() == whole.rows()
    assert second.tallies() == whole.tallies()


def test_a_recording_prints_as_a_table_of_shares() -> None:
    model = fpsim.quantize(nn.Linear(3, 1, bias=False), "fp16")
    with fpsim.record(model) as recording:
        (model(torch.ones(2, 3)) * 1e-8).sum().backward()
    lines = str(recording).splitlines()
    head = "site role format rounding calls count underflow overflow nonfinite sqnr_db amax"
    assert lines[0].split() == head.split()
    cells = next(line for line in lines if " error " in line).split()
    assert cells[:7] == [":linear", "error", "fp16", "nearest_even", "1", "2", "1"]  # both of two underflow
    assert len(lines) == 2 + len(recording.rows())
    assert list(recording.to_frame()["site"]) == [row["site"] for row in recording.rows()]
