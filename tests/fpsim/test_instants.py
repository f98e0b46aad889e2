"""Blocks that are interrupted at any instant, while the traceback lives on as in a notebook, leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import tiers
import torch
from instants import interrupted
from leftovers import Net, X, left_on
from torch import nn

import ada_loss
import fpsim

MODEL = fpsim.quantize(Net(), "fp16")
ONE = torch.tensor(1.0)
BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "emulate": lambda: fpsim.emulate("fp16"),
    "record": lambda: fpsim.record(MODEL),
    "noise_of_torch": fpsim.noise_of_torch,
}


@tiers.parametrize("name", BLOCKS, keep={"emulate", "noise_of_torch"})  # a recording has many instants
def test_ctrl_c_at_any_instant_of_a_block_leaves_nothing_though_its_traceback_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        with BLOCKS[name]():
            pass

    monkeypatch.setattr("sys.unraisablehook", lambda _: None)  # of what runs while something is forgotten
    run()
    instants, _ = interrupted(run, 0)
    assert instants > 20
    kept = []
    for at in range(1, instants + 1):
        kept.append(interrupted(run, at)[1])
        assert left_on(MODEL) == [], f"at {at} of {instants}"
    assert len([error for error in kept if error is not None]) > instants // 2
    run()


# Those that begin when they are made: before the block has one, it is no different from one that is kept on purpose.
MADE: dict[str, tuple[bool, Callable[[nn.Module], AbstractContextManager[Any]]]] = {
    "watch": (False, lambda model: fpsim.watch(model, ["fp16"], every=1)),
    "watch with an optimizer": (False, lambda model: fpsim.watch(model, ["fp16"], every=1, optimizer=sgd(model))),
    "AdaLossScaled": (True, lambda model: ada_loss.AdaLossScaled(model)),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.full
@tiers.parametrize("name", MADE, keep=tiers.every(3))
def test_what_is_made_for_a_block_ends_with_it_and_leaves_nothing_on_torch_though_the_traceback_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    is_quantised, make = MADE[name]
    begun: list[int] = []

    def new() -> nn.Module:
        return fpsim.quantize(Net(), "fp16") if is_quantised else Net()

    def run() -> None:
        begun.clear()
        with make(model):
            begun.append(1)

    model = new()
    run()
    instants, _ = interrupted(run, 0)
    kept, inside = [], 0
    for at in range(1, instants + 1):
        kept.append(interrupted(run, at)[1])
        assert left_on() == [], f"at {at} of {instants}"
        if begun:
            inside += 1
            assert left_on(model) == [], f"at {at} of {instants}"
        else:
            if is_quantised:
                ada_loss.AdaLossScaled.detach_from(model)
                assert left_on(model) == [], f"at {at} of {instants}"
            model = new()
    assert len([error for error in kept if error is not None]) > instants // 2
    assert inside > 10  # 13 at the least: comprehensions are no calls since Python 3.12


def test_an_interrupted_watch_that_nobody_holds_leaves_no_hook_on_its_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    model = Net()
    optimizer = sgd(model)

    def run() -> None:
        fpsim.watch(model, ["fp16"], every=1, optimizer=optimizer).detach()

    def left() -> list[Any]:
        return [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks, *left_on(model)]

    run()
    instants, _ = interrupted(run, 0)
    assert instants > 100
    for at in range(1, instants + 1):
        interrupted(run, at)
        if left():
            gc.collect()
        assert left() == [], f"at {at} of {instants}"


def test_an_emulation_ends_where_a_stack_of_blocks_leaves_it_and_may_be_entered_again() -> None:
    with contextlib.ExitStack() as stack:
        block = fpsim.emulate("e4m3fn")
        stack.enter_context(block)
        assert (ONE / 3).item() == 0.34375  # 11 / 32, the nearest of e4m3fn
        with pytest.raises(RuntimeError, match="is running already"):
            block.__enter__()
    assert left_on() == []
    with block:
        assert hasattr(block, "__exit__")  # a look at it ends nothing
        assert (ONE / 3).item() == 0.34375
    assert left_on() == []


def test_a_block_that_is_left_before_one_inside_of_it_is_told() -> None:
    outer, inner = fpsim.emulate("e4m3fn"), fpsim.emulate("e5m2")
    outer.__enter__()
    inner.__enter__()
    assert (ONE / 3).item() == 0.3125  # 5 / 16, the nearest of e5m2
    with pytest.warns(UserWarning, match="was left before one that began inside of it"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert left_on() == []
    assert (ONE / 3).view(torch.int32).item() == 0x3EAAAAAB


def test_an_emulation_decorates_a_function_that_calls_itself() -> None:
    @fpsim.emulate("e4m3fn")
    def third(depth: int) -> float:
        """One third, in fact."""
        found = (ONE / 3).item()
        return third(depth - 1) if depth else found

    assert third(2) == 0.34375
    assert third.__doc__ == "One third, in fact."
    assert left_on() == []


def test_what_a_block_raises_as_it_begins_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="Unknown format"), fpsim.emulate("fp99"):
        pass
    with fpsim.record(MODEL), pytest.raises(ValueError, match="being recorded already"), fpsim.record(MODEL):
        pass
    assert left_on(MODEL) == []
    assert MODEL(X).shape == (4, 3)
