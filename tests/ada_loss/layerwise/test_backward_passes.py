"""Training as it is done: accumulation, loss scaling, checkpoints, retained and double backward passes."""

from __future__ import annotations

import copy

import pytest
import torch
from layerwise_cases import RULES, Fork, assert_same, backward, gradients, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpsim
from ada_loss import AdaLossScaled, GradScaler, Recorder
from fpsim import Policy, quantize, round_to


def test_steps_are_backward_passes_not_calls_of_a_layer() -> None:
    layer = nn.Linear(8, 8)
    model = quantize(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), Policy(error="fp16"))
    with AdaLossScaled(model, update_every=2) as handle:
        handle.observer = recorder = Recorder()
        for _ in range(4):
            backward(model, torch.randn(4, 8, generator=seeded()), 1e-9)
    assert handle.step == 4
    sites = [row["site"] for row in recorder.rows() if row["step"] == 1 and row["role"] == "error"]
    assert len(sites) == len(set(sites))  # a shared layer has a place for each of its uses


def test_accumulated_gradients_add_up() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "e5m2")
    a, b = torch.randn(3, 4, generator=seeded(1)), torch.randn(3, 4, generator=seeded(2))
    with AdaLossScaled(model) as handle:
        parts = [backward(model, x, 1e-5) for x in (a, b)]
        model.zero_grad()
        for x in (a, b):
            (model(x) * torch.randn(3, 2, generator=seeded(1)) * 1e-5).sum().backward()
        assert_same(gradients(model), {name: parts[0][name] + parts[1][name] for name in parts[0]})
    assert handle.step == 4


def test_a_loss_scaler_combines_with_it() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "e5m2")
    x = torch.randn(3, 4, generator=seeded())
    with AdaLossScaled(model, rule="current"):
        alone = backward(model, x, 1e-6)
        model.zero_grad()
        scaler = GradScaler(2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.scale((model(x) * torch.randn(3, 2, generator=seeded(1)) * 1e-6).sum()).backward()
        scaler.unscale_(optimizer)
        assert_same(gradients(model), alone)  # the same mantissas at the top of the range, at every scale of the loss


def test_frozen_parameters_and_unused_outputs_need_no_gradient() -> None:
    model = Fork()
    model.small.weight.requires_grad_(False)
    model = quantize(model, "fp16")
    with AdaLossScaled(model):
        _, large = model(torch.randn(2, 4))
        large.sum().mul(1e-7).backward()
        assert model.small.weight.grad is None
        assert bool(model.first.weight.grad.any())
        model.zero_grad()
        small, _ = model(torch.randn(2, 4))
        small.sum().mul(1e-7).backward()  # through a frozen weight
        assert bool(model.first.weight.grad.any())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.use_reentrant = use_reentrant  # None for no checkpoint

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.use_reentrant is None:
            return self.last(self.block(h))
        return self.last(checkpoint(self.block, h, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    results = []
    for way in (None, use_reentrant):
        model = quantize(Checkpointed(way), "e5m2")
        with AdaLossScaled(model, rule="current"):
            results.append(backward(model, torch.randn(4, 8, generator=seeded()), 1e-6))
    assert_same(*results)  # measured scales do not depend on what is upstream, which a nested backward hides


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_makes_no_step_of_its_own_and_no_other_places(use_reentrant: bool) -> None:
    model = quantize(Checkpointed(use_reentrant), "e5m2")
    with AdaLossScaled(model, update_every=2) as handle:
        handle.observer = recorder = Recorder()
        for size in (1e-3, 1e-5, 1e-7):
            backward(model, torch.randn(4, 8, generator=seeded()), size)
    assert handle.step == 3
    rows = recorder.rows()
    sites = [[row["site"] for row in rows if row["step"] == step] for step in (1, 2, 3)]
    assert sites[0] == sites[1] == sites[2]
    assert not any("#" in site for site in sites[0])
    factors = [row["unbound"] for row in rows if row["site"] == "block.2:linear"]
    assert factors[0] == factors[1] != factors[2]  # computed again in the third step, inside the checkpoint too


def test_a_forward_pass_without_a_backward_pass_leaves_no_trace() -> None:
    # a validation that forgets torch.no_grad(), or a forward that was interrupted
    results = []
    x = torch.randn(4, 8, generator=seeded())
    for forwards in (0, 1):
        torch.manual_seed(0)
        model = quantize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "e5m2")
        with AdaLossScaled(model, rule="amax_history"):
            for _ in range(3):
                backward(model, x, 1e-6)
            for _ in range(forwards):
                model(x)
            results.append(backward(model, x, 1e-6))
    assert_same(*results)


def test_a_retained_graph_gives_the_same_again() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "e5m2")
    for rule in RULES:
        if rule == "amax_history":
            continue  # its second pass knows the first
        with AdaLossScaled(model, rule=rule):
            model.zero_grad()
            loss = (model(torch.randn(3, 4, generator=seeded())) * 1e-6).sum()
            loss.backward(retain_graph=True)
            once = gradients(model)
            model.zero_grad()
            loss.backward()
            assert_same(gradients(model), once)


def test_double_backward_goes_through_the_scaled_rounding() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), "fp16")
    x = torch.randn(3, 4, generator=seeded(), requires_grad=True)
    results = []
    for scaled in (False, True):
        model.zero_grad()
        handle = AdaLossScaled(model) if scaled else None
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        results.append(gradients(model))
        if handle is not None:
            handle.detach()
    for name in results[0]:  # nothing underflows here: the same numbers to a few units in the last place of fp16
        assert torch.allclose(results[0][name], results[1][name], rtol=2.0**-7, atol=1e-4), name


