"""What can be done to a model, in any order, interrupted or not: after it all nothing is left."""

from __future__ import annotations

import copy
import io
from contextlib import AbstractContextManager
from typing import Any

import torch
from fuzzing import MINUTES
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from leftovers import Net, X, left_on, loss_of
from torch import nn

import fpsim
from fpsim.models.installed import emulated_forwards

POLICIES = ("fp16", "e4m3fn", "mxfp8_e4m3")
STEPS: dict[str, tuple[torch.Tensor, ...]] = {}


def step_of(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of a step; the model's own gradients stay as they are."""
    out = model(X)
    return (out.detach(), *torch.autograd.grad(out.square().mean(), [*model.parameters()]))


def expected(policy: str | None) -> tuple[torch.Tensor, ...]:
    """Those of a new model that nothing was done to but to be quantised."""
    key = str(policy)
    if key not in STEPS:
        STEPS[key] = step_of(Net() if policy is None else fpsim.quantize(Net(), policy))
    return STEPS[key]


class Interrupt:
    """Raised in the forward of the layer in the middle."""

    def __call__(self) -> None:
        raise KeyboardInterrupt


class AnyOrder(RuleBasedStateMachine):
    """Models, each with its policy, its watches and its recording."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[tuple[nn.Module, str | None]] = []
        self.watches: list[tuple[nn.Module, fpsim.Watch]] = []
        self.recordings: list[tuple[nn.Module, AbstractContextManager[Any]]] = []

    def pick(self, i: int) -> tuple[nn.Module, str | None]:
        return self.models[i % len(self.models)]

    def add(self, model: nn.Module, policy: str | None) -> None:
        self.models = [*self.models[-3:], (model, policy)]

    def replace(self, model: nn.Module, policy: str | None) -> None:
        self.models = [(m, policy if m is model else p) for m, p in self.models]

    def is_recorded(self, model: nn.Module) -> bool:
        return any(m is model for m, _ in self.recordings)

    @initialize()
    def begin(self) -> None:
        self.add(Net(), None)

    @rule(i=st.integers(0, 3), every=st.sampled_from([1, 2]))
    def watch(self, i: int, every: int) -> None:
        model, policy = self.pick(i)
        if policy is None:
            self.watches.append((model, fpsim.watch(model, ["fp16"], every=every)))

    @rule(i=st.integers(0, 9))
    @precondition(lambda self: self.watches)
    def detach(self, i: int) -> None:
        self.watches.pop(i % len(self.watches))[1].detach()

    @rule(i=st.integers(0, 9))
    @precondition(lambda self: self.watches)
    def lose(self, i: int) -> None:
        del self.watches[i % len(self.watches)]

    @rule(i=st.integers(0, 3))
    def record(self, i: int) -> None:
        model, policy = self.pick(i)
        if policy is not None and not self.is_recorded(model):
            block = fpsim.record(model)
            block.__enter__()
            self.recordings.append((model, block))

    @rule(i=st.integers(0, 9))
    @precondition(lambda self: self.recordings)
    def leave_recording(self, i: int) -> None:
        self.recordings.pop(i % len(self.recordings))[1].__exit__(None, None, None)

    @rule(i=st.integers(0, 3), policy=st.sampled_from(POLICIES), inplace=st.booleans())
    def quantize(self, i: int, policy: str, inplace: bool) -> None:
        model, known = self.pick(i)
        if known is not None:
            return
        quantised = fpsim.quantize(model, policy, inplace=inplace)
        if inplace:
            self.replace(model, policy)
        else:
            self.add(quantised, policy)

    @rule(i=st.integers(0, 3), policy=st.sampled_from(POLICIES))
    def set_policy(self, i: int, policy: str) -> None:
        model, known = self.pick(i)
        if known is not None:
            fpsim.set_policy(model, policy)
            self.replace(model, policy)

    @rule(i=st.integers(0, 3), inplace=st.booleans())
    def dequantize(self, i: int, inplace: bool) -> None:
        model, known = self.pick(i)
        if known is None or (inplace and self.is_recorded(model)):
            return
        plain = fpsim.dequantize(model, inplace=inplace)
        if inplace:
            self.replace(model, None)
        else:
            self.add(plain, None)

    @rule(i=st.integers(0, 3))
    def deepcopy(self, i: int) -> None:
        model, policy = self.pick(i)
        self.add(copy.deepcopy(model), policy)

    @rule(i=st.integers(0, 3))
    def save_and_load(self, i: int) -> None:
        model, policy = self.pick(i)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        self.add(torch.load(file, weights_only=False), policy)

    @rule(i=st.integers(0, 3), kind=st.sampled_from(["step", "watch", "diagnose", "compare", "emulate"]))
    def interrupt(self, i: int, kind: str) -> None:
        model, _ = self.pick(i)
        model.middle.then = Interrupt()  # type: ignore[union-attr, assignment]
        try:
            if kind == "diagnose" and not self.is_recorded(model):
                fpsim.diagnose(model, lambda: loss_of(model).backward())
            elif kind == "compare":
                fpsim.compare(model, None, "e5m2", X)
            elif kind == "emulate":
                with fpsim.emulate("e5m2"):
                    model(X)
            else:
                model(X)
            raise AssertionError("was not interrupted")
        except KeyboardInterrupt:
            pass
        finally:
            model.middle.then = int  # type: ignore[union-attr, assignment]

    @rule(i=st.integers(0, 3))
    def diagnose(self, i: int) -> None:
        model, _ = self.pick(i)
        if not self.is_recorded(model):
            assert fpsim.diagnose(model, lambda: loss_of(model).backward()).cause is None

    @rule(i=st.integers(0, 3))
    def compare(self, i: int) -> None:
        model, _ = self.pick(i)
        assert fpsim.compare(model, None, None, X).begins() is None

    @rule(i=st.integers(0, 3))
    def step(self, i: int) -> None:
        model, policy = self.pick(i)
        assert all(torch.equal(a, b) for a, b in zip(step_of(model), expected(policy), strict=True))

    @invariant()
    def no_mode_is_left(self) -> None:
        assert left_on() == []

    def teardown(self) -> None:
        for _, watching in self.watches:
            watching.detach()
        for _, block in self.recordings:
            block.__exit__(None, None, None)
        for model, policy in self.models:
            assert left_on(model) == []
            assert all(torch.equal(a, b) for a, b in zip(step_of(model), expected(policy), strict=True))
            plain = fpsim.dequantize(model, inplace=True) if any(True for _ in emulated_forwards(model)) else model
            assert all(torch.equal(a, b) for a, b in zip(step_of(plain), expected(None), strict=True))
            assert left_on(plain) == []


AnyOrder.TestCase.settings = settings(
    max_examples=int(400 * MINUTES) or 20,
    stateful_step_count=25,
    derandomize=not MINUTES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_any_order = AnyOrder.TestCase
