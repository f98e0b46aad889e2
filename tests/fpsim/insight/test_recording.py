"""Recording a model that runs: a tally of every site and role, which changes no result."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpsim
from fpsim.models.quantize import listeners
from fpsim.tensors.tally import shape_between


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


class Asked:
    """An observer that notes what it is asked for and what it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.told: list[tuple[str, str]] = []

    def wants(self, site: str, role: str) -> bool:
        self.asked.append((site, role))
        return True

    def __call__(self, site: str, role: str, *_: Any) -> None:
        self.told.append((site, role))


class PartlyWide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().exp()  # in float32 on purpose


@pytest.mark.parametrize(
    "policy",
    ["fp16", fpsim.Policy(weight="fp16", error="fp32", weight_grad="fp32"), "mxfp8_e4m3"],
    ids=["fp16", "float32 gradients", "mxfp8"],
)
@pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
def test_an_observer_is_told_of_what_it_was_asked_for_and_of_each_role(policy: Any, is_scaled: bool) -> None:
    model = fpsim.quantize(PartlyWide(), policy)
    observer = Asked()
    for group in listeners(model):
        group.observer = observer
        if is_scaled:
            group.scaling = lambda *_: lambda gradient, _: torch.zeros(1, dtype=torch.int64)
    run(model)
    assert sorted({*observer.asked}) == sorted({*observer.told})
    assert len(observer.asked) == len(observer.told)
    if policy == "mxfp8_e4m3":
        assert {role for _, role in observer.told} == {
            "fprop.x",
            "fprop.w",
            "dgrad.dy",
            "dgrad.w",
            "wgrad.x",
            "wgrad.dy",
        }
    else:
        assert (":exp", "activation") in observer.told
        assert {role for _, role in observer.told} == {"activation", "weight", "error", "weight_grad"}


def test_after_clear_the_next_call_is_the_first_of_its_site_again() -> None:
    model = fpsim.quantize(small_model(), "fp16")
    with fpsim.record(model, every=2) as recording:
        run(model)
        recording.clear()
        run(model)
    assert {row["calls"] for row in recording.rows()} == {1}


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


def of_a_layer() -> fpsim.Recording:
    torch.manual_seed(0)
    model = fpsim.quantize(nn.Linear(3, 2), "fp16")
    with fpsim.record(model) as recording:
        model(torch.randn(4, 3)).sum().backward()
    return recording


def test_a_recording_of_shared_scales_prints_their_spread() -> None:
    model = fpsim.quantize(nn.Linear(64, 2), fpsim.Policy(products=fpsim.Products.all("mxfp8_e4m3")))
    with fpsim.record(model) as recording:
        model(torch.randn(4, 64))
    assert "log2_scale_spread" in str(recording).splitlines()[0]


def test_a_recording_prints_as_a_table_of_shares() -> None:
    model = fpsim.quantize(nn.Linear(3, 1, bias=False), "fp16")
    with fpsim.record(model) as recording:
        (model(torch.ones(2, 3)) * 1e-8).sum().backward()
    lines = str(recording).splitlines()
    head = "site role format rounding calls count underflow overflow nonfinite sqnr_db scale_bias dead_zone_share amax"
    head += " row_bias kurtosis"
    assert lines[0].split() == head.split()
    cells = next(line for line in lines if " error " in line).split()
    assert cells[:7] == [":linear", "error", "fp16", "nearest_even", "1", "2", "1"]  # both of two underflow
    assert len(lines) == 2 + len(recording.rows())
    assert list(recording.to_frame()["site"]) == [row["site"] for row in recording.rows()]


def by_numpy(before: Tensor, after: Tensor, axis: int) -> tuple[float, float]:
    """The bias of the row sums, and the kurtosis, in float64."""
    x, r = (np.asarray(t.detach().double()) for t in (before, after))
    nonzero = x[x != 0]
    kurtosis = (nonzero**4).mean() / (nonzero**2).mean() ** 2
    return float(np.abs((r - x).sum(axis)).sum() / np.abs(x).sum()), float(kurtosis)


def gradients_of(model: nn.Module, batch: Tensor, target: Tensor) -> dict[str, dict[str, Any]]:
    with fpsim.record(model) as recording:
        nn.functional.cross_entropy(model(batch), target).backward()
    return {row["site"]: row for row in recording.rows() if row["role"] == "error"}


def test_the_bias_of_row_sums_and_the_kurtosis_of_a_loss_gradient_are_those_of_numpy() -> None:
    torch.manual_seed(0)
    model = fpsim.quantize(nn.Linear(5, 50, bias=False), fpsim.Policy(error="e4m3fn"))
    batch, target = torch.randn(7, 5), torch.arange(7)
    row = gradients_of(model, batch, target)[":linear"]
    logits = nn.functional.linear(batch, model.weight)
    gradient = (torch.softmax(logits, 1) - nn.functional.one_hot(target, 50)).detach() / 7
    bias, kurtosis = by_numpy(gradient, fpsim.round_to(gradient, "e4m3fn"), 1)
    assert bias > 0.01  # or the test would see nothing
    # float32's softmax has a relative error of some 2^-22, and moves no element across a tie of these seven rows
    assert row["row_bias"] == pytest.approx(bias, rel=1e-4)
    assert row["kurtosis"] == pytest.approx(kurtosis, rel=1e-4)


