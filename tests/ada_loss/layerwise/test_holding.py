"""Between updates: a scale that is held while the gradient is checked as it is rounded."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from layerwise_cases import assert_same, backward, gradients, seeded
from torch import Tensor, nn

from ada_loss import AdaLossScaled, Recorder
from ada_loss.layerwise import engine
from ada_loss.layerwise.sites import ProductEdge, Schedule, SiteState
from fpsim import Policy, quantize, record, scaling
from fpsim.scaling import rounded
from fpsim.tensors.spec import rounding_spec


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What calls of a function gave."""
    given, function = [], getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append(function(*args, **kwargs))
        return given[-1]

    monkeypatch.setattr(owner, name, spy)
    return given


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("fmt", ["fp16", "e5m2", "e4m3fn"])
def test_between_updates_gradients_are_looked_at_as_they_are_rounded_and_come_out_the_same(
    case: tuple[nn.Module, Tensor], fmt: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case
    model = quantize(model, Policy(error=fmt, weight_grad=fmt), rounding=rounding)
    at_once = spied(monkeypatch, scaling, "round_fitting_")
    sizes = (1e-6, 1e-6, 3e-6, 2.5e-7)

    def run(update_every: int, observer: Recorder | None) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        with AdaLossScaled(model, update_every=update_every) as handle:
            handle.observer = observer
            return [backward(model, x, size) for size in sizes]

    kept = run(100, None)
    assert len(at_once) > len(sizes)
    for got, want in zip(run(100, Recorder()), kept, strict=True):
        assert_same(got, want)
    at_once.clear()
    monkeypatch.setattr(SiteState, "has_headroom", lambda _: False)
    for got, want in zip(run(100, None), kept, strict=True):
        assert_same(got, want)
    assert at_once == []
    assert_same(kept[1], run(1, None)[1])  # of gradients of the same size


def test_where_every_other_step_updates_the_steps_between_take_no_moments(
    case: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case
    model = quantize(model, Policy(error="fp16", weight_grad="fp16"))
    taken = spied(monkeypatch, engine, "moments_of")
    has_taken = []
    with AdaLossScaled(model, branches="original", update_every=2):
        for _ in range(4):
            taken.clear()
            backward(model, x, 1e-6)
            has_taken.append(len(taken) > 0)
    assert has_taken == [True, False, True, False]


@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["alone", "recorded"])
def test_a_gradient_that_outgrows_its_scale_at_once_is_rounded_again_at_a_lower_one(recorder: Recorder | None) -> None:
    model = quantize(nn.Linear(1, 64), Policy(error="e4m3fn"))
    spec, x = rounding_spec("e4m3fn"), torch.ones(1, 1)
    gradient = torch.randn(1, 64, generator=seeded()) * torch.exp2(-torch.arange(64.0) % 16)
    with AdaLossScaled(model, update_every=100) as handle:
        handle.observer = recorder
        for size in (2.0**-20, 2.0**-20, 2.0**-3):
            model.zero_grad()
            (model(x) * (gradient * size)).sum().backward()
            if size < 0.1:
                before = handle.last_log2_scale(":linear")
        after = handle.last_log2_scale(":linear")
        assert after < before
        largest = float(gradient.abs().max()) / 8
        assert largest * 2.0**after <= 448 < largest * 2.0 ** (after + 1)
        fits = gradient.abs() / 8 <= 448 * 2.0**-before
        assert 0 < int(fits.sum()) < 64
        once = torch.where(fits, rounded(gradient / 8, spec, None, torch.tensor([before])), gradient / 8)
        assert torch.equal(gradients(model)["bias"], rounded(once, spec, None, torch.tensor([after]))[0])
        (model(x) * (gradient * 2.0**-20)).sum().backward()
        assert handle.last_log2_scale(":linear") == before  # kept all the same


@pytest.mark.filterwarnings("ignore:Every gradient of 0.linear underflowed")  # in the first step they are too small
def test_a_gradient_that_outgrows_its_scale_little_by_little_is_rounded_once() -> None:
    model = quantize(nn.ModuleList([nn.Linear(1, 8), nn.Linear(1, 8)]), Policy(error="e4m3fn"))
    spec, x = rounding_spec("e4m3fn"), torch.ones(1, 1)
    # at 2**10 the second is rounded to half of what is the smallest at 2**6, a tie
    gradient = torch.tensor([4.0, 2.0**-16 * (1 + 2.0**-10), 0.0, 1.0, 2.0, 3.0, 0.5, 0.25])
    with AdaLossScaled(model, update_every=100, scale_upper_bound=2.0**10) as handle:
        for size, other in ((2.0**-24, 0.0), (2.0**-4, 1.0), (1.0, 1.0)):  # what is zero tells nothing
            model.zero_grad()
            (model[0](x) * gradient * size + model[1](x) * other).sum().backward()
        after = handle.last_log2_scale("0:linear")
    assert after == 6  # 448 / 4 = 112
    assert torch.equal(gradients(model)["0.bias"], rounded(gradient, spec, None, torch.tensor([after])))


class Shifted(nn.Module):
    """Its gradients pass additions as the very tensors that were rounded behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + 1.0) + 1.0


def test_recording_draws_no_noise_where_a_gradient_passes_that_was_rounded_already() -> None:
    torch.manual_seed(0)
    model = quantize(Shifted(), Policy(error="e5m2", weight_grad="e5m2"), rounding="stochastic")
    x, found = torch.randn(4, 8, generator=seeded()), []
    for observer in (None, Recorder()):
        torch.manual_seed(0)
        with AdaLossScaled(model, update_every=100) as handle:
            handle.observer = observer
            found.append([backward(model, x, 1e-6) for _ in range(4)])
            if observer is not None:
                rows = [row for row in observer.rows() if row["step"] == 4]
                scales = {row["site"]: row["log2_scale"] for row in rows if row["role"] == "error"}
                assert scales == handle.log2_scales()
                assert all(row["log2_wanted"] == row["log2_scale"] for row in rows)
    for got, want in zip(*found, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("every", [1, 2])
def test_tallies_change_no_result_and_miss_no_gradient_that_is_rounded_at_once(every: int) -> None:
    model, x = quantize(nn.Linear(8, 64), Policy(error="e4m3fn"), rounding="stochastic"), torch.ones(4, 8)
    found, calls = [], {}
    for update_every, recorded in ((100, False), (100, True), (1, True)):
        torch.manual_seed(0)
        with AdaLossScaled(model, update_every=update_every), ExitStack() as stack:
            recording = stack.enter_context(record(model, every)) if recorded else None
            found.append([backward(model, x, size) for size in (2.0**-20, 2.0**-20, 2.0**-3, 2.0**-20)])
        if recording is not None:
            calls[update_every] = {(row["site"], row["role"]): row["calls"] for row in recording.rows()}
    for got, want in zip(found[1], found[0], strict=True):
        assert_same(got, want)
    assert calls[100] == calls[1]
    assert calls[100][":linear", "error"] == 4 // every


def test_scales_that_are_held_are_not_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = quantize(nn.Linear(4, 4), Policy(error="e5m2")), torch.ones(2, 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with AdaLossScaled(model, update_every=1):
        model(x).sum().backward()
    with AdaLossScaled(model, update_every=2), pytest.raises(NotImplementedError, match="a CUDA graph was captured"):
        model(x).sum().backward()


def test_an_observer_sees_the_gradient_before_a_rounding_that_did_not_fit() -> None:
    """It rounds what is below the ceiling in place before it meets what overflows, and then all at a lower scale."""
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), Policy(error="e5m2"))
    x, small, grown = torch.randn(64, 64), torch.randn(64, 64) * 1e-4, torch.randn(64, 64) * 1e-4
    grown[-1] *= 1e9
    with AdaLossScaled(model, update_every=100) as scaled:
        (model(x) * small).sum().backward()
        with record(model) as recording:
            (model(x) * grown).sum().backward()
        (site,) = [site for site in scaled.state_dict()["sites"] if site["site"] == "1:linear"]
    (row,) = [row for row in recording.rows() if row["site"] == "1:linear"]
    held, lowered = 2.0 ** site["kept"], 2.0 ** site["log2_scale"]
    fits = (grown * held).abs() <= torch.finfo(torch.float8_e5m2).max
    once = torch.where(fits, (grown * held).to(torch.float8_e5m2).float() / held, grown)
    assert (once == 0).sum() > 0
    twice = (once * lowered).to(torch.float8_e5m2)
    assert row["underflow_count"] == (twice.float() == 0).sum()
    assert row["nonzero"] == grown.count_nonzero() == grown.numel()


def test_headroom_is_sixteen_times_the_last_gradient_its_border_included() -> None:
    state = SiteState()
    state.last_amax, state.ceiling = 1.5, 24.0
    assert state.has_headroom()
    state.ceiling = math.nextafter(24.0, 0.0)
    assert not state.has_headroom()


def test_a_step_asks_anew_whether_all_scales_are_known() -> None:
    states: dict[str, SiteState] = {"a": SiteState()}
    schedule = Schedule(update_every=100, holds_scales=True, states=states)
    schedule.enter(0, made_in=-1, is_linked=True)
    states["a"].last_step = schedule.step
    assert schedule.links_sites(-1)  # its scale is not known yet
    states["a"].held_log2_scale = torch.zeros(1)
    assert schedule.links_sites(-1)  # it was not when this step began
    schedule.enter(1, made_in=-1, is_linked=True)
    assert not schedule.links_sites(-1)


def test_a_schedule_forgets_the_checkpoints_of_earlier_steps() -> None:
    schedule = Schedule(update_every=100, holds_scales=True, states={})
    for step in range(0, 300, 3):
        schedule.enter(step, made_in=-1, is_linked=True)
        schedule.enter(step + 1, made_in=step, is_linked=True)
        schedule.enter(step + 2, made_in=step + 1, is_linked=True)
    assert schedule.step == 100
    assert len(schedule._roots) <= 3


def test_the_other_operand_of_a_product_is_released_once_its_moments_are_known() -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Policy(error="fp16"))
    with AdaLossScaled(model):
        loss = model(torch.randn(4, 8)).square().mean()
        edges = [thing for thing in gc.get_objects() if type(thing) is ProductEdge]
        operands = [weakref.ref(edge.other) for edge in edges if edge.other is not None]
        assert operands
        loss.backward(retain_graph=True)
        assert [operand() for operand in operands] == [None] * len(operands)
