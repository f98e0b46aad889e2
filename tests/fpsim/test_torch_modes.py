"""What is believed of torch's stack of modes, and of what is called in the place of a module."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fpsim.torch_modes import (
    CALL_SLOT,
    SEES_BODIES,
    PlainFunction,
    after_transforms,
    body_of,
    call_inside,
    function_like,
    has_transform,
    hook_gradient,
    hook_steps,
    hooked,
    hooks_of_saved_tensors,
    is_plain,
    is_stand_in,
    is_unwatched,
    keeps_grad_mode,
    memory_behind,
    modes,
    module_called,
    plain_tensors,
    push_mode,
    set_grad_enabled,
    take_off,
    unhook_call,
    unhook_steps,
    watch_bodies,
)


class Mode(TorchFunctionMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_lie_on_torchs_own_stack() -> None:
    a, b = Mode("a"), Mode("b")
    with a:
        push_mode(b)
        assert [*modes()] == torch.overrides._get_current_function_mode_stack() == [a, b]
        torch.ones(1) + 1
        assert b.seen > 0
        take_off(b)
        assert [*modes()] == [a]
    assert [*modes()] == []


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_mode_is_taken_off_from_wherever_it_lies_and_the_others_stay_in_order(which: int) -> None:
    found = [Mode(name) for name in "abc"]
    for mode in found:
        push_mode(mode)
    push_mode(found[which])  # twice
    try:
        for _ in range(2):  # the second time does nothing
            take_off(found[which])
            assert [*modes()] == [m for i, m in enumerate(found) if i != which]
    finally:
        for mode in found:
            take_off(mode)
    assert [*modes()] == []


def test_the_slot_is_called_in_the_place_of_hooks_and_forward_and_knows_the_module() -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: seen.append("hook"))

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(module_called())
        return call_inside(module)(x)

    def ask() -> Any:
        return module_called()

    assert getattr(module, CALL_SLOT) is None
    vars(module)[CALL_SLOT] = call
    assert module(torch.ones(1, 2)).shape == (1, 2)
    assert seen == [module, "hook"]
    assert ask() is None
    for duplicate in (copy.copy(module), copy.deepcopy(nn.Linear(2, 2)), pickle.loads(pickle.dumps(nn.Linear(2, 2)))):
        assert getattr(duplicate, CALL_SLOT) is None
    assert CALL_SLOT not in module.__getstate__()
    other = nn.Linear(2, 2)
    other.__dict__.update(vars(module))  # a replica
    other(torch.ones(1, 2))
    assert seen[2] is other


def test_a_hook_that_is_interrupted_while_it_is_put_on_a_parameter_is_not_there() -> None:
    class Interrupted(list[Any]):
        def append(self, value: Any) -> None:
            super().append(value)
            raise KeyboardInterrupt

    x, handles = torch.ones(1, requires_grad=True), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        hooked(x, print, handles)
    assert not x._backward_hooks
    assert handles == []
    whole: list[Any] = []
    hooked(x, print, whole)
    assert len(x._backward_hooks or {}) == len(whole) == 1
    whole[0].remove()
    assert not x._backward_hooks


def test_gradients_are_on_again_after_a_block_of_plain_tensors_whatever_it_was_in() -> None:
    def interrupted() -> None:
        with plain_tensors():
            set_grad_enabled(False)
            assert not torch.ones(1).is_inference()
            assert not torch.is_grad_enabled()
            raise KeyboardInterrupt

    for outer in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with outer():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_what_raises_leaves_the_mode_of_gradients_as_it_was() -> None:
    @keeps_grad_mode
    def leave(error: BaseException | None) -> None:
        set_grad_enabled(False)
        if error is not None:
            raise error

    for error in (KeyboardInterrupt(), RuntimeError()):
        with pytest.raises(type(error)):
            leave(error)
        assert torch.is_grad_enabled()
    leave(None)
    assert not torch.is_grad_enabled()  # as its author wished
    torch.set_grad_enabled(True)


def test_the_hooks_of_saved_tensors_are_those_of_the_innermost_block() -> None:
    assert hooks_of_saved_tensors() is None
    pack, unpack = (lambda x: x), (lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            assert hooks_of_saved_tensors() == (pack, unpack)
        assert hooks_of_saved_tensors() != (pack, unpack)
    assert hooks_of_saved_tensors() is None


def test_the_memory_behind_a_transform_holds_its_numbers() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        assert has_transform()
        y = x * 2
        seen.append(memory_behind(y))
        return y.sum()

    x = torch.arange(6.0).view(2, 3)
    torch.func.vmap(torch.func.grad(f))(x)
    assert not has_transform()
    assert torch.equal(seen[0], x * 2)
    assert memory_behind(x) is x


@pytest.mark.parametrize("of", ["one optimizer", "all optimizers"])
def test_hooks_of_steps_are_taken_off_without_their_handles(of: str) -> None:
    told: list[str] = []
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer, other = torch.optim.SGD([parameter], 1.0), torch.optim.SGD([parameter], 1.0)

    def before(*_: Any) -> None:
        told.append(f"before {parameter.item():g}")

    def after(*_: Any) -> None:
        told.append(f"after {parameter.item():g}")

    hooked_one = optimizer if of == "one optimizer" else None
    hook_steps(hooked_one, before, after)
    optimizer.step()
    assert told == ["before 0", "after -1"]
    other.step()
    assert len(told) == (2 if of == "one optimizer" else 4)
    count = len(told)
    for _ in range(2):
        unhook_steps(hooked_one, before, after)
        optimizer.step()
        other.step()
        assert len(told) == count


def test_a_hook_of_a_modules_call_is_taken_off_without_its_handle_and_others_stay() -> None:
    module, told = nn.ReLU(), []
    x = torch.ones(1)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        told.append("ours")

    module.register_forward_pre_hook(lambda *_: told.append("another"))
    module.register_forward_pre_hook(hook, with_kwargs=True)
    module(x)
    for _ in range(2):
        unhook_call(module, hook)
        module(x)
    assert told == ["another", "ours", "another", "another"]
    assert not module._forward_pre_hooks_with_kwargs


def test_a_tensor_on_device_meta_or_of_a_fake_mode_stands_for_numbers_it_does_not_hold() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    found = [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, device="meta"), fake, nn.Parameter(fake)]
    assert [is_stand_in(x) for x in found] == [False, False, True, True, True]


def test_a_gradients_hook_without_a_handle_runs_in_its_turn_among_those_with_one() -> None:
    said: list[str] = []
    x = torch.ones(2, requires_grad=True) * 2
    hook_gradient(x, lambda g: said.append("first"))
    handle = x.register_hook(lambda g: said.append("taken off"))
    x.register_hook(lambda g: said.append("second") or g * 3)
    hook_gradient(x, lambda g: said.append(f"third, of {g[0].item()}"))
    handle.remove()
    (x * 5).sum().backward()
    assert said == ["first", "second", "third, of 15.0"]


def test_a_gradients_hook_without_a_handle_may_come_after_one_and_on_a_leaf() -> None:
    said: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    hook_gradient(leaf, lambda g: said.append("leaf") or g * 2)
    x = leaf * 2
    x.register_hook(lambda g: said.append("x"))
    hook_gradient(x, lambda g: said.append("x again"))
    x.sum().backward()
    assert said == ["x", "x again", "leaf"]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 4.0]


def test_a_call_is_watched_by_modes_transforms_forward_derivatives_and_hooks_of_saved_tensors() -> None:
    seen: list[bool] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_unwatched())
        return x

    x = torch.ones(2)
    ask(x)
    with torch.autograd.graph.save_on_cpu():
        ask(x)
    with torch.autograd.forward_ad.dual_level():
        ask(x)
    torch.func.vmap(ask)(x)
    with torch._subclasses.FakeTensorMode():
        ask(x)
    assert seen == [True, False, False, False, False]


def test_an_operation_that_is_given_functions_shows_itself_to_a_mode_that_asks_for_it() -> None:
    """Its body, which is Python, calls them; without such a mode torch compiles it, as ever."""
    seen = []

    class Asks(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (body := body_of(func)) is None:
                return func(*args, **(kwargs or {}))
            seen.append(func)
            return body(*args, **(kwargs or {}))

    def run() -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))  # type: ignore[no-any-return]

    setattr(Asks, SEES_BODIES, True)
    watch_bodies()
    x = torch.ones(2)
    with Asks():
        assert torch.equal(run(), x + 1)
    assert seen == [torch.ops.higher_order.cond]
    assert torch.equal(run(), x + 1)
    assert len(seen) == 1
    assert body_of(torch.add) is None


def test_a_transform_that_has_ended_shows_what_it_was_given_or_nothing() -> None:
    shown: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        assert after_transforms(x) is x
        assert not is_plain(x)
        shown.append(x)
        return x.square().sum()

    x = torch.ones(2, 3)
    torch.func.grad(function)(x)
    assert not is_plain(shown[0])
    behind = after_transforms(shown[0])
    assert behind is not None
    assert is_plain(behind)
    assert behind.data_ptr() == x.data_ptr()
    torch.func.vmap(function)(x)
    assert after_transforms(shown[1]) is None
    assert after_transforms(x) is x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class CubeByVjp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    vjp = Cube.backward


@pytest.mark.parametrize("cls", [Cube, CubeByVjp])
def test_a_function_like_another_tells_of_its_contexts_and_of_its_backward(cls: Any) -> None:
    seen: list[Any] = []

    class Context:
        @property
        def saved_tensors(self) -> Any:
            return [x * 2 for x in super().saved_tensors]  # type: ignore[misc]

    def backward(own: Any, ctx: Any, gradients: Any) -> Any:
        seen.append(ctx)
        return own(ctx, *gradients)

    made, x = function_like(cls, seen.append, backward, Context), torch.tensor(2.0, requires_grad=True)
    y = made.apply(x)
    assert type(y.grad_fn).__name__ == f"{cls.__name__}Backward"
    y.backward()
    assert x.grad == 3 * 4.0**2
    assert seen == [y.grad_fn, y.grad_fn]
    assert made.__qualname__ == cls.__qualname__
    if cls is CubeByVjp:
        assert torch.equal(torch.func.vmap(made.apply)(torch.arange(3.0)), torch.tensor([0.0, 1.0, 8.0]))


def test_apply_of_a_plain_function_is_torchs_own() -> None:
    class Own(PlainFunction):
        forward, backward = Cube.forward, Cube.backward

    mro = Own.__mro__
    assert "apply" in vars(mro[mro.index(torch.autograd.Function) + 1])  # where torch's own `apply` looks next
    x = torch.tensor(2.0, requires_grad=True)
    Own.apply(x).backward()
    assert x.grad == 12