def test_a_partial_backward_leaves_no_scale_behind() -> None:
    model = quantize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "e5m2")
    x = torch.randn(3, 4, generator=seeded())
    with AdaLossScaled(model):
        expected = backward(model, x, 1e-6)
        out = model(x)
        weights = torch.randn(3, 2, generator=seeded(1))
        torch.autograd.grad((out * weights).sum() * 1e6, model[2].weight, retain_graph=True)
        model.zero_grad()
        (out * weights * 1e-6).sum().backward()
        assert_same(gradients(model), expected)


def test_transforms_of_torch_func_are_refused_with_what_to_do() -> None:
    model = quantize(nn.Linear(3, 1), "fp16")
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (torch.ones(2, 3),)).sum()

    plain = torch.func.grad(loss)(parameters)
    with AdaLossScaled(model), pytest.raises(NotImplementedError, match=r"Expected: loss\.backward\(\)"):
        torch.func.grad(loss)(parameters)
    assert_same(torch.func.grad(loss)(parameters), plain)


def test_two_models_with_two_optimizers_do_not_meet() -> None:
    # as a generator and a discriminator: one backward goes through both
    torch.manual_seed(0)
    generator = quantize(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)), "e5m2")
    discriminator = quantize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), "e5m2")
    z = torch.randn(5, 2)
    with AdaLossScaled(generator) as one, AdaLossScaled(discriminator) as two:
        (discriminator(generator(z)) * 1e-6).mean().backward()
        assert all(bool(p.grad.any()) for p in (*generator.parameters(), *discriminator.parameters()))
        (discriminator(generator(z).detach()) * 1e-6).mean().backward()
    assert (one.step, two.step) == (1, 2)


def test_a_gradient_that_was_rounded_at_a_scale_is_rounded_where_it_is_an_operand() -> None:
    model, x = quantize(nn.Linear(8, 8), "fp16"), torch.randn(4, 8, generator=seeded()).requires_grad_()
    with AdaLossScaled(model):
        (g,) = torch.autograd.grad((model(x) * 1e-7).sum(), x)
    assert not torch.equal(g, round_to(g, "fp16"))
    with fpsim.emulate("fp16"):
        y = g * 1024.0
    assert torch.equal(y, round_to(g, "fp16") * 1024.0)


def test_a_copy_of_the_model_is_not_scaled() -> None:
    model = quantize(nn.Linear(4, 4), "fp16")
    plain = backward(model, torch.ones(2, 4), 1e-9)
    with AdaLossScaled(model):
        assert_same(backward(copy.deepcopy(model), torch.ones(2, 4), 1e-9), plain)
