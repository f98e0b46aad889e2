"""The scaler: what torch's own tests ask of `torch.amp.GradScaler`, of both classes; then what is ours alone.

The first part bears the names of torch's tests. Scales are powers of two and the numbers small, so scaling
and unscaling are exact: a scaled run equals a run without scaling bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ada_loss import GradScaler, LossRule, loss_rule, trajectory
from ada_loss.rules.loss import SYSTEMS
from ada_loss.scalers import NoScaler

Make = Callable[..., Any]
REFUSED = (RuntimeError, AssertionError, ValueError)  # torch asserts what we raise as RuntimeError
TRACES = json.loads((Path(__file__).parents[2] / "data" / "golden_traces.json").read_text())


def torchs(**params: Any) -> Any:
    return torch.amp.GradScaler("cpu", **params)


def ours(**params: Any) -> GradScaler:
    return GradScaler("cpu", **params)


@pytest.fixture(params=[torchs, ours], ids=["torch", "ours"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def model_and_optimizer(seed: int = 0, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), **{"lr": 1.0, **options})


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    both = torch.randn(count, 2, 8, 8, generator=generator)
    return [(x, y) for x, y in both]


def spoil(model: nn.Sequential, value: float = math.inf) -> None:
    model[1].weight.grad.fill_(value)


def stepped(make: Make, run: Callable[..., None], control: Callable[..., None], **scaler: Any) -> None:
    """Run with a scaler, skipping the third of four steps, and without: same parameters, and the scale."""
    for enabled in (True, False):
        (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
        params = {"init_scale": 128.0, "growth_interval": 1, **scaler}
        amp = make(enabled=enabled, **params)
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            run(amp, model, optimizer, x, y, i == 2 and enabled)
            plain_optimizer.zero_grad()
            control(plain, plain_optimizer, x, y, i == 2 and enabled)
        assert amp.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
        for p, q in zip(model.parameters(), plain.parameters()):
            assert torch.equal(p, q)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, skip: bool) -> None:
    nn.functional.mse_loss(model(x), y).backward()
    if not skip:
        optimizer.step()


# --- torch's own tests, of both classes ---


def test_grad_scaling_scale(make: Make) -> None:
    scaler = make(init_scale=2.0)
    one, four = torch.full((1,), 4.0), torch.full((1,), 8.0)
    assert torch.equal(scaler.scale(one), four)
    nest = (one, [one, (one, [one])])
    scaled = scaler.scale(nest)
    assert isinstance(scaled, tuple)
    assert isinstance(scaled[1], list)
    assert isinstance(scaled[1][1], tuple)
    for found in (scaled[0], scaled[1][0], scaled[1][1][0], scaled[1][1][1][0]):
        assert torch.equal(found, four)
    lazy = scaler.scale(one for _ in range(2))
    assert isinstance(lazy, Iterator)
    assert [found.item() for found in lazy] == [8.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_grad_scaling_scale_gives_torchs_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    loss = torch.full(shape, 1.5, dtype=dtype)
    expected, found = torchs(init_scale=2.0**17).scale(loss), ours(init_scale=2.0**17).scale(loss)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_grad_scaling_update_scale(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make(init_scale=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)
    found = []
    for gradient in (1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    assert found == [4.0, 8.0, 2.0, 2.0, 0.5, 0.5, 1.0]


def test_grad_scaling_update_takes_a_new_scale(make: Make) -> None:
    scaler = make(init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=32.0)
    assert scaler.get_scale() == 32.0
    assert scaler.scale(torch.ones(())).item() == 32.0
    given = torch.tensor(8.0)
    scaler.update(new_scale=given)
    given.fill_(1.0)
    assert scaler.get_scale() == 8.0


def test_grad_scale_will_not_overflow(make: Make) -> None:
    model, optimizer = model_and_optimizer(lr=0.0)
    scaler = make(init_scale=1e38, growth_factor=2.0**4, growth_interval=1)
    scaler.scale((model(torch.ones(1, 8)) * 1e-38).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == torch.tensor(1e38).item()


@pytest.mark.parametrize("bad", [-1, *range(6)])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_grad_scaling_unscale(make: Make, bad: int, value: float) -> None:
    # sizes and strides that a kernel may take on different paths; -1 spoils none
    shapes = [torch.empty(3), torch.empty(()), torch.empty(0), torch.empty(4, 5).t(), torch.empty(2, 3, 1, 4)]
    shapes.append(torch.empty(8, 8)[:, ::2])
    params = [nn.Parameter(torch.zeros_like(s)) for s in shapes]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(torch.ones(()))
    for p, s in zip(params, shapes):
        p.grad = s.fill_(3.0)
    if bad >= 0:
        params[bad].grad[(..., slice(-1, None)) if params[bad].dim() else ...] = value
    spoiled = bad >= 0 and params[bad].numel() > 0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for p in params:
        assert torch.equal(p.detach(), torch.full_like(p, 0.0 if spoiled else -0.75))


def test_grad_scaling_unscale_several_types(make: Make) -> None:
    params = [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.full_like(p, 8.0)
    scaler.unscale_(optimizer)
    for p in params:
        assert torch.equal(p.grad, torch.full_like(p, 2.0))


def sparse(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A 2 x 3 gradient whose first and third value belong to one index."""
    indices = torch.tensor([[0, 1, 0], [2, 0, 2]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
        return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (2, 3))


@pytest.mark.parametrize("bad", [None, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("coalesced", [True, False])
def test_grad_scaling_unscale_sparse(make: Make, coalesced: bool, bad: float | None) -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(torch.ones(()))
    gradient = sparse([16.0, 32.0, 64.0 if bad is None else bad])
    weight.grad = gradient.coalesce() if coalesced else gradient
    scaler.unscale_(optimizer)
    if bad is None:
        assert torch.equal(weight.grad.to_dense(), torch.tensor([[0.0, 0.0, 20.0], [8.0, 0.0, 0.0]]))
    scaler.step(optimizer)
    expected = [[0.0, 0.0, -20.0], [-8.0, 0.0, 0.0]] if bad is None else [[0.0] * 3] * 2
    assert torch.equal(weight.detach(), torch.tensor(expected))


def test_grad_scaling_device_as_key(make: Make) -> None:
    # two objects for one device are one key: one check and one copy of the scale serve both
    assert hash(torch.device("cpu")) == hash(torch.zeros(1).device)
    weights = [nn.Parameter(torch.zeros(2, device=torch.device("cpu"))) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale([torch.ones((), device=torch.device("cpu")) for _ in range(2)])
    for w in weights:
        w.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    if isinstance(scaler, GradScaler):
        assert [len(p.found_inf) for p in scaler._verbs.progress.values()] == [1]
        assert len(scaler._verbs.scales) == len(scaler._verbs.inverses) == 1
    else:
        assert len(scaler._found_inf_per_device(optimizer)) == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_grad_scaling_a_finding_on_any_device_skips(make: Make, fused: bool) -> None:
    # where there is one device only: a finding is entered as another device's
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = make(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    if isinstance(scaler, GradScaler):
        found = scaler._verbs.progress[id(optimizer)].found_inf
    else:
        found = scaler._found_inf_per_device(optimizer)
    found[torch.device("meta")] = torch.ones(())
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.zeros(2))
    assert scaler.get_scale() == 2.0


@pytest.mark.gpu
def test_grad_scaling_several_devices(make: Make) -> None:
    for bad in (None, 0, 1):
        weights = [nn.Parameter(torch.zeros(2, device=d)) for d in ("cpu", "cuda")]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        scaler = make(init_scale=4.0, growth_interval=1)
        scaled = scaler.scale([torch.ones((), device=w.device) for w in weights])
        assert [s.item() for s in scaled] == [4.0, 4.0]
        for i, w in enumerate(weights):
            w.grad = torch.full_like(w, math.nan if i == bad else 8.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if bad is None else 2.0)
        for w in weights:
            assert torch.equal(w.detach().cpu(), torch.full((2,), -2.0 if bad is None else 0.0))


@pytest.mark.parametrize("lazily", [True, False])
def test_grad_scaling_state_dict(make: Make, lazily: bool) -> None:
    source = make(init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    target = make(init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    source.scale(torch.ones(()))
    weight.grad = torch.ones(1)
    source.step(optimizer)
    source.update()  # a count of one
    if not lazily:
        target.scale(torch.ones(()))
    target.load_state_dict(source.state_dict())
    assert target.state_dict() == source.state_dict()
    assert (target.get_growth_factor(), target.get_backoff_factor()) == (4.0, 0.25)
    assert target.get_growth_interval() == 2
    assert target.scale(torch.ones(())).item() == 3.0
    target.step(optimizer)
    target.update()
    assert target.get_scale() == 12.0  # grown at the second good step, counted from the state


@pytest.mark.parametrize("lazily", [True, False])
def test_pickle_gradscaler(make: Make, lazily: bool) -> None:
    scaler = make(init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    if not lazily:
        scaler.scale(torch.ones(()))
    again = pickle.loads(pickle.dumps(scaler))
    assert again.is_enabled() == scaler.is_enabled()
    assert again.state_dict() == scaler.state_dict()
    assert again.scale(torch.ones(())).item() == 3.0
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


def test_grad_scaling_setters(make: Make) -> None:
    scaler = make()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (3.0, 0.25)
    assert scaler.get_growth_interval() == 7
    assert scaler.get_scale() == 65536.0


def test_grad_scaling_autocast(make: Make) -> None:
    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if skip:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if not skip:
            optimizer.step()

    stepped(make, run, control)


def test_grad_scaling_clipping(make: Make) -> None:
    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 2.0**-5 * scaler.get_scale())
        if skip:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 2.0**-5)
        if not skip:
            optimizer.step()

    stepped(make, run, control)


def test_grad_scaling_clipping_separate_unscale(make: Make) -> None:
    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if skip:
            spoil(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        if not skip:
            optimizer.step()

    stepped(make, run, control)


@pytest.mark.filterwarnings("ignore:.*create_graph=True.*")
def test_grad_scaling_penalty(make: Make) -> None:
    def penalised(model: Any, loss: torch.Tensor, scaled: torch.Tensor, inverse: float) -> torch.Tensor:
        grads = torch.autograd.grad(scaled, model.parameters(), create_graph=True)
        return loss + sum((g * inverse).pow(2).sum() for g in grads).sqrt()

    def run(scaler: Any, model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        loss = nn.functional.mse_loss(model(x), y)
        loss = penalised(model, loss, scaler.scale(loss), 1 / scaler.get_scale())
        scaler.scale(loss).backward()
        if skip:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    def control(model: Any, optimizer: Any, x: Any, y: Any, skip: bool) -> None:
        loss = nn.functional.mse_loss(model(x), y)
        penalised(model, loss, loss, 1.0).backward()
        if not skip:
            optimizer.step()

    stepped(make, run, control)


def test_grad_scaling_accumulation(make: Make) -> None:
    scaler = make(init_scale=128.0, growth_interval=1)
    (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
    for i, (x, y) in enumerate(batches(6)):
        scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
        if i % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    assert scaler.get_scale() == 128.0 * 2.0**3
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("skipped", [0, 1])
def test_grad_scaling_multiple(make: Make, skipped: int) -> None:
    """Two models, two losses that mix them, two optimizers: an overflow skips its own optimizer only."""

    def train(scaler: Any) -> list[torch.Tensor]:
        models, optimizers = zip(model_and_optimizer(0), model_and_optimizer(1, lr=0.5))
        for i, (x, y) in enumerate(batches()):
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = [model(x) for model in models]
            losses = [nn.functional.mse_loss(0.3 * out[0] + 0.7 * out[1], y)]
            losses.append(nn.functional.mse_loss(0.6 * out[0] - 0.4 * out[1], y))
            for loss in losses if scaler is None else scaler.scale(losses):
                loss.backward(retain_graph=True)
            if scaler is not None:
                if i == 2:
                    spoil(models[skipped])
                scaler.unscale_(optimizers[0])
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            else:
                for j, optimizer in enumerate(optimizers):
                    if i != 2 or j != skipped:
                        optimizer.step()
        return [p.detach() for model in models for p in model.parameters()]

    scaler = make(init_scale=128.0, growth_interval=1)
    for p, q in zip(train(scaler), train(None)):
        assert torch.equal(p, q)
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_grad_scaling_fused_optimizers(make: Make, kind: Any, unscale_first: bool) -> None:
    scaler = make(init_scale=128.0, growth_interval=1)
    model, _ = model_and_optimizer()
    plain, _ = model_and_optimizer()
    optimizer, plain_optimizer = (kind(m.parameters(), lr=0.25, fused=True) for m in (model, plain))
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if i == 2:
            spoil(model)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.zero_grad()
        plain_step(plain, plain_optimizer, x, y, skip=i == 2)
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_grad_scaler_pass_itself(make: Make) -> None:
    class Asks(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            grad_scaler.unscale_(self)
            super().step(closure)

    weight = nn.Parameter(torch.zeros(1))
    optimizer = Asks([weight], lr=1.0)
    scaler = make(init_scale=4.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.tensor([-1.0]))
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("fused", [True, False])
def test_params_invalidated_with_grads_invalidated_between_unscale_and_step(make: Make, fused: bool) -> None:
    # gradients are looked at once: what is done to them after unscale_ is the caller's
    model, _ = model_and_optimizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, fused=fused)
    scaler = make(init_scale=128.0)
    x, y = batches(1)[0]
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert all(p.isnan().all() for p in model.parameters())


def test_step_gives_what_the_optimizer_gives(make: Make) -> None:
    class Tells(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return args, kwargs

    weight = nn.Parameter(torch.zeros(1))
    optimizer, scaler = Tells([weight]), make(init_scale=4.0)
    for gradient, expected in ((1.0, ((3,), {"b": 4})), (math.inf, None)):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([gradient])
        assert scaler.step(optimizer, 3, b=4) == expected
        scaler.update()


def test_a_disabled_scaler_does_nothing(make: Make) -> None:
    scaler = make(enabled=False)
    loss, (_, optimizer) = torch.ones(()), model_and_optimizer()
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"anything": 1})
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.update(3.0)
    assert scaler.step(optimizer, closure=lambda: 5.0) == 5.0
    assert pickle.loads(pickle.dumps(scaler)).scale(loss) is loss


# --- the same mistakes, the same messages ---


def ready(make: Make) -> tuple[Any, nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    return scaler, weight, optimizer


def test_stepping_twice_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    scaler.step(optimizer)
    with pytest.raises(REFUSED, match=r"step\(\) has already been called since the last update\(\)"):
        scaler.step(optimizer)


def test_unscaling_twice_is_refused(make: Make) -> None:
    scaler, weight, optimizer = ready(make)
    scaler.unscale_(optimizer)
    message = r"unscale_\(\) has already been called on this optimizer since the last update\(\)"
    with pytest.raises(REFUSED, match=message):
        scaler.unscale_(optimizer)
    assert torch.equal(weight.grad, torch.ones(2))


def test_unscaling_after_the_step_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    scaler.step(optimizer)
    with pytest.raises(REFUSED, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("verb", ["step", "unscale_", "update"])
def test_a_verb_before_any_scale_is_refused(make: Make, verb: str) -> None:
    _, optimizer = model_and_optimizer()
    scaler = make()
    fix = r"This may indicate your script did not use scaler\.scale\(loss or outputs\) earlier"
    with pytest.raises(REFUSED, match=rf"Attempted {verb} but .*{fix}"):
        getattr(scaler, verb)(*([] if verb == "update" else [optimizer]))


def test_update_before_any_step_is_refused(make: Make) -> None:
    scaler, _, _ = ready(make)
    with pytest.raises(REFUSED, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_a_step_without_any_gradient_is_refused(make: Make) -> None:
    scaler, weight, optimizer = ready(make)
    weight.grad = None
    with pytest.raises(REFUSED, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_gradients_that_came_after_unscaling_are_not_stepped_with(fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = ours(init_scale=8.0)
    loss = scaler.scale(weight.sum())
    scaler.unscale_(optimizer)
    loss.backward()
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        scaler.clip_(optimizer, 1.0)
    assert weight.item() == 0.0


def test_a_fused_step_without_any_gradient_does_nothing(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = make()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_a_closure_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    message = "Closure use is not currently supported if GradScaler is enabled"
    with pytest.raises(REFUSED, match=message):
        scaler.step(optimizer, closure=lambda: torch.zeros(()))


def test_a_closure_by_position_is_refused_too() -> None:
    scaler, weight, optimizer = ready(ours)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: torch.zeros(()))
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_float16_gradients_are_refused(make: Make) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = make(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)
    assert torch.equal(weight.grad, torch.full((2,), 4.0, dtype=torch.float16))


@pytest.mark.parametrize("outputs", [3.0, None, [3.0]], ids=str)
def test_scaling_what_is_no_tensor_is_refused(make: Make, outputs: Any) -> None:
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        make().scale(outputs)


def test_pickling_in_the_middle_of_an_iteration_is_refused(make: Make) -> None:
    scaler, _, optimizer = ready(make)
    scaler.step(optimizer)
    with pytest.raises(REFUSED, match=r"pickled at the beginning of an iteration, or at the end after"):
        pickle.dumps(scaler)


def test_an_empty_state_is_refused(make: Make) -> None:
    with pytest.raises(RuntimeError, match="The source state dict is empty, possibly because it was saved"):
        make().load_state_dict({})


@pytest.mark.parametrize("new", [torch.ones(2), torch.ones(1, requires_grad=True)], ids=["two", "grad"])
def test_a_new_scale_that_is_no_number_is_refused(make: Make, new: torch.Tensor) -> None:
    scaler, _, _ = ready(make)
    message = r"new_scale should be a float or a 1-element torch\.(cuda\.)?FloatTensor"
    with pytest.raises(REFUSED, match=message):
        scaler.update(new)


@pytest.mark.parametrize("params", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_factors_of_one_are_refused(make: Make, params: dict[str, float]) -> None:
    with pytest.raises(REFUSED, match=r"growth.?factor.* 1|backoff.?factor.* 1"):
        make(**params)


# --- ours: any rule ---


def gradients(scaler: Any, weight: nn.Parameter, optimizer: Any, *values: float) -> list[float]:
    """Step with each of these gradients, and give the scale before each step and after the last."""
    scales = [scaler.get_scale()]
    for value in values:
        scaler.scale(torch.ones(()))
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("trace", [t for t in TRACES if t["note"].startswith(("mixed", "random, p"))])
def test_the_scaler_walks_through_the_traces_of_every_system(trace: dict[str, Any], fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = GradScaler(trace["system"], **trace["params"])
    values = [math.nan if overflow else 0.0 for overflow in trace["overflow"]]
    if trace["scale_after"] == "error":
        with pytest.raises(FloatingPointError):
            gradients(scaler, weight, optimizer, *values)
        assert scaler.get_scale() == trace["scale_before"][-1]
    else:
        found = gradients(scaler, weight, optimizer, *values)
        assert found == [*trace["scale_before"], trace["scale_after"]]


def test_a_scaler_takes_a_rule_a_name_or_a_number() -> None:
    rule = loss_rule("fairseq", tolerance=0.25)
    assert GradScaler(rule).rule is rule
    assert GradScaler("fairseq", tolerance=0.25).rule == rule
    assert GradScaler(64).rule == loss_rule("static", scale=64.0)
    assert GradScaler("cuda", init_scale=2.0).rule == GradScaler(device="cuda", init_scale=2.0).rule
    assert GradScaler().rule == loss_rule("torch")


@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cpu"), torch.device("cuda", 0)], ids=str)
def test_a_device_in_the_place_of_the_rule_means_torchs_rule(device: Any) -> None:
    assert GradScaler(device, init_scale=2.0).rule == loss_rule("torch", init_scale=2.0)
    assert isinstance(GradScaler(device, enabled=False), NoScaler)


@pytest.mark.parametrize("scaler", [GradScaler("off"), GradScaler("none"), GradScaler(loss_rule("off"))])
def test_off_is_a_value(scaler: GradScaler) -> None:
    assert isinstance(scaler, NoScaler)
    assert not scaler.is_enabled()


def counting(base: Any) -> Any:
    class Counting(base):  # as users write one: it passes on what it is given, and adds to a method
        def __init__(self, owner: str, growth: float, **params: Any) -> None:
            super().__init__("cpu", growth_factor=growth, **params)
            self.owner, self.steps = owner, 0

        def step(self, optimizer: torch.optim.Optimizer) -> Any:
            self.steps += 1
            return super().step(optimizer)

    Counting.__qualname__ = f"{base.__module__.partition('.')[0]}_counting"
    return Counting


torch_counting, ada_loss_counting = counting(torch.amp.GradScaler), counting(GradScaler)  # pickle finds them here
COUNTING = pytest.mark.parametrize("counting", [torch_counting, ada_loss_counting], ids=["torch", "ours"])


@COUNTING
def test_a_disabled_scaler_of_a_subclass_does_nothing_but_what_that_adds(counting: Any) -> None:
    model, optimizer = model_and_optimizer()
    scaler = counting("me", 2.0, enabled=False)
    assert isinstance(scaler, counting)
    loss = model(torch.ones(1, 8)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    spoil(model)
    expected = model[1].weight - model[1].weight.grad
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer)  # without update() between
    scaler.update()
    assert torch.equal(model[1].weight, expected)  # nothing is checked, and nothing skipped
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    for again in (scaler, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert isinstance(again, counting)
        assert (again.owner, again.steps, again.is_enabled()) == ("me", 2, False)


@COUNTING
def test_an_enabled_scaler_of_a_subclass_scales(counting: Any) -> None:
    scaler = counting("me", 4.0, init_scale=8.0)
    assert (scaler.is_enabled(), scaler.get_growth_factor()) == (True, 4.0)
    assert scaler.scale(torch.ones(())).item() == 8.0
    assert counting("me", 4.0).is_enabled()  # and another that is disabled changes nothing of it


@pytest.mark.parametrize("rule", ["off", loss_rule("off")], ids=["name", "rule"])
def test_off_is_a_value_for_a_subclass_that_chooses_it_by_itself(rule: Any) -> None:
    class Mine(GradScaler):
        def __init__(self) -> None:
            super().__init__(rule)

    assert isinstance(Mine(), Mine)
    assert isinstance(Mine(), NoScaler)
    assert not Mine().is_enabled()


def test_a_scaler_that_is_off_keeps_its_class() -> None:
    class Mine(NoScaler):
        pass

    assert type(GradScaler("off")) is GradScaler
    assert type(ada_loss_counting("me", 2.0, enabled=False)) is ada_loss_counting
    assert not isinstance(GradScaler("torch"), NoScaler)
    assert not isinstance(torchs(enabled=False), NoScaler)
    assert isinstance(Mine(), Mine)
    assert isinstance(Mine(), NoScaler)
    assert not isinstance(NoScaler(), Mine)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_verb_that_a_subclass_overrides_is_seen_by_the_others(enabled: bool) -> None:
    class Watched(GradScaler):
        def __init__(self, **params: Any) -> None:
            super().__init__("nnabla", max_gradient_norm=1.0, **params)
            self.seen: list[str] = []

        def scale(self, outputs: Any) -> Any:
            self.seen.append("scale")
            return super().scale(outputs)

        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.append("unscale_")
            super().unscale_(optimizer)

        def clip_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
            self.seen.append("clip_")
            super().clip_(optimizer, max_norm)

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = Watched(enabled=enabled)
    scaler([weight.sum()])[0].backward()
    scaler.step(optimizer)
    # one that is off passes a nest on as it is, and unscales nothing
    assert scaler.seen == (["scale", "scale", "unscale_", "clip_"] if enabled else ["scale", "clip_"])


def test_calling_a_scaler_scales() -> None:
    weight = nn.Parameter(torch.zeros(2))
    GradScaler(8.0)(weight.sum()).backward()
    assert torch.equal(weight.grad, torch.full((2,), 8.0))


def test_a_scale_that_left_float32_overflows_and_comes_back() -> None:
    # NNabla keeps a Python float and has no ceiling
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("nnabla", scale=2.0**128)
    scaler(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127
    optimizer.zero_grad()
    scaler(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.item() == -1.0


def test_mappings_and_named_tuples_keep_their_kind() -> None:
    Pair = namedtuple("Pair", "first second")
    one = torch.ones(())
    scaled = GradScaler(2.0).scale({"a": one, "b": Pair(one, [one])})
    assert scaled["a"].item() == 2.0
    assert isinstance(scaled["b"], Pair)
    assert scaled["b"].second[0].item() == 2.0


def test_a_sparse_gradient_overflows_where_its_sum_does() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("nnabla", scale=1.0)
    scaler.scale(torch.ones(()))
    weight.grad = sparse([3e38, 0.0, 3e38])  # finite values of one index
    scaler.step(optimizer)
    assert scaler.overflowed(optimizer)
    assert torch.equal(weight.detach(), torch.zeros(2, 3))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("system", [s for s in SYSTEMS if s not in ("off", "none", "static")])
def test_no_gradient_that_is_not_finite_changes_a_parameter(system: str, fused: bool, value: float) -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, fused=fused)
    scaler = GradScaler(system, **({"loss_scale": 2.0} if system == "jmp" else {}))
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    model[0].bias.grad[3] = value
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_static_scale_skips_only_if_told_to(fused: bool) -> None:
    for skip in (False, True):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = GradScaler("static", scale=8.0, skip_overflow=skip)
        assert gradients(scaler, weight, optimizer, 16.0, math.inf) == [8.0] * 3
        assert weight.item() == (-2.0 if skip else -math.inf)


def test_gradients_that_are_all_zero_are_good_gradients() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("torch", init_scale=2.0, growth_interval=1)
    assert gradients(scaler, weight, optimizer, 0.0, -0.0) == [2.0, 4.0, 8.0]
    assert weight.item() == 1.0


def test_missing_gradients_frozen_parameters_and_shared_weights_are_left_in_peace() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.frozen.requires_grad_(False)
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.used.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.frozen(self.tied(self.used(x))), self.unused(x)

    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    optimizer, plain_optimizer = (torch.optim.SGD(n.parameters(), lr=1.0) for n in (net, plain))
    scaler = GradScaler("nnabla", scale=64.0)
    out, _ = net(torch.ones(2, 4))
    scaler(out.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    plain(torch.ones(2, 4))[0].sum().backward()
    plain_optimizer.step()
    assert net.unused.weight.grad is None
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), plain.parameters()))


def test_an_optimizer_without_gradients_does_not_stop_the_others() -> None:
    (model, optimizer), (_, idle_optimizer) = model_and_optimizer(), model_and_optimizer()
    scaler = GradScaler("torch", init_scale=2.0, growth_interval=1)
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="No inf checks were recorded for this optimizer"):
        scaler.step(idle_optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_graph_may_be_used_again_after_the_scale_has_changed() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)
    scaler = GradScaler("torch", init_scale=2.0, growth_interval=1)
    for _ in range(3):
        loss = scaler.scale((weight * 3).sum())
        loss.backward(retain_graph=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss.backward()
        optimizer.zero_grad()
    assert scaler.get_scale() == 16.0


def test_log_max_sees_the_largest_unscaled_gradient_of_all_optimizers() -> None:
    for fused in (True, False):
        weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2))]
        first = torch.optim.SGD(weights[:2], lr=0.0, fused=fused)
        second = torch.optim.SGD(weights[2:], lr=0.0)
        scaler, rule = GradScaler("logmax"), loss_rule("logmax")
        for largest in (2.0**3, 0.5, 2.0**-7, math.nan, 0.0):
            scaler.scale(torch.ones(()))
            scale = scaler.get_scale()
            weights[0].grad = torch.tensor([0.0, -largest, largest / 2]) * scale
            weights[1].grad = torch.zeros(0)
            weights[2].grad = torch.full((2,), 4 * largest) * scale
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            rule = rule.adjust(not math.isnan(largest), 4 * largest)
            assert scaler.get_scale() == rule.scale


# --- ours: clipping ---


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_max_gradient_norm_clips_as_torchs_clipping_does(limit: float, fused: bool) -> None:
    (model, _), (plain, _) = model_and_optimizer(), model_and_optimizer()
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), 0.5, fused=fused) for m in (model, plain))
    scaler = GradScaler("cerebras", max_gradient_norm=limit)
    for x, y in batches():
        optimizer.zero_grad()
        scaler(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), limit)
        plain_optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_the_clipping_coefficient_is_that_of_the_specification() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2, 3))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = GradScaler(8.0, max_gradient_norm=2.0)
    scaler.scale(torch.ones(()))
    weights[0].grad = torch.tensor([8.0 * 6.0])
    weights[1].grad = sparse([8.0 * 5.0, 0.0, 8.0 * 3.0])  # one value of 8: the norm is 10
    scaler.step(optimizer)
    coefficient = torch.tensor(2.0) / (torch.tensor(10.0) + 1e-6)
    assert torch.equal(weights[0].detach(), -6.0 * coefficient.reshape(1))
    assert torch.equal(weights[1].detach()[0, 2], -8.0 * coefficient)


def test_a_norm_that_overflows_is_an_overflow() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cerebras", initial_loss_scale=4.0, max_gradient_norm=1.0)
    assert gradients(scaler, weight, optimizer, 3e38) == [4.0, 2.0]  # 3e38 is finite, its square is not
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_clipping_before_unscaling_is_refused() -> None:
    scaler, _, optimizer = ready(ours)
    with pytest.raises(RuntimeError, match=r"clip_\(\).*not unscaled.*Call unscale_\(optimizer\) first"):
        scaler.clip_(optimizer, 1.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf, "1"])
def test_an_impossible_norm_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"max_gradient_norm.*must be a finite number above 0.*Leave it out"):
        GradScaler("torch", max_gradient_norm=limit)


def test_a_disabled_scaler_still_clips() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([4.0])
    GradScaler(enabled=False, max_gradient_norm=1.0).step(optimizer)
    assert torch.equal(weight.detach(), -4.0 * (torch.ones(1) / (torch.tensor([4.0]) + 1e-6)))


# --- ours: state ---


def unlike_the_default(rule: LossRule) -> LossRule:
    """The rule with every field at another value than its default's."""
    special = {"min_loss_scale": 2.0**-3, "max_loss_scale": 2.0**20, "scale_min": 2.0, "min_scale": 0.5}
    special |= {"initial_loss_scale": 2.0**9, "threshold": 0.25, "loss_scale_max": 2.0**12}
    special |= {"multiplier": 2.0} if rule.system == "cerebras_tf" else {}
    changed: dict[str, Any] = {}
    for f in fields(rule):
        value = getattr(rule, f.name)
        if f.name in special:
            changed[f.name] = special[f.name]
        elif isinstance(value, bool):
            changed[f.name] = not value
        elif isinstance(value, int):
            changed[f.name] = value + 3
        else:
            changed[f.name] = value * 0.875 if 0 < value < 1 or f.name == "scale" else value + 2.5
    return replace(rule, **changed)


@pytest.mark.parametrize("lazily", [True, False])
@pytest.mark.parametrize("system", [s for s in SYSTEMS if s not in ("off", "none")])
def test_a_state_brings_back_every_field(system: str, lazily: bool) -> None:
    required = {"static": {"scale": 8.0}, "jmp": {"loss_scale": 16.0}}.get(system, {})
    rule = unlike_the_default(loss_rule(system, **required))
    default = loss_rule(system, **required)
    same = [f.name for f in fields(rule) if getattr(rule, f.name) == getattr(default, f.name)]
    assert same == (["multiplier"] if system == "cerebras_tf" else [])  # which can only be 2
    source, target = GradScaler(rule, max_gradient_norm=3.0), GradScaler(system, **required)
    if not lazily:
        target.scale(torch.ones(()))
    target.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert target.rule == rule
    assert target.max_gradient_norm == 3.0
    assert target.scale(torch.ones(())).item() == torch.tensor(rule.scale).item()
    assert pickle.loads(pickle.dumps(source)).state_dict() == source.state_dict()


def test_states_pass_between_torchs_class_and_ours() -> None:
    theirs = torchs(init_scale=3.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gradients(theirs, weight, optimizer, 1.0, 1.0)
    here = ours()
    here.load_state_dict(theirs.state_dict())
    back = torchs()
    back.load_state_dict(here.state_dict())
    assert back.state_dict() == theirs.state_dict()
    factors = {"growth_factor": 4.0, "backoff_factor": 0.25}
    assert here.rule == loss_rule("torch", scale=3.0, good=2, growth_interval=5, **factors)


@pytest.mark.parametrize("system", ["torch", "nnabla", "apex", "apex_hysteresis", "keras"])  # without a floor
def test_a_scale_that_fell_to_zero_can_be_saved_and_set_right(system: str) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fallen = GradScaler(system)
    gradients(fallen, weight, optimizer, *[math.nan] * 1100)  # 2**-1074 is the smallest float
    assert fallen.get_scale() == 0.0
    scaler = GradScaler(system)
    scaler.load_state_dict(fallen.state_dict())
    assert scaler.rule == fallen.rule
    if system == "torch":
        theirs = torchs()
        theirs.load_state_dict(scaler.state_dict())
        scaler.load_state_dict(theirs.state_dict())
        scaler.set_growth_factor(4.0)
        assert (scaler.get_growth_factor(), scaler.get_scale()) == (4.0, 0.0)
    scaler.load_state_dict(GradScaler(system).state_dict())
    assert scaler.rule == GradScaler(system).rule


def test_a_state_of_another_rule_is_refused() -> None:
    message = r"state is of the rule 'nnabla', and this scaler goes by 'fairseq'.*Make one, GradScaler\('nn"
    scaler = GradScaler("fairseq")
    with pytest.raises(RuntimeError, match=message):
        scaler.load_state_dict(GradScaler("nnabla").state_dict())
    with pytest.raises(RuntimeError, match="this scaler goes by 'fairseq'"):
        scaler.load_state_dict(torchs().state_dict())
    assert scaler.rule == loss_rule("fairseq")


@pytest.mark.parametrize("spoilt", ["missing", "unknown", "impossible", "no number"])
def test_a_spoilt_state_is_refused_and_changes_nothing(spoilt: str) -> None:
    scaler = GradScaler("nnabla")
    state = GradScaler("nnabla", scale=2.0).state_dict()
    if spoilt == "missing":
        del state["N"]
    elif spoilt == "no number":
        state["scale"] = math.nan
    else:
        state["M" if spoilt == "unknown" else "N"] = 0
    with pytest.raises((RuntimeError, ValueError), match=r"'N'|'M'|N=0|scale=nan"):
        scaler.load_state_dict(state)
    assert scaler.rule == loss_rule("nnabla")


def test_a_crash_in_the_middle_of_a_step_leaves_a_state_that_can_be_loaded() -> None:
    class Crashes(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            raise MemoryError

    for fused in (False, True):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = Crashes([weight], lr=1.0)
        optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        scaler = GradScaler("torch", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        assert not hasattr(optimizer, "found_inf")
        for again in (GradScaler("torch"), scaler):
            again.load_state_dict(scaler.state_dict())
            assert again.get_scale() == 4.0
            weight.grad = None
            again.scale(weight.sum()).backward()
            again.unscale_(optimizer)  # and not: has already been called
            assert torch.equal(weight.grad, torch.ones(1))


def test_a_scaler_whose_system_stops_can_be_saved_and_goes_on() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("deepspeed", init_scale=1.0)
    with pytest.raises(FloatingPointError, match="'deepspeed' stops"):
        gradients(scaler, weight, optimizer, math.inf)
    assert scaler.state_dict()["scale"] == 1.0
    assert gradients(scaler, weight, optimizer, 3.0) == [1.0, 1.0]
    assert weight.item() == -3.0


# --- ours: parameters of the rule ---


def test_a_rule_is_asked_for_its_own_parameters_only() -> None:
    assert GradScaler("megatron").get_growth_interval() == 1000
    with pytest.raises(AttributeError, match=r"'nnabla' has no 'growth_factor'.*scaling_factor.*Read"):
        GradScaler("nnabla").get_growth_factor()
    with pytest.raises(AttributeError, match="'keras' has no 'growth_interval'"):
        GradScaler("keras").set_growth_interval(3)


def test_setting_an_impossible_parameter_is_refused() -> None:
    scaler = GradScaler("torch")
    with pytest.raises(ValueError, match=r"growth_factor=0\.5"):
        scaler.set_growth_factor(0.5)
    assert scaler.get_growth_factor() == 2.0


@pytest.mark.parametrize("new", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_new_scale_is_refused(new: float) -> None:
    scaler, _, _ = ready(ours)
    with pytest.raises(ValueError, match="scale"):
        scaler.update(new)
    assert scaler.get_scale() == 4.0


def test_parameters_beside_a_rule_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Parameters came beside the rule.*init_scale.*Give the name"):
        GradScaler(loss_rule("torch"), init_scale=3.0)


# --- ours: what is copied to the host ---


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every copy of a number to the host, by the method that made it."""
    copies: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, original: Any = original, name: str = name) -> Any:
            copies.append(name)
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return copies


def one_iteration(scaler: Any, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["params"][0].grad = gradient
    scaler.step(optimizer)
    scaler.update()


def test_torchs_rule_on_a_fused_optimizer_copies_nothing_to_the_host(host_copies: list[str]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = GradScaler("torch", init_scale=4.0, growth_interval=1)
    scaled = []
    for value in (8.0, math.inf, 8.0):
        scaled.append(scaler.scale(torch.ones(())))
        one_iteration(scaler, optimizer, torch.full((3,), value))
    assert host_copies == []
    assert [s.item() for s in scaled] == [4.0, 8.0, 4.0]
    assert torch.equal(weight.detach(), torch.full((3,), -8.0 / 4 - 8.0 / 4))
    assert scaler.rule == loss_rule("torch", init_scale=4.0, growth_interval=1, scale=8.0)


@pytest.mark.parametrize("system", ["nnabla", "torch", "cerebras"])
def test_a_plain_optimizer_costs_one_copy_a_step(host_copies: list[str], system: str) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler(system, max_gradient_norm=1.0)
    one_iteration(scaler, optimizer, torch.ones(3))
    assert host_copies == ["item"]


def test_a_static_scale_costs_no_copy(host_copies: list[str]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    one_iteration(GradScaler(4.0), torch.optim.SGD([weight], lr=1.0), torch.ones(3))
    assert host_copies == []


def test_device_and_host_adjust_torchs_rule_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    oks = (torch.rand(300, generator=generator) > 0.2).tolist()
    rule = loss_rule("torch", init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)
    for fused in (True, False):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = GradScaler(rule)
        values = [0.0 if ok else math.nan for ok in oks]
        assert gradients(scaler, weight, optimizer, *values) == trajectory(rule, oks)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_on_the_gpu_does_not_wait_for_it(kind: Any) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("torch", growth_interval=1, init_scale=4.0)
    x = torch.ones(2, 8, device="cuda")
    for synced in (False, True):  # the first step makes buffers
        torch.cuda.set_sync_debug_mode("error" if synced else "default")
        try:
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 16.0