def test_rows_of_a_convolution_lie_along_its_channels_and_rows_that_cancel_are_not_hidden() -> None:
    flat = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.Flatten(0))
    model = fpsim.quantize(flat, fpsim.Policy(error="int4"))
    gradient = torch.zeros(1, 4, 1, 2)
    gradient[0, :, 0, 0] = torch.tensor([-6.0, 0.25, 0.25, 0.25])  # the small ones become 0: errors of -0.75
    gradient[0, :, 0, 1] = torch.tensor([6.0, -0.25, -0.25, -0.25])  # and of +0.75
    with fpsim.record(model) as recording:
        (model(torch.ones(1, 1, 1, 2)) * gradient.flatten()).sum().backward()
    row = next(row for row in recording.rows() if row["role"] == "error" and row["site"] == "0:conv2d")
    assert row["row_bias"] == pytest.approx((0.75 + 0.75) / 13.5, rel=1e-6)  # a rounding of float32 each: 2^-23
    assert all(row["row_bias"] is None for row in recording.rows() if row["role"] != "error")


@pytest.mark.parametrize("shape", [(), (6,), (3, 6), (2, 3, 6), (0, 4)], ids=str)
def test_the_shape_of_a_gradient_has_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = shape_between(x, fpsim.round_to(x, "e2m1fn"))
    if not x.numel():
        assert found.isnan().all()
        return
    expected = by_numpy(x if shape else x[None], fpsim.round_to(x if shape else x[None], "e2m1fn"), -1)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)  # sums of 36 float32 at most


def test_what_is_not_finite_is_left_out_and_extreme_magnitudes_do_not_vanish() -> None:
    x = torch.tensor([[1e30, 3e30, math.nan], [2e30, math.inf, 1e30]])
    small = torch.tensor([[1.0, 3.0, 0.0], [2.0, 0.0, 1.0]])
    assert shape_between(x, 1.5 * x).tolist() == pytest.approx([0.5, by_numpy(small, small, 1)[1]], rel=1e-6)
    tiny = (small * 1e-30).clone()
    assert shape_between(tiny, torch.zeros(2, 3)).tolist() == pytest.approx(
        [1.0, by_numpy(small, small, 1)[1]], rel=1e-6
    )
    assert shape_between(torch.zeros(2, 3), torch.zeros(2, 3)).isnan().all()


@pytest.mark.parametrize("name", ["shape", "sums", "variant"])
def test_a_state_that_lacks_what_this_version_records_is_refused(name: str) -> None:
    recording = of_a_layer()
    state = recording.state_dict()
    for saved in state["sums"]:
        if name == "sums":
            saved[name] = saved[name][:4]  # before the parts of an error were recorded
        else:
            del saved[name]
    before = str(recording)
    with pytest.raises(ValueError, match="not the state of a Recording"):
        recording.load_state_dict(state)
    assert str(recording) == before


def test_a_picture_of_nothing_lost_has_no_shares_below_zero() -> None:
    model = fpsim.quantize(nn.Linear(4, 4), "fp16")
    with fpsim.record(model) as recording:
        model(torch.ones(2, 4)).sum().backward()
    (axes,) = recording.plot().axes
    assert axes.get_xlim() == (0, 1)


def test_a_value_without_a_length_is_written_in_the_picture() -> None:
    model = fpsim.quantize(nn.Linear(2, 2, bias=False), "fp16")
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.1], [1.0, 0.5]]))
    with fpsim.record(model) as recording:
        model(torch.ones(1, 2)).sum().backward()
    (weight,) = [row for row in recording.rows() if row["role"] == "weight"]
    (error,) = [row for row in recording.rows() if row["role"] == "error"]
    assert 0 < weight["sqnr_db"] < math.inf  # of 0.1
    assert error["sqnr_db"] == math.inf  # ones are exact
    assert error["row_bias"] is not None
    written = {}
    for role in ("weight", "error"):
        (axes,) = recording.plot(role, "sqnr_db").axes
        written[role] = [text.get_text() for text in axes.texts]
    assert written == {"weight": [], "error": [" inf"]}
    (axes,) = recording.plot("weight", "row_bias").axes  # which weights do not have
    assert [text.get_text() for text in axes.texts] == [" -"]


def test_a_recording_of_ones_own_begins_with_every_step() -> None:
    assert fpsim.Recording().state_dict()["every"] == 1
