"""What is said of lost updates, on weights and gradients whose losses are counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fpsim
from fpsim import Update, lost_updates, quantize_optimizer

HALF = torch.tensor([1.0, 1.0, 2.0**-10, 2.0**-10])


def sgd(value: torch.Tensor, update, **options) -> tuple[nn.Parameter, torch.optim.Optimizer, fpsim.QuantizedOptimizer]:
    p = nn.Parameter(value.clone())
    optimizer = torch.optim.SGD([("w", p)], **{"lr": 2.0**-12, **options})
    return p, optimizer, quantize_optimizer(optimizer, update)


def step(p: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: list[float]) -> None:
    p.grad = torch.tensor(gradient)
    optimizer.step()


def test_an_update_below_half_a_spacing_is_lost_and_zero_is_no_update():
    p, optimizer, quantized = sgd(HALF, Update(weight="bf16"))
    with lost_updates(quantized) as lost:
        step(p, optimizer, [1.0, 0.0, 1.0, 1.0])
    (row,) = lost.rows()
    assert row == {"step": 0, "parameter": "w", "lost": 1 / 3, "edq": 2 / 3, "decay_lost": None, "flips": 0.0}
    assert lost.share == 1 / 3
    assert lost.edq == 2 / 3
    assert lost.table() == [
        {"parameter": "w", "elements": 4, "lost": 1 / 3, "edq": 2 / 3, "at_first": 0.5, "flips": 0.0}
    ]
    assert lost.never_moved() == []


@pytest.mark.parametrize(
    "update",
    [
        Update(weight="bf16", compensation="kahan"),
        Update(weight="bf16", compensation="pair"),
        Update(weight="bf16", compensation="remainder16"),
        Update(weight="bf16", master="fp32"),
        Update(weight="bf16", compensation="kahan", arithmetic="torch"),
        Update(weight="bf16", compensation="pair", arithmetic="format"),
    ],
    ids=str,
)
def test_what_a_compensation_keeps_is_not_lost(update):
    p, optimizer, quantized = sgd(HALF, update)
    with lost_updates(quantized) as lost:
        for _ in range(3):
            step(p, optimizer, [1.0, 0.0, 1.0, 1.0])
    assert [row["lost"] for row in lost.rows()] == [0, 0, 0]
    assert [row["edq"] for row in lost.rows()] == [1, 1, 1]
    assert lost.table()[0]["at_first"] == 0.5  # what the model sees


@pytest.mark.parametrize("arithmetic", ["float32", "format", "torch"])
def test_parameters_that_never_moved_are_named(arithmetic):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-12, weight_decay=0.01)
    quantized = quantize_optimizer(optimizer, Update(weight="bf16", arithmetic=arithmetic), model)
    with torch.no_grad():
        model[0].bias.zero_()
    with lost_updates(quantized) as lost:
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(3, 2)) * torch.tensor([1.0, 2.0])).square().sum().backward()
            optimizer.step()
    assert "1.weight" in lost.never_moved()
    assert "1.bias" not in lost.never_moved()
    row = next(row for row in lost.table() if row["parameter"] == "1.weight")
    assert (row["lost"], row["edq"], row["at_first"]) == (1, 0, 1)
    assert {r["decay_lost"] for r in lost.rows() if r["parameter"] == "1.weight"} == {1.0}
    assert "never moved: " in str(lost)
    assert "1.weight" in str(lost)


def test_decay_is_lost_where_rounding_takes_it():
    """lr * decay is 2**-8: of 1, half the spacing below it, a tie to even; of 1.5, a whole one."""
    p, optimizer, quantized = sgd(
        torch.tensor([1.0, 1.5, 0.0]), Update(weight="bf16"), lr=2.0**-4, weight_decay=2.0**-4
    )
    with lost_updates(quantized) as lost:
        step(p, optimizer, [0.0, 0.0, 0.0])
    # 1 - 2**-8 is a bfloat16; 1.5 - 1.5 * 2**-8 lies 0.75 spacings below 1.5
    assert lost.rows()[0]["decay_lost"] == 0
    p, optimizer, quantized = sgd(
        torch.tensor([1.0, 1.5, 0.0]), Update(weight="bf16"), lr=2.0**-5, weight_decay=2.0**-4
    )
    with lost_updates(quantized) as lost:
        step(p, optimizer, [0.0, 0.0, 0.0])
    # 1 - 2**-9 is a tie, which goes to 1; 1.5 - 1.5 * 2**-9 lies 0.375 spacings below 1.5
    assert lost.rows()[0]["decay_lost"] == 1


def test_a_weight_that_goes_back_has_flipped():
    p, optimizer, quantized = sgd(torch.ones(2), Update(weight="bf16"), lr=2.0**-6)
    with lost_updates(quantized) as lost:
        for gradient in ([1.0, 1.0], [0.0, 1.0], [-1.0, 1.0], [1.0, 1.0]):
            step(p, optimizer, gradient)
    assert [row["flips"] for row in lost.rows()] == [0, 0, 0.5, 0.5]
    assert lost.table()[0]["flips"] == 2 / 7


def test_every_other_step_is_recorded_from_the_first_on():
    p, optimizer, quantized = sgd(HALF, Update(weight="bf16"))
    step(p, optimizer, [1.0] * 4)
    lost = lost_updates(quantized, every=2)
    for _ in range(5):
        step(p, optimizer, [1.0] * 4)
    lost.detach()
    step(p, optimizer, [1.0] * 4)
    assert [row["step"] for row in lost.rows()] == [1, 3, 5]


def test_recording_changes_no_bit():
    results = []
    for records in (False, True):
        torch.manual_seed(0)
        p, optimizer, quantized = sgd(
            torch.randn(300), Update(weight="bf16", rounding="stochastic", states="bf16"), momentum=0.9
        )
        lost = lost_updates(quantized) if records else None
        for i in range(4):
            step(p, optimizer, torch.randn(300, generator=torch.Generator().manual_seed(i)).tolist())
        results.append(p.detach())
        assert lost is None or lost.share is not None
    assert torch.equal(*results)


def test_stochastic_rounding_loses_single_updates_and_none_on_average():
    """1/16 of a spacing: lost with probability 15/16, else 16 times as large; within five standard deviations."""
    n = 100_000
    p, optimizer, quantized = sgd(torch.ones(n), Update(weight="bf16", rounding="stochastic"))
    with lost_updates(quantized) as lost:
        step(p, optimizer, [1.0] * n)
    assert lost.share is not None
    assert abs(lost.share - 15 / 16) < 5 * (15 / 16 * 1 / 16 / n) ** 0.5
    assert lost.edq is not None
    assert abs(lost.edq - 1) < 5 * 16 * (15 / 16 * 1 / 16 / n) ** 0.5


def test_a_skipped_step_and_a_missing_gradient_are_not_counted():
    _, optimizer, quantized = sgd(HALF, Update(weight="bf16"))
    with lost_updates(quantized) as lost:
        optimizer.step()
    assert lost.rows() == []
    assert lost.share is None
    assert lost.edq is None
    assert lost.table()[0]["lost"] is None
    assert str(lost).endswith("never moved: w")


def test_what_cannot_be_recorded_is_refused():
    _, optimizer, quantized = sgd(HALF, Update(weight="bf16"))
    with pytest.raises(TypeError, match="quantized is SGD"):
        lost_updates(optimizer)
    with pytest.raises(ValueError, match="every=0"):
        lost_updates(quantized, every=0)


def test_the_figure_has_a_line_for_each_parameter():
    p, optimizer, quantized = sgd(HALF, Update(weight="bf16"))
    with lost_updates(quantized) as lost:
        for _ in range(3):
            step(p, optimizer, [1.0] * 4)
    (axes,) = lost.plot().axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[50, 50, 50]]
    assert axes.get_ylabel() == "lost updates in %"


def test_two_records_of_one_optimizer_see_the_same():
    p, optimizer, quantized = sgd(HALF, Update(weight="bf16"))
    with lost_updates(quantized) as first, lost_updates(quantized, every=2) as second:
        for _ in range(3):
            step(p, optimizer, [1.0] * 4)
    assert [row["step"] for row in first.steps()] == [0, 1, 2]
    assert second.rows() == [first.rows()[0], first.rows()[2]]
    assert quantized.observers == []


def test_the_steps_have_all_parameters_together():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((1,), 2.0**-10))
    optimizer = torch.optim.SGD([("a", a), ("b", b)], lr=2.0**-12)
    quantized = quantize_optimizer(optimizer, Update(weight="bf16"))
    with lost_updates(quantized) as lost:
        a.grad, b.grad = torch.ones(3), torch.ones(1)
        optimizer.step()
    assert lost.steps() == [{"step": 0, "lost": 3 / 4, "edq": 1 / 4, "wanted": 4, "norm": 4 * 2.0**-24}]


def test_a_record_that_goes_on_from_its_state_is_as_one_that_was_not_interrupted(tmp_path):
    def run(pieces: list[int]) -> fpsim.LostUpdates:
        p, optimizer, quantized = sgd(HALF, Update(weight="bf16", rounding="stochastic"))
        lost = lost_updates(quantized, every=3)
        done = 0
        for piece in pieces:
            for i in range(done, done + piece):
                step(p, optimizer, [1.0, -(1.0**i), 3.0, (-1.0) ** i])
            done += piece
            torch.save({"o": optimizer.state_dict(), "l": lost.state_dict()}, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            value = p.detach().clone()
            p, optimizer, quantized = sgd(value, Update(weight="bf16", rounding="stochastic"))
            lost = lost_updates(quantized)
            optimizer.load_state_dict(state["o"])
            lost.load_state_dict(state["l"])
        return lost

    whole, parts = run([10]), run([4, 5, 1])
    assert parts.rows() == whole.rows()
    assert parts.steps() == whole.steps()
    assert parts.table() == whole.table()
    assert len(whole.steps()) == 4


def test_the_state_of_other_parameters_is_refused_and_changes_nothing():
    _, _, quantized = sgd(HALF, Update(weight="bf16"))
    lost, other = lost_updates(quantized), lost_updates(sgd(torch.ones(2), Update(weight="bf16"))[2])
    with pytest.raises(ValueError, match="not that of a record of these parameters"):
        lost.load_state_dict(other.state_dict())
    with pytest.raises(TypeError, match="not a mapping"):
        lost.load_state_dict(3)
    assert lost.table()[0]["elements"] == 4


def test_a_recording_tells_what_a_quantised_optimizer_lost():
    model = fpsim.quantize(nn.Linear(2, 2), "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-14)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    with fpsim.record(model) as plain:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert plain.updates == []
    quantized = quantize_optimizer(optimizer, Update(weight="bf16"), model)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    for _ in range(2):  # of one recording that goes on
        with fpsim.record(model, into=plain):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    assert quantized.observers == []
    (lost,) = plain.updates
    assert lost.share == 1.0
    assert len(lost.steps()) == 4
    assert lost.never_moved() == ["weight", "bias"]
    assert "never moved: weight, bias" in str(plain)


def test_a_recording_leaves_what_is_recorded_already():
    model = fpsim.quantize(nn.Linear(2, 2), "bf16")
    quantized = quantize_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), Update(weight="bf16"), model)
    with lost_updates(quantized), fpsim.record(model) as recording:
        assert recording.updates == []
        assert len(quantized.observers) == 1
