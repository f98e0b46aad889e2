"""What native scaling cannot make right is an error or a warning in words, and what looks like it passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ada_loss
from ada_loss.layerwise.native import NativeScaling
from ada_loss.layerwise.native_hooks import NativePass
from ada_loss.rules.layer import Fixed


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def scaling(model: nn.Module) -> NativePass:
    """A power of two at each product, in float32, so that gradients are those of a plain pass bit for bit."""
    found = NativePass({id(p): name for name, p in model.named_parameters()}, lambda factor, came, log2: 3)
    found.checks.parameters = model.parameters
    return found


def assert_same(model: nn.Module, loss: Callable[[], Tensor], scale: Callable[[Tensor], Tensor]) -> None:
    model.zero_grad()
    loss().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scale(loss()).backward()
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(model.parameters(), plain, strict=True))


class Inner(torch.autograd.Function):
    """Computes a module's gradients in its own backward: by a backward pass, or by torch.autograd.grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, writes: bool, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.writes = module, writes
        return module(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        if ctx.writes:
            torch.autograd.backward(y, dy)
            return x.grad, None, None
        dx, *rest = torch.autograd.grad(y, [x, *ctx.module.parameters()], dy)
        return dx, None, None, *rest


@pytest.mark.parametrize("shared", ["alone", "in the graph too, before", "in the graph too, after"])
def test_a_backward_pass_within_a_function_that_writes_gradients_of_parameters_is_refused(shared: str) -> None:
    model = layers()

    def loss() -> Tensor:
        x = model[0](inputs())
        x = model[1](x) if "before" in shared else x
        y = Inner.apply(x, model[1], True)
        y = model[1](y) if "after" in shared else y
        return model[2](y).square().mean()

    ours = scaling(model)
    with pytest.raises(NotImplementedError, match=r"gradient of 1\.(weight|bias) was written .* in InnerBackward"):
        ours.scale(loss()).backward()
    with pytest.raises(NotImplementedError, match="was written"):  # again, not in the first pass alone
        ours.scale(loss()).backward()
    loss().backward()  # is fine unscaled


def test_a_function_that_returns_the_gradients_of_its_parameters_is_taken() -> None:
    model = layers()
    ours = scaling(model)

    def loss() -> Tensor:
        y = Inner.apply(model[0](inputs()), model[1], False, *model[1].parameters())
        return model[2](y).square().mean()

    for _ in range(2):
        assert_same(model, loss, ours.scale)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


def test_functions_are_looked_at_until_they_ran_once() -> None:
    model = layers()
    ours = scaling(model)

    def loss() -> Tensor:
        return model[2](Doubled.apply(model[1](Doubled.apply(model[0](inputs()))))).square().mean()

    for _ in range(3):
        assert_same(model, loss, ours.scale)
    assert ours.checks._seen == {("DoubledBackward", 1), ("DoubledBackward", 2)}


def at_once(a: Tensor, b: Tensor) -> None:
    torch.autograd.backward([a, b])


@pytest.mark.parametrize(
    "together",
    [
        lambda a, b: (a + b).backward(),
        lambda a, b: (b + a / 2).backward(),
        lambda a, b: torch.stack([b * 2, a]).sum().backward(),
        at_once,
        lambda a, b: torch.autograd.grad([b, a], [*b.model.parameters()]),
    ],
    ids=["sum", "quotient", "stack", "at once", "grad"],
)
def test_an_unscaled_loss_beside_a_scaled_one_is_refused(together: Callable[[Any, Any], Any]) -> None:
    model = layers()
    h = model[1](model[0](inputs()))
    a, b = model[2](h).square().mean(), h.abs().mean()
    b.model = model
    with pytest.raises(RuntimeError, match=r"not scaled .* Expected: the scale of the sum"):
        together(scaling(model).scale(a), b)


def test_losses_that_meet_a_scaled_one_in_parameters_or_nowhere_are_taken() -> None:
    model, other = layers(), layers(1)
    ours = scaling(model)

    def data() -> Tensor:
        return model(inputs()).square().mean()

    def decay() -> Tensor:
        return 1e-2 * sum(p.square().sum() for p in model.parameters())

    for combine in (
        lambda scale: scale(data()) / 4,
        lambda scale: scale(data()) + decay(),
        lambda scale: scale(data()) + other(inputs()).sum(),
        lambda scale: scale(data() + model[0](inputs()).sum()),
    ):
        model.zero_grad()
        combine(lambda loss: loss).backward()
        plain = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        combine(ours.scale).backward()
        for p, wanted in zip(model.parameters(), plain, strict=True):
            assert torch.equal(p.grad, wanted)
    model.zero_grad()
    torch.autograd.backward([ours.scale(data()), decay()])
    ours_of = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.autograd.backward([data(), decay()])
    # two parts of a parameter's gradient, in an order that torch chooses: addition commutes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), ours_of, strict=True))


def test_a_hidden_gradient_is_told_of_once_and_divided_on_request() -> None:
    model = layers()
    found: list[Tensor] = []
    with torch.autocast("cpu", torch.float16):
        h = model[1](model[0](inputs()))
        loss = model[2](h).float().square().mean()
    (true,) = torch.autograd.grad(loss, [h], retain_graph=True)
    native = NativeScaling(model, Fixed(2.0**4))
    h.retain_grad()
    handle = h.register_hook(lambda g: found.append(native.true_grad(h, g)))
    with pytest.raises(ValueError, match="brought no gradient"):
        native.true_grad(h, true)
    native.scale(loss).backward(retain_graph=True)
    handle.remove()
    assert torch.equal(h.grad, true * 2.0**8)  # of the last product, and the cast behind it
    assert torch.equal(found[0], true.float())
    assert torch.equal(native.true_grad(h, h.grad), true.float())
    weight = model[0].weight
    assert torch.equal(native.true_grad(weight, weight.grad), weight.grad)

    def hidden() -> None:
        (g,) = torch.autograd.grad(native.scale(loss), [h], retain_graph=True)
        assert torch.equal(native.true_grad(h, g), true.float())

    with pytest.warns(UserWarning, match="gradient of a hidden tensor"):
        hidden()
    hidden()  # said once; a second warning would be an error
    native.scale(loss).backward(inputs=[weight], retain_graph=True)  # not hidden, no warning
    with pytest.raises(ValueError, match="brought no gradient"):
        native.true_grad(model(inputs()), true)


def test_backward_hooks_of_modules_are_told_of_once() -> None:
    model = layers()
    model[1].register_full_backward_hook(lambda module, into, out: None)
    ours = scaling(model)

    def loss() -> Tensor:
        return model(inputs()).square().mean()

    with pytest.warns(UserWarning, match="full backward hook"):
        assert_same(model, loss, ours.scale)
    assert_same(model, loss, ours.scale)  # said once; a second warning would be an error


class WithAuxiliary(torch.autograd.Function):
    """Passes activations on and gives an auxiliary loss the gradient 1, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones((), dtype=dy.dtype)


def test_a_function_that_may_bring_a_constant_gradient_is_told_of() -> None:
    model = layers()
    ours = scaling(model)
    h = model[1](model[0](inputs()))
    with pytest.warns(UserWarning, match=r"WithAuxiliaryBackward .* scaler\.scale\(loss \+ auxiliary\)"):
        ours.scale(model[2](WithAuxiliary.apply(h, h.square().mean())).square().mean()).backward()


def test_two_models_in_two_threads_have_their_own_passes() -> None:
    # both passes are at work at once: each waits for the other in a hook
    found: dict[int, bool] = {}
    refused: list[str] = []
    meet = threading.Barrier(2, timeout=20)

    def wait(gradient: Tensor) -> None:
        meet.wait()

    def train(nr: int) -> None:
        torch.manual_seed(nr)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        ours = scaling(model)

        def loss() -> Tensor:
            return model(inputs()).square().mean()

        plain = torch.autograd.grad(loss(), [*model.parameters()])
        handle = model[2].weight.register_hook(wait)
        ours.scale(loss()).backward()
        found[nr] = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
        handle.remove()
        # the second scaled loss of a pass begins after another thread's has begun
        h = model[0](inputs())
        one, two = ours.scale(h.square().mean()), ours.scale((h * 2).sum())
        one.register_hook(wait)  # `two` comes first: it was made last
        try:
            (one + two).backward()
        except RuntimeError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=train, args=(nr,)) for nr in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: True, 1: True}
    assert ["Scale their sum" in words for words in refused] == [True, True]


def test_nothing_is_said_of_a_training_as_it_should_be(recwarn: pytest.WarningsRecorder) -> None:
    model = layers()
    scaler = ada_loss.GradScaler(layers=model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = model(inputs()).float().square().mean()
        (scaler.scale(loss) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not recwarn.list


def test_a_step_without_a_scaled_loss_is_told_of_once() -> None:
    model = layers()
    scaler = ada_loss.GradScaler(layers=model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(scale: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(inputs()).float().square().mean()
        scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="nothing was scaled yet"):
        step(lambda loss: loss)
    scaler = ada_loss.GradScaler(layers=model)
    step(scaler.scale)
    with pytest.warns(UserWarning, match=r"Expected: scaler\.scale\(loss\)\.backward\(\)"):
        step(lambda loss: loss)
    step(scaler.scale)
    step(lambda loss: loss)  # said once; a second warning would be an error
