"""What `emulate` and a quantised model do around the numbers: threads, memory, errors, copies."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from emulated_cases import FP16, randn
from torch import Tensor, nn

import fpsim
from fpsim import Policy, emulate, quantize, round_to


def test_an_exception_or_an_interrupt_leaves_no_mode_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise self.error

    for error in (RuntimeError("no"), KeyboardInterrupt()):
        model = quantize(nn.Sequential(nn.Linear(3, 3), Fails()), "e2m1fn")
        model[1].error = error
        with pytest.raises(type(error)):
            model(randn(2, 3))
        x = randn(3)
        assert torch.equal(x * 1.1, x.double().mul(1.1).float()) or torch.equal(x * 1.1, torch.mul(x, 1.1))
        assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_two_threads_emulate_different_formats_at_once() -> None:
    layer, x = nn.Linear(16, 16), randn(8, 16)
    models = {name: quantize(layer, name) for name in ("fp16", "e5m2", "e4m3fn")}
    expected = {name: model(x) for name, model in models.items()}
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            if not torch.equal(models[name](x), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_activations_die_with_their_graph() -> None:
    model, x = quantize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), FP16), randn(2, 4)
    alive: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda m, i, out: alive.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        model(x).sum().backward()
        assert alive[0]() is None  # without the garbage collector: no reference cycle holds it
    finally:
        gc.enable()


def test_operands_die_while_the_block_runs_on() -> None:
    gc.collect()
    gc.disable()
    try:
        with emulate(FP16):
            x = randn(4)
            _ = x + x
            alive = weakref.ref(x)
            del x
            assert alive() is None
    finally:
        gc.enable()


def test_emulate_refuses_a_policy_for_modules() -> None:
    with pytest.raises(ValueError, match=r"Use quantize\(model, policy\)"), emulate(Policy(overrides={"a": None})):
        pass


def test_a_stochastic_model_is_reproducible_and_unbiased() -> None:
    model, x = quantize(nn.Linear(8, 8), "e4m3fn", rounding="stochastic"), randn(4, 8)
    torch.manual_seed(1)
    first = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    assert torch.equal(first, round_to(first, "e4m3fn"))


def test_operations_named_float32_are_left_alone() -> None:
    x = randn(3, 5)
    with emulate(Policy(activation="e4m3fn", float32=("softmax",))):
        y = F.softmax(x, -1)
        z = y * 1.0
    assert torch.equal(y, F.softmax(x, -1))
    assert torch.equal(z, round_to(y, "e4m3fn"))


def test_a_copy_of_an_emulated_result_can_be_saved(tmp_path: object) -> None:
    with emulate(FP16):
        y = randn(3) * 2
    path = f"{tmp_path}/y.pt"
    torch.save(y, path)
    assert torch.equal(torch.load(path, weights_only=True), y)
    assert torch.equal(copy.deepcopy(y), y)


class Heads(nn.Module):
    """Scores of two feature maps in one list, as detectors make them: their gradients are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(8, 15, 1)

    def forward(self, *maps: Tensor) -> Tensor:
        return torch.cat([self.scores(x).permute(0, 2, 3, 1).flatten(1) for x in maps], 1)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_gradients_with_holes_are_summed_in_the_same_order_in_fp32(is_recorded: bool) -> None:
    torch.manual_seed(0)
    model = Heads()
    emulated = quantize(model, "fp32")
    maps, weights = (torch.randn(2, 8, 9, 9), torch.randn(2, 8, 5, 5)), torch.randn(2, 15 * (81 + 25))
    with fpsim.record(emulated) if is_recorded else nullcontext():
        for m in (model, emulated):
            (m(*maps) * weights).sum().backward()
    for p, q in zip(model.parameters(), emulated.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
