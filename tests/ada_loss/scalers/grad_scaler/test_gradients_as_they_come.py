"""Losses and gradients of every kind: nests, sparse, zero, missing, shared, and a graph that is used again."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from grad_scaler_cases import gradients, model_and_optimizer, sparse
from torch import nn

from ada_loss import GradScaler


def test_calling_a_scaler_scales() -> None:
    weight = nn.Parameter(torch.zeros(2))
    GradScaler(8.0)(weight.sum()).backward()
    assert torch.equal(weight.grad, torch.full((2,), 8.0))


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
