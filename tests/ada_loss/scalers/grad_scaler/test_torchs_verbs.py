"""torch's own tests of scaling, unscaling, updates and states, of both classes and by torch's names."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator

import pytest
import torch
from grad_scaler_cases import Make, model_and_optimizer, ours, sparse, torchs
from torch import nn

from ada_loss import GradScaler


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
