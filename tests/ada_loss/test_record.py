"""Recording scaled gradients: what the rows say against arithmetic by hand, and what recording must not change."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fpsim
from ada_loss import AdaLossScaled, AdaLossTransformLinear, Recorder
from ada_loss.record import COLUMNS
from fpsim import Policy


def one_layer(fmt: str = "fp16", **options: object) -> nn.Module:
    return fpsim.quantize(nn.Linear(4, 4, bias=False), Policy(error=fmt, **options))  # type: ignore[arg-type]


def recorded(model: nn.Module, gradient: torch.Tensor, **options: object) -> dict[str, object]:
    with AdaLossScaled(model, **options) as handle:  # type: ignore[arg-type]
        handle.observer = recorder = Recorder()
        model(torch.ones(len(gradient), 4)).backward(gradient)
    return recorder.rows()[0]


def test_shares_are_counted_at_the_scale_without_it_and_in_float32() -> None:
    # fp16 flushes up to 2**-25, and 65520 is the first number beyond
    gradient = torch.tensor([[0.0, 2.0**-30, 2.0**-26, 1.0], [0.0, 0.0, 2.0**-24, -(2.0**-28)]])
    row = recorded(one_layer(), gradient, rule="fixed", init_scale=2.0**4)
    assert row["elements"] == 8
    assert row["zeros"] == 3 / 8
    assert row["underflow"] == 1 / 5  # 2**-30
    assert row["underflow_unscaled"] == 3 / 5  # 2**-30, 2**-26, 2**-28
    assert row["overflow"] == 0
    assert (row["log2_wanted"], row["log2_scale"], row["limited"]) == (4, 4, False)


@pytest.mark.parametrize(("fmt", "largest"), [("fp16", 65504.0), ("e4m3fn", 448.0)])
def test_a_scale_that_would_overflow_is_limited_and_the_row_says_so(fmt: str, largest: float) -> None:
    gradient = torch.full((1, 4), largest / 2)
    row = recorded(one_layer(fmt), gradient, rule="fixed", init_scale=2.0**10)
    assert (row["log2_wanted"], row["log2_scale"], row["limited"], row["overflow"]) == (10, 1, True, 0)


def test_gradients_that_are_not_finite_do_not_count_as_overflow() -> None:
    row = recorded(one_layer(), torch.tensor([[math.inf, math.nan, 1.0, 2.0]]))
    assert (row["overflow"], row["log2_scale"]) == (0, 0)


def test_what_no_container_can_save_is_counted_as_overflow() -> None:
    # bf16's largest value is below float32's: nothing to scale, and this rounds beyond it
    row = recorded(one_layer("bf16"), torch.tensor([[3.4e38, 1.0, 1.0, 1.0]]))
    assert row["overflow"] == 1 / 4


def test_only_sampled_steps_are_recorded() -> None:
    model = one_layer()
    with AdaLossScaled(model) as handle:
        handle.observer = recorder = Recorder(every=3)
        for _ in range(7):
            model(torch.ones(2, 4)).sum().backward()
    assert [row["step"] for row in recorder.rows()] == [1, 4, 7]
    assert len(recorder) == 3
    recorder.clear()
    assert recorder.rows() == []


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("rule", ["approx_range", "exact"])
def test_recording_changes_no_bit(rule: str, rounding: str) -> None:
    def train(every: int) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        model = fpsim.quantize(net, "e5m2", rounding=rounding)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with AdaLossScaled(model, rule=rule) as handle:
            if every:
                handle.observer = Recorder(every)
            for _ in range(5):
                optimizer.zero_grad()
                (model(torch.randn(6, 4)) * 1e-4).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    expected = train(0)
    assert torch.equal(train(1), expected)
    assert torch.equal(train(2), expected)


def test_rows_become_a_frame_a_file_and_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = fpsim.quantize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "fp16")
    with AdaLossScaled(model, [AdaLossTransformLinear()]) as handle:
        handle.observer = recorder = Recorder()
        for _ in range(2):
            (model(torch.ones(2, 4)) * 1e-6).sum().backward()
    rows = recorder.rows()
    frame = recorder.to_frame()
    assert tuple(frame.columns) == COLUMNS
    assert frame["log2_scale"].tolist() == [row["log2_scale"] for row in rows]
    recorder.to_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [float(r["underflow"]) for r in read] == [row["underflow"] for row in rows]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    with SummaryWriter(str(tmp_path / "events")) as writer:
        recorder.to_tensorboard(writer)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    curve = [(e.step, e.value) for e in events.Scalars("ada_loss/log2_scale/error/1:linear")]
    chosen = [row for row in rows if (row["site"], row["role"]) == ("1:linear", "error")]
    assert curve == [(row["step"], row["log2_scale"]) for row in chosen]


def test_an_impossible_interval_is_refused() -> None:
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=rf"every={every} is invalid\. Expected: 1 for every step"):
            Recorder(every)  # type: ignore[arg-type]


def test_the_last_scale_of_a_place_can_be_asked_for() -> None:
    model = one_layer()
    with AdaLossScaled(model, rule="fixed", init_scale=8.0) as handle:
        with pytest.raises(KeyError, match=r"No gradient was rounded at ':linear' as error\. Sites: none yet\."):
            handle.last_log2_scale(":linear")
        model(torch.ones(2, 4)).sum().backward()
        assert handle.last_log2_scale(":linear") == 3
        with pytest.raises(KeyError, match="Sites: :linear"):
            handle.last_log2_scale("x")
